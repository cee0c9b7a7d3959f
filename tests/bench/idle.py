"""`python -m tests.bench.idle`: what a relay costs that has nothing to do.

The time from its start to its first greeting and the CPU until then, its memory, its CPU, and how often each
of its threads wakes up (its voluntary context switches), while no client talks to it and no monitoring asks.
`--seconds 0` is for start and memory alone.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.meters import read_memory
from tests.support.ports import free_port
from tests.support.process import RelayProcess

SETTLING = 10.0
MIB = 1024 * 1024
SWITCHES = "voluntary_ctxt_switches:"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.idle", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long it is looked at")
    parser.add_argument("--rounds", type=int, default=1, help="each with a new relay")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zonerelay-idle-") as name:
        for number in range(options.rounds):
            tables = {"admin": {"address": f"127.0.0.1:{free_port()}"}}
            relay = RelayProcess(Path(name) / str(number), next_hop=f"127.0.0.1:{free_port()}", tables=tables)
            began = time.perf_counter()
            with started(relay):
                took, used = time.perf_counter() - began, cpu_seconds(relay.pid)
                time.sleep(SETTLING)
                memory = read_memory([relay.pid])
                print(
                    f"greets after {took:.2f} s ({used:.2f} s of CPU); "
                    f"memory {memory.rss / MIB:.1f} MiB (RSS), {memory.pss / MIB:.1f} MiB (PSS)"
                )
                if options.seconds:
                    show(relay, options.seconds)
    return 0


@contextlib.contextmanager
def started(relay: RelayProcess) -> Iterator[None]:
    """Without a question to its HTTP port, for which it would load aiohttp."""
    try:
        relay.start(statuses=(0,))
        yield
    finally:
        relay.kill()


def show(relay: RelayProcess, seconds: float) -> None:
    cpu, before = cpu_seconds(relay.pid), wake_ups(relay.pid)
    time.sleep(seconds)
    used, after = cpu_seconds(relay.pid) - cpu, wake_ups(relay.pid)
    each = ", ".join(f"{name} {count / seconds:.1f}" for name, count in (after - before).most_common())
    print(f"{used / seconds * 1e3:.2f} ms of CPU a second; wake-ups a second by thread: {each}")


def cpu_seconds(pid: int) -> float:
    """Of all threads, to the nanosecond: the ticks of `stat` are too coarse for next to nothing."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def wake_ups(pid: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        count = next(line for line in lines if line.startswith(SWITCHES)).removeprefix(SWITCHES)
        found[f"{(task / 'comm').read_text().strip()} {task.name}"] += int(count)
    return found


if __name__ == "__main__":
    sys.exit(main())
