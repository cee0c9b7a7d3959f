"""`python -m tests.bench.limits --minutes 10 [--json FILE]`: exit code 1 when a limit was exceeded."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop

from tests.bench.limits.run import run
from tests.bench.limits.table import lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.limits", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was seen")
    parser.add_argument("--directory", type=Path, help="for spool and log; default: a temporary one")
    parser.add_argument("--workers", type=int, default=1, help="of one relay")
    parser.add_argument("--nodes", type=int, default=1, help="relays that share a spool in Redis")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="limits-") as temporary:
        place = arguments.directory or Path(temporary)
        seconds = 60 * arguments.minutes
        seen = uvloop.run(run(place, seconds, workers=arguments.workers, nodes=arguments.nodes))
    print("\n".join(lines(seen)))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(seen)))
    return 0 if seen.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
