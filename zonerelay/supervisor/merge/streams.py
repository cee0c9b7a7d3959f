"""One stream of all workers: what they tell as it happens, each frame with the number of its worker.

The buffers are those of the workers: what the reader does not take, a worker loses and counts. That a worker
has ended is said in the stream; a tail goes on with the worker after it, a transcript with the others.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec

from zonerelay.control.runner import Answer
from zonerelay.operations.answers import End, MailEvent, Missed, TranscriptLine
from zonerelay.operations.catalogue import Call
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import Tail, Transcript
from zonerelay.process.tasks import Tasks
from zonerelay.supervisor.merge.control_client import Relay, WorkerAnswers

LOOK_AGAIN = 1.0
"""Seconds until a worker that has ended, or is new, is asked."""
ROOM = 100
"""Frames between the workers and the reader."""

Told = MailEvent | Missed | TranscriptLine


class LiveStream:
    """Of one request."""

    def __init__(self, relay: Relay, call: Call) -> None:
        self._relay = relay
        self._call = call
        self._request = call.request
        self._told: asyncio.Queue[Told | ControlError] = asyncio.Queue(ROOM)
        self._read: set[int] = set()
        self._sessions: set[tuple[int | None, int]] = set()
        self._octets = 0

    async def run(self, answer: Answer) -> End:
        """Ends when the client leaves; a transcript also with what it may have. Raises ControlError."""
        tasks = Tasks()
        try:
            self._ask_all(tasks)
            while (self._read or isinstance(self._request, Tail)) or not self._told.empty():
                try:
                    async with asyncio.timeout(LOOK_AGAIN):
                        told = await self._told.get()
                except TimeoutError:
                    if isinstance(self._request, Tail):
                        self._ask_all(tasks)
                    continue
                if isinstance(told, ControlError):
                    raise told
                if isinstance(told, TranscriptLine) and (why := self._over(told)):
                    await answer.send(Missed(why=why))
                    break
                await answer.send(told)
        finally:
            await tasks.cancel()
        return End()

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
                    if isinstance(frame, Told):
                        await self._told.put(msgspec.structs.replace(frame, worker=worker))
        except (ControlError, KeyError) as error:  # the worker is no more
            failed = error if isinstance(error, ControlError) else ControlError(f"worker {worker} has ended")
            await self._told.put(failed)
        for why in asked.missing if asked.missed(worker) else ():
            await self._told.put(Missed(why=f"{why}; what it does until it is asked again is missing"))
        if isinstance(self._request, Tail):
            await asyncio.sleep(LOOK_AGAIN)
        self._read.discard(worker)

    def _over(self, line: TranscriptLine) -> str:
        """The reason for which the transcript of all workers ends here, if it does."""
        request = self._request
        assert isinstance(request, Transcript)
        self._octets += len(line.text) + 1
        self._sessions.add((line.worker, line.session))
        if self._octets > request.octets:
            return "it has as many octets as were asked for"
        return (
            "as many sessions as were asked for have begun" if len(self._sessions) > request.sessions else ""
        )
