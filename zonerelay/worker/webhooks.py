"""The webhooks of a worker, which most relays have not: nothing of them is loaded without a [[webhook]].

Events that wait for a webhook which the configuration has lost are forgotten at a start, in words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

from zonerelay.config.settings import Settings
from zonerelay.history.writer import DIRECTORY
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.message_id import MessageIdSource
from zonerelay.model.webhook import is_webhook_zone
from zonerelay.process.setup import hashing_redactor
from zonerelay.queue.settle.settler import Settler
from zonerelay.store.contract import Store
from zonerelay.telemetry.events.events import Events, Field
from zonerelay.telemetry.logs.redact import Redactor

if TYPE_CHECKING:
    from zonerelay.webhook.webhooks import Webhooks


class TellsOthers:
    """`webhooks` is `None` until a configuration has one, or the spool has events."""

    def __init__(
        self,
        *,
        hostname: str,
        worker: int,
        store: Store,
        settler: Settler,
        ids: MessageIdSource,
        redactor: Redactor,
        environment: Mapping[str, str],
        events: Events,
        clock: Clock,
        random: Random,
    ) -> None:
        self.webhooks: Webhooks | None = None
        self._hostname, self._worker = hostname, worker
        self._store, self._settler, self._ids = store, settler, ids
        self._redactor, self._environment = redactor, environment
        self._events, self._clock, self._random = events, clock, random

    async def configure(self, settings: Settings) -> None:
        """Raises StoreError before anything has changed."""
        if self.webhooks is None:
            if not settings.webhook and not any(map(is_webhook_zone, await self._store.zones())):
                return
            self.webhooks = self._build(settings)
        await self.webhooks.configure(settings.webhook)
        self._settler.teller = self.webhooks if settings.webhook else None

    def _build(self, settings: Settings) -> Webhooks:
        from zonerelay.webhook.webhooks import Webhooks  # noqa: PLC0415 - see above

        def records(since: float) -> Sequence[tuple[float, str, Mapping[str, Field]]]:
            from zonerelay.history.reader import Histories  # noqa: PLC0415 - SQLite

            with Histories(settings.spool.path.parent / DIRECTORY, None, worker=self._worker) as histories:
                return [(each.at, each.name, each.fields) for each in histories.since(since)]

        return Webhooks(
            hostname=self._hostname,
            store=self._store,
            write=self._settler.write,
            ids=self._ids,
            hashed=lambda: hashing_redactor(settings, self._redactor),
            records=records,
            environment=self._environment,
            events=self._events,
            clock=self._clock,
            random=self._random,
        )

    def on_news(self) -> None:
        if self.webhooks is not None:
            self.webhooks.notify()

    def on_lost(self, keys: Collection[DeliveryKey]) -> None:
        """Others have taken these events over."""
        if self.webhooks is not None:
            self.webhooks.forget(keys)

    def problems(self) -> tuple[str, ...]:
        return () if self.webhooks is None else self.webhooks.problems()

    async def close(self) -> None:
        """Call before the scheduler stops: what has been taken is written with its last outcomes."""
        if self.webhooks is not None:
            await self.webhooks.close()
