"""All workers replaced, many times over, under load: nobody refused, nothing lost, nothing left behind."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

from tests.bench.crew.stage import Stage, stage
from tests.bench.crew.watch import Holdings, Watch
from tests.support.process import RelayProcess

WARM_UP = 3


async def rolls(directory: Path, times: int, *, workers: int) -> bool:
    """Prints; false when something was not as it must be."""
    async with stage(directory, workers) as at:
        watch = Watch(at.relay)
        watching = asyncio.create_task(watch.run())
        for number in range(WARM_UP):
            await _replace(at.relay, f"warm-{number}")
        before, began = Holdings.of(at.relay), time.monotonic()
        for number in range(times):
            await _replace(at.relay, f"roll-{number}")
        took = time.monotonic() - began
        await asyncio.sleep(1)
        after = Holdings.of(at.relay)
        watching.cancel()
    print(f"{times} times all {workers} workers replaced, {took / times:.1f} s each")
    print("\n".join((f"{'':36}{'before':>8}{'after':>8}", *before.lines(after))))
    print(f"scrapes: {watch.scrapes}, backwards: {len(watch.backwards)}, not ready: {len(watch.unready)}")
    print("\n".join((*watch.backwards[:5], *watch.unready[:5])))
    return _tell(at) and not watch.backwards and not watch.unready


def _tell(at: Stage) -> bool:
    lost, complaints = at.lost(), at.complaints()
    print(
        f"accepted: {len(at.clients.acknowledged)}, lost: {lost}, delivered twice: {at.twice()}, "
        f"clients refused, reset or left alone: {sum(complaints.values())} {dict(complaints) or ''}"
    )
    return not lost and not complaints


async def _replace(relay: RelayProcess, name: str) -> None:
    """By a new configuration: another hostname."""
    text = relay.config.read_text().splitlines()
    text[0] = f'hostname = "{name}.test"'
    relay.config.write_text("\n".join(text) + "\n")
    done = _reloads(relay) + 1
    relay.signal(signal.SIGHUP)
    await asyncio.to_thread(relay.wait_for, lambda: _reloads(relay) == done, what=name, timeout=120)


def _reloads(relay: RelayProcess) -> int:
    return sum('"event":"reloaded"' in line and '"worker"' not in line for line in _lines(relay))


def _lines(relay: RelayProcess) -> list[str]:
    return relay.log_text().splitlines()
