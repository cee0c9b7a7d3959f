"""The queue of a worker: its spool and, if configured, the outbox."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay.config.settings import Settings
from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.queue_name import QueueName
from zonerelay.store.context import SiblingWorkers, StoreContext
from zonerelay.store.contract import Lost, News, Store, Stored
from zonerelay.store.open import acknowledge_loss, open_store
from zonerelay.store.spool_paths import KEYS, count_of, is_shared, spools_beyond
from zonerelay.worker.context import WorkerContext

if TYPE_CHECKING:
    from zonerelay.outbox.attach import Outbox
    from zonerelay.outbox.rows.mailboxes import LoginHost, ZoneHost


class MailQueue:
    """The queue of one worker. `store` combines the spool and the outbox. Closing it closes both."""

    def __init__(self, store: Store, spool: Store, outbox: Outbox | None = None) -> None:
        self.store = store
        self._spool = spool
        self._outbox = outbox

    async def start(self, zones: ZoneHost, logins: LoginHost) -> None:
        """Begin to claim rows of the outbox. The scheduler must run. Raise StoreError."""
        if self._outbox is not None:
            await self._outbox.start(zones, logins)

    async def acknowledge(self, loss: str) -> bool:
        """Dismiss a loss. Return false if the spool has no such loss. Raise StoreError."""
        return await acknowledge_loss(self._spool, loss)

    def problems(self) -> tuple[str, ...]:
        """Return the problems for the operator's status."""
        return () if self._outbox is None else self._outbox.problems()


async def open_queue(
    settings: Settings,
    context: WorkerContext,
    *,
    zones: Callable[[], Collection[str]],
    on_stored: Stored,
    notify: Callable[[QueueName], None],
    on_news: News,
    on_lost: Lost,
    withdraw: Callable[[Collection[DeliveryKey]], set[DeliveryKey]],
    give_back: Callable[[Collection[DeliveryKey]], None],
) -> MailQueue:
    """Open the queue of a worker. `zones` returns the names of all zones. Raise StoreError, leaving nothing
    open.
    """
    index, events = context.identity.index, context.events
    spool = await open_store(
        settings,
        StoreContext(
            clock=context.clock,
            on_health=events.store_health,
            on_damage=events.store_damaged,
            observe_commit=events.metrics.commits.observe,
            on_stored=on_stored,
            on_news=on_news,
            on_lost=on_lost,
            environment=context.environment,
            siblings=siblings_of(settings, index),
            withdraw=withdraw,
            give_back=give_back,
        ),
        index,
    )
    if not settings.outbox.url or context.identity.drains_spool:
        return MailQueue(spool, spool)
    try:
        # The driver of the outbox is an optional dependency.
        from zonerelay.outbox.attach import Outbox  # noqa: PLC0415
        from zonerelay.outbox.keeper import OutboxContext  # noqa: PLC0415

        outbox_around = OutboxContext(
            settings=settings.outbox,
            clock=context.clock,
            redact=context.redactor.always(),
            events=events,
            known_zones=zones,
            on_news=notify,
            on_lost=on_lost,
        )
        outbox = Outbox(settings.spool, index, context.environment, outbox_around)
    except BaseException:
        await spool.close()
        raise
    return MailQueue(outbox.join(spool), spool, outbox)


def number_of(settings: Settings, index: int, store: Store) -> int:
    """Return the number in a worker's message ids. Workers that share a store get it from the store."""
    return store.node if is_shared(settings.spool) else index


def _run() -> str:
    """Return an identifier of the process that has started all workers of this run. Raise OSError."""
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
    # The file that the workers shared is no longer updated.
    shutil.rmtree(directory, ignore_errors=True)
    return None
