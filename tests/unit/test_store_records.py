"""Keys and values of the spool as pure functions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zonerelay.model.address import Mailbox
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Notify
from zonerelay.model.message_id import MessageId
from zonerelay.model.outcome import Attempt
from zonerelay.model.queue_name import queue_of
from zonerelay.model.reply import Reply
from zonerelay.store import records

texts = st.text(st.characters(codec="utf-8"), max_size=20)
times = st.floats(1e9, 4e9)


@given(texts)
def test_field_survives_and_is_printable_ascii_without_spaces(text: str) -> None:
    raw = records.field(text)
    assert records.unfield(raw) == text
    assert all(0x21 <= octet <= 0x7E for octet in raw)


@given(texts, texts, times)
def test_keys_give_back_what_they_were_made_of(zone: str, recipient: str, when: float) -> None:
    key = DeliveryKey(queue_of(zone), MessageId("0123456789abcdef"), Mailbox(recipient))
    for raw in (
        records.delivery_key(key),
        records.deferred_key(key, when),
        records.domain_key(key, recipient),
    ):
        assert records.parse_delivery_key(raw) == key
    assert records.parse_due(records.deferred_key(key, when)) == when


@given(texts, texts)
def test_one_zones_keys_never_lie_in_anothers_range(zone: str, other: str) -> None:
    key = records.delivery_key(DeliveryKey(queue_of(other), MessageId("0123456789abcdef"), Mailbox("~")))
    prefix = records.queue_prefix(queue_of(zone))
    assert (prefix <= key < records.after(prefix)) == (zone == other)


@given(times, times)
def test_due_times_sort_as_text_like_numbers(one: float, other: float) -> None:
    assert (records.due_field(one) < records.due_field(other)) == (one < other)


@given(
    attempts=st.integers(0, 1000),
    when=times,
    flags=st.tuples(st.booleans(), st.booleans()),
    notify=st.integers(0, 15),
    text=texts,
)
def test_delivery_survives(
    attempts: int, when: float, flags: tuple[bool, bool], notify: int, text: str
) -> None:
    delivery = Delivery(
        queue=queue_of("default"),
        message_id=MessageId("0123456789abcdef"),
        recipient=Mailbox(f"x@{text}"),
        created=when,
        attempts=attempts,
        next_attempt=when,
        held=flags[0],
        warned=flags[1],
        notify=Notify(notify),
        orcpt=text,
        last=Attempt(at=when, reply=Reply(450, "1.1", text), host=text, local=flags[0], in_doubt=flags[1]),
    )
    raw = records.encode_delivery(delivery)
    assert records.decode_delivery(records.delivery_key(delivery.key), raw) == delivery
    status = records.decode_status(b"", raw)
    assert (status.next_attempt, status.held) == (when, flags[0])


def test_what_a_newer_version_has_added_is_kept_through_a_deferral() -> None:
    key = DeliveryKey(queue_of("default"), MessageId("0123456789abcdef"), Mailbox("to@example.net"))
    raw = b'{"created":1700000000.0,"attempts":1,"tomorrow":{"why":["not"]},"warned":true}'
    delivery = records.decode_record(key, raw)
    later = delivery.deferred(1700000060.0, Attempt(1700000000.0, Reply(451, "2.0", "later")))
    again = records.decode_record(key, records.encode_delivery(later))
    assert again == later
    assert again.unknown == b'{"tomorrow":{"why":["not"]}}'
    assert (again.attempts, again.warned, again.next_attempt) == (2, True, 1700000060.0)


def test_a_record_of_another_spelling_has_nothing_unknown() -> None:
    key = DeliveryKey(queue_of("default"), MessageId("0123456789abcdef"), Mailbox("to@example.net"))
    assert records.decode_record(key, b'{ "created": 1700000000, "held": false }').unknown == b""
