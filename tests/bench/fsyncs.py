"""Counting a relay's calls of fsync and fdatasync with strace, in a run of its own.

strace filters in the kernel (--seccomp-bpf), so that only the counted calls stop the relay and its
commits keep the size that they have without it. Debian's strace is fetched like Postfix when the
machine has none.
"""

import shutil
import subprocess
from pathlib import Path

from tests.support.debian import DebianError, Say, UnpackedPackage

CALLS = ("fsync", "fdatasync")


class FsyncTrace:
    """Puts a relay under strace from its start; `count` tells how many calls there have been so far."""

    def __init__(self, strace: Path, output: Path) -> None:
        self._strace = strace
        self._output = output

    def launcher(self) -> list[str]:
        # -D: the relay stays our child, so that signals and exit codes reach the right process.
        trace = ["-D", "-f", "--seccomp-bpf", "-e", f"trace={','.join(CALLS)}", "-e", "signal=none"]
        return [str(self._strace), *trace, "-o", str(self._output)]

    def count(self) -> int:
        return count_calls(self._output.read_text(errors="replace")) if self._output.exists() else 0


def count_calls(text: str) -> int:
    """Calls begun; the second half of an interrupted line (`<... fsync resumed>`) is not one."""
    return sum(1 for line in text.splitlines() if any(f" {call}(" in line for call in CALLS))


def find_strace(*, say: Say = lambda _: None) -> Path | None:
    """A strace that works here, or None: a container may forbid tracing."""
    installed = shutil.which("strace")
    try:
        strace = Path(installed) if installed else _unpacked(say)
    except DebianError as error:
        say(f"no strace, so no fsync counts: {error}")
        return None
    trial = [str(strace), "-D", "-f", "--seccomp-bpf", "-e", "trace=fsync", "-o", "/dev/null", "/bin/true"]
    if subprocess.run(trial, capture_output=True, timeout=20, check=False).returncode != 0:
        say("strace cannot trace here, so no fsync counts")
        return None
    return strace


def _unpacked(say: Say) -> Path:
    package = UnpackedPackage("strace", say=say)
    package.ensure(["usr/bin/strace"])
    return package.path("usr/bin/strace")
