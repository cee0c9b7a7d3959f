"""Opens the queue of a worker: its spool and, if configured, the outbox."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from zonerelay.config.settings import Settings
from zonerelay.model.delivery import QueueName
from zonerelay.store.context import SiblingWorkers, StoreContext
from zonerelay.store.contract import Store
from zonerelay.store.open import open_store
from zonerelay.store.spool_paths import KEYS, count_of, is_shared, spools_beyond
from zonerelay.worker.context import WorkerContext

if TYPE_CHECKING:
    from zonerelay.outbox.store import OutboxStore


class MailQueue(NamedTuple):
    """The queue of one worker. `store` is the outbox, if there is one, which closes the spool too."""

    store: Store
    spool: Store
    outbox: OutboxStore | None = None


async def open_queue(
    settings: Settings,
    context: WorkerContext,
    around: StoreContext,
    *,
    zones: Callable[[], Collection[str]],
    notify: Callable[[QueueName], None],
) -> MailQueue:
    """Open the queue of a worker. `zones` returns the names of all zones. `notify` is called when rows of the
    outbox can be claimed. Raise StoreError, leaving nothing open.
    """
    index = context.identity.index
    spool = await open_store(settings, around, index)
    if not settings.outbox.url or context.identity.drains_spool:
        return MailQueue(spool, spool)
    try:
        # The driver of the outbox is an optional dependency.
        from zonerelay.outbox.keeper import OutboxContext  # noqa: PLC0415
        from zonerelay.outbox.store import build_outbox  # noqa: PLC0415

        outbox_around = OutboxContext(
            settings=settings.outbox,
            clock=context.clock,
            redact=context.redactor.always(),
            events=context.events,
            known_zones=zones,
            on_news=notify,
            on_lost=around.on_lost,
        )
        outbox = build_outbox(spool, settings.spool, index, context.environment, outbox_around)
    except BaseException:
        await spool.close()
        raise
    return MailQueue(outbox, spool, outbox)


def number_of(settings: Settings, index: int, store: Store) -> int:
    """Return the number that identifies a worker in its message ids. For a shared store, the store assigns
    it.
    """
    return store.node if is_shared(settings.spool) else index


def _run() -> str:
    """Return an identifier of this run of the relay, derived from the process that has started all workers.
    Raise OSError.
    """
    parent = os.getppid()
    began = Path(f"/proc/{parent}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[19]
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text('ascii').strip()}-{parent}-{began}"


def siblings_of(settings: Settings, index: int) -> SiblingWorkers | None:
    """Return the workers whose spools may hold the same idempotency keys as this one's. Raise OSError."""
    if is_shared(settings.spool):
        return None
    directory = settings.spool.path.parent / KEYS
    count = count_of(settings)
    spools = {index, *range(count), *spools_beyond(settings.spool, count)}
    if len(spools) > 1:
        return SiblingWorkers(directory, index, frozenset(spools), _run())
    # A sole worker takes over the keys of removed spools, with a register that it removes when it stops.
    return SiblingWorkers(directory, index, frozenset(spools), uuid4().hex) if directory.exists() else None
