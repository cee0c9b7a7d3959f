"""Handlers and authenticators as operators have written them for aiosmtpd, and some that misbehave."""

import asyncio
import email
import email.policy
import io
import threading
from pathlib import Path
from typing import Any

from aiosmtpd.handlers import AsyncMessage, Debugging, Mailbox, Message, Proxy, Sink
from aiosmtpd.smtp import MISSING, SMTP, AuthResult, Envelope, LoginPassword, Session

__all__ = ["Mailbox", "Proxy", "Sink"]

# Any: the first argument, which is aiosmtpd's SMTP there and the relay's Server here.
SEEN: list[Any] = []
"""What hooks have seen; a test empties it."""


class FromTheManual:
    """As in the section "Handlers" of aiosmtpd's manual."""

    async def handle_RCPT(
        self, server: Any, session: Session, envelope: Envelope, address: str, rcpt_options: list[str]
    ) -> str:
        if not address.endswith("@example.com"):
            return "550 not relaying to that domain"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Session, envelope: Envelope) -> str:
        SEEN.append((envelope.mail_from, list(envelope.rcpt_tos), envelope.content))
        return "250 Message accepted for delivery"


class AllHooks:
    """Every hook, with what it gets."""

    async def handle_HELO(self, server: Any, session: Session, envelope: Envelope, hostname: str) -> str:
        session.host_name = hostname
        SEEN.append(("HELO", hostname, session.extended_smtp))
        return f"250 {server.hostname}"

    async def handle_EHLO(
        self, server: Any, session: Session, envelope: Envelope, hostname: str, responses: list[str]
    ) -> list[str]:
        session.host_name = hostname
        SEEN.append(("EHLO", hostname, session.extended_smtp, session.ssl is not None))
        return [each for each in responses if "CHUNKING" not in each]

    async def handle_MAIL(
        self, server: Any, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> bytes:
        assert session.peer is not None
        SEEN.append(("MAIL", address, options, session.peer[0], session.host_name, envelope.smtp_utf8))
        envelope.mail_from = address
        envelope.mail_options.extend(options)
        return b"250 OK"

    async def handle_RCPT(
        self, server: Any, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> object:
        SEEN.append(("RCPT", address, envelope.mail_from, list(envelope.mail_options)))
        return MISSING

    def handle_DATA(self, server: Any, session: Session, envelope: Envelope) -> str:
        assert isinstance(server, SMTP)
        SEEN.append(("DATA", envelope.mail_from, list(envelope.rcpt_tos), envelope.content))
        return "250 2.0.0 fine"

    async def handle_RSET(self, server: Any, session: Session, envelope: Envelope) -> str:
        SEEN.append(("RSET", envelope.mail_from))
        return "250 OK"

    async def handle_NOOP(self, server: Any, session: Session, envelope: Envelope, argument: str) -> str:
        SEEN.append(("NOOP", argument))
        return "450 4.3.2 not now" if argument == "later" else "250 OK"

    async def handle_VRFY(self, server: Any, session: Session, envelope: Envelope, address: str) -> str:
        SEEN.append(("VRFY", address))
        return "252 2.1.5 it may be there"

    async def handle_QUIT(self, server: Any, session: Session, envelope: Envelope) -> str:
        SEEN.append(("QUIT",))
        return "221 Bye"


class OldEhlo:
    """handle_EHLO with four arguments, which answers the last line alone."""

    async def handle_EHLO(self, server: Any, session: Session, envelope: Envelope, hostname: str) -> str:
        session.host_name = hostname
        return "550 5.7.1 not you" if hostname == "bad.test" else "250 HELP"


class Inventive:
    """Announces what the relay cannot do, or answers no list at all."""

    async def handle_EHLO(
        self, server: Any, session: Session, envelope: Envelope, hostname: str, responses: list[str]
    ) -> list[str] | None:
        return ["250-" + server.hostname, "250 XFAST"] if hostname == "xfast.test" else None


class Printing(Debugging):
    """aiosmtpd's Debugging into memory."""

    out = io.StringIO()

    def __init__(self) -> None:
        super().__init__(self.out)


class Parsed(Message):
    def handle_message(self, message: email.message.Message) -> None:
        SEEN.append((message["Subject"], message["X-MailFrom"], message["X-RcptTo"]))


class ParsedLater(AsyncMessage):
    async def handle_message(self, message: email.message.Message) -> None:
        await asyncio.sleep(0)
        SEEN.append((message["Subject"], message["X-MailFrom"], message["X-RcptTo"]))


def mailbox(directory: Path) -> Mailbox:
    return Mailbox(directory)


class Gateway:
    """As relays in front of companies do: mark the subject, add a footer, redirect, one sender for all."""

    async def handle_RCPT(
        self, server: Any, session: Session, envelope: Envelope, address: str, rcpt_options: list[str]
    ) -> str:
        local, _, domain = address.partition("@")
        if local == "team":
            envelope.rcpt_tos += [f"ann@{domain}", f"bob@{domain}"]
        else:
            envelope.rcpt_tos.append(address)
        return "250"

    async def handle_DATA(self, server: Any, session: Session, envelope: Envelope) -> str:
        assert isinstance(envelope.content, bytes)
        message = email.message_from_bytes(envelope.content, policy=email.policy.default)
        subject = str(message["Subject"])
        if "refuse me" in subject:
            return "554 5.7.1 content refused"
        del message["Subject"]
        message["Subject"] = f"[EXTERNAL] {subject}"
        envelope.content = message.as_bytes() + b"-- \nfooter\n.\n"
        envelope.mail_from = "gateway@example.org"
        envelope.rcpt_tos.append("archive@example.org")
        return "250 OK"


class Grower:
    async def handle_DATA(self, server: Any, session: Session, envelope: Envelope) -> str:
        assert isinstance(envelope.content, bytes)
        envelope.content = envelope.content * 3
        return "250 OK"


class Hostile:
    """What it does is in the local part: of the recipient, or of the sender for MAIL and DATA."""

    released = threading.Event()

    async def handle_MAIL(
        self, server: Any, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> object:
        what = address.partition("@")[0]
        if what == "unset":
            return "250 OK"
        envelope.mail_from = {"twisted": "a b@c", "injected": "a@b.test> SIZE=1"}.get(what, address)
        if what == "options":
            envelope.mail_options.append("BODY=BINARYMIME")
        return "250 OK"

    async def handle_RCPT(
        self, server: Any, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> object:
        what = address.partition("@")[0]
        if what == "forgets":
            return "250 OK"
        if what == "hangs":
            await asyncio.sleep(60)
        if what == "raises":
            raise RuntimeError("no such luck")
        if what == "exits":
            raise SystemExit(3)
        if what == "asks":
            await server.push("250 I do it myself")
        if what == "opens":
            session.authenticated = True
            envelope.rcpt_tos.append("victim@elsewhere.test")
        if what == "mangles":
            envelope.rcpt_tos.append("x@y.test>\r\nRCPT TO:<victim@elsewhere.test")
        if what == "content":
            envelope.content = b"too early"
        envelope.rcpt_tos.append(address)
        return _ANSWERS.get(what, "250 OK")

    async def handle_exception(self, error: Exception) -> str:
        SEEN.append(error)
        return "542 Internal server error"

    def handle_DATA(self, server: Any, session: Session, envelope: Envelope) -> object:
        what = str(envelope.mail_from).partition("@")[0]
        if what == "blocks":
            self.released.wait(60)
        if what == "empties":
            envelope.rcpt_tos.clear()
        if what == "objects":
            envelope.content = email.message.Message()  # type: ignore[assignment]
        return "250 OK"


_ANSWERS: dict[str, object] = {
    "number": 250,
    "nothing": None,
    "lines": "250 OK\r\n250 smuggled",
    "ends": "250 OK\r\n",
    "goes-on": "354 go on",
    "greets": "150 hello",
    "contradicts": "550 2.1.0 no",
    "words": "OK",
    "umlaut": "550 für dich nicht",
    "long": "550 " + "x" * 500,
    "bytes": b"450 4.7.1 later",
    "hangs-up": "421 4.3.2 good bye",
}


class PasswordBook:
    """As in the section "Authentication System" of aiosmtpd's manual: an object with `__call__`."""

    def __init__(self) -> None:
        self.passwords = {b"ann": b"secret"}

    def __call__(
        self, server: Any, session: Session, envelope: Envelope, mechanism: str, auth_data: Any
    ) -> AuthResult:
        refused = AuthResult(success=False, handled=False)
        if mechanism not in ("LOGIN", "PLAIN") or not isinstance(auth_data, LoginPassword):
            return refused
        SEEN.append((mechanism, auth_data.login, session.peer, session.ssl is not None))
        if self.passwords.get(auth_data.login) != auth_data.password:
            return refused
        return AuthResult(success=True, auth_data=auth_data)


async def unreliable(
    server: Any, session: Session, envelope: Envelope, mechanism: str, auth_data: LoginPassword
) -> object:
    if auth_data.login == b"down":
        return AuthResult(success=False, handled=False, message="454 4.7.0 directory is down")
    if auth_data.login == b"raises":
        raise KeyError("ldap")
    if auth_data.login == b"hangs":
        await asyncio.sleep(60)
    return auth_data.login == b"true"


class Knows:
    """Which user each RCPT comes from."""

    async def handle_RCPT(
        self, server: Any, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        SEEN.append((session.authenticated, session.auth_data, session.ssl))
        envelope.rcpt_tos.append(address)
        return "250 OK"


class Past:
    def process_message(self, peer: Any, mail_from: str, rcpt_tos: list[str], content: bytes) -> None: ...


class OwnMechanism(Grower):
    async def auth_CRAM__MD5(self, server: Any, arguments: list[str]) -> AuthResult:
        return AuthResult(success=False)


class Proxied(Grower):
    async def handle_PROXY(self, server: Any, session: Session, envelope: Envelope, data: Any) -> bool:
        return True
