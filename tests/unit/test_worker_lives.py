"""A worker's policy as its supervisor sees it: pure, with times that are passed in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zonerelay.supervisor.workers.child import ending
from zonerelay.supervisor.workers.restart_policy import (
    FIRST_PAUSE,
    HUNG_GRACE,
    LONGEST_PAUSE,
    WELL_AFTER,
    Action,
    RestartPolicy,
    WorkerPhase,
    WorkerTimeouts,
    pause,
)
from zonerelay.supervisor.workers.rolling import HOPELESS, STEADY, RollingRestart

TIMEOUTS = WorkerTimeouts(start=600.0, silence=20.0, stop=40.0)
STABLE = 50.0
"""A time at which every process of these tests has run for long."""


def running(now: float = 0.0) -> RestartPolicy:
    policy = RestartPolicy(TIMEOUTS, now)
    assert policy.due(now) is Action.START
    policy.started(now)
    policy.ready(now)
    return policy


def test_a_worker_that_dies_again_and_again_is_started_later_and_later() -> None:
    policy, now, waits = running(), 0.0, []
    for _ in range(9):
        policy.ended(now)
        waits.append(policy.next_start - now)
        assert policy.due(policy.next_start - 0.01) is None
        now = policy.next_start
        assert policy.due(now) is Action.START
        policy.started(now)
        policy.ready(now)
    assert waits[:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]
    assert waits[-1] == LONGEST_PAUSE
    policy.ended(now + WELL_AFTER + 1)
    assert policy.next_start - now - WELL_AFTER - 1 == FIRST_PAUSE, "it had been well"


def test_silence_is_a_hang_term_comes_first_and_kill_once() -> None:
    policy = running()
    policy.heard(10.0)
    assert policy.due(29.0) is None
    assert policy.due(31.0) is Action.TERMINATE
    assert policy.phase is WorkerPhase.HUNG
    assert policy.due(31.0 + HUNG_GRACE) is None
    assert policy.due(32.0 + HUNG_GRACE) is Action.KILL
    assert policy.due(90.0) is None
    policy.ended(91.0)
    assert policy.due(91.0) is None
    assert policy.due(91.0 + FIRST_PAUSE) is Action.START
    assert policy.deaths == 1


def test_a_supervisor_that_was_held_up_itself_takes_nobodys_silence_for_a_hang() -> None:
    policy = running()
    assert policy.due(4000.0, late=True) is None
    assert policy.due(4019.0) is None
    assert policy.due(4021.0) is Action.TERMINATE


def test_who_does_not_stop_in_time_is_killed_and_who_was_asked_comes_back_at_once() -> None:
    policy = running()
    assert policy.restart(5.0) is Action.TERMINATE
    assert policy.due(44.0) is None
    assert policy.due(46.0) is Action.KILL
    policy.ended(46.0)
    assert policy.due(46.0) is Action.START
    assert policy.deaths == 0


def test_a_worker_that_never_becomes_ready_is_killed() -> None:
    policy = RestartPolicy(TIMEOUTS, 0.0)
    policy.started(0.0)
    assert policy.due(599.0) is None
    assert policy.due(601.0) is Action.KILL


@pytest.mark.parametrize("phase", ["down", "starting", "running"])
def test_one_that_is_stopped_is_never_started_again(phase: str) -> None:
    policy = RestartPolicy(TIMEOUTS, 0.0)
    if phase != "down":
        policy.started(0.0)
    if phase == "running":
        policy.ready(0.0)
    policy.stop(1.0)
    if phase != "down":
        policy.ended(2.0)
    assert policy.phase is WorkerPhase.OVER
    assert policy.due(1000.0) is None


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(["wait", "start", "ready", "heard", "end", "replace", "stopping"]), max_size=40)
)
def test_there_is_never_a_second_start_before_an_end(steps: list[str]) -> None:
    policy, now, alive = RestartPolicy(TIMEOUTS, 0.0), 0.0, False
    for step in steps:
        now += 7.0
        act = policy.due(now)
        assert not (act is Action.START and alive)
        if act is Action.START:
            alive = True
            policy.started(now)
        elif step == "end" and alive:
            alive = False
            policy.ended(now)
        elif step == "replace":
            assert policy.restart(now) in ((Action.TERMINATE, None) if alive else (None,))
        elif step in ("ready", "heard", "stopping") and alive:
            getattr(policy, step)(now)
    assert pause(policy.deaths) <= LONGEST_PAUSE


def come_back(policy: RestartPolicy, now: float = 1.0) -> None:
    policy.restart(now)
    policy.ended(now)
    policy.started(now)
    policy.ready(now)


def test_a_roll_replaces_one_at_a_time_while_another_takes_the_clients() -> None:
    lives = {0: running(), 1: running(), 2: running()}
    roll = RollingRestart(lives)
    order = []
    while (worker := roll.step(lives, STABLE)) is not None:
        order.append(worker)
        lives[worker].restart(1.0)
        assert roll.step(lives, STABLE) is None, "it has not ended yet"
        lives[worker].ended(2.0)
        lives[worker].started(2.0)
        assert roll.step(lives, STABLE) is None, "it is not ready yet"
        lives[worker].ready(3.0)
    assert order == [0, 1, 2]
    assert roll.done
    assert roll.replaced == [0, 1, 2]


def test_a_roll_waits_while_nobody_else_takes_clients_and_goes_on_with_one_worker_alone() -> None:
    lives = {0: running(), 1: running()}
    roll = RollingRestart(lives)
    lives[1].ended(1.0)
    assert roll.step(lives, STABLE) == 1, "it is down anyway"
    assert roll.step(lives, STABLE) is None
    come_back(lives[1])
    assert roll.step(lives, STABLE) == 0
    alone = {0: running()}
    assert RollingRestart(alone).step(alone, STABLE) == 0


def test_a_roll_ends_when_the_new_process_does_not_come_up() -> None:
    lives = {0: running(), 1: running()}
    roll = RollingRestart(lives)
    assert roll.step(lives, STABLE) == 0
    come_back(lives[0])
    assert roll.step(lives, STABLE) == 1
    lives[1].restart(2.0)
    lives[1].ended(2.0)
    lives[1].started(2.0)
    lives[1].ended(3.0)
    assert roll.step(lives, STABLE) is None
    assert roll.failed == 1
    assert roll.replaced == [0]
    assert roll.done


def test_a_roll_goes_on_with_one_that_had_died_and_come_back_before_its_turn() -> None:
    lives = {0: running(), 1: running()}
    roll = RollingRestart(lives)
    assert roll.step(lives, STABLE) == 0
    lives[1].ended(1.0)
    lives[1].started(2.0)
    lives[1].ready(2.0)
    come_back(lives[0])
    assert roll.step(lives, STABLE) == 1
    lives[1].restart(3.0)
    lives[1].ended(3.0)
    assert roll.step(lives, STABLE) is None, "it has ended and is about to be started"
    assert roll.failed is None


def test_one_that_dies_with_its_first_clients_has_not_come_up() -> None:
    lives = {0: running(), 1: running()}
    roll = RollingRestart(lives)
    assert roll.step(lives, 1.0) == 0
    come_back(lives[0], 1.0)
    assert roll.step(lives, 1.0 + STEADY - 0.01) is None, "the other one is not touched yet"
    lives[0].ended(1.5)
    assert roll.step(lives, 1.5) is None
    assert roll.failed == 0


def test_one_that_came_up_and_dies_while_the_next_is_replaced_stops_the_roll() -> None:
    lives = {0: running(), 1: running(), 2: running()}
    roll = RollingRestart(lives)
    assert roll.step(lives, STABLE) == 0
    come_back(lives[0])
    assert roll.step(lives, STABLE) == 1
    lives[1].restart(STABLE)
    lives[0].ended(STABLE + STEADY)
    assert roll.step(lives, STABLE + STEADY) is None
    assert (roll.failed, roll.replaced, roll.done) == (0, [0], True)


def test_a_replaced_one_that_somebody_asks_to_stop_does_not_stop_the_roll() -> None:
    lives = {0: running(), 1: running()}
    roll = RollingRestart(lives)
    assert roll.step(lives, STABLE) == 0
    come_back(lives[0])
    assert roll.step(lives, STABLE) == 1
    come_back(lives[0], STABLE)
    come_back(lives[1], STABLE)
    assert roll.step(lives, 2 * STABLE) is None
    assert (roll.failed, roll.replaced, roll.done) == (None, [0, 1], True)


def test_one_that_was_in_trouble_before_does_not_stop_the_roll() -> None:
    lives = {0: running(), 1: running(), 2: running()}
    lives[1].ended(1.0)
    roll = RollingRestart(lives)
    assert roll.step(lives, STABLE) == 0
    come_back(lives[0])
    assert roll.step(lives, STABLE) == 1
    lives[1].started(2.0)
    assert roll.step(lives, STABLE) is None
    lives[1].ended(3.0)
    assert roll.step(lives, STABLE) == 2
    come_back(lives[2])
    assert roll.step(lives, STABLE) is None
    assert roll.done
    assert (roll.failed, roll.replaced) == (None, [0, 2])


def test_who_was_in_trouble_before_may_die_again_while_others_are_replaced() -> None:
    lives = {0: running(), 1: running()}
    lives[0].ended(1.0)
    roll = RollingRestart(lives)
    assert roll.step(lives, STABLE) == 0
    lives[0].started(2.0)
    lives[0].ready(2.0)
    assert roll.step(lives, STABLE) == 1
    lives[0].ended(STABLE)
    come_back(lives[1], STABLE)
    assert roll.step(lives, 2 * STABLE) is None
    assert (roll.failed, roll.replaced, roll.done) == (None, [0, 1], True)


def test_who_is_well_runs_and_has_not_just_died() -> None:
    policy = RestartPolicy(TIMEOUTS, 0.0)
    assert not policy.is_well(0.0)
    policy.started(0.0)
    policy.ready(0.0)
    assert policy.is_well(0.0)
    policy.ended(1.0)
    policy.started(2.0)
    policy.ready(2.0)
    assert not policy.is_well(2.0 + WELL_AFTER)
    assert policy.is_well(2.1 + WELL_AFTER)


def test_nobody_waits_for_workers_that_die_at_each_start() -> None:
    lives = {0: running(), 1: running()}
    for death in range(1, HOPELESS + 1):
        lives[1].ended(float(death))
        lives[1].started(float(death))
    roll = RollingRestart({0: lives[0]})
    assert roll.step(lives, STABLE) == 0


@pytest.mark.parametrize(
    ("status", "because", "words", "expected"),
    [
        (-9, "", "", "killed by SIGKILL"),
        (-9, "no sign of policy for 20 s", "", "no sign of policy for 20 s; killed by SIGKILL"),
        (1, "", "the spool is locked", "exited with status 1: the spool is locked"),
        (-99, "", "", "killed by signal 99"),
    ],
)
def test_an_end_is_told_in_words(status: int, because: str, words: str, expected: str) -> None:
    assert ending(status, killed_because=because, last_words=words) == expected
