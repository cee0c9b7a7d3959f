"""A command of the relay in this process, and what it said."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.ports import wait_until
from tests.support.process import RelayProcess
from zonerelay.cli.main import main

PROGRAM = "import sys; from zonerelay.cli.main import main; sys.exit(main())"
"""The same in a process of its own: an argument of `python -c`."""


@dataclass
class Ran:
    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return what was said with --json."""
        return [json.loads(line) for line in self.out.splitlines()]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]


def ran(capture: pytest.CaptureFixture[str], *words: str) -> Ran:
    """Run it, and return what it alone has said."""
    capture.readouterr()
    try:
        status = main(list(words))
    except SystemExit as error:
        status = int(error.code or 0)
    out, err = capture.readouterr()
    return Ran(status, out, err)


def typed(lines: Sequence[str], *words: str) -> Ran:
    """Run it as a process on a terminal; each line is typed when something is asked."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, "-c", PROGRAM, *words],  # getpass asks the terminal itself
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "160", "TERM": "xterm", "PYTHONIOENCODING": "utf-8:strict"},
    )
    os.close(theirs)
    shown = b""
    for line in lines:
        while not shown.endswith((b": ", b"] ")):
            shown += os.read(ours, 4096)
        os.write(ours, f"{line}\n".encode(errors="surrogateescape"))
        shown += b"|"
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while piece := os.read(ours, 4096):
            shown += piece
    out, _ = process.communicate(timeout=20)
    os.close(ours)
    return Ran(process.returncode, out.decode(), shown.decode(errors="replace"))


@dataclass
class Shell:
    """Commands for a relay that runs as a process."""

    capture: pytest.CaptureFixture[str]

    def __call__(self, relay: RelayProcess, *words: str) -> Ran:
        return ran(self.capture, *words, "--config", str(relay.config))

    def found(
        self, relay: RelayProcess, *words: str, count: int = 1, timeout: float = 10.0
    ) -> list[dict[str, Any]]:
        """What the history has a moment later; at least so many."""
        said = Ran(0, "", "")

        def there() -> bool:
            nonlocal said
            said = self(relay, "log", "find", *words, "--json")
            return len(said.of("found")) >= count

        assert wait_until(there, timeout=timeout), (words, said)
        return said.of("found")
