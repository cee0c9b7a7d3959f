"""Ensures that a spool stores only one message for each idempotency key.

The spools are authoritative: the key becomes durable in the write of its message. A reservation prevents two
concurrent writes of the same key. It is held in memory and, if several workers have their own spools, in
their `KeyIndex`, which also knows the keys of the other spools.

Promises: a reservation ends when its write is durable. After a failed write it ends when the repaired spool
has been searched for the message. Until then the same key waits at most `PATIENCE` seconds and then raises
InProgressError. A worker settles the reservations that a crash has left when it starts, and submissions of
these keys to other workers wait for that. A failure of the register only affects messages with keys.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass

from zonerelay.model.clock import Clock
from zonerelay.model.envelope import MessageId
from zonerelay.process.tasks import Tasks
from zonerelay.store import contract
from zonerelay.store.context import SiblingWorkers
from zonerelay.store.contract import InProgressError, KeyRegister, StoreError

PATIENCE = 10.0
LOOK_AGAIN = 0.1
FORGET_EVERY = 60.0
"""Expired keys are removed after this many seconds, or after as many messages as one step removes keys."""
FORGET = 500

_log = logging.getLogger("zonerelay.store")


@dataclass(eq=False, repr=False)
class Reservations:
    """The reserved idempotency keys of one spool, so that submissions with the same key store only one
    message. An instance belongs to the event loop that opened it.

    `find` and `page` raise StoreError while the spool cannot be read. `keep` stores keys.
    `forget(now, most, is_used)` removes expired keys, except those that are used again. `usable` is the
    method of the store.
    """

    find: Callable[[str], Awaitable[contract.StoredKey | None]]
    page: contract.KeyPages
    keep: contract.KeepKeys
    forget: Callable[[float, int, Callable[[str], bool]], Awaitable[None]]
    usable: Callable[[], Awaitable[bool]]
    _: KW_ONLY
    clock: Clock
    register: KeyRegister | None

    def __post_init__(self) -> None:
        self._busy: dict[str, asyncio.Future[None]] = {}
        self._tasks = Tasks()
        self._forget_at = self.clock.monotonic() + FORGET_EVERY
        self._used: set[str] = set()
        """The keys that were stored since the last removal of expired keys began."""
        self._forgetting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Publish the keys of this spool to the other workers. Until then they refuse keys temporarily."""
        if (register := self.register) is not None:
            register.start(self.page, functools.partial(self._settle, register), self.keep)

    async def store(
        self, once: contract.IdempotencyKey, message_id: MessageId, submit: Callable[[], asyncio.Future[None]]
    ) -> asyncio.Future[None]:
        """Submit a message unless its key was stored before. Raises the exceptions of
        `MessageWriter.commit`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        while (other := self._busy.get(once.identity)) is not None:
            await asyncio.wait({other}, timeout=deadline - loop.time())
            if loop.time() >= deadline:
                raise InProgressError("a message with the same key is being stored")
        self._busy[once.identity] = loop.create_future()
        try:
            kept = await self._reserve(once, message_id, deadline)
            if kept is not None and kept.until > self.clock.now():
                contract.check_kept(once, kept)
            if once.asks_only:
                raise contract.NotStoredBeforeError(once.identity)
            stored = submit()
        except BaseException:
            self._settled(once.identity, message_id, is_kept=False)
            raise
        stored.add_done_callback(lambda stored: self._written(once.identity, message_id, stored))
        # If the caller is cancelled, the write must go on.
        return asyncio.shield(stored)

    async def _reserve(
        self, once: contract.IdempotencyKey, message_id: MessageId, deadline: float
    ) -> contract.StoredKey | None:
        """Reserve the idempotency key of a submission. Return the message that was stored with it before, if
        any.
        """
        if (register := self.register) is None:
            return await self.find(once.identity)
        while True:
            try:
                found = await register.reserve(once, message_id, self.clock.now())
            except InProgressError:
                # Another worker is starting.
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(LOOK_AGAIN)
                continue
            if found is None or not found.is_pending:
                return None if found is None else found.kept
            if found.worker == register.worker:
                # This process is not writing it, so the reservation was left because its settlement failed.
                await self._settle(register, once.identity, found.kept.message_id)
            elif asyncio.get_running_loop().time() >= deadline:
                raise InProgressError("a message with the same key is being stored by another worker")
            else:
                await asyncio.sleep(LOOK_AGAIN)

    async def _settle(self, register: KeyRegister, identity: str, message_id: MessageId) -> None:
        """Confirm or remove a reservation of this worker, depending on whether the spool has its message."""
        await register.settle(identity, message_id, await self._is_kept(identity, message_id))

    async def _is_kept(self, identity: str, message_id: MessageId) -> bool:
        kept = await self.find(identity)
        return kept is not None and kept.message_id == message_id

    def _written(self, identity: str, message_id: MessageId, stored: asyncio.Future[None]) -> None:
        if stored.cancelled() or stored.exception() is not None:
            self._tasks.start(self._look_whether(identity, message_id))
            return
        self._settled(identity, message_id, is_kept=True)
        self._used.add(identity)
        if len(self._used) >= FORGET or self.clock.monotonic() >= self._forget_at:
            self._forget_at = self.clock.monotonic() + FORGET_EVERY
            if self._forgetting is None or self._forgetting.done():
                self._forgetting = self._tasks.start(self._forget())

    async def _look_whether(self, identity: str, message_id: MessageId) -> None:
        """Confirm or remove a reservation after a failed write, depending on whether the repaired spool has
        its message.
        """
        while True:
            await self.usable()
            try:
                is_kept = await self._is_kept(identity, message_id)
            except StoreError:
                await asyncio.sleep(LOOK_AGAIN)
                continue
            self._settled(identity, message_id, is_kept=is_kept)
            return

    def _settled(self, identity: str, message_id: MessageId, *, is_kept: bool) -> None:
        """Release an idempotency key after the write of its message has ended. The register is updated in the
        background, in the order of operations.
        """
        if (register := self.register) is not None:
            self._tasks.start(self._note(register, identity, message_id, is_kept=is_kept))
        self._busy.pop(identity).set_result(None)

    async def _note(
        self, register: KeyRegister, identity: str, message_id: MessageId, *, is_kept: bool
    ) -> None:
        try:
            await register.settle(identity, message_id, is_kept)
        except StoreError as error:
            advice = "messages with this idempotency key are deferred until another worker asks this one"
            _log.warning("%s; %s, or this one restarts", error, advice)

    async def kept_keys(self, cursor: str = "") -> tuple[contract.KeptKeys, str]:
        """Implement `QueueView.kept_keys`."""
        page = list(await self.page(cursor))
        return page, max((identity for identity, _ in page), default="")

    # --- the register

    def problems(self) -> tuple[str, ...]:
        """Return the problem of the key register, if any."""
        problem = "" if self.register is None else self.register.problem
        return (f"{problem}: messages with an idempotency key are rejected temporarily",) if problem else ()

    async def _forget(self) -> None:
        try:
            self._used.clear()
            await self.forget(self.clock.now(), 2 * FORGET, self._is_used)
            if (register := self.register) is not None:
                await register.forget(self.clock.now(), 2 * FORGET)
        except StoreError as error:
            _log.warning("expired idempotency keys could not be removed: %s", error)

    def _is_used(self, identity: str) -> bool:
        """Return whether the key may have been used again since the last removal of expired keys began."""
        return identity in self._busy or identity in self._used

    async def close(self) -> None:
        """Close the register, before the spool is closed. Reservations stay until the next start."""
        await self._tasks.cancel()
        if self.register is not None:
            await self.register.close()


def register_for(siblings: SiblingWorkers | None) -> KeyRegister | None:
    """Return the register that the workers of a machine share, or None if there is only one worker."""
    if siblings is None:
        return None
    from zonerelay.store.queue.key_index import KeyIndex  # noqa: PLC0415 - a sole worker does without

    return KeyIndex(siblings)
