"""The supervisor's client of the workers' control sockets: sends a request to one or all workers and reads
the answers.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from zonerelay.control.frames import SILENCE, NoResponseError, frames
from zonerelay.operations.answers import EndFrame, Frame, RelayStatus
from zonerelay.operations.catalogue import OperationCall
from zonerelay.operations.errors import ControlError, NotFoundError, UnavailableError
from zonerelay.operations.requests import Request

F = TypeVar("F")


class Relay(Protocol):
    """The part of `RelayState` that the control client needs."""

    @property
    def shared(self) -> bool:
        """Whether all workers have one queue."""

    def sockets(self) -> Mapping[int, Path]: ...

    def unreachable(self) -> Mapping[int, str]:
        """Return the workers that cannot be reached now, each with the reason."""

    def status(self) -> RelayStatus: ...


class WorkerAnswers:
    """Calls workers and collects their responses. All workers get the same id for what they begin, and the
    same time. `missing` names each worker that did not answer, with the reason.
    """

    def __init__(
        self,
        relay: Relay,
        call: OperationCall,
        *,
        sockets: Mapping[int, Path] | None = None,
        silence: float = SILENCE,
    ) -> None:
        """Create the caller of all workers that answer, or of those with these `sockets`."""
        self.call = msgspec.structs.replace(
            call, id=call.id or secrets.token_hex(4), at=call.at or time.time()
        )
        self._silence = silence
        self._sockets = dict(relay.sockets() if sockets is None else sockets)
        is_whole = sockets is not None or (relay.shared and self._sockets)
        self._missed = {} if is_whole else dict(relay.unreachable())

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(f"worker {worker}: {why}" for worker, why in sorted(self._missed.items()))

    def missed(self, worker: int) -> bool:
        return worker in self._missed

    def workers(self) -> Sequence[int]:
        return sorted(self._sockets)

    async def of(self, worker: int, request: Request | None = None) -> AsyncGenerator[Frame, None]:
        """Yield the frames of a worker until it stops answering. Raise the ControlError that the worker
        answers with.
        """
        call = self.call if request is None else msgspec.structs.replace(self.call, request=request)
        try:
            async with aclosing(frames(self._sockets[worker], call, silence=self._silence)) as answered:
                async for frame in answered:
                    if isinstance(frame, EndFrame) and frame.missing:
                        self._missed[worker] = "; ".join(frame.missing)
                    yield frame
        except NoResponseError as error:
            self._missed[worker] = str(error)

    async def by_worker(
        self, answer: type[F], workers: Iterable[int], *, in_turn: bool = False, partial: bool = False
    ) -> dict[int, list[F]]:
        """Call the workers at the same time, or one after the other, and return their frames of one kind.

        A NotFoundError, with `partial` every ControlError, is raised only if no worker has any frame.
        """
        ignored = ControlError if partial else NotFoundError
        refused: dict[int, ControlError] = {}
        found: dict[int, list[F]] = {}

        async def of(worker: int) -> None:
            try:
                async with aclosing(self.of(worker)) as answered:
                    found[worker] = [frame async for frame in answered if isinstance(frame, answer)]
            except ignored as error:
                refused[worker] = error

        if in_turn:
            for worker in workers:
                await of(worker)
        else:
            await asyncio.gather(*map(of, workers))
        # A worker that did not run at that time has not heard of what is asked for.
        errors = {worker: e for worker, e in refused.items() if not isinstance(e, NotFoundError)}
        if refused and not any(found.values()) and not self._missed:
            raise next(iter((errors or refused).values()))
        self._missed |= {worker: str(error) for worker, error in errors.items()}
        return {worker: found[worker] for worker in sorted(found)}

    def some(self, found: Sequence[F]) -> Sequence[F]:
        """Return the answers. Raise UnavailableError if no worker has answered."""
        if not found:
            raise UnavailableError(f"no worker could answer: {'; '.join(self.missing)}")
        return found
