"""Forwards operators' requests to all workers, and merges the answers into one answer of the relay.

The catalogue declares how the answers of each operation are merged.
Lists stay streams: the supervisor holds one row of each worker, never a queue. `EndFrame.missing` names the
workers that do not answer in time; the answer does not wait for them. A message id contains the worker that
accepted the message. If that worker does not have the message, the others are queried, because a spool may
have moved to another worker. A shared queue is read through one worker.

`LiveStream` merges the live streams of all workers, in which each frame has the number of its worker. The
buffers are those of the workers: if the reader is too slow, a worker drops frames and counts them. The end of
a worker is reported in the stream. A tail continues with the worker that replaces it, a transcript with the
others.
"""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from zonerelay import __version__
from zonerelay.control.runner import ResponseStream
from zonerelay.control.socket import SILENCE, NoResponseError, frames
from zonerelay.operations import answers, requests
from zonerelay.operations.answers import EndFrame, Frame, RelayStatus, StreamGap
from zonerelay.operations.catalogue import OperationCall, operation_of
from zonerelay.operations.errors import ControlError, NotFoundError, UnavailableError
from zonerelay.operations.operation import MergeRule, Operation, ResponseKind
from zonerelay.operations.requests import Request, Tail, Transcript
from zonerelay.process.tasks import Tasks
from zonerelay.supervisor.merge.merging import combined, merge_status
from zonerelay.telemetry.events.records import MailEvent, TranscriptLine

F = TypeVar("F")

LOOK_AGAIN = 1.0
"""Seconds until a worker that has ended, or is new, is queried again."""
ROOM = 100
"""Frames buffered between the workers and the reader."""

StreamItem = MailEvent | StreamGap | TranscriptLine


class Relay(Protocol):
    """The part of `RelayState` that requests to workers use (a Protocol)."""

    @property
    def shared(self) -> bool:
        """Whether all workers share one queue."""

    def sockets(self) -> Mapping[int, Path]: ...

    def unreachable(self) -> Mapping[int, str]:
        """Return the reason why each unreachable worker cannot be reached at present."""

    def status(self) -> RelayStatus: ...


class WorkerAnswers:
    """Calls workers and collects their responses. All workers receive the same operation id and the same
    time. `missing` names each worker that did not answer, with the reason.
    """

    def __init__(
        self,
        relay: Relay,
        call: OperationCall,
        *,
        sockets: Mapping[int, Path] | None = None,
        silence: float = SILENCE,
    ) -> None:
        """Prepare a call to all workers that answer, or to those with these `sockets`."""
        self.call = msgspec.structs.replace(
            call, id=call.id or secrets.token_hex(4), at=call.at or time.time()
        )
        self._silence = silence
        self._sockets = dict(relay.sockets() if sockets is None else sockets)
        self.workers = sorted(self._sockets)
        is_whole = sockets is not None or (relay.shared and self._sockets)
        self.missed = {} if is_whole else dict(relay.unreachable())

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(f"worker {worker}: {why}" for worker, why in sorted(self.missed.items()))

    async def of(self, worker: int, request: Request | None = None) -> AsyncGenerator[Frame, None]:
        """Yield the frames that a worker sends in reply, until it stops answering. Raise the ControlError
        that the worker answers with.
        """
        call = self.call if request is None else msgspec.structs.replace(self.call, request=request)
        try:
            async with aclosing(frames(self._sockets[worker], call, silence=self._silence)) as answered:
                async for frame in answered:
                    if isinstance(frame, EndFrame) and frame.missing:
                        self.missed[worker] = "; ".join(frame.missing)
                    yield frame
        except NoResponseError as error:
            self.missed[worker] = str(error)

    async def by_worker(
        self, answer: type[F], workers: Iterable[int], *, in_turn: bool = False
    ) -> dict[int, list[F]]:
        """Call the workers concurrently, or with `in_turn` one after the other, and return their frames of
        one kind.

        An error of one worker does not fail the call, because others may have carried it out: it is in
        `missing`. It is raised if no worker has any frame.
        """
        refused: dict[int, ControlError] = {}
        found: dict[int, list[F]] = {}

        async def of(worker: int) -> None:
            try:
                async with aclosing(self.of(worker)) as answered:
                    found[worker] = [frame async for frame in answered if isinstance(frame, answer)]
            except ControlError as error:
                refused[worker] = error

        if in_turn:
            for worker in workers:
                await of(worker)
        else:
            await asyncio.gather(*map(of, workers))
        # A worker that did not run at that time has not heard of what is asked for.
        errors = {worker: e for worker, e in refused.items() if not isinstance(e, NotFoundError)}
        if refused and not any(found.values()) and (errors or not self.missed):
            raise next(iter((errors or refused).values()))
        self.missed |= {worker: str(error) for worker, error in errors.items()}
        return {worker: found[worker] for worker in sorted(found)}


