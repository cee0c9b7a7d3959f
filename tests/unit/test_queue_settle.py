"""Outcomes become changes and reports, in one write."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from msgspec import structs

from tests.support.queueing import BOUNCED, DEFERRED, DELIVERED, HEADER, LOCAL, NO_HOST, TEXT, Relay
from zonerelay.config.settings import BounceSettings, ZoneSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import BodyType, Message, Notify, Ret
from zonerelay.model.reply import Attempt, Outcome, Reply
from zonerelay.queue.settle import bounces as reports
from zonerelay.store.contract import Finish, OwnMessage, Postpone, StoreCorruptError, StoreError

HOUR, DAY = 3600.0, 86400.0


class Bench:
    """A settler over a memory store, with a clock that stands still."""

    def __init__(self, **more: object) -> None:
        self.relay = Relay(clock=ManualClock(), **more)  # type: ignore[arg-type]  # passed on by name

    async def settle(
        self,
        *recipients: str,
        outcomes: Sequence[Outcome],
        sender: str = "a@example.org",
        age: float = 0.0,
        notify: Notify = Notify.UNSET,
        text: bytes = TEXT,
        ret: Ret = Ret.UNSET,
        **state: object,
    ) -> Message:
        message = self.relay.accept(*recipients, sender=sender, age=age, notify=notify, text=text, tell=False)
        message = structs.replace(
            message, size=len(text), envelope=structs.replace(message.envelope, ret=ret)
        )
        stored = await self.relay.store.deliveries_of(message.id)
        deliveries = [structs.replace(delivery, **state) for delivery in stored]
        self.relay.settler.post(message, deliveries, outcomes, destination="mx:25", seconds=0.1)
        assert await self.relay.settler.drain()
        return message

    async def put_off(self, deliveries: Sequence[Delivery]) -> float:
        """Settle them without an attempt; return the time until which their destination is suspended."""
        until = self.now + 30
        self.relay.settler.post_unattempted(deliveries, NO_HOST, destination="mx", until=lambda: until)
        await self.relay.settler.drain()
        return until

    @property
    def write(self) -> list[Finish | Postpone | OwnMessage]:
        """The one write that was made."""
        assert len(self.relay.store.settled) == 1
        return list(self.relay.store.settled[0])

    def dsn(self) -> OwnMessage:
        (submit,) = [change for change in self.write if isinstance(change, OwnMessage)]
        return submit

    @property
    def written(self) -> list[type[Finish | Postpone | OwnMessage]]:
        return [type(change) for change in self.write]

    def postponed(self) -> list[Delivery]:
        return [change.delivery for change in self.write if isinstance(change, Postpone)]

    @property
    def now(self) -> float:
        return self.relay.clock.now()


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_outcomes_of_many_messages_in_one_turn_are_one_write(bench: Bench) -> None:
    for name in "bcd":
        message = bench.relay.accept(f"{name}@example.com", tell=False)
        deliveries = await bench.relay.store.deliveries_of(message.id)
        bench.relay.settler.post(message, deliveries, [DELIVERED], destination="mx")
    await bench.relay.settler.drain()
    assert len(bench.write) == 3


async def test_one_bounce_for_all_who_failed_in_the_same_write(bench: Bench) -> None:
    message = await bench.settle(
        "bad@example.com", "good@example.com", "late@example.com", "worse@example.com",
        outcomes=[BOUNCED, DELIVERED, DEFERRED, BOUNCED],
    )  # fmt: skip
    assert bench.written == [Finish, Finish, Postpone, Finish, OwnMessage]
    dsn = bench.dsn()
    envelope = dsn.message.envelope
    assert envelope.sender == ""
    assert [each.address for each in envelope.recipients] == ["a@example.org"]
    assert envelope.origin.protocol == "internal"
    assert dsn.message.size == len(dsn.body)
    assert dsn.message.chunks == 1
    assert dsn.message.header("To") == "<a@example.org>"
    assert [(d.zone, d.recipient, d.message_id) for d in dsn.deliveries] == [
        ("default", "a@example.org", envelope.id)
    ]
    text = dsn.body.decode()
    assert "bad@example.com" in text
    for told in ("<worse@example.com>", "rfc822; worse@example.com"):  # people, and programs
        assert told in text
    assert "good@example.com" not in text
    assert "late@example.com" not in text
    assert HEADER.decode() in text
    assert "The body." not in text
    (event,) = bench.relay.sink.named("dsn")
    assert (event["kind"], event["about"], event["recipients"]) == ("failed", message.id, 2)


@pytest.mark.parametrize(
    ("more", "reported", "why"),
    [
        ({}, True, ""),
        ({"sender": ""}, False, "null sender"),
        ({"notify": Notify.NEVER}, False, "notify"),
        ({"notify": Notify.SUCCESS}, False, "notify"),
        ({"notify": Notify.DELAY}, False, "notify"),
        ({"notify": Notify.FAILURE}, True, ""),
        ({"notify": Notify.FAILURE | Notify.SUCCESS}, True, ""),
    ],
)
async def test_a_failure_is_reported_to_those_who_want_it(
    more: dict[str, object], reported: bool, why: str, bench: Bench
) -> None:
    await bench.settle("b@example.com", outcomes=[BOUNCED], **more)  # type: ignore[arg-type]  # by name
    assert (OwnMessage in bench.written) is reported
    assert [event["reason"] for event in bench.relay.sink.named("no-dsn")] == ([why] if why else [])


PASSED = structs.replace(DELIVERED, dsn_passed=True)


@pytest.mark.parametrize(
    ("outcome", "more", "reported", "why"),
    [
        (DELIVERED, {"notify": Notify.SUCCESS}, True, ""),
        (DELIVERED, {"notify": Notify.SUCCESS | Notify.FAILURE}, True, ""),
        (DELIVERED, {}, False, ""),
        (DELIVERED, {"notify": Notify.NEVER}, False, ""),
        (DELIVERED, {"notify": Notify.FAILURE | Notify.DELAY}, False, ""),
        (PASSED, {"notify": Notify.SUCCESS}, False, ""),
        (DELIVERED, {"notify": Notify.SUCCESS, "sender": ""}, False, "null sender"),
    ],
)
async def test_a_success_is_reported_to_those_who_asked_where_the_peer_cannot(
    outcome: Outcome, more: dict[str, object], reported: bool, why: str, bench: Bench
) -> None:
    await bench.settle("b@example.com", "c@example.com", outcomes=[outcome, outcome], **more)  # type: ignore[arg-type]  # by name
    assert bench.written == [Finish, Finish] + [OwnMessage] * reported
    assert len(bench.relay.sink.named("delivered")) == 2
    assert [event["kind"] for event in bench.relay.sink.named("dsn")] == ["relayed"] * reported
    assert [event["reason"] for event in bench.relay.sink.named("no-dsn")] == ([why] if why else [])


@pytest.mark.parametrize(("outcome", "notify"), [(DELIVERED, Notify.SUCCESS), (BOUNCED, Notify.UNSET)])
async def test_reports_can_be_switched_off(outcome: Outcome, notify: Notify) -> None:
    bench = Bench(bounce=BounceSettings(enabled=False))
    await bench.settle("b@example.com", outcomes=[outcome], notify=notify)
    assert bench.written == [Finish]
    assert bench.relay.sink.named("no-dsn")[0]["reason"] == "switched off"


BIG = b"Subject: big\r\n\r\n" + b"0123456789\r\n" * 500


@pytest.mark.parametrize(
    ("ret", "outcome", "text", "whole", "why"),
    [
        (Ret.FULL, BOUNCED, TEXT, True, "as asked"),
        (Ret.HDRS, BOUNCED, TEXT, False, "as asked"),
        (Ret.UNSET, BOUNCED, TEXT, False, "nobody asked"),
        (Ret.FULL, DELIVERED, TEXT, False, "RFC 3461 6.2: only failures return the message"),
        (Ret.FULL, DEFERRED, TEXT, False, "RFC 3461 6.2: only failures return the message"),
        (Ret.FULL, BOUNCED, BIG, False, "larger than return_size"),
        (Ret.FULL, BOUNCED, TEXT + b"x" * 999 + b"\r\n", False, "a line that SMTP does not carry"),
        (Ret.FULL, BOUNCED, TEXT + b"\xc3\xbc\r\n", True, "8-bit text stays as it is"),
    ],
)
async def test_the_whole_message_comes_back_with_a_failure_when_asked_for(
    ret: Ret, outcome: Outcome, text: bytes, whole: bool, why: str
) -> None:
    bench = Bench(bounce=BounceSettings(return_size=4000))
    wanted = Notify.SUCCESS | Notify.FAILURE | Notify.DELAY
    await bench.settle("b@example.com", outcomes=[outcome], text=text, age=5 * HOUR, notify=wanted, ret=ret)
    dsn = bench.dsn()
    assert (text in dsn.body) is whole, why
    assert (b"Content-Type: message/rfc822\r\n" in dsn.body) is whole
    assert (b"Content-Type: text/rfc822-headers\r\n" in dsn.body) is not whole
    assert text[: text.index(b"\r\n\r\n")] in dsn.body
    assert dsn.message.eight_bit is not text.isascii()
    assert (dsn.message.envelope.body is BodyType.EIGHT_BIT) is not text.isascii()


async def test_a_report_brings_no_message_back_that_its_own_zone_would_not_send() -> None:
    """It would be returned in its turn, to nobody: the sender would never hear of the failure."""
    bench = Bench(zones=[ZoneSettings(max_message_size=4000)])
    await bench.settle("b@example.com", outcomes=[BOUNCED], text=BIG, ret=Ret.FULL)
    dsn = bench.dsn()
    assert dsn.message.size < 4000
    assert b"Content-Type: text/rfc822-headers\r\n" in dsn.body


# Mail that its sender holds back: `created` is its release


async def test_mail_sent_before_its_release_has_no_negative_age(bench: Bench) -> None:
    await bench.settle("b@example.com", outcomes=[DELIVERED], created=bench.now + DAY)
    assert bench.relay.sink.named("delivered")[0]["age"] == 0.0


@pytest.mark.parametrize("early", [5 * HOUR, 10 * DAY])
async def test_nobody_is_warned_and_nothing_expires_before_the_release(early: float, bench: Bench) -> None:
    """RFC 4865: the time before the release is no delay."""
    await bench.settle("b@example.com", outcomes=[DEFERRED], age=early, created=bench.now + 60)
    assert bench.written == [Postpone]
    assert bench.postponed()[0].next_attempt == bench.now + 60


async def test_after_the_release_the_time_counts_from_there(bench: Bench) -> None:
    release = bench.now - 4 * HOUR - 1
    message = await bench.settle("b@example.com", outcomes=[DEFERRED], age=3 * DAY, created=release)
    assert bench.postponed()[0].warned
    until = datetime.fromtimestamp(release + 5 * DAY, UTC)
    assert f"Will-Retry-Until: {format_datetime(until)}" in bench.dsn().body.decode()
    assert message.envelope.created == bench.now - 3 * DAY


async def test_a_zone_has_its_own_horizon_and_a_warning_names_it() -> None:
    bench = Bench(zones=[ZoneSettings(next_hop="hop", max_age=8 * DAY)])
    message = await bench.settle("b@example.com", outcomes=[DEFERRED], age=6 * DAY)
    until = datetime.fromtimestamp(message.envelope.created + 8 * DAY, UTC)
    assert f"Will-Retry-Until: {format_datetime(until)}" in bench.dsn().body.decode()
    brief = Bench(zones=[ZoneSettings(next_hop="hop", max_age=HOUR)])
    await brief.settle("b@example.com", outcomes=[DEFERRED], age=HOUR)
    assert brief.relay.sink.named("expired")


@pytest.mark.parametrize(("seconds_left", "expired"), [(60, 0), (0, 1)])
async def test_mail_that_was_held_back_expires_its_whole_life_after_the_release(
    seconds_left: int, expired: int, bench: Bench
) -> None:
    release = bench.now - 5 * DAY + seconds_left
    await bench.settle("b@example.com", outcomes=[DEFERRED], age=9 * DAY, created=release)
    assert len(bench.relay.sink.named("expired")) == expired


async def test_suspended_mail_that_was_held_back_is_judged_by_its_release(bench: Bench) -> None:
    message = bench.relay.accept("b@example.com", age=9 * DAY, tell=False)
    (delivery,) = await bench.relay.store.deliveries_of(message.id)
    until = await bench.put_off([structs.replace(delivery, created=bench.now - 60)])
    assert [each.next_attempt for each in bench.postponed()] == [until]


UNCOUNTED = structs.replace(NO_HOST, counts=False)


@pytest.mark.parametrize(
    ("outcome", "age", "delay", "attempts"),
    [
        (DEFERRED, 0, 60, 1),
        (LOCAL, 0, 5, 0),
        (LOCAL, 100, 25, 0),
        (LOCAL, 1000, 60, 0),
        (UNCOUNTED, 0, 60, 0),
        (UNCOUNTED, 1000, 250, 0),
        (UNCOUNTED, 10000, 1800, 0),
    ],
)
async def test_a_deferral_waits_by_the_schedule_or_with_its_age_where_it_does_not_count(
    outcome: Outcome, age: float, delay: float, attempts: int, bench: Bench
) -> None:
    await bench.settle("b@example.com", outcomes=[outcome], age=age)
    (stored,) = bench.postponed()
    assert (stored.attempts, stored.next_attempt) == (attempts, bench.now + delay)
    assert stored.last == outcome.attempt(bench.now)
    logged = [event["next_attempt"] for event in bench.relay.sink.named("deferred")]
    assert logged == [bench.now + delay] * (outcome is not UNCOUNTED), (
        "a suspension is logged once, elsewhere"
    )


async def test_too_old_mail_expires_with_the_last_reason(bench: Bench) -> None:
    last = Attempt(at=1.0, reply=Reply(450, "2.0", "greylisted"), host="mx.example.com")
    await bench.settle("b@example.com", outcomes=[UNCOUNTED], age=5 * DAY, attempts=9, last=last)
    assert bench.written == [Finish, OwnMessage]
    assert bench.relay.sink.named("expired")[0]["reply"] == "450 4.2.0 greylisted"
    assert "greylisted" in bench.dsn().body.decode()


async def test_a_bounce_expires_after_its_own_age_and_silently(bench: Bench) -> None:
    await bench.settle("b@example.com", outcomes=[DEFERRED], sender="", age=DAY)
    assert bench.written == [Finish]
    assert len(bench.relay.sink.named("expired")) == 1


# Delay warnings


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ({"age": 4 * HOUR + 1}, True),
        ({"age": 4 * HOUR - 1}, False),
        ({"age": 5 * HOUR, "warned": True}, False),
        ({"age": 5 * HOUR, "sender": ""}, False),
        ({"age": 5 * HOUR, "notify": Notify.DELAY}, True),
        ({"age": 5 * HOUR, "notify": Notify.FAILURE}, False),
        ({"age": 5 * HOUR, "notify": Notify.NEVER}, False),
    ],
)
async def test_a_delay_is_told_who_wants_it_once(more: dict[str, object], warned: bool, bench: Bench) -> None:
    await bench.settle("b@example.com", "c@example.com", outcomes=[DEFERRED, DEFERRED], **more)  # type: ignore[arg-type]  # by name
    assert bench.written.count(OwnMessage) == warned
    assert all(stored.warned is (warned or "warned" in more) for stored in bench.postponed())


@pytest.mark.parametrize("bounce", [BounceSettings(delay_warning=0), BounceSettings(enabled=False)])
async def test_warnings_can_be_switched_off(bounce: BounceSettings) -> None:
    bench = Bench(bounce=bounce)
    await bench.settle("b@example.com", outcomes=[DEFERRED], age=5 * HOUR)
    assert bench.written == [Postpone]


async def test_failure_and_delay_in_one_attempt_are_two_reports_in_one_write(bench: Bench) -> None:
    await bench.settle("b@example.com", "c@example.com", outcomes=[BOUNCED, DEFERRED], age=5 * HOUR)
    assert bench.written == [Finish, Postpone, OwnMessage, OwnMessage]
    assert [event["kind"] for event in bench.relay.sink.named("dsn")] == ["failed", "delayed"]


# Without an attempt


async def test_suspended_mail_is_put_off_without_reading_its_messages(bench: Bench) -> None:
    deliveries = []
    for n in range(450):
        message = bench.relay.accept(f"u{n}@example.com", tell=False)
        deliveries += await bench.relay.store.deliveries_of(message.id)
    bench.relay.store.read_message = None  # type: ignore[assignment,method-assign]  # calling it would raise
    until = await bench.put_off(deliveries)
    stored = await bench.relay.stored()
    assert {(d.attempts, d.next_attempt) for d in stored} == {(0, until)}
    assert len(bench.relay.sink.named("deferred")) == 450


async def test_suspended_mail_is_warned_about_and_expires_too(bench: Bench) -> None:
    for name, age in (("new", 0.0), ("late", 5 * HOUR), ("old", 5 * DAY)):
        bench.relay.accept(f"{name}@example.com", age=age, tell=False)
    await bench.put_off(await bench.relay.stored())
    left = {d.recipient: d.warned for d in await bench.relay.stored() if d.recipient != "a@example.org"}
    assert left == {"new@example.com": False, "late@example.com": True}
    assert not any(map(bench.relay.settler.is_old, await bench.relay.stored())), "no warning is owed any more"
    assert sorted(str(event["kind"]) for event in bench.relay.sink.named("dsn")) == ["delayed", "failed"]


# Failing parts


async def test_a_header_that_cannot_be_read_costs_only_the_header(bench: Bench) -> None:

    async def corrupt(message_id: str):  # type: ignore[no-untyped-def]  # a stream that breaks
        yield b"Subject: h"
        raise StoreCorruptError("a chunk is missing")

    bench.relay.store.read_body = corrupt  # type: ignore[method-assign]  # a broken record
    await bench.settle("b@example.com", outcomes=[BOUNCED])
    assert bench.dsn()
    assert len(bench.relay.sink.named("trouble")) == 1


async def test_a_store_that_is_being_repaired_costs_no_header(bench: Bench) -> None:
    store = bench.relay.store
    read_body = store.read_body

    async def closed(message_id: str):  # type: ignore[no-untyped-def]  # as in the test above
        store.read_body = read_body  # type: ignore[method-assign]
        raise StoreError("the spool is closed")
        yield b""

    store.read_body = closed  # type: ignore[method-assign]
    store.repaired = asyncio.Event()
    store.repaired.set()
    await bench.settle("b@example.com", outcomes=[BOUNCED])
    assert HEADER.strip() in bench.dsn().body
    assert not bench.relay.sink.named("trouble")


async def test_the_header_of_the_original_is_cut_at_whole_lines() -> None:
    bench = Bench(bounce=BounceSettings(return_size=40))
    text = b"Subject: one\r\nX-Two: 2222222222\r\nX-Three: 33333333\r\n\r\nbody"
    await bench.settle("b@example.com", outcomes=[BOUNCED], text=text)
    assert b"X-Two: 2222222222\r\n" in bench.dsn().body
    assert b"X-Three" not in bench.dsn().body


async def test_no_part_of_a_line_comes_back_where_the_first_is_too_long() -> None:
    """The report had the first character of the header."""
    bench = Bench(bounce=BounceSettings(return_size=5))
    await bench.settle("b@example.com", outcomes=[BOUNCED], text=b"~ubject: one\r\n\r\nbody")
    assert b"~" not in bench.dsn().body


@pytest.mark.parametrize(
    ("outcome", "more", "change", "event"),
    [
        (BOUNCED, {}, Postpone, "deferred"),
        (DEFERRED, {"age": 5 * HOUR}, Postpone, "deferred"),
        (DELIVERED, {"notify": Notify.SUCCESS}, Finish, "delivered"),
    ],
)
async def test_what_is_not_delivered_stays_when_its_report_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome, more: dict[str, object], change: type, event: str
) -> None:
    def broken(*_: object, **__: object) -> bytes:
        raise KeyError("bug")

    monkeypatch.setattr(reports, "compose", broken)
    bench = Bench()
    await bench.settle("b@example.com", outcomes=[outcome], **more)  # type: ignore[arg-type]  # by name
    assert bench.written == [change]
    assert {name for name, _ in bench.relay.sink.events} == {"trouble", event}
    assert not any(stored.warned for stored in bench.postponed()), "the warning is owed again"


async def test_cancelling_the_caller_loses_no_outcome(bench: Bench) -> None:
    message = bench.relay.accept("b@example.com", tell=False)
    deliveries = await bench.relay.store.deliveries_of(message.id)

    async def lane() -> None:
        bench.relay.settler.post(message, deliveries, [BOUNCED], destination="mx")
        await asyncio.sleep(60)

    task = asyncio.create_task(lane())
    await asyncio.sleep(0)
    assert bench.relay.settler.unsettled_keys() == {deliveries[0].key}
    task.cancel()
    await bench.relay.settler.drain()
    assert bench.dsn()
    assert not bench.relay.settler.unsettled_keys()
