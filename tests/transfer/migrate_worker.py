"""Carries out `spool migrate`, and kills itself at a step: before or after something becomes durable.

    python -m tests.transfer.migrate_worker CONFIG OTHER STEP

A negative STEP interrupts it, as Ctrl-C does; 0 lets it come to its end. Pages and stretches are short, so
that a few messages make many steps.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any  # what is watched passes through

from zonerelay.cli.main import main
from zonerelay.cli.spool import migrate, stopped
from zonerelay.cli.spool.stopped import opened
from zonerelay.config.settings import Settings
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.store.contract import Store
from zonerelay.transfer import migration
from zonerelay.transfer.migration import MigrationJournal

STEP = int(sys.argv[3])
_count = itertools.count(1)


def step() -> None:
    if next(_count) == abs(STEP):
        os.kill(os.getpid(), signal.SIGKILL if STEP > 0 else signal.SIGINT)


class Watched:
    """A store whose durable changes are steps."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def update(
        self, keys: Collection[DeliveryKey], change: Callable[[Delivery], Delivery | None]
    ) -> dict[DeliveryKey, Delivery]:
        step()
        done = await self._store.update(keys, change)
        step()
        return done


@asynccontextmanager
async def watched(settings: Settings, worker: int = 0) -> AsyncIterator[Any]:
    async with opened(settings, worker) as store:
        yield Watched(store)


def watch(owner: type, name: str) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def watched(*arguments: Any) -> Any:
        step()
        done = method(*arguments)
        step()
        return done

    setattr(owner, name, watched)


def watch_copies() -> None:
    method = migration.Migration._copied

    async def copied(*arguments: Any) -> Any:
        done = await method(*arguments)
        step()
        return done

    setattr(migration.Migration, "_copied", copied)  # noqa: B010 - mypy does not let a method be assigned


if __name__ == "__main__":
    setattr(stopped, "opened", watched)  # noqa: B010 - mypy knows that it is not the module's own
    migrate.STRETCH = 20
    migration.PAGE = 8
    for each in ("record", "forget", "close"):
        watch(MigrationJournal, each)
    watch_copies()
    sys.exit(main(["spool", "migrate", "--config", sys.argv[1], "--to", sys.argv[2]]))
