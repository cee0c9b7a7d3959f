import asyncio
import time

import pytest

from zonerelay.telemetry.metrics import instruments
from zonerelay.telemetry.metrics.instruments import IDLE, IDLE_INTERVAL, INTERVAL, LoopLag, interval_after
from zonerelay.telemetry.metrics.metrics import Metrics


async def test_a_pause_of_the_loop_is_seen_in_nearly_its_length() -> None:
    seen: list[float] = []
    lag = LoopLag(seen.append)
    lag.start()
    await asyncio.sleep(0)
    time.sleep(3 * INTERVAL)
    await asyncio.sleep(INTERVAL)
    lag.stop()
    assert max(seen) == lag.longest >= 1.9 * INTERVAL


def test_it_is_measured_less_often_while_there_is_nothing_to_do() -> None:
    """Each time wakes up an idle machine."""
    assert interval_after(IDLE / 2, 0.0) == IDLE_INTERVAL
    assert interval_after(IDLE, 0.0) == INTERVAL
    assert interval_after(0.0, INTERVAL) == INTERVAL


async def test_each_minute_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruments, "SPAN", 0.05)
    marks, marked = list[None](), asyncio.Event()

    def mark() -> None:
        marks.append(None)
        if len(marks) == 3:
            marked.set()

    lag = LoopLag(lambda _: None, mark)
    lag.start()
    await asyncio.wait_for(marked.wait(), 10)
    lag.stop()


async def test_after_the_stop_nothing_is_measured_any_more() -> None:
    seen: list[float] = []
    lag = LoopLag(seen.append)
    lag.start()
    lag.stop()
    await asyncio.sleep(2 * INTERVAL)
    assert seen == []


def test_a_relay_that_has_not_started_shows_no_lag() -> None:
    shown = Metrics().exposition().decode()
    assert "zonerelay_loop_lag_seconds_count 0" in shown
    assert "zonerelay_loop_lag_longest_seconds 0" in shown
