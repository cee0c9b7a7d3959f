"""What all listeners of a worker share besides the store: the memory in use, the access rules, the users."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from zonerelay.inbound.access.rules import AccessRules
from zonerelay.inbound.access.strangers import Strangers
from zonerelay.inbound.limits.bursts import Bursts
from zonerelay.inbound.limits.error_delay import ErrorDelays
from zonerelay.inbound.limits.memory import SessionMemory
from zonerelay.inbound.state.questions import SenderDomainCheck, Users
from zonerelay.inbound.state.rewriting import Rewriting
from zonerelay.message.srs import Srs


def _no_limit() -> SessionMemory:
    return SessionMemory(sys.maxsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """`access` is `None` when there are no rules, `users` when no listener has AUTH.

    `rewriting` is `None` without [[rewrite]], `srs` without [srs].
    `zone_sizes`: the largest message of each zone that limits it.
    `hash_bodies`: mail may be signed (DKIM), and the body's hash is cheapest while it arrives.
    """

    memory: SessionMemory = field(default_factory=_no_limit)
    error_delays: ErrorDelays = field(default_factory=ErrorDelays)
    access: AccessRules | None = None
    users: Users | None = None
    sender_domains: SenderDomainCheck | None = None
    bursts: Bursts | None = None
    rewriting: Rewriting | None = None
    srs: Srs | None = None
    strangers: Strangers = field(default_factory=Strangers)
    hash_bodies: bool = False
    zone_sizes: Mapping[str, int] = field(default_factory=dict)
