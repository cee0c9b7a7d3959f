"""Sees to it that a spool stores the messages of one idempotency key only once.

The truth is in the spools: the key becomes durable in the write of its message. A reservation keeps the same
key from being written twice at a time: in this process in memory, and where several workers have spools of
their own in their `Register`, which also says what the other spools hold.

Promises: a reservation ends when its write is durable, or when the spool, after a failed write, has been
asked whether the message is there. Until then the same key waits, at most `PATIENCE` seconds, and then raises
BeingStoredError. What a crash leaves in the register is settled by the next start of the worker, and other
workers' submissions of that key wait for it. Trouble with the register is trouble of messages with keys only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from zonerelay.model.clock import Clock
from zonerelay.model.message_id import MessageId
from zonerelay.process.tasks import Tasks
from zonerelay.process.threads import STORE
from zonerelay.store.contract import (
    BeingStoredError,
    Kept,
    KeptKeys,
    KeyRegister,
    Once,
    StoreError,
    check_kept,
)
from zonerelay.store.surroundings import Siblings

PATIENCE = 10.0
LOOK_AGAIN = 0.1
LOOK = 1.0
"""Seconds after which a worker looks whether the register still has its keys."""
FORGET_EVERY = 60.0
"""Seconds, or as many messages as one step forgets keys, after which expired keys are looked for."""
FORGET = 500

_log = logging.getLogger("zonerelay.store")

Page = Collection[tuple[str, Kept]]


class Reservations:
    """The reservations of a spool; belongs to the event loop that opened it. `find` and `page` raise
    StoreError while the spool cannot be read: `page(after)` has the keys behind an identity, none at the end.
    `forget(now, most, is_used)` removes expired ones, except those that are used again; `usable` is the
    store's.
    """

    def __init__(
        self,
        find: Callable[[str], Awaitable[Kept | None]],
        page: Callable[[str], Awaitable[Page]],
        forget: Callable[[float, int, Callable[[str], bool]], Awaitable[None]],
        usable: Callable[[], Awaitable[bool]],
        *,
        clock: Clock,
        register: KeyRegister | None,
    ) -> None:
        self._find, self._page, self._forget_keys, self._usable = find, page, forget, usable
        self._clock = clock
        self._register = register
        self._busy: dict[str, asyncio.Future[None]] = {}
        self._tasks = Tasks()
        self._forget_at = clock.monotonic() + FORGET_EVERY
        self._used: set[str] = set()
        """Keys that were stored since the last step of forgetting began."""
        self._forgetting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Let the other workers know the keys of this spool. Until then they refuse keys temporarily."""
        if self._register is not None and self._register.publishes:
            self._tasks.start(self._keep_published(self._register))

    async def store(
        self, once: Once, message_id: MessageId, submit: Callable[[], asyncio.Future[None]]
    ) -> asyncio.Future[None]:
        """Submit a message unless its key is there. Raises as `MessageWriter.commit` does."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        while (other := self._busy.get(once.identity)) is not None:
            await asyncio.wait({other}, timeout=deadline - loop.time())
            if loop.time() >= deadline:
                raise BeingStoredError("a message with the same key is being stored")
        self._busy[once.identity] = loop.create_future()
        try:
            kept = await self._reserve(once, message_id, deadline)
            if kept is not None and kept.until > self._clock.now():
                check_kept(once, kept)
            stored = submit()
        except BaseException:
            self._settled(once.identity, message_id, is_kept=False)
            raise
        stored.add_done_callback(lambda stored: self._written(once.identity, message_id, stored))
        # A caller that leaves must not take the write's outcome with it.
        return asyncio.shield(stored)

    async def _reserve(self, once: Once, message_id: MessageId, deadline: float) -> Kept | None:
        """Return what is kept of the key already."""
        if (register := self._register) is None:
            return await self._find(once.identity)
        while True:
            try:
                found = await register.reserve(once, message_id, self._clock.now())
            except BeingStoredError:
                # Another worker is starting.
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(LOOK_AGAIN)
                continue
            if found is None or not found.is_pending:
                return None if found is None else found.kept
            if found.worker == register.worker:
                # No write of this process is under way: it is what a note that failed has left.
                await self._settle(register, once.identity, found.kept.message_id)
            elif asyncio.get_running_loop().time() >= deadline:
                raise BeingStoredError("a message with the same key is being stored by another worker")
            else:
                await asyncio.sleep(LOOK_AGAIN)

    async def _settle(self, register: KeyRegister, identity: str, message_id: MessageId) -> None:
        """The spool says what became of a reservation of this worker."""
        kept = await self._find(identity)
        is_kept = kept is not None and kept.message_id == message_id
        await register.settle(identity, message_id, is_kept)

    def _written(self, identity: str, message_id: MessageId, stored: asyncio.Future[None]) -> None:
        if stored.cancelled() or stored.exception() is not None:
            self._tasks.start(self._look_whether(identity, message_id))
            return
        self._settled(identity, message_id, is_kept=True)
        self._used.add(identity)
        if len(self._used) >= FORGET or self._clock.monotonic() >= self._forget_at:
            self._forget_at = self._clock.monotonic() + FORGET_EVERY
            if self._forgetting is None or self._forgetting.done():
                self._forgetting = self._tasks.start(self._forget())

    async def _look_whether(self, identity: str, message_id: MessageId) -> None:
        """After a failed write: the repaired spool says whether the message is there."""
        while True:
            await self._usable()
            try:
                kept = await self._find(identity)
            except StoreError:
                await asyncio.sleep(LOOK_AGAIN)
                continue
            is_kept = kept is not None and kept.message_id == message_id
            self._settled(identity, message_id, is_kept=is_kept)
            return

    def _settled(self, identity: str, message_id: MessageId, *, is_kept: bool) -> None:
        """The write has an outcome. No caller waits for the register: it writes in order."""
        if (register := self._register) is not None:
            self._tasks.start(self._note(register, identity, message_id, is_kept=is_kept))
        self._busy.pop(identity).set_result(None)

    async def _note(
        self, register: KeyRegister, identity: str, message_id: MessageId, *, is_kept: bool
    ) -> None:
        try:
            await register.settle(identity, message_id, is_kept)
        except StoreError as error:
            _log.warning("%s; messages with this key wait until this worker is asked or restarts", error)

    async def kept_keys(self, cursor: str = "") -> tuple[KeptKeys, str]:
        """Satisfies `QueueView`."""
        page = list(await self._page(cursor))
        return page, max((identity for identity, _ in page), default="")

    # --- the register

    def problems(self) -> tuple[str, ...]:
        """Return what is wrong with the register."""
        problem = "" if self._register is None else self._register.problem
        return (f"{problem}: messages with a key are refused temporarily",) if problem else ()

    async def _keep_published(self, register: KeyRegister) -> None:
        """Publish the keys of this spool, again whenever the register was begun anew."""
        told, is_first = "", True
        while True:
            try:
                if is_first or not await register.is_published():
                    for identity, message_id in await register.pending():
                        await self._settle(register, identity, message_id)
                if not await register.is_published():
                    await self._publish(register)
                told, is_first = "", False
            except StoreError as error:
                if str(error) != told:
                    told = str(error)
                    _log.warning(
                        "the idempotency keys of this worker cannot be made known to the others, so that"
                        " messages with keys are refused temporarily: %s",
                        error,
                    )
            await asyncio.sleep(LOOK)

    async def _publish(self, register: KeyRegister) -> None:
        after = ""
        while page := await self._page(after):
            await register.publish(page)
            after = max(identity for identity, _ in page)
        await register.mark_published()

    async def _forget(self) -> None:
        try:
            self._used.clear()
            await self._forget_keys(self._clock.now(), 2 * FORGET, self._is_used)
            if (register := self._register) is not None:
                await register.forget(self._clock.now(), 2 * FORGET)
        except StoreError as error:
            _log.warning("expired idempotency keys could not be removed: %s", error)

    def _is_used(self, identity: str) -> bool:
        """Return whether the key may have been written since the last step began."""
        return identity in self._busy or identity in self._used

    async def close(self) -> None:
        """Before the spool is closed. What is reserved stays so until the next start."""
        await self._tasks.cancel()
        if self._register is not None:
            await STORE.run(self._register.close)


def register_for(siblings: Siblings | None) -> KeyRegister | None:
    """Return the register that the workers of a machine share, if there are several."""
    if siblings is None:
        return None
    from zonerelay.store.common.once.register import Register  # noqa: PLC0415 - a sole worker does without

    return Register(siblings)
