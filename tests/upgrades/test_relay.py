"""The program itself on what older releases have left: the mail goes out as it came in."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from tests.support.process import PROGRAM, RelayProcess
from tests.upgrades import fixtures
from tests.upgrades.engines import ENGINES
from zonerelay.sandbox.sink import Sink


@pytest.mark.parametrize("name", [name for name, engine in fixtures.stored() if engine == "leveldb"])
async def test_mail_of_an_older_release_is_delivered(name: str, tmp_path: Path, sink: Sink) -> None:
    expected = fixtures.expected(name)
    raw = (fixtures.DIRECTORY / name / ENGINES["leveldb"].file).read_bytes()
    ENGINES["leveldb"].unpack(raw, tmp_path)
    hop = {"next_hop": f"127.0.0.1:{sink.port}", "tls": "none"}
    zones = [{"name": "default", **hop}, {"name": "other", **hop}]
    with RelayProcess(tmp_path, tables={"zone": zones}) as relay:
        release = [str(PROGRAM), "queue", "release", "--sender", "held@example.org", "--yes"]
        await asyncio.to_thread(
            subprocess.run, [*release, "--config", str(relay.config)], check=True, capture_output=True
        )
        await asyncio.to_thread(relay.wait_until_empty)
    arrived = {
        (message.mail_from, recipient): message.sha256
        for message in sink.messages
        for recipient in message.recipients
    }
    assert arrived.items() >= {
        ((each["message"]["envelope"]["sender"], delivery["recipient"]), each["body"])
        for each in expected.values()
        for delivery in each["deliveries"]
    }
    # Nothing else was sent but the report of success that a client had asked for.
    assert len(arrived) == sum(len(each["deliveries"]) for each in expected.values()) + 1
