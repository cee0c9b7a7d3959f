"""Which mail an order is about, when it is in force, and for how long the age of mail did not count."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from msgspec import structs

from tests.store.builders import attempt
from tests.support.queueing import DEFERRED, DELIVERED, Relay, deliveries_of, make_message
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.inbound.cleanup.intake import OVERDUE
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery, DeliveryKey, queue_of
from zonerelay.model.envelope import Mailbox, MessageId, MessageIdSource
from zonerelay.model.pattern import is_like
from zonerelay.model.reply import Outcome, Reply, same_reply
from zonerelay.process.tasks import cancel_all
from zonerelay.queue.operator import journal as module
from zonerelay.queue.operator.clock_watch import ClockWatch
from zonerelay.queue.operator.filters import QueueFilter
from zonerelay.queue.operator.journal import KEPT, Act, DeliverySnapshot, Journal, JournalEntry, JournalError
from zonerelay.queue.operator.operations import BOUNDS, MAX_KEYS, NO_ATTEMPT, SummaryCount, reply_key
from zonerelay.queue.orders.order import OPEN, SUSPEND, Order, OrderTable, Subject
from zonerelay.queue.settle.settler import SettlerCallbacks
from zonerelay.telemetry.logs.redact import Redactor

NOW = 1000.0
MAIL = Subject(
    "default", "Bob@Example.com", "news@example.org", "app", "example.com", "mx1.test:25,mx2.test:25"
)


def order(**named: Any) -> Order:  # Any: fields by name
    fields: dict[str, Any] = {"id": "1", "effect": "suspend", "reason": "x", "who": "root", "since": 0.0}
    return Order(**{**fields, **named})


@pytest.mark.parametrize(
    ("named", "is_about"),
    [
        ({"everything": True}, True),
        ({"zone": "default"}, True),
        ({"zone": "other"}, False),
        ({"destination": "example.com"}, True),
        ({"destination": "MX2.test"}, True),
        ({"destination": "mx1.test:25"}, True),
        ({"destination": "mx1.test:25,mx2.test:25"}, True),
        ({"destination": "mx"}, False),
        ({"destination": "somewhere", "hosts": ("mx1.test:25,mx2.test:25",)}, True),
        ({"domain": "example.com"}, True),
        ({"domain": "*.com"}, True),
        ({"domain": "exampleXcom"}, False),
        ({"recipient": "bob@*"}, True),
        ({"sender": "<news@example.org>"}, True),
        ({"sender": "<>"}, False),
        ({"user": "app"}, True),
        ({"user": "ap"}, False),
        ({"sender": "news@*", "domain": "example.net"}, False),
        ({"zone": "default", "until": NOW}, False),
        ({"zone": "default", "until": NOW + 1}, True),
        ({"zone": "default", "ended": 1.0}, False),
    ],
    ids=str,
)
def test_an_order_is_about_mail_that_matches_everything_given(named: dict[str, Any], is_about: bool) -> None:
    given = order(**named)
    assert OrderTable([given], NOW).about(MAIL) == ([given] if is_about else [])


def test_mail_is_not_compared_with_each_of_a_thousand_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    def many(**one: str) -> list[Order]:
        return [*(order(**dict.fromkeys(one, f"{n}.test")) for n in range(1000)), order(**one)]

    compared = Mock(wraps=is_like)
    monkeypatch.setattr("zonerelay.queue.orders.order.is_like", compared)
    for name, text in (("sender", "<News@example.ORG>"), ("recipient", MAIL.recipient), ("user", "App")):
        table = OrderTable(many(**{name: text}), NOW)
        assert table.about(MAIL) == [table.orders[-1]]
        assert table.about(MAIL._replace(user="\u212a")) == ([] if name == "user" else [table.orders[-1]])
    compared.reset_mock()
    table = OrderTable(many(sender="news@example.org"), NOW)
    assert table.about(MAIL) == [table.orders[-1]]
    by_domain = OrderTable(many(domain="example.com"), NOW).gate(ZoneSettings())
    assert by_domain.keeps_domain("example.com") == by_domain.orders[-1]
    by_host = OrderTable(many(destination="MX2.test"), NOW).gate(ZoneSettings())
    assert by_host.keeps("example.com", MAIL.label) == by_host.orders[-1]
    assert compared.call_count < 20


def test_what_needs_no_envelope_waits_in_the_store() -> None:
    by_mx, smarthost = ZoneSettings(), ZoneSettings(next_hop="smart.test")
    domain, closed = order(domain="example.com"), order(zone="default")
    destination, sender, rule = (
        order(destination="x"),
        order(sender="a@*"),
        order(zone="default", effect="hold"),
    )

    def gate(given: Order, zone: ZoneSettings) -> tuple[bool, Order | None, Order | None]:
        found = OrderTable([given], NOW).gate(zone)
        return found.is_closed, found.keeps_domain("example.com"), found.keeps("x", "x:25")

    assert gate(closed, by_mx) == gate(closed, smarthost) == (True, None, None)
    assert gate(domain, by_mx) == (False, domain, None)
    assert gate(domain, smarthost) == (False, None, None), "all its mail has one line: each delivery is held"
    assert gate(destination, by_mx) == gate(destination, smarthost) == (False, None, destination)
    for each in (sender, rule, order(zone="other")):
        assert OrderTable([each], NOW).gate(by_mx) == OPEN
    assert [OrderTable([each], NOW).by_envelope for each in (closed, destination, domain, sender, rule)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_the_age_of_mail_does_not_count_while_its_clock_is_stopped() -> None:
    table = OrderTable(
        [
            order(domain="example.com", since=100.0, ended=200.0, stop_clock=True),
            order(zone="default", since=150.0, ended=250.0, stop_clock=True),
            order(user="app", since=400.0, until=500.0, stop_clock=True),
            order(sender="*", since=600.0, ended=700.0),
            order(zone="other", since=600.0, ended=700.0, stop_clock=True),
            order(recipient="*", since=900.0, stop_clock=True),
        ],
        NOW,
    )
    assert table.paused(MAIL, 0.0, NOW) == 150 + 100 + 100
    assert table.paused(MAIL, 225.0, NOW) == 25 + 100 + 100
    assert table.paused(MAIL, 950.0, NOW) == 50


def test_mail_is_refused_at_the_command_that_names_what_the_order_is_about() -> None:
    table = OrderTable(
        [
            order(id="sender", sender="bad@*", refuse=True),
            order(id="zone", zone="slow", refuse=True),
            order(id="both", user="app", domain="example.com", refuse=True),
            order(id="holds", sender="*"),
        ],
        NOW,
    )

    def refused(*mail: Any) -> str:
        found = table.refuses(*mail)
        return "" if found is None else found.id

    assert refused("bad@example.org", "", None) == "sender"
    assert refused("good@example.org", "app", None) == ""
    assert refused("good@example.org", "app", "a@example.com", "default") == "both"
    assert refused("good@example.org", "", "a@example.com", "slow") == "zone"
    assert refused("good@example.org", "", "a@example.com", None) == "", "the zone is not known yet"


def test_a_hold_rule_lets_pass_what_an_operator_has_released() -> None:
    rule, suspension = order(id="rule", effect="hold", zone="default"), order(id="s", sender="*")
    for act, by_rule in (("", rule), ("rule", rule), ("12345678", None)):
        assert OrderTable([rule], NOW).holding(MAIL, act) == by_rule
        assert OrderTable([suspension], NOW).holding(MAIL, act) == suspension


# The journal of acts: what was noted comes back, what cannot be noted is said


ACT = Act(id="0a1b2c3d", at=0.0, verb="hold")


def entry(number: int) -> JournalEntry:
    before = DeliverySnapshot(queue_of("default;bulk"), False, 1_700_000_000.123456, 3, "")
    key = DeliveryKey(queue_of("default;bulk"), MessageId(f"{number:016x}"), Mailbox("żółw@example.com"))
    return JournalEntry(key, before, before._replace(held=True, act=ACT.id))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def journal(tmp_path: Path, clock: ManualClock) -> Journal:
    return Journal(tmp_path / "acts", clock)


async def begun(journal: Journal, clock: ManualClock, act_id: str = ACT.id) -> Act:
    act = msgspec.structs.replace(ACT, id=act_id, at=clock.now())
    await journal.begin(act)
    return act


async def noted(journal: Journal, act_id: str = ACT.id) -> list[JournalEntry]:
    return [each async for piece in journal.entries(act_id) for each in piece]


async def test_what_was_noted_is_there_after_a_restart_and_a_torn_end_is_not(
    journal: Journal, clock: ManualClock, tmp_path: Path
) -> None:
    act = await begun(journal, clock)
    wanted = [entry(number) for number in range(2500)]
    for start in range(0, len(wanted), 1000):
        assert await journal.note(act.id, wanted[start : start + 1000])
    log = tmp_path / "acts" / f"{act.id}.log"
    assert log.stat().st_size < 30 * len(wanted)
    assert log.stat().st_mode & 0o077 == 0
    again = Journal(tmp_path / "acts", clock)
    assert await noted(again) == wanted
    assert (await again.find(act.id)).finished is False
    with log.open("rb+") as file:
        file.truncate(log.stat().st_size - 1)
    assert await noted(again) == wanted[:2000]
    with pytest.raises(JournalError, match="already exists"):
        await begun(again, clock)


async def test_acts_that_begin_at_one_moment_are_all_written(journal: Journal, clock: ManualClock) -> None:
    """Each looks at all files of the journal while the drafts of others get their names."""
    ids = [f"{number:08x}" for number in range(200)]
    await asyncio.gather(*(begun(journal, clock, each) for each in ids))
    assert {each.id for each in await journal.acts()} == set(ids)


async def test_an_id_is_used_once(journal: Journal, clock: ManualClock) -> None:
    act = await begun(journal, clock)
    with pytest.raises(JournalError, match="is still running"):
        await begun(journal, clock)
    await journal.finish(msgspec.structs.replace(act, changed=3))
    with pytest.raises(JournalError, match="already exists"):
        await begun(journal, clock)
    (found,) = await journal.acts()
    assert (found.changed, found.finished) == (3, True)


@pytest.mark.parametrize("act_id", ["", "0a1b2c3", "../../etc/x", "0A1B2C3D", "0a1b2c3d\n"])
async def test_an_id_is_never_a_path(journal: Journal, clock: ManualClock, act_id: str) -> None:
    with pytest.raises(JournalError, match="is not the id of a change"):
        await begun(journal, clock, act_id)
    with pytest.raises(JournalError, match="no change"):
        await journal.find(act_id)


async def test_acts_are_kept_for_a_day(journal: Journal, clock: ManualClock, tmp_path: Path) -> None:
    act = await begun(journal, clock)
    await journal.note(act.id, [entry(1)])
    for file in (tmp_path / "acts").iterdir():
        os.utime(file, (clock.now(), clock.now()))
    clock.advance(KEPT + 1)
    with pytest.raises(JournalError, match="last 24 hours"):
        await journal.find(act.id)
    assert await journal.acts() == []
    await begun(journal, clock, "11111111")
    assert {file.stem for file in (tmp_path / "acts").iterdir()} == {"11111111"}


async def test_an_act_without_room_goes_on_and_cannot_be_undone(
    journal: Journal, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    act = await begun(journal, clock)
    assert await journal.note(act.id, [entry(1)])
    monkeypatch.setattr(module, "MAX_SIZE", 400)
    assert not await journal.note(act.id, [entry(number) for number in range(1000)])
    assert not await journal.note(act.id, [entry(2)])
    finished = await journal.finish(act)
    assert "limit" in finished.problem
    assert await noted(journal) == []
    monkeypatch.setattr(module, "MAX_ACTS", 1)
    second = await begun(journal, clock, "22222222")
    assert "1 changes" in (await journal.finish(second)).problem
    (tmp_path / "file").touch()
    nowhere = Journal(tmp_path / "file", clock)
    third = await begun(nowhere, clock)
    assert not await nowhere.note(third.id, [entry(1)])
    assert "cannot be written: " in (await nowhere.finish(third)).problem
    assert nowhere.problems()
    assert await nowhere.acts() == []


# Due times that were written while the clock was ahead, over a running scheduler


DAY = 86_400.0
MINUTE = 60.0
NOWHERE = Path("no-act")


class Watched(Relay):
    """A relay by a clock that the test sets, whose mail is tried each minute."""

    clock: ManualClock

    def __init__(self) -> None:
        retry = RetrySettings(schedule=(MINUTE,), jitter=0.0)
        super().__init__(zones=(ZoneSettings(next_hop="hop"),), retry=retry, clock=ManualClock())

    def watch(self, home: Path = NOWHERE) -> ClockWatch:
        correct = self.operations(NOWHERE).correct
        return ClockWatch(home / "clock.json", self.clock, events=self.events, correct=correct)

    async def one(self) -> Delivery:
        (stored,) = await self.stored()
        return stored


@pytest.fixture
async def relay() -> AsyncIterator[Watched]:
    relay = Watched()
    relay.courier.script = lambda batch: [DEFERRED] * len(batch.deliveries)
    await relay.scheduler.start()
    yield relay
    await relay.close()


async def deferred(relay: Watched) -> Delivery:
    relay.accept("b@example.com")
    await relay.until(lambda: len(relay.sink.named("deferred")) == 1)
    return await relay.one()


async def changed(relay: Watched, **fields: object) -> Delivery:
    stored = await relay.one()
    await relay.store.update([stored.key], lambda each: structs.replace(each, **fields))
    return await relay.one()


async def test_what_was_deferred_while_the_clock_was_ahead_is_tried_in_time(relay: Watched) -> None:
    relay.clock.step(DAY)
    watch = relay.watch()
    await deferred(relay)
    relay.clock.step(-DAY)
    await watch.look()
    stored = await relay.one()
    assert stored.next_attempt == relay.clock.now() + MINUTE
    assert relay.sink.named("clock-set-back")[0]["corrected"] == 1
    relay.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    relay.clock.advance(MINUTE)
    relay.scheduler.wake(queue_of("default"))
    await relay.until_empty()


async def test_mail_whose_attempt_outlasts_the_step_without_outcome_is_tried(relay: Watched) -> None:
    """Its lease was lost: nothing wrote a new due time (seed 3412)."""
    relay.clock.step(DAY)
    watch = relay.watch()
    await deferred(relay)
    relay.courier.gate = asyncio.Event()
    relay.clock.advance(MINUTE)
    relay.scheduler.wake(queue_of("default"))
    await relay.until(lambda: len(relay.courier.in_flight) == 1)
    relay.clock.step(-DAY)
    await watch.look()
    assert relay.sink.named("clock-set-back")[0]["corrected"] == 0
    await relay.scheduler.stop(0.0)
    await watch.look()
    stored = await relay.one()
    assert stored.next_attempt <= relay.clock.now() + MINUTE
    await watch.look()
    assert [each["corrected"] for each in relay.sink.named("clock-set-back")] == [0, 1]


async def test_a_start_finds_it_by_an_id_in_the_future(relay: Watched) -> None:
    relay.clock.step(DAY)
    await deferred(relay)
    last = MessageIdSource(relay.clock).next()
    relay.clock.step(-DAY)
    watch = relay.watch()
    running = asyncio.create_task(watch.run(last))
    await relay.until(lambda: len(relay.sink.named("clock-set-back")) == 1)
    await cancel_all(running)
    stored = await relay.one()
    assert stored.next_attempt == relay.clock.now() + MINUTE


async def test_times_that_a_sender_or_an_operator_chose_stay(relay: Watched) -> None:
    watch = relay.watch()
    await deferred(relay)
    for fields in (
        {"last": None, "created": relay.clock.now() + DAY},  # FUTURERELEASE
        {"last": attempt(relay.clock.now() - 2 * DAY)},  # chosen after an attempt of the past
        {"last": attempt(relay.clock.now()), "act": "0123abcd"},  # retry --at
    ):
        before = await changed(relay, next_attempt=relay.clock.now() + DAY, **fields)
        relay.clock.step(-2 * MINUTE)
        await watch.look()
        assert await relay.stored() == [before]
    assert [each["corrected"] for each in relay.sink.named("clock-set-back")] == [0, 0, 0]


async def test_nothing_is_read_while_the_clock_goes_on_as_it_should(relay: Watched) -> None:
    watch = relay.watch()
    running = asyncio.create_task(watch.run(MessageIdSource(relay.clock).next()))
    await asyncio.sleep(0)
    for seconds in (30.0, DAY):
        relay.clock.advance(seconds)
        relay.clock.step(-1.0)  # NTP
        await watch.look()
    await cancel_all(running)
    assert relay.sink.named("clock-set-back") == []


async def test_an_undo_restores_due_times_by_the_clock_as_it_is_now(relay: Watched, tmp_path: Path) -> None:
    (tmp_path / "acts").mkdir()
    operations = relay.operations(tmp_path)
    await deferred(relay)
    hold = Act(id="00000001", at=relay.clock.now(), verb="hold")
    assert (await operations.hold(QueueFilter(), act=hold)).changed == 1
    relay.clock.step(-DAY)
    await relay.watch().look()
    undo = Act(id="00000002", at=relay.clock.now(), verb="undo", undoes=hold.id)
    assert (await operations.undo(hold, undo)).changed == 1
    stored = await relay.one()
    assert (stored.held, stored.next_attempt) == (False, relay.clock.now() + MINUTE)
    # The undo is undone as well.
    again = Act(id="00000003", at=relay.clock.now(), verb="undo", undoes=undo.id)
    assert (await operations.undo(undo, again)).changed == 1
    assert (await relay.one()).held


async def test_what_an_order_held_is_due_by_the_clock_as_it_is_when_the_order_ends(relay: Watched) -> None:
    operations = relay.operations(NOWHERE)
    order = Order(id="0123abcd", effect=SUSPEND, reason="a test", who="ann", since=relay.clock.now())
    await deferred(relay)
    await changed(relay, held=True, act=order.id)
    relay.clock.step(-DAY)
    await relay.watch().look()
    assert await operations.release_orders([order]) == 1
    stored = await relay.one()
    assert (stored.held, stored.next_attempt) == (False, relay.clock.now() + MINUTE)
    # New mail that the order held is due now.
    await changed(relay, held=True, act=order.id, next_attempt=0.0, last=None)
    assert await operations.release_orders([order]) == 1
    assert (await relay.one()).next_attempt == relay.clock.now()


async def test_release_and_reroute_take_an_acceptance_in_the_future_for_no_release(relay: Watched) -> None:
    operations = relay.operations(NOWHERE)
    await deferred(relay)
    await operations.hold(QueueFilter())
    relay.clock.step(-DAY)
    assert (await operations.release(QueueFilter())).changed == 1
    await relay.until(lambda: len(relay.sink.named("deferred")) == 2)
    # A list that was not attempted yet, and mail that its sender holds back.
    for fields, due in (
        ({"next_attempt": relay.clock.now() + DAY - OVERDUE}, relay.clock.now()),
        ({}, relay.clock.now() + DAY),
    ):
        release = {"created": relay.clock.now() + DAY, "next_attempt": relay.clock.now() + DAY}
        before = await changed(relay, **{"last": None, "held": True, **release, **fields})
        assert before.released_at(relay.clock.now()) == due


@pytest.mark.parametrize("slept", [0.0, 2 * DAY], ids=["awake", "while-the-machine-slept"])
async def test_a_list_that_waits_is_due_by_the_clock_as_it_is(relay: Watched, slept: float) -> None:
    await deferred(relay)
    watch = relay.watch()
    born = relay.clock.now() + slept
    relay.clock.suspend(slept)
    relay.clock.step(-DAY)
    await changed(relay, last=None, created=born, next_attempt=born - OVERDUE)
    await watch.look()
    assert (await relay.one()).next_attempt == relay.clock.now()


async def test_mail_does_not_age_by_a_leap_until_it_is_confirmed(relay: Watched, tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    watch = relay.watch(tmp_path)
    before = relay.clock.now()
    relay.clock.suspend(2 * DAY)  # the machine slept: no leap
    relay.clock.step(MINUTE)
    assert (watch.skipped(before), watch.problems()) == (0.0, ())
    relay.clock.step(5 * DAY)
    assert watch.skipped(before) == 5 * DAY
    assert watch.skipped(relay.clock.now()) == 0.0
    assert "jumped forward by 5d" in watch.problems()[0]
    await watch.look()
    again = relay.watch(tmp_path)
    assert again.skipped(before) == 5 * DAY, "a restart does not forget it"
    assert again.confirm()
    assert (again.skipped(before), again.problems(), again.confirm()) == (0.0, (), False)
    relay.clock.advance(DAY + 1)
    assert (watch.skipped(before), watch.problems()) == (0.0, ())
    before = relay.clock.now()
    relay.clock.step(5 * DAY)
    assert watch.skipped(before) == 5 * DAY
    new = relay.clock.now()
    relay.clock.step(-DAY)
    assert watch.skipped(before) == 4 * DAY, "the rest of the leap is as wrong as the whole"
    assert watch.skipped(new) == 0.0
    relay.clock.step(-4 * DAY)
    assert watch.skipped(before) == 0.0
    await watch.look()
    assert not path.exists()


async def test_a_leap_is_no_reason_to_expire_or_to_warn(relay: Watched, tmp_path: Path) -> None:
    watch = relay.watch(tmp_path)
    relay.settler._callbacks = SettlerCallbacks(
        paused=lambda delivery, message, where: watch.skipped(delivery.created)
    )
    relay.accept("b@example.com")
    await relay.until(lambda: len(relay.sink.named("deferred")) == 1)
    relay.clock.step(30 * DAY)
    relay.scheduler.wake(queue_of("default"))
    await relay.until(lambda: len(relay.sink.named("deferred")) == 2)
    assert not relay.sink.named("dsn")
    assert watch.confirm()
    relay.clock.advance(MINUTE)
    relay.scheduler.wake(queue_of("default"))
    await relay.until(lambda: len(relay.sink.named("expired")) == 1)


# Which key a delivery is counted under, in which column of age, and that keys are bounded


TODAY = 1_000_000.0


def one(outcome: Outcome | None = None) -> Delivery:
    ids = MessageIdSource(ManualClock(), 0, last=None)
    (delivery,) = deliveries_of(make_message(ids, ["a@example.com"], created=TODAY))
    return delivery if outcome is None else structs.replace(delivery, last=outcome.attempt(TODAY))


@pytest.mark.parametrize(
    ("minutes", "column"), [(-10, 0), (0, 0), (5, 0), (5.1, 1), (80, 4), (1280, 8), (1281, 9), (99_999, 9)]
)
def test_an_age_has_one_column(minutes: float, column: int) -> None:
    tally = SummaryCount(3, TODAY)
    tally.count("x", TODAY - minutes * 60)
    assert [(at, n) for at, n in enumerate(tally.counts["x"]) if n] == [(column, 3)]


def test_keys_beyond_the_most_are_other() -> None:
    tally = SummaryCount(1, TODAY)
    for number in range(MAX_KEYS + 7):
        tally.count(str(number), TODAY)
    tally.count("3", TODAY)
    assert len(tally.counts) == MAX_KEYS
    assert tally.counts["3"][0] == 2
    assert tally.other == [7] + [0] * len(BOUNDS)


@pytest.mark.parametrize(
    ("one_text", "another"),
    [
        ("greylisted for 300s <a@x.example>", "greylisted for 300s <bob@y.example>"),
        ("[192.0.2.1] is listed at zen.example", "[2001:db8::7] is listed at zen.example"),
        ("mailbox of ann@example.com is full", "mailbox of bob@example.net is full"),
        ("later d9443c01a7336-29 - gsmtp", "later 41be03b00d2f7-b6 - gsmtp"),
    ],
)
def test_replies_that_say_the_same_are_one(one_text: str, another: str) -> None:
    keys = {
        reply_key(one(structs.replace(DEFERRED, reply=Reply(451, "7.1", text))))
        for text in (one_text, another)
    }
    assert len(keys) == 1
    assert keys.pop().startswith("451 4.7.1 ")


@pytest.mark.parametrize(
    "text",
    [
        "<ann@example.com>: user unknown",
        "ann: no such user",
        "user john.doe unknown at person.example",
        "relaying denied (orcpt=rfc822;ann+40example.com)",
        "the account is over quota ann x9-20020a05.88",
    ],
)
def test_a_summary_groups_replies_as_the_report_of_the_history(text: str) -> None:
    delivery = structs.replace(one(), recipient=Mailbox("ann@example.com"))
    reply = Reply(451, "7.1", text)
    attempted = structs.replace(delivery, last=structs.replace(DEFERRED, reply=reply).attempt(TODAY))
    keys = {
        same_reply(Redactor(key * 32, enabled=True).about(str(reply), delivery.recipient))
        for key in (b"a", b"b", b"c", b"d")
    }
    assert keys == {reply_key(attempted)}
    assert "ann" not in reply_key(attempted)


def test_other_replies_are_others() -> None:
    texts = ("mailbox full", "no such user", "try again in 5 minutes")
    assert (
        len({reply_key(one(structs.replace(DEFERRED, reply=Reply(451, "7.1", text)))) for text in texts}) == 3
    )
    assert reply_key(one()) == NO_ATTEMPT
