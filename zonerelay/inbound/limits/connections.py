"""Counts a listener's connections: in total, from one client, and from one network.

A client is an IPv4 address or an IPv6 /64 (the prefix of one household or machine); a network is an IPv4 /24
or an IPv6 /48 (the prefix of one customer). `enter` and `leave` come in pairs. The address `""` counts in the
total only: clients on a Unix socket are the operator's own processes, and a client behind a load balancer is
unknown until its header is read; then `move` counts it by its own address.
"""

from __future__ import annotations

from functools import lru_cache
from socket import AF_INET6, inet_pton

from zonerelay.inbound.refusal import Reason

Key = str | bytes


def client_key(address: str) -> Key:
    """Return the key of a client; `address` is spelled as AccessPolicy does."""
    return inet_pton(AF_INET6, address)[:8] if ":" in address else address


@lru_cache(maxsize=1024)
def client_and_network(address: str) -> tuple[Key, Key]:
    """Return both keys. Called twice per connection, so without ipaddress, which takes microseconds."""
    client = client_key(address)
    return client, client[:6] if isinstance(client, bytes) else address.rpartition(".")[0]


class ConnectionLimits:
    def __init__(self, *, total: int, per_client: int, per_network: int) -> None:
        self.change(total=total, per_client=per_client, per_network=per_network)
        self._clients: dict[Key, int] = {}
        self._networks: dict[Key, int] = {}
        self.count = 0

    def change(self, *, total: int, per_client: int, per_network: int) -> None:
        """Apply other limits from now on; open connections stay."""
        self._total = total
        self._per_client = per_client
        self._per_network = per_network

    def enter(self, address: str) -> Reason | None:
        """Count the connection; at a limit count nothing and return the reason."""
        if self.count >= self._total:
            return Reason.CONNECTIONS
        reason = self._add(address) if address else None
        if reason is None:
            self.count += 1
        return reason

    def leave(self, address: str) -> None:
        self.count -= 1
        if address:
            self._remove(address)

    def move(self, old: str, new: str) -> Reason | None:
        """The connection that was counted as `old` is `new`, and leaves as `new`.

        Unless a limit says no: then the reason, nothing has changed, and it leaves as `old`.
        """
        if old:
            # First, or a client that moves within its network would meet itself.
            self._remove(old)
        reason = self._add(new) if new else None
        if reason is not None and old:
            self._count(*client_and_network(old))
        return reason

    def _add(self, address: str) -> Reason | None:
        client, network = client_and_network(address)
        if self._clients.get(client, 0) >= self._per_client:
            return Reason.CLIENT_CONNECTIONS
        if self._networks.get(network, 0) >= self._per_network:
            return Reason.NETWORK_CONNECTIONS
        self._count(client, network)
        return None

    def _count(self, client: Key, network: Key) -> None:
        self._clients[client] = self._clients.get(client, 0) + 1
        self._networks[network] = self._networks.get(network, 0) + 1

    def _remove(self, address: str) -> None:
        client, network = client_and_network(address)
        _take_one(self._clients, client)
        _take_one(self._networks, network)


def _take_one(counts: dict[Key, int], key: Key) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]


# Counts the latest errors of clients that may not relay, and says how long the reply to the next one waits.
#
# This is Postfix's smtpd_error_sleep_time, carried over from one connection to the next: a client that
# guesses addresses gets a few replies a second, however many connections it opens. Each error ages by
# itself.

FREE = 10
"""Errors without a delay, as Postfix's smtpd_soft_error_limit."""

STEP = 0.25
MAX_DELAY = 5.0
"""Seconds: each further error waits a step longer."""

AGE = 6.0
"""Seconds after which one error is forgotten."""

MAX_CLIENTS = 10_000
"""Clients remembered; beyond it the client with the oldest last error is forgotten."""

_MOST = FREE + 2 * MAX_DELAY / STEP


class ErrorDelays:
    def __init__(self) -> None:
        self._clients: dict[Key, tuple[float, float]] = {}  # errors and when; the latest is last

    def __len__(self) -> int:
        return len(self._clients)

    def made(self, client: Key, now: float) -> float:
        """Count an error, and return how many seconds its reply waits."""
        count, at = self._clients.pop(client, (0.0, now))
        count = min(max(count - (now - at) / AGE, 0.0) + 1.0, _MOST)
        if len(self._clients) >= MAX_CLIENTS:
            del self._clients[next(iter(self._clients))]
        self._clients[client] = count, now
        return min(max(count - FREE, 0.0) * STEP, MAX_DELAY)
