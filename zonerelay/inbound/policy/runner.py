"""Calls an operator's policy in dedicated threads and within a time limit.

Promises: `ask` and `close` end within the time limit and raise only CancelledError. If a policy raises an
exception, exceeds the limit, gets no free thread or returns an invalid answer, the client gets a generic 451,
and the failure is logged and counted. The relay continues, and a late answer is discarded. Events whose
methods the policy does not override cost nothing.

Limits of threads: a policy in pure Python shares the interpreter with the relay, and C code that does not
release the GIL, or `os._exit`, stops everything.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from zonerelay.inbound.policy.api import (
    ACCEPT,
    Auth,
    Connect,
    Decision,
    EndOfData,
    Event,
    Headers,
    Helo,
    Mail,
    Policy,
    PresentedLogin,
    Rcpt,
)
from zonerelay.inbound.policy.threads import (
    FailureKind,
    LoopThread,
    PolicyCall,
    PolicyFailure,
    Result,
    Threads,
    result_of,
    result_of_async,
)
from zonerelay.model.reply import Reply
from zonerelay.telemetry.events.events import Events

NOT_AVAILABLE = Decision(reply=Reply(451, "3.0", "Policy not available now"))

_CHOOSES_ZONE = frozenset({Mail, Rcpt, Headers, EndOfData})
_EDITS_HEADER = frozenset({Connect, Helo, Auth, Mail, Rcpt, Headers})
_CLOSE = "close"


@dataclass(frozen=True, slots=True)
class _PolicyStep:
    """One step of a policy and its time limit."""

    method: Callable[[Any], object]  # Any: the event of this step
    is_async: bool


class PolicyRunner:
    """Runs one policy of one listener, with its authenticator if there is one.

    `zones` returns the names of the zones that a decision may choose.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        timeout: float,
        events: Events,
        zones: Callable[[], Collection[str]],
        authenticator: Callable[[PresentedLogin], object] | None = None,
    ) -> None:
        self._policy = policy
        self._timeout = timeout
        self._events = events
        self._zones = zones
        self._steps = {
            event: _PolicyStep(*found) for event in policy.events if (found := overridden(policy, event.step))
        }
        if authenticator is not None:
            self._steps[PresentedLogin] = _PolicyStep(
                authenticator, inspect.iscoroutinefunction(authenticator)
            )
        steps = (*(event.step for event in self._steps), *([_CLOSE] if overridden(policy, _CLOSE) else []))
        events.metrics.policy_failures.declare(product(steps, FailureKind))
        self._threads = Threads("policy")
        self._loop = LoopThread("policy-loop")
        self._closed = False
        self.asked: frozenset[type[Event]] = frozenset(self._steps)

    async def ask(self, event: Event) -> Decision:
        """Return the policy's decision about an event. Raise only CancelledError."""
        step = self._steps.get(type(event))
        if step is None:
            return ACCEPT
        try:
            began = asyncio.get_running_loop().time()
            result = await self._call(step.is_async, partial(step.method, event))
            if isinstance(result, Decision):
                result = self._checked(event, result)
            if isinstance(result, Decision):
                self._events.metrics.policy.observe(asyncio.get_running_loop().time() - began)
                return result
        except Exception as error:  # noqa: BLE001 - unknown trouble is temporary (rule 3)
            self._events.error("policy", error)
            return NOT_AVAILABLE
        self._events.policy_failed(event.step, result.kind, result.detail)
        return NOT_AVAILABLE

    async def close(self) -> None:
        """Call the policy's `close`, then end its threads. Raise only CancelledError."""
        if self._closed:
            return
        try:
            if found := overridden(self._policy, _CLOSE):
                method, is_async = found
                result = await self._call(is_async, method)
                if isinstance(result, PolicyFailure):
                    self._events.policy_failed(_CLOSE, result.kind, result.detail)
        except Exception as error:  # noqa: BLE001 - the relay stops all the same
            self._events.error("policy", error)
        finally:
            self._closed = True
            self._threads.close()
            await self._loop.close(self._timeout)

    async def _call(self, is_async: bool, question: Callable[[], object]) -> Result:
        loop = asyncio.get_running_loop()
        executor = self._loop if is_async else self._threads
        if self._closed or executor.stuck(loop.time() - self._timeout):
            return PolicyFailure(FailureKind.BUSY, "all threads are busy with events that timed out")
        call: PolicyCall[Any] = PolicyCall(
            partial(result_of_async if is_async else result_of, question), loop.time()
        )
        executor.submit(call)
        answer: asyncio.Future[Result] = asyncio.wrap_future(call.answer)
        try:
            await asyncio.wait((answer,), timeout=self._timeout)
        finally:
            if not answer.done():
                answer.cancel()
                call.function = _nothing  # so that a waiting call keeps no message in memory
        if not answer.cancelled():
            return answer.result()
        if not call.started:
            return PolicyFailure(FailureKind.BUSY, f"no thread was available within {self._timeout:g} s")
        return PolicyFailure(FailureKind.TIMEOUT, f"timed out after {self._timeout:g} s")

    def _checked(self, event: Event, decision: Decision) -> Result:
        problem = ""
        if decision.zone:
            if type(event) not in _CHOOSES_ZONE:
                problem = f"a zone cannot be chosen at {event.step}"
            elif decision.zone not in self._zones():
                problem = f"zone {decision.zone!r} does not exist"
        if decision.edits_header and type(event) not in _EDITS_HEADER:
            problem = f"the header cannot be changed at {event.step}; change it at headers"
        return PolicyFailure(FailureKind.BAD_DECISION, problem) if problem else decision


def _nothing() -> None:
    return


def overridden(policy: Policy, name: str) -> tuple[Callable[..., object], bool] | None:
    """Return the overridden method and whether it is `async def`, or None if it is the method of the base
    class.
    """
    method, base = getattr(policy, name, None), getattr(Policy, name, None)
    if method is None or getattr(method, "__func__", method) is base:
        return None
    return method, inspect.iscoroutinefunction(method)
