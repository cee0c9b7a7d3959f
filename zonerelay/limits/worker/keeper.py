"""Keeps the allowances of one worker in all zones up to date by exchanging them with the authority.

No batch waits for an exchange. Exchanges run in the background, one at a time for each zone, with all
requests that have accumulated. `granted` is called when an exchange has brought slots or turns.

Failure: while the authority is unreachable, the worker continues with the slots it holds. If leases expire,
it stops in time: after the part `SAFE` of a lease without an answer it opens no connection and closes idle
ones, until the authority answers again. Then, and when the authority may have lost its state, the worker
declares everything it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from weakref import WeakValueDictionary

import msgspec

from zonerelay.config.units import Rate
from zonerelay.limits.values import AuthorityError, LimitAnswer, LimitAuthority, LimitRequest
from zonerelay.limits.worker.allowance import ClockBounds, LeasedTurns, ZoneAllowance
from zonerelay.model.clock import Clock
from zonerelay.process.tasks import cancel_all
from zonerelay.telemetry.events.events import LimitEvents

TICK = 0.1
"""Seconds between two checks for idle, overdue or expiring items. There is no check while
nothing is leased.
"""

POLL = 0.5
"""Seconds after which a waiting worker sends its request again, because a notice of the authority may have
been lost.
"""

RENEWALS = 3
"""Renewals within one lease."""

SAFE = 2 / 3
"""The part of a lease, since the last renewal was sent, during which its slots are used."""

FORGET = 60.0
"""Seconds for which a destination's turns are remembered after the last one."""


_TurnKey = tuple[str, str, Rate | None, Rate | None]


class _ZoneExchange(msgspec.Struct, eq=False):
    """The limits of one zone and the state of their exchange."""

    allowance: ZoneAllowance
    named: WeakValueDictionary[_TurnKey, LeasedTurns] = msgspec.field(default_factory=WeakValueDictionary)
    """The turns of each destination, as long as its destination uses them."""
    turns: dict[LeasedTurns, None] = msgspec.field(default_factory=dict)
    """Recently used turns, which must be declared to a new authority."""
    wanted: dict[LeasedTurns, None] = msgspec.field(default_factory=dict)
    everything: bool = False
    due: bool = False
    heard: float = float("-inf")
    """When the last request was sent that was answered."""
    asked: float = float("-inf")
    task: asyncio.Task[None] | None = None

    @property
    def wants_exchange(self) -> bool:
        return self.due or self.everything or bool(self.wanted) or self.allowance.wants_exchange

    @property
    def is_idle(self) -> bool:
        return self.allowance.is_empty and not self.wants_exchange and not self.turns


