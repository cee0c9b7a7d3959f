"""Calls an operator's policy in dedicated threads and within a time limit.

Promises: `ask` and `close` end within the time limit. If a policy raises an exception, exceeds the limit,
gets no free thread or returns an invalid answer, the client gets a generic 451, and the failure is logged and
counted. The relay continues, and a late answer is discarded. Events whose methods the policy does not
override cost nothing.

The operator's code can block neither the event loop nor the process's exit: `def` methods run in at most
`MAX_THREADS` threads, `async def` methods on an event loop in a dedicated thread, and all of them are daemon
threads, including those behind `asyncio.to_thread` on that event loop. No exception of that code leaves
`result_of` and `result_of_async`, not even SystemExit and KeyboardInterrupt. They also check the result,
because even that may run the operator's code.

Limits of threads: a policy in pure Python shares the interpreter with the relay, and C code that does not
release the GIL, or `os._exit`, stops everything.

The module also imports the objects that the options `policy` and `authenticator` of a listener name, and
creates instances. A policy is a class derived from `Policy`, or an aiosmtpd handler with methods such as
handle_DATA: either a class whose constructor needs no arguments, or an object. aiosmtpd is imported only if
it is needed. Every failure is a ValueError with a message for the operator.
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import re
import threading
from collections.abc import Awaitable, Callable, Collection
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from itertools import product
from typing import Any, ParamSpec, TypeVar

from zonerelay.inbound.policy import api
from zonerelay.inbound.policy.api import Decision, Event, FailureKind, Policy, PolicyContext, PolicyFailure
from zonerelay.model.reply import Reply
from zonerelay.process.operator_code import DaemonCall, DaemonThreads, named
from zonerelay.telemetry.events.events import Events

MAX_DETAIL = 500


Result = Decision | PolicyFailure
_RESULTS = (Decision, api.Changes, PolicyFailure)  # exactly these classes: a subclass is an operator's code


def result_of(question: Callable[[], object]) -> Result:
    try:
        return understood(question())
    except BaseException as error:  # noqa: BLE001 - the thread must outlive it
        return PolicyFailure(FailureKind.ERROR, described(error))


async def result_of_async(question: Callable[[], object]) -> Result:
    try:
        answer = question()
        return understood(await answer if isinstance(answer, Awaitable) else answer)
    except BaseException as error:  # noqa: BLE001 - SystemExit would end the loop
        return PolicyFailure(FailureKind.ERROR, described(error))


def understood(answer: object) -> Result:
    if answer is None:
        return api.ACCEPT
    if isinstance(answer, Decision | PolicyFailure) and type(answer) in _RESULTS:
        return answer
    hint = ""
    if inspect.iscoroutine(answer):
        answer.close()
        hint = ": write the method as async def"
    kind = type(answer).__name__
    return PolicyFailure(FailureKind.BAD_DECISION, f"returned {kind} instead of a Decision or None{hint}")


def described(error: BaseException) -> str:
    """Return a description of an exception, with the innermost line of the operator's code."""
    try:
        text = str(error)[:MAX_DETAIL]
    except BaseException:  # noqa: BLE001 - it is the operator's __str__
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


MAX_THREADS = 8
MAX_CALLS = 1000  # on the event loop, including calls that do not end when they are cancelled
GRACE = 0.5  # seconds that cancelled tasks may take to end

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


