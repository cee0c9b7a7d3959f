"""What the disk queue's directories hold at a start. Blocks; it runs before anything else uses them.

First what the last run had begun is ended: intents are finished, scratch is emptied, and states without
a message (never acknowledged, or finished) are removed. A message without a state is recovered: its
state is written again as it was at the beginning. Whatever else cannot be used is logged, counted and left
for the operator: unreadable files, empty ones, files of others. None of it stops the start.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from zonerelay.model.message_id import MessageId
from zonerelay.store import disk_batch, disk_format
from zonerelay.store import disk_files as files
from zonerelay.store.ballast import FILE_NAME as BALLAST_NAME
from zonerelay.store.base import MessageNotFoundError, StoreCorruptError
from zonerelay.store.disk_directories import LOCK_NAME, Directories, Directory
from zonerelay.store.disk_errors import translated
from zonerelay.store.disk_format import IndexRecord

MAX_NAMED = 20
"""Files of a kind that are named in the log; of the rest there is a count."""

_STAGED = re.compile(r"[0-9a-f]{16}\.(\d+\.)?(env|meta)|\d+\.intent|zonerelay\.(trial|probe)")

_log = logging.getLogger("zonerelay.store")


@dataclass(slots=True)
class Listing:
    """The names in the directories of messages and states."""

    messages: dict[MessageId, int] = field(default_factory=dict)
    """Ids with the size of the `.env` file."""
    states: set[MessageId] = field(default_factory=set)
    intents: list[str] = field(default_factory=list)
    last_ids: list[MessageId] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    @property
    def is_used(self) -> bool:
        return bool(self.messages or self.states)


@dataclass(slots=True)
class Stock:
    """What was found. `unreadable` and `foreign` are numbers of files, for whoever looks after them."""

    last_id: MessageId | None = None
    noted_id: MessageId | None = None
    recovered: int = 0
    removed: int = 0
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
    with translated(), os.scandir(directory.path) as entries:
        for entry in entries:
            parsed = disk_format.parse_name(entry.name)
            if parsed is None:
                _sort_other(entry, found)
            elif not entry.is_file(follow_symlinks=False):
                found.foreign.append(entry.path)
            elif parsed[1] == "env":
                found.messages[parsed[0]] = entry.stat(follow_symlinks=False).st_size
            else:
                found.states.add(parsed[0])


def _sort_other(entry: os.DirEntry[str], found: Listing) -> None:
    name = entry.name
    if name.endswith(disk_batch.INTENT_SUFFIX):
        found.intents.append(name)
    elif name.endswith(disk_batch.LAST_SUFFIX):
        found.last_ids += disk_batch.noted_last_ids([name])
    elif name not in (LOCK_NAME, BALLAST_NAME) and not entry.is_dir():
        found.foreign.append(entry.path)


def take_stock(directories: Directories, listing: Listing) -> Stock:
    """End what was begun and read every state. `listing` is from just before."""
    if listing.intents:
        disk_batch.finish_intents(directories)
        listing = list_names(directories)
    _empty(directories.scratch)
    stock = Stock(foreign=len(listing.foreign))
    _warn("not a file of this queue, left alone: %s", listing.foreign)
    _note_ids(directories, listing, stock)
    _read_states(directories, listing, stock)
    _remove_leftovers(directories, listing, stock)
    return stock


def _empty(scratch: Directory) -> None:
    """Remove what nobody will ever rename; names that are not ours stay."""
    for name in scratch.names():
        if _STAGED.fullmatch(name):
            scratch.remove(name)


def _note_ids(directories: Directories, listing: Listing, stock: Stock) -> None:
    stock.last_id = max((*listing.messages, *listing.states, *listing.last_ids), default=None)
    for old in listing.last_ids[:-1]:
        directories.meta.remove(old + disk_batch.LAST_SUFFIX)
    stock.noted_id = listing.last_ids[-1] if listing.last_ids else None


def _read_states(directories: Directories, listing: Listing, stock: Stock) -> None:
    """In the order of ids, so that the index is filled in the order of work."""
    bad: list[str] = []
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
    stock.recovered = len(recovered)
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


def _remove_leftovers(directories: Directories, listing: Listing, stock: Stock) -> None:
    for message_id in _leftovers(listing):
        directories.meta.remove(files.meta_name(message_id))
        stock.removed += 1
    if stock.removed:
        _log.info("removed %d states of messages that were finished or never accepted", stock.removed)
    if stock.removed or stock.recovered:
        disk_batch.sync(directories)


def _leftovers(listing: Listing) -> Iterator[MessageId]:
    return (message_id for message_id in listing.states if message_id not in listing.messages)


def _warn(text: str, names: list[str], *, level: int = logging.WARNING) -> None:
    for name in names[:MAX_NAMED]:
        _log.log(level, text, name)
    if len(names) > MAX_NAMED:
        _log.log(level, text, f"… and {len(names) - MAX_NAMED} more")
