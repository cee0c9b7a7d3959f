"""`python -m tests.bench.reload [ROUTES]`: how long the event loop pauses for a SIGHUP with many routes."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.big_queue.pause_report import Phase, show
from tests.support.debian import REPOSITORY
from tests.support.ports import free_port
from tests.support.process import RelayProcess
from tests.support.toml import Table

SETTLING = 2.0
RELOADS = 10
ZONES = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.reload", description=__doc__)
    parser.add_argument("routes", type=int, nargs="?", default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zonerelay-reload-") as name:
        pauses = Path(name) / "pauses"
        relay = RelayProcess(
            Path(name) / "relay",
            tables=tables(options.routes),
            launcher=[sys.executable, "-m", "tests.bench.big_queue.watched", str(pauses)],
            environment={"PYTHONPATH": str(REPOSITORY)},
        )
        with relay:
            time.sleep(SETTLING)
            began, cpu = time.monotonic(), relay.cpu_seconds()
            for number in range(RELOADS):
                reload(relay, number)
            said = f"{RELOADS} reloads"
            phases = [Phase("reload", began, time.monotonic(), relay.cpu_seconds() - cpu, said)]
            show(pauses, phases)
    return 0


def tables(routes: int) -> dict[str, Table | list[Table]]:
    names = ["default", *(f"zone{number}" for number in range(1, ZONES))]
    zones: list[Table] = [
        {"name": name, "next_hop": f"127.0.0.1:{free_port()}", "tls": "none"} for name in names
    ]
    found: list[Table] = [
        {
            "recipient_domain": [f"customer{number}.example", f"*.customer{number}.example"],
            "zone": names[number % ZONES],
        }
        for number in range(routes)
    ]
    return {"zone": zones, "route": found}


def reload(relay: RelayProcess, number: int) -> None:
    """With another setting of the zones each time; until it has been taken up."""
    text = relay.config.read_text()
    relay.config.write_text(text.replace("[[zone]]", f"[[zone]]\nmax_connections = {number + 2}", 1))
    done = len(relay.events("reloaded"))
    relay.signal(signal.SIGHUP)
    relay.wait_for(lambda: len(relay.events("reloaded")) > done, what="reloaded")
    relay.config.write_text(text)
    time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
