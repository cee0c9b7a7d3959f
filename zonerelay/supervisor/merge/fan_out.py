"""Forwards operators' requests to all workers, and merges the answers into one answer of the relay.

The catalogue declares how the answers of each operation are merged; more complex merges are methods here.
Lists stay streams: the supervisor holds one row of each worker, never a queue. `EndFrame.missing` names the
workers that do not answer in time; the answer does not wait for them. A message id contains the worker that
accepted the message. If that worker does not have the message, the others are queried, because a spool may
have moved to another worker. A shared queue is read through one worker.

`LiveStream` merges the live streams of all workers, in which each frame has the number of its worker. The
buffers are those of the workers: if the reader is too slow, a worker drops frames and counts them. The end of
a worker is reported in the stream. A tail continues with the worker that replaces it, a transcript with the
others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, aclosing
from typing import Any

import msgspec

from zonerelay import __version__
from zonerelay.control.runner import ResponseStream
from zonerelay.operations import answers, requests
from zonerelay.operations.answers import EndFrame, MailEvent, StreamGap, TranscriptLine
from zonerelay.operations.catalogue import BY_REQUEST, OPERATIONS, OperationCall, operation_of
from zonerelay.operations.errors import ControlError, NotFoundError, UnavailableError
from zonerelay.operations.operation import MergeRule, Operation, ResponseKind
from zonerelay.operations.requests import Tail, Transcript
from zonerelay.process.tasks import Tasks
from zonerelay.supervisor.merge.control_client import Relay, WorkerAnswers
from zonerelay.supervisor.merge.merging import (
    merge_changed,
    merge_explained,
    merge_orders,
    merge_status,
    merge_summaries,
    merged,
    summed,
)

LOOK_AGAIN = 1.0
"""Seconds until a worker that has ended, or is new, is queried again."""
ROOM = 100
"""Frames buffered between the workers and the reader."""

StreamItem = MailEvent | StreamGap | TranscriptLine


class LiveStream:
    """A live stream merged from all workers."""

    def __init__(self, relay: Relay, call: OperationCall) -> None:
        self._relay = relay
        self._call = call
        self._request = call.request
        self._items: asyncio.Queue[StreamItem | ControlError] = asyncio.Queue(ROOM)
        self._read: set[int] = set()
        self._sessions: set[tuple[int | None, int]] = set()
        self._octets = 0

    async def run(self, answer: ResponseStream) -> EndFrame:
        """Send the stream until the client leaves, or until a transcript reaches its limit. Raise
        ControlError.
        """
        tasks = Tasks()
        try:
            self._ask_all(tasks)
            while (self._read or isinstance(self._request, Tail)) or not self._items.empty():
                try:
                    async with asyncio.timeout(LOOK_AGAIN):
                        item = await self._items.get()
                except TimeoutError:
                    if isinstance(self._request, Tail):
                        self._ask_all(tasks)
                    continue
                if isinstance(item, ControlError):
                    raise item
                if isinstance(item, TranscriptLine) and (why := self._over(item)):
                    await answer.send(StreamGap(why=why))
                    break
                await answer.send(item)
        finally:
            await tasks.cancel()
        return EndFrame()

    def _ask_all(self, tasks: Tasks) -> None:
        for worker in self._relay.sockets():
            if worker not in self._read:
                self._read.add(worker)
                tasks.start(self._follow(worker))

    async def _follow(self, worker: int) -> None:
        asked = WorkerAnswers(self._relay, self._call)
        try:
            async with aclosing(asked.of(worker)) as answered:
                async for frame in answered:
                    if isinstance(frame, StreamItem):
                        await self._items.put(msgspec.structs.replace(frame, worker=worker))
        except (ControlError, KeyError) as error:  # the worker no longer exists
            failed = error if isinstance(error, ControlError) else ControlError(f"worker {worker} has ended")
            await self._items.put(failed)
        for why in asked.missing if asked.missed(worker) else ():
            await self._items.put(StreamGap(why=f"{why}; its output is missing until it responds again"))
        if isinstance(self._request, Tail):
            await asyncio.sleep(LOOK_AGAIN)
        self._read.discard(worker)

    def _over(self, line: TranscriptLine) -> str:
        """Return the reason why the transcript of all workers ends here, or "" if it continues."""
        request = self._request
        assert isinstance(request, Transcript)
        self._octets += len(line.text) + 1
        self._sessions.add((line.worker, line.session))
        if self._octets > request.octets:
            return "the requested number of bytes was reached"
        return (
            "the requested number of sessions was reached" if len(self._sessions) > request.sessions else ""
        )


Rows = AsyncGenerator[answers.Frame, None]
Send = Callable[[answers.Frame], Awaitable[None]]
Custom = Callable[[WorkerAnswers], Awaitable[answers.Frame]]


class _Turns:
    """Sends frames. A delivery that waits for a rate is sent with the turns of all workers, because the mail
    of all of them shares the rate.
    """

    def __init__(self, send: Send, status: Callable[[], Awaitable[answers.RelayStatus]]) -> None:
        self._send = send
        self._status = status
        self._found: dict[tuple[str, str], answers.DestinationStatus] | None = None

    async def send(self, frame: answers.Frame) -> None:
        match frame:
            case answers.DeliveryRow():
                frame = await self._row(frame)
            case answers.MessageDetail():
                frame = msgspec.structs.replace(frame, deliveries=await self._rows(frame.deliveries))
            case answers.Count():
                frame = msgspec.structs.replace(frame, sample=await self._rows(frame.sample))
            case answers.Explanation(queued=answers.DeliveryRow() as row):
                frame = msgspec.structs.replace(frame, queued=await self._row(row))
        await self._send(frame)

    async def _rows(self, rows: Iterable[answers.DeliveryRow]) -> tuple[answers.DeliveryRow, ...]:
        return tuple([await self._row(row) for row in rows])

    async def _row(self, row: answers.DeliveryRow) -> answers.DeliveryRow:
        if row.next_turn is None:
            return row
        if self._found is None:
            status = await self._status()
            self._found = {(each.zone, each.hosts): each for each in status.destinations}
        turn = self._found.get((row.zone, row.hosts))
        return row if turn is None or turn.next_turn is None else row.waits_for(turn)


class FanOut:
    """Forwards requests to all workers (implements `control.runner.Handler`)."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._custom: dict[type[requests.Request], Custom] = {
            requests.Status: self._status,
            requests.QueueCount: self._count,
            requests.QueueSummary: self._summary,
            requests.Undo: self._undo,
            requests.Suspend: self._suspend,
            requests.Resume: self._resume,
            requests.Explain: self._explain,
            **dict.fromkeys(requests.CHANGES.values(), self._change),
        }
        missing = {
            each.request for each in OPERATIONS if each.merge.how is MergeRule.CUSTOM
        } ^ self._custom.keys()
        if missing:
            raise AssertionError(f"the fan-out and the catalogue differ: {missing}")

    async def handle(self, request: requests.Request, answer: ResponseStream) -> answers.EndFrame:
        operation, asked = operation_of(request), WorkerAnswers(self._relay, answer.call)
        send = _Turns(answer.send, self._status_now).send
        match operation.merge.how:
            case MergeRule.ALONE:
                await answer.send(answers.Pong(software=__version__, pid=os.getpid()))
            case MergeRule.LIVE:
                return await LiveStream(self._relay, answer.call).run(answer)
            case MergeRule.IN_ORDER:
                return await self._in_order(operation, asked, answer, send)
            case MergeRule.SUM:
                return await self._sum(operation, asked, answer)
            case MergeRule.FIRST_FOUND:
                await self._find(asked, send)
            case MergeRule.CUSTOM:
                await send(await self._custom[type(request)](asked))
            case MergeRule.WORKER:
                raise ControlError("this request is for one worker, not for all")
        return answers.EndFrame(missing=asked.missing)

    async def _in_order(
        self, operation: Operation, asked: WorkerAnswers, answer: ResponseStream, send: Send
    ) -> answers.EndFrame:
        request: Any = answer.call.request
        limit = request.limit + 1 if request.limit else 0
        order, row = operation.merge.order, None
        assert order is not None
        async with AsyncExitStack() as stack:
            heads: dict[int, Any] = {}
            streams: dict[int, Rows] = {}
            for worker in self._workers(operation, asked):
                frames = asked.of(worker, msgspec.structs.replace(request, limit=limit))
                streams[worker] = await stack.enter_async_context(aclosing(frames))
            await _begin(streams, heads)
            while heads:
                if row is not None and answer.done == request.limit:
                    cursor = answers.cursor_of(row)
                    return answers.EndFrame(count=answer.done, more=True, missing=asked.missing, next=cursor)
                worker = min(heads, key=lambda each: order(request, heads[each]))
                row = heads.pop(worker)
                await send(row)
                answer.done += 1
                await _advance(worker, streams, heads)
        return answers.EndFrame(count=answer.done, missing=asked.missing)

    async def _sum(
        self, operation: Operation, asked: WorkerAnswers, answer: ResponseStream
    ) -> answers.EndFrame:
        request: Any = answer.call.request
        assert operation.reply is not None
        found: list[Any] = await asked.rows(operation.reply, self._workers(operation, asked))
        order = operation.merge.order
        if operation.shape is ResponseKind.ONE:
            asked.some(found)
        rows = summed(found, operation.merge)
        if order is not None:
            rows.sort(key=lambda row: order(request, row))
        limit = getattr(request, "limit", len(rows))
        for row in rows[:limit]:
            await answer.send(row)
        return answers.EndFrame(count=len(rows[:limit]), more=len(rows) > limit, missing=asked.missing)

    async def _find(self, asked: WorkerAnswers, send: Send) -> None:
        """Send the answer of the worker that has the requested object."""
        first = int(getattr(asked.call.request, "message_id", "00")[-2:], 16)
        not_found: NotFoundError | None = None
        for worker in sorted(asked.workers(), key=lambda each: each != first):
            try:
                async with aclosing(asked.of(worker)) as answered:
                    async for frame in answered:
                        if not isinstance(frame, answers.EndFrame | answers.Progress):
                            await send(frame)
            except NotFoundError as error:
                not_found = error
                continue
            if not asked.missed(worker):
                return
        if asked.missing or not_found is None:
            raise UnavailableError(
                f"not found on the workers that responded; did not respond: {'; '.join(asked.missing)}"
            )
        raise not_found

    # --- custom merges ------------------------------------------------------------------------------

    async def _status(self, asked: WorkerAnswers) -> answers.RelayStatus:
        found = await asked.all(answers.RelayStatus)
        own = self._relay.status()
        own = msgspec.structs.replace(own, problems=(*own.problems, *asked.missing))
        return merge_status(found, own, shared=self._relay.shared)

    async def _status_now(self) -> answers.RelayStatus:
        return await self._status(WorkerAnswers(self._relay, OperationCall(request=requests.Status())))

    async def _count(self, asked: WorkerAnswers) -> answers.Count:
        request: Any = asked.call.request
        order = BY_REQUEST[requests.QueueList].merge.order
        assert order is not None
        found = asked.some(await asked.rows(answers.Count, self._readers(asked)))
        rows = sorted((row for each in found for row in each.sample), key=lambda row: order(request, row))
        return merged(found, found[0], add="matched", sample=tuple(rows[: request.sample]))

    async def _summary(self, asked: WorkerAnswers) -> answers.Summary:
        return merge_summaries(asked.some(await asked.rows(answers.Summary, self._readers(asked))))

    async def _explain(self, asked: WorkerAnswers) -> answers.Explanation:
        return merge_explained(asked.some([*(await asked.all(answers.Explanation)).values()]))

    async def _change(self, asked: WorkerAnswers) -> answers.ChangeResult:
        shared = self._relay.shared
        # A shared queue is changed by one worker after the other, each of which skips the others' attempts.
        found = await (asked.one_by_one(answers.ChangeResult) if shared else asked.rows(answers.ChangeResult))
        return merge_changed(asked.some(found), shared=shared)

    async def _undo(self, asked: WorkerAnswers) -> answers.ChangeResult:
        """Undo in each worker what that worker has changed, even if the queue is shared."""
        refused: list[ControlError] = []

        async def undo(worker: int) -> answers.ChangeResult | None:
            try:
                return await asked.one(worker, answers.ChangeResult)
            except ControlError as error:
                refused.append(error)
                return None

        found = [each for each in await asyncio.gather(*map(undo, asked.workers())) if each is not None]
        # A worker that did not run then does not have the act.
        refused.sort(key=lambda error: isinstance(error, NotFoundError))
        if not found and (asked.missing or not refused):
            raise UnavailableError(f"not found on the workers that responded: {'; '.join(asked.missing)}")
        if not found:
            raise refused[0]
        notes = [f"partial result: {error}" for error in refused if not isinstance(error, NotFoundError)]
        whole = merge_changed(found, shared=False)
        return msgspec.structs.replace(whole, note="; ".join(filter(None, (whole.note, *notes))))

    async def _suspend(self, asked: WorkerAnswers) -> answers.OrderResult:
        """Suspend in one worker after the other, because the first one assigns the id of a new order."""
        given = asked.some(await asked.one_by_one(answers.OrderResult))
        (order,) = merge_orders([each.order] for each in given)
        return merged(given, given[0], least="first_expiry", order=order)

    async def _resume(self, asked: WorkerAnswers) -> answers.OrdersResult:
        ended = asked.some(await asked.rows(answers.OrdersResult))
        return merged(ended, ended[0], add="released", orders=merge_orders(each.orders for each in ended))

    def _workers(self, operation: Operation, asked: WorkerAnswers) -> list[int]:
        return self._readers(asked) if operation.merge.of_queue else list(asked.workers())

    def _readers(self, asked: WorkerAnswers) -> list[int]:
        """Return the workers to query for the contents of the queue."""
        workers = list(asked.workers())
        return workers[:1] if self._relay.shared else workers


async def _begin(streams: dict[int, Rows], heads: dict[int, Any]) -> None:
    """Request the first row of all streams concurrently."""
    begun = (_advance(worker, streams, heads) for worker in streams)
    # A stream can be closed only when no task is reading it.
    for outcome in await asyncio.gather(*begun, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def _advance(worker: int, streams: dict[int, Rows], heads: dict[int, Any]) -> None:
    """Read the next row of this worker into `heads`, if there is one."""
    async for frame in streams[worker]:
        if isinstance(frame, answers.DeliveryRow):
            heads[worker] = frame
            return
