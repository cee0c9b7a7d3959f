"""Writes many submissions in one transaction: which statements, in which order, and what came of each.

A batch is a handful of statements over arrays, whatever the number of messages. Submissions that change the
same delivery are written one after the other. When the database refuses a batch because of a value in it,
each submission is written by itself, so that a bad one is alone; its `error` then tells its submitter. Any
other failure fails the whole batch, and it is unknown whether the batch was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zonerelay.model.address import domain_of
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common import records
from zonerelay.store.common.records import DeliveryStatus
from zonerelay.store.common.write.batches import ChangeOne, changed
from zonerelay.store.common.write.group_commit import Failed
from zonerelay.store.contract import Kept, Once, StoreError, check_kept
from zonerelay.store.postgres import sql
from zonerelay.store.postgres.driver import ClashError, Columns, Fetch, Link, SickError
from zonerelay.store.postgres.rows import (
    RowKey,
    column_of,
    delivery_key,
    delivery_of,
    identity,
    key_columns,
    number,
    row_key,
    word,
)

CLASHES = 5
"""How often a batch that another transaction was in the way of is tried."""


class MessageRows:
    """A message to be stored. Of a small one `body` is all of it; a large one has its last `chunks` here and
    the first were uploaded. `claimed` are its deliveries that are claimed by the write itself.
    """

    __slots__ = (
        "body", "chunks", "claimed", "deliveries", "id", "message", "metadata", "once", "rows", "stored",
    )  # fmt: skip

    def __init__(
        self,
        message: Message,
        deliveries: Iterable[Delivery],
        chunks: Sequence[bytes],
        claims: Callable[[Delivery], bool],
        once: Once | None = None,
    ) -> None:
        self.message = message
        self.once = once
        self.id = number(message.id)
        self.metadata = records.encode_message(message)
        self.deliveries = list({delivery.key: delivery for delivery in deliveries}.values())
        self.claimed = {delivery.key for delivery in self.deliveries if claims(delivery)}
        self.body = (chunks[0] if chunks else b"") if message.chunks <= 1 else None
        first = message.chunks - len(chunks) + 1
        self.chunks = [] if self.body is not None else list(enumerate(chunks, first))
        self.stored = False
        alone = len(self.deliveries) == 1
        self.rows = [_delivery_row(delivery, alone) for delivery in self.deliveries]

    @property
    def was_uploaded(self) -> bool:
        """Part of the body is stored already."""
        return bool(self.chunks) and self.chunks[0][0] > 1


@dataclass(slots=True, eq=False)
class Submission:
    """One submission. `changes` are outcomes, `None` when the delivery leaves; `mine` of them were handed out
    to the submitter, `pooled` lay at hand. `reports` come with what they are about. `simple`: each message
    that deliveries leave has one recipient. `done` and `closed` are its results.
    """

    uploads: list[tuple[int, int, bytes]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    messages: list[MessageRows] = field(default_factory=list)
    reports: list[tuple[MessageRows, tuple[DeliveryKey, ...]]] = field(default_factory=list)
    changes: dict[DeliveryKey, Delivery | None] = field(default_factory=dict)
    encoded: dict[DeliveryKey, bytes] = field(default_factory=dict)
    mine: dict[DeliveryKey, Delivery] = field(default_factory=dict)
    pooled: list[Delivery] = field(default_factory=list)
    news: set[QueueName] = field(default_factory=set)
    simple: bool = False
    done: dict[DeliveryKey, DeliveryStatus] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    error: StoreError | None = None
    outcome: asyncio.Future[None] | None = None

    @property
    def added(self) -> list[MessageRows]:
        """All messages that it stores, with those that report."""
        return [*self.messages, *(report for report, _ in self.reports)]

    def ended_uploads(self) -> list[int]:
        return [new.id for new in self.messages if new.was_uploaded]

    def forget_results(self) -> None:
        self.done.clear()
        self.closed.clear()
        self.error = None
        for new in self.added:
            new.stored = False


class Target(NamedTuple):
    """The link that a batch is written over, and the relay that writes it: its session and highest id."""

    link: Link
    session: int
    last_id: int
    channel: str


class TransactionWriter:
    """Writes batches. Each attempt asks for its `target`."""

    def __init__(
        self, tell: Callable[[float | Failed], None], target: Callable[[], Target], clock: Clock
    ) -> None:
        self._tell = tell
        self._target = target
        self._now, self._wall = clock.monotonic, clock.now
        self._task: asyncio.Task[None] | None = None

    def put(self, jobs: Sequence[Submission]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(jobs))

    def stop(self) -> None:
        """Nothing is under way any more."""
        self._task = None

    async def _run(self, jobs: Sequence[Submission]) -> None:
        started = self._now()
        try:
            await self._write(jobs)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the submitters have to hear of it
            self._tell(Failed(error))
        else:
            self._tell(self._now() - started)

    async def _write(self, jobs: Sequence[Submission]) -> None:
        try:
            await self._try(jobs)
        except SickError as error:
            if len(jobs) == 1:
                jobs[0].forget_results()
                jobs[0].error = error
                return
            for job in jobs:
                await self._write([job])

    async def _try(self, jobs: Sequence[Submission]) -> None:
        for left in reversed(range(CLASHES)):
            for job in jobs:
                job.forget_results()
            try:
                await self._together(jobs)
            except ClashError:
                if not left:
                    raise
            else:
                return

    async def _together(self, jobs: Sequence[Submission]) -> None:
        rounds = _rounds(jobs)
        target = self._target()
        if len(rounds) == 1 and _is_one_statement(jobs):
            await self._round(target.link.fetch, jobs, target)
            return
        async with target.link.transaction() as fetch:
            for some in rounds:
                await self._round(fetch, some, target)

    async def _round(self, fetch: Fetch, jobs: Sequence[Submission], target: Target) -> None:
        session = target.session
        await self._store_uploads(fetch, jobs, session)
        live = [job for job in jobs if job.error is None]
        if keyed := [(job, new, new.once) for job in live for new in job.messages if new.once is not None]:
            await self._keep(fetch, keyed)
            live = [job for job in live if job.error is None]
        await self._finish(fetch, live, target)
        await self._postpone(fetch, live, session)
        await self._add(fetch, live, session)
        if news := sorted({queue for job in live for queue in job.news}):
            await fetch(sql.TELL, target.channel, [f"{session} {column_of(queue)}" for queue in news])

    async def _store_uploads(self, fetch: Fetch, jobs: Sequence[Submission], session: int) -> None:
        if uploads := [part for job in jobs for part in job.uploads]:
            numbers, places, data = zip(*uploads, strict=True)
            await fetch(sql.ADD_CHUNKS, numbers, places, data, session)
        if dropped := [number for job in jobs for number in job.dropped]:
            await fetch(sql.DROP_UPLOADS, dropped, session)
        if not (ended := [number for job in jobs for number in job.ended_uploads()]):
            return
        there = {row[0] for row in await fetch(sql.END_UPLOADS, ended, session)}
        for job in jobs:
            if not there.issuperset(job.ended_uploads()):
                # Another node believed us dead and has cleaned up behind us.
                job.error = StoreError("the beginning of the message is gone: the lease had run out")

    async def _keep(self, fetch: Fetch, keyed: Sequence[tuple[Submission, MessageRows, Once]]) -> None:
        """Stores the idempotency keys. A submission whose key is there has an error from here on."""
        # The first of a batch that has a key gets it; the others find it there.
        first = {once.identity: (new, once) for _, new, once in reversed(keyed)}
        rows = [(once.identity, once.digest, new.id, once.until) for new, once in first.values()]
        taken = {row[0] for row in await fetch(sql.KEEP, *zip(*rows, strict=True), self._wall())}
        losers = [
            (job, new, once)
            for job, new, once in keyed
            if once.identity not in taken or first[once.identity][0] is not new
        ]
        if not losers:
            return
        found = {row[0]: row[1:] for row in await fetch(sql.KEPT, [once.identity for *_, once in losers])}
        for job, _, once in losers:
            message, digest, until = found[once.identity]
            try:
                check_kept(once, Kept(identity(message), digest, until))
            except StoreError as error:
                job.error = error
        if gone := [new.id for _, new, _ in losers if new.was_uploaded]:
            await fetch(sql.DROP_CHUNKS, gone)

    async def _finish(self, fetch: Fetch, jobs: Sequence[Submission], target: Target) -> None:
        wanted = _wanted(jobs, leaving=True)
        if not wanted:
            return
        shared: set[int] = set()
        for *key, next_attempt, held, alone in await fetch(
            sql.FINISH, *_columns(wanted), target.session, target.last_id
        ):
            job, delivery_key = wanted[RowKey(*key)]
            job.done[delivery_key] = DeliveryStatus(created=0.0, next_attempt=next_attempt, held=held)
            (job.closed if alone else shared).add(key[1])
        if shared:
            closed = await close_messages(fetch, shared)
            for job in jobs:
                job.closed |= closed

    async def _postpone(self, fetch: Fetch, jobs: Sequence[Submission], session: int) -> None:
        wanted = _wanted(jobs, leaving=False)
        if not wanted:
            return
        states = [job.changes[key] for job, key in wanted.values()]
        times = [max(state.next_attempt, 0.0) for state in states if state is not None]
        helds = [state.held for state in states if state is not None]
        encoded = [job.encoded[key] for job, key in wanted.values()]
        for *key, next_attempt, held in await fetch(
            sql.POSTPONE, *_columns(wanted), session, times, helds, encoded
        ):
            job, delivery_key = wanted[RowKey(*key)]
            job.done[delivery_key] = DeliveryStatus(created=0.0, next_attempt=next_attempt, held=held)

    async def _add(self, fetch: Fetch, jobs: Sequence[Submission], session: int) -> None:
        messages = [new for job in jobs for new in job.messages]
        for job in jobs:
            # The node that has the deliveries now reports for itself.
            messages += [
                new for new, about in job.reports if not about or any(key in job.done for key in about)
            ]
        if messages:
            await fetch(sql.ADD, *_new_columns(messages, session))
        for new in messages:
            new.stored = True


async def close_messages(fetch: Fetch, numbers: Iterable[int]) -> set[int]:
    """Removes the messages that have no delivery any more, and returns them. Two nodes may have finished the
    last two just now: the second to get the lock sees what the first did.
    """
    ids = sorted(numbers)
    await fetch(sql.LOCK_MESSAGES, ids)
    return {row[0] for row in await fetch(sql.CLOSE_MESSAGES, ids)}


@dataclass(slots=True)
class Changed:
    """`steps` are the states before and after; `kept` are still claimed by us."""

    existed: int = 0
    steps: dict[DeliveryKey, tuple[Delivery, Delivery | None]] = field(default_factory=dict)
    kept: set[DeliveryKey] = field(default_factory=set)


async def change_deliveries(
    fetch: Fetch,
    keys: Sequence[DeliveryKey],
    change: ChangeOne,
    *,
    session: int,
    keeps: Callable[[DeliveryKey], bool],
) -> Changed:
    """Carries out an operator's change in the transaction of `fetch`. Raises StoreError.

    What another node has claimed is left alone. `keeps` says which claims of this node go on; its other
    claims on these deliveries end.
    """
    found = Changed()
    removed: list[Columns] = []
    for row in await fetch(sql.FOR_UPDATE, *key_columns(keys)):
        if row[6] not in {None, session}:
            continue
        found.existed += 1
        old = delivery_of(row)
        new = changed(old, change)
        if new == old:
            continue
        found.steps[old.key] = (old, new)
        if new is None:
            removed.append(row)
        elif row[6] == session and new.key == old.key and keeps(old.key):
            found.kept.add(old.key)
    await _remove(fetch, removed)
    await _rewrite(fetch, found, session)
    return found


async def _remove(fetch: Fetch, rows: Sequence[Columns]) -> None:
    if not rows:
        return
    await fetch(sql.REMOVE, *key_columns([delivery_key(row) for row in rows]))
    if alone := [row[1] for row in rows if row[7]]:
        await fetch(sql.REMOVE_MESSAGES, alone)
    if shared := {row[1] for row in rows if not row[7]}:
        await close_messages(fetch, shared)


async def _rewrite(fetch: Fetch, found: Changed, session: int) -> None:
    keys = [key for key, (_, new) in found.steps.items() if new is not None]
    states = [new for _, new in found.steps.values() if new is not None]
    if states:
        await fetch(
            sql.REWRITE,
            *key_columns(keys),
            [max(state.next_attempt, 0.0) for state in states],
            [state.held for state in states],
            [records.encode_delivery(state) for state in states],
            [session if key in found.kept else None for key in keys],
            [column_of(state.queue) for state in states],
        )


def _rounds(jobs: Sequence[Submission]) -> list[list[Submission]]:
    """Cuts the submissions, in their order, where a delivery is changed a second time."""
    rounds: list[list[Submission]] = [[]]
    seen: set[DeliveryKey] = set()
    for job in jobs:
        if not seen.isdisjoint(job.changes):
            rounds.append([])
            seen.clear()
        rounds[-1].append(job)
        seen |= job.changes.keys()
    return rounds


def _is_one_statement(jobs: Sequence[Submission]) -> bool:
    if any(new.once is not None for job in jobs for new in job.messages):
        return False
    finishes = any(None in job.changes.values() for job in jobs)
    parts = (
        any(job.uploads for job in jobs),
        any(job.dropped for job in jobs),
        any(job.ended_uploads() for job in jobs),
        finishes,
        any(state is not None for job in jobs for state in job.changes.values()),
        any(job.messages or job.reports for job in jobs),
        any(job.news for job in jobs),
    )
    return sum(parts) == 1 and (not finishes or all(job.simple for job in jobs))


_Wanted = dict[RowKey, tuple[Submission, DeliveryKey]]


def _wanted(jobs: Sequence[Submission], *, leaving: bool) -> _Wanted:
    return {
        row_key(key): (job, key)
        for job in jobs
        for key, state in job.changes.items()
        if (state is None) is leaving
    }


def _columns(wanted: _Wanted) -> list[Columns]:
    return [*zip(*wanted, strict=True), [key in job.mine for job, key in wanted.values()]]


def _delivery_row(delivery: Delivery, alone: bool) -> tuple[object, ...]:
    return (
        *row_key(delivery.key),
        word(domain_of(delivery.recipient)),
        delivery.created,
        max(delivery.next_attempt, 0.0),
        delivery.held,
        alone,
        records.encode_delivery(delivery),
    )


def _new_columns(messages: Sequence[MessageRows], session: int) -> list[Sequence[object]]:
    chunks = [(new.id, place, data) for new in messages for place, data in new.chunks]
    deliveries = [
        (*row[:8], session if delivery.key in new.claimed else None, row[8])
        for new in messages
        for delivery, row in zip(new.deliveries, new.rows, strict=True)
    ]
    return [
        [new.id for new in messages],
        [new.metadata for new in messages],
        [new.body for new in messages],
        *(zip(*chunks, strict=True) if chunks else ((), (), ())),
        *zip(*deliveries, strict=True),
    ]
