"""What all sessions of one listener share: settings, collaborators, and answers made from them once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from zonerelay.config.settings import ListenerSettings, ListenerTls
from zonerelay.inbound.access.rules import AccessRules
from zonerelay.inbound.access.strangers import Strangers
from zonerelay.inbound.limits.bursts import Bursts
from zonerelay.inbound.limits.error_delay import ErrorDelays
from zonerelay.inbound.limits.large_bodies import LargeBodies
from zonerelay.inbound.limits.memory import SessionMemory
from zonerelay.inbound.policy import Connect
from zonerelay.inbound.session import timeouts as deadlines
from zonerelay.inbound.state.ehlo_reply import Greeting
from zonerelay.inbound.state.permissions import GrantTable
from zonerelay.inbound.state.questions import Consultants
from zonerelay.inbound.state.rewriting import Rewriting
from zonerelay.inbound.state.zone_header import ZoneHeader
from zonerelay.inbound.tls.ports import TlsContexts
from zonerelay.message.header.headers import Fields
from zonerelay.message.srs import Srs
from zonerelay.model.clock import Clock
from zonerelay.model.envelope import Envelope
from zonerelay.model.message_id import MessageIdSource
from zonerelay.routing.zones.zones import ZoneOf
from zonerelay.store.contract import QueueStore
from zonerelay.telemetry.events.events import Events


class ChooseZone(Protocol):
    """Which zone delivers to each recipient; asked once the message is here whole.

    `named` is the zone that the message names, by one who may, `""` for none.
    """

    def __call__(self, envelope: Envelope, /, *, headers: Fields, size: int, named: str) -> ZoneOf: ...


class Notify(Protocol):
    """Tell the queue that a zone has mail, not to be sent before `due` (Unix time, 0.0 for at once)."""

    def __call__(self, zone: str, due: float, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerContext:
    """`certificates` is `None` when the listener has no TLS, `access`, `rewriting` and `srs` without rules.

    `hash_bodies`: their hash for DKIM is wanted. `dropped` are fields that no message keeps, in lower case.
    `zone_sizes`: the largest message of zones that limit it. `lists`: held to store one of many recipients.
    """

    settings: ListenerSettings
    hostname: str
    store: QueueStore
    ids: MessageIdSource
    choose_zone: ChooseZone
    notify: Notify
    events: Events
    clock: Clock
    consultants: Consultants
    memory: SessionMemory
    error_delays: ErrorDelays = field(default_factory=ErrorDelays)
    access: AccessRules | None
    bursts: Bursts | None = None
    rewriting: Rewriting | None = None
    srs: Srs | None = None
    strangers: Strangers = field(default_factory=Strangers)
    hash_bodies: bool = False
    zone_sizes: Mapping[str, int] = field(default_factory=dict)
    certificates: TlsContexts | None = None
    large_bodies: LargeBodies = field(default_factory=LargeBodies)
    lists: asyncio.Lock = field(default_factory=asyncio.Lock)
    greeting: Greeting = field(init=False)
    grants: GrantTable = field(init=False)
    zone_header: ZoneHeader | None = field(init=False)
    dropped: frozenset[str] = field(init=False)
    greets_at_once: bool = field(init=False)
    first_look: float = field(init=False)  # seconds until a new session may be late for the first time

    def __post_init__(self) -> None:
        settings = self.settings
        implicit = settings.tls is ListenerTls.IMPLICIT
        derived = {
            "greeting": Greeting(self.hostname, settings),
            "grants": GrantTable(settings),
            "zone_header": ZoneHeader.of(settings),
            "dropped": dropped_headers(settings),
            "greets_at_once": not implicit and Connect not in self.consultants.asked,
            "first_look": min(settings.idle_timeout, settings.transaction_timeout, deadlines.HANDSHAKE),
        }
        for name, value in derived.items():
            # The way a frozen dataclass sets what it derives.
            object.__setattr__(self, name, value)


def dropped_headers(settings: ListenerSettings) -> frozenset[str]:
    names = {name.lower() for name in settings.drop_headers}
    if settings.zone_header:
        names.add(settings.zone_header.lower())
    return frozenset(names)
