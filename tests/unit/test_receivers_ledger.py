"""The ledger of the receivers tells when a limit does not hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.receivers.ledger import Promise, Tally
from tests.unit.test_rates import fullest

PROMISE = Promise(connections=2, recipients=3, messages=4, rate=(3, 1.0))


def test_what_is_within_the_promise_is_no_complaint() -> None:
    tally = Tally(PROMISE)
    tally.opened()
    tally.opened()
    tally.closed()
    tally.opened()
    tally.recipients(3)
    tally.messages(4)
    for n in range(6):
        tally.mail(100 + n * 0.34)
    assert tally.seen.exceeded == []
    assert abs(tally.seen.used - 1 / 3 / 0.34) < 1e-9


def test_each_limit_that_is_exceeded_is_named() -> None:
    tally = Tally(PROMISE)
    for _ in range(3):
        tally.opened()
    tally.recipients(4)
    tally.messages(5)
    for n in range(4):
        tally.mail(100 + n * 0.33)
    assert tally.seen.exceeded == [
        "connections: 3 of 2",
        "recipients: 4 of 3",
        "messages: 5 of 4",
        "rate: 4 of 3",
    ]


def test_a_connection_that_its_client_has_closed_already_is_none() -> None:
    tally = Tally(PROMISE)
    tally.opened()
    tally.opened()
    assert tally.is_full
    tally.opened(gone=1)
    assert tally.seen.connections == 2


@given(st.lists(st.floats(0, 0.5), max_size=60), st.integers(1, 4))
def test_the_fullest_window_is_found(gaps: list[float], count: int) -> None:
    tally = Tally(Promise(rate=(count, 1.0)))
    now, times = 100.0, []
    for gap in gaps:
        now += gap
        times.append(now)
        tally.mail(now)
    assert (tally.seen.in_window > count) == (fullest(times, 1.0) > count)
