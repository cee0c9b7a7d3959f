"""Keeps the memory store's queue in a file of Python's `shelve`, for tests and development.

A thread writes every change soon; no caller waits for it. An orderly stop loses nothing.
A crash loses what was not synced yet (about `SYNC_DELAY` seconds), and can damage the whole file, depending
on the database that `dbm` has found: that is what a shelf is. Records are spelled as in the LevelDB spool.

Reading accepts octets and nothing else, so a file from another source cannot run code here. Records
that cannot be used are logged and stay in the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import dbm
import io
import logging
import os
import pickle
import shelve
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay import durable
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId, is_message_id
from zonerelay.store.common import records
from zonerelay.store.common.private_directories import lock_configured
from zonerelay.store.contract import Kept, StoreCorruptError, StoreOpenError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

SYNC_DELAY = 3.0
"""Seconds after a change until it is synced at the latest."""
_CLEAN = "meta clean"

_log = logging.getLogger("zonerelay.store")

Op = tuple[bytes, bytes | None]
"""A key and its new value; `None` deletes it."""
_Failures = (*dbm.error, OSError, ValueError, SyntaxError, KeyError, pickle.UnpicklingError, EOFError)
"""What the databases behind `dbm` raise when a file is damaged."""


@dataclass(slots=True)
class Shelved:
    """The content of a shelf when it was opened."""

    messages: dict[MessageId, tuple[Message, list[bytes]]] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)
    kept: dict[str, Kept] = field(default_factory=dict)
    last_id: MessageId | None = None
    was_closed: bool = True
    unreadable: int = 0
    """Records that stay where they are, for the operator who repairs the shelf."""


class Shelf:
    """One open shelf; belongs to the event loop that was running when it was opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._executor = ThreadPoolExecutor(1, "shelf")
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._shelf: shelve.Shelf[bytes] | None = None
        self._lock = -1
        self._failed = False

    async def open(self) -> Shelved:
        """Raises StoreOpenError in words; nothing is removed that could be of use."""
        try:
            return await self._loop.run_in_executor(self._executor, self._open)
        except BaseException:
            await self._loop.run_in_executor(self._executor, self._release)
            self._executor.shutdown()
            raise

    def write(self, ops: Sequence[Op]) -> None:
        """Soon. What cannot be written is logged: the queue in memory goes on without."""
        self._executor.submit(self._write, ops)
        if self._timer is None:
            self._timer = self._loop.call_later(SYNC_DELAY, self._sync_later)

    async def close(self, last_id: MessageId | None) -> None:
        """Write everything, and that it was everything."""
        if self._timer is not None:
            self._timer.cancel()
        await self._loop.run_in_executor(self._executor, self._close, last_id)
        self._executor.shutdown()

    def _sync_later(self) -> None:
        self._timer = None
        self._executor.submit(self._sync)

    # --- in the thread

    def _open(self) -> Shelved:
        try:
            durable.make_directory(self._path.parent)
            lock = self._path.with_name(self._path.name + ".lock")
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            lock_configured(self._lock, self._path, "shelve")
        except OSError as error:
            raise StoreOpenError(f"[spool] shelve {self._path} cannot be used: {error}") from error
        try:
            self._shelf = self._connect("c")
            found = self._load()
            if not (found.messages or found.kept or found.unreadable) and found.was_closed:
                # Some databases never give room back: now there is nothing to lose.
                self._shelf.close()
                self._shelf = self._connect("n")
            self._shelf.pop(_CLEAN, None)
            self._shelf[records.META_FORMAT.decode()] = records.FORMAT_VERSION
            self._write_out()
        except _Failures as error:
            raise StoreOpenError(
                f"the shelf {self._path} is damaged, or not one: {error!r}; nothing was changed. Move it"
                " away to start with an empty queue"
            ) from error
        return found

    def _connect(self, flag: str) -> shelve.Shelf[bytes]:
        return shelve.Shelf(dbm.open(str(self._path), flag, 0o600))  # type: ignore[arg-type]  # dbm's "c" | "n"

    def _load(self) -> Shelved:
        assert self._shelf is not None
        # The database itself, for `shelve` would unpickle anything. keys() is the one way to walk that every
        # database has: dbm.ndbm, which is Debian's, has no items().
        database: MutableMapping[bytes, bytes] = self._shelf.dict  # type: ignore[attr-defined]  # not in typeshed
        raw = {key: _octets(database[key]) for key in database.keys()}  # noqa: SIM118
        _judge_format(self._path, raw.get(records.META_FORMAT, records.FORMAT_VERSION))
        is_new = not raw.keys() - {records.META_FORMAT}
        found = Shelved(was_closed=is_new or _CLEAN.encode() in raw)
        for key in raw:
            if key.startswith(records.MESSAGE_PREFIX) and key.endswith(b" *"):
                with _stepping_over(found):
                    message, chunks = _message(key, raw)
                    found.messages[message.id] = (message, chunks)
        for key, value in raw.items():
            if key.startswith(records.ONCE_PREFIX):
                with _stepping_over(found):
                    identity = key[len(records.ONCE_PREFIX) :].decode("ascii", "replace")
                    found.kept[identity] = records.decode_kept(value)
            elif key.startswith((records.DELIVERY_PREFIX, records.WEBHOOK_PREFIX)):
                with _stepping_over(found):
                    delivery = records.decode_delivery(key, value)
                    if delivery.message_id in found.messages:
                        found.deliveries.append(delivery)
                    else:
                        found.unreadable += 1
        owners = {delivery.message_id for delivery in found.deliveries}
        found.messages = {key: value for key, value in found.messages.items() if key in owners}
        last = raw.get(records.META_LAST_ID, b"").decode("ascii", "replace")
        ids = [*found.messages, *([MessageId(last)] if is_message_id(last) else [])]
        found.last_id = max(ids, default=None)
        return found

    def _write(self, ops: Iterable[Op]) -> None:
        assert self._shelf is not None
        try:
            for key, value in ops:
                name = key.decode("ascii")
                if value is None:
                    self._shelf.pop(name, None)
                else:
                    self._shelf[name] = value
        except _Failures as error:
            self._fail(error)

    def _sync(self) -> None:
        try:
            self._write_out()
        except _Failures as error:
            self._fail(error)

    def _write_out(self) -> None:
        """dbm.ndbm, which is Debian's, has no sync(): what was written reaches the file when it is closed."""
        if self._shelf is None:
            return
        if hasattr(self._shelf.dict, "sync"):  # type: ignore[attr-defined]  # not in typeshed
            self._shelf.sync()
        else:
            self._shelf.close()
            self._shelf = self._connect("c")

    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = True
            _log.error(
                "the shelf %s cannot be written, the queue will not survive a stop: %r", self._path, error
            )

    def _close(self, last_id: MessageId | None) -> None:
        try:
            if self._shelf is not None:
                if last_id is not None:
                    self._shelf[records.META_LAST_ID.decode()] = last_id.encode("ascii")
                if not self._failed:
                    self._shelf[_CLEAN] = b"1"
                self._shelf.close()
        except _Failures as error:
            self._fail(error)
        self._release()

    def _release(self) -> None:
        self._shelf = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _judge_format(path: Path, found: bytes) -> None:
    """Shelves of the first revisions do not say their version."""
    if found != records.FORMAT_VERSION:
        raise StoreOpenError(
            f"the shelf {path} has format version {found.decode('ascii', 'replace')}; this zonerelay reads"
            f" version {records.FORMAT_VERSION.decode()}: start the release that wrote it, or drain it there"
            " first"
        )


