"""The ledger of the proof that limits hold tells when they do not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.bench.limits.ledger import Promise, Tally
from tests.bench.limits.plan import standard
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
    assert tally.seen.spare is not None
    assert abs(tally.seen.spare - 0.02) < 1e-9
    assert tally.seen.used is not None
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


def test_what_was_seen_before_a_change_is_judged_by_the_old_promise() -> None:
    tally = Tally(PROMISE)
    tally.opened()
    tally.opened()
    tally.mail(100)
    tally.change(Promise(connections=1, rate=(1, 1.0)))
    tally.mail(100.1)
    assert [seen.exceeded for seen in tally.history] == [[], ["connections: 2 of 1"]]


@given(st.lists(st.floats(0, 0.5), max_size=60), st.integers(1, 4))
def test_the_fullest_window_is_found(gaps: list[float], count: int) -> None:
    tally = Tally(Promise(rate=(count, 1.0)))
    now, times = 100.0, []
    for gap in gaps:
        now += gap
        times.append(now)
        tally.mail(now)
    assert (tally.seen.in_window > count) == (fullest(times, 1.0) > count)


def test_the_plan_tells_the_relay_what_it_promises() -> None:
    chosen = standard(2525)
    told = {str(each.get("mx") or each.get("domain")): each for each in chosen.destinations()}
    assert told["['mx4.test']"]["max_rate"] == "20/1s"
    assert told["['b.shared.test']"] == {
        "domain": ["b.shared.test"],
        "max_connections": 2,
        "max_recipients_per_transaction": 4,
    }
    addresses = [host.address for site in chosen.sites for host in site.hosts]
    assert len(addresses) == len(set(addresses))
