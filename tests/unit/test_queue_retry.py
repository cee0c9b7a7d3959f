"""When the next attempt happens, and which one is the last."""

import asyncio
import gc
import math
import sys
import threading
import types
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from msgspec import structs

from tests.support.event_log import EventLog, events_into
from tests.support.queueing import delivery
from zonerelay.config.settings import BounceSettings, RetryPolicyName, RetrySettings, ZoneSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import queue_of
from zonerelay.model.envelope import Envelope, Mailbox, MessageId, Recipient
from zonerelay.queue.settle import retry
from zonerelay.queue.settle.retry import IsolatedBackoff

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
EXACT = RetrySettings(jitter=0.0)
ENVELOPE = Envelope(
    id=MessageId("00000000000000aa"),
    sender=Mailbox("a@example.org"),
    recipients=(Recipient(address=Mailbox("b@example.com")),),
    created=0.0,
)
FROM_NOBODY = structs.replace(ENVELOPE, sender=Mailbox(""))


def build(
    settings: RetrySettings, bounce: BounceSettings | None = None, *zones: ZoneSettings
) -> tuple[retry.RetryPolicy, EventLog]:
    sink = EventLog()
    events = events_into(sink, ManualClock())
    return retry.build(settings, bounce or BounceSettings(), zones, random=Random(7), events=events), sink


async def attempts(
    settings: RetrySettings,
    *,
    envelope: Envelope = ENVELOPE,
    bounce: BounceSettings | None = None,
    zone: ZoneSettings | None = None,
    limit: int = 60,
) -> list[float]:
    """Times since acceptance of every attempt, when each fails at once."""
    policy, _ = build(settings, bounce, *([zone] if zone else []))
    state = delivery(created=1000.0, queue=queue_of(zone.name if zone else "default"))
    times = [0.0]
    while len(times) < limit:
        state = structs.replace(state, attempts=state.attempts + 1)
        following = await policy.next_attempt(envelope, state, 1000.0 + times[-1])
        if following is None:
            break
        times.append(following - 1000.0)
    return times


async def test_schedule_follows_its_delays_and_repeats_the_last_until_max_age() -> None:
    times = await attempts(EXACT)
    assert times[:9] == [
        0, 1 * MINUTE, 6 * MINUTE, 21 * MINUTE, 51 * MINUTE,
        HOUR + 51 * MINUTE, 3 * HOUR + 51 * MINUTE, 7 * HOUR + 51 * MINUTE, 11 * HOUR + 51 * MINUTE,
    ]  # fmt: skip
    assert all(later - earlier <= 4 * HOUR for earlier, later in pairwise(times[7:]))
    assert times[-1] == 5 * DAY


async def test_exponential_makes_six_attempts_the_last_after_thirteen_hours() -> None:
    settings = replace(EXACT, policy=RetryPolicyName.EXPONENTIAL)
    assert await attempts(settings) == [0, 60, 360, 1860, 9360, 46860]


async def test_quadratic_makes_ten_attempts_the_last_after_285_minutes() -> None:
    settings = replace(EXACT, policy=RetryPolicyName.QUADRATIC)
    assert [time / 60 for time in await attempts(settings)] == [0, 1, 5, 14, 30, 55, 91, 140, 204, 285]


@pytest.mark.parametrize(
    ("policy", "max_attempts", "made"),
    [
        (RetryPolicyName.SCHEDULE, 3, 3),
        (RetryPolicyName.SCHEDULE, 1, 1),
        (RetryPolicyName.EXPONENTIAL, 3, 3),
        (RetryPolicyName.EXPONENTIAL, 50, 6),  # the formula has no seventh
        (RetryPolicyName.QUADRATIC, 3, 3),
        (RetryPolicyName.QUADRATIC, 12, 12),
    ],
)
async def test_max_attempts_ends_it(policy: RetryPolicyName, max_attempts: int, made: int) -> None:
    settings = replace(EXACT, policy=policy, max_attempts=max_attempts)
    assert len(await attempts(settings)) == made


