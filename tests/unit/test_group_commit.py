"""When a write begins: what it waits for, counted in iterations of the loop and in its own milliseconds."""

import asyncio
from collections.abc import Sequence

from zonerelay.model.clock import SystemClock
from zonerelay.store.keys.group_commit import GroupCommitter, SubmittedChanges


class Disk:
    """Ends each write in the next iteration of the loop. `batches` has what each one held."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.committer = GroupCommitter[str, list[str]](
            self._prepare, self._write, clock=SystemClock(), observe=lambda _: None, failed=lambda _: None
        )

    def _prepare(self, submissions: Sequence[SubmittedChanges[str]], size: int) -> list[str]:
        return [each.ops for each in submissions]

    def _write(self, batch: list[str]) -> None:
        self.batches.append(batch)
        asyncio.get_running_loop().call_soon(self.committer.written, 0.001)


async def test_outcomes_that_wait_for_nothing_are_no_company() -> None:
    """A client that sent a message alone waited up to 7 ms for as many as the outcomes before it."""
    disk = Disk()
    loop = asyncio.get_running_loop()
    for _ in range(20):
        for _ in range(10):
            disk.committer.submit("outcome", lazy=True)
        await disk.committer.submit("message")
    waits = 0
    real = loop.call_later

    def counted(*words: object) -> asyncio.TimerHandle:
        nonlocal waits
        waits += 1
        return real(*words)  # type: ignore[arg-type]

    loop.call_later = counted  # type: ignore[method-assign,assignment]
    await disk.committer.submit("message")
    assert (disk.batches[-1], waits) == (["message"], 0)


async def test_a_message_waits_for_half_of_those_that_usually_come_with_it() -> None:
    disk = Disk()
    for _ in range(20):
        await asyncio.gather(*(disk.committer.submit("message") for _ in range(10)))
    alone = disk.committer.submit("message")
    await asyncio.sleep(0)
    assert len(disk.batches) == 20
    for _ in range(5):
        disk.committer.submit("message")
    await alone
    assert len(disk.batches[-1]) == 6
