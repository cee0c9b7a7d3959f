"""What was acknowledged survives kill -9 of the relay, and of the server with every power of its own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.test_crash import Facts, check, command, whole_lines, work_for
from tests.support.redis_server import RedisServer
from zonerelay.config.settings import Backend

ROUNDS = 3


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    with RedisServer() as server:
        monkeypatch.setenv("CRASH_REDIS", f"{server.url} crash:")
        yield server


@pytest.mark.usefixtures("server")
def test_acknowledged_mail_survives_kill_9_of_the_relay(tmp_path: Path) -> None:
    facts = Facts()
    for number in range(ROUNDS):
        with subprocess.Popen(command("take", Backend.REDIS, tmp_path), stdout=subprocess.PIPE) as process:
            first = work_for(0.1 + 0.07 * number, process)
            process.kill()
            assert process.stdout is not None
            facts.hear(whole_lines(first + process.stdout.read()))
        check(facts, Backend.REDIS, tmp_path)
    assert len(facts.stored) > ROUNDS


def test_acknowledged_mail_survives_kill_9_of_the_server(tmp_path: Path, server: RedisServer) -> None:
    facts = Facts()
    with subprocess.Popen(command("take", Backend.REDIS, tmp_path), stdout=subprocess.PIPE) as process:
        said = work_for(0.0, process)
        for number in range(ROUNDS):
            time.sleep(0.2 + 0.1 * number)
            server.kill()
            time.sleep(0.1)
            server.start()
        time.sleep(1.0)
        process.kill()
        assert process.stdout is not None
        facts.hear(whole_lines(said + process.stdout.read()))
    check(facts, Backend.REDIS, tmp_path)
    assert len(facts.settled) > ROUNDS
