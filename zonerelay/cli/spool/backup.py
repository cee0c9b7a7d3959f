"""`zonerelay spool backup` and `spool restore`: save the queue and the other files of a relay to a directory,
and restore them.

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

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import socket
import time
from argparse import Namespace
from pathlib import Path

import msgspec

from zonerelay import __version__, durable
from zonerelay.cli.relay import load_settings
from zonerelay.cli.spool import home_files
from zonerelay.cli.spool.exchange import MailCounts, check_room, check_rooms, loading, write_mail
from zonerelay.cli.spool.stopped import opened, spools, stopped
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError, refused
from zonerelay.config.settings import Backend, Settings
from zonerelay.queue.operator.filters import FilterMatcher, QueueFilter
from zonerelay.queue.orders.orders import OrdersError
from zonerelay.store.contract import QueueView, Store, StoredKey, StoreError
from zonerelay.store.offline import view_spool
from zonerelay.store.spool_paths import KEYS, is_shared
from zonerelay.transfer import files
from zonerelay.transfer.export import survey
from zonerelay.transfer.loader import ImportRegister, ImportResult
from zonerelay.transfer.stored import TransferError

FORMAT = 1
_DESCRIPTION = "backup.json"
_HOME = "home"
_KEYS = ".keys"
_PAGE = 256 * 1024


class BackupDescription(MailCounts, kw_only=True):
    """The description of a backup, in `backup.json`. `made` is the Unix time whose state the backup contains.
    `files` maps names to SHA-256 hashes. `missing` names files in the spool's directory that could not.
    """

    format: int = FORMAT
    zonerelay: str = __version__
    made: float
    hostname: str
    backend: str
    missing: list[str] | msgspec.UnsetType = msgspec.UNSET
    files: dict[str, str] = msgspec.field(default_factory=dict)


class _BackupFormat(msgspec.Struct):
    """The version of a backup's format."""

    format: int


def backup(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    target: Path = arguments.path.absolute()
    if target.exists():
        raise CliError(f"{target} exists; specify a new directory", USAGE)
    started = time.monotonic()
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        durable.make_directory(draft)
        with output.without_log():
            description = asyncio.run(_backup(settings, draft))
        durable.sync_tree(draft)
        durable.rename(draft, target)
    except (StoreError, TransferError, OSError) as error:
        raise CliError(f"the backup failed: {error}", USAGE) from error
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
        print("A restored backup sends again what has left the queue since it was made.")
        if settings.spool.backend is not Backend.LEVELDB:
            print("What came or left while it was made may not be in it.")
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
        now, octets = time.time(), home_files.octets_of(settings)
        everything = FilterMatcher(QueueFilter(), now)
        octets += sum([(await survey(each, everything, now)).octets for each in views])
        check_room(octets, draft.parent, 0)
        for number, store in enumerate(views):
            # Keys first: the message of a key that arrives later would not be in the backup.
            await _export_keys(store, draft / f"{number:02d}{_KEYS}")
            with files.writing(draft / f"{number:02d}.tar") as target:
                await write_mail("backup", store, everything, now=now, target=target, done=description)
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
    """One line of the file of idempotency keys."""

    identity: str
    kept: StoredKey


async def _export_keys(store: QueueView, path: Path) -> None:
    """Write the idempotency keys, one per line. Write no file if there are none."""
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


# --- restore


def restore(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    source: Path = arguments.path.absolute()
    description = _checked(source)
    with stopped(settings) as home:
        spool, octets = settings.spool, sum(path.stat().st_size for path in _files(source / _HOME))
        mail = sum(path.stat().st_size for path in source.glob("[0-9][0-9].*"))
        check_rooms(spool, 0 if is_shared(spool) else mail, octets)
        kept = ". Everything restored so far is kept; run the command again to continue"
        with (
            refused(StoreError, TransferError, OSError, after=kept),
            refused(OrdersError, before="nothing was restored: ", status=USAGE),
        ):
            messages, deliveries, unusable = asyncio.run(_restore(settings, source, description, home))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(description.made))
    print(f"{text.plural(messages, 'message')} with {text.deliveries(deliveries)} restored, as of {when}.")
    return FAILED if unusable else OK


def _checked(source: Path) -> BackupDescription:
    """Return the description of a backup. Raise CliError unless every file exists and is unchanged."""
    with refused(OSError, msgspec.MsgspecError, before=f"{source} is not a zonerelay backup: ", status=USAGE):
        raw = (source / _DESCRIPTION).read_bytes()
        if (version := msgspec.json.decode(raw, type=_BackupFormat).format) != FORMAT:
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
    """Restore the mail. Each restore has its own import log, so that an interrupted one can be continued and
    another one begins from the start.
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
        for part in sorted(source.glob("[0-9][0-9].tar")):
            with files.reading(part) as mail:
                await loader.load(mail)
        # Keys last: a key without its message would refuse the message for good.
        for part in sorted(source.glob(f"[0-9][0-9]{_KEYS}")):
            await _load_keys(store, part)
        # The workers rebuild it from their spools.
        shutil.rmtree(settings.spool.path.parent / KEYS, ignore_errors=True)
    return loader.loaded
