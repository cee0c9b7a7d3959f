"""Fresh mail and mail that was put off take turns: a crowd of one does not hold up a single of the other."""

from __future__ import annotations

import pytest

from tests.support.queueing import DELIVERED, delivery, prove, route_to
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.queue_name import Priority
from zonerelay.queue.destination.backlog import Backlog, Line, MessageRow
from zonerelay.queue.destination.order import FRESH_WEIGHT, FairQueue
from zonerelay.queue.zone.plan import ZonePlan

NOW = ManualClock().now()


class Waiting(Line):
    def __init__(self, name: str, has_fresh: bool) -> None:
        super().__init__()
        self.name = name
        if has_fresh:
            self.add(delivery(f"{name}@example.com"), Priority.NORMAL)


def message(number: int) -> str:
    return f"{number:016x}"


def names(line: Backlog) -> list[str]:
    taken = []
    while line.waiting:
        taken += [each.recipient.partition("@")[0] for each in line.take(50)]
    return taken


def test_those_with_fresh_mail_have_most_turns_and_the_others_each_eighth_and_all_that_are_left() -> None:
    turns: FairQueue[Waiting] = FairQueue()
    fresh = [f"fresh{number}" for number in range(FRESH_WEIGHT + 2)]
    for name in ("later1", "later2", "later3", *fresh):
        turns.append(Waiting(name, name.startswith("fresh")))
    assert turns.fresh_is_next
    popped = [turns.pop().name for _ in range(FRESH_WEIGHT)]
    assert not turns.fresh_is_next
    while turns:
        popped.append(turns.pop().name)
    assert popped == [*fresh[:FRESH_WEIGHT], "later1", *fresh[FRESH_WEIGHT:], "later2", "later3"]


def test_who_comes_first_uses_up_a_turn_of_its_kind() -> None:
    turns: FairQueue[Waiting] = FairQueue()
    for number in range(FRESH_WEIGHT):
        turns.put_first(Waiting(f"first{number}", True))
    turns.append(Waiting("fresh", True))
    for _ in range(FRESH_WEIGHT):
        turns.pop()
    assert not turns.fresh_is_next
    turns.put_first(Waiting("later", False))
    assert turns.pop().name == "later"
    assert turns.fresh_is_next


def test_one_that_had_its_turn_elsewhere_comes_before_all() -> None:
    turns: FairQueue[Waiting] = FairQueue()
    turns.append(Waiting("fresh", True))
    turns.put_first(Waiting("first", False))
    assert turns.pop().name == "first"
    turns.clear()
    assert not turns


def test_who_is_new_with_fresh_mail_comes_before_the_others_and_overtakes_no_two_running() -> None:
    turns: FairQueue[Waiting] = FairQueue()
    for name in ("a", "b", "c"):
        turns.append(Waiting(name, True))
    for name in ("new1", "new2", "new3"):
        turns.append(Waiting(name, True), new=True)
    turns.append(Waiting("d", True))
    turns.append(Waiting("put off", False), new=True)
    popped = []
    while turns:
        popped.append(turns.pop().name)
    assert popped == ["new1", "a", "new2", "b", "new3", "c", "d", "put off"]


def test_who_is_new_and_came_first_has_its_place() -> None:
    turns: FairQueue[Waiting] = FairQueue()
    for number in range(3):
        turns.append(Waiting(f"new{number}", True), new=True)
    turns.append(Waiting("a", True))
    stale = Waiting("stale", True)
    turns.append(stale, new=True)
    stale.drain(Priority.NORMAL)
    assert turns.sort() == [stale]
    assert [turns.pop().name for _ in range(5)] == ["new0", "new1", "new2", "a", "stale"]


def test_within_a_backlog_fresh_messages_and_others_take_turns_oldest_first_in_each() -> None:
    line = Backlog(set())
    for number in (3, 1, 2):
        line.add(delivery(f"again{number}@a.example", message_id=message(number), next_attempt=NOW))
    for number in (6, 5):
        line.add(delivery(f"new{number}@a.example", message_id=message(number)))
    assert line.waiting == 5
    assert [each.message_id for each in line] == [message(number) for number in (1, 2, 3, 5, 6)]
    assert names(line) == ["new5", "again1", "new6", "again2", "again3"]


def test_a_backlog_without_fresh_mail_says_so_and_forgets_from_both_rows() -> None:
    line = Backlog(set())
    old = delivery("old@a.example", message_id=message(1), next_attempt=NOW)
    new = delivery("new@a.example", message_id=message(2))
    line.add(old)
    assert not line.has_fresh
    line.add(new)
    assert line.has_fresh
    assert line.remove(new.key)
    assert not line.remove(new.key)
    assert line.drain() == [old]
    assert not line.waiting
    assert not line.drain()


def test_a_row_gives_parts_of_a_message_in_the_order_of_its_recipients() -> None:
    row = MessageRow()
    for recipient in "abc":
        row.add(delivery(f"{recipient}@a.example", message_id=message(1)))
    assert [each.recipient[0] for each in row.take(2)] == ["a", "b"]
    assert [each.recipient[0] for each in row.take(2)] == ["c"]
    assert not row


def test_a_row_of_domains_apart_gives_one_domain_of_a_message_at_a_time_or_as_many_as_it_is_asked_for() -> (
    None
):
    def filled() -> MessageRow:
        row = MessageRow(apart=True)
        for recipient in ("a@x.example", "b@y.example", "c@X.example", "d@z.example"):
            row.add(delivery(recipient, message_id=message(1)))
        row.add(delivery("e@x.example", message_id=message(2)))
        return row

    def all_of(row: MessageRow, limit: int, domains: int) -> list[str]:
        taken = []
        while row:
            taken.append("".join(each.recipient[0] for each in row.take(limit, domains)))
        return taken

    assert all_of(filled(), 50, 1) == ["ac", "b", "d", "e"]
    assert all_of(filled(), 1, 1) == ["a", "c", "b", "d", "e"]
    assert all_of(filled(), 50, 2) == ["acb", "d", "e"]
    assert all_of(filled(), 3, 9) == ["acb", "d", "e"]
    row = filled()
    assert row.remove(delivery("b@y.example", message_id=message(1)).key)
    assert not row.remove(delivery("a@y.example", message_id=message(1)).key)
    assert [each.recipient[0] for each in row] == ["a", "c", "d", "e"]
    assert all_of(row, 50, 2) == ["acd", "e"]


@pytest.mark.parametrize("proven", [True, False])
def test_a_single_message_passes_hundreds_of_destinations_with_deferred_mail(*, proven: bool) -> None:
    """As the simulation showed: it waited a quarter of a minute behind 4,000 that had come due together."""
    queue = ZonePlan(ZoneSettings(max_connections=2), RetrySettings())
    for number in range(300):
        mail = delivery(f"u@d{number}.example", message_id=message(number), next_attempt=NOW - 1)
        queue.add([mail], NOW)
    queue.add([delivery("single@idle.example", message_id=message(999))], NOW)
    while domains := queue.take_look_ups():
        for domain in domains:
            queue.found(domain, route_to("default", f"mx.{domain}"), NOW)
    if proven:
        prove(queue)
    order: list[str] = []
    while len(order) < 5:
        work = queue.next_work(NOW)
        if work is None:
            raise AssertionError("a slot is free and mail waits")
        order.append(work.deliveries[0].recipient)
        queue.finished(work, [DELIVERED], NOW)
    assert "single@idle.example" in order