class LoopThread:
    """A daemon thread that runs an event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._executor = _DaemonExecutor(name)
        self._running = 0  # calls
        self._waiting: dict[DaemonCall[Any], None] = {}  # submitted calls that the event loop has not started
        self._closing = False
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    def submit(self, call: DaemonCall[Any]) -> None:  # Any: as in `DaemonThreads`
        """Run a function that returns an awaitable on the event loop of the thread. Cancelling the answer
        also cancels a call that has started.
        """
        self._waiting[call] = None
        call.answer = asyncio.run_coroutine_threadsafe(self._perform(call), self._running_loop())
        call.answer.add_done_callback(lambda _: self._forget(call))

    def stuck(self, since: float) -> bool:
        """Return whether the event loop is blocked: it runs too many calls, or has not begun a call that is
        older than `since`.
        """
        return self._running >= MAX_CALLS or any(call.asked < since for call in tuple(self._waiting))

    async def close(self, timeout: float) -> None:
        """Cancel all tasks and end the thread, waiting at most `timeout` seconds."""
        loop, self._closing = self._loop, True
        self._executor.shutdown(wait=False)
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.wait((asyncio.wrap_future(self._ended),), timeout=timeout)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            loop.set_default_executor(self._executor)
            threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True).start()
            self._loop = loop
        return self._loop

    # ---- in the thread -----------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closing:
            try:
                loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - a task of the policy's own asked to exit
                _log.error("a background task of a policy failed: %s", described(error))
        with contextlib.suppress(BaseException):
            _cancel_all(loop)
        loop.close()
        self._ended.set_result(None)

    def _forget(self, call: DaemonCall[Any]) -> None:
        """Forget a cancelled call as soon as the event loop is not blocked."""
        with contextlib.suppress(RuntimeError):  # the loop was closed, and everything cancelled
            self._running_loop().call_soon_threadsafe(self._waiting.pop, call, None)

    async def _perform(self, call: DaemonCall[Any]) -> object:
        self._waiting.pop(call, None)
        call.started = True
        self._running += 1
        try:
            return await call.function()
        finally:
            self._running -= 1


class _DaemonExecutor(concurrent.futures.ThreadPoolExecutor):
    """A thread pool for `asyncio.to_thread` that does not join its threads at exit, unlike its base class."""

    def __init__(self, name: str) -> None:
        super().__init__(max_workers=1)
        self._daemons = DaemonThreads(f"{name}-executor", MAX_THREADS)

    def submit(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        call = DaemonCall(partial(function, *args, **kwargs))
        self._daemons.submit(call)
        return call.answer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        del wait, cancel_futures
        self._daemons.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE))
    loop.run_until_complete(loop.shutdown_asyncgens())


NOT_AVAILABLE = Decision(reply=Reply(451, "3.0", "Policy not available now"))

_CHOOSES_ZONE = frozenset({api.Mail, api.Rcpt, api.Headers, api.EndOfData})
_EDITS_HEADER = frozenset({api.Connect, api.Helo, api.Auth, api.Mail, api.Rcpt, api.Headers})
_CLOSE = "close"


PolicyStep = tuple[Callable[..., object], bool]
"""A method of a policy, and whether it is `async def`."""


@dataclass(eq=False, repr=False)
class PolicyRunner:
    """Runs one policy of one listener, with its authenticator if there is one.

    `zones` returns the names of the zones that a decision may choose.
    """

    policy: Policy
    _: KW_ONLY
    timeout: float
    events: Events
    zones: Callable[[], Collection[str]]
    authenticator: InitVar[Callable[[api.PresentedLogin], object] | None] = None

    def __post_init__(self, authenticator: Callable[[api.PresentedLogin], object] | None) -> None:
        policy, events = self.policy, self.events
        self._steps: dict[type[Event], PolicyStep] = {
            event: found for event in policy.events if (found := overridden(policy, event.step))
        }
        if authenticator is not None:
            self._steps[api.PresentedLogin] = authenticator, inspect.iscoroutinefunction(authenticator)
        steps = (*(event.step for event in self._steps), *([_CLOSE] if overridden(policy, _CLOSE) else []))
        events.metrics.policy_failures.declare(product(steps, FailureKind))
        self._threads = DaemonThreads("policy", MAX_THREADS)
        self._loop = LoopThread("policy-loop")
        self._closed = False
        self.asked: frozenset[type[Event]] = frozenset(self._steps)

    async def ask(self, event: Event) -> Decision:
        """Return the policy's decision about an event."""
        step = self._steps.get(type(event))
        if step is None:
            return api.ACCEPT
        method, is_async = step
        began = asyncio.get_running_loop().time()
        result = await self._call(is_async, partial(method, event))
        if isinstance(result, Decision):
            result = self._checked(event, result)
        if isinstance(result, Decision):
            self.events.metrics.policy.observe(asyncio.get_running_loop().time() - began)
            return result
        self.events.policy_failed(event.step, result.kind, result.detail)
        return NOT_AVAILABLE

    async def close(self) -> None:
        """Call the policy's `close` method, then end its threads. Raise only CancelledError."""
        if self._closed:
            return
        try:
            if found := overridden(self.policy, _CLOSE):
                method, is_async = found
                result = await self._call(is_async, method)
                if isinstance(result, PolicyFailure):
                    self.events.policy_failed(_CLOSE, result.kind, result.detail)
        except Exception as error:  # noqa: BLE001 - the relay stops all the same
            self.events.error("policy", error)
        finally:
            self._closed = True
            self._threads.close()
            await self._loop.close(self.timeout)

    async def _call(self, is_async: bool, question: Callable[[], object]) -> Result:
        loop = asyncio.get_running_loop()
        executor = self._loop if is_async else self._threads
        if self._closed or executor.stuck(loop.time() - self.timeout):
            return PolicyFailure(FailureKind.BUSY, "all threads are busy with events that timed out")
        call: DaemonCall[Any] = DaemonCall(
            partial(result_of_async if is_async else result_of, question), loop.time()
        )
        executor.submit(call)
        answer: asyncio.Future[Result] = asyncio.wrap_future(call.answer)
        try:
            await asyncio.wait((answer,), timeout=self.timeout)
        finally:
            if not answer.done():
                answer.cancel()
                call.function = lambda: None  # so that a waiting call keeps no message in memory
        if not answer.cancelled():
            return answer.result()
        if not call.started:
            return PolicyFailure(FailureKind.BUSY, f"no thread was available within {self.timeout:g} s")
        return PolicyFailure(FailureKind.TIMEOUT, f"timed out after {self.timeout:g} s")

    def _checked(self, event: Event, decision: Decision) -> Result:
        problem = ""
        if decision.zone:
            if type(event) not in _CHOOSES_ZONE:
                problem = f"a zone cannot be chosen at {event.step}"
            elif decision.zone not in self.zones():
                problem = f"zone {decision.zone!r} does not exist"
        if decision.edits_header and type(event) not in _EDITS_HEADER:
            problem = f"the header cannot be changed at {event.step}; change it at headers"
        return PolicyFailure(FailureKind.BAD_DECISION, problem) if problem else decision


