"""Refusals in the log: the first ones of each client have a line each, later ones are counted.

A client can have thousands of commands refused in a second, and the log must not fill the disk. In each
interval of `INTERVAL` seconds `IN_FULL` refusals of a client are logged, and `ALL_IN_FULL` of all clients
without permission to relay together. At the end of the interval one line per client (`refused-more`) gives
the number of the others. The metrics count every refusal.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

Tell = Callable[[str, Counter[str]], None]
"""Takes a client, or `others`, and the number of its refusals by reason."""
OTHERS = "others"

INTERVAL = 60.0
IN_FULL = 20
ALL_IN_FULL = 500

MAX_CLIENTS = 1000
"""Clients that are counted by themselves."""
TOLD = 50
"""Of those, the worst have a line each, and the others one line together."""


class _Client:
    __slots__ = ("more", "shown")

    def __init__(self) -> None:
        self.shown = 0
        self.more: Counter[str] = Counter()


class RefusalLog:
    """One per worker. Its intervals begin with a refusal; where no event loop runs, `tell` ends them."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._clients: dict[str, _Client] = {}
        self._others: Counter[str] = Counter()
        self._shown = 0
        self._timer: asyncio.TimerHandle | None = None

    def shows(self, client: str, reason: str, *, known: bool = False) -> bool:
        """Whether this refusal has a line of its own; if not, it is counted. `known`: no stranger."""
        found = self._clients.get(client)
        if found is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._others[reason] += 1
                return False
            if not self._clients:
                self._begin()
            found = self._clients[client] = _Client()
        if found.shown < IN_FULL and (known or self._shown < ALL_IN_FULL):
            found.shown += 1
            self._shown += not known
            return True
        found.more[reason] += 1
        return False

    def tell(self) -> None:
        """The interval is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        counted = [(client, found.more) for client, found in self._clients.items() if found.more]
        others, self._others = self._others, Counter()
        self._clients.clear()
        self._shown = 0
        counted.sort(key=lambda each: -each[1].total())
        for client, more in counted[:TOLD]:
            self._tell(client, more)
        for _, more in counted[TOLD:]:
            others += more
        if others:
            self._tell(OTHERS, others)

    def _begin(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._timer = loop.call_later(INTERVAL, self.tell)
