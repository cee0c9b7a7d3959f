"""Mends what a start of the disk queue leaves for the operator: files that cannot be read, and states alone.

A message whose state cannot be read gets a new one: the records that can be read, and the first state for
every other recipient, so mail may be sent again. A message whose `.env` is damaged goes to the salvage with
what can be read of it, and so does a state without a message. Where an intent cannot be read, the messages in
scratch, which may be the only copies of reports, go to the salvage too.

Promises: every file that is changed or removed has a link in a directory beside the messages before that, and
what is salvaged is durable. A repair that was cut short is ended by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from zonerelay import durable
from zonerelay.config.settings import SpoolSettings
from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageId
from zonerelay.store.check import KEPT, Repaired, Salvage, Salvaged, Tell
from zonerelay.store.common.private_directories import lock_configured
from zonerelay.store.contract import CHUNK_SIZE, StoreCorruptError
from zonerelay.store.disk import files
from zonerelay.store.disk import format as disk_format
from zonerelay.store.disk.check import FoundMessage, Places, is_alone, list_names, read_found
from zonerelay.store.disk.directories import LOCK_NAME
from zonerelay.store.disk.format import FOOT_SIZE, HEAD, StoredMessage
from zonerelay.store.spool_paths import disk_directories

_STAGED_MESSAGE = re.compile(r"([0-9a-f]{16})\.env")


def repair(spool: SpoolSettings, salvage: Salvage, tell: Tell, *, carry_out: bool) -> Repaired:
    """Without `carry_out` only look. Blocks. Raises StoreError when a relay has the queue, and OSError."""
    places = Places(*disk_directories(spool))
    with contextlib.ExitStack() as held:
        for place in dict.fromkeys(places):
            _lock(place, held)
        return _Repair(places, salvage, carry_out=carry_out).run(tell)


def _lock(place: Path, held: contextlib.ExitStack) -> None:
    try:
        lock = os.open(place / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # the next start makes it
    held.callback(os.close, lock)
    lock_configured(lock, place, "path")


class _Repair:
    def __init__(self, places: Places, salvage: Salvage, *, carry_out: bool) -> None:
        self._places = places
        self._salvage = salvage
        self._carry_out = carry_out
        self._kept: Path | None = None
        self._lost: list[str] = []
        self._repeats: list[str] = []
        self._more_lost = self._salvaged = self._before = self._after = 0

    def run(self, tell: Tell) -> Repaired:
        names = list_names(self._places)
        done, total = 0, sum(names.messages.values())
        for message_id in sorted(names.messages.keys() | names.states):
            tell(done, total)
            found = read_found(self._places, message_id)
            if found is None or found.id in names.pending:
                continue  # the next start ends what was begun
            if found.env_fault:
                self._set_aside(found)
            elif found.stored is not None:
                self._mend(found, found.stored)
            elif is_alone(self._places, found, names) or found.meta_fault:
                self._state_alone(found)
            done += names.messages.get(message_id, 0)
        if names.bad_intents:
            self._salvage_scratch(list(names.bad_intents))
        tell(total, total)
        if self._kept is not None:
            for place in dict.fromkeys((*self._places, self._kept)):
                durable.sync_directory(place)
        return Repaired(
            before=self._before,
            after=self._after,
            lost=tuple(self._lost),
            more_lost=self._more_lost,
            repeats=tuple(self._repeats),
            salvaged=self._salvaged,
            kept="" if self._kept is None else str(self._kept),
        )

    # --- one message

    def _mend(self, found: FoundMessage, stored: StoredMessage) -> None:
        """The message is whole."""
        if found.deliveries:
            self._before += len(found.deliveries)
            self._after += len(found.deliveries)
            return
        first = {each.recipient: each for each in stored.deliveries}
        known = {}
        if found.deliveries is None and found.meta_fault:
            raw = _octets(self._places.meta / files.meta_name(found.id))
            records = disk_format.readable_records(found.id, raw)
            known = {each.recipient: each for each in records if each.recipient in first}
        deliveries = list({**first, **known}.values())
        self._before += len(deliveries)
        self._after += len(deliveries)
        tried = [each for each in first if each not in known]
        if tried and len(self._repeats) < KEPT:
            why = found.meta_fault or "its state is missing, or names no delivery"
            self._repeats.append(f"message {found.id} to {', '.join(tried[:10])}: {why}")
        if self._carry_out:
            path = self._places.meta / files.meta_name(found.id)
            self._keep(path)
            durable.write(path, disk_format.join_meta(map(disk_format.encode_record, deliveries)))

    def _set_aside(self, found: FoundMessage) -> None:
        """The `.env` is damaged."""
        path = self._places.env / files.env_name(found.id)
        left = _Left(path, found.id)
        deliveries = found.deliveries
        unknown: tuple[str, ...] = ()
        if deliveries is None:
            deliveries = [] if left.stored is None else left.stored.deliveries
            if not deliveries and left.stored is not None:
                unknown = tuple(each.address for each in left.stored.message.envelope.recipients)
        self._before += len(deliveries)
        shown = ", ".join([each.recipient for each in deliveries][:10]) or "recipients that nothing names"
        self._lose(f"message {found.id} to {shown}: {found.env_fault}")
        self._give(left, tuple(deliveries), unknown, found.env_fault)
        self._remove(path, self._places.meta / files.meta_name(found.id))

    def _state_alone(self, found: FoundMessage) -> None:
        path = self._places.meta / files.meta_name(found.id)
        deliveries = tuple(found.deliveries or disk_format.readable_records(found.id, _octets(path)))
        shown = ", ".join([each.recipient for each in deliveries][:10]) or "recipients that nothing names"
        why = "its .env is missing: it was finished or never accepted, or the file is lost"
        self._before += len(deliveries)
        self._lose(f"message {found.id} to {shown}: {why}")
        self._give(_Left(self._places.env / files.env_name(found.id), found.id), deliveries, (), why)
        self._remove(path)

    def _salvage_scratch(self, intents: list[Path]) -> None:
        """What such an intent is about may be there, and nowhere else."""
        for path in sorted(self._places.scratch.iterdir()):
            if matched := _STAGED_MESSAGE.fullmatch(path.name):
                left = _Left(path, MessageId(matched[1]))
                deliveries = () if left.stored is None else tuple(left.stored.deliveries)
                self._lose(f"message {left.id} in scratch: it may be a report that was being stored")
                self._give(left, deliveries, (), "it was in scratch, beside an intent that cannot be read")
                self._remove(path)
        for path in intents:
            self._lose(f"{path.name} cannot be read: what was being stored together is not known")
            self._remove(path)

    # --- what it does

    def _lose(self, text: str) -> None:
        if len(self._lost) < KEPT:
            self._lost.append(text)
        else:
            self._more_lost += 1

    def _give(
        self, left: _Left, deliveries: tuple[Delivery, ...], unknown: tuple[str, ...], why: str
    ) -> None:
        self._salvaged += 1
        message = None if left.stored is None else left.stored.message
        self._salvage(Salvaged(left.id, why, message, deliveries, unknown, left.body, left.is_whole))

    def _remove(self, *paths: Path) -> None:
        """A message first, then its state, as a relay does."""
        if self._carry_out:
            for path in paths:
                self._keep(path)
            for path in paths:
                path.unlink(missing_ok=True)

    def _keep(self, path: Path) -> None:
        if self._kept is None:
            owner = self._places.env.stat()
            self._kept = _new_directory(self._places.env, time.strftime("before-repair-%Y%m%dT%H%M%S"))
            if os.geteuid() == 0:
                os.chown(self._kept, owner.st_uid, owner.st_gid)
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            name = f"scratch-{path.name}" if path.parent == self._places.scratch else path.name
            os.link(path, self._kept / name)
            durable.sync_directory(self._kept)


def _new_directory(place: Path, name: str) -> Path:
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            (place / name).mkdir(mode=0o700)
            break
        name = f"{name.partition('_')[0]}_{number}"
    durable.sync_directory(place)
    return place / name


def _octets(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


class _Left:
    """What can be read of an `.env` file that is damaged, or is not there."""

    def __init__(self, path: Path, message_id: MessageId) -> None:
        self.id = message_id
        self.stored: StoredMessage | None = None
        self.is_whole = False
        self._path = path
        self._stop = 0
        with contextlib.suppress(OSError):
            self._stop = path.stat().st_size
        with contextlib.suppress(OSError, StoreCorruptError):
            self._read_tail()

    def _read_tail(self) -> None:
        with self._path.open("rb") as file:
            file.seek(max(self._stop - FOOT_SIZE, 0))
            foot = disk_format.parse_foot(self.id, file.read(), self._stop)
            file.seek(foot.offset)
            self.stored = disk_format.decode_tail(self.id, foot, file.read(foot.length))
        self._stop = foot.offset
        self.is_whole = [zlib.crc32(chunk) for chunk in self.body()] == self.stored.checksums

    def body(self) -> Iterator[bytes]:
        """In chunks, as far as the disk can read them; with what is left of the end where that is damaged."""
        try:
            with self._path.open("rb") as file:
                file.seek(at := len(HEAD))
                while chunk := file.read(min(CHUNK_SIZE, max(self._stop - at, 0))):
                    at += len(chunk)
                    yield chunk
        except OSError:
            return
