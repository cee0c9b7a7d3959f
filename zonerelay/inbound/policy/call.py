"""One call of an operator's code, and its result.

It runs in the operator's threads. No exception of that code leaves `run` and `run_async`, SystemExit and
KeyboardInterrupt included; the result is checked there as well, since even that may run the operator's code.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from zonerelay.inbound.policy.api import ACCEPT, Decision
from zonerelay.inbound.policy.changes import Changes

MAX_DETAIL = 500


class FailureKind(enum.StrEnum):
    """A metric label: the list is fixed."""

    TIMEOUT = "timeout"
    ERROR = "error"
    BUSY = "busy"
    BAD_DECISION = "bad-decision"


@dataclass(frozen=True, slots=True)
class Failure:
    """A call without a usable result; `detail` is for the operator."""

    kind: FailureKind
    detail: str


Result = Decision | Failure
_RESULTS = (Decision, Changes, Failure)  # exactly these: a subclass is an operator's code


class Call:
    """One question on its way through a thread. `answer` is a future of the loop that asks."""

    __slots__ = ("_loop", "answer", "asked", "given_up", "question", "started", "task")

    def __init__(self, question: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        self.question = question
        self.answer: asyncio.Future[Result] = loop.create_future()
        self.asked = loop.time()
        self.started = False
        self.given_up = False  # the caller no longer waits
        self.task: asyncio.Task[None] | None = None
        self._loop = loop

    def run(self) -> None:
        try:
            result = understood(self.question())
        except BaseException as error:  # noqa: BLE001 - the thread must outlive it
            result = Failure(FailureKind.ERROR, described(error))
        self._reply(result)

    async def run_async(self) -> None:
        try:
            # Only questions of `async def` methods come here.
            result = understood(await _awaited(self.question()))
        except BaseException as error:  # noqa: BLE001 - SystemExit would end the loop
            result = Failure(FailureKind.ERROR, described(error))
        self._reply(result)

    def _reply(self, result: Result) -> None:
        # A closed loop means that no caller waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_resolve, self.answer, result)


def understood(answer: object) -> Result:
    if answer is None:
        return ACCEPT
    if isinstance(answer, Decision | Failure) and type(answer) in _RESULTS:
        return answer
    hint = ""
    if inspect.iscoroutine(answer):
        answer.close()
        hint = ": write the method as async def"
    kind = type(answer).__name__
    return Failure(FailureKind.BAD_DECISION, f"answered {kind} instead of a Decision or None{hint}")


def described(error: BaseException) -> str:
    """Return the text of an exception, with the deepest line of the operator's code."""
    try:
        text = str(error)[:MAX_DETAIL]
    except BaseException:  # noqa: BLE001 - it is a stranger's __str__
        text = "(its text cannot be shown)"
    where = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if not module.startswith("zonerelay.") or module.startswith("zonerelay.policies."):
            where = f" at {code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {text}{where}"


async def _awaited(answer: object) -> object:
    return await answer if isinstance(answer, Awaitable) else answer


def _resolve(answer: asyncio.Future[Result], result: Result) -> None:
    if not answer.done():  # else it is late, and dropped
        answer.set_result(result)
