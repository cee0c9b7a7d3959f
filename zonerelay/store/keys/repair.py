"""Repairs the records of a partition: counts them, passes messages to the salvage, and keeps old records.

A message that cannot be restored goes to the salvage directory. Every record that is changed is written to a
separate file, one line of JSON each. Both are durable before the partition is changed, message by message. So
a repair that was killed can be run again, and salvages the same data at most twice.

Memory: one message without its body.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from zonerelay import durable
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.store.check import KEPT, RepairResult, Salvage, SalvagedMessage
from zonerelay.store.common import records
from zonerelay.store.contract import CHUNK_SIZE, StoreError

_IN_MEMORY = 1024 * 1024


def recipient_in(raw: bytes) -> str:
    """Return the recipient in a key that may be invalid."""
    return records.unfield(raw) if raw.isascii() else raw.decode("utf-8", "replace")


@dataclass(slots=True, kw_only=True)
class Remnant:
    """The data of a message that a check or a repair has found. `why` describes why its record or body is
    incomplete, or is "" if both are complete. The deliveries are by their keys, and `unreadable` are the keys
    of invalid records. `open` is the stored number of open deliveries. `old` has the rows without chunks.
    """

    identity: str
    message: Message | None = None
    why: str = ""
    deliveries: dict[bytes, Delivery] = field(default_factory=dict)
    unreadable: list[bytes] = field(default_factory=list)
    open: int | None = None
    old: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def wanted(self) -> int:
        """The number of recipients in the envelope."""
        return 0 if self.message is None else len(self.message.envelope.recipients)

    @property
    def surplus(self) -> int:
        """The number of records that are there beyond the expected number. If it is negative, records are
        missing; otherwise removals were lost.
        """
        expected = self.wanted if self.open is None else self.open
        return 0 if self.message is None else len(self.deliveries) + len(self.unreadable) - expected

    @property
    def is_kept(self) -> bool:
        return self.message is not None and not self.why and bool(self.deliveries)


class RecordRepair:
    """Repairs the records of one partition. Without `carry_out` it only counts and describes. With
    `takes_uploads`, chunks without a message may be the rest of one.
    """

    def __init__(
        self, salvage: Salvage, kept: Path | None, *, carry_out: bool, takes_uploads: bool = False
    ) -> None:
        """Create a repair. `kept` is the file of old records, or None if they are kept elsewhere."""
        self.carry_out = carry_out
        self.takes_uploads = takes_uploads
        self._salvage = salvage
        self._kept = kept
        self._file: BinaryIO | None = None
        self._named = self._removed = self._salvaged = self._more = 0
        self._lost: list[str] = []
        self._repeats: list[str] = []

    def lose(self, text: str) -> None:
        if len(self._lost) < KEPT:
            self._lost.append(text)
        else:
            self._more += 1

    def keep(self, old: Mapping[bytes, bytes]) -> None:
        """Write unchanged records durably to the file. Raises OSError."""
        if not self.carry_out or not old or self._kept is None:
            return
        if self._file is None:
            self._file = self._kept.open("ab")
            self._kept.chmod(0o600)
            durable.sync_directory(self._kept.parent)
        for key, record in old.items():
            where = key.decode("utf-8", "replace")
            self._file.write(msgspec.json.encode({"where": where, "base64": record}) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    async def judge(self, found: Remnant, pieces: Callable[[], AsyncIterator[bytes]]) -> bool:
        """Pass data that cannot be restored to the salvage, with the chunks of its body (`pieces`). Return
        true if the message must be removed from the store.

        Raises OSError, and StoreError if the body is unreadable for a reason other than damage.
        """
        identity, deliveries = found.identity, tuple(found.deliveries.values())
        unreadable = tuple(recipient_in(key.rpartition(b" ")[2]) for key in found.unreadable)
        gone = max(-found.surplus, 0)
        repeats = 0 if found.open is None else max(found.surplus, 0)
        self._named += gone
        self._removed += len(unreadable)
        known = {each.recipient for each in deliveries}
        recipients = () if found.message is None else found.message.envelope.recipients
        unknown = tuple(each.address for each in recipients if each.address not in known)
        if found.is_kept:
            if without := (unknown if gone else unreadable):
                count = gone + len(unreadable)
                who = ", ".join(without[:10])
                self.lose(
                    f"{count:,} of the deliveries of message {identity}, to {who}: no record that makes sense"
                )
                why = "deliveries without a record"
                await self._give(found, pieces, (), without, why, is_whole=True)
            elif repeats and len(self._repeats) < KEPT:
                shown = ", ".join(sorted(known)[:10])
                self._repeats.append(f"{repeats:,} of message {identity}, among those to {shown}")
            self.keep(found.old)
            return False
        self._removed += len(deliveries)
        is_whole = found.message is not None and not found.why
        why = found.why or "its record is missing"
        if is_whole:
            why = (
                "no delivery has a record: the message was delivered, or its deliveries are lost; the "
                "salvage contains all of it"
            )
        elif found.message is None and not deliveries:
            why = f"{why}: an unfinished upload, or the remains of a message"
        named = [*sorted(known), *unknown, *(each for each in unreadable if each not in unknown)]
        self.lose(f"message {identity} to {', '.join(named[:10]) or 'recipients that nothing names'}: {why}")
        await self._give(found, pieces, deliveries, unknown, why, is_whole=is_whole)
        self.keep(found.old)
        return True

    async def _give(
        self,
        found: Remnant,
        pieces: Callable[[], AsyncIterator[bytes]],
        deliveries: tuple[Delivery, ...],
        unknown: tuple[str, ...],
        why: str,
        *,
        is_whole: bool,
    ) -> None:
        self._salvaged += 1
        if not self.carry_out:
            return
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
            try:
                async for piece in pieces():
                    file.write(piece)
            except StoreError as error:
                if is_whole:
                    raise
                why = f"{why}; {error}"

            def body() -> Iterator[bytes]:
                file.seek(0)
                while piece := file.read(CHUNK_SIZE):
                    yield piece

            salvaged = SalvagedMessage(
                found.identity, why, found.message, deliveries, unknown, body, is_whole
            )
            self._salvage(salvaged)

    def repaired(self, deliveries: int) -> RepairResult:
        """Return the result of the repair. `deliveries` is the number of records before it."""
        return RepairResult(
            before=deliveries + self._named,
            after=deliveries - self._removed,
            lost=tuple(self._lost),
            more_lost=self._more,
            repeats=tuple(self._repeats),
            salvaged=self._salvaged,
            kept="" if self._file is None else str(self._kept),
        )


def kept_beside(spool: Path) -> Path:
    """Return the file of old records of a repair that begins now."""
    return spool.with_name(f"{spool.name}.before-repair-{time.strftime('%Y%m%dT%H%M%S')}.jsonl")
