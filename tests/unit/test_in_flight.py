"""What memory knows of deliveries while their writes are in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.store.builders import delivery_for, envelope_for, message_id
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.store.contract import StoreError
from zonerelay.store.leveldb import in_flight as ledger_module
from zonerelay.store.leveldb.in_flight import Found, InFlight, OpenMessage
from zonerelay.store.leveldb.write_plan import WritePlan


def delivery(number: int = 1) -> Delivery:
    return delivery_for(envelope_for(message_id(number), "a@example.net"), "a@example.net")


def test_delivery_of_a_write_under_way_is_handed_out_to_nobody() -> None:
    in_flight, one = InFlight(), delivery()
    in_flight.submitted({one.key: one}, {})
    assert in_flight.is_busy(one.key)
    assert in_flight.landed(one.key, one)
    assert not in_flight.is_busy(one.key)


def test_only_the_last_of_two_writes_under_way_says_what_is_durable() -> None:
    in_flight, one = InFlight(), delivery()
    two = replace(one, held=True)
    in_flight.submitted({one.key: one}, {})
    in_flight.submitted({one.key: two}, {})
    assert in_flight.state(one.key, Found()) == two
    assert not in_flight.landed(one.key, one)
    assert in_flight.landed(one.key, two)


def test_message_changed_while_it_is_read_is_stale() -> None:
    in_flight, one = InFlight(), delivery()
    with in_flight.reading():
        since = in_flight.moment()
        assert not in_flight.is_stale(one.message_id, since)
        in_flight.submitted({one.key: one}, {})
        assert in_flight.is_stale(one.message_id, since)
        assert not in_flight.is_stale(message_id(2), since)
        assert not in_flight.is_stale(one.message_id, in_flight.moment())
        since = in_flight.moment()
        in_flight.landed(one.key, one)
        assert in_flight.is_stale(one.message_id, since), "the read may have seen what was before"


def test_everything_that_is_being_read_is_stale_after_a_failure() -> None:
    in_flight, one = InFlight(), delivery()
    in_flight.claims[one.key] = one
    with in_flight.reading():
        since = in_flight.moment()
        in_flight.reset()
        assert in_flight.is_stale(one.message_id, since)
    assert in_flight.claims == {one.key: None}, "the claim stays, its state has to be read"


def test_counts_that_are_ahead_of_the_disk_are_never_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "HOT_MESSAGES", 1)
    in_flight = InFlight()
    ahead = OpenMessage(None, 2)
    in_flight.remember(message_id(1), ahead)
    in_flight.submitted({}, {ahead: 1})
    for number in range(2, 6):
        in_flight.remember(message_id(number), OpenMessage(None, 1))
    assert in_flight.message(message_id(1)) is ahead
    assert not in_flight.settled(message_id(1), ahead)
    for number in range(6, 10):
        in_flight.remember(message_id(number), OpenMessage(None, 1))
    assert in_flight.message(message_id(1)) is None


def test_plan_that_cannot_be_encoded_leaves_no_trace() -> None:
    in_flight, one = InFlight(), delivery()
    in_flight.claims[one.key] = one
    plan = WritePlan(in_flight)
    with pytest.raises(StoreError):
        plan.change(one.key, replace(one, orcpt="\udcff"))
    assert not in_flight.writing


def test_a_recipient_has_one_delivery_of_a_message() -> None:
    """The count of a message to one recipient is not read: the first of two would take the message away."""
    envelope = envelope_for(message_id(1), "a@example.net")
    twice = [delivery_for(envelope, "a@example.net", zone=zone) for zone in ("default", "other")]
    with pytest.raises(ValueError, match="2 deliveries to 1 recipient"):
        WritePlan(InFlight()).add_message(Message(envelope=envelope, size=0, chunks=0), twice)


def test_what_is_known_of_messages_is_bounded_by_their_recipients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "HOT_RECIPIENTS", 100)
    in_flight = InFlight()
    for number in range(50):
        recipients = [f"r{n}@example.net" for n in range(40)]
        envelope = envelope_for(message_id(number), *recipients)
        message = Message(envelope=envelope, size=0, chunks=0)
        in_flight.remember(message_id(number), OpenMessage(message, len(recipients)))
    known = [number for number in range(50) if in_flight.message(message_id(number)) is not None]
    assert known == [48, 49]
    # Small ones in their place, one for one, without a scan of all that is known.
    for number in range(100, 140):
        envelope = envelope_for(message_id(number), "a@example.net")
        in_flight.remember(message_id(number), OpenMessage(Message(envelope=envelope, size=0, chunks=0), 1))
    assert sum(in_flight.message(message_id(number)) is not None for number in range(100, 140)) == 40
