"""A bounded cache of answers that joins equal questions.

The oldest entry makes room for a new one. Callers with the same question wait for one task, so that a caller
that is cancelled does not take the answer from the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Generic

from zonerelay.model.clock import Clock
from zonerelay.routing.dns.answers import DnsAnswer, Record

Question = tuple[str, str]


class AnswerCache(Generic[Record]):
    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit = max(limit, 1)
        self._clock = clock
        self._answers: dict[Question, DnsAnswer[Record]] = {}
        self._asking: dict[Question, asyncio.Task[DnsAnswer[Record]]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    async def get(
        self, question: Question, ask: Callable[[], Coroutine[None, None, DnsAnswer[Record]]]
    ) -> DnsAnswer[Record]:
        """Returns the cached answer, or the one that `ask` brings. `ask` must not raise."""
        answer = self._answers.get(question)
        if answer is not None and answer.expires > self._clock.monotonic():
            return answer
        task = self._asking.get(question)
        if task is None:
            task = self._asking[question] = asyncio.get_running_loop().create_task(self._fill(question, ask))
        return await asyncio.shield(task)

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fill(
        self, question: Question, ask: Callable[[], Coroutine[None, None, DnsAnswer[Record]]]
    ) -> DnsAnswer[Record]:
        try:
            answer = await ask()
        finally:
            del self._asking[question]
        self._answers.pop(question, None)
        while len(self._answers) >= self._limit:
            del self._answers[next(iter(self._answers))]
        self._answers[question] = answer
        return answer
