"""`python -m tests.bench.crew rolls|gap [--times N] [--workers N]`: a relay whose workers, or
whose supervisor, come and go under load. Exit code 1 when mail was lost, or what must not happen did.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import uvloop

from tests.bench.crew.gap import gaps
from tests.bench.crew.rolls import rolls


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.crew", description=__doc__)
    parser.add_argument("what", choices=("rolls", "gap"))
    parser.add_argument("--times", type=int, default=0, help="default: 50 replacements of all, 5 kills")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crew-") as directory:
        if arguments.what == "rolls":
            good = uvloop.run(rolls(Path(directory), arguments.times or 50, workers=arguments.workers))
        else:
            good = uvloop.run(gaps(Path(directory), arguments.times or 5, workers=arguments.workers))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
