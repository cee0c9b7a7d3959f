"""A relay with several workers as processes: how acceptance tests start, ask and change one."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.ports import LOOPBACK
from tests.support.process import PROGRAM, RelayProcess
from tests.support.toml import Table
from zonerelay.control.client import ControlClient
from zonerelay.operations.answers import RelayStatus
from zonerelay.operations.requests import Status

QUICK: Mapping[str, Table] = {"retry": {"schedule": ["1s"], "suspend_min": "1s", "suspend_max": "1s"}}


def relay_of(
    directory: Path,
    sink_port: int,
    *,
    workers: int = 2,
    worker_timeout: str = "1s",
    shutdown_timeout: str = "5s",
    tables: Mapping[str, Table] = QUICK,
    **more: Any,
) -> RelayProcess:
    return RelayProcess(
        directory,
        next_hop=f"{LOOPBACK}:{sink_port}",
        top={"workers": workers, "worker_timeout": worker_timeout, "shutdown_timeout": shutdown_timeout},
        tables=tables,
        **more,
    )


def run(relay: RelayProcess, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAM), *words, "--config", str(relay.config)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def client_of(relay: RelayProcess) -> ControlClient:
    return ControlClient(relay.directory / "control.sock")


def status(relay: RelayProcess) -> RelayStatus:
    return client_of(relay).ask(Status(), RelayStatus)


def pid_of(relay: RelayProcess, worker: int) -> int:
    """Raises ValueError while there is none: a signal to the process 0 goes to the test and all beside it."""
    (pid,) = [each.pid for each in status(relay).workers if each.worker == worker and each.pid]
    return pid


def processes(relay: RelayProcess) -> list[int]:
    """Of this relay, that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(relay.directory).encode() in words and b"zonerelay" in words:
                found.append(int(entry.name))
    return found


def edit(relay: RelayProcess, old: str, new: str) -> None:
    text = relay.config.read_text()
    assert text.count(old) == 1, (old, text)
    relay.config.write_text(text.replace(old, new))


def until_running(relay: RelayProcess, workers: int = 2) -> None:
    def all_run() -> bool:
        return [each.state for each in status(relay).workers] == ["running"] * workers

    relay.wait_for(all_run, what=f"{workers} running workers")
