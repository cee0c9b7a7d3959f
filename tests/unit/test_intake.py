"""What the intake knows of senders: submissions that are the same one, and senders of very many."""

import pytest
from msgspec import structs

from tests.store.builders import envelope_for, message_id
from tests.support.queueing import delivery
from zonerelay.inbound.cleanup.intake import BLOCK, OVERDUE, ContentDigest, deliveries_of, identity, key_in
from zonerelay.inbound.limits.clients import LONG, LOOK_EVERY, MANY, MAX_SENDERS, PATIENCE, RATE, TIME, Bursts
from zonerelay.inbound.state.transaction import NO_EDITS, MailTransaction
from zonerelay.message.header import Fields
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import QueueName, queue_of
from zonerelay.model.envelope import Envelope, Mailbox, Origin, Priority
from zonerelay.routing.zones.zones import Zones
from zonerelay.smtp.server.params import MailCommand
from zonerelay.store.contract import QueueCounts

FIELDS = (("Subject", "x"), ("From", "a@example.org"))


def digest(body: bytes, piece: int = 1 << 30, fields: Fields = FIELDS) -> str:
    content = ContentDigest(fields)
    for start in range(0, len(body), piece):
        content.feed(body[start : start + piece])
    return content.hexdigest()


LONGEST = b"".join(
    b"--%d\r\nContent-Type: multipart/x; boundary=%d\r\nline %d\r\n" % (n, n, n) for n in range(3000)
)


