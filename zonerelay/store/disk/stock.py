"""Reads what the disk queue's directories hold at a start, and after a failed write. All of it blocks.

First what had been begun is ended (`settle_down`): intents are finished, what was staged is removed, and so
are states without a message (never acknowledged, or finished). That goes by the directories alone, and an
intent is removed last: an error or a crash in the middle is answered by doing it again, as often as need be.

At a start a message without a state is recovered: its state is written again as it was at the beginning.
Whatever else cannot be used is logged, counted and left for the operator: unreadable files, empty ones, files
of others. None of it stops the start.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from zonerelay.model.message_id import MessageId
from zonerelay.store.common.keeper.ballast import FILE_NAME as BALLAST_NAME
from zonerelay.store.contract import Kept, MessageNotFoundError, StoreCorruptError
from zonerelay.store.disk import batch as disk_batch
from zonerelay.store.disk import files
from zonerelay.store.disk import format as disk_format
from zonerelay.store.disk.directories import LOCK_NAME, Directories, Directory, translated
from zonerelay.store.disk.format import IndexRecord

MAX_NAMED = 20
"""Files of a kind that are named in the log; of the rest there is a count."""

_STAGED = re.compile(r"[0-9a-f]{16}\.(\d+\.)?(env|meta)|\d+\.intent|zonerelay\.(trial|probe)|[-\w]+\.once")
_INTENT = re.compile(rf"\d+{re.escape(disk_batch.INTENT_SUFFIX)}")
_OF_A_BATCH = re.compile(r"[0-9a-f]{16}\.\d+\.meta|\d+\.intent|[-\w]+\.once")
"""What a batch stages, messages apart: uploads that go on have the same names."""

_log = logging.getLogger("zonerelay.store")


@dataclass(slots=True)
class Listing:
    """The names in the directories of messages and states. `damaged`: intents that cannot be read."""

    messages: dict[MessageId, int] = field(default_factory=dict)
    """Ids with the size of the `.env` file."""
    states: set[MessageId] = field(default_factory=set)
    intents: list[str] = field(default_factory=list)
    last_ids: list[MessageId] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @property
    def is_used(self) -> bool:
        return bool(self.messages or self.states)


@dataclass(slots=True)
class Stock:
    """What was found. `unreadable` and `foreign` are numbers of files, for the operator; `number`
    is the highest of a batch whose intent is still there.
    """

    kept: dict[str, Kept] = field(default_factory=dict)
    last_id: MessageId | None = None
    noted_id: MessageId | None = None
    number: int = 0
    unreadable: int = 0
    foreign: int = 0
    entries: list[tuple[MessageId, list[IndexRecord]]] = field(default_factory=list)


def list_names(directories: Directories) -> Listing:
    found = Listing()
    _list(directories.env, found)
    if not directories.is_shared:
        _list(directories.meta, found)
    found.last_ids.sort()
    return found


def _list(directory: Directory, found: Listing) -> None:
    # By its descriptor: behind the path may be another file system by now, and all states look left over.
    with translated(), os.scandir(directory.descriptor) as entries:
        for entry in entries:
            parsed = disk_format.parse_name(entry.name)
            if parsed is None:
                _sort_other(directory, entry, found)
            elif not entry.is_file(follow_symlinks=False):
                found.foreign.append(str(directory.path / entry.name))
            elif parsed[1] == "env":
                found.messages[parsed[0]] = entry.stat(follow_symlinks=False).st_size
            else:
                found.states.add(parsed[0])


def _sort_other(directory: Directory, entry: os.DirEntry[str], found: Listing) -> None:
    name = entry.name
    if _INTENT.fullmatch(name):
        found.intents.append(name)
    elif disk_format.parse_key_name(name):
        found.keys.append(name)
    elif name.endswith(disk_batch.LAST_SUFFIX):
        found.last_ids += disk_batch.noted_last_ids([name])
    elif name not in (LOCK_NAME, BALLAST_NAME) and not entry.is_dir():
        found.foreign.append(str(directory.path / name))


# --- ending what was begun


def settle_down(
    directories: Directories, staged: re.Pattern[str], refused: Sequence[MessageId] = ()
) -> Listing:
    """From the directories alone, and the same when it is done again. `staged` is what goes from scratch;
    `refused` are messages that belong to nothing else, and whose senders were told that they are not taken.
    """
    directories.meta.sync()  # an intent whose own sync has failed counts from here on
    listing = list_names(directories)
    done, damaged = [], []
    for name in sorted(listing.intents):
        try:
            disk_batch.finish_intent(directories, disk_batch.read_intent(directories, name))
            done.append(name)
        except StoreCorruptError as error:
            damaged.append(str(error))
    if refused and (keys := [name for name in list_names(directories).keys if _key_of(name) in refused]):
        # First of all: a key without its message would refuse the message for good.
        for name in keys:
            directories.meta.remove(name)
        directories.meta.sync()
    for message_id in refused:
        directories.env.remove(files.env_name(message_id))
    disk_batch.sync(directories)
    if done or refused:
        listing = list_names(directories)
    listing.damaged = damaged
    left_over = listing.states - listing.messages.keys()
    for message_id in left_over:
        directories.meta.remove(files.meta_name(message_id))
    if left_over:
        _log.info("removed %d states of messages that were finished or never accepted", len(left_over))
    if not damaged:  # what such an intent is about may be in scratch, and nowhere else
        for name in directories.scratch.names():
            if staged.fullmatch(name):
                directories.scratch.remove(name)
    for name in done:
        directories.meta.remove(name)
    directories.meta.sync()
    return listing


def repair(
    directories: Directories, refused: Sequence[MessageId], touched: Sequence[MessageId]
) -> dict[MessageId, files.State]:
    """The states of the touched messages on disk after a failed batch. Raises StoreError."""
    listing = settle_down(directories, _OF_A_BATCH, refused)
    if not listing.damaged:
        for message_id in touched:
            directories.scratch.remove(files.env_name(message_id))
    disk_batch.probe(directories.scratch)
    return files.read_states(directories, touched)


# --- a start


def take_stock(directories: Directories) -> Stock:
    """End what was begun and read every state."""
    listing = settle_down(directories, _STAGED)
    stock = Stock(foreign=len(listing.foreign))
    stock.number = max((int(name.partition(".")[0]) for name in listing.intents), default=0)
    _warn("not a file of this queue, left alone: %s", listing.foreign)
    _note_ids(directories, listing, stock)
    for name in listing.keys:
        if (parsed := disk_format.parse_key_name(name)) is not None:
            identity, kept = parsed
            known = stock.kept.setdefault(identity, kept)
            stock.kept[identity] = max(known, kept, key=lambda each: each.until)
    _read_states(directories, listing, stock)
    return stock


def _note_ids(directories: Directories, listing: Listing, stock: Stock) -> None:
    stock.last_id = max((*listing.messages, *listing.states, *listing.last_ids), default=None)
    for old in listing.last_ids[:-1]:
        directories.meta.remove(old + disk_batch.LAST_SUFFIX)
    stock.noted_id = listing.last_ids[-1] if listing.last_ids else None


def _read_states(directories: Directories, listing: Listing, stock: Stock) -> None:
    """In the order of ids, so that the index is filled in the order of work."""
    bad = listing.damaged
    recovered: list[str] = []
    for message_id in sorted(listing.messages):
        try:
            if listing.messages[message_id] < disk_format.SMALLEST:
                raise StoreCorruptError(f"{message_id}.env is empty or cut off")
            if message_id in listing.states:
                with translated():
                    raw = files.read_file(directories.meta, files.meta_name(message_id))
            else:
                raw = _recover(directories, message_id)
                recovered.append(files.env_name(message_id))
            stock.entries.append((message_id, disk_format.decode_index(message_id, raw)))
        except StoreCorruptError as error:
            bad.append(str(error))
    stock.unreadable = len(bad)
    if recovered:
        disk_batch.sync(directories)
    _warn("left for the operator: %s", bad, level=logging.ERROR)
    _warn("a message had no state, every recipient of it is tried from the beginning: %s", recovered)


def _recover(directories: Directories, message_id: MessageId) -> bytes:
    """Write the first state of a message again."""
    try:
        deliveries = files.read_message(directories, message_id).deliveries
    except MessageNotFoundError as error:
        raise StoreCorruptError(f"{message_id}.env went away") from error
    records = [disk_format.encode_record(delivery) for delivery in deliveries]
    raw = disk_format.join_meta(records)
    files.stage(directories.scratch, [files.Staged(files.meta_name(message_id), lambda: raw)])
    disk_batch.publish_state(directories, message_id)
    return raw


def left_over(directories: Directories) -> str:
    """Files that are none of those that an empty queue has, whether they can be read or not."""
    places = {each.path: each for each in (directories.env, directories.meta, directories.scratch)}
    found = [
        path / name
        for path, directory in places.items()
        for name in directory.names()
        if name not in (LOCK_NAME, BALLAST_NAME)
        and not disk_format.parse_key_name(name)
        and not disk_batch.noted_last_ids([name])
        and path / name not in places
    ]
    return f"{len(found)} files, {', '.join(map(str, sorted(found)[:3]))}" if found else ""


def _key_of(name: str) -> MessageId | None:
    """The message of an idempotency key."""
    parsed = disk_format.parse_key_name(name)
    return None if parsed is None else parsed[1].message_id


def forget_keys(directories: Directories, now: float, most: int) -> list[str]:
    """Removes expired keys, and returns their identities."""
    gone: list[str] = []
    for name in directories.meta.names():
        if (parsed := disk_format.parse_key_name(name)) is not None and parsed[1].until <= now:
            directories.meta.remove(name)
            gone.append(parsed[0])
            if len(gone) == most:
                break
    return gone


def _warn(text: str, names: list[str], *, level: int = logging.WARNING) -> None:
    for name in names[:MAX_NAMED]:
        _log.log(level, text, name)
    if len(names) > MAX_NAMED:
        _log.log(level, text, f"… and {len(names) - MAX_NAMED} more")
