"""`zonerelay spool migrate`: moves the whole queue to the spool of another configuration, on any engine.

A private source requires its relay to be stopped. A source in Redis or PostgreSQL does not, on any machine:
messages that no relay is attempting are moved, in passes that go on until the source is empty. Relays of such
a target may run, too, because this process joins them as one more relay, which claims nothing. If the relay
of a private target runs, the mail goes into the spool of an additional worker next to its own spools. That
relay empties and removes the spool from its next start on, so no process touches a spool that another one has
open. With S3, the relays of both sides are stopped, because there a message belongs to a relay whether or not
it is claimed.

Files in the spool's directory that must be active for the mail are copied before any message is moved: above
all operators' suspensions, which are merged with those of the target. A relay that runs on a shared target
confirms that it applies them. If a relay of the target runs on another machine, which has its own
suspensions, nothing is moved while there are suspensions to be copied.

Idempotency keys are copied before any message is moved, and again after messages that arrive during the
migration, so that the target knows a key before it may send the message. They stay in the source until they
expire.

The target is reopened for each `STRETCH` messages, so that messages are verified against what is stored. The
exit status is 0 if the source is empty, 1 if mail has stayed in it (which is listed) or a store failed, and 2
if nothing could be started. An interrupted migration is continued by running the command again; see
transfer/migration.py.
"""

import asyncio
import contextlib
import os
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from zonerelay.cli.relay import client_of, load_settings
from zonerelay.cli.spool import home_files
from zonerelay.cli.spool.copies import check_rooms
from zonerelay.cli.spool.stopped import RelayRunningError, all_opened, alongside, spools, stopped, translated
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError, refused
from zonerelay.config.settings import MAX_WORKERS, Backend, Settings
from zonerelay.control.socket import control_socket_path
from zonerelay.model.envelope import LENGTH, MessageId
from zonerelay.operations.answers import OrderRow, RelayStatus
from zonerelay.operations.requests import Orders, Status
from zonerelay.process.sockets import answers
from zonerelay.queue.operator.filters import ALL
from zonerelay.queue.orders.orders import OrdersFile
from zonerelay.store.contract import Store
from zonerelay.store.offline import living
from zonerelay.store.open import place_of_queue
from zonerelay.store.spool_paths import KEYS, count_of, directories_of, is_shared, name_of
from zonerelay.transfer.files import ExportSelection, UnusableMessage, survey
from zonerelay.transfer.migration import Migration, MigrationJournal, MigrationResult

FILE = "migration"
STRETCH = 10_000
"""Messages that are copied before they are read back, and that are held in the source meanwhile."""
_NODE = 255
"""The number of this process among the relays on a database: the highest, which hardly any relay has."""
_PATIENCE = 120.0
_PAUSE = 1.0


def migrate(arguments: Namespace) -> int:
    source, target = load_settings(arguments.config), load_settings(arguments.to)
    places = [_place(source), _place(target)]
    if places[0] == places[1]:
        raise CliError(f"both configurations store the queue in {places[0]}", USAGE)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(_source(source))
        with _translating():
            journal = MigrationJournal(home / FILE, *places)
            stack.callback(journal.close)
        process = _enter_target(stack, source, target, journal)
        with _translating(), output.without_log():
            run = _MigrationRun(_as_node(source), _as_node(target), journal)
            asyncio.run(run.go())
            if not process:  # the workers of the target rebuild it from their spools
                shutil.rmtree(target.spool.path.parent / KEYS, ignore_errors=True)
        done = run.moved
        for each in done.lost:
            output.tell(f"not copied: {each}")
        journal.is_over = not done.left and not done.unusable
    done.seconds = round(time.monotonic() - started, 3)
    if journal.spools[0]:
        done.spool = str(target.spool.path / name_of(journal.spools[0]))
    output.print_one(done, partial(_print, process), as_json=arguments.json)
    return FAILED if done.left or done.unusable or done.lost else OK


def _place(settings: Settings) -> str:
    """Return a human-readable location of the queue. Raise CliError if the engine stores nothing."""
    if settings.spool.backend is Backend.MEMORY:
        raise CliError('backend = "memory" stores no queue that can be migrated', USAGE)
    return place_of_queue(settings) or f"{settings.spool.backend.value} {settings.spool.path.resolve()}"


def _may_run(settings: Settings) -> bool:
    return settings.spool.backend in (Backend.REDIS, Backend.POSTGRES)


@contextlib.contextmanager
def _source(settings: Settings) -> Iterator[Path]:
    if _may_run(settings):
        with alongside(settings) as home:
            yield home
        return
    beside = (
        ". To accept mail during the migration, start the relay of the other configuration first, with "
        "another [spool] path, and send clients there; then stop this one and migrate"
    )
    with refused(RelayRunningError, after=beside, status=USAGE), stopped(settings) as home:
        yield home


