"""Deadlines with a time that only the test moves: idle 10 s, transaction 100 s, 50 octets a second."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.session.transport import Deadlines
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.context import HANDSHAKE

IDLE, TRANSACTION, RATE = 10.0, 100.0, 50
# Sums of the same seconds in another order; the session looks again after at least as much.
TINY = 1e-6

Step = Callable[[Deadlines, float], None]


def nothing(deadlines: Deadlines, now: float) -> None:
    """Time passes."""


SOME_MAIL = object()
handshake, established, chunk_complete = (
    Deadlines.began_handshake,
    Deadlines.established,
    Deadlines.chunk_complete,
)
paused, resumed = Deadlines.paused, Deadlines.resumed
TOO_SLOW, TOO_LONG = Reason.DATA_RATE, Reason.TRANSACTION_TIME


def deadlines_of(*, idle: float, transaction: float, min_rate: int = 0) -> Deadlines:
    limits = ListenerSettings(idle_timeout=idle, transaction_timeout=transaction, min_data_rate=min_rate)
    return Deadlines(0.0, limits)


def noop(deadlines: Deadlines, now: float) -> None:
    deadlines.answered(now, None)


def mail(deadlines: Deadlines, now: float) -> None:
    deadlines.answered(now, SOME_MAIL)


def body(deadlines: Deadlines, now: float) -> None:
    deadlines.answered(now, SOME_MAIL)
    deadlines.body_began(now)


def octets(count: int) -> Step:
    def step(deadlines: Deadlines, now: float) -> None:
        deadlines.heard = now
        deadlines.octets += count

    return step


def end_of_data(deadlines: Deadlines, now: float) -> None:
    deadlines.complete()
    deadlines.answered(now, None)


# What happens when, when the client is late, and why.
TABLE: list[tuple[list[tuple[float, Step]], float, Reason, str]] = [
    ([], 10, Reason.IDLE, "silence from the start"),
    ([(9, noop)], 19, Reason.IDLE, "idle time starts again with each answer"),
    ([(1, mail)], 11, Reason.IDLE, "silence inside a transaction"),
    ([(n, mail) for n in range(1, 101, 9)], 101, TOO_LONG, "many commands, no end"),
    (
        [*((n, mail) for n in range(1, 93, 9)), (93, noop), (94, mail)],
        104,
        Reason.IDLE,
        "RSET ends a transaction",
    ),
    ([(0, handshake)], 10, Reason.IDLE, "a handshake is not excused from the idle time"),
    ([(1, body), (2, octets(1)), (10, octets(1))], 11.04, TOO_SLOW, "two octets in ten seconds"),
    (
        [(1, body), (2, octets(500)), (11, octets(0)), (20, octets(0))],
        21,
        TOO_SLOW,
        "500 octets buy ten seconds",
    ),
    ([(1, body), (9, octets(10_000))], 19, Reason.IDLE, "what came fast does not excuse silence"),
    ([(0, body), *((n, octets(500)) for n in range(5, 101, 5))], 100, TOO_LONG, "fast, but no end"),
    ([(1, body), (5, octets(10)), (6, end_of_data)], 16, Reason.IDLE, "a small slow message ends in time"),
    ([(1, body), (5, octets(1)), (6, chunk_complete), (15, noop)], 25, Reason.IDLE, "a chunk ends its clock"),
    ([(1, body), (6, chunk_complete), (9, body), (18, octets(1))], 19.02, TOO_SLOW, "each chunk has one"),
    (
        [(1, body), (2, octets(9999)), (3, chunk_complete), (4, body), (13, octets(0))],
        14,
        TOO_SLOW,
        "one chunk does not pay for the next",
    ),
    ([(1, body), (5, paused), (50, resumed), (55, octets(1))], 56.02, TOO_SLOW, "our pause is not its time"),
    (
        [(1, mail), (5, paused), (65, resumed), *((n, mail) for n in range(66, 161, 9))],
        161,
        TOO_LONG,
        "nor is it the transaction's",
    ),
    (
        [(1, body), (5, paused), (6, paused), (50, resumed), (51, resumed), (55, octets(1))],
        56.02,
        TOO_SLOW,
        "saying it twice changes nothing",
    ),
    ([(5, paused), (50, resumed)], 60, Reason.IDLE, "after a pause it has the whole idle time"),
]


def started(steps: list[tuple[float, Step]]) -> Deadlines:
    deadlines = deadlines_of(idle=IDLE, transaction=TRANSACTION, min_rate=RATE)
    for now, step in steps:
        step(deadlines, now)
    return deadlines


@pytest.mark.parametrize(("steps", "late", "why", "reason"), TABLE, ids=[row[3] for row in TABLE])
def test_a_client_is_late_at_its_deadline_and_not_before_and_is_looked_at_then(
    steps: list[tuple[float, Step]], late: float, why: Reason, reason: str
) -> None:
    for done in range(len(steps)):
        assert started(steps[:done]).late(steps[done][0] - 0.01) is None, (reason, steps[done][0])
    deadlines = started(steps)
    assert deadlines.late(late - 0.001) is None, reason
    answer = deadlines.late(late + TINY)
    assert answer is not None, reason
    assert answer.reason is why
    assert str(answer.reply).startswith("421 4.4.2")
    # The next look is at the deadline or before.
    now, looks = (steps[-1][0] if steps else 0.0), 0
    while deadlines.late(now) is None:
        look = deadlines.next_look(now)
        assert now < look <= late + TINY, reason
        now, looks = look, looks + 1
    assert looks <= 3, "the timer is not for polling"


def test_a_handshake_has_its_own_time() -> None:
    deadlines = deadlines_of(idle=300, transaction=1800, min_rate=RATE)
    deadlines.began_handshake(7)
    assert deadlines.next_look(7) == 7 + HANDSHAKE
    assert deadlines.late(6.9 + HANDSHAKE) is None
    late = deadlines.late(7 + HANDSHAKE)
    assert late is not None
    assert late.reason is Reason.IDLE
    deadlines.established(20)
    assert deadlines.late(319) is None
    assert deadlines.late(320) is not None


def test_octets_that_trickle_into_a_handshake_do_not_prolong_it() -> None:
    deadlines = deadlines_of(idle=300, transaction=1800)
    deadlines.began_handshake(0)
    for now in range(0, 30, 5):
        deadlines.octets += 1
        assert deadlines.late(now) is None
    assert deadlines.late(HANDSHAKE) is not None


def test_no_minimum_is_any_rate() -> None:
    deadlines = deadlines_of(idle=10, transaction=100, min_rate=0)
    body(deadlines, 0)
    for now in range(0, 100, 5):
        octets(0)(deadlines, now)
        assert deadlines.late(now) is None


def test_nobody_is_late_while_we_do_not_read() -> None:
    deadlines = started([(1, body), (2, paused)])
    for now in (11, 101, 10_000):
        assert deadlines.late(now) is None
        assert now < deadlines.next_look(now) <= now + IDLE


def test_what_begins_while_we_do_not_read_has_its_time_from_when_we_do() -> None:
    deadlines = deadlines_of(idle=300, transaction=1800)
    for now, step in ((1, paused), (13, handshake), (20, resumed)):
        step(deadlines, now)
    assert deadlines.next_look(20) == 20 + HANDSHAKE
    assert deadlines.late(19.9 + HANDSHAKE) is None
    assert deadlines.late(20 + HANDSHAKE) is not None


STEPS = [
    nothing, handshake, established, noop, mail, body, octets(1), octets(900), chunk_complete,
    end_of_data, paused, resumed,
]  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.floats(0.01, 30)), min_size=1, max_size=30),
    st.sampled_from([(10.0, 100.0), (300.0, 1800.0), (300.0, 20.0)]),
)
def test_a_session_that_looks_when_it_is_told_to_never_finds_a_client_long_late(
    script: list[tuple[Step, float]], limits: tuple[float, float]
) -> None:
    """Whatever begins between two looks: nobody is late for longer than it takes to look."""
    idle, transaction = limits
    deadlines = deadlines_of(idle=idle, transaction=transaction, min_rate=RATE)
    now, look = 0.0, deadlines.next_look(0)
    for step, pause in script:
        until = now + pause
        while look <= until:
            if deadlines.late(look) is not None:
                assert deadlines.late(max(now, look - 0.001)) is None or look - now < 0.001
                return
            later = deadlines.next_look(look)
            assert later > look
            look = later
        now = until
        assert deadlines.late(now - TINY) is None, "it should have been seen at a look before"
        step(deadlines, now)


def test_the_next_transaction_has_its_own_time_when_rset_and_mail_come_together() -> None:
    deadlines = deadlines_of(idle=300.0, transaction=600.0)
    for now in range(0, 6000, 100):
        deadlines.answered(float(now), object())
        assert deadlines.late(now + 99.0) is None
    deadlines.answered(6000.0, same := object())
    deadlines.answered(6250.0, same)
    deadlines.answered(6500.0, same)
    assert deadlines.late(6600.0) is replies.TRANSACTION_TIME
