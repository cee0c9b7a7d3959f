"""A destination that comes back gets its queue at once, in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, cast

import pytest

from tests.bench.simulate.store import IndexedStore
from tests.bench.simulate.timeline import VirtualClock, VirtualLoop
from tests.support.queueing import DELIVERED, NO_HOST, FlakyStore, Relay
from zonerelay.config.settings import BounceSettings, RetrySettings, ZoneSettings
from zonerelay.model.reply import Outcome
from zonerelay.queue.destination.destinations import PUT_OFF_MOST
from zonerelay.routing.destinations.route import Batch

MANY = 2_000
PER_SECOND = 2000
"""What ten connections take when a message needs five milliseconds."""
LONG_RETRY = RetrySettings(jitter=0.0, suspend_min=60.0, suspend_max=600.0, schedule=(3600.0,))
HOUR = 3600.0
NEXT_HOP = ZoneSettings(next_hop="hop", max_connections=10, max_connections_per_destination=10)
MX = ZoneSettings(max_connections=20, max_connections_per_destination=10)


class Receiver:
    """The hosts of `away.example` (or the one next hop) talk from `back` on, others always."""

    def __init__(self, relay: Relay, back: float) -> None:
        self._relay = relay
        self._loop = asyncio.get_running_loop()
        self.back = self._loop.time() + back
        self.taken: Counter[int] = Counter()
        """Per second from the first on that they took after they came back."""
        self.waits: list[float] = []
        """Of mail for others."""
        self.first = 0.0
        relay.courier.seconds = 10 / PER_SECOND
        relay.courier.script = self._answer

    def _answer(self, batch: Batch) -> Sequence[Outcome]:
        now = self._loop.time()
        count = len(batch.deliveries)
        if batch.deliveries[0].domain == "other.example":
            self.waits += [self._relay.clock.now() - each.created for each in batch.deliveries]
        elif now < self.back:
            return [NO_HOST] * count
        else:
            self.first = self.first or now
            self.taken[int(now - self.first)] += count
        return [DELIVERED] * count


def run(work: Coroutine[Any, Any, None]) -> None:  # Any: what a coroutine sends is its own business
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


def make_relay(zone: ZoneSettings, *, warn_after: float = 4 * HOUR, store: FlakyStore | None = None) -> Relay:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    # It has the verbs of the other one, and does not look through the whole queue at each.
    store = store or cast("FlakyStore", IndexedStore())
    bounce = BounceSettings(delay_warning=warn_after)
    return Relay(zones=(zone,), retry=LONG_RETRY, bounce=bounce, clock=VirtualClock(loop), store=store)


async def inject(relay: Relay, count: int) -> None:
    for number in range(count):
        relay.accept(f"u{number}@away.example", sender="")
        if number % 100 == 0:
            await asyncio.sleep(0.05)


async def attempted(relay: Relay) -> int:
    """Deliveries that have had an attempt of their own, and wait as the schedule says."""
    return sum(each.attempts > 0 for each in await relay.stored())


@pytest.mark.parametrize(
    ("zone", "away", "warn_after"),
    [
        pytest.param(NEXT_HOP, 0.5 * HOUR, 4 * HOUR, id="next hop, long away", marks=pytest.mark.proof),
        pytest.param(NEXT_HOP, 0.2 * HOUR, 60.0, id="next hop, old mail", marks=pytest.mark.proof),
        pytest.param(MX, 100.0, 4 * HOUR, id="mx", marks=pytest.mark.proof),
        pytest.param(MX, 0.5 * HOUR, 4 * HOUR, id="mx, long away"),
    ],
)
def test_all_that_waits_leaves_as_fast_as_new_mail_from_the_first_second_on(
    zone: ZoneSettings, away: float, warn_after: float
) -> None:
    async def scene() -> None:
        relay = make_relay(zone, warn_after=warn_after)
        receiver = Receiver(relay, away)
        await relay.scheduler.start()
        await inject(relay, MANY)
        while not receiver.first:
            if not zone.next_hop:
                relay.accept("u@other.example")
            await asyncio.sleep(away / 100)
        left = MANY - await attempted(relay)
        # Seconds are counted from the probe, which may have been made a while ago.
        await asyncio.sleep(1.25 * MANY / PER_SECOND)
        await relay.close()
        assert receiver.taken[0] >= 0.8 * PER_SECOND, receiver.taken
        assert sum(receiver.taken[second] for second in range(4)) >= left, receiver.taken
        assert max(receiver.waits, default=0) < 1

    run(scene())


@pytest.mark.proof
def test_a_probe_costs_little_of_what_waits() -> None:
    """Each that is put off costs a write and a line in the log, at every probe."""

    async def scene() -> None:
        relay = make_relay(NEXT_HOP)
        Receiver(relay, 24 * HOUR)
        await relay.scheduler.start()
        await inject(relay, MANY)
        await asyncio.sleep(50.0)
        before = len(relay.sink.named("deferred"))
        await asyncio.sleep(HOUR)
        probes = len(relay.sink.named("suspended"))
        assert 5 <= probes <= 12
        assert len(relay.sink.named("deferred")) - before <= 1.1 * PUT_OFF_MOST * probes
        await relay.close()

    run(scene())


def test_after_a_crash_all_that_was_put_off_leaves_at_once() -> None:
    async def scene() -> None:
        relay = make_relay(NEXT_HOP)
        Receiver(relay, 24 * HOUR)
        await relay.scheduler.start()
        await inject(relay, 1000)
        await asyncio.sleep(20.0)
        await relay.close()
        relay.store.forget_claims()
        waiting = 1000 - await attempted(relay)
        assert waiting > 980
        again = make_relay(NEXT_HOP, store=relay.store)
        receiver = Receiver(again, 0.0)
        await again.scheduler.start()
        await asyncio.sleep(1.0)
        assert receiver.taken.total() == waiting
        await again.close()

    run(scene())
