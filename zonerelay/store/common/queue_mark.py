"""Keeps the mark of a shared queue, so that a store that comes back empty does not pass for a new one.

A server that has lost its disk, or another one behind the same name, has no mail and would be believed. So
the store carries a mark, and each machine keeps a copy of it in `FILE` under `[spool] path`, by the place of
the store. A machine without a copy joins, and adopts the mark that is there; a store without one (a new one,
or one that an older version has made) is given one. A store that does not have the mark that this machine
knows is refused until an operator says `zonerelay spool accept-empty`, which forgets the copy.

LevelDB and the disk queue carry none. They are directories of this machine, and a copy would have to lie in
them or be lost with them: the directory itself is the mark.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

from zonerelay import durable
from zonerelay.config.settings import Backend, PostgresSettings, RedisSettings, S3Settings
from zonerelay.model.clock import Clock
from zonerelay.process.threads import STORE
from zonerelay.store.contract import StoreOpenError

FILE = "known-queues.json"

_log = logging.getLogger("zonerelay.store")


class StrangeStoreError(StoreOpenError):
    """The store has lost the queue, or is another one."""


class QueueMark:
    """One place as this machine knows it. Several workers share the file; they write the same."""

    def __init__(self, directory: Path, place: str) -> None:
        self.place = place
        self._path = directory / FILE
        self._known = ""

    async def check(self, stored: str | None) -> None:
        """Raises StrangeStoreError. When anything is odd the file is read again: it may have been changed."""
        if stored is not None and stored == self._known:
            return
        self._known = await STORE.run(self.read)
        if self._known and stored != self._known:
            found = f"its mark is {stored!r}" if stored else "it has no mark, as an empty one"
            raise StrangeStoreError(
                f"{self.place} does not hold the queue that this machine knows (mark {self._known!r}):"
                f" {found}. Nothing was changed there, and no mail is taken. Bring its data back, or the"
                " right server. If it was emptied on purpose, run zonerelay spool accept-empty on each"
                " machine that shares it"
            )

    async def recognise(
        self,
        read: Callable[[], Awaitable[str | None]],
        write: Callable[[str], Awaitable[object]],
        clock: Clock,
    ) -> None:
        """Checks what `read` finds in the store, and adopts it. Raises StrangeStoreError.

        A store without a mark is given one. `write` leaves the mark of another relay, made just now, alone.
        """
        stored = await read()
        await self.check(stored)
        if stored is None:
            await write(_new_mark(clock))
            stored = await read()
        await self.adopt(stored or "")

    async def adopt(self, stored: str) -> None:
        """It was checked: know it from now on."""
        if stored != self._known:
            self._known = stored
            try:
                await STORE.run(self._write, stored)
            except OSError as error:
                _log.warning(
                    "the mark of the queue cannot be kept, so a store that comes back empty would be believed"
                    " after the next start: %s",
                    error,
                )

    # --- the file; blocks

    def read(self) -> str:
        """`""` when nothing is known. Raises StoreOpenError."""
        found = self._all().get(self.place, "")
        return found if isinstance(found, str) else ""

    def forget(self) -> str:
        """The mark that was known, if any. Raises StoreOpenError, OSError."""
        known = self.read()
        if known:
            self._write("")
        return known

    def _all(self) -> dict[str, object]:
        try:
            found = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise StoreOpenError(
                f"{self._path} cannot be read: {error}. It says which queues this machine knows; repair its"
                " rights, or remove it to believe the store as it is"
            ) from error
        return found if isinstance(found, dict) else {}

    def _write(self, stored: str) -> None:
        known = self._all()
        known.pop(self.place, None)
        if stored:
            known[self.place] = stored
        durable.make_directory(self._path.parent)
        durable.write(self._path, json.dumps(known, indent=1).encode())


def _new_mark(clock: Clock) -> str:
    """Says when: an operator may have to tell two of them apart."""
    when = datetime.fromtimestamp(clock.now(), UTC).isoformat(timespec="microseconds")
    return f"{when} {os.getpid()}"


def place_of(backend: Backend, *, redis: RedisSettings, postgres: PostgresSettings, s3: S3Settings) -> str:
    """The place of the configured queue, without secrets; `""` for a spool that is not shared."""
    match backend:
        case Backend.REDIS:
            return f"[redis] url {redis.url} prefix {redis.prefix}"
        case Backend.POSTGRES:
            return f"[postgres] url {postgres.url} schema {postgres.schema}"
        case Backend.S3:
            return f"[s3] {s3.endpoint_url} bucket {s3.bucket} prefix {s3.prefix}"
    return ""
