"""Readiness: which reasons, and how the probe is shared."""

from __future__ import annotations

import asyncio

import pytest

from zonerelay.admin.health import ReadinessCheck
from zonerelay.model.clock import ManualClock
from zonerelay.store.contract import StoreError, StoreFullError


@pytest.mark.parametrize(
    ("draining", "accepting", "unhealthy", "probe_failure", "reasons"),
    [
        (False, True, None, None, ()),
        (True, False, None, None, ("the relay is shutting down",)),
        (False, False, None, None, ("no listener accepts connections",)),
        (False, True, "the disk is full", None, ("the disk is full",)),
        (False, True, None, "input/output error", ("input/output error",)),
        (False, True, "the disk is full", "the disk is full", ("the disk is full",)),  # said once
        (True, True, "a", "b", ("the relay is shutting down", "a", "b")),
    ],
)
async def test_every_reason_is_given_once(
    draining: bool,
    accepting: bool,
    unhealthy: str | None,
    probe_failure: str | None,
    reasons: tuple[str, ...],
) -> None:
    disk = Disk()
    disk.error = StoreError(probe_failure) if probe_failure else None
    check = check_of(disk, ManualClock(), unhealthy=unhealthy, accepting=accepting, draining=draining)
    assert await check() == reasons


class Disk:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.turns = asyncio.Event()
        self.turns.set()
        self.trials = 0

    async def probe(self) -> None:
        self.trials += 1
        await self.turns.wait()
        if self.error:
            raise self.error


def check_of(
    disk: Disk,
    clock: ManualClock,
    timeout: float = 5.0,
    *,
    unhealthy: str | None = None,
    accepting: bool = True,
    draining: bool = False,
) -> ReadinessCheck:
    return ReadinessCheck(
        probe=disk.probe,
        unhealthy=lambda: unhealthy,
        accepting=lambda: accepting,
        draining=lambda: draining,
        clock=clock,
        timeout=timeout,
    )


async def test_a_result_serves_a_second_and_no_longer() -> None:
    disk, clock = Disk(), ManualClock()
    probe = check_of(disk, clock)
    assert await probe() == ()
    disk.error = StoreFullError("no space left")
    clock.advance(0.9)
    assert await probe() == ()
    clock.advance(0.2)
    assert await probe() == ("no space left",)
    assert disk.trials == 2


async def test_everybody_who_asks_meanwhile_shares_one_trial() -> None:
    disk, clock = Disk(), ManualClock()
    disk.turns.clear()
    disk.error = StoreError("input/output error")
    probe = check_of(disk, clock)
    asking = [asyncio.create_task(probe()) for _ in range(10)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.pop().cancel()  # one that leaves does not take the trial along
    await asyncio.sleep(0)
    disk.turns.set()
    assert set(await asyncio.gather(*asking)) == {("input/output error",)}
    assert disk.trials == 1


async def test_a_disk_that_hangs_is_a_reason_and_is_not_asked_twice() -> None:
    disk, clock = Disk(), ManualClock()
    disk.turns.clear()
    probe = check_of(disk, clock, timeout=0.0)
    for _ in range(3):
        assert await probe() == ("the spool did not complete a synced write within 0 seconds",)
        clock.advance(10)
    assert disk.trials == 1
    disk.turns.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await probe() == ()
    await probe.close()


async def test_an_unexpected_error_is_a_reason_without_its_text() -> None:
    disk, clock = Disk(), ManualClock()
    disk.error = ValueError("a secret")
    assert await check_of(disk, clock)() == ("the spool probe failed with an unexpected ValueError",)
