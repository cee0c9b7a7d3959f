"""`python -m tests.bench.crew rolls|gap|queue [--times N] [--workers N]`: a relay whose workers, or
whose supervisor, come and go under load, or whose long queue is asked and changed. Exit code 1 when mail was
lost, or what must not happen did.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import uvloop

from tests.bench.crew.gap import gaps
from tests.bench.crew.queue import queues
from tests.bench.crew.rolls import rolls


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.crew", description=__doc__)
    parser.add_argument("what", choices=("rolls", "gap", "queue"))
    parser.add_argument(
        "--times", type=int, default=0, help="default: 50 replacements of all, 5 kills, 10,000 deliveries"
    )
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crew-") as directory:
        place, times, workers = Path(directory), arguments.times, arguments.workers
        match arguments.what:
            case "rolls":
                good = uvloop.run(rolls(place, times or 50, workers=workers))
            case "gap":
                good = uvloop.run(gaps(place, times or 5, workers=workers))
            case _:
                good = uvloop.run(queues(place, times or 10_000, workers=workers))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
