"""What the ledger knows while writes are under way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.store.builders import delivery_for, envelope_for, message_id
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.store.common import in_flight as ledger_module
from zonerelay.store.common.in_flight import Found, Ledger, OpenMessage
from zonerelay.store.contract import StoreError
from zonerelay.store.leveldb.write_plan import Plan


def delivery(number: int = 1) -> Delivery:
    return delivery_for(envelope_for(message_id(number), "a@example.net"), "a@example.net")


def test_delivery_of_a_write_under_way_is_handed_out_to_nobody() -> None:
    ledger, one = Ledger(), delivery()
    ledger.submitted({one.key: one}, {})
    assert ledger.is_busy(one.key)
    assert ledger.landed(one.key, one)
    assert not ledger.is_busy(one.key)


def test_only_the_last_of_two_writes_under_way_says_what_is_durable() -> None:
    ledger, one = Ledger(), delivery()
    two = replace(one, held=True)
    ledger.submitted({one.key: one}, {})
    ledger.submitted({one.key: two}, {})
    assert ledger.state(one.key, Found()) == two
    assert not ledger.landed(one.key, one)
    assert ledger.landed(one.key, two)


def test_message_changed_while_it_is_read_is_stale() -> None:
    ledger, one = Ledger(), delivery()
    with ledger.reading():
        since = ledger.moment()
        assert not ledger.is_stale(one.message_id, since)
        ledger.submitted({one.key: one}, {})
        assert ledger.is_stale(one.message_id, since)
        assert not ledger.is_stale(message_id(2), since)
        assert not ledger.is_stale(one.message_id, ledger.moment())
        since = ledger.moment()
        ledger.landed(one.key, one)
        assert ledger.is_stale(one.message_id, since), "the read may have seen what was before"


def test_everything_that_is_being_read_is_stale_after_a_failure() -> None:
    ledger, one = Ledger(), delivery()
    ledger.claims[one.key] = one
    with ledger.reading():
        since = ledger.moment()
        ledger.reset()
        assert ledger.is_stale(one.message_id, since)
    assert ledger.claims == {one.key: None}, "the claim stays, its state has to be read"


def test_counts_that_are_ahead_of_the_disk_are_never_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "HOT_MESSAGES", 1)
    ledger = Ledger()
    ahead = OpenMessage(None, 2)
    ledger.remember(message_id(1), ahead)
    ledger.submitted({}, {ahead: 1})
    for number in range(2, 6):
        ledger.remember(message_id(number), OpenMessage(None, 1))
    assert ledger.message(message_id(1)) is ahead
    assert not ledger.settled(message_id(1), ahead)
    for number in range(6, 10):
        ledger.remember(message_id(number), OpenMessage(None, 1))
    assert ledger.message(message_id(1)) is None


def test_plan_that_cannot_be_encoded_leaves_no_trace() -> None:
    ledger, one = Ledger(), delivery()
    ledger.claims[one.key] = one
    plan = Plan(ledger)
    with pytest.raises(StoreError):
        plan.change(one.key, replace(one, orcpt="\udcff"))
    assert not ledger.in_flight


def test_a_recipient_has_one_delivery_of_a_message() -> None:
    """The count of a message to one recipient is not read: the first of two would take the message away."""
    envelope = envelope_for(message_id(1), "a@example.net")
    twice = [delivery_for(envelope, "a@example.net", zone=zone) for zone in ("default", "other")]
    with pytest.raises(ValueError, match="2 deliveries to 1 recipient"):
        Plan(Ledger()).add_message(Message(envelope=envelope, size=0, chunks=0), twice)


def test_what_is_known_of_messages_is_bounded_by_their_recipients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "HOT_RECIPIENTS", 100)
    ledger = Ledger()
    for number in range(50):
        recipients = [f"r{n}@example.net" for n in range(40)]
        envelope = envelope_for(message_id(number), *recipients)
        message = Message(envelope=envelope, size=0, chunks=0)
        ledger.remember(message_id(number), OpenMessage(message, len(recipients)))
    known = [number for number in range(50) if ledger.message(message_id(number)) is not None]
    assert known == [48, 49]
    # Small ones in their place, one for one, without a scan of all that is known.
    for number in range(100, 140):
        envelope = envelope_for(message_id(number), "a@example.net")
        ledger.remember(message_id(number), OpenMessage(Message(envelope=envelope, size=0, chunks=0), 1))
    assert sum(ledger.message(message_id(number)) is not None for number in range(100, 140)) == 40
