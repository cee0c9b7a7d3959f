"""Keeps this relay connected to a Redis server and its lease alive.

There are two wires, one for records and one for large bodies, so that no session waits behind a long body,
and a channel for news of mail that other relays have left. When one of them breaks, all are replaced, with
growing pauses for as long as it takes. Meanwhile every call fails with StoreError and `unhealthy` says why.
What the server promises about durability is checked at each connection and with each renewal of the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from zonerelay.store.common.keeper import health
from zonerelay.store.common.keeper.health import Health
from zonerelay.store.common.queue_mark import STRANGE, QueueMark, StrangeStoreError, new_mark
from zonerelay.store.contract import NO_SPACE, StoreError, StoreFullError, StoreOpenError
from zonerelay.store.redis.connection import (
    UNREACHABLE,
    Argument,
    Channel,
    Confirmation,
    Reply,
    Server,
    Wire,
    load_scripts,
    open_channel,
    open_wire,
)
from zonerelay.store.redis.durability import OLDEST, ServerFacts, ask
from zonerelay.store.redis.lease import RedisLease
from zonerelay.store.surroundings import Surroundings

UNSAFE = "the spool's server may lose what it has acknowledged"
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two attempts to connect."""

_log = logging.getLogger("zonerelay.store")


@dataclass(frozen=True, slots=True)
class RedisTerms:
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


class RedisKeeper:
    """`open` first. `lease` is what makes claims ours."""

    def __init__(self, server: Server, terms: RedisTerms, around: Surroundings, mark: QueueMark) -> None:
        self.terms = terms
        self._mark = mark
        self._clock = around.clock
        self.lease = RedisLease(terms.prefix, terms.lease, around.clock)
        self.hooks: Hooks | None = None
        self._server = server
        self._health = Health(around.on_health)
        self._health.refusal = StoreError(UNREACHABLE)
        self.check_usable = self._health.check_usable
        self.check_writable = self._health.check_writable
        self.unhealthy = self._health.unhealthy
        self.problems = self._health.problems
        self.usable = self._health.usable
        self._records: Wire | None = None
        self._bodies: Wire | None = None
        self._channel: Channel | None = None
        self._broken = asyncio.Event()
        self._up = asyncio.Event()
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

    async def with_retry(self, ask: Callable[[], asyncio.Future[Reply]]) -> Reply:
        """Asks once more when a lost connection is there again within `timeout`. For reads only."""
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
        self._up.set()  # no reader waits for what does not come back
        self._health.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._health.refusal is None:
            with contextlib.suppress(StoreError):
                await self.lease.leave(self._usable(self._records))
        self._health.refusal = StoreError(health.CLOSED)
        await self._disconnect()

    # --- connecting

    async def _connect(self) -> None:
        """Raises StoreError."""
        self._broken.clear()
        self._records = await open_wire(self._server, self._on_broken)
        self._bodies = await open_wire(self._server, self._on_broken)
        facts = await ask(self._records)
        self._check(facts)
        await self._recognise(self._records)
        await load_scripts(self._records)
        self._records.confirm = self._bodies.confirm = self._confirmations(facts)
        self._channel = await open_channel(self._server, self.terms.prefix + b"news")
        await self._renew(self._records)
        self.lease.connected()
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

    async def _recognise(self, wire: Wire) -> None:
        """Raises StrangeStoreError, before anything is written."""
        key = self.terms.prefix + b"mark"
        stored = _text(await wire.call("GET", key))
        await self._mark.check(stored)
        if stored is None:
            await wire.call("SET", key, new_mark(self._clock), "NX")  # or it is another relay's
            stored = _text(await wire.call("GET", key))
        await self._mark.adopt(stored or "")

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

    def _on_broken(self, why: str, reason: str = UNREACHABLE) -> None:
        if self._health.refusal is None:
            _log.error("%s: %s", reason, why)
            self._health.refusal = StoreError(reason)
            self._up.clear()
            self._health.set("reach", reason)
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
                self._health.set("reach", _reason(error))
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
                if teller != self.lease.token and hooks is not None:
                    hooks.busy(zone)

    # --- the lease

    async def _beat(self) -> None:
        try:
            while True:
                await self.lease.next_beat()
                wire = self._usable(self._records)
                await self._recognise(wire)
                await self._renew(wire)
                await self.lease.reap(wire)
                if self.hooks is not None:
                    await self.hooks.beating()
                facts = await ask(self._usable(self._bodies))
                self._check(facts)
                self._note_memory(facts)
        except StoreError as error:
            self._on_broken(str(error), _reason(error))

    async def _renew(self, wire: Wire) -> None:
        """Raises StoreError."""
        renewal = await self.lease.renew(wire)
        if self.hooks is None:
            return
        if renewal.was_lost:
            self.hooks.lease_lost()
            return
        self.hooks.counted(renewal.counts)
        for zone in renewal.busy:
            assert isinstance(zone, bytes)
            self.hooks.busy(zone)

    # --- memory

    def _note_memory(self, facts: ServerFacts) -> None:
        free = facts.free_memory
        short = free is not None and free < self.terms.min_free_memory
        self._health.set("memory", NO_SPACE if short else None)

    def full(self) -> None:
        """The server has just said so; the next look says whether it still is."""
        self._health.set("memory", NO_SPACE)


def _reason(error: StoreError) -> str:
    if isinstance(error, StrangeStoreError):
        return STRANGE
    return UNSAFE if isinstance(error, StoreOpenError) else UNREACHABLE


def _text(reply: Reply) -> str | None:
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else None
