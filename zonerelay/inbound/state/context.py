"""What sessions share: the context of all listeners of a worker, and that of one listener.

A context is immutable. A reload makes a new one for new sessions; open sessions keep the one they began with.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from zonerelay.config.settings import ListenerSettings, ListenerTls
from zonerelay.inbound.access.auth import Authenticator
from zonerelay.inbound.access.guard import Guard
from zonerelay.inbound.access.networks import AccessRules
from zonerelay.inbound.limits.auth_failures import SrsRecipients
from zonerelay.inbound.limits.connections import Bursts, ErrorDelays
from zonerelay.inbound.limits.memory import LargeBodies, SessionMemory
from zonerelay.inbound.policy import Connect
from zonerelay.inbound.state.permissions import GrantTable
from zonerelay.inbound.state.questions import Consultants, SenderDomainCheck, Users
from zonerelay.inbound.state.replies import Greeting
from zonerelay.inbound.state.rewriting import Rewriting, ZoneHeader
from zonerelay.inbound.tls.ports import TlsContexts
from zonerelay.message.srs import Srs
from zonerelay.model.address import Mailbox
from zonerelay.model.clock import Clock
from zonerelay.model.envelope import Message, Origin
from zonerelay.model.message_id import MessageIdSource
from zonerelay.model.queue_name import QueueName
from zonerelay.routing.zones.zones import ChooseZone
from zonerelay.store.contract import QueueStore, Submit
from zonerelay.telemetry.events.events import Events

IDEMPOTENCY_KEY = "idempotency-key"
"""The field in which clients name the key of a message."""
DAY = 86400.0

HANDSHAKE = 30.0
"""Seconds for a PROXY header (as Haraka gives it) or a TLS handshake, which is two round trips."""


NotifyQueue = Callable[[QueueName, float], None]
"""Tells the queue that a zone has mail, not to be sent before the given Unix time; 0.0 means at once."""


class RefusesMail(Protocol):
    """The orders of operators. Most relays have none that refuses, and are to spend no call on it."""

    are_refusing: bool
    """Some order in force refuses mail."""

    def refuse(self, origin: Origin, sender: Mailbox, recipient: Mailbox | None, names_zone: bool, /) -> str:
        """Returns the id of the order for which mail of a client from a sender is refused, "" if there is
        none. Without a recipient: at MAIL. `names_zone`: the message itself may name its zone.
        """


class TellsAcceptance(Protocol):
    """Makes messages of our own that tell others of accepted mail."""

    def accepted(self, message: Message) -> list[Submit]:
        """Returns what belongs into the write that holds the message."""

    def notify(self) -> None:
        """That write is done."""


def _no_limit() -> SessionMemory:
    return SessionMemory(sys.maxsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedContext:
    """What all listeners of a worker share besides the store.

    `access` is `None` without [[access]], `rewriting` without [[rewrite]], `srs` without [srs], `users` when
    no listener offers AUTH; `named` finds the user of a token. `hash_bodies`: mail may be signed (DKIM), and
    the hash of a body is cheapest while it arrives. `capture_zone` is the first zone that sends nothing and
    keeps its mail to be looked at, "" without one. `zone_sizes` is the largest message, in bytes, of each
    zone that limits it; `idempotency_window` is in seconds.
    """

    memory: SessionMemory = field(default_factory=_no_limit)
    error_delays: ErrorDelays = field(default_factory=ErrorDelays)
    access: AccessRules | None = None
    users: Users | None = None
    named: Authenticator | None = None
    guard: Guard | None = None
    sender_domains: SenderDomainCheck | None = None
    bursts: Bursts | None = None
    rewriting: Rewriting | None = None
    webhooks: TellsAcceptance | None = None
    srs: Srs | None = None
    srs_recipients: SrsRecipients = field(default_factory=SrsRecipients)
    hash_bodies: bool = False
    capture_zone: str = ""
    zone_sizes: Mapping[str, int] = field(default_factory=dict)
    orders: RefusesMail | None = None
    idempotency_window: float = DAY

    def fields(self) -> dict[str, Any]:  # Any: values of every field's type
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerContext(SharedContext):
    """What all sessions of a listener share, and what is derived from its settings once.

    `certificates` is `None` when the listener has no TLS. `dropped` are the fields that no message keeps, in
    lower case. `lists` is held while a message with many recipients is stored. `first_look` is the number of
    seconds until a new session may be late for the first time.
    """

    settings: ListenerSettings
    hostname: str
    store: QueueStore
    ids: MessageIdSource
    choose_zone: ChooseZone
    notify: NotifyQueue
    events: Events
    clock: Clock
    consultants: Consultants
    certificates: TlsContexts | None = None
    large_bodies: LargeBodies = field(default_factory=LargeBodies)
    lists: asyncio.Lock = field(default_factory=asyncio.Lock)
    greeting: Greeting = field(init=False)
    grants: GrantTable = field(init=False)
    zone_header: ZoneHeader | None = field(init=False)
    dropped: frozenset[str] = field(init=False)
    greets_at_once: bool = field(init=False)
    first_look: float = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        implicit = settings.tls is ListenerTls.IMPLICIT
        derived = {
            "greeting": Greeting(self.hostname, settings),
            "grants": GrantTable(settings),
            "zone_header": ZoneHeader.of(settings),
            "dropped": dropped_headers(settings),
            "greets_at_once": not implicit and Connect not in self.consultants.asked,
            "first_look": min(settings.idle_timeout, settings.transaction_timeout, HANDSHAKE),
        }
        for name, value in derived.items():
            # The way a frozen dataclass sets what it derives.
            object.__setattr__(self, name, value)


def dropped_headers(settings: ListenerSettings) -> frozenset[str]:
    names = {name.lower() for name in settings.drop_headers} | {IDEMPOTENCY_KEY}
    if settings.zone_header:
        names.add(settings.zone_header.lower())
    return frozenset(names)
