"""A relay whose event loop is watched: `python -m tests.bench.big_queue.watched FILE zonerelay serve …`."""

import asyncio
import sys
from pathlib import Path

import uvloop

from tests.bench.big_queue import census
from tests.bench.big_queue.loop_watch import LoopWatch
from zonerelay.cli.main import main


def watch(path: Path) -> None:
    """Every loop that uvloop makes from now on (a relay makes one)."""
    make = uvloop.new_event_loop

    def watched() -> asyncio.AbstractEventLoop:
        loop = make()
        loop.call_soon(LoopWatch(path).start)
        loop.add_signal_handler(census.SIGNAL, census.append, path.with_suffix(".census"))
        return loop

    uvloop.new_event_loop = watched  # type: ignore[assignment]  # it promises uvloop's own class


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
    sys.argv[:] = sys.argv[2:]
    sys.exit(main())