def _enter_target(
    stack: contextlib.ExitStack, source: Settings, target: Settings, journal: MigrationJournal
) -> int:
    """Lock the target, choose its spools for the migration, and return the process id of a relay that uses
    its other spools, or 0.
    """
    process = 0
    if _may_run(target):
        stack.enter_context(alongside(target))
    elif _may_run(source) or target.spool.path.parent.resolve() != source.spool.path.parent.resolve():
        try:
            stack.enter_context(stopped(target))
        except RelayRunningError as error:
            if is_shared(target.spool) or (journal.spools and not journal.spools[0]):
                raise
            process = error.process
            stack.enter_context(alongside(target))
    if not journal.spools:
        journal.choose((_free_spool(target),) if process else range(_workers(target)))
    return process


def _workers(target: Settings) -> int:
    """Return how many workers of the target have a spool of their own; a shared store counts as one."""
    return 1 if is_shared(target.spool) else count_of(target)


def _free_spool(target: Settings) -> int:
    """Return the number of a spool that no worker of the target uses."""
    for number in range(MAX_WORKERS - 1, _workers(target) - 1, -1):
        if not any((place / name_of(number)).exists() for place in directories_of(target.spool)):
            return number
    raise CliError(f"{target.spool.path} has no partition for another spool; stop its relay first", USAGE)


def _as_node(settings: Settings) -> Settings:
    return replace(settings, postgres=replace(settings.postgres, node=_NODE))


@contextlib.contextmanager
def _translating() -> Iterator[None]:
    try:
        with translated():
            yield
    except KeyboardInterrupt:
        output.tell("Interrupted. Mail may be held in both queues. Run the command again to continue.")
        raise


def _confirm_orders(target: Settings, wanted: set[str]) -> None:
    """Raise CliError unless these suspensions are active in all workers of the target's relay. Raise
    ControlError if the relay does not answer.
    """
    shown, end = client_of(target).all(Orders(), OrderRow)  # each worker reads the file before it answers
    now = {each.id for each in OrdersFile(target.spool.path.parent).read() if each.is_in_force(time.time())}
    if end.missing or not wanted & now <= {each.id for each in shown}:
        missing = ", ".join(end.missing) or "its active suspensions differ from those in its file"
        raise CliError(
            "the mail stays in the source: the relay of the target has not activated the suspensions of "
            f"the source: {missing}. Run the command again, or stop that relay",
            USAGE,
        )


def _patience(settings: Settings) -> float:
    """Return the seconds until the claims of a killed relay in a shared store have usually expired."""
    leases = {
        Backend.REDIS: settings.redis.lease,
        Backend.POSTGRES: settings.postgres.lease,
        Backend.S3: settings.s3.lease,
    }
    return min(2 * leases.get(settings.spool.backend, 0.0), _PATIENCE)


