"""Prepares a connection to a host's address for transactions. Only this module uses aiosmtplib.

aiosmtplib's `SMTPProtocol` waits for the greeting and sends EHLO, HELO, STARTTLS and AUTH on a socket that we
opened. Then `ClientProtocol` takes over the transport. The relay avoids these parts of aiosmtplib:

- Its parser of replies ends at a line without a code, and its error's text is a Python tuple (`_Reader`).
- Its `SMTP` connects by name (getaddrinfo in a thread, no MX order). Its opportunistic STARTTLS verifies
  certificates, fails hard and leaves the socket open after a broken handshake.
- After cancellation or an error it may keep its lock and the socket. So each object serves one connection,
  and a connection that is not passed on is aborted in `finally`.
- Its MAIL, RCPT and DATA parse addresses again and need the whole message and one reply at a time, so they
  are not used.

A host that refuses to serve is `HostFailure` with a transient reply, including a greeting with 5yz (Postfix:
smtp_skip_5xx_greeting): the refusal is about the host, not about the mail, and another host or a later
attempt may succeed.

`ClientProtocol` reads reply lines and writes bytes of transactions. It is made for thousands of transactions
on one connection: no task, no timeout context, at most one future per wait, and one timer for the life of the
connection, which is reused for each phase.

Promises: a reply that arrived before the connection broke is still returned. Every wait ends by its deadline.
The write limit and the reply parser's limits bound memory. Bytes that arrive on an idle connection (`idle`)
close it, because the next command would be paired with the wrong reply.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import StrEnum
from functools import partial
from typing import cast

import aiosmtplib
import msgspec
from aiosmtplib.protocol import SMTPProtocol

from zonerelay.config.endpoints import join_port
from zonerelay.config.settings import DeliverySettings
from zonerelay.delivery.auth.logins import Login, Logins
from zonerelay.delivery.peer import HostFailure, PoolKey, Terms, UntrustedCertificateError, open_socket
from zonerelay.delivery.tls import plan as tls_plan
from zonerelay.delivery.tls.plan import TlsPolicy, TlsRequirements
from zonerelay.model.reply import Reply
from zonerelay.routing.destinations.route import DestinationKey, MxHost, SiteKey
from zonerelay.smtp.client.extensions import Capabilities, parse_ehlo
from zonerelay.smtp.client.replies import PeerError, ReplyParser, make_reply, printable
from zonerelay.smtp.client.transaction import Peer
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.events.transcript import SessionRecorder

WRITE_LIMIT = 256 * 1024
"""Bytes queued in this process before the writer waits."""


class ConnectionLostError(Exception):
    """The connection is lost, or a reply was not received before its deadline, so that the connection cannot
    be used any more. The message says which.
    """


class ClientProtocol(asyncio.Protocol):
    """The asyncio protocol of an open outgoing connection. Calls `on_lost` exactly once, when the socket is
    gone.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, on_lost: Callable[[], None]
    ) -> None:
        self.lost = False
        self.idle = False
        self.record: SessionRecorder | None = None
        """The record of a transcript that an operator has started."""
        self.on_surplus: Callable[[], None] | None = None
        """Called when unexpected bytes other than a 421 arrive on the idle connection."""
        self._transport = transport
        self._loop = loop
        self._on_lost = on_lost
        self._parser = parser = ReplyParser()
        self._feed = parser.feed
        self.next_reply = parser.next_reply
        """Returns a reply that has arrived, or None. Raises PeerError."""
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0
        # The handle is not queried for its time: uvloop's fails with less than a millisecond left.
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        transport.set_write_buffer_limits(high=WRITE_LIMIT)
        transport.set_protocol(self)

    # Callbacks of the transport.

    def data_received(self, data: bytes) -> None:
        if self.record is not None:
            self.record.replies(data)
        self._feed(data)
        if self.idle and self._parser.has_input:
            self.abort()
            if self.on_surplus is not None and not data.startswith(b"421"):
                self.on_surplus()
        self._wake()

    def eof_received(self) -> None:
        # No reply can arrive any more, so nothing that is queued can succeed.
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.record is not None:
            self.record.note("the connection was closed")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()
        self._on_lost()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake()

    # Methods for a transaction.

    @property
    def usable(self) -> bool:
        """Whether a new transaction may start: the connection is open and no unexpected byte has arrived."""
        return not (self.lost or self._parser.has_input or self._transport.is_closing())

    @property
    def skipped(self) -> str:
        """The last line from the peer that was skipped because it had no reply code, or `""`."""
        return self._parser.skipped

    @property
    def heard(self) -> bool:
        """Whether the peer has sent bytes that have not been read yet."""
        return self._parser.has_input

    @property
    def time_left(self) -> float:
        """The number of seconds until the current wait times out."""
        return max(self._deadline - self._loop.time(), 0.0)

    def write(self, data: bytes) -> None:
        if self._transport.is_closing():
            raise ConnectionLostError("connection lost")
        if self.record is not None:
            self.record.commands(data)
        self._transport.write(data)

    async def reply(self, timeout: float) -> Reply:
        """Wait for the next reply after `next_reply` returned none. `timeout` (seconds) covers the whole
        reply.

        Raise ConnectionLostError or PeerError.
        """
        if not self.lost:
            self._start_clock(timeout)
        while not self.lost:
            await self._change()
            reply = self.next_reply()
            if reply is not None:
                return reply
        raise ConnectionLostError("connection lost")

    async def drain(self, timeout: float) -> None:
        """Wait while the peer reads more slowly than the relay writes. Return when it catches up or sends a
        reply.

        Raise ConnectionLostError.
        """
        if self._paused:
            self._start_clock(timeout)
        while self._paused and not self.lost and not self._parser.has_input:
            await self._change()
        if self.lost and not self._parser.has_input:
            raise ConnectionLostError("connection lost")

    async def flush(self, timeout: float) -> None:
        """Wait like `drain` until all data is written to the socket."""
        if not self._transport.get_write_buffer_size():
            return  # with a limit of 0, TLS transports would pause us and never resume
        self._transport.set_write_buffer_limits(high=0)
        try:
            await self.drain(timeout)
        finally:
            self._transport.set_write_buffer_limits(high=WRITE_LIMIT)

    def quit(self, timeout: float) -> None:
        """Send QUIT and close without waiting for the 221, as Postfix does. `timeout` limits the closing, in
        seconds.
        """
        if not self._transport.is_closing():
            self.idle = False
            if self.record is not None:
                self.record.command(b"QUIT")
            self._transport.write(b"QUIT\r\n")
            self._transport.close()
            if self._timer is not None:
                self._timer.cancel()
            # TLS and a full socket both wait for the peer while closing.
            self._timer = self._loop.call_later(timeout, self._transport.abort)

    def abort(self) -> None:
        """Close the connection immediately and discard queued bytes. A body that must not be completed ends
        here.
        """
        self._transport.abort()

    # Waiting.

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def _change(self) -> asyncio.Future[None]:
        """Return a future that is done after the next event on the connection. Raise ConnectionLostError when
        the time limit has expired.
        """
        if self._timer is None:
            raise ConnectionLostError("timed out waiting")
        waiter = self._waiter = self._loop.create_future()
        return waiter

    def _start_clock(self, timeout: float) -> None:
        deadline = self._deadline = self._loop.time() + timeout
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._loop.time() < self._deadline:
            self._timer_at = self._deadline
            self._timer = self._loop.call_at(self._deadline, self._on_timer)
        else:
            self._wake()


