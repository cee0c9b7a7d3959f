"""A sink that tells the crowd's mail from other mail, and when each probe arrived.

Run as `python -m tests.bench.big_queue.sink PORT COUNTERS PROBES`. COUNTERS is a shared file: recipients of
the crowd, and of other mail. To PROBES a line is added for each recipient `probeN@…`: N, and the reading of
the monotonic clock at its final dot.
"""

import asyncio
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import uvloop

from tests.bench.sink import BACKLOG, CounterFile, SinkProtocol

_CROWD = b".EXAMPLE>"
_PROBE = b"RCPT TO:<PROBE"

Arrived = Callable[[list[bytes], float], None]


class Seen(NamedTuple):
    sessions: int = 0
    crowd: int = 0
    other: int = 0
    last: float = 0.0


class CrowdProtocol(SinkProtocol):
    def __init__(self, arrived: Arrived, connected: Callable[[], None]) -> None:
        super().__init__(self._message, connected)
        self._told = arrived
        self._lines: list[bytes] = []

    def _command(self, line: bytes) -> bytes:
        if line[:5].upper() == b"RCPT ":
            self._lines.append(line.upper())
        return super()._command(line)

    def _message(self, _recipients: int, now: float) -> None:
        self._told(self._lines, now)
        self._lines = []


async def serve(port: int, counters: CounterFile[Seen], probes: Path) -> None:
    seen = Seen()
    with probes.open("a", buffering=1) as log:

        def arrived(lines: list[bytes], now: float) -> None:
            nonlocal seen
            crowd = sum(line.rstrip().endswith(_CROWD) for line in lines)
            seen = Seen(seen.sessions, seen.crowd + crowd, seen.other + len(lines) - crowd)
            counters.write(seen)
            for line in lines:
                if line.startswith(_PROBE):
                    log.write(f"{line[len(_PROBE) :].partition(b'@')[0].decode()} {now}\n")

        def connected() -> None:
            nonlocal seen
            seen = seen._replace(sessions=seen.sessions + 1)
            counters.write(seen)

        server = await asyncio.get_running_loop().create_server(
            lambda: CrowdProtocol(arrived, connected), "0.0.0.0", port, backlog=BACKLOG
        )
        async with server:
            await server.serve_forever()


def main() -> None:
    gc.disable()
    port, counters, probes = sys.argv[1:]
    uvloop.run(serve(int(port), CounterFile(Path(counters), Seen), Path(probes)))


if __name__ == "__main__":
    main()