class _MigrationRun:
    """One run of the command `spool migrate`."""

    def __init__(self, source: Settings, target: Settings, journal: MigrationJournal) -> None:
        self._source = source
        self._target = target
        self._journal = journal
        self._patience = max(_patience(source), _patience(target))
        self._seen = 0.0
        self._total = 0
        self._reach: output.Reach = lambda _done, _total: None
        self.moved = MigrationResult()
        self._keys = dict[int, int]()
        """How many were copied from the spool of each worker."""
        self._unusable = set[str]()

    async def go(self) -> None:
        """Migrate the queue. The result is in `moved`.

        Raise StoreError, TransferError, OSError or CliError if the migration fails.
        """
        moved, workers = self.moved, spools(self._source.spool)
        async with all_opened(self._source, workers) as sources:
            await self._check_room(sources)
            carried = await self._bring_along()
            for worker, store in zip(workers, sources, strict=True):
                await self._copy_keys(store, worker)
            with output.progress("Migrating") as self._reach:
                for worker, store in zip(workers, sources, strict=True):
                    moved.left += await self._empty(store, worker)
        home_files.bring_along(self._source, self._target, carried, records=True)
        moved.copied, moved.kept, moved.lost = carried.copied, carried.kept, carried.lost
        moved.keys, moved.unusable = sum(self._keys.values()), len(self._unusable)

    async def _check_room(self, sources: Sequence[Store]) -> None:
        """Raise CliError if the target does not have enough free space, before anything is written there."""
        octets = 0
        if not is_shared(self._target.spool):
            octets = sum([(await self._look(each)).octets for each in sources])
        home, spool = self._target.spool.path.parent, self._target.spool
        beside_spool = 0
        if home.resolve() != self._source.spool.path.parent.resolve():
            beside_spool = home_files.octets_of(self._source)
        check_rooms(spool, octets, beside_spool)

    async def _bring_along(self) -> home_files.CopiedFiles:
        """Copy the suspensions and other files that every relay of the target needs before it receives the
        mail. Raise CliError if suspensions cannot be made active there; nothing is changed then.
        """
        source, target = self._source, self._target
        mine, theirs = (OrdersFile(each.spool.path.parent).read() for each in (source, target))
        now, ended = time.time(), {each.id for each in theirs if each.ended is not None}
        wanted = {each.id for each in mine if each.is_in_force(now)} - ended
        # A relay of a private target reads the suspensions at its start, before it has the mail.
        runs = bool(wanted) and _may_run(target) and answers(control_socket_path(target))
        if wanted and _may_run(target):
            own = max(1, len(client_of(target).ask(Status(), RelayStatus).workers)) if runs else 0
            await self._refuse_company(own, wanted)
        carried = home_files.CopiedFiles()
        home_files.bring_along(source, target, carried, records=False)
        if runs:
            _confirm_orders(target, wanted)
        return carried

    async def _refuse_company(self, own: int, orders: set[str]) -> None:
        """Wait until no relay on another machine uses the target, or raise CliError."""
        deadline = time.monotonic() + self._patience
        while (others := await living(self._target, os.environ) - own) > 0:
            if time.monotonic() > deadline:
                raise CliError(
                    f"the mail stays in the source: the target is shared with other relays ({others}), "
                    "perhaps on other machines, and the suspensions of the source "
                    f"({', '.join(sorted(orders))}) would apply on this machine only, so the others would "
                    "send suspended mail. Stop these relays until the suspensions have ended, or end them "
                    "first (zonerelay resume)",
                    USAGE,
                )
            await asyncio.sleep(_PAUSE)

    def _orders_over(self) -> set[str]:
        orders, now = OrdersFile(self._target.spool.path.parent).read(), time.time()
        return {each.id for each in orders if not each.is_in_force(now)}

    async def _empty(self, store: Store, worker: int) -> int:
        progress, meant = time.monotonic(), await self._look(store)
        while True:
            before = self.moved.messages
            await self._pass(store, worker, meant)
            meant = await self._look(store)
            if worker in self._keys and _may_run(self._source) and self.moved.messages > before:
                await self._copy_keys(store, worker)
            if not meant.ids:
                return 0
            if self.moved.messages > before:
                progress = time.monotonic()
            elif time.monotonic() - progress > self._patience:
                return len(meant.ids)
            await asyncio.sleep(_PAUSE)

    async def _copy_keys(self, store: Store, worker: int) -> None:
        now, copied, cursor = time.time(), 0, ""
        async with contextlib.AsyncExitStack() as stack:
            targets: Sequence[Store] = ()
            while True:
                page, cursor = await store.kept_keys(cursor)
                valid = [each for each in page if each[1].until > now]
                if valid and not targets:
                    targets = await stack.enter_async_context(all_opened(self._target, self._journal.spools))
                for number, target in enumerate(targets):
                    await target.keep_keys(valid[number :: len(targets)])
                copied += len(valid)
                if not cursor:
                    break
        self._keys[worker] = copied

    async def _look(self, store: Store) -> ExportSelection:
        found = await survey(store, ALL, time.time())
        for identity in self._unusable:
            with contextlib.suppress(ValueError):
                found.ids.remove(int(identity, 16))
        self._total = int(self._seen) + len(found.ids)
        return found

    async def _pass(self, store: Store, worker: int, meant: ExportSelection) -> None:
        start = 0
        while start < len(meant.ids) or not self._journal.is_finished(worker):
            stretch = [MessageId(f"{number:0{LENGTH}x}") for number in meant.ids[start : start + STRETCH]]
            start += len(stretch)
            if _may_run(self._source):  # operators may end suspensions during the migration
                await self._bring_along()
            async with all_opened(self._target, self._journal.spools) as targets:
                migration = Migration(
                    store,
                    targets,
                    self._journal,
                    self.moved,
                    spool=worker,
                    patience=self._patience,
                    orders_over=self._orders_over,
                    saw=self._saw,
                )
                await migration.finish()
                await migration.copy(stretch)

    def _saw(self, messages: float, skipped: UnusableMessage | None) -> None:
        self._seen += messages
        if skipped is not None:
            self._unusable.add(skipped.name)
            output.tell(f"{skipped.name}: not moved: {skipped.why}")
        self._reach(int(self._seen), max(int(self._seen), self._total))


def _print(process: int, done: MigrationResult) -> None:
    print(
        f"{text.plural(done.messages, 'message')} with {text.deliveries(done.deliveries)} moved and "
        f"verified: {text.size(done.octets)} in {done.seconds:.1f} s."
    )
    if done.zones:
        zones = sorted(done.zones.items())
        states = ("ready", "deferred", "held")
        rows = ({"zone": zone, **{name: getattr(each, name) for name in states}} for zone, each in zones)
        output.console().print(output.table(rows))
    if done.keys:
        print(f"{text.plural(done.keys, 'idempotency key')} copied.")
    if done.already:
        print(f"Removed from the source, because moved before: {text.plural(done.already, 'message')}.")
    if done.left:
        print(
            f"Left in the source, because running relays are sending them: "
            f"{text.plural(done.left, 'message')}. Run the command again, or stop these relays first."
        )
    if done.copied:
        print(f"Other files copied: {', '.join(done.copied)}.")
    if done.kept:
        print(f"Not copied, because the target already has them: {', '.join(done.kept)}.")
    if done.spool:
        print(
            f"The mail is in {done.spool}. The relay of the target sends it after its next start"
            + (f"; restart process {process}." if process else ".")
        )