class _OctetsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a shelf of zonerelay")


def _octets(raw: ReadableBuffer) -> bytes:
    value = _OctetsOnly(io.BytesIO(raw)).load()
    if not isinstance(value, bytes):
        raise pickle.UnpicklingError("a record is not made of octets")
    return value


def _message(key: bytes, raw: dict[bytes, bytes]) -> tuple[Message, list[bytes]]:
    message_id = MessageId(key.split(b" ")[1].decode("ascii", "replace"))
    message = records.decode_message(message_id, raw[key])
    try:
        return message, [raw[records.chunk_key(message_id, n)] for n in range(1, message.chunks + 1)]
    except KeyError as error:
        raise StoreCorruptError(f"message {message_id}: a part of its body is missing") from error


@contextlib.contextmanager
def _stepping_over(found: Shelved) -> Iterator[None]:
    try:
        yield
    except StoreCorruptError as error:
        found.unreadable += 1
        _log.error("stepped over in the shelf: %s", error)


def message_ops(message: Message, chunks: Sequence[bytes]) -> list[Op]:
    ops: list[Op] = [(records.metadata_key(message.id), records.encode_message(message))]
    ops += [(records.chunk_key(message.id, number), chunk) for number, chunk in enumerate(chunks, 1)]
    return ops


def delivery_op(delivery: Delivery) -> Op:
    return records.delivery_key(delivery.key), records.encode_delivery(delivery)


def removal_ops(message_id: MessageId, chunks: int) -> list[Op]:
    keys = [records.metadata_key(message_id), *(records.chunk_key(message_id, n + 1) for n in range(chunks))]
    return [(key, None) for key in keys]
