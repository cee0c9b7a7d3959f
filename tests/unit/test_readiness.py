"""Readiness: which reasons, and how the probe is shared."""

from __future__ import annotations

import asyncio

import pytest

from zonerelay.admin.health import ReadinessCheck, SharedProbe, readiness
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
def test_every_reason_is_given_once(
    draining: bool,
    accepting: bool,
    unhealthy: str | None,
    probe_failure: str | None,
    reasons: tuple[str, ...],
) -> None:
    found = readiness(
        draining=draining, accepting=accepting, unhealthy=unhealthy, probe_failure=probe_failure
    )
    assert found == reasons


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


def shared(disk: Disk, clock: ManualClock, timeout: float = 5.0) -> SharedProbe:
    return SharedProbe(disk.probe, clock, timeout=timeout, fresh_for=1.0)


async def test_a_result_serves_a_second_and_no_longer() -> None:
    disk, clock = Disk(), ManualClock()
    probe = shared(disk, clock)
    assert await probe.failure() is None
    disk.error = StoreFullError("no space left")
    clock.advance(0.9)
    assert await probe.failure() is None
    clock.advance(0.2)
    assert await probe.failure() == "no space left"
    assert disk.trials == 2


async def test_everybody_who_asks_meanwhile_shares_one_trial() -> None:
    disk, clock = Disk(), ManualClock()
    disk.turns.clear()
    disk.error = StoreError("input/output error")
    probe = shared(disk, clock)
    asking = [asyncio.create_task(probe.failure()) for _ in range(10)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    disk.turns.set()
    assert set(await asyncio.gather(*asking)) == {"input/output error"}
    assert disk.trials == 1


async def test_a_disk_that_hangs_is_a_reason_and_is_not_asked_twice() -> None:
    disk, clock = Disk(), ManualClock()
    disk.turns.clear()
    probe = shared(disk, clock, timeout=0.0)
    for _ in range(3):
        assert await probe.failure() == "the spool did not complete a synced write within 0 seconds"
        clock.advance(10)
    assert disk.trials == 1
    disk.turns.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await probe.failure() is None
    await probe.close()


async def test_a_caller_that_leaves_does_not_take_the_trial_along() -> None:
    disk, clock = Disk(), ManualClock()
    disk.turns.clear()
    probe = shared(disk, clock)
    leaving = asyncio.create_task(probe.failure())
    staying = asyncio.create_task(probe.failure())
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    disk.turns.set()
    assert await staying is None
    assert disk.trials == 1


async def test_an_unexpected_error_is_a_reason_without_its_text() -> None:
    disk, clock = Disk(), ManualClock()
    disk.error = ValueError("a secret")
    assert await shared(disk, clock).failure() == "the spool probe failed with an unexpected ValueError"


async def test_the_check_asks_every_part() -> None:
    disk = Disk()
    check = ReadinessCheck(
        probe=disk.probe,
        unhealthy=lambda: "less than 100 MB left",
        accepting=lambda: False,
        draining=lambda: False,
        clock=ManualClock(),
    )
    assert await check() == ("no listener accepts connections", "less than 100 MB left")
    await check.close()
