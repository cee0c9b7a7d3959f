"""Opens the queue in memory, and saves it in a file (the shelf) from an orderly stop to the next start.

The whole shelf is written at each stop, with a checksum. At a start it is marked as in use. If it still has
that mark at the next start, the relay was not stopped in order, and its content is as old as the stop before.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import MutableMapping
from functools import partial
from pathlib import Path

import msgspec

from zonerelay import durable
from zonerelay.process.threads import STORE
from zonerelay.store.common.private_directories import lock_configured
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import StoreOpenError
from zonerelay.store.keys.memory import MemoryEngine
from zonerelay.store.keys.partition import open_partition
from zonerelay.store.leveldb.store import LevelDbStore
from zonerelay.store.queue.queue import open_queue

WARNING = 'the spool is in memory (backend = "memory"): all mail in it is lost at a stop or a crash'
SHELF_WARNING = (
    "the spool is in memory and in a shelf (%s): it survives an orderly restart; a crash loses the mail "
    "accepted since the start and repeats the mail sent since then"
)
_CLOSED, _IN_USE = b"zonerelay shelf 2 closed\n", b"zonerelay shelf 2 in use\n"

_log = logging.getLogger("zonerelay.store")


async def open_memory(path: Path | None, around: StoreContext) -> LevelDbStore:
    """Open a queue in memory, with a shelf if `path` is given. Raises StoreOpenError."""
    engine = MemoryEngine(around.clock)
    release = engine.close
    if path is None:
        _log.warning("%s", WARNING)
    else:
        _log.warning(SHELF_WARNING, path)
        shelf = await STORE.open(SavedQueueFile, path)
        rows = engine.partition(0).rows
        rows.update(shelf.rows)
        shelf.rows = rows
        release = partial(STORE.run, shelf.close)

    return await open_queue(
        lambda hooks: open_partition(engine, 0, clock=around.clock, hooks=hooks), around, release=release
    )


class SavedQueueFile:
    """The file in which a queue in memory is saved between an orderly stop and the next start. Opening and
    closing block.
    """

    rows: MutableMapping[bytes, bytes]
    """The content. `close` saves it."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises StoreOpenError, in which case nothing was changed."""
        self._path = path
        self._lock = -1
        try:
            durable.make_directory(self._path.parent)
            lock = self._path.with_name(f"{self._path.name}.lock")
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            lock_configured(self._lock, self._path, "shelve")
            self.rows = self._load()
            self._save(_IN_USE)
        except OSError as error:
            self._release()
            raise StoreOpenError(f"[spool] shelve {self._path} cannot be used: {error}") from error
        except StoreOpenError:
            self._release()
            raise

    def close(self) -> None:
        """Save the rows. If that fails, they are lost, which is logged."""
        try:
            self._save(_CLOSED)
        except OSError as error:
            _log.error(
                "the shelf %s cannot be written, so the queue does not survive this stop: %s",
                self._path,
                error,
            )
        self._release()

    def _load(self) -> dict[bytes, bytes]:
        if any(self._path.with_name(self._path.name + end).exists() for end in (".db", ".dat", ".pag")):
            raise self._refusal("it was written by Python's shelve")
        if not self._path.exists():
            return {}
        head, _, rest = self._path.read_bytes().partition(b"\n")
        data = rest[:-4]
        if head + b"\n" not in (_CLOSED, _IN_USE) or rest[-4:] != _sum(data):
            raise self._refusal("its checksum or its first line is invalid")
        if head + b"\n" == _IN_USE:
            _log.error(
                "the shelf %s was not closed in order: what was accepted since its last orderly stop is"
                " missing, and what was sent since then is sent again",
                self._path,
            )
        return msgspec.msgpack.decode(data, type=dict[bytes, bytes])

    def _refusal(self, why: str) -> StoreOpenError:
        return StoreOpenError(
            f"the shelf {self._path} is damaged, or was written by another release: {why}. Nothing was "
            "changed. Start the release that wrote it to send the queued mail, or move it away to start "
            "with an empty queue"
        )

    def _save(self, head: bytes) -> None:
        data = msgspec.msgpack.encode(dict(self.rows))
        durable.write(self._path, (head, data, _sum(data)))

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")