@pytest.mark.parametrize("policy", list(RetryPolicyName))
async def test_the_last_attempt_is_brought_forward_to_max_age(policy: RetryPolicyName) -> None:
    times = await attempts(replace(EXACT, policy=policy, max_age=1000.0))
    assert times[-1] == 1000.0
    assert times == sorted(times)


async def test_bounces_live_shorter() -> None:
    assert (await attempts(EXACT, envelope=FROM_NOBODY))[-1] == DAY
    policy, _ = build(EXACT)
    assert policy.of("default").lifetime(FROM_NOBODY) == DAY
    assert policy.of("default").lifetime(ENVELOPE) == 5 * DAY
    assert policy.of("default").shortest_lifetime == DAY


async def test_a_zone_has_its_own_schedule_and_age() -> None:
    urgent = ZoneSettings(name="urgent", schedule=(10.0, 20.0), max_age=60.0)
    assert await attempts(EXACT, zone=urgent) == [0, 10, 30, 50, 60]
    # … in the place of any policy of [retry], and of its function's.
    quadratic = replace(EXACT, policy=RetryPolicyName.QUADRATIC)
    assert await attempts(quadratic, zone=urgent) == [0, 10, 30, 50, 60]


async def test_what_a_zone_leaves_out_is_as_in_general() -> None:
    aged = ZoneSettings(name="aged", max_age=600.0)
    assert await attempts(EXACT, zone=aged) == [0, 60, 360, 600]
    thrice = ZoneSettings(name="thrice", max_attempts=3)
    assert await attempts(EXACT, zone=thrice) == [0, 60, 360]
    quick = ZoneSettings(name="quick", schedule=(1.0,))
    times = await attempts(replace(EXACT, max_attempts=4), zone=quick)
    assert times == [0, 1, 2, 3]


async def test_each_zone_has_its_own_age_and_a_dropped_one_that_of_the_default() -> None:
    default = ZoneSettings(max_age=2 * DAY)
    brief = ZoneSettings(name="brief", max_age=HOUR)
    long = ZoneSettings(name="long", max_age=10 * DAY)
    plain = ZoneSettings(name="plain")
    policy, _ = build(EXACT, None, default, brief, long, plain)
    ages = {
        name: policy.of(name).lifetime(ENVELOPE) for name in ("default", "brief", "long", "plain", "gone")
    }
    assert ages == {"default": 2 * DAY, "brief": HOUR, "long": 10 * DAY, "plain": 5 * DAY, "gone": 2 * DAY}


async def test_a_zone_shortens_the_life_of_reports_and_never_prolongs_it() -> None:
    brief = ZoneSettings(name="brief", max_age=HOUR)
    long = ZoneSettings(name="long", max_age=10 * DAY)
    policy, _ = build(EXACT, None, brief, long)
    assert policy.of("brief").lifetime(FROM_NOBODY) == HOUR
    assert policy.of("long").lifetime(FROM_NOBODY) == DAY
    assert policy.of("long").shortest_lifetime == DAY


async def test_a_deferral_at_max_age_expires() -> None:
    policy, _ = build(EXACT)
    state = delivery(created=0.0, attempts=1)
    assert await policy.next_attempt(ENVELOPE, state, 5 * DAY) is None
    # Stored times may be rounded: half a second before is the same attempt.
    assert await policy.next_attempt(ENVELOPE, state, 5 * DAY - 0.5) is None
    assert await policy.next_attempt(ENVELOPE, state, 5 * DAY - 10) == 5 * DAY


async def test_jitter_spreads_delays_within_its_fraction() -> None:
    policy, _ = build(RetrySettings(jitter=0.2, schedule=(100.0,)))
    state = delivery(created=0.0, attempts=1)
    delays = [await policy.next_attempt(ENVELOPE, state, 0.0) or 0.0 for _ in range(200)]
    assert min(delays) >= 80
    assert max(delays) <= 120
    assert max(delays) - min(delays) > 20


