"""The sandbox's receiver: accepts the relay's mail with aiosmtpd, stores it, and simulates the
failures that were requested over its API.

The receiver answers 250 when a message is in the store of captured mail, or fails as the recipient's address
requests (`behaviours`). It keeps a message in memory, so it must only listen on loopback. `ChaosPolicy` is
the policy of the sandbox's listener: it refuses MAIL, RCPT and logins like Mailpit's chaos, so that the
application under test sees the failures.
"""

from __future__ import annotations

import asyncio
from typing import Never

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, Session

from zonerelay.admin.operators import Sandbox
from zonerelay.capture.faults import ChaosTrigger, InjectedFaults
from zonerelay.capture.store import Capture, CaptureError, CaptureTooLargeError, open_capture
from zonerelay.config.settings import Settings
from zonerelay.inbound.policy import Decision, Mail, Policy, Rcpt, refuse
from zonerelay.model.clock import Clock
from zonerelay.model.envelope import MessageIdSource
from zonerelay.process.threads import OPERATORS
from zonerelay.sandbox.behaviours import ScriptedReply, behaviour_of, is_behaviour

CHAOS = "zonerelay.sandbox.captured:ChaosPolicy"
ANY_LOGIN = "zonerelay.sandbox.captured:log_in"
GREYLISTING = 2.0
"""Seconds for which a greylisted recipient is refused. The relay asks some of them again at once, on another
connection, in case the refusal is about the session.
"""
PATIENCE = 3600.0

_FAULTS = InjectedFaults(is_behaviour)
"""A listener makes its policy by name, so the one sandbox of a process shares these with it here."""


def build(settings: Settings, clock: Clock, *, token: str = "") -> tuple[Sandbox, CapturingSink]:
    """Create the sandbox's API and its receiver. With `token`, everyone who opens the page is logged in."""
    capture = open_capture(settings, clock.now)
    return Sandbox(capture, _FAULTS, token), CapturingSink(capture, clock)


class CapturingSink:
    """The sandbox's receiver, which accepts the relay's mail and captures it. It listens on loopback after
    `start`, and handles its connections.
    """

    def __init__(self, capture: Capture, clock: Clock) -> None:
        self.port = 0
        self._capture = capture
        self._clock = clock
        self._ids = MessageIdSource(clock)
        self._greylisted: dict[tuple[str, str], float] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _SinkSession(
                self, data_size_limit=None, enable_SMTPUTF8=True, hostname="sink", timeout=PATIENCE
            ),
            "127.0.0.1",
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def handle_EHLO(  # noqa: N802
        self, server: SMTP, session: Session, envelope: Envelope, name: str, replies: list[str]
    ) -> list[str]:
        session.host_name = name
        return [*replies[:-1], "250-PIPELINING", "250 ENHANCEDSTATUSCODES"]

    async def handle_RCPT(  # noqa: N802
        self, server: _SinkSession, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        wanted = behaviour_of(_FAULTS.behaviours.get(address.lower(), address))
        if wanted.close_at_rcpt:
            await server.leave()
        await asyncio.sleep(PATIENCE if wanted.silent else wanted.delay)
        if wanted.rcpt and wanted.rcpt[0] != "2":
            return wanted.rcpt
        if wanted.greylist and self._is_greylisted(envelope.mail_from or "", address):
            return "451 4.7.1 greylisted, come back later"
        envelope.rcpt_tos.append(address)
        return wanted.rcpt or "250 2.1.5 recipient ok"

    def _is_greylisted(self, sender: str, recipient: str) -> bool:
        now = self._clock.monotonic()
        return now < self._greylisted.setdefault((sender, recipient), now) + GREYLISTING

    async def handle_DATA(self, server: _SinkSession, session: Session, envelope: Envelope) -> str:  # noqa: N802
        wanted = server.wanted()
        if any(each.close_after_dot for each in wanted):
            await server.leave()
        if refusal := next((each.final for each in wanted if each.final), ""):
            return refusal
        sender = "" if envelope.mail_from == "<>" else envelope.mail_from or ""
        body = envelope.original_content or b""
        try:
            await OPERATORS.run(self._capture.add, self._ids.next(), sender, envelope.rcpt_tos, body)
        except CaptureTooLargeError as error:
            return f"552 5.3.4 {error}"
        except CaptureError as error:
            return f"452 4.3.1 {error}"
        return "250 2.0.0 accepted"


class _SinkSession(SMTP):
    """One SMTP session of the sandbox's receiver."""

    line_length_limit = 1024 * 1024

    def wanted(self) -> list[ScriptedReply]:
        """Return the scripted replies that the recipients request."""
        assert self.envelope is not None
        behaviours = _FAULTS.behaviours
        return [behaviour_of(behaviours.get(each.lower(), each)) for each in self.envelope.rcpt_tos]

    async def leave(self) -> Never:
        """Close the connection without sending a reply."""
        assert self.transport is not None
        self.transport.close()
        await asyncio.Event().wait()
        raise AssertionError("the connection was closed")

    async def smtp_DATA(self, arg: str) -> None:  # noqa: N802
        wanted = self.wanted()
        if refusal := next((each.data for each in wanted if each.data), ""):
            await self.push(refusal)
            return
        if any(each.early or each.close_before_dot for each in wanted):
            await self.push("354 go ahead")
            await self._reader.read(1)
            if refusal := next((each.early for each in wanted if each.early), ""):
                await self.push(refusal)
            await self.leave()
        await super().smtp_DATA(arg)


class ChaosPolicy(Policy):
    """Rejects random commands as often as Mailpit's chaos triggers specify."""

    def mail(self, event: Mail) -> Decision | None:
        return _struck(_FAULTS.chaos.sender)

    def rcpt(self, event: Rcpt) -> Decision | None:
        return _struck(_FAULTS.chaos.recipient)


async def log_in(
    _server: object, _session: Session, _envelope: Envelope, _mechanism: str, _data: object
) -> AuthResult:
    """Accept every user name and password, unless a chaos trigger rejects the login."""
    trigger = _FAULTS.chaos.authentication
    if not _FAULTS.strikes(trigger):
        return AuthResult(success=True)
    reply = f"{trigger.error_code} {trigger.error_code // 100}.7.8 Requested by Chaos"
    return AuthResult(success=False, handled=False, message=reply)


def _struck(trigger: ChaosTrigger) -> Decision | None:
    if not _FAULTS.strikes(trigger):
        return None
    return refuse(trigger.error_code, "0.0", "Requested by Chaos")
