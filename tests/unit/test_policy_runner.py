"""A policy that fails, whatever way it finds, costs a 451 and nothing else."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.event_log import EventLog, events_into
from tests.support.waiting import until
from zonerelay.inbound import policy as policies
from zonerelay.inbound.policy import ACCEPT, Decision, Event, Mail, Policy, PolicyContext, Rcpt, refuse
from zonerelay.inbound.policy.runner import MAX_CALLS, MAX_THREADS, NOT_AVAILABLE, PolicyRunner
from zonerelay.model.clock import ManualClock

LIMIT = 0.05

MAIL = Mail(client=policies.ClientInfo(address="192.0.2.1"), sender="a@example.org")
RCPT = Rcpt(sender="a@example.org", recipient="b@example.com")
ONE_OF_EACH: dict[type[Event], Event] = {
    policies.Connect: policies.Connect(),
    policies.Helo: policies.Helo(name="client.example"),
    policies.Auth: policies.Auth(user="app1", mechanism="PLAIN"),
    Mail: MAIL,
    Rcpt: RCPT,
    policies.Headers: policies.Headers(
        message_id="1", sender="", recipients=("b@example.com",), fields=(("Subject", "x"),)
    ),
    policies.EndOfData: policies.EndOfData(
        message_id="1", sender="", recipients=("b@example.com",), fields=(), size=10
    ),
}


@asynccontextmanager
async def running(policy: Policy, *, timeout: float = LIMIT) -> AsyncIterator[tuple[PolicyRunner, EventLog]]:
    sink = EventLog()
    events = events_into(sink, ManualClock())
    runner = PolicyRunner(policy, timeout=timeout, events=events, zones=lambda: ("default", "bulk"))
    try:
        yield runner, sink
    finally:
        await runner.close()


def policy(**methods: Callable[..., object]) -> Policy:
    """A policy with these methods."""
    made = type("Made", (Policy,), dict(methods))
    answer = made(PolicyContext())
    assert isinstance(answer, Policy)
    return answer


def kinds(sink: EventLog) -> list[tuple[object, object]]:
    return [(fields["step"], fields["kind"]) for fields in sink.named("policy-failed")]


def raising(error: BaseException) -> Callable[..., object]:
    def method(self: Policy, event: Event) -> Decision:
        raise error

    return method


def raising_async(error: BaseException) -> Callable[..., object]:
    async def method(self: Policy, event: Event) -> Decision:
        raise error

    return method


# ---- answers -----------------------------------------------------------------------------------


async def test_only_what_the_class_overrides_is_asked() -> None:
    class Mine(Policy):
        def mail(self, event: Mail) -> Decision | None:
            return refuse(550, "7.1", f"not from {event.sender}")

        async def rcpt(self, event: Rcpt) -> Decision | None:
            return policies.accept(zone="bulk") if event.recipient.endswith("example.com") else None

    async with running(Mine(PolicyContext())) as (runner, sink):
        assert runner.asked == {Mail, Rcpt}
        assert await runner.ask(MAIL) == refuse(550, "7.1", "not from a@example.org")
        assert await runner.ask(RCPT) == policies.accept(zone="bulk")
        assert await runner.ask(Rcpt(sender="", recipient="b@example.net")) is ACCEPT
        for event in policies.EVENTS:
            if event not in runner.asked:
                assert await runner.ask(ONE_OF_EACH[event]) is ACCEPT
        assert sink.events == []


async def test_a_base_policy_starts_no_thread() -> None:
    before = set(threading.enumerate())
    async with running(Policy(PolicyContext())) as (runner, _):
        assert runner.asked == frozenset()
        for event in ONE_OF_EACH.values():
            assert await runner.ask(event) is ACCEPT
        assert set(threading.enumerate()) <= before


async def test_a_method_of_the_instance_counts_as_overridden() -> None:
    mine = Policy(PolicyContext())
    mine.rcpt = lambda event: refuse(450, "7.1", "later")  # type: ignore[method-assign]  # what is tested
    async with running(mine) as (runner, _):
        assert await runner.ask(RCPT) == refuse(450, "7.1", "later")


async def test_def_methods_run_at_the_same_time_and_async_ones_in_one_thread() -> None:
    together = threading.Barrier(4)
    seen: set[int] = set()

    class Mine(Policy):
        def mail(self, event: Mail) -> None:
            together.wait(5)

        async def rcpt(self, event: Rcpt) -> None:
            seen.add(threading.get_ident())
            await asyncio.sleep(0.001)

    async with running(Mine(PolicyContext()), timeout=5) as (runner, _):
        assert await asyncio.gather(*(runner.ask(MAIL) for _ in range(4))) == [ACCEPT] * 4
        assert await asyncio.gather(*(runner.ask(RCPT) for _ in range(4))) == [ACCEPT] * 4
    assert len(seen) == 1
    assert threading.get_ident() not in seen


async def test_more_events_than_threads_wait_their_turn() -> None:
    async with running(policy(mail=lambda self, event: time.sleep(0.002)), timeout=5) as (runner, sink):
        assert await asyncio.gather(*(runner.ask(MAIL) for _ in range(5 * MAX_THREADS))) == [ACCEPT] * 40
        assert sink.events == []


async def test_answers_are_timed_and_failures_counted_by_step_and_kind() -> None:
    events = events_into(EventLog(), ManualClock())
    made = policy(rcpt=lambda self, e: None, mail=raising(ValueError()))
    runner = PolicyRunner(made, timeout=5, events=events, zones=tuple)
    await runner.ask(RCPT)
    assert "zonerelay_policy_seconds_count 1.0" in events.metrics.exposition().decode()
    await runner.ask(MAIL)
    text = events.metrics.exposition().decode()
    assert 'zonerelay_policy_failures_total{event="mail",kind="error"} 1.0' in text
    await runner.close()


# ---- failures ----------------------------------------------------------------------------------


class Nasty(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


ERRORS = [
    ValueError("no"), SystemExit(1), KeyboardInterrupt(), GeneratorExit(), StopIteration(),
    asyncio.CancelledError(), TimeoutError("theirs"), RecursionError(), Nasty(),
]  # fmt: skip


@pytest.mark.parametrize("make", [raising, raising_async])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_whatever_is_raised_is_answered_451_and_the_next_event_is_asked(
    error: BaseException, make: Callable[[BaseException], Callable[..., object]]
) -> None:
    async with running(policy(mail=make(error), rcpt=lambda self, e: None), timeout=5) as (runner, sink):
        for _ in range(2):
            assert await runner.ask(MAIL) is NOT_AVAILABLE
        assert kinds(sink) == [("mail", "error")] * 2
        assert type(error).__name__ in str(sink.named("policy-failed")[0]["detail"]) or isinstance(
            error,
            StopIteration,  # a coroutine makes it a RuntimeError
        )
        assert await runner.ask(RCPT) is ACCEPT


async def test_the_place_that_raised_is_the_policys_own() -> None:
    def method(self: Policy, event: Event) -> Decision:
        return refuse(250, "0.0", "fine")

    async with running(policy(mail=method), timeout=5) as (runner, sink):
        assert await runner.ask(MAIL) is NOT_AVAILABLE
        detail = str(sink.named("policy-failed")[0]["detail"])
        assert detail.startswith(
            "ValueError: the code of a rejection must be from 400 to 599, not 250 at test_policy_"
        )
        assert detail.endswith(" method")


async def test_a_hanging_def_method_is_answered_within_the_limit() -> None:
    go = threading.Event()
    async with running(policy(mail=lambda self, event: go.wait(30))) as (runner, sink):
        began = asyncio.get_running_loop().time()
        assert await runner.ask(MAIL) is NOT_AVAILABLE
        assert asyncio.get_running_loop().time() - began < 1
        assert kinds(sink) == [("mail", "timeout")]
        go.set()


async def test_with_all_threads_hanging_events_fail_at_once_until_one_comes_back() -> None:
    go = threading.Event()

    def method(self: Policy, event: Mail) -> None:
        if event.sender == "hang":
            go.wait(30)

    async with running(policy(mail=method)) as (runner, sink):
        hang = Mail(sender="hang")
        assert await asyncio.gather(*(runner.ask(hang) for _ in range(MAX_THREADS + 3))) == (
            [NOT_AVAILABLE] * (MAX_THREADS + 3)
        )
        assert kinds(sink) == [("mail", "timeout")] * MAX_THREADS + [("mail", "busy")] * 3
        began = asyncio.get_running_loop().time()
        assert await runner.ask(MAIL) is NOT_AVAILABLE
        assert asyncio.get_running_loop().time() - began < LIMIT / 2
        assert kinds(sink)[-1] == ("mail", "busy")
        go.set()
        async with asyncio.timeout(5):
            while await runner.ask(MAIL) is not ACCEPT:
                await asyncio.sleep(0.001)


async def test_what_nobody_waits_for_any_more_is_not_asked_later() -> None:
    go, asked = threading.Event(), list[str]()

    def method(self: Policy, event: Mail) -> None:
        asked.append(event.sender)
        go.wait(30)

    async with running(policy(mail=method)) as (runner, _):
        senders = [str(n) for n in range(MAX_THREADS + 3)]
        await asyncio.gather(*(runner.ask(Mail(sender=sender)) for sender in senders))
        go.set()
        async with asyncio.timeout(5):
            while await runner.ask(Mail(sender="last")) is not ACCEPT:
                await asyncio.sleep(0.001)
    assert asked == [*senders[:MAX_THREADS], "last"]


async def test_a_hanging_coroutine_is_cancelled_and_leaves_room() -> None:
    cancelled = threading.Event()

    class Mine(Policy):
        async def mail(self, event: Mail) -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                cancelled.set()

        async def rcpt(self, event: Rcpt) -> None:
            return None

    async with running(Mine(PolicyContext())) as (runner, sink):
        asking = asyncio.create_task(runner.ask(MAIL))
        assert await runner.ask(RCPT) is ACCEPT
        assert await asking is NOT_AVAILABLE
        assert kinds(sink) == [("mail", "timeout")]
        assert await asyncio.to_thread(cancelled.wait, 5)
        assert await runner.ask(RCPT) is ACCEPT


async def test_a_coroutine_that_blocks_its_loop_makes_events_fail_at_once_until_it_goes_on() -> None:
    go = threading.Event()

    class Mine(Policy):
        async def mail(self, event: Mail) -> None:
            go.wait(30)

        async def rcpt(self, event: Rcpt) -> None:
            return None

        def helo(self, event: policies.Helo) -> None:
            return None

    async with running(Mine(PolicyContext())) as (runner, sink):
        both = await asyncio.gather(runner.ask(MAIL), runner.ask(RCPT))
        assert list(both) == [NOT_AVAILABLE] * 2
        assert sorted(kinds(sink), key=str) == [("mail", "timeout"), ("rcpt", "busy")]
        began = asyncio.get_running_loop().time()
        assert await runner.ask(RCPT) is NOT_AVAILABLE
        assert asyncio.get_running_loop().time() - began < LIMIT / 2
        assert await runner.ask(policies.Helo(name="x")) is ACCEPT
        go.set()
        async with asyncio.timeout(5):
            while await runner.ask(RCPT) is not ACCEPT:
                await asyncio.sleep(0.001)


async def test_coroutines_that_ignore_their_cancelling_are_bounded() -> None:
    async def method(self: Policy, event: Event) -> None:
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                if stop.is_set():
                    raise

    stop = threading.Event()
    async with running(policy(mail=method)) as (runner, sink):
        await asyncio.gather(*(runner.ask(MAIL) for _ in range(MAX_CALLS)))
        # On a busy machine most of them may be given up before they begin, and hold no place.
        async with asyncio.timeout(30):
            while not kinds(sink) or kinds(sink)[-1] != ("mail", "busy"):
                answers = await asyncio.gather(*(runner.ask(MAIL) for _ in range(MAX_CALLS // 20)))
                assert set(answers) == {NOT_AVAILABLE}
        stop.set()


async def test_a_late_answer_is_dropped() -> None:
    go, gone = threading.Event(), threading.Event()

    def method(self: Policy, event: Event) -> Decision:
        go.wait(30)
        gone.set()
        return refuse(550, "7.1", "too late")

    async with running(policy(mail=method)) as (runner, _):
        assert await runner.ask(MAIL) is NOT_AVAILABLE
        go.set()
        assert await asyncio.to_thread(gone.wait, 5)
        await asyncio.sleep(0.01)  # the answer arrives; an unhandled error would fail the test


async def test_a_client_that_leaves_cancels_the_question() -> None:
    asked, cancelled = threading.Event(), threading.Event()

    async def method(self: Policy, event: Event) -> None:
        asked.set()
        try:
            await asyncio.sleep(1000)
        finally:
            cancelled.set()

    async with running(policy(mail=method, rcpt=lambda self, e: None), timeout=5) as (runner, sink):
        asking = asyncio.create_task(runner.ask(MAIL))
        assert await asyncio.to_thread(asked.wait, 5)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await asyncio.to_thread(cancelled.wait, 5)
        assert sink.events == []


class Impostor:
    reply = None
    zone = ""
    add = remove = ()


@pytest.mark.parametrize(
    "answer", [True, 0, "", "550 no", (550, "no"), Impostor(), Decision], ids=lambda answer: repr(answer)[:20]
)
async def test_what_is_no_decision_is_a_bad_decision(answer: object) -> None:
    async def method(self: Policy, event: Event) -> object:
        return answer

    made = policy(mail=lambda self, event: answer, rcpt=method)
    async with running(made, timeout=5) as (runner, sink):
        assert await runner.ask(MAIL) is NOT_AVAILABLE
        assert await runner.ask(RCPT) is NOT_AVAILABLE
        assert kinds(sink) == [("mail", "bad-decision"), ("rcpt", "bad-decision")]


async def test_a_def_method_that_returns_a_coroutine_is_told_to_be_async() -> None:
    async def answer() -> None:
        return None

    async with running(policy(mail=lambda self, event: answer()), timeout=5) as (runner, sink):
        assert await runner.ask(MAIL) is NOT_AVAILABLE
        assert "async def" in str(sink.named("policy-failed")[0]["detail"])


EDIT = policies.accept(add=[("X-Checked", "yes")])
ZONE = policies.accept(zone="bulk")


@pytest.mark.parametrize("event", policies.EVENTS, ids=lambda event: event.step)
async def test_zones_and_edits_only_where_they_can_still_matter(event: type[Event]) -> None:
    chooses = event in (Mail, Rcpt, policies.Headers, policies.EndOfData)
    edits = event is not policies.EndOfData
    for decision, right in ((ZONE, chooses), (EDIT, edits), (policies.accept(zone="no-such-zone"), False)):
        made = policy(**{event.step: lambda self, event, decision=decision: decision})
        async with running(made, timeout=5) as (runner, sink):
            assert await runner.ask(ONE_OF_EACH[event]) == (decision if right else NOT_AVAILABLE)
            assert kinds(sink) == ([] if right else [(event.step, "bad-decision")])


async def test_a_background_task_that_exits_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    tasks: list[asyncio.Task[Any]] = []

    class Mine(Policy):
        async def mail(self, event: Mail) -> None:
            async def leave() -> None:
                raise SystemExit(1)

            tasks.append(asyncio.create_task(leave()))

        async def rcpt(self, event: Rcpt) -> None:
            return None

    async with running(Mine(PolicyContext()), timeout=5) as (runner, _):
        assert await runner.ask(MAIL) is ACCEPT
        assert await runner.ask(RCPT) is ACCEPT
        assert "a background task of a policy failed: SystemExit: 1" in caplog.text
        assert isinstance(tasks[0].exception(), SystemExit)


# ---- closing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
async def test_close_is_called_once(is_async: bool) -> None:
    calls: list[str] = []

    def plain(self: Policy) -> None:
        calls.append("closed")

    async def coroutine(self: Policy) -> None:
        calls.append("closed")

    async with running(policy(close=coroutine if is_async else plain), timeout=5) as (runner, sink):
        await runner.close()
        assert await runner.ask(MAIL) is ACCEPT  # not overridden: nothing to ask
    assert calls == ["closed"]
    assert sink.events == []


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_close_that_hangs_or_raises_ends_within_the_limit(is_async: bool) -> None:
    go = threading.Event()

    def plain(self: Policy) -> None:
        go.wait(30)

    async def coroutine(self: Policy) -> None:
        go.wait(30)

    async with running(policy(close=coroutine if is_async else plain)) as (runner, sink):
        async with asyncio.timeout(2):
            await runner.close()
        assert kinds(sink) == [("close", "timeout")]
    async with running(policy(close=lambda self: 1 // 0)) as (runner, sink):
        await runner.close()
        assert kinds(sink) == [("close", "error")]
    go.set()


async def test_after_close_events_are_busy_and_threads_end() -> None:
    before = set(threading.enumerate())
    both = policy(mail=lambda self, e: None, rcpt=raising_async(ValueError()))
    async with running(both, timeout=5) as (runner, _):
        await runner.ask(MAIL)
        await runner.ask(RCPT)
        made = set(threading.enumerate()) - before
        assert len(made) == 2
        await runner.close()
        assert await runner.ask(MAIL) is NOT_AVAILABLE
    await until(lambda: not any(thread.is_alive() for thread in made), seconds=5)


HANGING = """
import asyncio, sys, threading, time
from zonerelay.inbound.policy import Mail, Helo, Rcpt, Policy, PolicyContext
from zonerelay.inbound.policy.runner import PolicyRunner, NOT_AVAILABLE
from tests.support.event_log import EventLog, events_into
from zonerelay.model.clock import ManualClock

class Hanging(Policy):
    def mail(self, event):
        time.sleep(1000)
    async def rcpt(self, event):
        time.sleep(1000)
    async def helo(self, event):
        await asyncio.to_thread(time.sleep, 1000)

async def main():
    events = events_into(EventLog(), ManualClock())
    runner = PolicyRunner(Hanging(PolicyContext()), timeout=0.1, events=events, zones=tuple)
    for event in (Helo(name="x"), Mail(sender=""), Rcpt(sender="", recipient="a@b")):
        assert await runner.ask(event) is NOT_AVAILABLE
    if "close" in sys.argv:
        await runner.close()
    print("done", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("closed", [False, True])
def test_a_hanging_policy_does_not_keep_the_process_from_exiting(closed: bool) -> None:
    command = [sys.executable, "-c", HANGING, *(["close"] if closed else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