class LiveStream:
    """A live stream (`tail` or a transcript) that is merged from those of all workers."""

    def __init__(self, relay: Relay, call: OperationCall) -> None:
        self._relay = relay
        self._call = call
        self._request = call.request
        self._items: asyncio.Queue[StreamItem | ControlError | None] = asyncio.Queue(ROOM)
        """Frames, errors, and None for each stream of a worker that has ended."""
        self._read: set[int] = set()
        self._asked: set[int] = set()
        self._refused: dict[int, str] = {}
        """The workers that refuse to send their part, each with the reason, which is reported once."""
        self._sessions: set[tuple[int | None, int]] = set()
        self._octets = 0

    async def run(self, answer: ResponseStream) -> EndFrame:
        """Send the stream until the client leaves, or until a transcript reaches its limit. Raise
        ControlError.
        """
        tasks = Tasks()
        try:
            self._ask_all(tasks)
            if isinstance(self._request, Tail):
                tasks.start(self._ask_again(tasks))
            while self._read or isinstance(self._request, Tail) or not self._items.empty():
                item = await self._items.get()
                if item is None:
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
        for worker, path in self._relay.sockets().items():
            if worker not in self._read:
                self._read.add(worker)
                self._asked.add(worker)
                tasks.start(self._follow(worker, path))

    async def _ask_again(self, tasks: Tasks) -> None:
        while True:
            await asyncio.sleep(LOOK_AGAIN)
            self._ask_all(tasks)

    async def _follow(self, worker: int, path: Path) -> None:
        asked = WorkerAnswers(self._relay, self._call, sockets={worker: path})
        try:
            async with aclosing(asked.of(worker)) as answered:
                async for frame in answered:
                    self._refused.pop(worker, None)
                    if isinstance(frame, StreamItem):
                        await self._items.put(msgspec.structs.replace(frame, worker=worker))
        except ControlError as error:
            if self._refused.get(worker) != (why := str(error)):
                self._refused[worker] = asked.missed[worker] = why
            if self._refused.keys() >= self._asked:
                await self._items.put(error)
        for why in asked.missing:
            await self._items.put(StreamGap(why=f"{why}; its output is missing until it responds again"))
        self._read.discard(worker)
        await self._items.put(None)

    def _over(self, line: TranscriptLine) -> str:
        """Return the reason why the merged transcript ends with this line, or "" if it continues."""
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


