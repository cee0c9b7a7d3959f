"""What must hold at every instant, and is looked at while a run goes on.

Limits and rates of a destination hold over all workers. A machine whose lease has ended sends nothing of a
message. No delivery is sent over two connections at once. What a worker keeps in memory is bounded. When the
faults have ended nothing that is due waits for ever, while the zone has room.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.simulation.bucket import LEASE, ObjectStore
from tests.simulation.ledger import Ledger
from tests.simulation.loop import Process, SimLoop
from tests.simulation.network import End, process_of
from tests.simulation.parts import Node
from zonerelay.config.settings import ZoneSettings
from zonerelay.model.delivery import Delivery, DeliveryKey

OUTSIDE = "192.0.2."
PATIENCE = 150.0
"""Seconds for which mail may be due and its hosts not be asked: a suspension, and the watch of the clock."""
HANGS = 25.0
"""Seconds after which a connection may hang and hold the part of a zone that such hosts have."""
HARMLESS = (b"QUIT", b"EHLO", b"HELO", b"NOOP")
"""What a relay may say that has lost its lease: nothing of a message."""


@dataclass
class Watch:
    loop: SimLoop
    ledger: Ledger
    zone: ZoneSettings
    workers: int
    window: int
    """Deliveries of a zone in memory."""
    objects: ObjectStore | None
    """The bucket that the nodes share; then each has the limits for itself."""
    _open: Counter[str] = field(default_factory=Counter)
    _spoke: defaultdict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))
    asked: dict[str, float] = field(default_factory=dict)
    """When a host was connected to last, or a transaction with it began."""
    _due_since: dict[DeliveryKey, float] = field(default_factory=dict)
    _full_at: float = 0.0
    _began: dict[End, float] = field(default_factory=dict)
    """When a connection outside began."""

    def _fail(self, what: str) -> None:
        self.loop.failures.append(f"{what} at {self.loop.now:.3f}")

    # Connections and rates

    def opened(self, end: End) -> None:
        if end.link.address.startswith(OUTSIDE):
            self._began[end] = self.loop.now
            self._count(end, 1)

    def closed(self, end: End) -> None:
        if not end.is_server and end.link.address.startswith(OUTSIDE):
            self._began.pop(end, None)
            self._count(end, -1)

    def _sharing(self, end: End) -> str:
        """Workers of one machine share the limits, nodes on a bucket have them each."""
        process = process_of(end)
        return process.name if self.objects is not None and process is not None else "all"

    def _count(self, end: End, by: int) -> None:
        """Connections that the relay has, over all workers."""
        who, address = self._sharing(end), end.link.address
        zone = f"{who} zone"
        self._open[f"{who} {address}"] += by
        self._open[zone] += by
        if self._open[zone] >= self.zone.max_connections:
            self._full_at = self.loop.now
        if by < 0:
            return
        # Nobody knows what a worker has that stands still while a new supervisor asks: at most its limit.
        times = self.workers if self.ledger.places_unknown() else 1
        for what, most in (
            (f"{who} {address}", self.zone.max_connections_per_destination),
            (zone, self.zone.max_connections),
        ):
            if self._open[what] == most and times == 1 and who == "all" and self.workers > 1:
                self.ledger.sometimes["workers used a limit up"] += 1
            if self._open[what] > most * times:
                self._fail(f"{self._open[what]} connections of {what}")

    def written(self, end: End, data: bytes) -> None:
        """Called with all that is written to a connection, by both sides."""
        if end.is_server or not end.link.address.startswith(OUTSIDE):
            return
        process = process_of(end)
        if process is None:
            return
        if not data.startswith(HARMLESS) and data != b"RSET\r\n":
            self._check_lease(process, data)
        if data.startswith((b"MAIL ", b"RSET")) and b"MAIL FROM" in data:
            self.asked[end.link.address.partition(":")[0]] = self.loop.now
            self._check_rate(end, process)

    def _check_rate(self, end: End, process: Process) -> None:
        rate = self.zone.max_rate_per_destination
        if rate is None:
            return
        # A start forgets what was used, where no supervisor knows it.
        who = f"{process.name if self.workers == 1 else self._sharing(end)} {end.link.address}"
        recent = self._spoke[who]
        recent.append(self.loop.now)
        while recent[0] <= self.loop.now - rate.seconds:
            recent.popleft()
        if len(recent) == rate.count:
            self.ledger.sometimes["a rate was used up"] += 1
        if len(recent) > rate.count and not self.ledger.turns_forgotten(rate.seconds):
            self._fail(f"{len(recent)} transactions in {rate.seconds} s with {who}")

    # Leases

    def has_lease(self, process: Process) -> bool:
        """By what others can see in the bucket, which is no earlier than what the process believes."""
        if self.objects is None:
            return True
        return self.loop.now <= self.objects.renewed.get(process.name, 0.0) + LEASE

    def _check_lease(self, process: Process, data: bytes) -> None:
        if not self.has_lease(process):
            self._fail(f"{process.name} sent {data[:30]!r} without a lease")

    def sent_at_once(self, end: End, first: End, recipient: str) -> None:
        """A recipient was offered on `end` while a transaction for it is under way on `first`."""
        mine, other = process_of(end.other), process_of(first.other)
        if mine is None or other is None or first.other.closed or first.link.broken:
            return
        # What began under a lease that has ended goes on, although there is another lease now.
        lapsed = 0.0 if self.objects is None else self.objects.lapsed.get(other.name, 0.0)
        if self._began.get(first.other, self.loop.now) < lapsed:
            return
        if other.alive and not other.still and self.has_lease(other):
            self._fail(f"{recipient} was offered by {mine.name}, and {other.name} was sending it,")

    # Memory

    def look_into(self, node: Node) -> None:
        """What a worker has in memory does not depend on how much is queued."""
        worker = node.worker
        if worker is None or not node.is_up:
            return
        for status in worker.parts.scheduler.snapshot():
            if status.waiting >= self.window - 1:
                self.ledger.sometimes["the window was full"] += 1
            if status.waiting > self.window:
                self._fail(f"{status.waiting} deliveries wait in the memory of {node.name}")
        bodies = getattr(worker.store, "_bodies", None)
        if bodies is not None and bodies._size > bodies._capacity:
            self._fail(f"{bodies._size} octets of bodies are in the memory of {node.name}")

    # Starvation, when the faults are over

    def look_at(self, due: Iterable[Delivery], hosts_of: Callable[[str], str]) -> None:
        """`due` is all that is due now, in every store."""
        now, before = self.loop.now, self._due_since
        self._due_since = {}
        if any(began < now - HANGS for began in self._began.values()):
            self._full_at = now
            self.ledger.sometimes["a connection held up the zone"] += 1
        for each in due:
            since = self._due_since[each.key] = before.get(each.key, now)
            host = hosts_of(each.domain)
            if now - max(since, self.asked.get(host, 0.0), self._full_at) > PATIENCE:
                self._fail(f"{each.recipient} has been due for {now - since:.0f} s, and nobody asked {host},")
                self._full_at = now
