"""What a handler or an authenticator of aiosmtpd is asked beyond a policy's steps, and what it may change.

A step's name is that of the hook. `aiosmtpd_handler` makes these decisions; `state/changed_envelope` applies
them after the checks of permission and syntax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from zonerelay.inbound.policy.api import Decision, Event
from zonerelay.model.envelope import Recipient
from zonerelay.model.reply import Reply
from zonerelay.smtp.server.params import MailCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class Rset(Event):
    step: ClassVar[str] = "handle_RSET"


@dataclass(frozen=True, slots=True, kw_only=True)
class Noop(Event):
    """`argument` is `""` without one."""

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