class Slot(msgspec.Struct, eq=False):
    """The right to have one open connection, within the limits of its zone and its destination. `release` may
    be called more than once. `record` is the transcript of the connection, if any.
    """

    zone: str
    site: SiteKey
    line: DestinationKey
    on_release: "Callable[[Slot], None]"
    released: bool = False
    record: SessionRecorder | None = None

    def release(self) -> None:
        if not self.released:
            self.released = True
            self.on_release(self)


class OpeningStep(StrEnum):
    """The phases of opening a connection, as named in errors."""

    GREETING = "the greeting"
    EHLO = "EHLO"
    AUTH = "AUTH"


class TlsFailure(HostFailure):
    """The host does not provide the required TLS. `unanswered` is true if it did not answer the first message
    of the handshake, or closed the connection.
    """

    unanswered = False


IN_CLEAR = tls_plan.PeerVerification("none")


@dataclass(slots=True, eq=False)
class OutgoingSession:
    """A connection that is ready for transactions, with the extensions and the identity of the peer."""

    protocol: ClientProtocol
    peer: Peer
    capabilities: Capabilities
    terms: Terms
    slot: Slot
    transactions: int = 0
    delivered: int = 0
    """Recipients for whom the peer has accepted a message on this connection."""
    idle_until: float = 0.0
    expects_more: bool = False
    """Whether mail for the idle connection is likely to come at once."""
    pool_key: PoolKey = field(init=False)
    """The key under which the pool keeps the connection."""
    max_transactions: int = field(init=False)
    """The number that the zone and the peer (MAILMAX, RFC 9422; `session_limits.py`) allow."""
    domains: set[str] = field(default_factory=set)
    """Domains of the recipients so far, kept only if the peer limits them."""
    chunking: bool = False
    """Whether BDAT is used instead of DATA."""
    bdat_taken: bool = False
    """Whether the peer has accepted a BDAT on this connection."""
    has_taken_mail: bool = False
    """Whether the peer has accepted a message lately, on this connection or another."""
    proof: tls_plan.PeerVerification = IN_CLEAR
    """The security of the connection: none, encrypted (an unknown peer), verified, dane or mta-sts."""
    skipped: str = ""
    """A line without a code among the replies before the first transaction."""

    def __post_init__(self) -> None:
        self.pool_key = self.terms.pool_key
        most = self.terms.limits.max_messages_per_connection
        self.max_transactions = min(most, self.capabilities.limits.mailmax or most)

    def suits(self, terms: Terms) -> bool:
        """Return whether the connection may carry mail with these terms, whose pool key is the same."""
        only_for = self.proof.only_for
        return self.terms.cover(terms) and (not only_for or terms.route.name == only_for)


