"""Imports Python code of the operator and runs it in daemon threads. So a call that never returns does not
prevent the process from exiting.
"""

import concurrent.futures
import importlib
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import ModuleType
from typing import Any, Generic, TypeVar

from zonerelay.config.problems import did_you_mean

T = TypeVar("T")


def named(name: str, form: str) -> object:
    """Import and return the object with a name such as "module:Class". `form` is the form that errors
    mention. Raise ValueError with a message for the operator.
    """
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise ValueError(f'expected "{form}", not {name!r}')
    module = _module(module_name)
    found: object = getattr(module, attribute, None)
    if found is None:
        raise ValueError(f"module {module_name!r} has no {attribute!r}{did_you_mean(attribute, dir(module))}")
    return found


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and (name == missing or name.startswith(f"{missing}.")):
            file = f"{missing.partition('.')[0]}.py"
            raise ValueError(
                f"the module {missing!r} was not found; add the directory of {file} to PYTHONPATH "
                f"(systemd: Environment=PYTHONPATH=…), or install it in {sys.prefix}"
            ) from error
        raise ValueError(
            f"cannot import {name!r}: it requires {missing!r}, which is not installed"
        ) from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"cannot import {name!r}: {type(error).__name__}: {error}") from error


class DaemonCall(Generic[T]):
    """A call that is waiting for a thread or running in one. If its `answer` is cancelled before it has
    started, it is skipped; if it has started, it keeps its thread until it ends.
    """

    def __init__(self, function: Callable[[], T], asked: float = 0.0) -> None:
        self.function = function
        self.asked = asked
        self.started = False
        self.answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run(self) -> None:
        try:
            self.answer.set_result(self.function())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting caller
            self.answer.set_exception(error)


class DaemonThreads:
    """A pool of at most `most` daemon threads, which are created on demand."""

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._queue: SimpleQueue[DaemonCall[Any] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._running: set[DaemonCall[Any]] = set()
        self._count = 0

    def submit(self, call: DaemonCall[Any]) -> None:  # Any: callers read their own result
        self._queue.put(call)
        if self._count < self._most and not self._idle.acquire(blocking=False):
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._count += 1

    def stuck(self, since: float) -> bool:
        """Return whether every thread runs a call that was submitted before `since`."""
        running = tuple(self._running)
        return len(running) >= self._most and all(call.asked < since for call in running)

    def close(self) -> None:
        """Stop idle threads now, and busy ones after all waiting calls."""
        for _ in range(self._count):
            self._queue.put(None)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            if call.answer.set_running_or_notify_cancel():
                call.started = True
                self._running.add(call)
                call.run()
                self._running.discard(call)
            del call  # free its data before waiting for the next call
            self._idle.release()
