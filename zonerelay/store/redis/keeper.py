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

from zonerelay.config.settings import LOSS_WORDS
from zonerelay.process.tasks import cancel_all
from zonerelay.store.common.keeper.health import Health, recover
from zonerelay.store.common.queue_mark import QueueMark, StrangeStoreError
from zonerelay.store.contract import StoreError, StoreFullError, StoreOpenError, Unhealthy
from zonerelay.store.redis.connection import (
    RULE,
    Argument,
    Channel,
    Reply,
    Server,
    Wire,
    as_list,
    load_scripts,
    open_channel,
    open_wire,
)
from zonerelay.store.redis.durability import OLDEST, ServerFacts, ask, confirmations
from zonerelay.store.redis.lease import RedisLease
from zonerelay.store.surroundings import Surroundings

SHOWN_RIGHTS = 5
"""Missing rights that a message names."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two attempts to connect."""

_log = logging.getLogger("zonerelay.store")


class RightsError(StoreOpenError):
    """The relay's user may not do what the queue needs."""


@dataclass(slots=True)
class RedisHooks:
    """The calls by which the store hears of connections, counts, mail and the lease, on the event loop."""

    connected: Callable[[], Coroutine[None, None, None]]
    counted: Callable[[list[Reply]], None]
    busy: Callable[[bytes], None]
    lease_lost: Callable[[], None]
    beating: Callable[[], Coroutine[None, None, None]]


