"""How failed log-ins add up per key."""

from __future__ import annotations

import pytest

from zonerelay.inbound.limits import auth_failures as attempts
from zonerelay.inbound.limits.auth_failures import MAX_KEYS, FailedAttempts

WINDOW = 900.0


@pytest.fixture
def table() -> FailedAttempts:
    return FailedAttempts(max_failures=10, window=WINDOW)


def test_a_lock_ends_when_the_oldest_failure_is_forgotten(table: FailedAttempts) -> None:
    for at in range(10):
        table.failed("a", float(at))
    assert table.locked("a", WINDOW - 0.001)
    assert not table.locked("a", WINDOW)
    assert not table.locked("b", 9.0)
    table.failed("a", WINDOW)
    assert table.locked("a", WINDOW + 0.5)


def test_after_a_quiet_time_the_delay_begins_again(table: FailedAttempts) -> None:
    table.failed("a", 0.0)
    assert table.failed("a", 1.0) == 1.0
    assert table.failed("a", 1.0 + WINDOW) == 0.5


def test_the_table_forgets_whoever_failed_longest_ago(table: FailedAttempts) -> None:
    for _ in range(10):
        table.failed("first", 0.0)
        table.failed("second", 0.0)
    table.failed("first", 0.0)  # now the second is the older one
    for number in range(MAX_KEYS - 1):
        table.failed(str(number), 0.0)
    assert len(table) == MAX_KEYS
    assert table.locked("first", 0.0)
    assert not table.locked("second", 0.0)


def test_failures_of_one_client_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MAX_COUNTED", 20)
    table = FailedAttempts(max_failures=1_000_000, window=WINDOW)
    delays = [table.failed("a", 0.0) for _ in range(2000)]
    assert delays[-1] == 10.0
    assert table.locked("a", 0.0)  # the bound is the lock, too
    assert len(table._keys["a"].guesses) == 20
