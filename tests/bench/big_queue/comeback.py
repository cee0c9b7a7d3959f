"""How fast the mail of a next hop that was down leaves when it is back, and after kill -9.

    python -m tests.bench.big_queue.comeback [--messages 20000] [--program …/bin/zonerelay] [--directory DIR]

`fresh`: the same mail with the next hop up, from the first to the last final dot at the sink. `back`: it was
queued while nothing listened there; deliveries in each second from the first one on. `killed`: 1,000 messages
queued that way, kill -9, the next hop up, a start: seconds from the listener's greeting to the last that had
no attempt of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.bench.driver import Load
from tests.bench.sink import CounterFile
from tests.support.debian import REPOSITORY
from tests.support.ports import free_port, greets, wait_until
from tests.support.process import PROGRAM, RelayProcess
from tests.support.toml import Table

KILLED = 1000
RETRY: Table = {"suspend_min": "2s", "suspend_max": "2s", "schedule": ["1h"], "jitter": 0.0}


@contextlib.contextmanager
def sink(port: int, directory: Path) -> Iterator[CounterFile]:
    counters = directory / f"counters-{port}-{time.monotonic_ns()}"
    file = CounterFile(counters)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.sink", str(port), str(counters), "127.0.0.1"], cwd=REPOSITORY
    )
    try:
        yield file
    finally:
        process.kill()
        process.wait()
        file.close()


def send(port: int, messages: int) -> None:
    load = Load(port=port, sessions=20, messages=messages, size=4096, reuse=True, senders=200)
    command = [sys.executable, "-m", "tests.bench.driver", msgspec.json.encode(load).decode()]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)


def relay(directory: Path, name: str, port: int, program: Path) -> RelayProcess:
    limits: Table = {"max_connections_per_client": 100, "max_connections_per_network": 100}
    hop = f"127.0.0.1:{port}"
    return RelayProcess(
        directory / name, next_hop=hop, listener=limits, tables={"retry": RETRY}, program=program
    )


def drained(counters: CounterFile, wanted: int) -> tuple[list[int], float]:
    """Per second from the first on, and how long it took; gives up when nothing has come for five seconds."""
    arrived: list[tuple[float, int]] = []
    changed = time.monotonic()
    while counters.read().recipients < wanted and time.monotonic() - changed < 5 + 25 * (not arrived):
        count = counters.read().recipients
        if count != (arrived[-1][1] if arrived else 0):
            changed = time.monotonic()
            arrived.append((changed, count))
        time.sleep(0.02)
    arrived.append((time.monotonic(), counters.read().recipients))
    first, last = arrived[0][0], counters.read().last
    steps: list[int] = []
    before = 0
    for when, count in arrived:
        if count > before:
            steps += [0] * (int(when - first) + 1 - len(steps))
            steps[-1] += count - before
            before = count
    return steps, last - first


def tried(running: RelayProcess) -> int:
    """What had an attempt of its own, and waits an hour."""
    deferred = running.events("deferred")
    return len({each["id"] for each in deferred if "temporarily suspended" not in str(each["reply"])})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--program", type=Path, default=PROGRAM)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, port = Path(name), free_port()
        with sink(port, directory) as counters, relay(directory, "fresh", port, chosen.program) as running:
            began = time.monotonic()
            send(running.smtp_port, chosen.messages)
            wait_until(lambda: counters.read().recipients >= chosen.messages, timeout=60)
            rate = chosen.messages / (counters.read().last - began)
            print(f"fresh: {rate:,.0f} a second")
        with relay(directory, "back", port, chosen.program) as running:
            send(running.smtp_port, chosen.messages)
            with sink(port, directory) as counters:
                steps, took = drained(counters, chosen.messages - tried(running))
                print(f"back: {sum(steps)} in {took:.1f} s; {' '.join(map(str, steps))}")
        with relay(directory, "killed", port, chosen.program) as running:
            send(running.smtp_port, KILLED)
            time.sleep(3.0)
            running.kill()
            wanted = KILLED - tried(running)
            with sink(port, directory) as counters:
                wait_until(lambda: greets(port), timeout=20)
                start = threading.Thread(target=running.start)
                start.start()
                wait_until(lambda: greets(running.smtp_port), timeout=20)
                began = time.monotonic()
                drained(counters, wanted)
                start.join()
                print(f"killed: {counters.read().recipients} after {counters.read().last - began:.2f} s")


if __name__ == "__main__":
    main()
