"""The deliveries that can be claimed: in order, fresh and deferred ones in turns, skipped ones apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.store.builders import NOW, delivery_for, envelope_for, message_id
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.store.common.ready import ReadyMail

DOMAINS = ("a.example", "b.example")


def ready(number: int, due: float = 0.0) -> Delivery:
    address = f"u@{DOMAINS[number % 2]}"
    return replace(delivery_for(envelope_for(message_id(number), address), address), next_attempt=due)


def order(deliveries: Iterable[Delivery]) -> list[Delivery]:
    return sorted(deliveries, key=lambda each: (each.next_attempt, each.message_id))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("add", "add", "skip", "remove", "pop", "since", "skipped")),
            st.integers(0, 12),
            st.sampled_from((0.0, NOW - 5, NOW)),
        ),
        max_size=60,
    )
)
def test_each_is_found_once_and_in_order_whatever_is_added_and_removed(
    steps: list[tuple[str, int, float]],
) -> None:
    mail = ReadyMail()
    waiting: dict[DeliveryKey, Delivery] = {}
    skipped: dict[DeliveryKey, Delivery] = {}
    for what, number, due in steps:
        one = ready(number, due)
        fresh = order(each for each in waiting.values() if each.next_attempt <= 0)
        deferred = order(each for each in waiting.values() if each.next_attempt > 0)
        if what == "add":
            mail.add(one.key, one)
            skipped.pop(one.key, None)
            waiting[one.key] = one
        elif what == "skip" and one.key not in mail:
            mail.skip(one.key, one)
            skipped[one.key] = one
        elif what == "remove":
            assert mail.remove(one.key) == (waiting.pop(one.key, None) or skipped.pop(one.key, None))
        elif what == "since":
            new = [each.key for each in fresh if each.message_id >= one.message_id]
            assert mail.first_since(one.message_id) == (new[0] if new else None)
        elif what == "pop":
            found = mail.pop_either(mail.first_fresh(), mail.first_due())
            assert (found is None) is (not waiting)
            assert found is None or found in (*fresh[:1], *deferred[:1])
            if found is not None:
                del waiting[found.key]
        elif what == "skipped":
            domain = DOMAINS[number % 2]
            apart = sorted((each for each in skipped.values() if each.domain == domain), key=lambda d: d.key)
            assert mail.take_skipped(domain, 2) == apart[:2]
            for each in apart[:2]:
                del skipped[each.key]
        assert len(mail) == len(waiting) + len(skipped)
        assert mail.skipped_count == len(skipped)
        assert mail.skipped.keys() == {each.domain for each in skipped.values()}
    assert order(mail.take(100, (), NOW)) == order([*waiting.values(), *skipped.values()])


def test_fresh_and_deferred_ones_take_turns_and_what_is_not_due_waits() -> None:
    mail = ReadyMail()
    for number in (1, 2, 3):
        for each in (ready(number), ready(number + 10, NOW - number), ready(number + 20, NOW + number)):
            mail.add(each.key, each)
    taken = mail.take(4, (), NOW)
    assert sum(each.next_attempt > 0 for each in taken) == 2
    assert len(mail.take(100, (), NOW)) == 2
    assert mail.take(100, (), NOW + 1) == [ready(21, NOW + 1)]


def test_skipped_ones_come_back_with_a_claim_that_does_not_skip_them() -> None:
    mail = ReadyMail()
    for number in range(6):
        mail.add(ready(number).key, ready(number))
    assert [each.domain for each in mail.take(6, {"b.example"}, NOW)] == ["a.example"] * 3
    assert mail.take(6, {"b.example"}, NOW) == []
    assert mail.take(2, (), NOW) == [ready(1), ready(3)]
    assert mail.take(2, (), NOW) == [ready(5)]
