"""Defines the results of a spool check and of a repair, for every engine.

An engine has a module `check` with a function `check(…, examination) -> Contents` and, if it can be repaired,
a module `repair` with a function `repair(…, salvage, tell) -> Repaired`. Both work without a relay: they
claim nothing and send nothing.

Promises: a check changes no byte and no timestamp in the spool. A repair keeps the old spool until it has
finished. It moves data that belongs to no record into the salvage directory and never deletes it.

Memory is bounded: `Findings` counts all findings and keeps the text of the first few of each kind.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message

KEPT = 1000
"""The number of findings of one kind that are kept in full. Later ones are only counted."""

Tell = Callable[[int, int], None]
"""`tell(done, total)` reports progress in bytes, any number of times. `total` is 0 while it is unknown."""


class DamageKind(enum.StrEnum):
    """The kinds of spool damage. The texts appear in the table and in `--json`."""

    UNREADABLE = "unreadable"
    """A block, a file or an object has a wrong checksum, or the disk cannot read it."""
    BAD_RECORD = "bad record"
    """A record is readable and invalid."""
    CHUNKS_ALONE = "chunks alone"
    """A body has chunks but no message. They come from an unfinished upload or from a damaged message."""
    DELIVERY_ALONE = "delivery alone"
    """A delivery belongs to a message that has no record."""
    MESSAGE_ALONE = "message alone"
    """A message has no delivery."""
    CHUNK_MISSING = "chunk missing"
    WRONG_SIZE = "wrong size"
    """The chunks of a body do not have the size in the message's record."""
    INDEX_MISSING = "index missing"
    """A delivery is missing from an index."""
    INDEX_STRAY = "index stray"
    """An index entry names a delivery that does not exist."""
    WRONG_COUNT = "wrong count"
    """The stored number of open deliveries differs from the actual number."""
    STRAY_FILE = "stray file"
    """A file or an object does not belong to the spool."""
    BESIDE = "beside the spool"
    """A file of the relay next to the spool, such as the history, cannot be read."""


HARMLESS = frozenset({DamageKind.CHUNKS_ALONE, DamageKind.STRAY_FILE})
"""A crash or an operator may leave these in a valid spool, and the next start cleans them up. They are
reported, but are not damage.
"""


class Finding(msgspec.Struct, frozen=True):
    """A problem that a check has found. `where` is the key, file, row or object, and `what` describes the
    problem. `message_id` is the message that it belongs to, or "" if that is unknown.
    """

    fault: DamageKind
    where: str
    what: str
    message_id: str = ""


class Findings(msgspec.Struct):
    """The problems found by a check: counts by kind, and the first `KEPT` of each kind."""

    counts: Counter[DamageKind] = msgspec.field(default_factory=Counter)
    kept: list[Finding] = msgspec.field(default_factory=list)

    def add(self, fault: DamageKind, where: str, what: str, message_id: str = "") -> None:
        self.counts[fault] += 1
        if self.counts[fault] <= KEPT:
            self.kept.append(Finding(fault, where, what, message_id))

    @property
    def is_damaged(self) -> bool:
        return any(fault not in HARMLESS for fault in self.counts)


class CheckOptions(msgspec.Struct, frozen=True):
    """The options of a check. `scratch` is a directory that does not exist, for engines that need one. The
    check creates and removes it. `environment` may contain secrets.
    """

    scratch: Path
    findings: Findings
    tell: Tell
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)


class SpoolContents(NamedTuple):
    """The numbers of messages, deliveries and bytes that a check has read."""

    messages: int = 0
    deliveries: int = 0
    octets: int = 0


class SalvagedMessage(msgspec.Struct, frozen=True):
    """A message that cannot be restored to the spool by a repair. `message` is None if its record is lost.
    `deliveries` are those with records. `unknown` are recipients of the envelope without a record, who were
    delivered to or whose delivery was lost. `body` reads the existing chunks, and `is_whole` is whether no
    chunk is missing.
    """

    message_id: str
    why: str
    message: Message | None
    deliveries: tuple[Delivery, ...]
    unknown: tuple[str, ...]
    body: Callable[[], Iterator[bytes]]
    is_whole: bool


Salvage = Callable[[SalvagedMessage], None]


class RepairResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a repair.

    `before` counts the deliveries that are still named anywhere in the damaged spool, and `after` those of
    the repaired one. `lost` describes what could not be saved, a line each, and `more_lost` counts the lines
    beyond a thousand. `repeats` has a line for each message with deliveries in the repaired spool that may
    have left the damaged one. `noted` describes damage without a loss. `salvaged` counts the messages in the
    salvage directory. `kept` is the path of the old spool, or "" if nothing was changed.
    """

    before: int
    after: int
    lost: tuple[str, ...] = ()
    more_lost: int = 0
    repeats: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()
    salvaged: int = 0
    kept: str = ""
