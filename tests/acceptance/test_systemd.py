"""What the service manager hears: ready, reloading, watchdog, stopping, in that order."""

import signal
import socket
import time
from pathlib import Path

from tests.support.process import RelayProcess


class Manager:
    """The receiving end of sd_notify(3)."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(0.2)
        self.heard: list[str] = []

    def wait_for(self, start: str, timeout: float = 10.0) -> str:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                self.heard.append(self._socket.recv(4096).decode())
            except TimeoutError:
                continue
            if self.heard[-1].startswith(start):
                return self.heard[-1]
        raise AssertionError(f"no {start} in {self.heard}")

    def close(self) -> None:
        self._socket.close()


def test_the_service_manager_is_told(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    manager = Manager(path)
    environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "400000"}
    try:
        with RelayProcess(tmp_path / "relay", next_hop="127.0.0.1:1", environment=environment) as relay:
            ready = manager.wait_for("READY=1")
            assert f"STATUS=listening on 127.0.0.1:{relay.smtp_port}" in ready
            manager.wait_for("WATCHDOG=1")
            manager.wait_for("WATCHDOG=1", timeout=2)
            relay.signal(signal.SIGHUP)
            assert "MONOTONIC_USEC=" in manager.wait_for("RELOADING=1")
            manager.wait_for("READY=1")
            assert relay.terminate() == 0
            manager.wait_for("STOPPING=1")
    finally:
        manager.close()
