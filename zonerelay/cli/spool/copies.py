"""`zonerelay spool export` and `spool import` write mail to files and read it from files or from other mail
systems. `spool backup` and `spool restore` save the queue and the other files of a relay to a directory, and
restore them.

An export and an import exit with 0 if every selected message has been written, with 1 if some could not be
written or the disk or the store failed, and with 2 if nothing could be started. A backup consists of

    backup.json           the format, its time and host, the amount of mail, a checksum of each file
    00.tar, 01.tar …      each worker's mail in the format of `spool export` (docs/store/spool-format.md)
    00.keys …             its idempotency keys, one per line; absent if there are none
    home/                 the key of pseudonyms, MTA-STS policies, refresh tokens, the import log,
                          the suspensions and hold rules of operators, the history

The relay may run during a backup and is not blocked. LevelDB spools are read from snapshots, which are all
taken before the first one is read. Any other queue is read message by message, so mail that arrives or leaves
during the backup may be missing. The directory gets its final name when all its contents are durable.

A restore needs a stopped relay and an empty spool of any engine. Mail that has left the queue since the
backup is sent again.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import structs

from zonerelay import __version__, durable
from zonerelay.cli.arguments import request_of
from zonerelay.cli.relay import load_settings
from zonerelay.cli.spool import home_files
from zonerelay.cli.spool.stopped import all_opened, opened, spools, stopped, translated
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError, refused
from zonerelay.config.settings import Backend, Settings, SpoolSettings
from zonerelay.control.acts import queue_filter
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.operations.requests import QueueCount
from zonerelay.queue.operator.filters import ALL, QueueFilter
from zonerelay.queue.orders.order import Order, OrderTable, Subject
from zonerelay.queue.orders.orders import OrdersFile
from zonerelay.routing.zones.zones import Zones
from zonerelay.store.contract import QueueView, Store, StoredKey, StoreError
from zonerelay.store.offline import view_spool
from zonerelay.store.spool_paths import KEYS, is_shared
from zonerelay.transfer import files, others
from zonerelay.transfer.files import Source, TransferError, UnusableMessage
from zonerelay.transfer.loader import ImportRegister, ImportResult, Loader

_BRACKETS = str.maketrans("", "", "[] ")


class MailCounts(msgspec.Struct):
    """The numbers of messages and deliveries written. `unusable` counts messages that could not be
    written.
    """

    messages: int = 0
    deliveries: int = 0
    unusable: int = 0


class ExportResult(MailCounts):
    """The result of `spool export --json`. `suspended` counts deliveries that were exported as held."""

    suspended: int = 0


def export_to(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    target: Path = arguments.path.absolute()
    now = time.time()
    wanted = queue_filter(request_of(arguments, QueueCount).filter)
    with stopped(settings), translated("Nothing was written"), files.writing(target) as target_files:
        done = asyncio.run(_export(settings, wanted, now, target_files, target.parent))
    words = f"{text.plural(done.messages, 'message')} with {text.deliveries(done.deliveries)} in {target}."
    if done.suspended:
        words += (
            f"\n{text.deliveries(done.suspended)} of them are suspended by operators, and will be "
            "held after the import; release them with: zonerelay queue release"
        )
    output.print_answer(done, words, as_json=arguments.json)
    return FAILED if done.unusable else OK


async def _export(
    settings: Settings, wanted: QueueFilter, now: float, target: files.Target, place: Path
) -> ExportResult:
    done = ExportResult()
    suspending = _suspending(settings, now)

    def held(message: Message, delivery: Delivery) -> Delivery:
        if delivery.held or (order := suspending(message, delivery)) is None:
            return delivery
        done.suspended += 1
        return structs.replace(delivery, held=True, act=order.id)

    async with all_opened(settings, spools(settings.spool)) as stores:
        selected = [await files.survey(each, wanted, now) for each in stores]
        check_room(sum(each.octets for each in selected), place, 0)
        for store, meant in zip(stores, selected, strict=True):
            await _write_mail(
                "Exporting", store, meant, wanted, now=now, target=target, done=done, change=held
            )
    return done


async def _write_mail(
    title: str,
    store: QueueView,
    meant: files.ExportSelection,
    wanted: QueueFilter,
    *,
    now: float,
    target: files.Target,
    done: MailCounts,
    change: Callable[[Message, Delivery], Delivery] = lambda _, delivery: delivery,
) -> None:
    """Export the matching mail of one store, and report progress and messages that cannot be written."""
    with output.progress(title) as reach:

        def saw(deliveries: int, skipped: UnusableMessage | None) -> None:
            done.messages += deliveries > 0
            done.deliveries += deliveries
            if skipped is not None:
                done.unusable += 1
                _tell(skipped)
            reach(done.messages, max(len(meant.ids), done.messages))

        await files.export(store, meant, wanted, now, target, saw=saw, change=change)


def _suspending(settings: Settings, now: float) -> Callable[[Message, Delivery], Order | None]:
    """Return a function that finds the suspension that currently stops a delivery. The relay that imports the
    mail may not have these suspensions. The MX hosts of a domain are not known here, so a suspension of any
    destination may apply to it.
    """
    orders = OrdersFile(settings.spool.path.parent).read()
    at_hops = OrderTable(orders, now)
    at_mx = OrderTable([msgspec.structs.replace(each, destination=None) for each in orders], now)
    hops = {zone.name: zone.next_hop.translate(_BRACKETS) for zone in settings.zone}

    def suspending(message: Message, delivery: Delivery) -> Order | None:
        envelope, hop = message.envelope, hops.get(delivery.zone, "")
        mail = Subject(
            delivery.zone,
            delivery.recipient,
            envelope.sender,
            envelope.origin.user,
            hop or delivery.domain,
            hop,
        )
        return (at_hops if hop else at_mx).holding(mail, delivery.act)

    return suspending


def import_from(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    with stopped(settings) as home, translated():
        done = asyncio.run(_import_from(settings, arguments.system, arguments.place, home))
    words = f"{text.plural(done.messages, 'message')} with {text.deliveries(done.deliveries)} imported."
    if done.already:
        words += f"\n{text.deliveries(done.already)} skipped: imported before, or already in the spool."
    output.print_answer(done, words, as_json=arguments.json)
    return FAILED if done.unusable else OK


async def _import_from(settings: Settings, system: str | None, place: str, home: Path) -> ImportResult:
    now = time.time()
    if system is None:
        # A backup includes the suspensions for its mail, and so does a restore.
        OrdersFile(home).merge(OrdersFile(Path(place).absolute().parent / "home").read(), now)
        with files.reading(Path(place)) as source:
            return await _import(settings, source, home, now)
    async with others.reading(system, place, now) as source:
        return await _import(settings, source, home, now)


async def _import(settings: Settings, source: Source, home: Path, now: float) -> ImportResult:
    if not is_shared(settings.spool):
        check_rooms(settings.spool, source.octets + files.DESCRIPTION_SIZE * source.messages, 0)
    register = ImportRegister(home)
    async with opened(settings) as store:
        with loading("Importing", settings, store, register, messages=source.messages, now=now) as loader:
            await loader.load(source)
    return loader.loaded


@contextlib.contextmanager
def loading(
    text: str, settings: Settings, store: Store, register: ImportRegister, *, messages: int, now: float
) -> Iterator[Loader]:
    """Yield a `Loader` that shows the progress of an import and prints messages that cannot be imported."""
    with output.progress(text) as reach:
        seen = 0

        def saw(skipped: UnusableMessage | None) -> None:
            nonlocal seen
            seen += 1
            if skipped is not None:
                _tell(skipped)
            reach(seen, max(seen, messages))

        yield Loader(store, register, Zones(settings.zone, settings.route), now=now, saw=saw)


def _tell(skipped: UnusableMessage) -> None:
    output.tell(f"{skipped.name}: not taken: {skipped.why}")


def check_rooms(spool: SpoolSettings, mail: int, beside: int) -> None:
    """Raise CliError if there is not enough free space for the mail and the other files (sizes in bytes)."""
    home, guard = spool.path.parent, spool.min_free_space
    place = spool.path if spool.path.exists() else home
    if place.stat().st_dev == home.stat().st_dev:
        check_room(mail + beside, place, guard)
    else:
        check_room(mail, place, guard)
        check_room(beside, home, guard)


def check_room(needed: int, place: Path, guard: int) -> None:
    """Raise CliError if there is not enough free space for `needed` bytes."""
    free = max(shutil.disk_usage(place).free - guard, 0)
    if needed > free:
        beside = f" in addition to the {text.size(guard)} of min_free_space" if guard else ""
        raise CliError(
            f"{place} requires {text.size(needed)}, but only {text.size(free)} are free{beside}", USAGE
        )


# --- backup -------------------------------------------------------------------------------------------------

FORMAT = 1
_DESCRIPTION = "backup.json"
_HOME = "home"
_KEYS = ".keys"
_PAGE = 256 * 1024


class BackupDescription(MailCounts, kw_only=True):
    """The description of a backup, which is the content of its file `backup.json`. `made` is the Unix time
    whose state the backup contains. `files` maps names to SHA-256 hashes. `missing` names files in the
    spool's directory that could not be copied.
    """

    format: int = FORMAT
    zonerelay: str = __version__
    made: float
    hostname: str
    backend: str
    missing: list[str] | msgspec.UnsetType = msgspec.UNSET
    files: dict[str, str] = msgspec.field(default_factory=dict)


def backup(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    target: Path = arguments.path.absolute()
    if target.exists():
        raise CliError(f"{target} exists; specify a new directory", USAGE)
    started = time.monotonic()
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    failed = refused(StoreError, TransferError, OSError, status=USAGE, before="the backup failed: ")
    try:
        with failed, output.without_log():
            durable.make_directory(draft)
            description = asyncio.run(_backup(settings, draft))
            durable.sync_tree(draft)
            durable.rename(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if arguments.json:
        output.print_document(description)
    else:
        octets = sum(path.stat().st_size for path in target.rglob("*"))
        seconds = time.monotonic() - started
        print(
            f"{text.plural(description.messages, 'message')} with"
            f" {text.deliveries(description.deliveries)} in {target}:"
            f" {text.size(octets)} in {seconds:.1f} s."
        )
        print("A restored backup sends mail again that has left the queue since the backup.")
        if settings.spool.backend is not Backend.LEVELDB:
            print("Mail that arrived or left during the backup may be missing.")
    return FAILED if description.unusable or description.missing else OK


async def _backup(settings: Settings, draft: Path) -> BackupDescription:
    description = BackupDescription(
        made=time.time(), hostname=socket.gethostname(), backend=settings.spool.backend.value
    )
    async with contextlib.AsyncExitStack() as stack:
        views = [
            await stack.enter_async_context(
                view_spool(settings, worker, os.environ, settings.spool.path.parent)
            )
            for worker in spools(settings.spool)
        ]
        # Keys first: the message of a key that arrives later would not be in the backup.
        for number, store in enumerate(views):
            await _export_keys(store, draft / f"{number:02d}{_KEYS}")
        now = time.time()
        selected = [await files.survey(each, ALL, now) for each in views]
        octets = home_files.octets_of(settings) + sum(each.octets for each in selected)
        check_room(octets, draft.parent, 0)
        for number, (store, meant) in enumerate(zip(views, selected, strict=True)):
            with files.writing(draft / f"{number:02d}.tar") as target:
                await _write_mail("backup", store, meant, ALL, now=now, target=target, done=description)
    carried = home_files.save(settings, draft / _HOME)
    carried.tell()
    if carried.lost:
        description.missing = carried.lost
    description.files = {str(path.relative_to(draft)): _checksum(path) for path in _files(draft)}
    members = msgspec.to_builtins(description)
    first = {name: members.pop(name) for name in ("format", "zonerelay", "made", "hostname", "backend")}
    content = msgspec.json.format(msgspec.json.encode(first | members), indent=2)
    durable.write(draft / _DESCRIPTION, content + b"\n")
    return description


class _StoredKeyLine(msgspec.Struct):
    """One line of a backup's file of idempotency keys."""

    identity: str
    kept: StoredKey