# A function of the operator's


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("operators_backoff")
    monkeypatch.setitem(sys.modules, "operators_backoff", module)
    return module


async def test_a_function_decides_and_sees_the_envelope(module: types.ModuleType) -> None:
    seen = []

    def backoff(envelope: Envelope, attempts: int) -> float | None:
        seen.append((envelope.sender, attempts))
        return 10.0 * attempts if attempts < 3 else None

    module.backoff = backoff  # type: ignore[attr-defined]  # a module made here
    settings = RetrySettings(backoff="operators_backoff:backoff", jitter=0.5)
    assert await attempts(settings) == [0, 10, 30]
    assert seen == [("a@example.org", 1), ("a@example.org", 2), ("a@example.org", 3)]


@pytest.mark.parametrize("nonsense", [-1, float("nan"), float("inf"), "60", True, b"", [1]])
async def test_nonsensical_answers_mean_the_default(module: types.ModuleType, nonsense: object) -> None:
    module.backoff = lambda envelope, attempts: nonsense  # type: ignore[attr-defined]  # a module made here
    policy, sink = build(RetrySettings(backoff="operators_backoff:backoff"))
    state = delivery(created=0.0, attempts=1)
    assert await policy.next_attempt(ENVELOPE, state, 0.0) == retry.FALLBACK_DELAY
    assert len(sink.named("trouble")) == 1


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(3), StopIteration(), KeyboardInterrupt()])
async def test_an_exception_is_a_temporary_default(module: types.ModuleType, error: BaseException) -> None:
    def backoff(envelope: Envelope, attempts: int) -> float:
        raise error

    module.backoff = backoff  # type: ignore[attr-defined]  # a module made here
    policy, sink = build(RetrySettings(backoff="operators_backoff:backoff"))
    state = delivery(created=0.0, attempts=1)
    for _ in range(2):
        assert await policy.next_attempt(ENVELOPE, state, 0.0) == retry.FALLBACK_DELAY
    assert len(sink.named("trouble")) == 2


async def test_a_function_that_hangs_is_left_alone_until_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zonerelay.queue.settle.retry.BACKOFF_TIMEOUT", 0.2)
    sink = EventLog()
    released = threading.Event()
    calls = []

    def backoff(envelope: Envelope, attempts: int) -> float:
        calls.append(attempts)
        released.wait()
        return 5.0

    isolated = IsolatedBackoff(backoff, events_into(sink, ManualClock()))
    assert await isolated.delay(ENVELOPE, 1) == 900.0
    assert await isolated.delay(ENVELOPE, 2) == 900.0
    assert calls == [1]
    assert len(sink.named("trouble")) == 1
    released.set()
    while isolated._threads.stuck(math.inf):
        await asyncio.sleep(0)
    assert await isolated.delay(ENVELOPE, 3) == 5.0


async def test_a_function_that_a_reload_has_replaced_leaves_no_thread() -> None:
    """Each reload left a thread that waited for calls."""
    before = set(threading.enumerate())
    isolated = IsolatedBackoff(lambda envelope, attempts: 5.0, events_into(EventLog(), ManualClock()))
    assert await isolated.delay(ENVELOPE, 1) == 5.0
    (thread,) = [each for each in threading.enumerate() if each.name == "backoff" and each not in before]
    del isolated
    gc.collect()
    await asyncio.to_thread(thread.join, 5.0)
    assert not thread.is_alive()


async def test_age_bounds_a_function_too(module: types.ModuleType) -> None:
    module.backoff = lambda envelope, attempts: 1e9  # type: ignore[attr-defined]  # a module made here
    assert await attempts(RetrySettings(backoff="operators_backoff:backoff")) == [0, 5 * DAY]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nothing", "module:function"),
        (":f", "module:function"),
        ("m:", "module:function"),
        ("no_such_module_here:f", "the module 'no_such_module_here' was not found"),
        ("math:no_such", "has no 'no_such'"),
        ("math:pi", "math:pi is not a function"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_explained(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        retry.load_backoff(spec)