def overridden(policy: Policy, name: str) -> PolicyStep | None:
    """Return a method of the policy and whether it is a coroutine function, or None if it is not
    overridden.
    """
    method, base = getattr(policy, name, None), getattr(Policy, name, None)
    if method is None or getattr(method, "__func__", method) is base:
        return None
    return method, inspect.iscoroutinefunction(method)


_HOOK = re.compile(r"handle_[A-Z]+|process_message")

Made = TypeVar("Made")


def load_policy(name: str, context: PolicyContext) -> Policy:
    """Import the operator's module and create the policy. There is no time limit, because this happens only
    at a start or reload.

    Raise ValueError with a message for the operator on failure.
    """
    found = named(name, "module:Class")
    if not (inspect.isclass(found) and issubclass(found, Policy)):
        if not any(_HOOK.fullmatch(each) for each in dir(found)):
            what = "class" if inspect.isclass(found) else "object"
            raise ValueError(
                f"{name} is neither a subclass of zonerelay.inbound.policy.Policy nor an aiosmtpd handler: "
                f"this {what} has no method such as handle_DATA"
            )
        return _made(name, lambda: _handler_policy(found, context))
    if not any(getattr(found, e.step) is not getattr(Policy, e.step) for e in api.EVENTS):
        steps = ", ".join(event.step for event in api.EVENTS)
        raise ValueError(f"{name} has no method for an event and would never be called; methods are {steps}")
    return _made(name, lambda: found(context))


def load_authenticator(name: str, context: PolicyContext) -> Callable[[api.PresentedLogin], object]:
    """Import the operator's authenticator, and return a function that calls it. Raise ValueError as
    `load_policy` does.
    """
    found = named(name, "module:Class")
    check: Any = _made(name, found) if inspect.isclass(found) else found  # Any: an operator's object
    expected = (
        "a callable with (server, session, envelope, mechanism, auth_data), as authenticators of aiosmtpd"
    )
    try:
        inspect.signature(check).bind(None, None, None, "PLAIN", None)
    except TypeError as error:
        raise ValueError(f"{name} is not {expected}: {error}") from error
    from zonerelay.inbound.policy.aiosmtpd_handler import authenticator_step  # noqa: PLC0415

    return authenticator_step(check, context.hostname)


def _handler_policy(found: object, context: PolicyContext) -> Policy:
    if context.file is not None:
        raise ValueError("policy_file is not passed to an aiosmtpd handler; remove it")
    # Imported here, so that aiosmtpd uses no memory unless there is a handler.
    from zonerelay.inbound.policy.aiosmtpd_handler import HandlerPolicy  # noqa: PLC0415

    return HandlerPolicy(_object(found), context)


def _object(found: object) -> object:
    if not inspect.isclass(found):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        remedy = "create the object in a module of your own, and name the object instead of the class"
        raise ValueError(f"{error}; {remedy}") from error
    made: object = found()
    return made


def _made(name: str, make: Callable[[], Made]) -> Made:
    try:
        return make()
    except ValueError as error:
        # The text is a message for the operator, as the base class requires.
        raise ValueError(f"{name} cannot be used: {error}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} cannot be used: {type(error).__name__}: {error}") from error
