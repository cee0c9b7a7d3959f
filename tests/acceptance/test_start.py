"""What a relay loads when it starts: a library is time before the first greeting, and memory ever after."""

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.crew import run
from tests.support.ports import LOOPBACK, free_port, greets, wait_until
from tests.support.process import PROGRAM, RelayProcess

LATER = {
    "argon2",  # with the first password
    "difflib",  # with a mistake in the configuration
    "aiosmtpd",  # with a handler or an authenticator of its interface
    "aiohttp",  # with the first question for /metrics
    "jinja2",  # with the first page for operators
    "dns",  # with the first answer of a name server that is not plain
    "OpenSSL",  # where clients may have certificates, or DANE applies
    "cryptography",  # where mail is signed
    "rich",  # for people
    "sqlite3",  # with the first event for the history
    "asyncpg",
    "redis",
    "aiobotocore",
    "zonerelay.store.keys.partition",
    "zonerelay.outbox.store",
    "zonerelay.supervisor.run",
    "zonerelay.policies",
    "zonerelay.sendmail",
    "zonerelay.admin.operators",
    "zonerelay.store.queue.key_index",
    "zonerelay.webhook",
}
"""What a relay with one worker, a spool in LevelDB, HTTP and a next hop does without."""

IMPORTED = re.compile(r"^import time:.*\|\s*([\w.]+)$", re.MULTILINE)


def test_a_plain_relay_loads_what_it_needs_and_nothing_else(tmp_path: Path) -> None:
    http = f"{LOOPBACK}:{free_port()}"
    relay = RelayProcess(
        tmp_path,
        next_hop=f"{LOOPBACK}:{free_port()}",
        tables={"admin": {"address": http}},
        environment={"PYTHONPROFILEIMPORTTIME": "1"},
    )
    try:
        relay.start(statuses=(0,))  # no question over HTTP
        loaded = set(IMPORTED.findall(relay.log_text()))
        assert {"aiosmtplib", "zonerelay.worker.build", "zonerelay.store.queue.store"} <= loaded
        assert loaded & LATER == set()
        relay.admin_port = int(http.rpartition(":")[2])
        assert relay.http("/healthz") == (200, "ok\n")
        assert wait_until(lambda: "aiohttp" in IMPORTED.findall(relay.log_text()), timeout=5)
        assert relay.terminate() == 0
    finally:
        relay.kill()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_terminal_gets_text_with_clear_addresses(tmp_path: Path, workers: int) -> None:
    relay = RelayProcess(tmp_path, next_hop=f"{LOOPBACK}:{free_port()}", top={"workers": workers})
    terminal, end = pty.openpty()
    command = [str(PROGRAM), "serve", "--config", str(relay.config)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=end) as process:
        os.close(end)
        try:
            assert wait_until(lambda: greets(relay.smtp_port), timeout=20)
            relay.send("bob@example.com")
            text = ""
            while "info    accepted " not in text or not text.endswith("\n"):
                text += os.read(terminal, 65536).decode()
        finally:
            process.terminate()
    os.close(terminal)
    assert "sender=app@example.org" in text
    assert "{" not in text


def test_commands_find_a_relay_whose_file_is_gone(tmp_path: Path) -> None:
    with RelayProcess(tmp_path / "app", next_hop=f"{LOOPBACK}:{free_port()}") as relay:
        relay.config.unlink()
        done = run(relay, "status", "--json")
        assert (done.returncode, "was changed or removed; using its running relay at" in done.stderr) == (
            0,
            True,
        ), done
