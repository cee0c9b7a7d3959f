"""What clients may use up: connections, time, errors, the memory of sessions, and turns of large bodies."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.limits import clients
from zonerelay.inbound.limits.clients import AGE, FREE, STEP, ConnectionLimits, ErrorDelays
from zonerelay.inbound.limits.memory import FAST, SESSION_COST, LargeBodies, SessionMemory
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.session.transport import Deadlines
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.context import HANDSHAKE

ADDRESSES = [
    "", "192.0.2.1", "192.0.2.2", "192.0.3.1",
    "2001:db8:1:1::1", "2001:db8:1:1::2", "2001:db8:1:2::1", "2001:db8:2::1",
]  # fmt: skip


def limits_of(*, total: int, per_client: int, per_network: int) -> ConnectionLimits:
    settings = ListenerSettings(
        max_connections=total, max_connections_per_client=per_client, max_connections_per_network=per_network
    )
    return ConnectionLimits(settings)


def is_empty(limits: ConnectionLimits) -> bool:
    return (limits.count, limits._open) == (0, {})


SAME = [
    ("192.0.2.1", "192.0.2.1", True, True, "one IPv4 address"),
    ("192.0.2.1", "192.0.2.255", False, True, "one /24"),
    ("192.0.2.1", "192.0.20.1", False, False, "neighbouring /24s, one of which begins like the other"),
    ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True, True, "one /64: a machine chooses the rest itself"),
    ("2001:db8:1:2::1", "2001:db8:1:3::1", False, True, "one /48: a customer chooses the rest"),
    ("2001:db8:1:2::1", "2001:db8:2:2::1", False, False, "two /48s"),
    ("2001:db8::1", "2001:db8:0:0:1::", True, True, "zeros that are not written"),
    ("::1", "127.0.0.1", False, False, "the families have nothing in common"),
]


@pytest.mark.parametrize(("one", "other", "client", "network", "reason"), SAME, ids=[row[4] for row in SAME])
def test_clients_and_networks(one: str, other: str, client: bool, network: bool, reason: str) -> None:
    assert (clients.client_key(one) == clients.client_key(other)) is client, reason
    limits = limits_of(total=9, per_client=1, per_network=9)
    limits.enter(one)
    assert limits.enter(other) is (Reason.CLIENT_CONNECTIONS if client else None)
    limits = limits_of(total=9, per_client=9, per_network=1)
    limits.enter(one)
    assert limits.enter(other) is (Reason.NETWORK_CONNECTIONS if network else None)


def test_a_move_does_not_meet_itself() -> None:
    limits = limits_of(total=1, per_client=1, per_network=1)
    limits.enter("192.0.2.1")
    assert limits.move("192.0.2.1", "192.0.2.1") is None
    assert limits.move("192.0.2.1", "192.0.2.2") is None
    assert limits.move("192.0.2.2", "") is None
    limits.leave("")
    assert is_empty(limits)


def test_lower_limits_let_who_is_there_leave() -> None:
    limits = limits_of(total=9, per_client=9, per_network=9)
    for _ in range(3):
        limits.enter("192.0.2.1")
    limits.settings = limits_of(total=9, per_client=9, per_network=2).settings
    assert limits.enter("192.0.2.9") is Reason.NETWORK_CONNECTIONS
    for _ in range(3):
        limits.leave("192.0.2.1")
    assert limits.enter("192.0.2.9") is None


@given(st.lists(st.tuples(st.sampled_from(ADDRESSES), st.sampled_from(ADDRESSES)), max_size=40))
def test_counts_are_those_of_who_is_there(steps: list[tuple[str, str]]) -> None:
    """Enter as the one, move to the other when there is room, and leave: nothing stays counted."""
    limits = limits_of(total=20, per_client=2, per_network=3)
    inside: list[str] = []
    for first, then in steps:
        if limits.enter(first) is None:
            inside.append(then if limits.move(first, then) is None else first)
        assert limits.count == len(inside)
        keys = [clients.client_and_network(address) for address in inside if address]
        assert limits._open == Counter(key for both in keys for key in both)
        assert all(limits._open[client] <= 2 and limits._open[network] <= 3 for client, network in keys)
    for address in inside:
        limits.leave(address)
    assert is_empty(limits)


# What strangers do wrong adds up per client, and ages


def test_some_errors_are_free_then_each_waits_longer_up_to_a_limit() -> None:
    errors = ErrorDelays()
    delays = [errors.made("a", 0.0) for _ in range(FREE + 100)]
    assert delays[: FREE + 3] == [0.0] * FREE + [STEP, 2 * STEP, 3 * STEP]
    assert max(delays) == clients.MAX_ERROR_DELAY == delays[-1]
    assert errors.made("b", 0.0) == 0.0


def test_errors_age_one_by_one_and_the_worst_client_is_free_again_some_day() -> None:
    errors = ErrorDelays()
    for _ in range(FREE + 2):
        errors.made("a", 0.0)
    assert errors.made("a", AGE) == 2 * STEP, ErrorDelays
    for _ in range(10_000):
        errors.made("a", AGE)
    assert errors.made("a", AGE + 600.0) == 0.0


def test_the_table_forgets_whoever_erred_longest_ago() -> None:
    errors = ErrorDelays()
    for number in range(clients.MAX_CLIENTS + 10):
        errors.made(str(number), 0.0)
    assert len(errors._clients) == clients.MAX_CLIENTS


MB = 1024 * 1024


@dataclass(eq=False)
class Session:
    held: int
    must_stay: bool = False
    is_shed: bool = False

    def shed(self) -> None:
        self.is_shed = True


def test_what_sessions_hold_and_what_they_are_counts() -> None:
    memory = SessionMemory(100 * MB)
    memory.holders |= {Session(0), Session(1000), Session(0)}
    memory.used += 1000
    assert memory.total == 1000 + 3 * SESSION_COST
    memory.used -= 1000
    memory.holders.clear()
    assert memory.total == 0


def test_it_is_tight_before_it_is_full() -> None:
    memory = SessionMemory(100 * MB)
    for used, tight, full in ((79 * MB, False, False), (80 * MB, True, False), (100 * MB, True, True)):
        memory.used = used
        assert (memory.tight, memory.full) == (tight, full), used


def test_connections_alone_can_fill_it() -> None:
    memory = SessionMemory(16 * MB)
    memory.holders |= {Session(0) for _ in range(16 * MB // SESSION_COST - 1)}
    assert (memory.tight, memory.full) == (True, False)
    memory.holders.add(Session(0))
    assert memory.full


def test_another_limit_holds_at_once() -> None:
    memory = SessionMemory(100 * MB)
    memory.used = 90 * MB
    memory.change(200 * MB)
    assert (memory.tight, memory.full) == (False, False)
    memory.change(50 * MB)
    assert memory.full


def relieved(*sessions: Session) -> list[bool]:
    memory = SessionMemory(MB)
    memory.holders |= set(sessions)
    memory.relieve()
    return [session.is_shed for session in sessions]


def test_who_holds_most_has_to_go() -> None:
    assert relieved(Session(5), Session(700), Session(0), Session(699)) == [False, True, False, False]


def test_nobody_goes_when_nobody_holds_anything() -> None:
    assert relieved() == []
    assert relieved(Session(0), Session(0)) == [False, False]


def test_who_cannot_go_does_not_keep_the_others_from_going() -> None:
    """A message that waits for the store stays the heaviest for as long as the store likes."""
    assert relieved(Session(5), Session(900, must_stay=True), Session(7)) == [False, False, True]


# Large bodies take turns; slow clients and small messages neither wait nor hold anybody up


class Upload:
    def __init__(self) -> None:
        self.held_up = False
        self.turns = 0

    def resume_reading(self) -> None:
        self.turns += 1


def uploads(count: int) -> list[Upload]:
    return [Upload() for _ in range(count)]


async def test_as_many_as_allowed_read_and_the_next_waits_for_the_first_to_end() -> None:
    turns = LargeBodies(at_once=2, patience=60)
    first, second, third, fourth = uploads(4)
    assert turns.may_read(first, FAST)
    assert turns.may_read(second, FAST)
    assert not turns.may_read(third, FAST)
    assert not turns.may_read(fourth, FAST)
    assert turns.may_read(first, FAST)
    turns.leave(second)
    assert (third.turns, fourth.turns) == (1, 0)
    assert turns.may_read(third, FAST)
    turns.leave(fourth)  # gone while it waited
    turns.leave(first)
    assert fourth.turns == 0
    turns.leave(third)


async def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    turns = LargeBodies(at_once=1, patience=60)
    first, second, third = uploads(3)
    assert turns.may_read(first, FAST)
    assert not turns.may_read(second, FAST)
    turns.leave(first)
    assert second.turns == 1
    assert not turns.may_read(third, FAST)
    turns.leave(second)
    assert third.turns == 1
    turns.leave(third)


async def test_a_client_that_we_have_caught_up_with_needs_no_turn() -> None:
    turns = LargeBodies(at_once=1, patience=60)
    fast, slow = uploads(2)
    assert turns.may_read(fast, FAST)
    assert turns.may_read(slow, FAST - 1)
    assert not turns.may_read(slow, FAST)
    assert turns.may_read(fast, 100)  # gives its turn away
    assert slow.turns == 1
    turns.leave(slow)


async def test_a_silent_client_loses_its_turn_to_those_who_wait_but_not_for_our_own_delay() -> None:
    turns = LargeBodies(at_once=2, patience=0.01)
    silent, ours, waiting = uploads(3)
    ours.held_up = True
    assert turns.may_read(silent, FAST)
    assert turns.may_read(ours, FAST)
    assert not turns.may_read(waiting, FAST)
    for _ in range(200):
        if waiting.turns:
            break
        await asyncio.sleep(0.001)
    assert waiting.turns == 1
    assert not turns.may_read(silent, FAST)  # both turns are taken: it waits like everybody
    for each in (silent, ours, waiting):
        turns.leave(each)


# Deadlines with a time that only the test moves: idle 10 s, transaction 100 s, 50 octets a second


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
