"""The fan-out of operators' requests to all workers, and the one answer of the relay.

Lists stay streams: the supervisor holds one delivery of each worker, never a queue. `End.missing` names the
workers that do not answer in time; the answer does not wait for them. A message id tells which worker
accepted the message; the other workers are asked when that one does not have it, because a spool may have
changed its worker. A shared queue is read through one worker.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import msgspec

from zonerelay import __version__
from zonerelay.control.acts import MAX_ROWS, new_act
from zonerelay.control.messages.answers import (
    ActRow,
    Address,
    Changed,
    Count,
    DeliveryRow,
    End,
    Explanation,
    OrderGiven,
    OrdersEnded,
    OrdersInForce,
    Pong,
    Progress,
    RelayStatus,
    Summary,
    WebhookReplayed,
    WebhookRow,
)
from zonerelay.control.messages.requests import (
    Acts,
    Explain,
    Orders,
    Ping,
    QueueCat,
    QueueChange,
    QueueCount,
    QueueList,
    QueueShow,
    QueueSummary,
    QueueTrace,
    Request,
    Resolve,
    Resume,
    SpoolAcknowledge,
    Status,
    Suspend,
    Tail,
    Transcript,
    Undo,
    WebhookList,
    WebhookReplay,
    WebhookTest,
)
from zonerelay.control.socket.errors import ControlError, NotFoundError
from zonerelay.control.socket.server import Answer
from zonerelay.model.message_id import MessageId
from zonerelay.model.outbox import is_outbox
from zonerelay.model.priority import queues_of
from zonerelay.supervisor.merge.control_client import Relay, WorkerAnswers
from zonerelay.supervisor.merge.merging import (
    merge_act,
    merge_changed,
    merge_explained,
    merge_orders,
    merge_status,
    merge_summaries,
    merge_webhooks,
)
from zonerelay.supervisor.merge.streams import LiveStream

MAX_RESOLVED = 100
"""Addresses in one answer, as one worker's."""

Rows = AsyncGenerator[DeliveryRow, None]


