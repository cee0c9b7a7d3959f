"""How many connections a listener holds: in total, and from one client address.

Counts live here and nowhere else; `enter` and `leave` come in pairs. Clients on a Unix socket share
one entry in the total only: they are the operator's own processes.
"""

from __future__ import annotations

from zonerelay.inbound.access import Reason


class ConnectionLimits:
    def __init__(self, *, total: int, per_client: int) -> None:
        self._total = total
        self._per_client = per_client
        self._clients: dict[str, int] = {}
        self.count = 0

    def change(self, *, total: int, per_client: int) -> None:
        """Other limits from now on; connections that are open stay."""
        self._total = total
        self._per_client = per_client

    def enter(self, address: str) -> Reason | None:
        """Count the connection, unless a limit says no: then the reason, and nothing is counted."""
        if self.count >= self._total:
            return Reason.CONNECTIONS
        if address:
            of_client = self._clients.get(address, 0)
            if of_client >= self._per_client:
                return Reason.CLIENT_CONNECTIONS
            self._clients[address] = of_client + 1
        self.count += 1
        return None

    def leave(self, address: str) -> None:
        self.count -= 1
        if not address:
            return
        left = self._clients[address] - 1
        if left:
            self._clients[address] = left
        else:
            del self._clients[address]
