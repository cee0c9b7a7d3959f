"""The interface of an operator's own policy: the events, the decision, and the base class.

This is a public interface (docs/send/policy.md), so names and fields do not change. A policy overrides the
methods of the session steps it wants to decide. A method returns a `Decision`, or `None` to accept. Decisions
are validated when they are created, so that the policy's author sees the error: for example, a reply that is
not a refusal, or a header field that could end the header or forge another field. `runner` defines what
happens when a policy raises an exception or hangs.

The module also declares the additional events for aiosmtpd handlers and authenticators, and the changes that
they may make. The name of such a step is the name of the hook. `aiosmtpd_handler` creates these decisions;
`state/context` applies them after the checks of permissions and syntax.
"""

import enum
import re
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, dataclass_transform

import msgspec

from zonerelay.message.header import MAX_WORD
from zonerelay.model.clock import Clock, SystemClock
from zonerelay.model.envelope import Recipient
from zonerelay.model.reply import Reply
from zonerelay.smtp.server.params import MailCommand

__all__ = [
    "ACCEPT", "EVENTS", "Auth", "ClientInfo", "Connect", "Decision", "EndOfData", "Event", "Headers",
    "Helo", "Mail", "Policy", "PolicyContext", "Rcpt", "accept", "refuse",
]  # fmt: skip

MAX_REPLY_TEXT = 400  # bytes; RFC 5321 4.5.3.1.5 limits a reply line to 512
MAX_FIELD_NAME = 76
MAX_FIELD_VALUE = 998
MAX_EDITS = 50  # names to remove, and the same number of fields to add, in one decision

