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
from zonerelay.control.messages import answers, requests
from zonerelay.control.socket.errors import ControlError, NotFoundError
from zonerelay.control.socket.server import Answer
from zonerelay.model.message_id import MessageId
from zonerelay.model.outbox import is_outbox
from zonerelay.model.priority import queues_of
from zonerelay.supervisor.merge.control_client import Relay, WorkerAnswers
from zonerelay.supervisor.merge.merging import (
    merge_acts,
    merge_changed,
    merge_explained,
    merge_orders,
    merge_status,
    merge_summaries,
    merge_webhooks,
    merged,
)
from zonerelay.supervisor.merge.streams import LiveStream

MAX_RESOLVED = 100
"""Addresses in one answer, as one worker's."""

Rows = AsyncGenerator[answers.Frame, None]


class FanOut:
    """Satisfies `control.server.Handler`."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    async def handle(self, request: requests.Request, answer: Answer) -> answers.End:  # noqa: PLR0912 - a case for each
        asked = WorkerAnswers(self._relay)
        match request:
            case requests.Ping():
                await answer.send(answers.Pong(software=__version__, pid=os.getpid()))
                return answers.End()
            case requests.Tail() | requests.Transcript():
                return await LiveStream(self._relay, request, answer.caller).run(answer)
            case requests.QueueList():
                return await self._list(request, asked, answer)
            case requests.Resolve():
                return await self._resolve(request, asked, answer)
            case requests.QueueCount():
                await self._count(request, asked, answer)
            case (
                requests.QueueShow()
                | requests.QueueTrace()
                | requests.QueueCat()
                | requests.SpoolAcknowledge()
                | requests.WebhookTest()
            ):
                await self._find(request, asked, answer)
            case requests.Explain() if request.message_id:
                await self._find(request, asked, answer)
            case requests.Acts():
                rows = merge_acts(await asked.rows(request, answers.ActRow))
                for row in rows[: request.limit or MAX_ROWS]:
                    await answer.send(row)
            case requests.WebhookList():
                for webhook in merge_webhooks(await asked.rows(request, answers.WebhookRow)):
                    await answer.send(webhook)
            case requests.Status():
                await answer.send(await self._status(asked))
            case requests.QueueSummary():
                found = await asked.rows(request, answers.Summary, self._readers(asked))
                await answer.send(merge_summaries(asked.some(found)))
            case requests.QueueChange():
                await answer.send(await self._change(request, asked, answer.caller))
            case requests.Undo():
                await answer.send(await self._undo(request, asked, answer.caller))
            case requests.WebhookReplay():
                replayed = await asked.all(request, answers.WebhookReplayed)
                await answer.send(
                    answers.WebhookReplayed(queued=sum(each.queued for each in replayed.values()))
                )
            case requests.Explain():
                explained = asked.some(await asked.all(request, answers.Explanation))
                await answer.send(merge_explained(list(explained)))
            case requests.Suspend() | requests.Resume() | requests.Orders():
                await answer.send(await self._orders(request, asked, answer.caller))
            case _:
                raise ControlError("that is for one worker, not for all of them")
        return answers.End(missing=asked.missing)

    async def _status(self, asked: WorkerAnswers) -> answers.RelayStatus:
        found = await asked.all(requests.Status(), answers.RelayStatus)
        own = self._relay.status()
        own = msgspec.structs.replace(own, problems=(*own.problems, *asked.missing))
        return merge_status(found, own, shared=self._relay.shared)

    async def _list(self, request: requests.QueueList, asked: WorkerAnswers, answer: Answer) -> answers.End:
        limit = request.limit + 1 if request.limit else 0
        async with AsyncExitStack() as stack:
            heads: dict[int, answers.DeliveryRow] = {}
            streams: dict[int, Rows] = {}
            for worker in self._readers(asked):
                frames = asked.of(worker, msgspec.structs.replace(request, limit=limit))
                streams[worker] = await stack.enter_async_context(aclosing(frames))
            await _begin(streams, heads)
            while heads:
                if request.limit and answer.done == request.limit:
                    return answers.End(count=answer.done, more=True, missing=asked.missing)
                worker = min(heads, key=lambda each: _order(heads[each], request.filter.zone))
                await answer.send(heads.pop(worker))
                answer.done += 1
                await _advance(worker, streams, heads)
        return answers.End(count=answer.done, missing=asked.missing)

    async def _count(self, request: requests.QueueCount, asked: WorkerAnswers, answer: Answer) -> None:
        found = await asked.rows(request, msgspec.Struct, self._readers(asked))
        rows = [frame for frame in found if isinstance(frame, answers.DeliveryRow)]
        for row in sorted(rows, key=lambda row: _order(row, request.filter.zone))[: request.sample]:
            await answer.send(row)
        await answer.send(
            answers.Count(matched=sum(each.matched for each in found if isinstance(each, answers.Count)))
        )

    async def _change(self, request: requests.QueueChange, asked: WorkerAnswers, who: str) -> answers.Changed:
        request = msgspec.structs.replace(request, act=request.act or new_act(), who=who)
        # Of a shared queue one worker after the other: each changes what the others do not attempt.
        put = asked.one_by_one if self._relay.shared else asked.all
        return merge_changed(asked.some(await put(request, answers.Changed)), shared=self._relay.shared)

    async def _undo(self, request: requests.Undo, asked: WorkerAnswers, who: str) -> answers.Changed:
        """Each worker undoes what it has changed itself, also in a shared queue."""
        request = msgspec.structs.replace(request, act=request.act or new_act(), who=who)
        refused: list[ControlError] = []

        async def undo(worker: int) -> answers.Changed | None:
            try:
                return await asked.one(worker, request, answers.Changed)
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
        return msgspec.structs.replace(whole, note="; ".join(filter(None, (whole.note, *notes))))

    async def _find(
        self,
        request: requests.QueueShow
        | requests.QueueTrace
        | requests.QueueCat
        | requests.SpoolAcknowledge
        | requests.Explain
        | requests.WebhookTest,
        asked: WorkerAnswers,
        answer: Answer,
    ) -> None:
        """Sends the answer of the one worker that has the message or the loss."""
        first = (
            0
            if isinstance(request, requests.SpoolAcknowledge | requests.WebhookTest)
            else int(request.message_id[-2:], 16)
        )
        if isinstance(request, requests.QueueCat):
            request = msgspec.structs.replace(request, who=answer.caller)
        not_found: NotFoundError | None = None
        for worker in sorted(asked.workers(), key=lambda each: each != first):
            try:
                async with aclosing(asked.of(worker, request)) as answered:
                    async for frame in answered:
                        if not isinstance(frame, answers.End | answers.Progress):
                            await answer.send(frame)
            except NotFoundError as error:
                not_found = error
                continue
            if not asked.missed(worker):
                return
        if asked.missing or not_found is None:
            raise ControlError(f"no worker that answers has it; asked in vain: {'; '.join(asked.missing)}")
        raise not_found

    async def _orders(
        self, request: requests.Suspend | requests.Resume | requests.Orders, asked: WorkerAnswers, caller: str
    ) -> answers.OrderGiven | answers.OrdersEnded | answers.OrdersInForce:
        match request:
            case requests.Suspend():
                until = request.until if request.seconds is None else time.time() + request.seconds
                order_id, who = request.id or secrets.token_hex(4), request.who or caller
                request = msgspec.structs.replace(request, id=order_id, who=who, seconds=None, until=until)
                given = asked.some(await asked.one_by_one(request, answers.OrderGiven))
                (order,) = merge_orders([each.order] for each in given)
                return merged(given, given[0], least="first_expiry", order=order)
            case requests.Resume():
                request = msgspec.structs.replace(request, who=request.who or caller)
                ended = asked.some(await asked.all(request, answers.OrdersEnded))
                orders = merge_orders(each.orders for each in ended)
                return merged(ended, ended[0], add="released", orders=orders)
            case requests.Orders():
                found = await asked.all(request, answers.OrdersInForce)
                return answers.OrdersInForce(orders=merge_orders(each.orders for each in found.values()))

    async def _resolve(self, request: requests.Resolve, asked: WorkerAnswers, answer: Answer) -> answers.End:
        found = await asked.rows(request, answers.Address, self._readers(asked))
        addresses = list({each.address: each for each in reversed(found)}.values())[::-1]
        for each in addresses[:MAX_RESOLVED]:
            await answer.send(each)
        more = len(addresses) > MAX_RESOLVED
        return answers.End(count=min(len(addresses), MAX_RESOLVED), more=more, missing=asked.missing)

    def _readers(self, asked: WorkerAnswers) -> list[int]:
        """The workers that are asked for the contents of the queue."""
        workers = list(asked.workers())
        return workers[:1] if self._relay.shared else workers


async def _begin(streams: dict[int, Rows], heads: dict[int, answers.DeliveryRow]) -> None:
    """All look for their first delivery at the same time: to find that there is none takes longest."""
    begun = (_advance(worker, streams, heads) for worker in streams)
    # A stream can be closed only when no task is reading it.
    for outcome in await asyncio.gather(*begun, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def _advance(worker: int, streams: dict[int, Rows], heads: dict[int, answers.DeliveryRow]) -> None:
    """Makes the next delivery of this worker its head, if there is one."""
    async for frame in streams[worker]:
        if isinstance(frame, answers.DeliveryRow):
            heads[worker] = frame
            return


def _order(row: answers.DeliveryRow, zone: str | None) -> tuple[object, ...]:
    """The order in which each worker lists: queue by queue, the oldest message first, the outbox last. Pages
    depend on it. The queues of one `zone` come in the order of urgency.
    """
    place = 0 if zone is None else queues_of(zone).index(row.queue)
    return place, is_outbox(MessageId(row.message_id)), row.queue, row.message_id, row.recipient
