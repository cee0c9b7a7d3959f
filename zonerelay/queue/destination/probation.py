"""Limits how many of a zone's connections are used for destinations that do not respond or respond late (slow
start). Pure.

A host that accepts a connection and says nothing keeps it for minutes; a host that takes a message and does
not answer keeps it for ten. So in a zone that is routed by MX every destination has a standing:

- QUICK: it answered the last attempt in time. Nothing here limits it.
- NEW: the relay has not heard from it yet. It has one connection until it answers, so that as many dead hosts
  as possible are found at a time, and mail for the good ones between them goes (haraka/Haraka#2507).
- FAILING: it did not answer the last attempt, or it is suspended. It has one connection, too.
- SLOW: it answered the last attempt after more than `LONG` seconds. Only the sums below limit it.

Of the zone's connections

- NEW destinations together take five eighths at most;
- FAILING ones a quarter at most, and an eighth at most while a NEW one waits;
- FAILING and SLOW ones together a half at most;
- NEW, FAILING and SLOW ones together three quarters at most.

A destination without room waits here. A connection that is given back goes to the waiting destinations in
rotation: to NEW ones with fresh mail, to NEW ones without it, to FAILING and SLOW ones.

Promise: QUICK destinations find a quarter of the zone's connections that no other destination takes, and NEW
ones find a quarter that no FAILING or SLOW one takes. NEW ones come before FAILING ones because, when
thousands of domains die together, the attempts at them would otherwise take every connection that a healthy
host without a standing needs (seen in ten million simulated deliveries: the queue never became shorter
again).

Workers that share the zone's connections each apply the parts to their own share of them. A destination that
was admitted and waits for its worker to be given a connection counts as if it had that connection; otherwise
the worker would be given connections for destinations that may not use them.

When thousands of domains have died together, the suspensions of many end at a time when FAILING destinations
have few connections. Claimed mail for all of them would fill the window. So once the window is half full,
only so many destinations begin to wait for a probe as fill a quarter of it (`Probes`); the others are
suspended again, which costs no connection. A destination that waits already goes on waiting.

A standing outlives its destination in memory, for up to `KNOWN` destinations; otherwise a zone with more
destinations than memory keeps would take each of them for NEW again and again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from zonerelay.queue.destination.destinations import Destination, Standing
from zonerelay.routing.destinations.route import DestinationKey

KNOWN = 20_000


class Probation:
    """Limits the connections to unproven and slow destinations of one zone, which may have `most`
    connections.
    """

    def __init__(self, most: int) -> None:
        self.resize(most)
        self._active: Counter[Standing] = Counter()
        self._wishing: dict[Destination, Standing] = {}
        self._rows: tuple[tuple[Standing, dict[Destination, None]], ...] = (
            (Standing.NEW, {}),  # with fresh mail
            (Standing.NEW, {}),  # without fresh mail
            (Standing.FAILING, {}),
            (Standing.SLOW, {}),
        )
        self._at = 0
        self._past: OrderedDict[DestinationKey, bool] = OrderedDict()

    def resize(self, most: int) -> None:
        self._eighth = max(1, most // 8)
        self._quarter = max(1, most // 4)
        self._half = max(1, most // 2)
        self._five_eighths = max(1, most * 5 // 8)
        self._three_quarters = max(1, most * 3 // 4)

    def __bool__(self) -> bool:
        """Return whether a destination is waiting."""
        return any(row for _, row in self._rows)

    def admits(self, destination: Destination) -> bool:
        """Return whether these limits allow a destination another transaction."""
        return destination in self._wishing or self._has_room(destination.standing)

    def is_full(self, destination: Destination) -> bool:
        """Return whether a destination already has the one connection that is allowed before it answers."""
        return not destination.suspension.is_proven and destination.active > 0

    def _has_room(self, kind: Standing) -> bool:
        active = self._active
        new, failing, slow = active[Standing.NEW], active[Standing.FAILING], active[Standing.SLOW]
        if kind is Standing.QUICK:
            return True
        if new + failing + slow >= self._three_quarters:
            return False
        if kind is Standing.NEW:
            return new < self._five_eighths
        if failing + slow >= self._half:
            return False
        return kind is Standing.SLOW or failing < (self._eighth if self._new_wait else self._quarter)

    @property
    def _new_wait(self) -> bool:
        return bool(self._rows[0][1] or self._rows[1][1])

    def put_aside(self, destination: Destination) -> None:
        """Keep a destination that was not admitted."""
        kind = destination.standing
        if kind is Standing.NEW:
            row = self._rows[0 if destination.has_fresh else 1][1]
        else:
            row = self._rows[2 if kind is Standing.FAILING else 3][1]
        row[destination] = None

    def sort(self) -> None:
        """Sort the waiting destinations again, because fresh mail may have become backlog."""
        fresh, other = self._rows[0][1], self._rows[1][1]
        for destination in [each for each in fresh if not each.has_fresh]:
            del fresh[destination]
            other[destination] = None

    def next(self, may_go: Callable[[Destination], bool]) -> Destination | None:
        """Return a waiting destination that would be admitted now and may start, or None. It no longer waits
        here.
        """
        for _ in self._rows:
            kind, row = self._rows[self._at]
            self._at = (self._at + 1) % len(self._rows)
            if row and self._has_room(kind) and may_go(destination := next(iter(row))):
                del row[destination]
                return destination
        return None

    def wishes(self, destination: Destination) -> None:
        """Count an admitted destination that is waiting for a connection slot. It then starts, or `gives_up`
        is called.
        """
        kind = destination.standing
        if kind is not Standing.QUICK and destination not in self._wishing:
            self._wishing[destination] = kind
            self._active[kind] += 1

    def gives_up(self, destination: Destination) -> None:
        """Stop counting a destination as waiting for a slot, because it no longer needs one."""
        kind = self._wishing.pop(destination, None)
        if kind is not None:
            self._active[kind] -= 1

    def started(self, destination: Destination) -> None:
        self.gives_up(destination)
        kind = destination.standing
        if kind is not Standing.QUICK:
            destination.counted += (kind,)
            self._active[kind] += 1

    def ended(self, destination: Destination) -> None:
        """Note that one of the transactions of a destination has ended."""
        while len(destination.counted) > destination.active:
            self._uncount(destination)

    def quick(self, destination: Destination) -> bool:
        """Stop limiting a destination, because it has responded in time. Return true if it
        was waiting here.
        """
        self.gives_up(destination)
        while destination.counted:
            self._uncount(destination)
        return any(row.pop(destination, self) is None for _, row in self._rows)

    def _uncount(self, destination: Destination) -> None:
        self._active[destination.counted[-1]] -= 1
        destination.counted = destination.counted[:-1]

    # The memory of past standings

    def remember(self, destination: Destination) -> None:
        """Remember the standing of a destination that is about to be forgotten."""
        kind = destination.standing
        if kind is Standing.QUICK or kind is Standing.SLOW:
            self._past[destination.key] = destination.is_slow
            if len(self._past) > KNOWN:
                self._past.popitem(last=False)

    def recall(self, destination: Destination) -> None:
        """Restore the remembered standing of a destination that is used again."""
        is_slow = self._past.pop(destination.key, None)
        if is_slow is not None:
            destination.suspension.is_proven, destination.is_slow = True, is_slow

    def clear(self) -> None:
        for _, row in self._rows:
            row.clear()


class Probes:
    """Limits how many failed destinations of one zone may be probed at the same time."""

    def __init__(self, window: int) -> None:
        # Each may hold a sixty-fourth of a window that is half full (`zone/window.py`).
        self._most = max(1, window // 256)
        self._waiting: set[Destination] = set()
        """Destinations that began to wait since the window was half full. Some may have had their probe."""

    def may_wait(self, destination: Destination, *, is_half_full: bool) -> bool:
        """Return whether a destination may wait. Its suspension, if any, is over, and mail waits for it."""
        if not is_half_full or destination.is_queued or destination.active:
            return True
        if not destination.suspension.is_failing:
            return True
        if len(self._waiting) >= self._most:
            self._waiting = {each for each in self._waiting if each.is_queued and each.suspension.is_failing}
            if len(self._waiting) >= self._most:
                return False
        self._waiting.add(destination)
        return True
