"""What the checks and repairs of shared stores have in common: judging a body, and setting a message aside.

A repair hands to the salvage what cannot be put back, and keeps each record that it changes in a file of its
own, a line of JSON each. Both are durable before the store is changed, message by message; so a repair that
is killed may be run again, and salvages at most what it had salvaged already.

Memory: one message without its body.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from zonerelay import durable
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.process.threads import STORE
from zonerelay.store.check import KEPT, Fault, Repaired, Salvage, Salvaged
from zonerelay.store.common import records
from zonerelay.store.contract import CHUNK_SIZE, StoreError

Report = Callable[[Fault, str, str, str], None]
"""`report(fault, where, what, message_id)`, as `Findings.add`."""

_IN_MEMORY = 1024 * 1024


def body_fault(
    message: Message, chunks: int, last: int, octets: int, *, uneven: bool
) -> tuple[Fault, str] | None:
    """What is wrong with a body of so many chunks, the last of that number. `uneven`: one in front of it has
    not its full size.
    """
    if chunks < message.chunks:
        return Fault.CHUNK_MISSING, f"{message.chunks - chunks:,} of {message.chunks:,} chunks"
    if chunks > message.chunks or last != chunks:
        return Fault.WRONG_SIZE, f"{chunks:,} chunks up to number {last:,}, not {message.chunks:,}"
    if uneven or octets != message.size or message.chunks != -(-message.size // CHUNK_SIZE):
        return Fault.WRONG_SIZE, f"its chunks have {octets:,} octets, not {message.size:,}"
    return None


def recipient_in(raw: bytes) -> str:
    """The recipient in a key that may make no sense."""
    return records.unfield(raw) if raw.isascii() else raw.decode("utf-8", "replace")


async def no_body() -> AsyncIterator[bytes]:
    """A body of nothing."""
    return
    yield b""


@dataclass(frozen=True, slots=True)
class Remains:
    """What a repair finds of a message. `why` says why its record or its body is not whole, "" when both
    are. `unreadable` are recipients whose records make no sense, `absent` those that only an index names;
    `old` has the records by where they are.
    """

    identity: str
    message: Message | None = None
    why: str = ""
    deliveries: tuple[Delivery, ...] = ()
    unreadable: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    pieces: Callable[[], AsyncIterator[bytes]] = no_body
    old: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def is_kept(self) -> bool:
        return self.message is not None and not self.why and bool(self.deliveries)


class SharedRepair:
    """One repair. Without `carry_out` it counts and names only."""

    def __init__(self, salvage: Salvage, kept: Path, *, carry_out: bool) -> None:
        self.carry_out = carry_out
        self._salvage = salvage
        self._kept = kept
        self._file: BinaryIO | None = None
        self._named = self._removed = self._salvaged = self._more = 0
        self._lost: list[str] = []

    def lose(self, text: str) -> None:
        if len(self._lost) < KEPT:
            self._lost.append(text)
        else:
            self._more += 1

    def gone(self, identity: str, recipients: Collection[str]) -> None:
        """Only an index names these deliveries, and nothing is left of their message."""
        for recipient in recipients:
            self._named += 1
            self.lose(f"message {identity} to {recipient}: nothing is left of it but a name in an index")

    def keep(self, old: Mapping[str, bytes]) -> None:
        """Keeps records as they are, durably. Raises OSError."""
        if not self.carry_out or not old:
            return
        if self._file is None:
            self._file = self._kept.open("ab")
            self._kept.chmod(0o600)
            durable.sync_directory(self._kept.parent)
        for where, record in old.items():
            self._file.write(msgspec.json.encode({"where": where, "base64": record}) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    async def judge(self, found: Remains) -> bool:
        """Hands over what cannot be put back. Returns true when the message is to leave the store.

        Raises OSError, and StoreError when the body cannot be read for another reason than damage.
        """
        self._removed += len(found.unreadable)
        if found.is_kept:
            self._named += len(found.absent)
            if without := (*found.unreadable, *found.absent):
                who = ", ".join(without[:10])
                self.lose(
                    f"deliveries of message {found.identity} to {who}: they have no record that makes sense"
                )
                await self._give(found, (), without, "deliveries without a record", is_whole=True)
            self.keep(found.old)
            return False
        why = found.why
        known = {each.recipient for each in found.deliveries}
        recipients = () if found.message is None else found.message.envelope.recipients
        unknown = tuple(each.address for each in recipients if each.address not in known)
        if not why and found.message is not None:
            why = "no delivery has a record: it was delivered, or they were lost"
            self._named += len(unknown) - len(found.unreadable)
        else:
            self._named += len(found.absent)
        self._removed += len(found.deliveries)
        shown = (
            ", ".join([*sorted(known), *unknown, *found.unreadable][:10]) or "recipients that nothing names"
        )
        self.lose(f"message {found.identity} to {shown}: {why}")
        is_whole = found.message is not None and not found.why
        await self._give(found, found.deliveries, unknown, why, is_whole=is_whole)
        self.keep(found.old)
        return True

    async def _give(
        self,
        found: Remains,
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
                async for piece in found.pieces():
                    file.write(piece)
            except StoreError as error:
                if is_whole:
                    raise
                why = f"{why}; {error}"

            def body() -> Iterator[bytes]:
                file.seek(0)
                while piece := file.read(CHUNK_SIZE):
                    yield piece

            salvaged = Salvaged(found.identity, why, found.message, deliveries, unknown, body, is_whole)
            await STORE.run(self._salvage, salvaged)

    def repaired(self, deliveries: int) -> Repaired:
        """`deliveries` had records before."""
        return Repaired(
            before=deliveries + self._named,
            after=deliveries - self._removed,
            lost=tuple(self._lost),
            more_lost=self._more,
            salvaged=self._salvaged,
            kept="" if self._file is None else str(self._kept),
        )


def kept_beside(spool: Path) -> Path:
    """The file of old records of a repair that begins now."""
    return spool.with_name(f"{spool.name}.before-repair-{time.strftime('%Y%m%dT%H%M%S')}.jsonl")


class Troubled:
    """The messages in which a walk has found something, and the first finding in words. `apart` are faults
    that no message is looked at for.
    """

    def __init__(self, apart: Collection[Fault] = (Fault.STRAY_FILE,)) -> None:
        self.ids: dict[str, None] = {}
        self.first = ""
        self._apart = apart

    def add(self, fault: Fault, where: str, what: str, message_id: str = "") -> None:
        if fault in self._apart:
            return
        self.first = self.first or f"{fault.value}: {where}: {what}"
        if message_id:
            self.ids[message_id] = None
