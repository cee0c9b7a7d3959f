"""The interface of an operator's own policy: events, decisions and the class to derive from.

This is a public interface (docs/send/policy.md): names and fields are kept. A policy is asked at the steps of
a session whose methods it overrides, and answers with a `Decision` or `None`, which accepts. Decisions are
checked when they are built, where the policy's author sees what is wrong: a reply that is no refusal, a
header field that could end the header or forge another. `runner` says what happens to a policy that raises or
hangs.

What a handler or an authenticator of aiosmtpd is asked beyond a policy's steps, and what it may change.

A step's name is that of the hook. `aiosmtpd_handler` makes these decisions; `state/changed_envelope` applies
them after the checks of permission and syntax.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from zonerelay.message.header.headers import MAX_WORD
from zonerelay.model.clock import Clock, SystemClock
from zonerelay.model.envelope import Recipient
from zonerelay.model.reply import Reply
from zonerelay.smtp.server.params import MailCommand

MAX_REPLY_TEXT = 400  # octets; RFC 5321 4.5.3.1.5 gives a reply line 512
MAX_FIELD_NAME = 76
MAX_FIELD_VALUE = 998
MAX_EDITS = 50  # names to remove, and as many fields to add, in one decision

_TEXT = re.compile(r"[ -~]+")
_DETAIL = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}")
_NAME = re.compile(r"[!-9;-~]+")  # RFC 5322 2.2
_VALUE = re.compile(r"[ -~\t]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientInfo:
    """The client of a session. `""` (0 for the port) means unknown so far, or not applicable.

    `address` is `""` on a Unix socket; `tls` is the version, such as "TLSv1.3"; `certificate` the SHA-256
    fingerprint of the client's certificate in hexadecimal; `listener` the listener's address as configured.
    `extended`: EHLO, not HELO. `kept` is what a handler of aiosmtpd keeps about this client.
    """

    address: str = ""
    port: int = 0
    helo: str = ""
    user: str = ""
    tls: str = ""
    certificate: str = ""
    listener: str = ""
    extended: bool = True
    kept: dict[str, object] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A step of a session. `step` is also the name of the method that is asked about it."""

    step: ClassVar[str]
    client: ClientInfo = field(default_factory=ClientInfo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect(Event):
    """A client has connected; nothing has been said yet."""

    step: ClassVar[str] = "connect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Helo(Event):
    """EHLO (`extended`) or HELO; `client.helo` is still the name of an EHLO before, if there was one.

    `lines` are those of the reply to EHLO.
    """

    step: ClassVar[str] = "helo"
    name: str
    extended: bool = True
    lines: tuple[str, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth(Event):
    """A log-in whose password was right; `client.user` is set once this is accepted."""

    step: ClassVar[str] = "auth"
    user: str
    mechanism: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail(Event):
    """MAIL: `sender` is `""` for the null sender; `size` is what the client announced, 0 when nothing."""

    step: ClassVar[str] = "mail"
    sender: str
    size: int = 0
    body: str = "7BIT"
    smtputf8: bool = False
    recipients: Mapping[str, Recipient] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rcpt(Event):
    """RCPT; `recipients_so_far` is how many the message has already.

    `mail` and `recipients` are the relay's, for handlers of aiosmtpd.
    """

    step: ClassVar[str] = "rcpt"
    sender: str
    recipient: str
    recipients_so_far: int = 0
    mail: MailCommand | None = field(default=None, repr=False, compare=False)
    recipients: Mapping[str, Recipient] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers(Event):
    """The header section is there. `fields` are in order, unfolded, undecoded (RFC 2047), at most 32 KB."""

    step: ClassVar[str] = "headers"
    message_id: str
    sender: str
    recipients: tuple[str, ...]
    fields: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfData(Event):
    """The whole message is there and not yet acknowledged. Its header is on disk: no edits any more."""

    step: ClassVar[str] = "end_of_data"
    message_id: str
    sender: str
    recipients: tuple[str, ...]
    fields: tuple[tuple[str, str], ...]
    size: int


EVENTS: tuple[type[Event], ...] = (Connect, Helo, Auth, Mail, Rcpt, Headers, EndOfData)


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision. `reply` refuses. Otherwise `zone` and the fields to `add` and `remove` hold for the
    message.

    Zones can be chosen at mail, headers and end_of_data (for all recipients) and at rcpt (for that one);
    header fields from connect to headers. Raises ValueError or TypeError when it makes no sense.
    """

    reply: Reply | None = None
    zone: str = ""
    add: tuple[tuple[str, str], ...] = ()
    remove: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(isinstance(self.zone, str), "zone is a zone's name")
        _require(isinstance(self.add, tuple) and isinstance(self.remove, tuple), "add and remove are tuples")
        if self.reply is not None:
            _check_reply(self.reply)
            if self.zone or self.edits_header:
                raise ValueError("a refusal can neither choose a zone nor change the header")
        if len(self.add) > MAX_EDITS or len(self.remove) > MAX_EDITS:
            raise ValueError(f"more than {MAX_EDITS} header fields")
        for name in self.remove:
            _check_name(name)
        for pair in self.add:
            _require(isinstance(pair, tuple) and len(pair) == 2, "add holds pairs of name and value")
            _check_name(pair[0])
            _check_value(*pair)

    @property
    def edits_header(self) -> bool:
        return bool(self.add or self.remove)


ServerReply = Decision | None | Awaitable[Decision | None]
"""What a method may return: `def` a decision or None, `async def` the same."""


def accept(*, zone: str = "", add: Iterable[tuple[str, str]] = (), remove: Iterable[str] = ()) -> Decision:
    """Go on; with `zone`, deliver through it; with `add` and `remove`, change the header.

    `remove` takes every field of those names out of the message as it came, `add` puts new ones on top.
    """
    _require(not isinstance(remove, str), "remove is a list of names")
    return Decision(zone=zone, add=tuple((name, value) for name, value in add), remove=tuple(remove))


def refuse(code: int, detail: str, text: str) -> Decision:
    """Refuse with `code` (400–499: try again; 500–599: never), as in `refuse(550, "7.1", "Not here")`.

    421 also ends the session.
    """
    return Decision(reply=Reply(code, detail, text))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """The arguments of a policy's constructor. `file` is the listener's policy_file."""

    listener: str = ""
    hostname: str = ""
    file: Path | None = None
    clock: Clock = field(default_factory=SystemClock)


class Policy:
    """Accepts everything. Derive from it and override the steps that matter; the others cost nothing.

    `def` methods are called in several threads at once, `async def` methods all in one.
    """

    events: ClassVar[tuple[type[Event], ...]] = EVENTS

    def __init__(self, context: PolicyContext) -> None:
        """Raise ValueError, as a message for the operator, when the policy cannot work."""
        self.context = context

    def connect(self, event: Connect) -> ServerReply:
        """Refused: the answer takes the place of the greeting, and the session ends."""
        return None

    def helo(self, event: Helo) -> ServerReply:
        return None

    def auth(self, event: Auth) -> ServerReply:
        return None

    def mail(self, event: Mail) -> ServerReply:
        return None

    def rcpt(self, event: Rcpt) -> ServerReply:
        return None

    def headers(self, event: Headers) -> ServerReply:
        """Refused: the rest of the message is read and dropped, then answered."""
        return None

    def end_of_data(self, event: EndOfData) -> ServerReply:
        """Refused: the message is forgotten. Accepted here does not yet mean stored."""
        return None

    def close(self) -> Awaitable[None] | None:
        """The listener is gone or the relay stops."""
        return None


def _require(right: bool, what: str) -> None:
    if not right:
        raise TypeError(what)


def _check_reply(reply: Reply) -> None:
    _require(isinstance(reply, Reply), "reply is a zonerelay.model.reply.Reply: use refuse()")
    if not 400 <= reply.code <= 599:
        raise ValueError(f"a refusal has a code from 400 to 599, not {reply.code}")
    if not _DETAIL.fullmatch(reply.detail):
        raise ValueError(
            f'detail is subject and detail of the status alone, such as "7.1", not {reply.detail!r}'
        )
    if not _TEXT.fullmatch(reply.text) or len(reply.text) > MAX_REPLY_TEXT:
        raise ValueError(
            f"a reply's text is one line of printable ASCII, at most {MAX_REPLY_TEXT} characters"
        )


def _check_name(name: str) -> None:
    _require(isinstance(name, str), "a field's name is a str")
    if not _NAME.fullmatch(name) or len(name) > MAX_FIELD_NAME:
        raise ValueError(f"not the name of a header field: {name[:MAX_FIELD_NAME]!r}")
    if name.lower() == "received":
        # RFC 5321 4.4: MUST NOT change or delete; they are what stops a mail loop.
        raise ValueError("Received fields are the relay's alone")


def _check_value(name: str, value: str) -> None:
    _require(isinstance(value, str), f"the value of {name} is a str")
    if not _VALUE.fullmatch(value):
        # UTF-8 here would need SMTPUTF8 of every server behind us (RFC 6532).
        raise ValueError(
            f"the value of {name} is one line of printable ASCII: encode the rest with email.header.Header"
        )
    if len(value) > MAX_FIELD_VALUE or any(len(word) > MAX_WORD for word in value.split()):
        raise ValueError(
            f"the value of {name} has over {MAX_FIELD_VALUE} characters, or a word of over {MAX_WORD}"
        )


ACCEPT = Decision()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rset(Event):
    step: ClassVar[str] = "handle_RSET"


@dataclass(frozen=True, slots=True, kw_only=True)
class Noop(Event):
    """A NOOP command. `argument` is `""` without one."""

    step: ClassVar[str] = "handle_NOOP"
    argument: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Vrfy(Event):
    """VRFY of a client that may relay; `address` is without its angle brackets."""

    step: ClassVar[str] = "handle_VRFY"
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit(Event):
    """The reply is 221, whatever the hook answers."""

    step: ClassVar[str] = "handle_QUIT"


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeMessage(Event):
    """The whole message as the client sent it, with CRLF line ends, without dot-stuffing."""

    step: ClassVar[str] = "handle_DATA"
    mail: MailCommand
    recipients: Mapping[str, Recipient]
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentedLogin(Event):
    """Credentials that a client presents. The answer accepts or refuses; 4yz: it cannot be told now."""

    step: ClassVar[str] = "authenticator"
    user: str
    password: str = field(repr=False)
    mechanism: str


HANDLER_EVENTS: tuple[type[Event], ...] = (Rset, Noop, Vrfy, Quit, WholeMessage)


@dataclass(frozen=True, slots=True)
class Changes(Decision):
    """The envelope as a hook has left it, where that differs from the relay's.

    `sender` is `""` for the null sender, `None` when it stays. `added` and `removed` are recipients; at RCPT
    the recipient itself is among `removed` when others take its place. `content` is a new message with CRLF
    line ends. `lines` are those that the reply to EHLO keeps, `told` is the reply to VRFY.
    """

    sender: str | None = None
    added: tuple[str, ...] = ()
    removed: frozenset[str] = frozenset()
    content: bytes | None = field(default=None, repr=False)
    lines: tuple[str, ...] = ()
    told: Reply | None = None

    @property
    def of_envelope(self) -> bool:
        return self.sender is not None or bool(self.added or self.removed)
