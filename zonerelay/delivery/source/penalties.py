"""Remembers hosts that have refused a source, and source addresses that this machine lacks.

A refusal counts for one source and the hosts of one destination, in all zones, until its penalty is over.
While a source has IPv4 as well, a refusal over IPv6 counts for its IPv6 only: the next attempt uses IPv4. An
address that cannot be bound is passed over by all mail for `ABSENT_FOR` seconds and then tried again.

The memory is lost with the process: after a restart each refusal is learnt again, at the price of one
deferral. It is bounded by `MAX_REMEMBERED` and forgets the oldest refusal first. No I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from zonerelay.config.settings import SourceSettings
from zonerelay.model.clock import Clock
from zonerelay.model.reply import Reply

MAX_REMEMBERED = 10_000
ABSENT_FOR = 60.0


@dataclass(frozen=True, slots=True)
class Penalty:
    """`hosts` have refused `source` with `reply`. `until` is Unix time; `ipv6`: the penalty is for IPv6
    alone.
    """

    source: str
    hosts: str
    reply: Reply
    until: float
    ipv6: bool = False


@dataclass(frozen=True, slots=True)
class _Refusal:
    at: float
    until: float
    reply: Reply


@dataclass(frozen=True, slots=True)
class _Absence:
    until: float
    reason: str


_Key = tuple[str, str, bool]


class SourceMemory:
    """Times inside are monotonic, so a clock that is set does not lengthen a penalty."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refusals: OrderedDict[_Key, _Refusal] = OrderedDict()
        self._absences: dict[tuple[str, str], _Absence] = {}

    def keep(self, sources: Iterable[SourceSettings]) -> None:
        """Forgets every other source."""
        names = {source.name for source in sources}
        owners = {(source.name, ip) for source in sources for ip in source.address}
        for key in [key for key in self._refusals if key[0] not in names]:
            del self._refusals[key]
        for owner in [owner for owner in self._absences if owner not in owners]:
            del self._absences[owner]

    # Refusals.

    def refused(self, source: str, hosts: str, reply: Reply, *, seconds: float, ipv6: bool) -> bool:
        """Notes a refusal. Returns true when the source had no penalty there before."""
        key = (source, hosts, ipv6)
        is_new = self._in_force(key) is None
        now = self._clock.monotonic()
        self._refusals[key] = _Refusal(now, now + seconds, reply)
        self._refusals.move_to_end(key)
        if len(self._refusals) > MAX_REMEMBERED:
            self._refusals.popitem(last=False)
        return is_new

    def refused_at(self, source: str, hosts: str, *, ipv6: bool = False) -> float | None:
        """Returns when these hosts last refused the source, `None` when no penalty is in force. `ipv6`: when
        they refused its IPv6 alone.
        """
        refusal = self._in_force((source, hosts, ipv6))
        return None if refusal is None else refusal.at

    def penalties(self) -> list[Penalty]:
        """Returns all penalties in force, the latest last."""
        now, offset = self._clock.monotonic(), self._clock.now() - self._clock.monotonic()
        return [
            Penalty(source, hosts, refusal.reply, refusal.until + offset, ipv6)
            for (source, hosts, ipv6), refusal in self._refusals.items()
            if refusal.until > now
        ]

    def _in_force(self, key: _Key) -> _Refusal | None:
        refusal = self._refusals.get(key)
        if refusal is None or refusal.until > self._clock.monotonic():
            return refusal
        del self._refusals[key]
        return None

    # Absences.

    def absent(self, source: str, ip: str, reason: str) -> bool:
        """Notes that an address cannot be bound. Returns true when that is news."""
        now = self._clock.monotonic()
        is_new = (source, ip) not in self._absences
        self._absences[source, ip] = _Absence(now + ABSENT_FOR, reason)
        return is_new

    def present(self, source: str, ip: str) -> bool:
        """Notes that an address can be bound. Returns true when that is news."""
        return self._absences.pop((source, ip), None) is not None

    def is_absent(self, source: str, ip: str) -> bool:
        """True while the address is not worth a try."""
        if not self._absences:
            return False
        absence = self._absences.get((source, ip))
        return absence is not None and absence.until > self._clock.monotonic()

    def absences(self) -> list[tuple[str, str, str]]:
        """Returns source, address and reason of all addresses that could not be bound when they were last
        tried.
        """
        return [(source, ip, absence.reason) for (source, ip), absence in self._absences.items()]
