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
from collections.abc import Callable, Iterator
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
        return parse_cpu_stat((self._path / "cpu.stat").read_text())

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
        return sum(sum(stat.ticks) for stat in map(read_stat, self.pids()) if stat is not None) / _TICK

    def pids(self) -> list[int]:
        return sorted(descendants(self._roots, parents()))

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


def parse_cpu_stat(text: str) -> float:
    """Seconds from a v2 `cpu.stat`."""
    usage = dict(line.split() for line in text.splitlines())["usage_usec"]
    return int(usage) / 1e6


@dataclass(frozen=True, slots=True)
class Stat:
    parent: int
    ticks: tuple[int, int, int, int]  # user, system, and both of reaped children


def parse_stat(text: str) -> Stat:
    """/proc/PID/stat; the command name may hold spaces and parentheses, so fields count from the last one."""
    fields = text.rpartition(")")[2].split()
    return Stat(int(fields[1]), (int(fields[11]), int(fields[12]), int(fields[13]), int(fields[14])))


def read_stat(pid: int) -> Stat | None:
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (OSError, IndexError):
        return None


def parents() -> dict[int, int]:
    """Every live process and its parent."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := read_stat(int(entry.name))) is not None:
            found[int(entry.name)] = stat.parent
    return found


def descendants(roots: list[int], parent_of: dict[int, int]) -> set[int]:
    """The roots that are alive and all below them."""
    family = {pid for pid in roots if pid in parent_of}
    grew = True
    while grew:
        born = {pid for pid, parent in parent_of.items() if parent in family and pid not in family}
        family |= born
        grew = bool(born)
    return family


def parse_rollup(text: str) -> tuple[int, int]:
    """PSS and RSS in octets from /proc/PID/smaps_rollup."""
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in ("Rss", "Pss"):
            values[name] = int(rest.split()[0]) * 1024
    return values.get("Pss", 0), values.get("Rss", 0)


def read_memory(pids: list[int]) -> Memory:
    pss = rss = count = 0
    for pid in pids:
        try:
            one = parse_rollup(Path(f"/proc/{pid}/smaps_rollup").read_text())
        except OSError:
            continue
        pss, rss, count = pss + one[0], rss + one[1], count + 1
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
    before = parse_busy(Path("/proc/stat").read_text())
    time.sleep(seconds)
    after = parse_busy(Path("/proc/stat").read_text())
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total else 0.0


def parse_busy(text: str) -> tuple[int, int]:
    """Busy and total ticks since boot; waiting for the disk counts as idle."""
    ticks = [int(value) for value in text.splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)


def settle(cpu_seconds: Callable[[], float], *, quiet: float = 0.2, limit: float = 5.0) -> None:
    """Waits until a process group does next to nothing (under 1 % of a core), or the limit is up."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        before = cpu_seconds()
        time.sleep(quiet)
        if cpu_seconds() - before < 0.01 * quiet:
            return
