"""How much CPU and memory a group of processes uses, read from the kernel.

CPU is exact when a control group can be made (v2 `cpu.stat`, or v1 `cpuacct.usage`; needs root):
every process started inside counts, dead ones too, to the nanosecond. Otherwise it is summed over
the live process tree plus what live parents have reaped, in ticks of 10 ms. Memory is PSS (shared
pages divided by their users, so a relay of many processes is not charged twice) and RSS.
A process that ends while it is being read counts as nothing; nothing here ever raises for that.
"""

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_TICK = os.sysconf("SC_CLK_TCK")
_SHELL = 'echo $$ > "$1"; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class Memory:
    """Octets, summed over the processes of a group."""

    pss: int = 0
    rss: int = 0
    processes: int = 0


class ProcessGroup(Protocol):
    """The processes of one relay, whoever started them."""

    how: str

    def launcher(self) -> list[str]:
        """What to put before a command line so that it, and all it starts, belong to the group."""
        ...

    def adopt(self, pid: int) -> None:
        """Tells the group about a process that was started with its launcher."""
        ...

    def cpu_seconds(self) -> float: ...

    def pids(self) -> list[int]: ...

    def close(self) -> None: ...


class ControlGroup:
    """A kernel control group of our own."""

    def __init__(self, mount: Path, *, version: int) -> None:
        self._path = mount / f"zonerelay-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._path.mkdir()
        self._version = version
        self.how = f"control group v{version}"

    def launcher(self) -> list[str]:
        return ["/bin/sh", "-c", _SHELL, "sh", str(self._path / "cgroup.procs")]

    def adopt(self, pid: int) -> None:
        """Nothing to do: the launcher moved it into the group before it began."""

    def cpu_seconds(self) -> float:
        if self._version == 1:
            return int((self._path / "cpuacct.usage").read_text()) / 1e9
        usage = dict(line.split() for line in (self._path / "cpu.stat").read_text().splitlines())
        return int(usage["usage_usec"]) / 1e6

    def pids(self) -> list[int]:
        return [int(pid) for pid in (self._path / "cgroup.procs").read_text().split()]

    def close(self) -> None:
        """The kernel refuses while a process is still in it; leaving an empty group behind is harmless."""
        for _ in range(50):
            try:
                self._path.rmdir()
            except OSError:
                time.sleep(0.02)
            else:
                return


class ProcessTree:
    """Without control groups: the adopted processes and whatever descends from them."""

    how = "process tree, in ticks of 10 ms"

    def __init__(self) -> None:
        self._roots: list[int] = []

    def adopt(self, pid: int) -> None:
        self._roots.append(pid)

    def launcher(self) -> list[str]:
        return []

    def cpu_seconds(self) -> float:
        return cpu_of(self.pids())

    def pids(self) -> list[int]:
        return sorted(set().union(*map(family, self._roots)))

    def close(self) -> None:
        self._roots.clear()


def open_group() -> ProcessGroup:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        version = 2 if kind == "cgroup2" else 1 if "cpuacct" in options.split(",") else 0
        if version:
            with contextlib.suppress(OSError):
                return ControlGroup(Path(mount), version=version)
    return ProcessTree()


def cpu_of(pids: Iterable[int]) -> float:
    """Seconds of CPU of the processes, and of those of their children that have ended."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            # The command's name may hold spaces and parentheses, so fields count from the last one.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICK


def family(pid: int) -> set[int]:
    """The process, if it is alive, and all below it."""
    found = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.add(pid)
            for child in (task / "children").read_text().split():
                found |= family(int(child))
    return found


def sizes(pid: int, file: str = "status") -> dict[str, int]:
    """What a file of /proc/PID says in kB, in octets."""
    lines = (line.split() for line in Path(f"/proc/{pid}/{file}").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}


def read_memory(pids: list[int]) -> Memory:
    pss = rss = count = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            one = sizes(pid, "smaps_rollup")
            pss, rss, count = pss + one["Pss"], rss + one["Rss"], count + 1
    return Memory(pss, rss, count)


class PeakMemory:
    """Samples a group from a thread of its own and keeps the greatest PSS, RSS and process count."""

    def __init__(self, group: ProcessGroup, *, interval: float = 0.05) -> None:
        self._group = group
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
        self.samples = 0
        self.peak = Memory()

    def _sample(self) -> None:
        while True:
            now = read_memory(self._group.pids())
            self.samples += 1
            self.peak = Memory(
                max(self.peak.pss, now.pss),
                max(self.peak.rss, now.rss),
                max(self.peak.processes, now.processes),
            )
            if self._stop.wait(self._interval):
                return

    @contextlib.contextmanager
    def running(self) -> "Iterator[PeakMemory]":
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()


def busy_share(*, seconds: float = 1.0) -> float:
    """How much of all cores is in use right now, 0 to 1, by whatever runs on the machine."""
    before, total_before = _busy()
    time.sleep(seconds)
    after, total_after = _busy()
    total = total_after - total_before
    return (after - before) / total if total else 0.0


def _busy() -> tuple[int, int]:
    """Busy and total ticks since boot; waiting for the disk counts as idle."""
    ticks = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def settle(cpu_seconds: Callable[[], float], *, quiet: float = 0.2, limit: float = 5.0) -> None:
    """Waits until a process group does next to nothing (under 1 % of a core), or the limit is up."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        before = cpu_seconds()
        time.sleep(quiet)
        if cpu_seconds() - before < 0.01 * quiet:
            return
