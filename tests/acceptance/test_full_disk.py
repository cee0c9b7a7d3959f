"""A spool on a small file system that fills up: 452, nothing acknowledged is lost, and it recovers."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import RelayProcess
from tests.support.submit import Submitter, tokens
from zonerelay.sandbox.sink import Sink

SIZE = 48


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of SIZE MB; needs the right to mount, which CI and a developer's container have."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}m", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("guard", ["8 MB", "0"], ids=["with min_free_space", "until the write fails"])
async def test_a_full_disk_is_answered_452_and_recovers(
    tmp_path: Path, small_disk: Path, sink: Sink, guard: str
) -> None:
    relay = RelayProcess(
        tmp_path / "relay",
        next_hop=f"127.0.0.1:{sink.port}",
        spool={"path": str(small_disk / "spool"), "min_free_space": guard if guard != "0" else 0},
        tables={"retry": {"schedule": ["1s"], "jitter": 0, "suspend_min": "1s", "suspend_max": "2s"}},
    )
    port = sink.port
    await sink.close()  # nobody takes the mail, so the spool fills
    with relay:
        client = Submitter(relay.smtp_port, prefix="fill", size=400_000)
        await client.run(4, 400)
        full = [reply for reply in client.replies if reply.startswith((b"452 4.3.1", b"451 4.3.0"))]
        assert full, client.replies
        assert client.acknowledged
        assert not [reply for reply in client.replies if reply.startswith(b"5")], client.replies
        if guard != "0":
            assert await asyncio.to_thread(lambda: relay.http("/readyz")[0]) == 503
        again = Sink(port=port)
        await again.start()
        try:
            await asyncio.to_thread(relay.wait_until_empty, timeout=90)
            late = Submitter(relay.smtp_port, prefix="late")
            await asyncio.to_thread(
                relay.wait_for, lambda: relay.http("/readyz")[0] == 200, what="ready again", timeout=60
            )
            await late.run(1, 3)
            assert len(late.acknowledged) == 3
            await asyncio.to_thread(relay.wait_until_empty)
            arrived = tokens(again.messages)
        finally:
            await again.close()
    assert client.acknowledged | late.acknowledged <= arrived.keys()