@dataclass(eq=False, repr=False)
class LimitKeeper:
    """Keeps a worker's limits up to date, on one event loop. `granted(zone)` is called when something may
    start that was refused before, and `relieve(zone)` when idle connections may block others
    (`ZoneAllowance.is_contended`, `may_keep`).
    """

    authority: LimitAuthority
    clock: Clock
    events: LimitEvents
    _: KW_ONLY
    granted: Callable[[str], None]
    relieve: Callable[[str], None]

    def __post_init__(self) -> None:
        self.events.read(self.figures)
        self._zones: dict[str, _ZoneExchange] = {}
        self._busy: dict[_ZoneExchange, None] = {}
        """The zones that have slots or want some. There may be thousands of zones of mailboxes
        that do not.
        """
        self._bounds = ClockBounds()
        self._lost: dict[str, str] = {}
        """The reasons of an outage by zone, and with "" that of the connection. The outage lasts until all
        are gone: a store that accepts no writes still answers zones that need none.
        """
        self._ticking: asyncio.TimerHandle | None = None
        self._running = False

    async def start(self) -> None:
        """Start the exchange. Raise AuthorityError if the authority can never be used."""
        self._running = True
        await self.authority.start(self._news, self._back, self._note_lost)

    async def close(self) -> None:
        """Return all slots to the authority."""
        self._running = False
        if self._ticking is not None:
            self._ticking.cancel()
        await cancel_all(*(zone.task for zone in self._zones.values()))
        await self.authority.close()

    @property
    def status(self) -> str:
        """The text for the operator's status."""
        reason = self._reason
        which = f", which is unreachable: {reason}" if reason else ""
        return f"leased from {self.authority.name}{which}"

    @property
    def problem(self) -> str | None:
        reason = self._reason
        return f"limits: {self.authority.name} is unreachable: {reason}" if reason else None

    @property
    def _reason(self) -> str:
        return next(iter(self._lost.values()), "")

    def figures(self) -> dict[str, tuple[int, int, int]]:
        """Return, by zone, the numbers of slots held, connections open and slots requested."""
        return {name: zone.allowance.figures for name, zone in self._zones.items()}

    def zone(self, name: str) -> ZoneAllowance:
        return self._zone(name).allowance

    def turns(
        self, zone: str, site: str, destination: str, rate: Rate | None, zone_rate: Rate | None
    ) -> LeasedTurns:
        """Return the send times of a destination, or those of the zone if the destination has no rate of its
        own.
        """
        found = self._zone(zone)
        if rate is None:
            site = destination = ""
        key = (site, destination, rate, zone_rate)
        turns = found.named.get(key)
        if turns is None:
            turns = found.named[key] = LeasedTurns(
                site,
                destination,
                rate,
                zone_rate,
                clock=self.clock,
                bounds=self._bounds,
                wanted=lambda wanted: self._want(found, wanted),
            )
        return turns

    # Reasons for an exchange

    def _zone(self, name: str) -> _ZoneExchange:
        found = self._zones.get(name)
        if found is None:
            changed = lambda: self._changed(self._zones[name])  # noqa: E731
            allowance = ZoneAllowance(name, changed, self.clock.monotonic)
            found = self._zones[name] = _ZoneExchange(allowance)
        return found

    def _want(self, zone: _ZoneExchange, turns: LeasedTurns) -> None:
        turns.asked = True
        zone.wanted[turns] = zone.turns[turns] = None
        self._changed(zone)

    def _changed(self, zone: _ZoneExchange) -> None:
        if not self._running:
            return
        self._busy[zone] = None
        if zone.task is None or zone.task.done():
            zone.task = asyncio.get_running_loop().create_task(self._exchange_all(zone))
        self._keep_ticking()

    def _keep_ticking(self) -> None:
        if self._running and self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_later(TICK, self._tick)

    def _news(self, name: str) -> None:
        zone = self._zones.get(name)
        if zone is not None:
            zone.due = True
            self._changed(zone)

    def _back(self) -> None:
        self._note_back("")
        for name, zone in self._zones.items():
            if zone.is_idle:
                self._note_back(name)
            else:
                zone.everything = True
                self._changed(zone)

    def _tick(self) -> None:
        self._ticking = None
        now = self.clock.monotonic()
        for zone in list(self._busy):
            self._look(zone, now)
            if zone.is_idle:
                del self._busy[zone]
                self._note_back(zone.allowance.name)
        if self._busy:
            self._keep_ticking()

    def _look(self, zone: _ZoneExchange, now: float) -> None:
        allowance, lease = zone.allowance, self.authority.lease
        is_over = allowance.until is not None and now >= allowance.until
        if is_over and not allowance.closed and not allowance.is_empty:
            allowance.closed = zone.everything = True
            allowance.forget_slots()
        allowance.return_idle(now)
        if allowance.waiters or allowance.is_crowded or allowance.closed:
            self.relieve(allowance.name)
        for turns in list(zone.turns):
            if turns.is_over(now) and not turns.asked and turns.idle_for(now) > FORGET:
                del zone.turns[turns]
        silent = now - max(zone.heard, zone.asked)
        renew = lease is not None and not allowance.is_empty and silent > lease / RENEWALS
        if renew or (allowance.waits and silent > POLL):
            zone.due = True
        if zone.wants_exchange:
            self._changed(zone)

    # The exchange

    async def _exchange_all(self, zone: _ZoneExchange) -> None:
        while zone.wants_exchange and self._running:
            if not await self._exchange(zone):
                return

    async def _exchange(self, zone: _ZoneExchange) -> bool:
        allowance, wanted = zone.allowance, list(zone.wanted)
        everything = zone.everything
        request = LimitRequest(
            allowance.zone_limit,
            allowance.claims(everything=everything),
            tuple(turns.ask() for turns in wanted),
            tuple(each for turns in wanted for each in turns.unused()),
            everything=everything,
            known_turns=tuple(filter(None, (each.known for each in zone.turns))) if everything else (),
        )
        zone.wanted.clear()
        zone.due = zone.everything = False
        sent = zone.asked = self.clock.monotonic()
        try:
            answer = await self.authority.exchange(allowance.name, request)
        except Exception as error:  # noqa: BLE001 - turns and slots must be requested again after any error
            zone.everything = True
            zone.wanted.update(dict.fromkeys(wanted))
            known = isinstance(error, AuthorityError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            self._note_lost(reason, allowance.name)
            return False
        self._apply(zone, answer, wanted, sent)
        return True

    def _apply(
        self, zone: _ZoneExchange, answer: LimitAnswer, wanted: list[LeasedTurns], sent: float
    ) -> None:
        now = self.clock.monotonic()
        allowance = zone.allowance
        zone.heard = sent
        # A batch that was refused while the allowance was closed has left no request.
        opened = allowance.is_closed
        allowance.closed = False
        if self.authority.lease is not None:
            allowance.until = sent + self.authority.lease * SAFE
        self._bounds.note(sent, answer.now, now)
        allowance.owners = answer.owners
        waited = allowance.apply(answer.held, answer.waiters, now)
        for turns, given in zip(wanted, answer.turns, strict=True):
            turns.given(given)
        self._note_back("", allowance.name)
        for seconds in waited:
            self.events.waited(seconds)
        if opened or answer.held or any(answer.turns):
            self.granted(allowance.name)

    def _note_lost(self, reason: str, zone: str = "") -> None:
        is_new = not self._lost
        self._lost[zone] = reason
        if is_new:
            self.events.lost(self.authority.name, reason)

    def _note_back(self, *zones: str) -> None:
        was = bool(self._lost)
        for zone in zones:
            self._lost.pop(zone, None)
        if was and not self._lost:
            self.events.restored(self.authority.name)
