"""`zonerelay` with a look at its event loop: `python watched.py serve …`.

The longest pauses, each with where the loop's thread was when the pause had lasted `LONG`, go to the file
that WATCHED names; it is written anew at each of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import uvloop

from zonerelay.cli.main import main

BEAT = 0.005
LONG = 0.05
KEPT = 10


class Watch:
    def __init__(self, loop: asyncio.AbstractEventLoop, output: Path) -> None:
        self._loop = loop
        self._output = output
        self._expected = 0.0
        self._thread = threading.get_ident()
        self._stack: list[str] = []
        self.beats = 0
        self.worst: list[tuple[float, list[str]]] = []

    def start(self) -> None:
        self._loop.call_soon(self._begin)
        threading.Thread(target=self._look, daemon=True).start()

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        self._expected = time.monotonic() + BEAT
        self._loop.call_later(BEAT, self._beat)

    def _beat(self) -> None:
        now = time.monotonic()
        late, self._expected, self.beats = now - self._expected, now + BEAT, self.beats + 1
        if len(self.worst) < KEPT or late > self.worst[-1][0]:
            self.worst = sorted([*self.worst, (late, self._stack)], key=lambda each: -each[0])[:KEPT]
            self._output.write_text(json.dumps({"beats": self.beats, "worst": self.worst}))
        self._stack = []
        self._loop.call_later(BEAT, self._beat)

    def _look(self) -> None:
        while True:
            time.sleep(BEAT)
            if self._expected and time.monotonic() - self._expected > LONG and not self._stack:
                frame = sys._current_frames().get(self._thread)
                if frame is not None:
                    self._stack = traceback.format_stack(frame)[-6:]


def _new_event_loop() -> asyncio.AbstractEventLoop:
    loop = _uvloops()
    Watch(loop, Path(os.environ["WATCHED"])).start()
    return loop


_uvloops = uvloop.new_event_loop

if __name__ == "__main__":
    uvloop.new_event_loop = _new_event_loop  # type: ignore[assignment]  # `serve` asks for its loop here
    sys.exit(main())
