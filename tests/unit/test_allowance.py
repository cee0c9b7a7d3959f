"""What a worker does with its part of shared limits while others wait for it."""

from __future__ import annotations

import pytest

from zonerelay.limits.values import Grant
from zonerelay.limits.worker.allowance import ZoneAllowance

DESTINATION = ("mx.example", "a.example")


def allowance(*, slots: int = 1, waiters: int = 0) -> ZoneAllowance:
    """A worker with these slots; `waiters`: so many wait elsewhere because the zone has no more."""
    found = ZoneAllowance("default", lambda: None, lambda: 0.0)
    found.apply((Grant(*DESTINATION, slots),), waiters, 0.0)
    return found


def sent(found: ZoneAllowance, *, more: bool) -> bool:
    """One batch over one connection; whether the connection is kept."""
    found.started(*DESTINATION, more=more)
    found.connected(*DESTINATION)
    is_kept = found.may_keep(*DESTINATION)
    if not is_kept:
        found.disconnected(*DESTINATION)
    found.ended(*DESTINATION)
    return is_kept


@pytest.mark.parametrize(
    ("waiters", "more", "kept"), [(0, False, True), (0, True, True), (3, True, True), (3, False, False)]
)
def test_a_connection_without_more_mail_makes_room_at_once_for_who_waits(
    waiters: int, more: bool, kept: bool
) -> None:
    found = allowance(waiters=waiters)
    assert sent(found, more=more) is kept
    said = [(claim.keep, claim.back) for claim in found.claims(everything=False)]
    assert said == ([] if kept else [(0, 1)])


def test_a_connection_is_kept_while_another_batch_is_on_its_way() -> None:
    found = allowance(slots=2, waiters=3)
    found.started(*DESTINATION, more=False)
    found.started(*DESTINATION, more=False)
    found.connected(*DESTINATION)
    assert found.may_keep(*DESTINATION)


def test_a_line_that_goes_on_wishing_for_more_begins_to_wait_anew_with_each_unit() -> None:
    """It was shown as one wait of hours, of a destination that was being served all the time."""
    found = allowance(slots=2)
    for _ in range(2):
        found.started(*DESTINATION)
    assert not found.may_start(*DESTINATION, 5, 20, 9)
    found.note_time(10.0)
    assert found.apply((Grant(*DESTINATION, 3),), 0, 11.0) == [1.0]
    assert found.waits
    assert found.apply((Grant(*DESTINATION, 4),), 0, 3611.0) == [3600.0]
    assert not found.waits


def test_a_wish_that_nobody_has_any_more_is_taken_back() -> None:
    found = allowance(slots=0)
    assert not found.may_start(*DESTINATION, 5, 20, 1)
    assert [claim.want for claim in found.claims(everything=False)] == [1]
    found.cancel(*DESTINATION)
    assert not found.waits
    assert [claim.want for claim in found.claims(everything=False)] == [0]
    found.cancel(*DESTINATION)
    assert found.claims(everything=False) == ()


def test_the_wish_of_a_batch_that_has_started_is_not_taken_back() -> None:
    found = allowance()
    found.started(*DESTINATION)
    found.forget_slots()  # the lease has ended
    assert not found.may_connect(*DESTINATION, 5, 20)
    found.cancel(*DESTINATION)  # nothing else waits for the destination
    assert [claim.want for claim in found.claims(everything=False)] == [1]
