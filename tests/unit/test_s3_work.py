"""A settle is cut into what belongs together, and into nothing smaller."""

from __future__ import annotations

from dataclasses import replace

from tests.store.builders import delivery_for, envelope_for, message_id, own_message
from zonerelay.model.delivery import Delivery
from zonerelay.store.contract import Change, Finish, Postpone, Submit
from zonerelay.store.s3.claims import groups_of, to_decide


def delivery(number: int, recipient: str = "a@example.net") -> Delivery:
    return delivery_for(envelope_for(message_id(number), recipient), recipient)


def report(number: int, *about: Delivery) -> Submit:
    message, bounced = own_message(message_id(number), b"y", "from@example.org")
    return Submit(message, b"y", (bounced,), tuple(d.key for d in about))


def ids(changes: list[Change]) -> list[list[int]]:
    return sorted([int(each, 16) for each in group.ids] for group in groups_of(changes))


def test_messages_without_reports_are_apart() -> None:
    assert ids([Finish(delivery(1)), Finish(delivery(2)), Finish(delivery(1, "b@example.net"))]) == [[1], [2]]


def test_report_binds_what_it_is_about() -> None:
    one, two, three = delivery(1), delivery(2), delivery(3)
    changes: list[Change] = [Finish(one), Finish(two), Finish(three), report(9, one, three)]
    assert ids(changes) == [[1, 3], [2]]


def test_report_about_nothing_in_particular_binds_everything() -> None:
    assert ids([Finish(delivery(1)), Finish(delivery(2)), report(9)]) == [[1, 2]]


def test_reports_with_something_in_common_are_one_group() -> None:
    one, two, three = delivery(1), delivery(2), delivery(3)
    finished: list[Change] = [Finish(one), Finish(two), Finish(three)]
    changes = [*finished, report(8, one, two), report(9, two, three)]
    (group,) = groups_of(changes)
    assert (len(group.changes), len(group.reports)) == (3, 2)


def test_report_about_nothing_that_is_here_is_apart() -> None:
    groups = groups_of([Finish(delivery(1)), report(9, delivery(5))])
    assert [(len(group.changes), len(group.reports)) for group in groups] == [(1, 0), (0, 1)]


def test_what_has_left_does_not_come_back_and_what_is_gone_is_left_alone() -> None:
    one = delivery(1)
    (group,) = groups_of([Finish(one), Postpone(replace(one, held=True))])
    assert group.changes == {one.key: None}
    decide = to_decide({one.key: None, delivery(1, "b@example.net").key: None})
    assert decide({one.key: one}) == {one.key: None}