async def _export_keys(store: QueueView, path: Path) -> None:
    """Write the idempotency keys to a file, one per line. Create no file if there are none."""
    cursor = ""
    while True:
        page, cursor = await store.kept_keys(cursor)
        if page:
            durable.append(
                path, b"".join(msgspec.json.encode(_StoredKeyLine(*each)) + b"\n" for each in page)
            )
        if not cursor:
            return


async def _load_keys(store: Store, path: Path) -> None:
    with path.open("rb") as file:
        while lines := file.readlines(_PAGE):
            keys = [msgspec.json.decode(line, type=_StoredKeyLine) for line in lines]
            await store.keep_keys([(key.identity, key.kept) for key in keys])


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != _DESCRIPTION)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- restore ------------------------------------------------------------------------------------------------


def restore(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    source: Path = arguments.path.absolute()
    description = _checked(source)
    with stopped(settings) as home:
        spool, octets = settings.spool, sum(path.stat().st_size for path in _files(source / _HOME))
        mail = sum(path.stat().st_size for path in source.glob("[0-9]*.*"))
        check_rooms(spool, 0 if is_shared(spool) else mail, octets)
        with translated():
            messages, deliveries, unusable = asyncio.run(_restore(settings, source, description, home))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(description.made))
    print(f"{text.plural(messages, 'message')} with {text.deliveries(deliveries)} restored, as of {when}.")
    return FAILED if unusable else OK


