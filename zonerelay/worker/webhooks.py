"""The webhooks of a worker, which most relays have not: nothing of them is loaded without a [[webhook]].

Events that wait for a webhook which the configuration has lost are forgotten at a start, in words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from zonerelay.config.settings import Settings
from zonerelay.history.writer import DIRECTORY
from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.message_id import MessageIdSource
from zonerelay.process.setup import hashing_redactor
from zonerelay.queue.settle.settler import Settler
from zonerelay.store.contract import Store
from zonerelay.telemetry.events.events import Field
from zonerelay.worker.context import WorkerContext

if TYPE_CHECKING:
    from zonerelay.webhook.webhooks import Webhooks


class TellsOthers:
    """`webhooks` is `None` until there are any, or the spool has events of one; `teller` while none is
    configured.
    """

    def __init__(
        self, context: WorkerContext, *, store: Store, settler: Settler, ids: MessageIdSource
    ) -> None:
        self.webhooks: Webhooks | None = None
        self.teller: Webhooks | None = None
        self._context = context
        self._store, self._settler, self._ids = store, settler, ids

    async def configure(self, settings: Settings) -> None:
        """Raises StoreError before anything has changed."""
        if self.webhooks is None:
            if not settings.webhook and all(queue.is_mail for queue in await self._store.queues()):
                return
            self.webhooks = self._build(settings)
        await self.webhooks.configure(settings.webhook)
        self.teller = self.webhooks if settings.webhook else None

    def _build(self, settings: Settings) -> Webhooks:
        from zonerelay.webhook.webhooks import Webhooks  # noqa: PLC0415 - see above

        context = self._context

        def records(since: float) -> Sequence[tuple[float, str, Mapping[str, Field]]]:
            from zonerelay.history.reader import Histories  # noqa: PLC0415 - SQLite

            worker = context.identity.index
            with Histories(settings.spool.path.parent / DIRECTORY, None, worker=worker) as histories:
                return [(each.at, each.name, each.fields) for each in histories.since(since)]

        return Webhooks(
            hostname=context.hostname,
            store=self._store,
            write=self._settler.write,
            ids=self._ids,
            hashed=lambda: hashing_redactor(settings, context.redactor),
            records=records,
            environment=context.environment,
            events=context.events,
            clock=context.clock,
            random=context.random,
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
        """Call before the settler stops, which writes what came of the last events."""
        if self.webhooks is not None:
            await self.webhooks.close()