class RedisKeeper:
    """`hooks` are set before `connect`, and `connect` comes before `start`. The claims of this relay hang on
    `lease`. `min_free_memory` is in octets.
    """

    hooks: RedisHooks

    def __init__(
        self,
        server: Server,
        around: Surroundings,
        mark: QueueMark,
        *,
        min_free_memory: int,
    ) -> None:
        settings = self._settings = server.settings
        self.prefix = settings.prefix.encode()
        self.lease = RedisLease(self.prefix, settings.lease, around.clock)
        self._min_free_memory = min_free_memory
        self._mark = mark
        self._clock = around.clock
        self._server = server
        self.health = Health(around.on_health)
        self.health.refusal = StoreError(Unhealthy.SERVER_DOWN)
        self._records: Wire | None = None
        self._bodies: Wire | None = None
        self._channel: Channel | None = None
        self._broken = asyncio.Event()
        self._up = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    # --- use

    def run(self, script: str, *arguments: Argument) -> asyncio.Future[Reply]:
        """Runs a script on the wire for records."""
        return self._usable(self._records).run(script, self.prefix, *arguments)

    def call(self, *command: Argument) -> asyncio.Future[Reply]:
        return self._usable(self._records).call(*command)

    def run_body(self, script: str, *arguments: Argument) -> asyncio.Future[Reply]:
        """Runs a script on the wire for bodies."""
        return self._usable(self._bodies).run(script, self.prefix, *arguments)

    def call_body(self, *command: Argument) -> asyncio.Future[Reply]:
        return self._usable(self._bodies).call(*command)

    def _usable(self, wire: Wire | None) -> Wire:
        self.health.check_usable()
        if wire is None:
            raise StoreError(Unhealthy.SERVER_DOWN)
        return wire

    def check_open(self) -> None:
        """Raises StoreError when the store is closed, not when the server is out of reach."""
        if self._closing:
            raise StoreError(Unhealthy.CLOSED)

    async def with_retry(self, ask: Callable[[], asyncio.Future[Reply]]) -> Reply:
        """Asks once more when a lost connection is there again within `timeout`. For reads only."""
        try:
            return await ask()
        except StoreFullError:
            raise
        except StoreError:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._up.wait(), self._settings.timeout)
            return await ask()

    # --- life

    def start(self) -> None:
        """Stays connected from here on."""
        self._task = asyncio.get_running_loop().create_task(self._stay_connected())

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._up.set()  # no reader waits for what does not come back
        self.health.close()
        await cancel_all(self._task)
        if self.health.refusal is None:
            with contextlib.suppress(StoreError):
                await self.lease.leave(self._usable(self._records))
        self.health.refusal = StoreError(Unhealthy.CLOSED)
        await self._disconnect()

    # --- connecting

    async def connect(self) -> None:
        """Connects and takes a lease. Raises StoreError; `close` ends what is half open then."""
        self._broken.clear()
        self._records = await open_wire(self._server, self._on_broken)
        self._bodies = await open_wire(self._server, self._on_broken)
        facts = await ask(self._records)
        self._check(facts)
        await self._recognise(self._records)
        await load_scripts(self._records)
        await self._check_rights(self._records)
        self._records.confirm = self._bodies.confirm = confirmations(facts, self._settings)
        self._channel = await open_channel(self._server, self.prefix + b"news")
        await self._renew(self._records)
        self.lease.connected()
        self.health.refusal = None
        self._up.set()
        self._note_memory(facts)

    def _check(self, facts: ServerFacts) -> None:
        if facts.version < OLDEST:
            found = ".".join(map(str, facts.version))
            raise StoreOpenError(f"[redis] url: {facts.name} {found} is too old: 7.0 or newer is needed")
        if not facts.is_primary:
            raise StoreError("the server is a replica and cannot be written")
        if facts.flaws and self._settings.accept_loss != LOSS_WORDS:
            _log.error("%s: %s", Unhealthy.SERVER_UNSAFE, "; ".join(facts.flaws))
            raise StoreOpenError(f"[redis] url: {Unhealthy.SERVER_UNSAFE}: {'; '.join(facts.flaws)}")

    async def _check_rights(self, wire: Wire) -> None:
        """Raises RightsError, or StoreError with the server's own text. The rights for WAIT and WAITAOF show
        with the first write.
        """
        # Two scripts at once go between MULTI and EXEC. What limits use beside scripts comes after them.
        asked = (wire.run("rights", self.prefix), wire.run("rights", self.prefix))
        limits = (wire.call("EVAL", "return 1", 0), wire.call("EVAL_RO", "return 1", 0))
        found, *_ = await asyncio.gather(*asked, *limits)
        missing = [each.decode("utf-8", "replace") for each in as_list(found) if isinstance(each, bytes)]
        if missing:
            more = f"; and {len(missing) - SHOWN_RIGHTS} more" if len(missing) > SHOWN_RIGHTS else ""
            raise _rights_error("; ".join(missing[:SHOWN_RIGHTS]) + more)
        try:
            channel = await open_channel(self._server, self.prefix + b"limits")
        except StoreError as error:
            raise _rights_error(f"SUBSCRIBE to limits: {error}") from error
        await channel.close()

    async def _recognise(self, wire: Wire) -> None:
        """Raises StrangeStoreError, before anything is written."""
        key = self.prefix + b"mark"

        async def read() -> str | None:
            return _text(await wire.call("GET", key))

        await self._mark.recognise(read, lambda mark: wire.call("SET", key, mark, "NX"), self._clock)

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

    def _on_broken(self, why: str, reason: Unhealthy = Unhealthy.SERVER_DOWN) -> None:
        if self.health.refusal is None:
            _log.error("%s: %s", reason, why)
            self.health.refusal = StoreError(reason)
            self._up.clear()
            self.health.set("reach", reason)
        self._broken.set()

    # --- staying connected

    async def _stay_connected(self) -> None:
        while True:
            await self._work()
            await self._disconnect()
            await recover(self._reconnect, self._not_yet, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
            self.health.set("reach", None)

    async def _reconnect(self) -> None:
        try:
            await self.connect()
        except StoreError:
            await self._disconnect()
            raise

    def _not_yet(self, error: StoreError) -> None:
        self.health.set("reach", _reason(error))
        _log.warning("the spool's server cannot be used yet: %s", error)

    async def _work(self) -> None:
        """Listens and beats until the connection breaks."""
        tasks = [asyncio.create_task(work) for work in (self._listen(), self._beat(), self._broken.wait())]
        try:
            await self.hooks.connected()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except StoreError as error:
            self._on_broken(str(error))
        finally:
            await cancel_all(*tasks)
        self._on_broken("the connection for news ended")

    async def _listen(self) -> None:
        channel = self._channel
        assert channel is not None
        with contextlib.suppress(StoreError):
            while True:
                teller, _, zone = (await channel.next()).partition(b" ")
                if teller != self.lease.token:
                    self.hooks.busy(zone)

    # --- the lease

    async def _beat(self) -> None:
        try:
            while True:
                await self.lease.next_beat()
                wire = self._usable(self._records)
                await self._recognise(wire)
                await self._renew(wire)
                await self.lease.reap(wire)
                await self.hooks.beating()
                facts = await ask(self._usable(self._bodies))
                self._check(facts)
                self._note_memory(facts)
        except StoreError as error:
            self._on_broken(str(error), _reason(error))

    async def _renew(self, wire: Wire) -> None:
        """Raises StoreError."""
        renewal = await self.lease.renew(wire)
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
        short = free is not None and free < self._min_free_memory
        self.health.set("memory", Unhealthy.NO_SPACE if short else None)

    def full(self) -> None:
        """Notes that the server has no memory left; the next beat says whether that is still so."""
        self.health.set("memory", Unhealthy.NO_SPACE)


def _rights_error(what: str) -> RightsError:
    return RightsError(f"[redis] user: {Unhealthy.SERVER_DENIES}: {what} ({RULE})")


def _reason(error: StoreError) -> Unhealthy:
    if isinstance(error, StrangeStoreError):
        return Unhealthy.OTHER_QUEUE
    if isinstance(error, RightsError):
        return Unhealthy.SERVER_DENIES
    return Unhealthy.SERVER_UNSAFE if isinstance(error, StoreOpenError) else Unhealthy.SERVER_DOWN


def _text(reply: Reply) -> str | None:
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else None
