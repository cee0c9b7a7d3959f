"""Fresh mail and mail that was put off take turns: a crowd of one does not hold up a single of the other."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.support.plans import NOW, PlanBed
from tests.support.queueing import delivery
from zonerelay.queue.destination.backlog import Backlog, MessageRow


def message(number: int) -> str:
    return f"{number:016x}"


def names(line: Backlog) -> list[str]:
    taken = []
    while line.waiting:
        taken += [each.recipient.partition("@")[0] for each in line.take(50)]
    return taken


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
    plan = PlanBed(proven=proven, max_connections=2)
    for number in range(300):
        plan.queue.add(plan.mail(f"d{number}.example", due=NOW - 1), NOW)
    plan.add("idle.example")
    assert "idle.example" in [each.domain for each in islice(plan.sent(), 5)]
