"""Keeps this relay connected to a Redis server and its lease alive.

Two wires: one for records, one for large bodies, so that no session waits behind a long body; and a channel
that hears of mail which others have left. When any of them breaks, all are replaced, with growing pauses for
as long as it takes; meanwhile everything is refused with StoreError and `unhealthy` says why. What the server
promises about durability is checked at each connection and with each renewal.

The lease is renewed three times in its length. Leases of others that have ended are given up by whoever looks
first, but only by a relay that has been connected for as long as a lease lasts: after an outage of the server
everybody must have had the time to renew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from zonerelay.store import health, records
from zonerelay.store.base import StoreError, StoreFullError, StoreOpenError
from zonerelay.store.health import Health
from zonerelay.store.redis_promises import OLDEST, ServerFacts, ask
from zonerelay.store.redis_wire import (
    UNREACHABLE,
    Argument,
    Channel,
    Confirmation,
    Reply,
    Server,
    Wire,
    as_list,
    load_scripts,
    open_channel,
    open_wire,
)
from zonerelay.store.surroundings import Surroundings

UNSAFE = "the spool's server may lose what it has acknowledged"
FORMAT = 1
"""The version of what is stored: see `redis_scripts`."""
OLDEST_FORMAT = 1
"""Relays of that version still work with what this one stores."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two attempts to connect."""
REAP_LIMIT = 500
"""Claims that are given back in one go."""

_log = logging.getLogger("zonerelay.store")


@dataclass(frozen=True, slots=True)
class Terms:
    """How the server is used."""

    prefix: bytes
    lease: float
    replicas: int
    accept_loss: bool
    min_free_memory: int


@dataclass(slots=True)
class Hooks:
    """What the store wants to hear. All are called on the event loop."""

    connected: Callable[[], Coroutine[None, None, None]]
    counted: Callable[[list[Reply]], None]
    busy: Callable[[bytes], None]
    lease_lost: Callable[[], None]
    beating: Callable[[], Coroutine[None, None, None]]


