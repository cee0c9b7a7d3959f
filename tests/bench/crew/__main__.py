"""`python -m tests.bench.crew rolls [--times N] [--workers N]`: a relay whose workers come and go under load.
Exit code 1 when mail was lost, or what must not happen did.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import uvloop

from tests.bench.crew.rolls import rolls


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.crew", description=__doc__)
    parser.add_argument("what", choices=("rolls",))
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crew-") as directory:
        good = uvloop.run(rolls(Path(directory), arguments.times, workers=arguments.workers))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
