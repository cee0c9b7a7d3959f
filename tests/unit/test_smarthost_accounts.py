"""Whether a credential may be tried now: pauses after refusals, new secrets, forgiveness."""

import pytest

from zonerelay.delivery.auth.accounts import FIRST_PAUSE, LONGEST_PAUSE, TRY_TIME, Account, digest

OLD, NEW = digest("relay", "old"), digest("relay", "new")


def refused(account: Account, now: float, material: str = OLD) -> None:
    account.refuse("535 no", host="smarthost", address="192.0.2.1:587", material=material, now=now)


@pytest.fixture
def account() -> Account:
    return Account("default", "main")


def test_after_a_refusal_nobody_tries_for_five_minutes_and_then_one_does(account: Account) -> None:
    assert account.may_try(OLD, 0.0)
    refused(account, 0.0)
    assert not account.may_try(OLD, FIRST_PAUSE - 1)
    assert [account.may_try(OLD, FIRST_PAUSE) for _ in range(3)] == [True, False, False]
    assert account.may_try(OLD, FIRST_PAUSE + TRY_TIME)


def test_the_pause_doubles_up_to_an_hour(account: Account) -> None:
    now, pauses = 0.0, []
    for _ in range(6):
        refused(account, now)
        start = now
        while not account.may_try(OLD, now):
            now += 10
        pauses.append(now - start)
    assert pauses == [300, 600, 1200, 2400, 3600, 3600]
    assert LONGEST_PAUSE == 3600


def test_another_secret_is_tried_at_once_and_begins_with_the_shortest_pause(account: Account) -> None:
    refused(account, 0.0)
    refused(account, FIRST_PAUSE)
    assert account.may_try(NEW, FIRST_PAUSE + 1)
    refused(account, 1000.0, NEW)
    assert not account.may_try(NEW, 1000.0 + FIRST_PAUSE - 1)
    assert account.may_try(NEW, 1000.0 + FIRST_PAUSE)


def test_forgiven_is_tried_at_once_but_the_problem_stands_until_a_log_in_succeeds(account: Account) -> None:
    refused(account, 0.0)
    account.forgive()
    assert account.may_try(OLD, 1.0)
    assert account.problem
    assert account.accept(OLD)
    assert not account.problem
    assert not account.accept(OLD)


def test_a_refusal_changes_the_epoch_so_that_others_on_their_way_give_up(account: Account) -> None:
    account.accept(OLD)
    before = account.epoch
    refused(account, 0.0)
    assert account.epoch != before
    assert not account.is_proven(OLD)


def test_what_was_accepted_proves_nothing_about_another_secret(account: Account) -> None:
    assert not account.is_known
    account.accept(OLD)
    assert account.is_known
    assert account.is_proven(OLD)
    assert not account.is_proven(NEW)