def _checked(source: Path) -> BackupDescription:
    """Read the description of a backup, and check all files of the backup. Raise CliError if a file is
    missing or has changed.
    """
    no_backup = (OSError, UnicodeDecodeError, RecursionError, msgspec.MsgspecError)
    with refused(*no_backup, before=f"{source} is not a zonerelay backup: ", status=USAGE):
        raw = (source / _DESCRIPTION).read_bytes()
        if (version := msgspec.json.decode(raw, type=dict[str, object]).get("format")) != FORMAT:
            raise CliError(f"{source} has format {version}; this release supports {FORMAT}", USAGE)
        description = msgspec.json.decode(raw, type=BackupDescription)
        for name, wanted in description.files.items():
            if _checksum(source / name) != wanted:
                raise CliError(
                    f"{source / name} is damaged: its checksum differs from the one in {_DESCRIPTION}", USAGE
                )
    return description


async def _restore(
    settings: Settings, source: Path, description: BackupDescription, home: Path
) -> tuple[int, int, int]:
    """Import the mail of a backup into the spool. Each restore has its own import log, so that an interrupted
    one can be continued and another one begins from the start.
    """
    under_way = home / f"restore-{description.made:.0f}"
    async with opened(settings) as store:
        left_over = "" if is_shared(settings.spool) else await store.left_over()
        if not under_way.exists() and (left_over or await store.queues()):
            raise CliError(
                "the spool is not empty: a backup can be restored only into an empty spool. To add its "
                f"mail to a queue, import it: zonerelay spool import {source / '00.tar'}",
                USAGE,
            )
        durable.make_directory(under_way)
        carried = home_files.restore(settings, source / _HOME)
        carried.tell()
        loaded = await _load(settings, source, description, store, ImportRegister(under_way))
    shutil.rmtree(under_way)
    # A removal that is lost in a crash would let a later restore continue this one instead of starting.
    durable.sync_directory(home)
    return loaded.messages, loaded.deliveries, loaded.unusable + len(carried.lost)


async def _load(
    settings: Settings, source: Path, description: BackupDescription, store: Store, register: ImportRegister
) -> ImportResult:
    now, messages = time.time(), description.messages
    with loading("restoring", settings, store, register, messages=messages, now=now) as loader:
        for part in sorted(source.glob("[0-9]*.tar")):
            with files.reading(part) as mail:
                await loader.load(mail)
        # Keys last: a key without its message would refuse the message for good.
        for part in sorted(source.glob(f"[0-9]*{_KEYS}")):
            await _load_keys(store, part)
        # The workers rebuild it from their spools.
        shutil.rmtree(settings.spool.path.parent / KEYS, ignore_errors=True)
    return loader.loaded