@pytest.mark.parametrize("piece", [1, 977, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("body", [b"", b"x", LONGEST, b"y" * (3 * BLOCK + 5), LONGEST + b"z" * BLOCK])
def test_pieces_make_no_difference(body: bytes, piece: int) -> None:
    assert digest(body, piece) == digest(body)


def test_boundaries_and_dates_are_not_compared_and_everything_else_is() -> None:
    body = b'--=_1\r\nContent-Type: multipart/alternative;\r\n boundary="=_2"\r\n\r\nhi\r\n--=_1--\r\n'
    assert digest(body) == digest(body.replace(b"=_", b"=+abc"))
    assert digest(body) == digest(body, fields=(("Date", "today"), *FIELDS, ("Message-ID", "<1@x>")))
    assert digest(body) != digest(body.replace(b"hi", b"ho"))
    assert digest(body) != digest(body, fields=(("Subject", "y"), *FIELDS[1:]))
    signature = b"-- \r\n" + b"x" * 100
    assert digest(b"--" + b"x" * 73) != digest(b"--" + b"y" * 73), "too long for a boundary"
    assert digest(signature) != digest(signature[:-1] + b"y")


def test_identity_is_who_what_from_and_to_whom() -> None:
    envelope = envelope_for(message_id(1), "b@example.net", "a@example.net")
    same = envelope_for(message_id(2), "a@example.net", "b@example.net", "a@example.net")
    first = identity("key", "k", envelope)
    assert first == identity("key", "k", same)
    others = [
        identity("message-id", "k", envelope),
        identity("key", "l", envelope),
        identity("key", "k", structs.replace(envelope, origin=Origin(user="v"))),
        identity("key", "k", structs.replace(envelope, sender=envelope.recipients[0].address)),
        identity("key", "k", structs.replace(envelope, recipients=envelope.recipients[:1])),
    ]
    assert len({first, *others}) == 6


@pytest.mark.parametrize("value", ["", " ", "a b", "é", "x" * 256, "a\tb"])
def test_a_key_is_visible_ascii_of_a_bounded_length(value: str) -> None:
    assert key_in((("Idempotency-Key", value),)) is None
    assert key_in((("IDEMPOTENCY-key", f" {'x' * 255} "),)) == "x" * 255
    assert key_in((("Idempotency-Key", "a"), ("Idempotency-Key", "a"))) is None


# Senders of very many messages take turns with others while the queue is long


def mail(sender: str, *, user: str = "", client: str = "192.0.2.1", recipients: int = 1) -> Envelope:
    envelope = envelope_for(message_id(1), *(f"u{n}@example.com" for n in range(recipients)))
    return structs.replace(envelope, sender=Mailbox(sender), origin=Origin(user=user, client_address=client))


class Desk:
    def __init__(self, ready: int = LONG + 1) -> None:
        self.clock = ManualClock()
        self.counts = {
            queue_of("default"): QueueCounts(ready=ready),
            queue_of("default", Priority.HIGH): QueueCounts(deferred=9999),
        }
        self.asked = 0
        self.rate = 0.0
        self.bursts = Bursts(self._counts, lambda _: self.rate, self.clock)

    def _counts(self) -> dict[QueueName, QueueCounts]:
        self.asked += 1
        return self.counts

    def over(self, envelope: Envelope, times: int = 1) -> list[bool]:
        return [self.is_over(envelope) for _ in range(times)]

    def is_over(self, envelope: Envelope, zone: str = "default") -> bool:
        return self.bursts.is_over(envelope, [delivery(queue=queue_of(zone))])


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_each_sender_has_so_many_fresh_ones_in_a_time(desk: Desk) -> None:
    assert desk.over(mail("news@example.org"), MANY + 2) == [False] * MANY + [True] * 2
    assert desk.over(mail("reset@example.org")) == [False]
    assert desk.over(mail("news@example.org", user="crm")) == [False]
    assert desk.over(mail("news@example.org", client="192.0.2.2")) == [False]


def test_a_zone_is_slow_for_some_time_after_its_queue_was_long(desk: Desk) -> None:
    desk.over(mail("news@example.org"), MANY + 100 * int(RATE))
    desk.counts[queue_of("default")].ready = 0
    desk.clock.advance(TIME / 2)
    assert all(desk.over(mail("news@example.org"), int(RATE)))
    desk.clock.advance(TIME / 2)
    assert not any(desk.over(mail("news@example.org"), 2 * MANY))


def test_a_sender_of_a_few_in_each_second_is_never_put_behind(desk: Desk) -> None:
    for _ in range(600):
        assert desk.over(mail("app@example.org"), int(RATE)) == [False] * int(RATE)
        desk.clock.advance(1.0)
    found = []
    for _ in range(30):
        found += desk.over(mail("app@example.org"), 2 * int(RATE))
        desk.clock.advance(1.0)
    assert all(found[-100:]), "twice as much"


def test_recipients_count_and_not_messages(desk: Desk) -> None:
    assert desk.over(mail("news@example.org", recipients=60), 2) == [False, True]


@pytest.mark.parametrize("pattern", ["bounce-{}@example.org", "list+u{}=example.com@example.org"])
def test_addresses_made_for_each_message_are_one_sender(pattern: str, desk: Desk) -> None:
    assert [desk.is_over(mail(pattern.format(n))) for n in range(MANY + 1)][-1]


def test_a_short_queue_costs_nothing_and_is_looked_at_now_and_then() -> None:
    desk = Desk(LONG)
    assert not any(desk.over(mail("news@example.org"), 3 * MANY))
    assert desk.asked == 1
    assert not desk.bursts._senders
    desk.counts[queue_of("default")].ready = LONG + 1
    desk.clock.advance(LOOK_EVERY)
    assert any(desk.over(mail("news@example.org"), MANY + 1))


def test_a_long_queue_that_moves_fast_puts_nobody_behind(desk: Desk) -> None:
    desk.rate = (LONG + 1) / PATIENCE
    assert not any(desk.over(mail("news@example.org"), 3 * MANY))
    desk.rate -= 1
    desk.clock.advance(LOOK_EVERY)
    assert any(desk.over(mail("news@example.org"), MANY + 1))


def test_only_the_zone_counts_that_is_slow(desk: Desk) -> None:
    def over(zone: str) -> list[bool]:
        return [desk.is_over(mail("news@example.org"), zone) for _ in range(MANY + 2)]

    assert over("fast") == [False] * (MANY + 2)
    assert over("default") == [False] * MANY + [True] * 2
    assert over("fast") == [False] * (MANY + 2)


def test_memory_is_bounded(desk: Desk) -> None:
    for n in range(MAX_SENDERS + 10):
        desk.is_over(mail("a@example.org", user=f"u{n}"))
    assert len(desk.bursts._senders) == MAX_SENDERS


@pytest.mark.parametrize(("ready", "due"), [(LONG, False), (LONG + 1, True)])
def test_what_is_over_is_stored_as_due_while_its_queue_is_long(ready: int, due: bool) -> None:
    desk = Desk(ready)
    envelope = mail("news@example.org")
    zone_of = Zones([]).choose(envelope, headers=(), size=1)
    transaction = MailTransaction(MailCommand(envelope.sender), release=0.0, edits=NO_EDITS)
    found = [deliveries_of(envelope, transaction, zone_of, desk.bursts)[0][0] for _ in range(MANY + 1)]
    assert [each.next_attempt for each in found[:MANY]] == [0.0] * MANY
    assert found[-1].next_attempt == (envelope.created - OVERDUE if due else 0.0)
