"""`zonerelay sandbox` on a terminal of 80×24, and the commands that find it without a configuration."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import smtplib
import struct
import subprocess
import termios
import threading
from pathlib import Path

from tests.support.ports import LOOPBACK, wait_until
from tests.support.process import PROGRAM


def test_sandbox(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TERM": "xterm"}
    environment.pop("ZONERELAY_CONFIG", None)
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [str(PROGRAM), "sandbox"], cwd=tmp_path, env=environment, stdout=terminal, stderr=terminal
    )
    shown = bytearray()
    reader = threading.Thread(target=_read, args=(screen, shown), daemon=True)
    reader.start()
    try:
        assert wait_until(lambda: b"greylisted" in shown, timeout=60), shown.decode()
        found = re.search(rb"swaks --server [\d.]+:(\d+)", shown)
        assert found
        with smtplib.SMTP(LOOPBACK, int(found[1]), timeout=20) as client:
            for number in range(12):
                client.sendmail("you@example.org", [f"n{number}@example.com"], b"Subject: x\r\n\r\nx\r\n")
        assert wait_until(lambda: b"n11@example.com" in shown, timeout=20)
        # What is written last is at the bottom, whatever has flowed by above it.
        assert wait_until(lambda: shown.rfind(b"swaks") > shown.rfind(b"n11@"), timeout=20)
        bottom = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown[shown.rfind(b"swaks") :]).decode()
        assert bottom.count("\n") < 5
        assert all(len(line) <= 80 for line in bottom.splitlines())
        assert f"relay {LOOPBACK}:{found[1].decode()}" in bottom
        # The history is written a second behind the mail, on a busy machine more.
        assert wait_until(
            lambda: not _run(["log", "find", "n11@example.com"], environment).returncode, timeout=20
        )
        for words in (["status"], ["queue", "list"], ["log", "find", "n11@example.com"], ["report"]):
            done = _run(words, environment)
            assert done.returncode == 0, done
            assert "using the sandbox" in done.stderr
        # A relay that was named is never another one.
        assert _run(["status", "--config", str(tmp_path / "absent.toml")], environment).returncode == 2
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        os.close(terminal)
    reader.join(20)
    assert process.returncode == 0


def _run(words: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PROGRAM), *words],
        cwd=environment["TMPDIR"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _read(screen: int, shown: bytearray) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(screen, 65536):
            shown += piece
