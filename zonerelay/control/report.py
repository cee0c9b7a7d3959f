"""Writes the report about a day or another period as plain text, from the history and the current queue.

It reads the histories of all workers of this machine. It blocks, but yields to other threads all the time,
because a busy day has millions of events. The report mentions gaps in a history and a relay that does not
answer.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from zonerelay.config.settings import Settings
from zonerelay.config.units import format_duration, format_size
from zonerelay.control.history import in_words
from zonerelay.history.reader import Histories, HistoryRecord
from zonerelay.history.writer import DIRECTORY
from zonerelay.model.reply import same_reply
from zonerelay.operations.answers import RelayStatus
from zonerelay.operations.errors import ControlError

MOST = 10
"""Rows of one list."""
KINDS = 50_000
"""Different senders, destinations or replies that are told apart; others are counted together."""
WIDTH = 78
SLICE = 500
"""Events after which another thread may run."""


SENDERS = "Accepted, by sender"


class Figures(msgspec.Struct):
    """The numbers of a report, collected from the events of its period."""

    totals: Counter[str] = msgspec.field(default_factory=Counter)
    octets: int = 0
    lists: dict[str, Counter[str]] = msgspec.field(default_factory=dict)
    slowest: list[tuple[float, str, str]] = msgspec.field(default_factory=list)

    def add(self, record: HistoryRecord) -> None:
        text, totals = record.text, self.totals
        match record.name:
            case "accepted":
                totals["messages accepted"] += 1
                totals["recipients accepted"] += int(text("recipients") or 0)
                self.octets += int(text("size") or 0)
                self._count(SENDERS, text("sender"))
            case "delivered":
                totals["delivered"] += 1
                self._count("Delivered, by destination", text("destination"))
                self._is_slow(float(text("age") or 0), text("id"), text("destination"))
            case "deferred" | "bounced" | "expired":
                totals["attempts deferred" if record.name == "deferred" else record.name] += 1
                self._count(f"{record.name.title()}, by destination", text("destination"))
                self._count(f"{record.name.title()}, by reply", same_reply(text("reply")))
            case "refused" | "login-failed":
                totals["refused"] += 1
                self._count("Refused, by reason", text("reason") or record.name)
            case "refused-more":
                totals["refused"] += int(text("count") or 0)
                self._count(
                    "Refused, by reason", "counted, but not recorded individually", int(text("count") or 0)
                )
            case "dsn":
                totals["bounces and reports"] += 1
            case "dropped":
                totals["dropped by operators"] += 1

    def _count(self, name: str, value: str, count: int = 1) -> None:
        found = self.lists.setdefault(name, Counter())
        found[value if value in found or len(found) < KINDS else "others"] += count

    def _is_slow(self, age: float, message_id: str, destination: str) -> None:
        if len(self.slowest) < MOST or age > self.slowest[-1][0]:
            self.slowest = sorted([*self.slowest, (age, message_id, destination)], reverse=True)[:MOST]


_COUNTED = ("messages accepted", "recipients accepted")
_TOTALS = (
    "delivered", "attempts deferred", "bounced", "expired", "refused", "bounces and reports",
    "dropped by operators",
)  # fmt: skip
LISTS = (
    "Delivered, by destination", SENDERS, "Deferred, by destination", "Deferred, by reply",
    "Bounced, by destination", "Bounced, by reply", "Expired, by destination", "Expired, by reply",
    "Refused, by reason",
)  # fmt: skip


def report(
    settings: Settings,
    hostname: str,
    period: tuple[float, float],
    now: RelayStatus | ControlError,
    known: Callable[[Sequence[str]], Mapping[str, str]] = lambda senders: {},
) -> str:
    """Return the report about the `period` between two Unix times. Blocks. `now` is the relay's answer about
    its queue. `known` returns the addresses that it knows of some pseudonyms.
    """
    (since, until), figures = period, Figures()
    with Histories(settings.spool.path.parent / DIRECTORY, None) as histories:
        for number, record in enumerate(histories.since(since, until)):
            figures.add(record)
            if number % SLICE == 0:
                time.sleep(0.0002)
        gaps = [gap for gap in histories.gaps(since, until) if not gap.unsearchable]
    if found := figures.lists.get(SENDERS):
        names = known([sender for sender, _ in found.most_common(MOST)])
        figures.lists[SENDERS] = Counter({names.get(each, each): found[each] for each in found})
    lines = [f"{hostname}: mail from {_when(since)} to {_when(until)}", ""]
    if not settings.history.enabled:
        lines += [
            "The history is disabled ([history] enabled = false), so there are no data for a report.",
            "",
        ]
    lines += [*_totals(figures), *(line for name in LISTS for line in _list(name, figures.lists.get(name)))]
    lines += [*_slowest(figures.slowest), *_queue(now)]
    if gaps:
        lines.append("The history is incomplete, so these figures are too low:")
        lines += [f"  {line}" for line in in_words(gaps, _when, several=True)]
    return "\n".join(lines) + "\n"


def _totals(figures: Figures) -> Iterable[str]:
    yield from (f"{figures.totals[name]:>12,}  {name}" for name in _COUNTED)
    # a whole number of kilobytes or megabytes has a short form
    unit = 1 << 20 if figures.octets >= 10 << 20 else 1024 if figures.octets >= 10 << 10 else 1
    yield f"{format_size(figures.octets // unit * unit):>12}  accepted"
    yield from (f"{figures.totals[name]:>12,}  {name}" for name in _TOTALS)
    yield ""


def _list(name: str, found: Counter[str] | None) -> Iterable[str]:
    if not found:
        return
    yield name
    for value, count in found.most_common(MOST):
        yield f"{count:>12,}  {value}"[:WIDTH]
    if len(found) > MOST:
        rest = found.total() - sum(count for _, count in found.most_common(MOST))
        yield f"{rest:>12,}  in {len(found) - MOST:,} more"
    yield ""


def _slowest(slowest: Sequence[tuple[float, str, str]]) -> Iterable[str]:
    slow = [each for each in slowest if each[0] >= 1.0]
    if slow:
        yield "Slowest deliveries"
        yield from (
            f"{format_duration(float(int(age))):>12}  {message}  {to}"[:WIDTH] for age, message, to in slow
        )
        yield ""


def _queue(status: RelayStatus | ControlError) -> Iterable[str]:
    if isinstance(status, ControlError):
        yield from ("The queue now", f"  unknown: {status}", "")
        return
    yield "The queue now        ready   deferred       held  suspended  oldest"
    for zone in status.zones:
        ready = zone.ready + zone.active
        oldest = format_duration(float(int(zone.oldest_seconds))) if zone.oldest_seconds else "-"
        counts = (ready, zone.deferred, zone.held, zone.suspended)
        yield f"  {zone.name[:14]:<14}{' '.join(f'{count:>10,}' for count in counts)}  {oldest}"
    yield ""
    if status.orders:
        yield "Suspensions and hold rules now"
        for order in status.orders:
            ends = "until resumed" if order.until is None else f"until {_when(order.until)}"
            line = f"  {order.id}  {order.effect} {order.about}, by {order.who}, {ends}: {order.reason}"
            yield line[:WIDTH].rstrip()
        yield ""
    if status.problems:
        yield "Problems now"
        yield from (f"  {each}" for each in status.problems)
        yield ""


def _when(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M %z")
