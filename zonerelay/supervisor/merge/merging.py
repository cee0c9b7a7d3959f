"""Merges the responses of several workers into one response of the relay. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from zonerelay.operations import answers
from zonerelay.operations.catalogue import BY_REQUEST, CHANGED
from zonerelay.operations.operation import Merge, MergeRule
from zonerelay.operations.requests import Orders, QueueChange, QueueSummary, Request

S = TypeVar("S", bound=msgspec.Struct)

MAX_KEYS = 10_000
"""The maximum number of rows in a summary, the same as for one worker."""
ONCE_GONE = frozenset({"bounce", "drop"})
"""Commands after which the next worker of a shared queue finds what is left, not the same
deliveries again.
"""


def combined(rows: Sequence[Any], rule: Merge, request: Request, *, shared: bool) -> list[Any]:
    """Merge the rows of all workers by the rule of their operation. `shared`: the workers have one queue."""
    match request:
        case QueueSummary():
            return [merge_summaries(rows)]
        case QueueChange() if shared:
            return [merge_changed(rows)]
    return _gathered(rows, rule, request)


def _gathered(rows: Iterable[S], rule: Merge, request: Request | None = None) -> list[S]:
    found = list(rows)
    if rule.how is not MergeRule.IN_ORDER:
        found = [merged(some, rule, request=request) for some in _alike(found, _fields(rule.key))]
    order = rule.order
    return found if order is None else sorted(found, key=lambda row: order(request, row))


def merged(
    rows: Sequence[S], rule: Merge, whole: S | None = None, request: Request | None = None, **more: object
) -> S:
    """Return `whole`, or else the row that the rule selects, with the fields that the rule computes from all
    rows. A field without a value in any row is not changed.
    """
    if whole is None:
        whole = max(rows, key=lambda row: _rank(getattr(row, rule.worst))) if rule.worst else rows[0]
    rules: tuple[tuple[Callable[[list[Any]], object], str], ...] = (
        (sum, rule.add),
        (max, rule.most),
        (min, rule.least),
        (_joined, rule.join),
    )
    for combine, names in rules:
        for name in names.split():
            known = [value for row in rows if (value := getattr(row, name)) is not None]
            if known:
                more[name] = combine(known)
    for name in rule.first.split():
        more[name] = next(filter(None, (getattr(row, name) for row in (whole, *rows))), getattr(whole, name))
    for name, nested in rule.rows.items() if rows else ():
        parts = [getattr(row, name) for row in rows]
        if isinstance(parts[0], tuple):
            found = _gathered(chain.from_iterable(parts), nested, request)
            more[name] = tuple(found[: getattr(request, nested.limit, None)])
        else:
            more[name] = merged(parts, nested)
    return msgspec.structs.replace(whole, **more)


def _rank(value: Any) -> Any:
    """Return a sort key for the value of a field. `None` comes first, and enum members have the order of
    their definition.
    """
    return list(type(value)).index(value) if isinstance(value, Enum) else value or 0


def _joined(values: Sequence[Any]) -> object:
    """Join different strings into one, or tuples into one tuple without repetitions."""
    if isinstance(values[0], tuple):
        return tuple(dict.fromkeys(chain.from_iterable(values)))
    return "; ".join(dict.fromkeys(filter(None, values)))


def _alike(rows: Iterable[S], key: Callable[[S], object]) -> list[list[S]]:
    """Group the rows that have the same key."""
    groups: dict[object, list[S]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _fields(names: str) -> Callable[[Any], object]:
    """Return a function that reads the fields with these names."""
    return attrgetter(*names.split()) if names else lambda _: None


_STATUS = Merge(
    add="inbound_connections history_size",
    most="captured_messages captured_size",
    least="free_space history_since counted",
    rows={
        "source_penalties": Merge(key="source destination ipv6_only", worst="until"),
        "orders": BY_REQUEST[Orders].merge,
        # All workers count the same usage, and the highest value is the latest.
        "quotas": Merge(key="user quota", most="used"),
    },
)


def merge_status(
    parts: Mapping[int, answers.RelayStatus], own: answers.RelayStatus, *, shared: bool
) -> answers.RelayStatus:
    """Merge the replies to `status`. `own` contains what only the supervisor knows; the workers' values are
    added.
    """
    replies = list(parts.values())
    destinations = _destinations((each for part in replies for each in part.destinations), shared=shared)
    problems = dict.fromkeys(own.problems)
    for worker, part in parts.items():
        for problem in part.problems:
            everywhere = len(parts) > 1 and all(problem in other.problems for other in replies)
            problems[problem if everywhere else f"worker {worker}: {problem}"] = None
    zones = _alike((zone for part in replies for zone in part.zones), _fields("name"))
    return merged(
        replies,
        _STATUS,
        own,
        zones=tuple(map(_same_queue if shared else _sum, zones)),
        destinations=destinations,
        destinations_total=max(len(destinations), *(part.destinations_total for part in replies), 0),
        problems=tuple(problems),
        limits=_usual({worker: part.limits for worker, part in parts.items()}),
        every=0 if not all(part.every for part in replies) else max((p.every for p in replies), default=1),
        name_servers=_usual({worker: part.name_servers for worker, part in parts.items()}),
        accepted_per_minute=_by_minute(part.accepted_per_minute for part in replies),
        delivered_per_minute=_by_minute(part.delivered_per_minute for part in replies),
    )


def _by_minute(parts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the sums of the workers' counts for each minute. The last entries of all workers are for the
    same minute.
    """
    sums = [sum(minute) for minute in zip_longest(*map(reversed, parts), fillvalue=0)]
    return tuple(sums[::-1])


