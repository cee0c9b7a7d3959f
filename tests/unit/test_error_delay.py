"""What strangers do wrong adds up per client, and ages."""

from __future__ import annotations

from zonerelay.inbound.limits.connections import AGE, FREE, MAX_CLIENTS, MAX_DELAY, STEP, ErrorDelays


def test_some_errors_are_free_then_each_waits_longer_up_to_a_limit() -> None:
    errors = ErrorDelays()
    delays = [errors.made("a", 0.0) for _ in range(FREE + 100)]
    assert delays[: FREE + 3] == [0.0] * FREE + [STEP, 2 * STEP, 3 * STEP]
    assert max(delays) == MAX_DELAY == delays[-1]
    assert errors.made("b", 0.0) == 0.0


def test_errors_age_one_by_one_and_the_worst_client_is_free_again_some_day() -> None:
    errors = ErrorDelays()
    for _ in range(FREE + 2):
        errors.made("a", 0.0)
    assert errors.made("a", AGE) == 2 * STEP, ErrorDelays
    for _ in range(10_000):
        errors.made("a", AGE)
    assert errors.made("a", AGE + 600.0) == 0.0


def test_the_table_forgets_whoever_erred_longest_ago() -> None:
    errors = ErrorDelays()
    for number in range(MAX_CLIENTS + 10):
        errors.made(str(number), 0.0)
    assert len(errors) == MAX_CLIENTS
