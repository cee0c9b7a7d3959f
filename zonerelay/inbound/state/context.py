"""The context that all listeners of a worker share, and the context of one listener.

A context is immutable. A reload creates a new one for new sessions; open sessions keep the one they began
with.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
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
from zonerelay.inbound.state.rewriting import RewriteRules, ZoneHeader
from zonerelay.inbound.tls.ports import TlsContexts
from zonerelay.message.srs import Srs
from zonerelay.model.address import Mailbox
from zonerelay.model.clock import Clock
from zonerelay.model.envelope import Message, Origin
from zonerelay.model.message_id import MessageIdSource
from zonerelay.routing.zones.zones import ChooseZone
from zonerelay.store.contract import OwnMessage, QueueStore
from zonerelay.telemetry.events.events import Events

IDEMPOTENCY_KEY = "idempotency-key"
"""The header field in which clients set the idempotency key of a message."""
DAY = 86400.0

HANDSHAKE = 30.0
"""Seconds for a PROXY header (as in Haraka) or a TLS handshake, which takes two round trips."""


class SuspensionCheck(Protocol):
    """Interface: rejects mail that operators have suspended. Most relays have none that refuses mail, and
    should not spend a call on it.
    """

    are_refusing: bool
    """Whether an active suspension refuses mail."""

    def refuse(self, origin: Origin, sender: Mailbox, recipient: Mailbox | None, names_zone: bool, /) -> str:
        """Return the id of the suspension that refuses mail of a client from a sender, or "" if there is
        none. At MAIL, there is no recipient. `names_zone`: the message itself may name its zone.
        """


class AcceptanceReporter(Protocol):
    """Interface: creates messages that report accepted mail to other programs."""

    def accepted(self, message: Message) -> list[OwnMessage]:
        """Return the messages to store together with this message."""


def _no_limit() -> SessionMemory:
    return SessionMemory(sys.maxsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedContext:
    """The objects that all listeners of a worker share, except the store.

    `access` is `None` without [[access]], `rewriting` without [[rewrite]], `srs` without [srs], and `users`
    if no listener offers AUTH. `named` finds the user of a token. `hash_bodies`: mail may be signed (DKIM),
    and computing the hash of a body is cheapest while it arrives. `capture_zone` is the first zone that
    captures its mail instead of sending it, or "". `zone_sizes` is the maximum message size, in bytes, of
    each zone that has one. `idempotency_window` is in seconds.
    """

    memory: SessionMemory = field(default_factory=_no_limit)
    error_delays: ErrorDelays = field(default_factory=ErrorDelays)
    access: AccessRules | None = None
    users: Users | None = None
    named: Authenticator | None = None
    guard: Guard | None = None
    sender_domains: SenderDomainCheck | None = None
    bursts: Bursts | None = None
    rewriting: RewriteRules | None = None
    webhooks: AcceptanceReporter | None = None
    srs: Srs | None = None
    srs_recipients: SrsRecipients = field(default_factory=SrsRecipients)
    hash_bodies: bool = False
    capture_zone: str = ""
    zone_sizes: Mapping[str, int] = field(default_factory=dict)
    orders: SuspensionCheck | None = None
    idempotency_window: float = DAY

    def fields(self) -> dict[str, Any]:  # Any: values of every field's type
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerContext(SharedContext):
    """The objects that all sessions of a listener share, with values derived from its settings.

    `certificates` is `None` if the listener has no TLS. `dropped` are the names of fields that are removed
    from every message, in lower case. `lists` is locked while a message with many recipients is stored.
    `first_look` is the number of seconds until a new session can first exceed a time limit.
    """

    settings: ListenerSettings
    hostname: str
    store: QueueStore
    ids: MessageIdSource
    choose_zone: ChooseZone
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
            # This is how a frozen dataclass sets derived fields.
            object.__setattr__(self, name, value)


def dropped_headers(settings: ListenerSettings) -> frozenset[str]:
    names = {name.lower() for name in settings.drop_headers} | {IDEMPOTENCY_KEY}
    if settings.zone_header:
        names.add(settings.zone_header.lower())
    return frozenset(names)