_OpenAttempt = Callable[[TlsRequirements], Awaitable[OutgoingSession]]
"""Opens a connection to one address under these requirements. Raises HostFailure."""


@dataclass(frozen=True, slots=True)
class SessionOpener:
    """Opens outgoing SMTP connections, including TLS and login. HostFailure is raised on failure. After any
    exception no socket stays open.
    """

    settings: DeliverySettings
    tls: TlsPolicy
    _: KW_ONLY
    hostname: str
    events: Events
    logins: Logins

    async def open(
        self, terms: Terms, host: MxHost, ip: str, slot: Slot, plan: TlsRequirements
    ) -> OutgoingSession:
        """Open a connection to a host's address and return its session, which owns the slot and releases it
        when the socket is closed. After an exception the caller owns it.
        """

        def open_with(login: Login | None) -> Awaitable[OutgoingSession]:
            return self._open_as_planned(
                terms, host, plan, partial(self._open, terms, host, ip, slot, login=login)
            )

        if terms.key.credential is None:
            return await open_with(None)
        return await self.logins.opening(terms, open_with)

    async def _open_as_planned(
        self, terms: Terms, host: MxHost, plan: TlsRequirements, attempt: _OpenAttempt
    ) -> OutgoingSession:
        key = f"{host.name}:{host.port}"
        zone, why = terms.zone.name, ""
        if plan.may_fall_back and key in self.tls.broken:
            session = await attempt(plan.in_clear())
        else:
            try:
                session = await self._open_asking_twice(key, plan, attempt)
            except TlsFailure as failure:
                if not plan.may_fall_back:
                    self.events.outbound_tls(zone, plan.level, "failed")
                    raise
                why = failure.reply.text
                self.tls.broken.add(key)
                session = await attempt(plan.in_clear())
        if plan.encrypts:
            result = "ok" if session.proof.security != IN_CLEAR.security else "fallback"
            self.events.outbound_tls(zone, plan.level, result, host=host.name, why=why)
        return session

    async def _open_asking_twice(
        self, key: str, plan: TlsRequirements, attempt: _OpenAttempt
    ) -> OutgoingSession:
        """Open a session, with a second, smaller TLS handshake if the host does not answer the first."""
        try:
            return await attempt(plan)
        except TlsFailure as failure:
            if not failure.unanswered or key in self.tls.small:
                raise
            self.tls.small.add(key)
            try:
                return await attempt(plan)
            except HostFailure:
                self.tls.small.discard(key)
                raise failure from None

    async def _open(
        self, terms: Terms, host: MxHost, ip: str, slot: Slot, plan: TlsRequirements, *, login: Login | None
    ) -> OutgoingSession:
        zone, record = terms.zone, slot.record
        timeout = self.settings.connect_timeout
        try:
            sock = await open_socket(zone, host.name, ip, host.port, timeout=timeout, source=terms.key.source)
        except HostFailure as failure:
            if record is not None:
                record.note(failure.reply.text)
            raise
        ehlo_name = terms.ehlo_name(self.hostname)
        greeter = _Greeter(
            sock, host, ip, plan, ehlo_name=ehlo_name, settings=self.settings, tls=self.tls, record=record
        )
        try:
            capabilities = await greeter.run()
            if login is not None:
                await login.run(greeter, capabilities, security=greeter.proof.security)
            protocol = ClientProtocol(greeter.hand_over(), asyncio.get_running_loop(), slot.release)
            protocol.record = record
        except BaseException:
            greeter.abort()
            raise
        peer = Peer(host.name, greeter.address, greeter.tls_words)
        session = OutgoingSession(protocol, peer, capabilities, terms, slot, proof=greeter.proof)
        session.skipped = greeter.skipped
        return session


