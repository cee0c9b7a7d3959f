"""`python -m tests.bench.idle`: what a relay costs that has nothing to do.

CPU, and how often each of its threads wakes up (its voluntary context switches), while nobody talks to it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support.ports import free_port
from tests.support.process import RelayProcess

SETTLING = 5.0
SWITCHES = "voluntary_ctxt_switches:"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.idle", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long it is looked at")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="zonerelay-idle-") as name,
        RelayProcess(Path(name), next_hop=f"127.0.0.1:{free_port()}") as relay,
    ):
        time.sleep(SETTLING)
        for _ in range(options.rounds):
            show(relay, options.seconds)
    return 0


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
