"""What the stores on this machine's own disks share: settling, operators' changes, and bodies from memory.

Every change is planned from what earlier submissions will have left, then submitted as one atomic write. An
engine says how a plan is made and submitted. What a plan means for memory takes effect when it is durable,
whether its caller still waits or not. Everything raises StoreError alone.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.common.body.cache import BodyCache
from zonerelay.store.common.body.writer import check_own_message
from zonerelay.store.common.keeper.local_keeper import LocalKeeper
from zonerelay.store.common.once.reservations import Reservations
from zonerelay.store.common.write.batches import BatchedUpdate, ChangeOne, changed
from zonerelay.store.contract import Change, Finish, KeptKeys, Once, Submit, Unhealthy


class Planned(Protocol):
    """The changes of one write, before any I/O."""

    @property
    def transitions(self) -> Mapping[DeliveryKey, object]:
        """The deliveries that the write changes."""

    def current(self, key: DeliveryKey) -> Delivery | None:
        """The delivery as the plan leaves it so far, `None` when it does not exist (any more)."""

    def change(self, key: DeliveryKey, new: Delivery | None) -> None:
        """Plans a delivery's new state, `None` when it leaves. Ignored when it does not exist (any more)."""


Plan = TypeVar("Plan", bound=Planned)


class LocalStore(BatchedUpdate, Generic[Plan]):
    """Belongs to the event loop that opened it."""

    node = 0
    _reservations: Reservations

    def __init__(self, keeper: LocalKeeper[Any, Any, Any, Any], last_id: MessageId | None) -> None:
        self._local_keeper = keeper
        self.uploads = 0
        self._bodies = BodyCache()
        self._last_id = last_id
        # Reports whose settle is under way, and those whose settle has failed: these may be stored, too.
        self._reporting: set[MessageId] = set()
        self._doubtful: set[MessageId] = set()

    # --- what its parts say

    def check_writable(self) -> None:
        self._local_keeper.check_writable()

    def unhealthy(self) -> Unhealthy | None:
        return self._local_keeper.unhealthy()

    def problems(self) -> Sequence[str]:
        return self._local_keeper.problems()

    async def usable(self) -> bool:
        return await self._local_keeper.usable()

    async def probe(self) -> None:
        await self._local_keeper.probe()

    async def kept_keys(self, cursor: str = "") -> tuple[KeptKeys, str]:
        return await self._reservations.kept_keys(cursor)

    async def submit_once(
        self, once: Once, message_id: MessageId, submit: Callable[[], asyncio.Future[None]]
    ) -> asyncio.Future[None]:
        return await self._reservations.store(once, message_id, submit)

    # --- what an engine says

    @abc.abstractmethod
    async def _plan(self, keys: Sequence[DeliveryKey]) -> Plan:
        """A plan that knows what is stored of these deliveries. The caller submits it before it waits."""

    def _let_go(self, plan: Plan) -> None:
        """The plan was submitted, or will not be."""

    @abc.abstractmethod
    def _add_report(self, plan: Plan, report: Submit) -> None:
        """Plans a message of our own."""

    @abc.abstractmethod
    def _submit(
        self, plan: Plan, *, settled: Sequence[DeliveryKey] = (), lazy: bool = False
    ) -> asyncio.Future[None]:
        """Hands a plan to the committer. Raises StoreError when nothing can be written now."""

    @abc.abstractmethod
    def _drop_claims(self, keys: Sequence[DeliveryKey]) -> None:
        """Ends the claims on deliveries that do not exist any more."""

    @abc.abstractmethod
    async def _stored_reports(self, doubtful: Collection[MessageId]) -> Collection[MessageId]:
        """The doubtful reports that were stored."""

    @abc.abstractmethod
    async def read_message(self, message_id: MessageId) -> Message: ...

    @abc.abstractmethod
    def _read_chunks(self, message: Message) -> AsyncGenerator[bytes, None]:
        """The body from the disk."""

    # --- taking mail

    def _note_id(self, message_id: MessageId) -> None:
        if self._last_id is None or message_id > self._last_id:
            self._last_id = message_id

    def last_message_id(self) -> MessageId | None:
        return self._last_id

    # --- changing

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        reports = [change for change in changes if isinstance(change, Submit)]
        keys = [change.delivery.key for change in changes if not isinstance(change, Submit)]
        stored: Collection[MessageId] = ()
        if reports:
            for report in reports:
                check_own_message(report)
            if doubtful := self._doubtful & {report.message.id for report in reports}:
                stored = await self._stored_reports(doubtful)
        plan = await self._plan(keys)
        try:
            for change in changes:
                if not isinstance(change, Submit):
                    plan.change(change.delivery.key, None if isinstance(change, Finish) else change.delivery)
                elif change.message.id not in stored:
                    self._add_report(plan, change)
            written = self._submit(plan, settled=keys, lazy=lazy) if plan.transitions else None
        finally:
            self._let_go(plan)
        if written is None:
            self._drop_claims(keys)
        elif reports:
            await self._wait_for_reports(written, {report.message.id for report in reports})
        else:
            await written
        if reports:
            self._doubtful.difference_update(report.message.id for report in reports)

    async def _wait_for_reports(self, written: asyncio.Future[None], ids: set[MessageId]) -> None:
        self._reporting |= ids
        try:
            await written
        finally:
            self._reporting -= ids

    async def _update_batch(self, keys: Sequence[DeliveryKey], change: ChangeOne) -> int:
        plan = await self._plan(keys)
        try:
            existing = [old for key in keys if (old := plan.current(key)) is not None]
            for old in existing:
                new = changed(old, change)
                if new != old:
                    plan.change(old.key, new)
            written = self._submit(plan) if plan.transitions else None
        finally:
            self._let_go(plan)
        if written is not None:
            await written
        return len(existing)

    # --- reading

    def check_claim(self, message_id: MessageId) -> None:
        """Returns: no other relay has this spool."""

    async def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]:
        message = await self.read_message(message_id)
        cached = self._bodies.get(message_id, message.chunks)
        if cached is not None:
            for chunk in cached:
                yield chunk
            return
        async with contextlib.aclosing(self._read_chunks(message)) as chunks:
            async for chunk in chunks:
                yield chunk