class _Reader(SMTPProtocol):
    """An aiosmtplib protocol that uses this project's reply parser, which skips lines without a code, and
    records a transcript. Unexpected bytes are kept, and then no further command is sent.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, record: SessionRecorder | None) -> None:
        super().__init__(loop)
        self.parser = ReplyParser()
        self._record = record
        self._is_challenged = False
        """Whether the next line answers a challenge of AUTH."""

    def write(self, data: bytes) -> None:
        if self._record is not None:
            self._record.command(data.removesuffix(b"\r\n"), secret=self._is_challenged)
        super().write(data)

    def data_received(self, data: bytes) -> None:
        if self._record is not None:
            self._record.replies(data)
        self.parser.feed(data)
        waiter = self._response_waiter
        if waiter is None or waiter.done() or not self._response_pending:
            return
        try:
            reply = self.parser.next_reply()
        except PeerError as error:
            self._set_response_exception(waiter, aiosmtplib.SMTPResponseException(-1, str(error)))
        else:
            if reply is not None:
                self._is_challenged = reply.code == 334
                status = f"{reply.status} " if reply.detail else ""
                waiter.set_result(aiosmtplib.SMTPResponse(reply.code, status + reply.text))

    async def execute_command(self, *args: bytes, timeout: float | None = None) -> aiosmtplib.SMTPResponse:
        self._check_step()
        return await super().execute_command(*args, timeout=timeout)

    async def start_tls(
        self, tls_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> aiosmtplib.SMTPResponse:
        self._check_step()
        response = await super().start_tls(tls_context, server_hostname, timeout)
        # Bytes that arrived with the 220 were sent in clear text (RFC 3207 4.2).
        self.parser = ReplyParser()
        return response

    def _check_step(self) -> None:
        if self.parser.has_input:
            raise aiosmtplib.SMTPResponseException(-1, "an unsolicited reply")


@dataclass(eq=False, repr=False)
class _Greeter:
    """Performs the greeting, EHLO, STARTTLS and login on a connected socket, and owns it until `hand_over`.

    aiosmtplib's errors become HostFailure.
    """

    sock: socket.socket
    host: MxHost
    ip: InitVar[str]
    plan: TlsRequirements
    _: KW_ONLY
    ehlo_name: str
    settings: DeliverySettings
    tls: TlsPolicy
    record: SessionRecorder | None

    def __post_init__(self, ip: str) -> None:
        self.address = join_port(ip, self.host.port)
        self.proof = IN_CLEAR
        self.tls_words = ""
        """The TLS version, with the security of the connection if the plan required more: "TLSv1.3 dane"."""
        self.who = self.address if self.host.literal else f"{self.host.name} ({self.address})"
        self._reader = _Reader(asyncio.get_running_loop(), self.record)
        self._transport: asyncio.Transport | None = None

    async def run(self) -> Capabilities:
        """Read the greeting, send EHLO, start TLS as planned, and return the server's extensions. Raise
        HostFailure.
        """
        await self._connect()
        if self.plan.on_connect:
            self._prove()
            capabilities = await self._introduce()
            self._keep_session()
            return capabilities
        capabilities = await self._introduce()
        if not self.plan.encrypts:
            return capabilities
        if not capabilities.starttls:
            if self.plan.may_fall_back:
                return capabilities
            text = f"{self.who} does not offer STARTTLS, and {self.plan.why}"
            raise TlsFailure(Reply(451, "7.4", text), address=self.address)
        if not await self._start_tls():
            return capabilities
        self._prove()
        return await self._introduce_again()

    async def _connect(self) -> None:
        plan, timeout = self.plan, self.settings.greeting_timeout
        loop = asyncio.get_running_loop()
        reader = self._reader
        context = self._context() if plan.on_connect else None
        try:
            async with asyncio.timeout(timeout):
                await loop.create_connection(
                    lambda: reader,
                    sock=self.sock,
                    ssl=context,
                    server_hostname=plan.name if context is not None else None,
                    ssl_handshake_timeout=timeout if context is not None else None,
                )
            self._hold_transport()
            greeting = await reader.read_response(timeout=timeout)
            if greeting.code != 220:
                raise aiosmtplib.SMTPConnectResponseError(greeting.code, greeting.message)
        except (aiosmtplib.SMTPException, OSError) as error:
            if isinstance(error, ssl.SSLError) or isinstance(error.__cause__, ssl.SSLError):
                raise self._broken_handshake(error) from error
            raise self._failure(OpeningStep.GREETING, error) from error

    def open_transport(self) -> asyncio.Transport:
        """Return the asyncio transport of the connection. Raise HostFailure if the peer has closed it."""
        if self._transport is None or self._transport.is_closing():
            raise HostFailure(
                Reply(451, "4.2", f"{self.address} closed the connection"), address=self.address
            )
        return self._transport

    def hand_over(self) -> asyncio.Transport:
        """Return the asyncio transport of the connection, which then belongs to the caller. Raise
        HostFailure.
        """
        transport = self.open_transport()
        if self._reader.parser.has_input:
            text = f"{self.address} sent an unsolicited reply"
            raise HostFailure(Reply(451, "5.0", text), address=self.address)
        return transport

    async def say(self, line: bytes) -> tuple[int, str]:
        """Send a line of a login and return the code and text of the reply. Raise HostFailure."""
        try:
            said = await self._reader.execute_command(line, timeout=self.settings.ehlo_timeout)
        except aiosmtplib.SMTPResponseException as error:  # its text may repeat a secret
            text = f"{self.address} replied to AUTH with an invalid reply"
            raise HostFailure(Reply(451, "5.0", text), address=self.address) from error
        except (aiosmtplib.SMTPException, OSError) as error:
            raise self._failure(OpeningStep.AUTH, error) from error
        return said.code, said.message.strip()

    @property
    def skipped(self) -> str:
        """The last line from the peer that was skipped because it had no reply code, or `""`."""
        return self._reader.parser.skipped

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        else:
            self.sock.close()

    async def _introduce(self) -> Capabilities:
        """Send EHLO, or HELO to a server that does not know EHLO (RFC 5321 3.2)."""
        try:
            try:
                return parse_ehlo((await self._introduced(b"EHLO")).message)
            except aiosmtplib.SMTPHeloError as error:
                if error.code < 500:
                    raise
            await self._introduced(b"HELO")
        except (aiosmtplib.SMTPException, OSError) as error:
            raise self._failure(OpeningStep.EHLO, error) from error
        return Capabilities()

    def _context(self) -> tls_plan.ResumingContext:
        small = f"{self.host.name}:{self.host.port}" in self.tls.small
        context = self.tls.context(verify=self.plan.verify, small=small)
        if not self.plan.may_resume:
            context.forget(self.plan.name)
        return context

    def _keep_session(self) -> None:
        tls = self.open_transport().get_extra_info("ssl_object")
        if self.plan.may_resume:
            tls.context.keep(self.plan.name, tls)

    async def _start_tls(self) -> bool:
        """Start TLS. Return false if the server refuses it properly and the plan allows clear text."""
        context = self._context()
        timeout = self.settings.starttls_timeout
        try:
            await self._reader.start_tls(context, server_hostname=self.plan.name, timeout=timeout)
        except aiosmtplib.SMTPResponseException as error:
            if self.plan.may_fall_back and error.code >= 400 and error.code != 421:
                return False
            said = f"{error.code} {printable(error.message)}" if error.code > 0 else printable(error.message)
            text = f"{self.who} refused STARTTLS: {said}; {self.plan.why}"
            raise TlsFailure(Reply(451, "7.4", text), address=self.address) from error
        except (aiosmtplib.SMTPException, OSError) as error:
            raise self._broken_handshake(error) from error
        self._hold_transport()
        return True

    def _prove(self) -> None:
        """Verify the peer's identity before any command is sent over TLS."""
        tls = self.open_transport().get_extra_info("ssl_object")
        try:
            self.proof = tls_plan.prove(self.plan, tls, now=self.tls.clock.now())
        except UntrustedCertificateError as error:
            raise self._tls_failure(f"{self.who}: {error}") from error
        worth = self.proof.security
        self.tls_words = f"{tls.version()} {worth}" if worth != tls_plan.ENCRYPTED else tls.version()
        if self.record is not None:
            self.record.note(f"encrypted with {self.tls_words}")

    async def _introduce_again(self) -> Capabilities:
        # With TLS 1.3 the peer may refuse after our side of the handshake is done, so a connection that
        # breaks here is a failed handshake too. A refusal with a reply has arrived over TLS.
        try:
            reply = await self._introduced(b"EHLO")
        except aiosmtplib.SMTPHeloError as error:
            raise self._failure(OpeningStep.EHLO, error) from error
        except (aiosmtplib.SMTPException, OSError) as error:
            raise self._broken_handshake(error) from error
        self._keep_session()
        return parse_ehlo(reply.message)

    async def _introduced(self, verb: bytes) -> aiosmtplib.SMTPResponse:
        name, timeout = self.ehlo_name.encode(), self.settings.ehlo_timeout
        reply = await self._reader.execute_command(verb, name, timeout=timeout)
        if reply.code != 250:
            raise aiosmtplib.SMTPHeloError(reply.code, reply.message)
        return reply

    def _hold_transport(self) -> None:
        # aiosmtplib types it as BaseTransport; on a TCP socket it is a Transport, with TLS and without.
        self._transport = cast(asyncio.Transport, self._reader.transport)

    def _broken_handshake(self, error: Exception) -> TlsFailure:
        self._context().forget(self.plan.name)
        failure = self._tls_failure(f"TLS with {self.who} failed: {tls_plan.handshake_words(error)}")
        failure.unanswered = not isinstance(error.__cause__ or error, ssl.SSLError)
        return failure

    def _tls_failure(self, text: str) -> TlsFailure:
        if not self.plan.may_fall_back:
            text = f"{text}; {self.plan.why}"
        if self.record is not None:
            self.record.note(text)
        return TlsFailure(Reply(451, "7.5", text), address=self.address)

    def _failure(self, phase: OpeningStep, error: Exception) -> HostFailure:
        """Return the error for a failure in this phase. It is temporary and about the host, because no mail
        has been mentioned yet.
        """
        said = None
        if self.record is not None and not isinstance(error, aiosmtplib.SMTPResponseException):
            self.record.note(f"{phase}: {error or type(error).__name__}")
        if isinstance(error, aiosmtplib.SMTPResponseException) and 200 <= error.code <= 599:
            said = make_reply(error.code, [printable(line) for line in error.message.split("\n")])
            detail, text = said.detail or "3.0", f"{self.address} rejected the session at {phase}: {said}"
        elif isinstance(error, TimeoutError):
            detail, text = "4.2", f"timed out waiting for the reply of {self.address} to {phase}"
        else:
            words = error.message if isinstance(error, aiosmtplib.SMTPResponseException) else str(error)
            detail, text = "4.2", f"{self.address} failed at {phase}: {printable(words)}"
        down = phase is not OpeningStep.AUTH and (said is None or said.is_permanent)
        return HostFailure(Reply(451, detail, text), address=self.address, said=said, down=down)