def _usual(parts: Mapping[int, str]) -> str:
    """Merge the messages of workers: the most frequent one first, then all others, each with the number of
    its worker.
    """
    said = [text for text in parts.values() if text]
    usual = max(said, key=said.count, default="")
    others = [f"worker {worker}: {text}" for worker, text in parts.items() if text and text != usual]
    return "; ".join((usual, *others))


def _sum(zones: Sequence[answers.ZoneStatus]) -> answers.ZoneStatus:
    return merged(zones, Merge(add="ready active deferred held suspended", most="oldest_seconds"))


def _same_queue(zones: Sequence[answers.ZoneStatus]) -> answers.ZoneStatus:
    """Merge the counts that several workers report for a shared queue. Each worker counts all deliveries but
    knows only its own attempts.
    """
    total = max(zone.ready + zone.active + zone.deferred + zone.held + zone.suspended for zone in zones)
    most = merged(zones, Merge(add="active", most="deferred held suspended oldest_seconds"))
    total -= most.suspended
    active = min(most.active, total)
    deferred = min(most.deferred, max(total - active - most.held, 0))
    ready = max(total - active - most.held - deferred, 0)
    return msgspec.structs.replace(most, ready=ready, active=active, deferred=deferred)


def _destinations(
    rows: Iterable[answers.DestinationStatus], *, shared: bool
) -> tuple[answers.DestinationStatus, ...]:
    own, counted = "active waiting per_minute", " ready deferred held suspended"
    rule = Merge(
        worst="suspended_until",
        add=own if shared else own + counted,
        # Each worker counts all of a shared queue. Rates are totals over all workers.
        most="oldest_seconds max_connections" + (counted if shared else ""),
        least="next_turn",
        first="reply reply_class max_rate",
    )
    found = [
        merged(some, rule, turns_seconds=_turns_seconds(some, shared=shared)) for some in _alike(rows, _place)
    ]
    return tuple(sorted(found, key=answers.hurts))


def _place(row: answers.DestinationStatus) -> tuple[str, str]:
    """Return the zone and hosts that identify a destination. Workers may have seen it first under different
    names.
    """
    return row.zone, row.hosts or f"{row.destination} "


def _turns_seconds(rows: Sequence[answers.DestinationStatus], *, shared: bool) -> float | None:
    """Return the estimated number of seconds in which the rate limit allows all waiting mail of a
    destination. The mail of workers without an estimate of their own is included.
    """
    intervals = [row.turns_seconds / max(row.ready, 1) for row in rows if row.turns_seconds is not None]
    ready = [row.ready for row in rows]
    return max(intervals) * (max(ready) if shared else sum(ready)) if intervals else None


def merge_changed(parts: Sequence[answers.ChangeResult]) -> answers.ChangeResult:
    """Merge the results of a change of a shared queue. Each worker sees all of its deliveries, and skips
    those that others are attempting.
    """
    whole = merged(parts, CHANGED)
    most = merged(parts, Merge(most="matched changed", least="busy"), whole)
    changed = min(whole.changed if whole.action in ONCE_GONE else most.changed, most.matched)
    return msgspec.structs.replace(most, changed=changed)


def merge_summaries(parts: Sequence[answers.Summary]) -> answers.Summary:
    """Merge the summaries of all workers, with at most as many keys as one worker reports."""
    first = parts[0]
    other = none = [0] * (len(first.minutes) + 1)
    found: dict[str, list[int]] = {}
    for part in parts:
        for row in part.rows:
            found[row.key] = _added(found.get(row.key, none), row.ages)
        other = other if part.other is None else _added(other, part.other.ages)
    every = max(part.every for part in parts)
    return answers.summary_of(first.by, first.minutes, found, other, every=every, most=MAX_KEYS)


def _added(some: Sequence[int], more: Sequence[int]) -> list[int]:
    return [one + other for one, other in zip(some, more, strict=True)]
