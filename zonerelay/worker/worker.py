"""One worker: a whole relay in one process. This module wires the parts and owns their order.

Start: spool first (its lock makes a second relay impossible), then resolver, courier, scheduler, the
operators' channel, HTTP, and the listeners last, so that a relay that cannot take mail greets no client. Stop
is the reverse: no new connections, idle clients get 421, transactions and deliveries in flight finish,
outcomes are synced, the spool is closed; all within `shutdown_timeout`, except that a commit being written is
always awaited.

Promise on failure: whatever fails here fails before the first greeting, in words (`StartError`). Only what
stands above imports this module: `serve` and the sandbox.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from zonerelay import __version__
from zonerelay.config.changes import needs_restart, taken_up
from zonerelay.config.settings import Backend, ListenerSettings, Settings, space_guard, webhook_keys
from zonerelay.control.acts import OperatorActs
from zonerelay.control.socket.errors import ControlError
from zonerelay.control.socket.socket_file import bind, submission_socket_path
from zonerelay.control.status import Surface
from zonerelay.history.writer import History, file_of, note_off
from zonerelay.inbound.cleanup.submit import Submit
from zonerelay.inbound.drop_directory import DropDirectory, hand_over
from zonerelay.inbound.listen.binding import ListenError
from zonerelay.inbound.listen.http_connection import ServesHttp
from zonerelay.inbound.listen.listeners import Listeners
from zonerelay.inbound.state.rewriting import Rewriting
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.message_id import MessageIdSource
from zonerelay.model.webhook import is_webhook_zone
from zonerelay.process.identity import Identity
from zonerelay.process.setup import StartError, history_redactor
from zonerelay.process.threads import STATUS
from zonerelay.queue.operator.clock_watch import ClockWatch
from zonerelay.queue.orders.orders import Orders
from zonerelay.queue.scheduler import Scheduler
from zonerelay.queue.settle.retry import RetryPolicy
from zonerelay.queue.settle.retry import build as build_retry
from zonerelay.queue.settle.settler import Settler
from zonerelay.queue.zone.parts import ZoneParts
from zonerelay.routing.mta_sts.policies import HTTPS_PORT
from zonerelay.routing.zones.zones import Zones
from zonerelay.store.contract import Store, StoreError
from zonerelay.store.spool_paths import is_shared, name_of, remove_spool
from zonerelay.telemetry.events.events import Events, LogSink
from zonerelay.telemetry.load import CpuDemand
from zonerelay.telemetry.logs.redact import RedactKeyError, Redactor
from zonerelay.telemetry.metrics.metrics import Metrics
from zonerelay.worker.endpoints import Endpoints
from zonerelay.worker.limits import usage_pages
from zonerelay.worker.operators import Parts, build_board, build_handler, build_journal, build_operations
from zonerelay.worker.outbound import Sending
from zonerelay.worker.queue import MailQueue, open_queue
from zonerelay.worker.report import DailyReport
from zonerelay.worker.webhooks import TellsOthers

if TYPE_CHECKING:
    from zonerelay.admin.operators import Sandbox

__all__ = ["StartError", "Worker"]

ALONE = Identity()


class Worker:
    """`start`, then `stop` once. Tests and the sandbox pass their own clock, randomness, log and ports."""

    def __init__(
        self,
        settings: Settings,
        *,
        hostname: str,
        log: LogSink,
        redactor: Redactor,
        clock: Clock,
        randomness: random.Random,
        environment: Mapping[str, str] | None = None,
        policy_port: int = HTTPS_PORT,
        identity: Identity = ALONE,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._sandbox = sandbox
        self.share_failure: Callable[[str], None] = lambda _: None
        """Passes a failed log-in on to the other workers."""
        self.settings = settings
        self.identity = identity
        self.hostname = hostname
        self.clock = clock
        self.problems: Sequence[str] = ()
        self._left_over = ""
        self.refused = ""  # why the last reload was, if it was
        self.taken_up = clock.now()
        self.refused_at: float | None = None
        self.draining = False
        self.metrics = Metrics()
        self.history = self._build_history(redactor)
        self.events = Events(log, self.metrics, redactor, clock, self.history)
        if self.history is not None:
            self.history.tell(self.events.history_broken, self.events.history_restored)
        self._redactor, self._random = redactor, randomness
        self._environment, self._policy_port = environment or {}, policy_port
        self._zones = Zones(settings.zone)  # the routes may be wrong: `_start` can say so
        self.store: Store | None = None
        self._queue: MailQueue | None = None
        self._sending: Sending | None = None
        self._listeners: Listeners | None = None
        self._scheduler: Scheduler | None = None
        self._settler: Settler | None = None
        self._ids: MessageIdSource | None = None
        self._endpoints: Endpoints | None = None
        self._clock_watch: ClockWatch | None = None
        self._telling: TellsOthers | None = None
        self._report: DailyReport | None = None
        self._drop: DropDirectory | None = None
        self._orders: Orders | None = None
        self._reloads = asyncio.Lock()

    def _build_history(self, redactor: Redactor) -> History | None:
        settings, self._key_problem = self.settings, redactor.problem
        file = file_of(settings.spool.path.parent, self.identity.index)
        if not settings.history.enabled:
            note_off(file)
            return None
        pseudonyms = history_redactor(settings, redactor)
        self._key_problem = redactor.problem or pseudonyms.problem
        return History(
            file,
            pseudonyms,
            keep=settings.history.keep,
            max_size=settings.history.max_size,
            guard=space_guard(settings.spool),
            clock=self.clock,
            dropped=self.metrics.history_dropped,
        )

    # ---- start ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises StartError, with everything that was opened closed again."""
        self.events.lifecycle("starting", version=__version__)
        if self._key_problem:
            self.events.trouble("redact-key", RedactKeyError(self._key_problem))
        asyncio.get_running_loop().set_exception_handler(self._on_loop_trouble)
        try:
            await self._start()
        except (StoreError, ListenError, ControlError, ValueError) as error:
            await self.stop()
            raise StartError(str(error)) from error
        except BaseException:
            await self.stop()
            raise
        self.events.lifecycle("ready", listeners=" ".join(self.addresses()))

    async def _start(self) -> None:
        self._zones.configure(self.settings.zone, self.settings.route)
        queue = self._queue = await open_queue(
            self.settings,
            self.identity.index,
            takes_rows=not self.identity.drains_spool,
            environment=self._environment,
            redactor=self._redactor,
            events=self.events,
            clock=self.clock,
            zones=lambda: self._zones.names,
            notify=self._notify,
            on_health=self.events.store_health,
            on_news=self._on_news,
            on_lost=self._on_lost,
        )
        store = self.store = queue.store
        ids = self._ids = MessageIdSource(self.clock, self._number(store), last=store.last_message_id())
        sending = self._sending = self._build_sending(store)
        settler = self._settler = self._build_settler(store, ids)
        orders = self._orders = self._build_orders(settler)
        scheduler = self._scheduler = self._build_scheduler(store, settler, sending, orders)
        sending.attach(scheduler)
        orders.changed = scheduler.go_by_orders
        listeners = self._listeners = self._build_listeners(store, ids, sending, orders)
        settler.refused_stranger = listeners.refused_stranger
        telling = self._telling = self._build_telling(store, settler, ids)
        parts = Parts(
            hostname=self.hostname,
            queue=queue,
            zones=self._zones,
            scheduler=scheduler,
            settler=settler,
            sending=sending,
            listeners=listeners,
            telling=telling,
            orders=orders,
            events=self.events,
            redactor=self._redactor,
            clock=self.clock,
        )
        await self._open_to_operators(parts)
        await telling.configure(self.settings)
        if self.identity.index == 0 and not self.identity.drains_spool:
            self._report = self._build_report(settler, ids)
        await sending.start()
        await scheduler.start()
        if self._report is not None:
            await self._report.configure(self.settings)
        assert self._clock_watch is not None
        self._clock_watch.start(store.last_message_id())
        orders.start()
        self.metrics.loop_lag.start()
        await queue.start(scheduler, sending.logins)
        if not self.identity.drains_spool:
            await listeners.start(self.settings, self._bind_for_submissions())
            if self.identity.index == 0:
                self._drop = self._build_drop_directory()
                self._drop.start()

    def _bind_for_submissions(self) -> socket.socket | None:
        """Where the supervisor has the address of [admin]. Raises ControlError."""
        if not self.settings.admin.address or not self.identity.supervised:
            return None
        return bind(submission_socket_path(self.settings, self.identity.index))

    def _build_drop_directory(self) -> DropDirectory:
        return DropDirectory(
            self.settings.sendmail.drop,
            partial(hand_over, self.settings.listener),
            keeps_keys=self.settings.spool.backend is not Backend.S3,
            max_size=max(each.max_message_size for each in self.settings.listener),
            hostname=self.hostname,
            events=self.events,
        )

    def _number(self, store: Store) -> int:
        """In message ids: those that share a store have it from there."""
        return store.node if is_shared(self.settings.spool) else self.identity.index

    def _build_sending(self, store: Store) -> Sending:
        return Sending(
            self.settings,
            hostname=self.hostname,
            read_body=store.read_body,
            check_claim=store.check_claim,
            events=self.events,
            clock=self.clock,
            random=self._random,
            environment=self._environment,
            policy_port=self._policy_port,
            limits_socket=self.identity.limits,
            holder=secrets.token_hex(8),
        )

    def _build_settler(self, store: Store, ids: MessageIdSource) -> Settler:
        settings = self.settings
        return Settler(
            store=store,
            ids=ids,
            choose_zone=self._zones.choose,
            retry=self._build_retry(settings),
            zones=settings.zone,
            bounce=settings.bounce,
            hostname=self.hostname,
            notify=self._notify,
            events=self.events,
            clock=self.clock,
        )

    def _build_telling(self, store: Store, settler: Settler, ids: MessageIdSource) -> TellsOthers:
        return TellsOthers(
            hostname=self.hostname,
            worker=self.identity.index,
            store=store,
            settler=settler,
            ids=ids,
            redactor=self._redactor,
            environment=self._environment,
            events=self.events,
            clock=self.clock,
            random=self._random,
        )

    def _build_report(self, settler: Settler, ids: MessageIdSource) -> DailyReport:
        return DailyReport(
            hostname=self.hostname,
            settler=settler,
            ids=ids,
            choose_zone=self._zones.choose,
            notify=self._notify,
            events=self.events,
            clock=self.clock,
        )

    def _build_orders(self, settler: Settler) -> Orders:
        """Raises OrdersError."""
        home = self.settings.spool.path.parent
        orders = Orders(
            home, settler=settler, zone_of=self._zones.known_before, events=self.events, clock=self.clock
        )
        orders.read()
        self.metrics.attach_orders(orders.in_force)
        return orders

    def _build_scheduler(self, store: Store, settler: Settler, sending: Sending, orders: Orders) -> Scheduler:
        return Scheduler(
            self.settings.zone,
            ZoneParts(
                store=store,
                router=sending.router,
                courier=sending,
                settler=settler,
                retry=self.settings.retry,
                events=self.events,
                clock=self.clock,
                random=self._random,
                limits=sending.limits,
                orders=orders,
            ),
            busy=CpuDemand().since_last,
        )

    def _build_retry(self, settings: Settings) -> RetryPolicy:
        """Raises ValueError in words when an operator's function cannot be loaded."""
        given = settings.retry, settings.bounce, settings.zone
        return build_retry(*given, random=self._random, events=self.events, outbox=self.settings.outbox)

    def _build_listeners(
        self, store: Store, ids: MessageIdSource, sending: Sending, orders: Orders
    ) -> Listeners:
        return Listeners(
            self.settings,
            hostname=self.hostname,
            store=store,
            ids=ids,
            choose_zone=self._zones.choose,
            zones=lambda: self._zones.names,
            notify=self._notify,
            resolver=sending.resolver,
            events=self.events,
            clock=self.clock,
            secret=secrets.token_bytes(32),
            pages=partial(usage_pages, self.settings, self._environment, self.clock),
            open_http=self._open_http,
            srs=lambda: sending.srs,
            webhooks=lambda: None if self._telling is None else self._telling.webhooks,
            orders=orders,
            inherited=self.identity.inherited,
            share_failure=self._share_failure,
        )

    def _share_failure(self, text: str) -> None:
        self.share_failure(text)

    def failed_elsewhere(self, text: str) -> None:
        """Count a failed log-in at another worker."""
        if self._listeners is not None:
            self._listeners.failed_elsewhere(text)

    async def _open_http(self, rules: Callable[[], ListenerSettings], submit: Submit) -> ServesHttp:
        assert self._endpoints is not None
        return await self._endpoints.open_http(rules, submit)

    async def _open_to_operators(self, parts: Parts) -> None:
        board = build_board(self.settings, parts, self.surface)
        self.metrics.attach_queue(board.queues, parts.queue.store.is_counted)
        self.metrics.attach_store(self.identity.index, parts.queue.store.unhealthy)
        guard = space_guard(self.settings.spool)
        self.metrics.attach_space(self.identity.index, lambda: board.free_space, guard)
        self.metrics.attach_captured(
            lambda: None if (found := board.captured) is None else (found.messages, found.octets)
        )
        self.metrics.attach_destinations(board.destination_states)
        self.metrics.attach_configuration(lambda: (self.taken_up, self.refused_at is None))
        self.metrics.attach_restraint(lambda: parts.scheduler.throttled_seconds)
        self.metrics.attach_sources(parts.sending.sources.penalty_counts)
        self.metrics.declare_zones(self._zones.names)
        endpoints = self._endpoints = Endpoints(
            self.settings,
            self.identity,
            store=parts.queue.store,
            board=board,
            events=self.events,
            clock=self.clock,
            accepting=lambda: bool(self.addresses()),
            draining=lambda: self.draining,
            sandbox=self._sandbox,
        )
        journal = build_journal(self.settings, self.identity.index, self.clock)
        operations = build_operations(parts, journal)
        parts.orders.release = operations.release_orders
        operations.orders_in_force = parts.orders.ids
        self._clock_watch = ClockWatch(operations, events=self.events, clock=self.clock)
        acts = OperatorActs(operations, journal, parts.zones, self.clock)
        handler = build_handler(
            lambda: self.settings,
            parts,
            operations,
            acts,
            board,
            answers=endpoints.part,
            history=self.history,
        )
        await endpoints.open(handler, lambda: self.settings, parts.listeners.submit)

    # ---- reload -----------------------------------------------------------------------------------

    async def reload(self, settings: Settings) -> None:
        """Take up what can change without a restart; report what cannot, and what fails.

        One at a time, and none once the relay stops: a listener that is being started would be left open.
        """
        async with self._reloads:
            if not self.draining:
                await self._reload(settings)

    async def _reload(self, settings: Settings) -> None:
        assert self._scheduler is not None
        assert self._settler is not None
        assert self._sending is not None
        assert self._telling is not None
        later = needs_restart(self.settings, settings)
        self.problems = tuple(f"[{name}] has changed: it takes effect at the next start" for name in later)
        try:
            retry = self._build_retry(settings)
            # Before anything has changed: who cannot be asked to change back is asked last.
            Rewriting(settings.rewrite)  # the listeners make their own
            Zones(settings.zone, settings.route)
            for webhook in settings.webhook:
                webhook_keys(webhook, self._environment)
            self._sending.configure(settings)
            self._zones.configure(settings.zone, settings.route)
            await self._telling.configure(settings)
        except (ValueError, StoreError) as error:
            self.refused = str(error)
            self.refused_at = self.clock.now()
            self.problems = (f"the configuration on disk is wrong: {error}",)
            self.events.lifecycle("reload-refused", problems=1, first=str(error))
            return
        self.refused = ""
        self.taken_up, self.refused_at = self.clock.now(), None
        self.metrics.declare_zones(self._zones.names)
        self._settler.configure(zones=settings.zone, retry=retry, bounce=settings.bounce)
        other_routes = settings.destination != self.settings.destination
        self._scheduler.configure(settings.zone, settings.retry, other_routes=other_routes)
        self.settings = taken_up(self.settings, settings)
        if self._report is not None:
            await self._report.configure(self.settings)
        if not self.identity.drains_spool:
            assert self._listeners is not None
            self.problems = (*self.problems, *await self._listeners.reload(self.settings))
        self.events.lifecycle("reloaded", restart_for=" ".join(later))

    # ---- stop -------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Everything that `start` has opened so far, in the reverse order. Call once."""
        self.draining = True
        timeout = self.settings.shutdown_timeout
        deadline = asyncio.get_running_loop().time() + timeout
        self.events.lifecycle("stopping")
        if self._drop is not None:
            await self._drop.stop()
        if self._listeners is not None:
            async with self._reloads:
                self._listeners.stop_accepting()
            await self._listeners.drain(timeout)
        left = max(deadline - asyncio.get_running_loop().time(), 1.0)
        if self._clock_watch is not None:
            await self._clock_watch.stop()
        if self._report is not None:
            await self._report.close()
        if self._telling is not None:
            await self._telling.close()
        if self._orders is not None:
            await self._orders.stop()
        if self._scheduler is not None:
            await self._scheduler.stop(left)
        if self._settler is not None:
            await self._settler.close()
        if self._sending is not None:
            await self._sending.close()
        if self._endpoints is not None:
            await self._endpoints.close()
        if self.store is not None:
            await self.store.close()
        self.metrics.loop_lag.stop()
        self.events.close()
        if self.history is not None:
            await STATUS.run(self.history.close)
        self.events.lifecycle("stopped")

    def note_left_over(self, left: str) -> None:
        """Notes the reason to keep the spool of a dismissed worker although no delivery is in it."""
        spool = name_of(self.identity.index)
        self._left_over = (
            left and f"the spool {spool} is kept: it has no delivery that can be read, but {left}"
        )
        if left:
            self.events.spool_kept(spool, left)

    def remove_spool(self) -> None:
        """Removes the spool of a dismissed worker, which is empty and closed. Blocks. Raises OSError."""
        remove_spool(self.settings.spool, self.identity.index)
        self.events.lifecycle("spool-removed", spool=name_of(self.identity.index))

    # ---- what the parts ask of each other ---------------------------------------------------------

    def addresses(self) -> list[str]:
        """Returns the addresses of listeners as in the configuration; ports that were 0 are the real ones."""
        return [] if self._listeners is None else self._listeners.addresses

    @property
    def http_port(self) -> int | None:
        return None if self._endpoints is None else self._endpoints.http_port

    def _notify(self, zone: str, due: float = 0.0) -> None:
        if self._scheduler is not None:
            self._scheduler.notify(zone, due)

    def _on_news(self, zone: str) -> None:
        """Others have left mail behind: some to be sent now, some that was deferred."""
        if is_webhook_zone(zone):
            if self._telling is not None:
                self._telling.on_news()
        elif self._scheduler is not None:
            self._scheduler.wake(zone)

    def _on_lost(self, keys: Collection[DeliveryKey]) -> None:
        """Others have taken over what was claimed: forget what waits; what is being sent ends by itself."""
        if self._ids is not None and self.store is not None:
            self._ids.renumber(self._number(self.store))
        events = {key for key in keys if is_webhook_zone(key.queue)}
        if events and self._telling is not None:
            self._telling.on_lost(events)
        if self._scheduler is not None:
            self._scheduler.give_back(self._scheduler.withdraw(set(keys) - events))

    def _on_loop_trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if not isinstance(error, BaseException):
            error = RuntimeError(str(context.get("message", "unknown trouble")))
        self.events.trouble("loop", error)

    def surface(self) -> Surface:
        """Returns the worker's own part of the status."""
        listeners = self._listeners
        return Surface(
            listeners=self.addresses(),
            inbound_connections=0 if listeners is None else listeners.connections,
            state="draining" if self.draining else "running",
            taken_up=self.taken_up,
            refused=self.refused_at,
            quotas=() if listeners is None else tuple(listeners.guard.nearly_used()),
            history=self.history,
            problems=(
                *self.problems,
                *(each for each in (self._left_over, self._key_problem) if each),
                *(() if listeners is None else listeners.problems),
                *(() if self._drop is None else self._drop.problems()),
                *(() if self._endpoints is None else self._endpoints.problems()),
                *(
                    text
                    for part in (
                        self._sending,
                        self._queue,
                        self._scheduler,
                        self.store,
                        self.history,
                        self._telling,
                    )
                    if part
                    for text in part.problems()
                ),
            ),
        )
