"""What a check of a spool finds, and what a repair does about it: the values that every engine answers with.

An engine has a module `check` with a function `check(…, examination) -> Contents` and, where it can mend
itself, a module `repair` with a function `repair(…, salvage, tell) -> Repaired`. Both work without a relay:
they claim nothing and send nothing.

Promises: a check changes no byte and no time in the spool. A repair keeps the spool as it was until it has
ended, and what has no record left goes into the salvage directory, never away.

Memory is bounded: `Findings` counts every finding and keeps the first few of each kind in words.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message

KEPT = 1000
"""Findings of one kind that are told in full; those beyond are counted."""

Tell = Callable[[int, int], None]
"""`tell(done, total)` in octets, as often as it likes; `total` is 0 while it is not known."""


class Fault(enum.StrEnum):
    """What is wrong. The text is the word in the table and in `--json`."""

    UNREADABLE = "unreadable"
    """A block, a file or an object that fails its checksum, or that the disk cannot read."""
    BAD_RECORD = "bad record"
    """A record that can be read and makes no sense."""
    CHUNKS_ALONE = "chunks alone"
    """Chunks of a body without a message: an upload that never ended, or what is left of a message."""
    DELIVERY_ALONE = "delivery alone"
    """A delivery whose message has no record."""
    MESSAGE_ALONE = "message alone"
    """A message that no delivery belongs to."""
    CHUNK_MISSING = "chunk missing"
    WRONG_SIZE = "wrong size"
    """The chunks of a body have not the octets that the message's record says."""
    INDEX_MISSING = "index missing"
    """A delivery that is not in an index where it belongs."""
    INDEX_STRAY = "index stray"
    """An entry of an index without the delivery that it names."""
    WRONG_COUNT = "wrong count"
    """A stored number of open deliveries that is not the number of deliveries."""
    STRAY_FILE = "stray file"
    """A file or an object that is not the spool's."""
    BESIDE = "beside the spool"
    """A file of the relay's that lies beside the spool, such as the history, and cannot be read."""


HARMLESS = frozenset({Fault.CHUNKS_ALONE, Fault.STRAY_FILE})
"""A crash or an operator may leave these in a sound spool, and the next start sees to them: they are told,
and are no damage.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding. `where` names the key, file, row or object; `what` says in words what is wrong with it;
    `message_id` is the message that it belongs to, "" when that is not known.
    """

    fault: Fault
    where: str
    what: str
    message_id: str = ""


@dataclass(slots=True)
class Findings:
    """Counts by kind, and the first `KEPT` of each kind."""

    counts: Counter[Fault] = field(default_factory=Counter)
    kept: list[Finding] = field(default_factory=list)

    def add(self, fault: Fault, where: str, what: str, message_id: str = "") -> None:
        self.counts[fault] += 1
        if self.counts[fault] <= KEPT:
            self.kept.append(Finding(fault, where, what, message_id))

    @property
    def is_damaged(self) -> bool:
        return any(fault not in HARMLESS for fault in self.counts)


@dataclass(frozen=True, slots=True)
class Examination:
    """What every check is given. `scratch` is a directory that does not exist, for engines that need one, and
    does not exist when the check returns; `environment` is where secrets may be.
    """

    scratch: Path
    findings: Findings
    tell: Tell
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Contents:
    """How much was looked at. `octets` are those that were read."""

    messages: int
    deliveries: int
    octets: int


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What a repair found and cannot put back: `message` is None when its record is lost. `deliveries` have
    records; `unknown` are recipients of its envelope that no record tells of: they were delivered, or lost.
    `body` reads the chunks that are there, and `is_whole` when those are all.
    """

    message_id: str
    why: str
    message: Message | None
    deliveries: tuple[Delivery, ...]
    unknown: tuple[str, ...]
    body: Callable[[], Iterator[bytes]]
    is_whole: bool


Salvage = Callable[[Salvaged], None]


class Repaired(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a repair. `before` counts the deliveries that anything in the spool still names, `after`
    those of the repaired spool; `lost` names what could not be saved, a line each, and `more_lost` counts the
    lines beyond a thousand; `repeats` names deliveries of the repaired spool that may have left the damaged
    one, a line for each message; `noted` names damage that costs nothing; `salvaged` counts messages that
    were handed to the salvage; `kept` is where the spool as it was is, "" when nothing was changed.
    """

    before: int
    after: int
    lost: tuple[str, ...] = ()
    more_lost: int = 0
    repeats: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()
    salvaged: int = 0
    kept: str = ""
