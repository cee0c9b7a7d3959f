"""The queue of a worker: its spool, and the outbox beside it where one is configured."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from zonerelay.config.settings import Settings
from zonerelay.model.clock import Clock
from zonerelay.store.contract import Lost, News, Store
from zonerelay.store.open import acknowledge_loss, open_store
from zonerelay.store.spool_paths import KEYS, count_of, is_shared, node_of, spool_of, spools_beyond
from zonerelay.store.surroundings import Siblings, Surroundings
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor

if TYPE_CHECKING:
    from zonerelay.outbox.attach import Outbox
    from zonerelay.outbox.rows.mailboxes import LoginHost, ZoneHost


class MailQueue:
    """`store` is all of it. Closing the store closes everything."""

    def __init__(self, store: Store, spool: Store, outbox: Outbox | None = None) -> None:
        self.store = store
        self._spool = spool
        self._outbox = outbox

    async def start(self, zones: ZoneHost, logins: LoginHost) -> None:
        """Begin to take rows, once the scheduler runs. Raises StoreError."""
        if self._outbox is not None:
            await self._outbox.start(zones, logins)

    async def acknowledge(self, loss: str) -> bool:
        """The operator has dealt with it; false when the spool tells of no such loss. Raises StoreError."""
        return await acknowledge_loss(self._spool, loss)

    def problems(self) -> tuple[str, ...]:
        """The problems for the operator's status."""
        return () if self._outbox is None else self._outbox.problems()


async def open_queue(
    settings: Settings,
    index: int,
    *,
    takes_rows: bool,
    environment: Mapping[str, str],
    redactor: Redactor,
    events: Events,
    clock: Clock,
    zones: Callable[[], Collection[str]],
    notify: Callable[[str], None],
    on_health: Callable[[str | None], None],
    on_news: News,
    on_lost: Lost,
) -> MailQueue:
    """Opens the queue of worker `index`. `zones` returns the names of all zones. Raises StoreError, with
    nothing left open.
    """
    spool = await open_store(
        spool_of(settings.spool, index),
        Surroundings(
            clock=clock,
            on_health=on_health,
            on_damage=events.store_damaged,
            observe_commit=events.metrics.commits.observe,
            on_news=on_news,
            on_lost=on_lost,
            environment=environment,
            siblings=siblings_of(settings, index),
        ),
        redis=settings.redis,
        postgres=node_of(settings.postgres, index),
        s3=settings.s3,
    )
    if not (settings.outbox.url and takes_rows):
        return MailQueue(spool, spool)
    try:
        # Its driver is an extra.
        from zonerelay.outbox.attach import Outbox  # noqa: PLC0415
        from zonerelay.outbox.keeper import OutboxSurroundings  # noqa: PLC0415

        outbox_around = OutboxSurroundings(
            settings=settings.outbox,
            clock=clock,
            redact=redactor.always(),
            events=events,
            known_zones=zones,
            on_news=notify,
            on_lost=on_lost,
        )
        outbox = Outbox(settings.spool, index, environment, outbox_around)
    except BaseException:
        await spool.close()
        raise
    return MailQueue(outbox.join(spool), spool, outbox)


def siblings_of(settings: Settings, index: int) -> Siblings | None:
    """The workers whose spools may hold the same idempotency keys as this one's. Raises OSError."""
    if is_shared(settings.spool):
        return None
    directory = settings.spool.path.parent / KEYS
    count = count_of(settings)
    spools = {index, *range(count), *spools_beyond(settings.spool, count)}
    if len(spools) > 1:
        return Siblings(directory, index, frozenset(spools))
    # What its workers shared is no longer kept up to date.
    shutil.rmtree(directory, ignore_errors=True)
    return None
