"""Builds a worker, which is a complete relay in one process: creates all parts and starts them in order.

Start: the spool comes first (its lock prevents a second relay), then the operators' endpoints and the queue,
and the listeners last, so that a relay that cannot accept mail does not greet clients. Everything that was
started is stopped in the reverse order by the exit stack that `Worker.stop` unwinds: new connections are
refused, idle clients get 421, transactions and deliveries in progress finish, outcomes are synced, and the
spool is closed. All of this ends within `shutdown_timeout`, except that a commit that is being written is
always awaited.

Promise on failure: everything that fails here fails before the first greeting, with a message (`StartError`),
and leaves nothing open. Only the layers above import this module: `serve` and the sandbox.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from zonerelay import __version__
from zonerelay.config.settings import Settings, space_guard
from zonerelay.control.socket import bind, submission_socket_path
from zonerelay.history.writer import History, file_of, note_off
from zonerelay.inbound.drop_directory import DropDirectory, take_by
from zonerelay.inbound.listen.listening_socket import ListenError
from zonerelay.model.clock import Clock
from zonerelay.operations.errors import ControlError
from zonerelay.process.setup import Identity, StartError, history_redactor
from zonerelay.process.tasks import Tasks
from zonerelay.process.threads import STATUS
from zonerelay.routing.mta_sts import HTTPS_PORT
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import StoreError
from zonerelay.telemetry.events.events import Events, LogSink
from zonerelay.telemetry.logs.redact import RedactKeyError, Redactor
from zonerelay.telemetry.metrics.metrics import Metrics
from zonerelay.worker.context import WorkerContext
from zonerelay.worker.endpoints import Endpoints
from zonerelay.worker.queue import open_queue, siblings_of
from zonerelay.worker.report import DailyReport
from zonerelay.worker.tables import build_tables
from zonerelay.worker.worker import Worker

if TYPE_CHECKING:
    from zonerelay.admin.operators import Sandbox

ALONE = Identity()


async def build(
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
    share_failure: Callable[[str], None] = lambda text: None,
    advice: Iterable[str] = (),
) -> Worker:
    """Create, connect and start all parts of a relay, and return the running worker. Tests and the sandbox
    pass their own clock, randomness, log and ports. `share_failure` passes a failed login on to the other
    workers. Raise StartError.
    """
    worker: Worker | None = None
    metrics = Metrics()
    history, key_problem = _build_history(settings, identity, redactor, clock, metrics)
    events = Events(log, metrics, redactor, clock, history)
    context = WorkerContext(
        hostname=hostname,
        identity=identity,
        environment=environment or {},
        redactor=redactor,
        events=events,
        clock=clock,
        random=randomness,
        policy_port=policy_port,
    )
    for note in advice:
        events.lifecycle("advice", note=note)
    events.lifecycle("starting", version=__version__)
    if key_problem:
        events.error("redact-key", RedactKeyError(key_problem))
    asyncio.get_running_loop().set_exception_handler(partial(_on_loop_error, events))
    try:
        async with AsyncExitStack() as stack:
            stack.callback(events.lifecycle, "stopped")
            if history is not None:
                history.tell(events.history_broken, events.history_restored)
                stack.push_async_callback(STATUS.run, history.close)
            stack.callback(events.close)
            stack.callback(metrics.loop_lag.stop)
            metrics.loop_lag.start()
            tables = build_tables(settings, clock.now(), context.environment)
            queue = await open_queue(
                settings,
                context,
                StoreContext(
                    clock=clock,
                    on_health=events.store_health,
                    on_damage=events.store_damaged,
                    observe_commit=metrics.commits.observe,
                    on_stored=lambda some, is_next: 0 if worker is None else worker.stored(some, is_next),
                    on_news=lambda name: None if worker is None else worker.on_news(name),
                    on_lost=lambda keys: None if worker is None else worker.on_lost(keys),
                    environment=context.environment,
                    siblings=siblings_of(settings, identity.index),
                    # Called by other nodes of a shared queue, which the store serves once it is open.
                    withdraw=lambda keys: set() if worker is None else worker.scheduler.withdraw(keys),
                    give_back=lambda keys: None if worker is None else worker.scheduler.give_back(keys),
                ),
                zones=lambda: tables.zones.names,
                notify=lambda name: None if worker is None else worker.scheduler.notify(name),
            )
            stack.push_async_callback(queue.store.close)
            worker = Worker(
                tables,
                context,
                queue,
                history,
                open_http=lambda rules, submit: endpoints.open_http(rules, submit),
                share_failure=share_failure,
            )
            worker.key_problem = key_problem
            worker.metrics.declare_zones(tables.zones.names)
            endpoints = Endpoints(worker, sandbox)
            await _start(worker, endpoints, stack)
            worker.running = stack.pop_all()
    except (StoreError, ListenError, ControlError, ValueError) as error:
        raise StartError(str(error)) from error
    events.lifecycle("ready", listeners=" ".join(worker.addresses()))
    return worker


def _build_history(
    settings: Settings, identity: Identity, redactor: Redactor, clock: Clock, metrics: Metrics
) -> tuple[History | None, str]:
    """Return the history, or None if it is disabled, and any problem with a pseudonym key of the history or
    the log.
    """
    file, problem = file_of(settings.spool.path.parent, identity.index), redactor.problem
    if not settings.history.enabled:
        note_off(file)
        return None, problem
    pseudonyms = history_redactor(settings, redactor)
    history = History(
        file,
        pseudonyms,
        keep=settings.history.keep,
        max_size=settings.history.max_size,
        guard=space_guard(settings.spool),
        clock=clock,
        dropped=metrics.history_dropped,
    )
    return history, redactor.problem or pseudonyms.problem


def _on_loop_error(events: Events, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    error = context.get("exception")
    if not isinstance(error, BaseException):
        error = RuntimeError(str(context.get("message", "unknown trouble")))
    events.error("loop", error)


async def _start(worker: Worker, endpoints: Endpoints, stack: AsyncExitStack) -> None:
    """Start the parts of the worker, each after its stop was added to `stack`."""
    settings, identity = worker.settings, worker.identity
    # One worker does what has to be done once for the whole relay.
    is_first = identity.index == 0 and not identity.drains_spool
    stack.push_async_callback(worker.sending.close)
    await worker.sending.start()
    stack.push_async_callback(endpoints.close)
    await endpoints.open()
    stack.push_async_callback(worker.close_settler)
    stack.push_async_callback(worker.close_webhooks)
    await worker.configure_webhooks(settings)
    stack.push_async_callback(worker.stop_scheduler)
    await worker.scheduler.start()
    stack.push_async_callback(worker.orders.stop)
    worker.orders.start()
    if is_first:
        report = DailyReport(worker, endpoints)
        stack.push_async_callback(report.close)
        await report.configure(settings)
        worker.reloaded = report.configure
    events, operations = worker.events, worker.operations
    background = Tasks(partial(events.error, "queue.background"))
    stack.push_async_callback(background.cancel)
    background.start(worker.clock_watch.run(worker.store.last_message_id()))
    background.start(worker.dropped.run())
    worker.sending.resolver.when_restored(lambda after: background.start(operations.ask_names_again(after)))
    if worker.queue.outbox is not None:
        await worker.queue.outbox.start(worker.scheduler, worker.sending.logins)
    if not identity.drains_spool:
        stack.push_async_callback(worker.close_listeners)
        # The supervisor serves the address of [admin], and passes on what is submitted there.
        is_served = settings.admin.address and identity.supervised
        submissions = bind(submission_socket_path(settings, identity.index)) if is_served else None
        await worker.listeners.start(settings, worker.tables.rules, submissions)
    if is_first:
        drop = worker.drop = DropDirectory(
            settings.sendmail.drop,
            take_by(worker.listeners.local),
            max_size=max(each.max_message_size for each in settings.listener),
            hostname=worker.context.hostname,
            events=events,
        )
        stack.push_async_callback(drop.stop)
        drop.start()