class FanOut:
    """Satisfies `control.server.Handler`."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    async def handle(self, request: Request, answer: Answer) -> End:
        asked = WorkerAnswers(self._relay)
        match request:
            case QueueList():
                return await self._list(request, asked, answer)
            case Resolve():
                return await self._resolve(request, asked, answer)
            case Ping():
                await answer.send(Pong(software=__version__, pid=os.getpid()))
                return End()
            case Status():
                await self._status(asked, answer)
            case QueueCount():
                await self._count(request, asked, answer)
            case QueueSummary():
                await self._summary(request, asked, answer)
            case WebhookList() | WebhookReplay():
                await self._webhooks(request, asked, answer)
            case QueueChange() | Undo() | Acts():
                await self._act(request, asked, answer)
            case Suspend() | Resume() | Orders() | Explain(message_id=""):
                await answer.send(await self._answer(request, asked, answer.caller))
            case QueueShow() | QueueTrace() | QueueCat() | SpoolAcknowledge() | Explain() | WebhookTest():
                await self._find(request, asked, answer)
            case Tail() | Transcript():
                return await LiveStream(self._relay, request, answer.caller).run(answer)
            case _:
                raise ControlError("that is for one worker, not for all of them")
        return End(missing=asked.missing)

    async def _status(self, asked: WorkerAnswers, answer: Answer) -> None:
        found = await asked.all(Status(), RelayStatus)
        own = self._relay.status()
        own = msgspec.structs.replace(own, problems=(*own.problems, *asked.missing))
        await answer.send(merge_status(found, own, shared=self._relay.shared))

    async def _list(self, request: QueueList, asked: WorkerAnswers, answer: Answer) -> End:
        limit = request.limit + 1 if request.limit else 0
        async with AsyncExitStack() as stack:
            heads: dict[int, DeliveryRow] = {}
            streams: dict[int, Rows] = {}
            for worker in self._readers(asked):
                rows = asked.rows(worker, msgspec.structs.replace(request, limit=limit))
                streams[worker] = await stack.enter_async_context(aclosing(rows))
            await _begin(streams, heads)
            while heads:
                if request.limit and answer.done == request.limit:
                    return End(count=answer.done, more=True, missing=asked.missing)
                worker = min(heads, key=lambda each: _order(heads[each], request.filter.zone))
                await answer.send(heads.pop(worker))
                answer.done += 1
                await _advance(worker, streams, heads)
        return End(count=answer.done, missing=asked.missing)

    async def _count(self, request: QueueCount, asked: WorkerAnswers, answer: Answer) -> None:
        rows: list[DeliveryRow] = []
        counts: list[int] = []

        async def count(worker: int) -> None:
            async with aclosing(asked.of(worker, request)) as answered:
                async for frame in answered:
                    if isinstance(frame, DeliveryRow):
                        rows.append(frame)
                    elif isinstance(frame, Count):
                        counts.append(frame.matched)

        await asyncio.gather(*map(count, self._readers(asked)))
        for row in sorted(rows, key=lambda row: _order(row, request.filter.zone))[: request.sample]:
            await answer.send(row)
        await answer.send(Count(matched=sum(counts)))

    async def _summary(self, request: QueueSummary, asked: WorkerAnswers, answer: Answer) -> None:
        found: list[Summary] = []

        async def ask(worker: int) -> None:
            async with aclosing(asked.of(worker, request)) as answered:
                async for frame in answered:
                    if isinstance(frame, Summary):
                        found.append(frame)

        await asyncio.gather(*map(ask, self._readers(asked)))
        if not found:
            raise ControlError(f"no worker answers: {'; '.join(asked.missing)}")
        await answer.send(merge_summaries(found))

    async def _act(self, request: QueueChange | Undo | Acts, asked: WorkerAnswers, answer: Answer) -> None:
        if isinstance(request, Acts):
            await self._acts(request, asked, answer)
            return
        request = msgspec.structs.replace(request, act=request.act or new_act(), who=answer.caller)
        if isinstance(request, Undo):
            await self._undo(request, asked, answer)
        else:
            await self._change(request, asked, answer)

    async def _change(self, request: QueueChange, asked: WorkerAnswers, answer: Answer) -> None:
        # Of a shared queue one worker after the other: each changes what the others do not attempt.
        put = asked.one_by_one if self._relay.shared else asked.all
        found = await put(request, Changed)
        if not found:
            raise ControlError(f"no worker answers: {'; '.join(asked.missing)}")
        await answer.send(merge_changed(list(found.values()), shared=self._relay.shared))

    async def _undo(self, request: Undo, asked: WorkerAnswers, answer: Answer) -> None:
        """Each worker undoes what it has changed itself, also in a shared queue."""
        refused: list[ControlError] = []

        async def undo(worker: int) -> Changed | None:
            try:
                return await asked.one(worker, request, Changed)
            except ControlError as error:
                refused.append(error)
                return None

        found = [each for each in await asyncio.gather(*map(undo, asked.workers())) if each is not None]
        # One that did not run then has no such act.
        refused.sort(key=lambda error: isinstance(error, NotFoundError))
        if not found and (asked.missing or not refused):
            raise ControlError(f"no worker that answers has it: {'; '.join(asked.missing)}")
        if not found:
            raise refused[0]
        notes = [f"in part: {error}" for error in refused if not isinstance(error, NotFoundError)]
        whole = merge_changed(found, shared=False)
        await answer.send(msgspec.structs.replace(whole, note="; ".join(filter(None, (whole.note, *notes)))))

    async def _acts(self, request: Acts, asked: WorkerAnswers, answer: Answer) -> None:
        found: dict[str, ActRow] = {}

        async def ask(worker: int) -> None:
            async with aclosing(asked.of(worker, request)) as answered:
                async for frame in answered:
                    if isinstance(frame, ActRow):
                        before = found.get(frame.act)
                        found[frame.act] = frame if before is None else merge_act(before, frame)

        await asyncio.gather(*map(ask, asked.workers()))
        rows = sorted(found.values(), key=lambda row: row.at, reverse=True)
        for row in rows[: request.limit or MAX_ROWS]:
            await answer.send(row)

    async def _webhooks(
        self, request: WebhookList | WebhookReplay, asked: WorkerAnswers, answer: Answer
    ) -> None:
        """The webhooks of all workers: what waits is added up, and the worst state counts."""
        if isinstance(request, WebhookReplay):
            found = await asked.all(request, WebhookReplayed)
            await answer.send(WebhookReplayed(queued=sum(each.queued for each in found.values())))
            return
        rows: list[WebhookRow] = []
        for worker in asked.workers():
            async with aclosing(asked.of(worker, request)) as answered:
                rows += [frame async for frame in answered if isinstance(frame, WebhookRow)]
        for row in merge_webhooks(rows):
            await answer.send(row)

    async def _find(
        self,
        request: QueueShow | QueueTrace | QueueCat | SpoolAcknowledge | Explain | WebhookTest,
        asked: WorkerAnswers,
        answer: Answer,
    ) -> None:
        """Sends the answer of the one worker that has the message or the loss."""
        first = 0 if isinstance(request, SpoolAcknowledge | WebhookTest) else int(request.message_id[-2:], 16)
        if isinstance(request, QueueCat):
            request = msgspec.structs.replace(request, who=answer.caller)
        not_found: NotFoundError | None = None
        for worker in sorted(asked.workers(), key=lambda each: each != first):
            try:
                async with aclosing(asked.of(worker, request)) as answered:
                    async for frame in answered:
                        if not isinstance(frame, End | Progress):
                            await answer.send(frame)
            except NotFoundError as error:
                not_found = error
                continue
            if not asked.missed(worker):
                return
        if asked.missing or not_found is None:
            raise ControlError(f"no worker that answers has it; asked in vain: {'; '.join(asked.missing)}")
        raise not_found

    async def _answer(
        self, request: Explain | Suspend | Resume | Orders, asked: WorkerAnswers, caller: str
    ) -> Explanation | OrderGiven | OrdersEnded | OrdersInForce:
        if isinstance(request, Explain):
            found = await asked.all(request, Explanation)
            if not found:
                raise ControlError(f"no worker answers: {'; '.join(asked.missing)}")
            return merge_explained(list(found.values()))
        return await self._orders(request, asked, caller)

    async def _orders(
        self, request: Suspend | Resume | Orders, asked: WorkerAnswers, caller: str
    ) -> OrderGiven | OrdersEnded | OrdersInForce:
        match request:
            case Suspend():
                until = request.until if request.seconds is None else time.time() + request.seconds
                order_id, who = request.id or secrets.token_hex(4), request.who or caller
                request = msgspec.structs.replace(request, id=order_id, who=who, seconds=None, until=until)
                given = list((await asked.one_by_one(request, OrderGiven)).values())
                if not given:
                    raise ControlError(f"no worker answers: {'; '.join(asked.missing)}")
                (order,) = merge_orders([each.order] for each in given)
                expiries = [each.first_expiry for each in given if each.first_expiry is not None]
                return OrderGiven(order=order, new=given[0].new, first_expiry=min(expiries, default=None))
            case Resume():
                request = msgspec.structs.replace(request, who=request.who or caller)
                ended = list((await asked.all(request, OrdersEnded)).values())
                if not ended:
                    raise ControlError(f"no worker answers: {'; '.join(asked.missing)}")
                return OrdersEnded(
                    orders=merge_orders(each.orders for each in ended),
                    released=sum(each.released for each in ended),
                )
            case Orders():
                found = await asked.all(request, OrdersInForce)
                return OrdersInForce(orders=merge_orders(each.orders for each in found.values()))

    async def _resolve(self, request: Resolve, asked: WorkerAnswers, answer: Answer) -> End:
        seen = set[str]()
        for worker in self._readers(asked):
            async with aclosing(asked.of(worker, request)) as answered:
                async for frame in answered:
                    if not isinstance(frame, Address) or frame.address in seen:
                        continue
                    if len(seen) == MAX_RESOLVED:
                        return End(count=len(seen), more=True, missing=asked.missing)
                    seen.add(frame.address)
                    await answer.send(frame)
        return End(count=len(seen), missing=asked.missing)

    def _readers(self, asked: WorkerAnswers) -> list[int]:
        """The workers that are asked for the contents of the queue."""
        workers = list(asked.workers())
        return workers[:1] if self._relay.shared else workers


async def _begin(streams: dict[int, Rows], heads: dict[int, DeliveryRow]) -> None:
    """All look for their first delivery at the same time: to find that there is none takes longest."""
    begun = (_advance(worker, streams, heads) for worker in streams)
    # A stream can be closed only when no task is reading it.
    for outcome in await asyncio.gather(*begun, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def _advance(worker: int, streams: dict[int, Rows], heads: dict[int, DeliveryRow]) -> None:
    """Makes the next delivery of this worker its head, if there is one."""
    row = await anext(streams[worker], None)
    if row is not None:
        heads[worker] = row


def _order(row: DeliveryRow, zone: str | None) -> tuple[object, ...]:
    """The order in which each worker lists: queue by queue, the oldest message first, the outbox last. Pages
    depend on it. The queues of one `zone` come in the order of urgency.
    """
    place = 0 if zone is None else queues_of(zone).index(row.queue)
    return place, is_outbox(MessageId(row.message_id)), row.queue, row.message_id, row.recipient
