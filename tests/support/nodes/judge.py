"""What came of it: nothing that was acknowledged is missing, what came twice was in flight at a fault.

Pure: from what the clients and the receiver have written down, and from when which node had which fault.
"""

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.nodes.sink import Arrival, Begun

OUTCOME = 1.0
"""Seconds within which what was delivered is also recorded, on a busy machine, too."""


@dataclass(slots=True)
class Fault:
    """Something that happened to `nodes` at `at`. Until `known` they could not know, and went on sending."""

    name: str
    nodes: frozenset[str]
    at: float
    known: float

    def explains(self, arrival: Arrival, slack: float) -> bool:
        """It was in flight, or its outcome was."""
        return (
            arrival.node in self.nodes
            and arrival.earliest <= self.known + slack
            and arrival.ended >= self.at - OUTCOME - slack
        )


@dataclass(slots=True)
class Verdict:
    """`repeated`: how many extra copies each fault explains; `unexplained` and `at_once` must be empty."""

    acknowledged: int
    arrived: int
    missing: set[str] = field(default_factory=set)
    repeated: Counter[str] = field(default_factory=Counter)
    unexplained: list[Sequence[Arrival]] = field(default_factory=list)
    at_once: list[tuple[Arrival, Arrival]] = field(default_factory=list)

    def __str__(self) -> str:
        twice = ", ".join(f"{count} by {name}" for name, count in sorted(self.repeated.items()))
        return (
            f"{self.acknowledged} acknowledged, {len(self.missing)} lost, {self.arrived} arrived,"
            f" repeated: {twice or 'none'}, unexplained: {len(self.unexplained)}"
        )


def judge(
    acknowledged: Collection[str],
    arrivals: Mapping[str, Sequence[Arrival]],
    faults: Sequence[Fault],
    *,
    slack: float = 0.0,
) -> Verdict:
    """`slack`: how long this machine lets anybody wait for a processor, nodes included."""
    found = Verdict(len(acknowledged), sum(map(len, arrivals.values())))
    found.missing = {token for token in acknowledged if token not in arrivals}
    for copies in arrivals.values():
        if len(copies) > 1:
            _explain(sorted(copies, key=lambda copy: copy.ended), faults, found, slack)
    return found


def _explain(copies: Sequence[Arrival], faults: Sequence[Fault], found: Verdict, slack: float) -> None:
    """Every copy but one must be of a node that could not say so."""
    explained = [next((f for f in faults if f.explains(copy, slack)), None) for copy in copies]
    names = [fault.name for fault in explained if fault is not None]
    if len(names) < len(copies) - 1:
        found.unexplained.append(copies)
    found.repeated.update(names[: len(copies) - 1])
    for (one, why), (other, why_other) in itertools.combinations(zip(copies, explained, strict=True), 2):
        if one.node != other.node and one.overlaps(other) and why is None and why_other is None:
            found.at_once.append((one, other))


def above_rate(begun: Sequence[Begun], count: int, seconds: float) -> list[tuple[Begun, Begun]]:
    """Where more than `count` came within `seconds`, whenever in its time each of them came."""
    ordered = sorted(begun, key=lambda each: each.earliest)
    return [
        (first, last)
        for first, last in zip(ordered, ordered[count:], strict=False)
        if last.at - first.earliest < seconds
    ]


def most_within(begun: Sequence[Begun], seconds: float) -> int:
    moments = sorted(each.at for each in begun)
    return max((bisect_left(moments, at + seconds) - place for place, at in enumerate(moments)), default=0)
