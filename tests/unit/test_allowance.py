"""What a worker does with its part of shared limits while others wait for it."""

from __future__ import annotations

import pytest

from zonerelay.limits.values import Held
from zonerelay.limits.worker.allowance import ZoneAllowance

LINE = ("mx.example", "a.example")


def allowance(*, units: int = 1, pressed: int = 0) -> ZoneAllowance:
    """A worker with these units; `pressed`: so many wait elsewhere because the zone has no more."""
    found = ZoneAllowance("default", lambda: None, lambda: 0.0)
    found.take_in((Held(*LINE, units),), pressed, 0.0)
    return found


def sent(found: ZoneAllowance, *, more: bool) -> bool:
    """One batch over one connection; whether the connection is kept."""
    found.started(*LINE, more=more)
    found.connected(*LINE)
    is_kept = found.may_keep(*LINE)
    if not is_kept:
        found.disconnected(*LINE)
    found.ended(*LINE)
    return is_kept


@pytest.mark.parametrize(
    ("pressed", "more", "kept"), [(0, False, True), (0, True, True), (3, True, True), (3, False, False)]
)
def test_a_connection_without_more_mail_makes_room_at_once_for_who_waits(
    pressed: int, more: bool, kept: bool
) -> None:
    found = allowance(pressed=pressed)
    assert sent(found, more=more) is kept
    said = [(claim.keep, claim.back) for claim in found.claims(everything=False)]
    assert said == ([] if kept else [(0, 1)])


def test_a_connection_is_kept_while_another_batch_is_on_its_way() -> None:
    found = allowance(units=2, pressed=3)
    found.started(*LINE, more=False)
    found.started(*LINE, more=False)
    found.connected(*LINE)
    assert found.may_keep(*LINE)


def test_a_line_that_goes_on_wishing_for_more_begins_to_wait_anew_with_each_unit() -> None:
    """It was shown as one wait of hours, of a line that was being served all the time."""
    found = allowance(units=2)
    for _ in range(2):
        found.started(*LINE)
    assert not found.may_start(*LINE, 5, 20, 9)
    found.note_time(10.0)
    assert found.take_in((Held(*LINE, 3),), 0, 11.0) == [1.0]
    assert found.waits
    assert found.take_in((Held(*LINE, 4),), 0, 3611.0) == [3600.0]
    assert not found.waits


def test_a_wish_that_nobody_has_any_more_is_taken_back() -> None:
    found = allowance(units=0)
    assert not found.may_start(*LINE, 5, 20, 1)
    assert [claim.want for claim in found.claims(everything=False)] == [1]
    found.cancel(*LINE)
    assert not found.waits
    assert [claim.want for claim in found.claims(everything=False)] == [0]
    found.cancel(*LINE)
    assert found.claims(everything=False) == ()


def test_the_wish_of_a_batch_that_has_started_is_not_taken_back() -> None:
    found = allowance()
    found.started(*LINE)
    found.forget_units()  # the lease has ended
    assert not found.may_connect(*LINE, 5, 20)
    found.cancel(*LINE)  # nothing else waits for the line
    assert [claim.want for claim in found.claims(everything=False)] == [1]
