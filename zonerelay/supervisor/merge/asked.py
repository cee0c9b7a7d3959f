"""The workers that one operator's question is put to, and those of them that did not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol, TypeVar

from zonerelay.control.messages.answers import DeliveryRow, End, Frame, RelayStatus
from zonerelay.control.messages.requests import Request
from zonerelay.supervisor.merge.asking import UnansweredError, ask, frames

F = TypeVar("F")


class Relay(Protocol):
    """What the supervisor knows: where its workers answer, and its own part of the status."""

    @property
    def shared(self) -> bool:
        """All workers have one queue."""

    def sockets(self) -> Mapping[int, Path]: ...

    def unreachable(self) -> Mapping[int, str]:
        """Workers that cannot be asked now, and why."""

    def status(self) -> RelayStatus: ...


class Asked:
    """`missing` names who did not answer, with the reason."""

    def __init__(self, relay: Relay) -> None:
        self._sockets = dict(relay.sockets())
        self._unreachable = dict(relay.unreachable())
        self._missed = {} if relay.shared and self._sockets else dict(self._unreachable)

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(f"worker {worker}: {why}" for worker, why in sorted(self._missed.items()))

    def missed(self, worker: int) -> bool:
        return worker in self._missed

    def workers(self) -> Sequence[int]:
        return sorted(self._sockets)

    async def of(self, worker: int, request: Request) -> AsyncGenerator[Frame, None]:
        """Its frames up to where it stops answering. Raises ControlError as the worker said it."""
        try:
            async with aclosing(frames(self._sockets[worker], request)) as answered:
                async for frame in answered:
                    if isinstance(frame, End) and frame.missing:
                        self._missed[worker] = "; ".join(frame.missing)
                    yield frame
        except UnansweredError as error:
            self._missed[worker] = str(error)

    async def rows(self, worker: int, request: Request) -> AsyncGenerator[DeliveryRow, None]:
        async with aclosing(self.of(worker, request)) as answered:
            async for frame in answered:
                if isinstance(frame, DeliveryRow):
                    yield frame

    async def one(self, worker: int, request: Request, answer: type[F]) -> F | None:
        try:
            return await ask(self._sockets[worker], request, answer)
        except UnansweredError as error:
            self._missed[worker] = str(error)
            return None

    async def all(self, request: Request, answer: type[F]) -> dict[int, F]:
        """The answers of those who gave one, at the same time."""
        workers = self.workers()
        found = await asyncio.gather(*(self.one(worker, request, answer) for worker in workers))
        return {worker: each for worker, each in zip(workers, found, strict=True) if each is not None}

    async def in_turn(self, request: Request, answer: type[F]) -> dict[int, F]:
        """The same, one after the other."""
        found = {}
        for worker in self.workers():
            each = await self.one(worker, request, answer)
            if each is not None:
                found[worker] = each
        return found
