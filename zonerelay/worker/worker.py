"""A running relay in one process, as `build` returns it: reloads its configuration, reports its state, and
stops.

Promise: a reload changes everything that can change, or nothing. `stop` ends everything that was started,
even if one part fails to end.

A worker that drains its spool ends when the spool is empty (`until_empty`). The spool is empty if its store
reports twice in a row that no queue holds a delivery, and proves that nothing else is stored: no mail waits,
is being attempted, is held, is in the bin or is unreadable; nothing is damaged; and no reported loss remains.
Otherwise it stays, and `tell` reports the reason.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from zonerelay.admin.http import AdminServer
from zonerelay.config.settings import OutboxSettings, Settings, needs_restart, taken_up, webhook_keys
from zonerelay.control.handler import ControlHandler
from zonerelay.history.writer import History
from zonerelay.inbound.drop_directory import DropDirectory
from zonerelay.inbound.listen.http_listener import OpenHttp
from zonerelay.inbound.listen.listeners import Listeners
from zonerelay.limits.shared import RecordStore
from zonerelay.model.delivery import Delivery, DeliveryKey, QueueKind, QueueName
from zonerelay.model.envelope import MessageIdSource
from zonerelay.process.tasks import RetriedComponents
from zonerelay.process.threads import OPERATORS
from zonerelay.queue.operator.clock_watch import ClockWatch
from zonerelay.queue.operator.journal import DIRECTORY, Journal
from zonerelay.queue.operator.operations import Bin, Operations
from zonerelay.queue.orders.orders import Orders
from zonerelay.queue.scheduler import Scheduler
from zonerelay.queue.settle.bounces import DsnMaker
from zonerelay.queue.settle.retry import RetryPolicy
from zonerelay.queue.settle.retry import build as build_retry
from zonerelay.queue.settle.settler import Settler, SettlerCallbacks
from zonerelay.queue.zone.zone import ZoneParts
from zonerelay.store.contract import Store, StoreError
from zonerelay.store.open import open_record_store
from zonerelay.store.spool_paths import name_of, remove_spool
from zonerelay.telemetry.metrics.instruments import CpuDemand
from zonerelay.worker.context import WorkerContext
from zonerelay.worker.outbound import OutboundSide, build_webhooks
from zonerelay.worker.queue import MailQueue, number_of
from zonerelay.worker.tables import Tables, build_tables

if TYPE_CHECKING:
    from zonerelay.webhook.webhooks import Webhooks  # most relays have none

LOOK_EVERY = 1.0
IN_BIN = "dropped mail is kept for a day, so that `zonerelay undo` can restore it"


async def until_empty(store: Store, tell: Callable[[str], None]) -> None:
    """Wait until the store, in which no listener stores new mail, is empty. `tell(left)` is called when there
    is a new reason why a store without deliveries is not empty.
    """
    empty, reported = 0, ""
    while empty < 2:
        try:
            queues = await store.queues()
            left = "" if queues else await store.left_over() or _trouble(store)
            if queues and all(each.kind is QueueKind.BIN for each in queues):
                left = IN_BIN
            empty = 0 if queues or left else empty + 1
        except StoreError:
            left, empty = reported, 0
        if left != reported:
            reported = left
            tell(left)
        if empty < 2:
            await asyncio.sleep(LOOK_EVERY)


def _trouble(store: Store) -> str:
    """Describe the damage and the losses of the spool that were not dismissed. A full disk does not prevent a
    worker from ending.
    """
    return "; ".join(text for text in store.problems() if text != store.unhealthy())


class Worker:
    """A running relay in one process, with all its parts. `settings` are the active ones. `opened` are the
    endpoints for operators. `running` holds what `stop` ends, which is to be called once.

    Data flows in one direction, so a part receives the parts before it. If an earlier part needs a later one,
    it receives a function that calls the later part. No such function is called before all parts exist.
    """

    handler: ControlHandler
    opened: RetriedComponents
    running: AsyncExitStack

    def __init__(
        self,
        tables: Tables,
        context: WorkerContext,
        queue: MailQueue,
        history: History | None,
        *,
        open_http: OpenHttp,
        share_failure: Callable[[str], None],
    ) -> None:
        """Create all parts of the worker. None of them does anything yet."""
        self.tables, self.context, self.queue, self.history = tables, context, queue, history
        self.settings, self.zones = settings, zones = tables.settings, tables.zones
        self.identity, self.events = identity, events = context.identity, context.events
        self.clock, self.store = clock, store = context.clock, queue.store
        self.metrics = events.metrics
        self.webhooks: Webhooks | None = None
        """None until a webhook is configured, or the spool has events of one."""
        self.reloaded: Callable[[Settings], Awaitable[None]] | None = None
        """Called with the settings that a reload has activated."""
        self.http: AdminServer | None = None
        self.drop: DropDirectory | None = None
        self.taken_up = clock.now()
        """The time at which the active configuration was loaded."""
        self.refused_at: float | None = None
        """The time at which the last reload was refused, or None."""
        self.draining = False
        self.key_problem = ""
        self.problems: Sequence[str] = ()
        self._left_over = ""
        self._reloads = asyncio.Lock()
        self._deadline: float | None = None
        home = settings.spool.path.parent
        self.ids = MessageIdSource(
            clock, number_of(settings, identity.index, store), last=store.last_message_id()
        )
        self.sending = OutboundSide(
            tables,
            context,
            read_body=store.read_body,
            check_claim=store.check_claim,
            resume=lambda zone: self.scheduler.resume(zone),
            granted=lambda zone: self.scheduler.granted(zone),
        )
        self.clock_watch = ClockWatch(
            home / f"clock-{name_of(identity.index)}.json",
            clock,
            events=events,
            correct=lambda change: self.operations.correct(change),
        )
        self.settler = Settler(
            store=store,
            dsn_maker=DsnMaker(
                store=store,
                ids=self.ids,
                choose_zone=zones.choose,
                hostname=context.hostname,
                events=events,
                clock=clock,
            ),
            retry=retry_of(settings, settings.outbox, context),
            zones=settings.zone,
            bounce=settings.bounce,
            events=events,
            clock=clock,
            callbacks=SettlerCallbacks(
                postponed=lambda queue, when: self.scheduler.postponed(queue, when),
                report=lambda: None if self.webhooks is None else self.webhooks.outcomes,
                paused=lambda delivery, message, where: (
                    self.orders.paused(delivery, message, where) + self.clock_watch.skipped(delivery.created)
                ),
                keep=lambda message, some, where: self.orders.keep(message, some, "", where),
                refused_stranger=lambda recipient, reply, now: self.listeners.refused_stranger(
                    recipient, reply, now
                ),
            ),
        )
        self.orders = Orders(
            home,
            settler=self.settler,
            zone_of=zones.known_before,
            changed=lambda: self.scheduler.go_by_orders(),
            release=lambda over: self.operations.release_orders(over),
            events=events,
            clock=clock,
        )
        self.orders.read()
        self.scheduler = Scheduler(
            settings.zone,
            ZoneParts(
                store=store,
                route=self.sending.router.route,
                deliver=self.sending.deliver,
                settler=self.settler,
                retry=settings.retry,
                events=events,
                clock=clock,
                random=context.random,
                limits=self.sending.limits,
                orders=self.orders,
            ),
            busy=CpuDemand().since_last,
            resumed=self.sending.logins.forgive,
        )
        self.listeners = Listeners(
            settings,
            hostname=context.hostname,
            store=store,
            ids=self.ids,
            choose_zone=zones.choose,
            zones=lambda: zones.names,
            resolver=self.sending.resolver,
            events=events,
            clock=clock,
            secret=secrets.token_bytes(32),
            records=partial(_usage_records, settings, context),
            open_http=open_http,
            srs=lambda: self.sending.srs,
            webhooks=lambda: self.webhooks,
            new_mail_rate=self.scheduler.new_mail_rate,
            orders=self.orders,
            inherited=identity.inherited,
            share_failure=share_failure,
        )
        self.operations = Operations(
            store=store,
            scheduler=self.scheduler,
            settler=self.settler,
            events=events,
            clock=clock,
            journal=Journal(home / DIRECTORY / name_of(identity.index), clock),
            orders_in_force=lambda: self.orders.table.ids,
            order_at=self.orders.order_of,
        )
        self.dropped = Bin(self.operations, self.clock_watch.skipped)

    def stored(self, deliveries: Sequence[Delivery], is_next: bool) -> int:
        """Pass new durable deliveries to the scheduler, or to the webhooks if they are events."""
        to = self.scheduler if deliveries[0].queue.is_mail else self.webhooks
        return 0 if to is None else to.stored(deliveries, is_next)

    def on_news(self, name: QueueName) -> None:
        """Claim mail, or events for webhooks, that other workers have left in a queue."""
        if name.is_mail:
            self.scheduler.wake(name)
        elif self.webhooks is not None:
            self.webhooks.notify()

    def on_lost(self, keys: Collection[DeliveryKey]) -> None:
        """Remove waiting deliveries whose claims other relays have taken over. Attempts in progress end by
        themselves.
        """
        self.ids.renumber(number_of(self.settings, self.identity.index, self.store))
        events = {key for key in keys if not key.queue.is_mail}
        if events and self.webhooks is not None:
            self.webhooks.forget(events)
        self.scheduler.give_back(self.scheduler.withdraw(set(keys) - events))

    # ---- reload -----------------------------------------------------------------------------------

    async def reload(self, settings: Settings) -> str:
        """Apply changes of the settings that need no restart, and report failures and the other changes.
        Return the reason of a refusal, or `""`.

        Reloads run one at a time, and none once the relay stops, because a listener that is being started
        would be left open.
        """
        async with self._reloads:
            return "" if self.draining else await self._reload(settings)

    def refuse(self, why: str, problems: int = 1) -> str:
        """Keep the old configuration, report `why` as the reason, and return it."""
        self.problems = (f"the last reload was refused, so the previous configuration stays active: {why}",)
        self.refused_at = self.clock.now()
        self.events.lifecycle("reload-refused", problems=problems, first=why)
        return why

    async def _reload(self, settings: Settings) -> str:
        try:
            # All that can fail comes first.
            environment = self.context.environment
            tables = await OPERATORS.run(build_tables, settings, self.clock.now(), environment, self.tables)
            settings = tables.settings
            retry = retry_of(settings, self.settings.outbox, self.context)
            for webhook in settings.webhook:
                webhook_keys(webhook, environment)
            await self.configure_webhooks(settings)
        except (ValueError, StoreError) as error:
            return self.refuse(str(error))
        self.sending.configure(tables)
        self.zones.take_up(tables.zones)
        later = needs_restart(self.settings, settings)
        self.problems = tuple(f"[{name}] was changed; this takes effect at the next start" for name in later)
        self.taken_up, self.refused_at = self.clock.now(), None
        self.metrics.declare_zones(self.zones.names)
        self.settler.configure(zones=settings.zone, retry=retry, bounce=settings.bounce)
        other_routes = settings.destination != self.settings.destination
        self.scheduler.configure(settings.zone, settings.retry, other_routes=other_routes)
        self.tables = tables = structs.replace(tables, settings=taken_up(self.settings, settings))
        self.settings = tables.settings
        if self.reloaded is not None:
            await self.reloaded(self.settings)
        if not self.identity.drains_spool:
            self.problems = (*self.problems, *await self.listeners.reload(self.settings, tables.rules))
        self.events.lifecycle("reloaded", restart_for=" ".join(later))
        return ""

    # ---- stop -------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop all parts in the reverse order of their start."""
        self.draining = True
        self.events.lifecycle("stopping")
        self._left()
        await self.running.aclose()

    def _left(self, least: float = 0.0) -> float:
        """Return the remaining seconds of `shutdown_timeout`, counted from the first call."""
        now = asyncio.get_running_loop().time()
        if self._deadline is None:
            self._deadline = now + self.settings.shutdown_timeout
        return max(self._deadline - now, least)

    async def close_listeners(self) -> None:
        async with self._reloads:
            self.listeners.stop_accepting()
        await self.listeners.drain(self._left())

    async def stop_scheduler(self) -> None:
        await self.scheduler.stop(self._left(least=1.0))

    async def configure_webhooks(self, settings: Settings) -> None:
        """Apply the webhook settings. Raise StoreError before anything has changed."""
        if self.webhooks is None:
            kinds = {queue.kind for queue in await self.store.queues()}
            if not settings.webhook and QueueKind.WEBHOOK not in kinds:
                return
            self.webhooks = build_webhooks(settings, self.context, self.store, self.settler.write, self.ids)
        await self.webhooks.configure(settings.webhook)

    async def close_webhooks(self) -> None:
        """Close the webhooks. The settler must be closed later, because it writes the outcomes of the last
        events.
        """
        if self.webhooks is not None:
            await self.webhooks.close()

    async def close_settler(self) -> None:
        await self.settler.drain(self._left())  # of the webhooks, which have stopped by now
        await self.settler.close()

    def note_left_over(self, left: str) -> None:
        """Record and report why the spool of a removed worker is kept although it contains no delivery."""
        spool = name_of(self.identity.index)
        self._left_over = (
            left and f"the spool {spool} was not removed: it contains no delivery to attempt, but {left}"
        )
        if left:
            self.events.spool_kept(spool, left)

    def remove_spool(self) -> None:
        """Remove the spool of a removed worker, which is empty and closed. Blocks. Raise OSError."""
        remove_spool(self.settings.spool, self.identity.index)
        self.events.lifecycle("spool-removed", spool=name_of(self.identity.index))

    # ---- what others ask --------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        """Return the addresses of listeners as in the configuration, with real ports in place of port 0."""
        return self.listeners.addresses

    @property
    def http_port(self) -> int | None:
        return None if self.http is None else self.http.port

    def all_problems(self) -> tuple[str, ...]:
        """Return the problems of all parts."""
        asked = (
            self.drop,
            self.opened,
            self.http,
            self.sending,
            self.scheduler,
            self.store,
            self.history,
            self.webhooks,
            self.clock_watch,
            self.operations.journal,
            self.orders,
        )
        return (
            *self.problems,
            *filter(None, (self._left_over, self.key_problem)),
            *self.listeners.problems,
            *(text for part in asked if part is not None for text in part.problems()),
        )


def retry_of(settings: Settings, outbox: OutboxSettings, context: WorkerContext) -> RetryPolicy:
    """Return the retry policy with the settings of zones and of the outbox. Raise ValueError with a message
    if an operator's function cannot be loaded.
    """
    given = settings.retry, settings.bounce, settings.zone
    return build_retry(*given, random=context.random, events=context.events, row_attempts=outbox.max_attempts)


def _usage_records(settings: Settings, context: WorkerContext) -> RecordStore:
    """Return the store in which the usage of users with quotas is counted. Raise StoreOpenError."""
    shared = open_record_store(settings, context.environment)
    if shared is not None:
        return shared
    # SQLite is loaded only if users have quotas.
    from zonerelay.inbound.limits.usage_file import UsageFile  # noqa: PLC0415

    return UsageFile(settings.spool.path.parent, context.clock)
