"""Brings a connection from nothing to the point where transactions can start. aiosmtplib lives here only.

aiosmtplib reads the greeting and does EHLO, HELO and STARTTLS on a socket that we opened; then our
own `Wire` takes the transport over. What of aiosmtplib is avoided, and why:

- Its opportunistic STARTTLS verifies certificates, fails hard and leaves the socket open when the
  handshake breaks, so it is told `start_tls=False` and the policy is applied here.
- It connects by name (getaddrinfo in a thread, no MX order), so it is given `sock`.
- After cancellation or an error it may hold its lock and the socket, so each object serves one
  connection and whatever is not handed over is aborted in `finally`.
- MAIL, RCPT and DATA reparse addresses, want the whole message and one reply at a time: not used.

A host that will not talk is `HostTrouble` with a transient reply, also when it greets with 5yz
(Postfix: smtp_skip_5xx_greeting): that is about the host, not about the mail, and another
host or another day may do.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass, field
from typing import cast

import aiosmtplib

from zonerelay.config.models import DeliverySettings, TlsMode
from zonerelay.delivery.slots import Slot
from zonerelay.delivery.sources import HostTrouble, display_address, open_socket
from zonerelay.delivery.tls import TlsPolicy
from zonerelay.delivery.way import Terms
from zonerelay.delivery.wire import Wire
from zonerelay.model.reply import Reply
from zonerelay.routing.nexthop import MxHost
from zonerelay.smtp.extensions import Capabilities, parse_ehlo
from zonerelay.smtp.replies import make_reply, printable
from zonerelay.smtp.transaction import Peer


class TlsTrouble(HostTrouble):
    """The host talks, but not with the TLS that was asked for."""


@dataclass(slots=True, eq=False)
class Session:
    """A connection ready for transactions, and what is known about the other end."""

    wire: Wire
    peer: Peer
    capabilities: Capabilities
    terms: Terms
    slot: Slot
    transactions: int = 0
    idle_until: float = 0.0
    max_transactions: int = field(init=False)
    """What the zone and the peer (MAILMAX, RFC 9422) allow."""
    domains: set[str] = field(default_factory=set)
    """Of the recipients so far; kept only where the peer limits them."""
    chunking: bool = False
    """BDAT is used instead of DATA."""
    bdat_taken: bool = False
    """The peer has taken a BDAT on this connection."""

    def __post_init__(self) -> None:
        most = self.terms.limits.max_messages_per_connection
        self.max_transactions = min(most, self.capabilities.limits.mailmax or most)


class SessionOpener:
    """Opens sessions. Raises HostTrouble; whatever it raises, no socket stays open."""

    def __init__(self, settings: DeliverySettings, tls: TlsPolicy, *, hostname: str) -> None:
        self._settings = settings
        self._tls = tls
        self._hostname = hostname

    async def open(self, terms: Terms, host: MxHost, ip: str, slot: Slot) -> Session:
        """The session takes the slot and releases it with its socket; if this raises, it is the caller's."""
        demand = terms.tls
        may_fall_back = demand.mode is TlsMode.OPPORTUNISTIC
        key = f"{host.name}:{host.port}"
        mode = TlsMode.NONE if may_fall_back and self._tls.is_broken(key) else demand.mode
        try:
            return await self._open(terms, host, ip, mode, slot)
        except TlsTrouble:
            if not may_fall_back:
                raise
        self._tls.remember_broken(key)
        return await self._open(terms, host, ip, TlsMode.NONE, slot)

    async def _open(self, terms: Terms, host: MxHost, ip: str, mode: TlsMode, slot: Slot) -> Session:
        zone = terms.zone
        timeout = self._settings.connect_timeout
        sock = await open_socket(zone, host.name, ip, host.port, timeout=timeout, source=terms.way.source)
        greeter = _Greeter(sock, self._settings, host, ip, ehlo_name=terms.ehlo_name(self._hostname))
        try:
            capabilities, tls_version = await greeter.run(mode, self._tls)
            wire = Wire(greeter.open_transport(), asyncio.get_running_loop(), slot.release)
        except BaseException:
            greeter.abort()
            raise
        peer = Peer(host.name, greeter.address, tls_version)
        return Session(wire, peer, capabilities, terms, slot)


