"""Holds the lease on this relay's claims in Redis, and frees the claims of dead relays.

A lease is renewed three times in its length. Any relay frees the claims of a lease that has ended, but only
after it has been connected for as long as a lease lasts: after an outage of the server every relay has had
the time to renew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import NamedTuple

from zonerelay.model.clock import Clock
from zonerelay.store.common import records
from zonerelay.store.contract import ClaimLostError, StoreOpenError
from zonerelay.store.redis.connection import Reply, Wire, as_list

FORMAT = 1
"""The version of what is stored: see `scripts`."""
OLDEST_FORMAT = 1
"""Relays of that version still work with what this one stores."""
REAP_LIMIT = 500
"""Claims that are given back in one go."""
LONGEST_LEASE = 10 * 60 * 1000
"""Milliseconds; [redis] lease may not be longer."""
BEATS = 3

_log = logging.getLogger("zonerelay.store")


class Renewal(NamedTuple):
    """`was_lost`: it is another lease than before. Otherwise `counts` and `busy` say how the queue stands."""

    was_lost: bool
    counts: list[Reply]
    busy: list[Reply]


class RedisLease:
    """`token` is the fencing token, `number` the relay's among those that share the server. Every method that
    takes a wire raises StoreError.
    """

    def __init__(self, prefix: bytes, length: float, clock: Clock) -> None:
        self.token = b""
        self.number = 0
        self._prefix = prefix
        self._length = length
        self._clock = clock
        self._beat_now = asyncio.Event()
        self._connected_at = 0.0
        self._valid_until = 0.0

    def check(self) -> None:
        """Raises ClaimLostError when others may have taken over what this relay has claimed."""
        if self._clock.boottime() >= self._valid_until:
            raise ClaimLostError("the lease on this relay's claims was not renewed in time")

    def lose(self) -> None:
        """Notes that the server has ended the lease, and takes another one at once."""
        self._valid_until = 0.0
        self._beat_now.set()

    def connected(self) -> None:
        """Notes the time from which other relays could renew their leases."""
        self._connected_at = self._clock.monotonic()

    async def next_beat(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._beat_now.wait(), self._length / BEATS)
        self._beat_now.clear()

    async def renew(self, wire: Wire) -> Renewal:
        asked_at = self._clock.boottime()
        length = int(self._length * 1000)
        if self.token:
            now = records.due_field(self._clock.now())
            reply = await wire.run("beat", self._prefix, self.token, length, now)
            if _status(reply) == b"OK":
                self._valid_until = asked_at + self._length
                return _renewal(reply)
            _log.warning("the lease on this relay's claims ended before it was renewed")
        before = self.token
        await self._enter(wire, length)
        self._valid_until = asked_at + self._length
        return Renewal(bool(before), [], [])

    async def _enter(self, wire: Wire, length: int) -> None:
        reply = await wire.run("enter", self._prefix, self.number, length, FORMAT, OLDEST_FORMAT)
        if _status(reply) != b"OK":
            raise self._shut_out(reply)
        token, number = as_list(reply)[1:]
        assert isinstance(token, bytes)
        assert isinstance(number, int)
        self.token, self.number = token, number

    def _shut_out(self, reply: Reply) -> StoreOpenError:
        key = self._prefix + b"format"
        if _status(reply) == b"FORMAT":
            return StoreOpenError(
                f"[redis] prefix: {key!r} says {as_list(reply)[1]!r}: that is not a queue that this version"
                f" understands, which knows {FORMAT}; a newer zonerelay may have been here: start that one"
            )
        if _status(reply) == b"OLDER":
            return StoreOpenError(
                "[redis] prefix: relays of an older version are running, and this version cannot work beside"
                " them: stop all of them first"
            )
        return StoreOpenError("256 relays share this server and prefix already: there can be no more")

    async def reap(self, wire: Wire) -> None:
        """Frees the claims of relays whose leases have ended."""
        if self._clock.monotonic() < self._connected_at + self._length:
            return
        while True:
            reply = await wire.run("reap", self._prefix, REAP_LIMIT, LONGEST_LEASE)
            assert isinstance(reply, list)
            if not reply[0]:
                return
            _log.warning("another relay's lease has ended: its claims are given back (%r)", reply[1])

    async def leave(self, wire: Wire) -> None:
        """Gives back this relay's claims, after everything that was submitted before."""
        while await wire.run("leave", self._prefix, self.token, self.number, REAP_LIMIT):
            pass


def _renewal(reply: Reply) -> Renewal:
    _, counts, busy = as_list(reply)
    return Renewal(False, as_list(counts), as_list(busy))


def _status(reply: Reply) -> Reply:
    return reply[0] if isinstance(reply, list) else reply