class RedisLink:
    """`open` first. `token` is the fencing token, `number` the relay's among those that share the server."""

    def __init__(self, server: Server, terms: Terms, around: Surroundings) -> None:
        self.terms = terms
        self.token = b""
        self.number = 0
        self.hooks: Hooks | None = None
        self._server = server
        self._clock = around.clock
        self._health = Health(around.on_health)
        self._health.refusal = StoreError(UNREACHABLE)
        self.check_usable = self._health.check_usable
        self.check_writable = self._health.check_writable
        self.unhealthy = self._health.unhealthy
        self._records: Wire | None = None
        self._bodies: Wire | None = None
        self._channel: Channel | None = None
        self._broken = asyncio.Event()
        self._up = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._connected_at = 0.0
        self._valid_until = 0.0
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    # --- use

    def run(self, script: str, *arguments: Argument) -> asyncio.Future[Reply]:
        """On the wire for records."""
        return self._usable(self._records).run(script, self.terms.prefix, *arguments)

    def call(self, *command: Argument) -> asyncio.Future[Reply]:
        return self._usable(self._records).call(*command)

    def run_body(self, script: str, *arguments: Argument) -> asyncio.Future[Reply]:
        """On the wire for bodies."""
        return self._usable(self._bodies).run(script, self.terms.prefix, *arguments)

    def call_body(self, *command: Argument) -> asyncio.Future[Reply]:
        return self._usable(self._bodies).call(*command)

    def _usable(self, wire: Wire | None) -> Wire:
        self.check_usable()
        if wire is None:
            raise StoreError(UNREACHABLE)
        return wire

    def check_open(self) -> None:
        """Raises StoreError when the store is closed; being out of reach is nothing to it."""
        if self._closing:
            raise StoreError(health.CLOSED)

    def check_lease(self) -> None:
        """Raises StoreError when others may have taken over what this relay has claimed."""
        if self._clock.monotonic() >= self._valid_until:
            raise StoreError("the lease on this relay's claims was not renewed in time")

    def lose_lease(self) -> None:
        """The server says that it has ended: get another one now."""
        self._valid_until = 0.0
        self._beat_now.set()

    async def patiently(self, ask: Callable[[], asyncio.Future[Reply]]) -> Reply:
        """What reads may do: ask once more when a lost connection is there again within `timeout`."""
        try:
            return await ask()
        except StoreFullError:
            raise
        except StoreError:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._up.wait(), self._server.timeout)
            return await ask()

    # --- life

    async def open(self) -> None:
        """Raises StoreOpenError."""
        try:
            await self._connect()
        except StoreOpenError:
            await self._disconnect()
            raise
        except StoreError as error:
            await self._disconnect()
            raise StoreOpenError(f"[redis] url {self._server.url}: {error}") from error

    def start(self) -> None:
        """From here on `hooks` are called."""
        self._task = asyncio.get_running_loop().create_task(self._stay_connected())

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._up.set()  # nobody is to wait for what does not come back
        self._health.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._health.refusal is None:
            with contextlib.suppress(StoreError):
                await self._leave()
        self._health.refusal = StoreError(health.CLOSED)
        await self._disconnect()

    async def _leave(self) -> None:
        # What was submitted before is answered before.
        while await self.run("leave", self.token, self.number, REAP_LIMIT):
            pass

    # --- connecting

    async def _connect(self) -> None:
        """Raises StoreError."""
        self._broken.clear()
        self._records = await open_wire(self._server, self._on_broken)
        self._bodies = await open_wire(self._server, self._on_broken)
        facts = await ask(self._records)
        self._check(facts)
        await load_scripts(self._records)
        self._records.confirm = self._bodies.confirm = self._confirmations(facts)
        self._channel = await open_channel(self._server, self.terms.prefix + b"news")
        await self._renew(self._records)
        self._connected_at = self._clock.monotonic()
        self._health.refusal = None
        self._up.set()
        self._note_memory(facts)

    def _check(self, facts: ServerFacts) -> None:
        if facts.version < OLDEST:
            found = ".".join(map(str, facts.version))
            raise StoreOpenError(f"[redis] url: {facts.name} {found} is too old: 7.0 or newer is needed")
        if not facts.is_primary:
            raise StoreError("the server is a replica and cannot be written")
        if facts.flaws and not self.terms.accept_loss:
            _log.error("%s: %s", UNSAFE, "; ".join(facts.flaws))
            raise StoreOpenError(f"[redis] url: {UNSAFE}: {'; '.join(facts.flaws)}")

    def _confirmations(self, facts: ServerFacts) -> tuple[Confirmation, ...]:
        patience = int(self._server.timeout * 500)
        asked = []
        if facts.can_wait_for_log:
            asked.append(Confirmation(("WAITAOF", 1, 0, patience), (1, 0)))
        if self.terms.replicas:
            asked.append(Confirmation(("WAIT", self.terms.replicas, patience), (self.terms.replicas,)))
        return tuple(asked)

    async def _disconnect(self) -> None:
        # Each is kept until it is closed: cancelled in the middle of it, the next call finds what is left.
        if self._records is not None:
            await self._records.close()
            self._records = None
        if self._bodies is not None:
            await self._bodies.close()
            self._bodies = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def _on_broken(self, reason: str) -> None:
        if self._health.refusal is None:
            _log.error("%s: %s", UNREACHABLE, reason)
            self._health.refusal = StoreError(UNREACHABLE)
            self._up.clear()
            self._health.set("reach", UNREACHABLE)
        self._broken.set()

    # --- staying connected

    async def _stay_connected(self) -> None:
        while True:
            await self._work()
            await self._disconnect()
            await self._reconnect()

    async def _reconnect(self) -> None:
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause)
            try:
                await self._connect()
                break
            except StoreError as error:
                unsafe = isinstance(error, StoreOpenError)
                self._health.set("reach", UNSAFE if unsafe else UNREACHABLE)
                _log.warning("the spool's server cannot be used yet: %s", error)
                await self._disconnect()
                pause = min(pause * 2, LONGEST_PAUSE)
        self._health.set("reach", None)

    async def _work(self) -> None:
        """While connected."""
        tasks = [asyncio.create_task(work) for work in (self._listen(), self._beat(), self._broken.wait())]
        try:
            if self.hooks is not None:
                await self.hooks.connected()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except StoreError as error:
            self._on_broken(str(error))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._on_broken("the connection for news ended")

    async def _listen(self) -> None:
        channel, hooks = self._channel, self.hooks
        assert channel is not None
        with contextlib.suppress(StoreError):
            while True:
                teller, _, zone = (await channel.next()).partition(b" ")
                if teller != self.token and hooks is not None:
                    hooks.busy(zone)

    # --- the lease

    async def _beat(self) -> None:
        with contextlib.suppress(StoreError):
            while True:
                await self._next_beat()
                wire = self._usable(self._records)
                await self._renew(wire)
                await self._reap(wire)
                if self.hooks is not None:
                    await self.hooks.beating()
                facts = await ask(self._usable(self._bodies))
                try:
                    self._check(facts)
                except StoreOpenError as error:
                    self._on_broken(str(error))
                self._note_memory(facts)

    async def _next_beat(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._beat_now.wait(), self.terms.lease / 3)
        self._beat_now.clear()

    async def _renew(self, wire: Wire) -> None:
        """Raises StoreError."""
        asked_at = self._clock.monotonic()
        lease = int(self.terms.lease * 1000)
        if self.token:
            now = records.due_field(self._clock.now())
            reply = await wire.run("beat", self.terms.prefix, self.token, lease, now)
            if _status(reply) == b"OK":
                self._valid_until = asked_at + self.terms.lease
                self._tell(reply)
                return
            _log.warning("the lease on this relay's claims ended before it was renewed")
        await self._enter(wire, lease)
        self._valid_until = asked_at + self.terms.lease

    async def _enter(self, wire: Wire, lease: int) -> None:
        reply = await wire.run("enter", self.terms.prefix, self.number, lease, FORMAT, OLDEST_FORMAT)
        if _status(reply) != b"OK":
            raise self._shut_out(reply)
        token, number = as_list(reply)[1:]
        assert isinstance(token, bytes)
        assert isinstance(number, int)
        before, self.token, self.number = self.token, token, number
        if before and self.hooks is not None:
            self.hooks.lease_lost()

    def _shut_out(self, reply: Reply) -> StoreOpenError:
        key = self.terms.prefix + b"format"
        if _status(reply) == b"FORMAT":
            return StoreOpenError(
                f"[redis] prefix: {key!r} says {as_list(reply)[1]!r}: that is not a queue that this version"
                f" understands, which knows {FORMAT}; a newer zonerelay may have been here"
            )
        if _status(reply) == b"OLDER":
            return StoreOpenError(
                "[redis] prefix: relays of an older version are running, and this version cannot work beside"
                " them: stop all of them first"
            )
        return StoreOpenError("256 relays share this server and prefix already: there can be no more")

    def _tell(self, reply: Reply) -> None:
        assert isinstance(reply, list)
        _, counts, busy = reply
        assert isinstance(counts, list)
        assert isinstance(busy, list)
        if self.hooks is not None:
            self.hooks.counted(counts)
            for zone in busy:
                assert isinstance(zone, bytes)
                self.hooks.busy(zone)

    async def _reap(self, wire: Wire) -> None:
        if self._clock.monotonic() < self._connected_at + self.terms.lease:
            return
        while True:
            reply = await wire.run("reap", self.terms.prefix, REAP_LIMIT)
            assert isinstance(reply, list)
            if not reply[0]:
                return
            _log.warning("another relay's lease has ended: its claims are given back (%r)", reply[1])

    # --- memory

    def _note_memory(self, facts: ServerFacts) -> None:
        free = facts.free_memory
        short = free is not None and free < self.terms.min_free_memory
        self._health.set("memory", health.NO_SPACE if short else None)

    def full(self) -> None:
        """The server has just said so; the next look says whether it still is."""
        self._health.set("memory", health.NO_SPACE)


def _status(reply: Reply) -> Reply:
    return reply[0] if isinstance(reply, list) else reply