_TEXT = re.compile(r"[ -~]+")
_DETAIL = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}")
_NAME = re.compile(r"[!-9;-~]+")  # RFC 5322 2.2
_VALUE = re.compile(r"[ -~\t]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientInfo:
    """The information about a session's client that a policy gets. `""` (0 for the port) means that a value
    is not yet known or does not apply.

    `address` is `""` on a Unix socket. `tls` is the version, such as "TLSv1.3"; `certificate` is the SHA-256
    fingerprint of the client's certificate in hexadecimal; `listener` is the listener's address as
    configured. `extended` is true after EHLO and false after HELO. `kept` is the data that a policy for
    aiosmtpd handlers stores about this client.
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


@dataclass(frozen=True, kw_only=True)
@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Event:
    """The base class of the events of a session, which are dataclasses. `step` is also the name of the
    policy's method for it.
    """

    step: ClassVar[str]
    client: ClientInfo = field(default_factory=ClientInfo)

    def __init_subclass__(cls, *, step: str) -> None:
        cls.step = step
        dataclass(frozen=True, kw_only=True)(cls)


class Connect(Event, step="connect"):
    """Event: a client has connected."""


class Helo(Event, step="helo"):
    """Event: the client sent EHLO (`extended`) or HELO. `client.helo` is still the name from an earlier EHLO,
    if there was one.

    `lines` are the lines of the reply to EHLO.
    """

    name: str
    extended: bool = True
    lines: tuple[str, ...] = field(default=(), repr=False, compare=False)


class Auth(Event, step="auth"):
    """Event: a client has logged in with a correct password. `client.user` is set after the policy has
    accepted it.
    """

    user: str
    mechanism: str


class Mail(Event, step="mail"):
    """Event: the client sent MAIL. `sender` is `""` for the null sender. `size` is the size that the client
    announced, or 0.
    """

    sender: str
    size: int = 0
    body: str = "7BIT"
    smtputf8: bool = False
    recipients: Mapping[str, Recipient] = field(default_factory=dict, repr=False, compare=False)


class Rcpt(Event, step="rcpt"):
    """Event: the client sent RCPT. `recipients_so_far` is the number of recipients that the message already
    has.

    `mail` and `recipients` are internal to the relay, for aiosmtpd handlers.
    """

    sender: str
    recipient: str
    recipients_so_far: int = 0
    mail: MailCommand | None = field(default=None, repr=False, compare=False)
    recipients: Mapping[str, Recipient] = field(default_factory=dict, repr=False, compare=False)


class Headers(Event, step="headers"):
    """Event: the header section of a message was received. `fields` are in order, unfolded, undecoded (RFC
    2047), at most 32 KB.
    """

    message_id: str
    sender: str
    recipients: tuple[str, ...]
    fields: tuple[tuple[str, str], ...]


class EndOfData(Event, step="end_of_data"):
    """Event: the whole message was received but not yet acknowledged. Its header is on disk, so it cannot be
    edited.
    """

    message_id: str
    sender: str
    recipients: tuple[str, ...]
    fields: tuple[tuple[str, str], ...]
    size: int


EVENTS: tuple[type[Event], ...] = (Connect, Helo, Auth, Mail, Rcpt, Headers, EndOfData)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a policy: accept or reject, and changes to the message. `reply` refuses. Otherwise
    `zone` and the fields to `add` and `remove` apply to the message.

    A zone can be chosen at mail, headers and end_of_data (for all recipients) and at rcpt (for that one
    recipient). Header fields can be changed from connect to headers. The constructor raises ValueError or
    TypeError if the decision is invalid.
    """

    reply: Reply | None = None
    zone: str = ""
    add: tuple[tuple[str, str], ...] = ()
    remove: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(isinstance(self.zone, str), "zone must be the name of a zone")
        _require(isinstance(self.add, tuple) and isinstance(self.remove, tuple), "add, remove must be tuples")
        if self.reply is not None:
            _check_reply(self.reply)
            if self.zone or self.edits_header:
                raise ValueError("a rejection can neither choose a zone nor change the header")
        if len(self.add) > MAX_EDITS or len(self.remove) > MAX_EDITS:
            raise ValueError(f"at most {MAX_EDITS} header fields can be added or removed")
        for name in self.remove:
            _check_name(name)
        for pair in self.add:
            _require(isinstance(pair, tuple) and len(pair) == 2, "add must contain pairs of name and value")
            _check_name(pair[0])
            _check_value(*pair)

    @property
    def edits_header(self) -> bool:
        return bool(self.add or self.remove)


ServerReply = Decision | None | Awaitable[Decision | None]
"""The possible results of a method: a `def` returns a decision or None, an `async def` an awaitable of
these.
"""


def accept(*, zone: str = "", add: Iterable[tuple[str, str]] = (), remove: Iterable[str] = ()) -> Decision:
    """Return a decision to accept. With `zone`, the message is sent through that zone; with `add` and
    `remove`, its header is changed.

    `remove` removes all fields with these names from the received message; `add` adds new fields at the top.
    """
    _require(not isinstance(remove, str), "remove must be a list of names, not a string")
    return Decision(zone=zone, add=tuple((name, value) for name, value in add), remove=tuple(remove))


def refuse(code: int, detail: str, text: str) -> Decision:
    """Return a refusal with `code` (400–499: temporary; 500–599: permanent), as in `refuse(550, "7.1", "Not
    here")`.

    Code 421 also ends the session.
    """
    return Decision(reply=Reply(code, detail, text))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """The argument that a policy's constructor gets. `file` is the listener's policy_file."""

    listener: str = ""
    hostname: str = ""
    file: Path | None = None
    clock: Clock = field(default_factory=SystemClock)


class Policy:
    """The base class of policies; it accepts everything. Derive a class from it and override the steps that
    you need; steps that are not overridden take no time.

    `def` methods are called in several threads concurrently, `async def` methods all in one.
    """

    events: ClassVar[tuple[type[Event], ...]] = EVENTS

    def __init__(self, context: PolicyContext) -> None:
        """Prepare the policy; a subclass can read files here. Raise ValueError with a message for the
        operator if the policy cannot work.
        """
        self.context = context

    def connect(self, event: Connect) -> ServerReply:
        """Decide about a new connection. A refusal replaces the greeting, and the session ends."""
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
        """Decide about a message whose header section has arrived. After a refusal, the rest of the message
        is read and discarded before the reply.
        """
        return None

    def end_of_data(self, event: EndOfData) -> ServerReply:
        """Decide about a message that has arrived completely. A refusal discards it. Accepting it does not
        yet mean that it is stored.
        """
        return None

    def close(self) -> Awaitable[None] | None:
        """Release resources when the listener is removed or the relay stops."""
        return None


def _require(right: bool, what: str) -> None:
    if not right:
        raise TypeError(what)


def _check_reply(reply: Reply) -> None:
    _require(isinstance(reply, Reply), "reply must be a zonerelay.model.reply.Reply; use refuse()")
    if not 400 <= reply.code <= 599:
        raise ValueError(f"the code of a rejection must be from 400 to 599, not {reply.code}")
    if not _DETAIL.fullmatch(reply.detail):
        raise ValueError(f'detail must be the end of a status, such as "7.1", not {reply.detail!r}')
    if not _TEXT.fullmatch(reply.text) or len(reply.text) > MAX_REPLY_TEXT:
        raise ValueError(f"the text must be a line of at most {MAX_REPLY_TEXT} printable ASCII characters")


def _check_name(name: str) -> None:
    _require(isinstance(name, str), "the name of a header field must be a str")
    if not _NAME.fullmatch(name) or len(name) > MAX_FIELD_NAME:
        raise ValueError(f"{name[:MAX_FIELD_NAME]!r} is not a header field name")
    if name.lower() == "received":
        # RFC 5321 4.4: they MUST NOT be changed or deleted, because they stop mail loops.
        raise ValueError("Received fields can be added only by the relay")


def _check_value(name: str, value: str) -> None:
    _require(isinstance(value, str), f"the value of {name} must be a str")
    if not _VALUE.fullmatch(value):
        # UTF-8 here would require SMTPUTF8 from every server on the path (RFC 6532).
        remedy = "encode other characters with email.header.Header"
        raise ValueError(f"the value of {name} must be a single line of printable ASCII; {remedy}")
    if len(value) > MAX_FIELD_VALUE or any(len(word) > MAX_WORD for word in value.split()):
        raise ValueError(f"the value of {name} exceeds {MAX_FIELD_VALUE} characters, or {MAX_WORD} in a word")


ACCEPT = Decision()


class Rset(Event, step="handle_RSET"):
    """Event: the client sent RSET."""


class Noop(Event, step="handle_NOOP"):
    """Event: the client sent NOOP. `argument` is `""` if it has none."""

    argument: str


class Vrfy(Event, step="handle_VRFY"):
    """Event: a client that may relay sent VRFY. `address` is without its angle brackets."""

    address: str


class Quit(Event, step="handle_QUIT"):
    """Event: the client sent QUIT. The reply is always 221, whatever the hook returns."""


class WholeMessage(Event, step="handle_DATA"):
    """Event: the whole message as sent by the client, with CRLF line ends and without dot-stuffing."""

    mail: MailCommand
    recipients: Mapping[str, Recipient]
    content: bytes = field(repr=False)


class PresentedLogin(Event, step="authenticator"):
    """Event: a client sent credentials, which an operator's authenticator checks. The reply accepts or
    refuses; 4yz means a temporary failure.
    """

    user: str
    password: str = field(repr=False)
    mechanism: str


HANDLER_EVENTS: tuple[type[Event], ...] = (Rset, Noop, Vrfy, Quit, WholeMessage)


@dataclass(frozen=True, slots=True)
class Changes(Decision):
    """The changes that a hook made to an envelope.

    `sender` is `""` for the null sender, or `None` if it is unchanged. `added` and `removed` are recipients;
    at RCPT, `removed` includes the recipient of the command if others replace it. `content` is a new message
    with CRLF line ends. `lines` are the lines to keep in the reply to EHLO, and `vrfy_reply` answers VRFY.
    """

    sender: str | None = None
    added: tuple[str, ...] = ()
    removed: frozenset[str] = frozenset()
    content: bytes | None = field(default=None, repr=False)
    lines: tuple[str, ...] = ()
    vrfy_reply: Reply | None = None

    @property
    def of_envelope(self) -> bool:
        return self.sender is not None or bool(self.added or self.removed)


class FailureKind(enum.StrEnum):
    """The kind of a failed policy call, as a metric label. The list is fixed."""

    TIMEOUT = "timeout"
    ERROR = "error"
    BUSY = "busy"
    BAD_DECISION = "bad-decision"


class PolicyFailure(msgspec.Struct, frozen=True):
    """A policy call failed or returned an unusable result. `detail` is for the operator."""

    kind: FailureKind
    detail: str