class _FrameSender:
    """Sends frames to the client. In rows of deliveries that wait for a rate, the waiting time is corrected,
    because the mail of all workers shares the rate.
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

    async def handle(self, request: requests.Request, answer: ResponseStream) -> answers.EndFrame:
        operation, asked = operation_of(request), WorkerAnswers(self._relay, answer.call)
        send = _FrameSender(answer.send, self._status_now).send
        match operation.merge.how:
            case MergeRule.ALONE:
                await answer.send(answers.Pong(software=__version__, pid=os.getpid()))
            case MergeRule.LIVE:
                return await LiveStream(self._relay, answer.call).run(answer)
            case MergeRule.IN_ORDER:
                return await self._in_order(operation, asked, answer, send)
            case MergeRule.SUM:
                return await self._merge(operation, asked, send)
            case MergeRule.FIRST_FOUND:
                await self._find(asked, send)
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
            await _begin(streams, heads, asked.missed)
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

    async def _merge(self, operation: Operation, asked: WorkerAnswers, send: Send) -> answers.EndFrame:
        rule, request = operation.merge, asked.call.request
        assert operation.reply is not None
        parts: dict[int, list[Any]] = await asked.by_worker(
            operation.reply,
            self._workers(operation, asked),
            in_turn=rule.in_turn == "always" or (rule.in_turn == "shared" and self._relay.shared),
        )
        if isinstance(request, requests.Status):
            rows = [self._whole_status(asked, parts)]
        else:
            found = [frame for frames in parts.values() for frame in frames]
            if operation.shape is ResponseKind.ONE and not found:
                raise UnavailableError(f"no worker responded: {'; '.join(asked.missing)}")
            rows = combined(found, rule, request, shared=self._relay.shared)
        limit = getattr(request, rule.limit, len(rows))
        for row in rows[:limit]:
            await send(row)
        return answers.EndFrame(count=len(rows[:limit]), more=len(rows) > limit, missing=asked.missing)

    async def _find(self, asked: WorkerAnswers, send: Send) -> None:
        """Send the answer of the worker that has the requested object. Once a worker has sent a part of its
        answer, no other worker is asked. An error of another worker is raised only if no worker has the
        object.
        """
        first = int(getattr(asked.call.request, "message_id", "00")[-2:], 16)
        refused, is_begun = list[ControlError](), False
        for worker in sorted(asked.workers, key=lambda each: each != first):
            try:
                async with aclosing(asked.of(worker)) as answered:
                    async for frame in answered:
                        if not isinstance(frame, answers.EndFrame | answers.Progress):
                            is_begun = True
                            await send(frame)
            except ControlError as error:
                if is_begun:
                    raise
                refused.append(error)
                continue
            if worker not in asked.missed:
                return
            if is_begun:
                raise UnavailableError(f"the response is incomplete: {'; '.join(asked.missing)}")
        refused.sort(key=lambda error: isinstance(error, NotFoundError))
        if not refused or (asked.missing and isinstance(refused[0], NotFoundError)):
            raise UnavailableError(
                f"not found on the workers that responded; did not respond: {'; '.join(asked.missing)}"
            )
        raise refused[0]

    def _whole_status(
        self, asked: WorkerAnswers, parts: Mapping[int, Sequence[answers.RelayStatus]]
    ) -> answers.RelayStatus:
        own = self._relay.status()
        own = msgspec.structs.replace(own, problems=(*own.problems, *asked.missing))
        found = {worker: frames[-1] for worker, frames in parts.items() if frames}
        return merge_status(found, own, shared=self._relay.shared)

    async def _status_now(self) -> answers.RelayStatus:
        asked = WorkerAnswers(self._relay, OperationCall(request=requests.Status()))
        return self._whole_status(asked, await asked.by_worker(answers.RelayStatus, asked.workers))

    def _workers(self, operation: Operation, asked: WorkerAnswers) -> Sequence[int]:
        """Return the workers to query: one for a shared queue, because it sees all of it, and
        otherwise all.
        """
        workers = asked.workers
        return workers[:1] if operation.merge.of_queue and self._relay.shared else workers


async def _begin(streams: dict[int, Rows], heads: dict[int, Any], missed: dict[int, str]) -> None:
    """Request the first row of each worker's stream, concurrently. Workers that refuse are `missed`, unless
    all do.
    """
    begun = (_advance(worker, streams, heads) for worker in streams)
    # A stream can be closed only when no task is reading it.
    outcomes = await asyncio.gather(*begun, return_exceptions=True)
    errors = {worker: e for worker, e in zip(streams, outcomes, strict=True) if e is not None}
    for worker, error in errors.items():
        if not isinstance(error, ControlError) or len(errors) == len(streams):
            raise error
        missed[worker] = str(error)


async def _advance(worker: int, streams: dict[int, Rows], heads: dict[int, Any]) -> None:
    """Read the next delivery row of this worker into `heads`, if there is one."""
    async for frame in streams[worker]:
        if isinstance(frame, answers.DeliveryRow):
            heads[worker] = frame
            return