class _Greeter:
    """From a connected socket, which it owns, to the last EHLO; aiosmtplib's errors become HostTrouble."""

    def __init__(
        self, sock: socket.socket, settings: DeliverySettings, host: MxHost, ip: str, *, ehlo_name: str
    ) -> None:
        self.address = display_address(ip, host.port)
        self._sock = sock
        self._settings = settings
        self._client = aiosmtplib.SMTP(
            hostname=host.name, local_hostname=ehlo_name, sock=sock, start_tls=False
        )
        self._transport: asyncio.Transport | None = None

    async def run(self, mode: TlsMode, tls: TlsPolicy) -> tuple[Capabilities, str]:
        """What the server offers and the TLS version, `""` in clear text."""
        try:
            await self._client.connect(timeout=self._settings.greeting_timeout)
        except (aiosmtplib.SMTPException, OSError) as error:
            raise self._trouble("the greeting", error) from error
        self._hold_transport()
        capabilities = await self._introduce()
        if mode is TlsMode.NONE or (mode is TlsMode.OPPORTUNISTIC and not capabilities.starttls):
            return capabilities, ""
        if not capabilities.starttls:
            reply = Reply(451, "7.4", f"{self.address} does not offer STARTTLS")
            raise TlsTrouble(reply, address=self.address)
        if not await self._start_tls(tls.context(mode), mode):
            return capabilities, ""
        return await self._introduce_again()

    def open_transport(self) -> asyncio.Transport:
        """The transport, to be taken over. Raises HostTrouble if the peer has left in the meantime."""
        if self._transport is None or self._transport.is_closing():
            raise HostTrouble(
                Reply(451, "4.2", f"{self.address} closed the connection"), address=self.address
            )
        return self._transport

    def abort(self) -> None:
        self._client.close()
        if self._transport is not None:
            self._transport.abort()
        else:
            self._sock.close()

    async def _introduce(self) -> Capabilities:
        """EHLO, or HELO with a server that does not know EHLO (RFC 5321 3.2)."""
        timeout = self._settings.ehlo_timeout
        try:
            try:
                return parse_ehlo((await self._client.ehlo(timeout=timeout)).message)
            except aiosmtplib.SMTPHeloError as error:
                if error.code < 500 or not self._client.is_connected:
                    raise
            await self._client.helo(timeout=timeout)
        except (aiosmtplib.SMTPException, OSError) as error:
            raise self._trouble("EHLO", error) from error
        return Capabilities()

    async def _start_tls(self, context: ssl.SSLContext, mode: TlsMode) -> bool:
        """False when the server declined in good order and clear text is allowed to go on."""
        timeout = self._settings.starttls_timeout
        try:
            await self._client.starttls(tls_context=context, timeout=timeout)
        except aiosmtplib.SMTPResponseException as error:
            if mode is TlsMode.OPPORTUNISTIC and self._client.is_connected:
                return False
            raise self._tls_trouble(error) from error
        except (aiosmtplib.SMTPException, OSError) as error:
            raise self._tls_trouble(error) from error
        self._hold_transport()
        return True

    async def _introduce_again(self) -> tuple[Capabilities, str]:
        # With TLS 1.3 the peer may refuse after our side of the handshake is done, so a
        # connection that breaks here is a failed handshake too.
        try:
            reply = await self._client.ehlo(timeout=self._settings.ehlo_timeout)
        except (aiosmtplib.SMTPException, OSError) as error:
            raise self._tls_trouble(error) from error
        version = self.open_transport().get_extra_info("ssl_object").version()
        return parse_ehlo(reply.message), version

    def _hold_transport(self) -> None:
        # aiosmtplib types it as BaseTransport; on a TCP socket it is a Transport, with TLS and without.
        self._transport = cast(asyncio.Transport, self._client.transport)

    def _tls_trouble(self, error: Exception) -> TlsTrouble:
        reply = Reply(451, "7.5", f"STARTTLS with {self.address} failed: {printable(str(error))}")
        return TlsTrouble(reply, address=self.address)

    def _trouble(self, phase: str, error: Exception) -> HostTrouble:
        """Always transient: it is about the host, and no mail has been mentioned yet."""
        said = None
        if isinstance(error, aiosmtplib.SMTPResponseException) and 200 <= error.code <= 599:
            said = make_reply(error.code, [printable(line) for line in error.message.split("\n")])
            detail, text = said.detail or "3.0", f"{self.address} refused us at {phase}: {said}"
        elif isinstance(error, TimeoutError):
            detail, text = "4.2", f"timed out waiting for the reply of {self.address} to {phase}"
        else:
            detail, text = "4.2", f"{self.address} failed at {phase}: {printable(str(error))}"
        return HostTrouble(Reply(451, detail, text), address=self.address, said=said)
