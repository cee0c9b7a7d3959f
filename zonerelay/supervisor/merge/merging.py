"""The rules by which the answers of several workers become one answer of the relay. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from zonerelay.control.messages.answers import (
    ActRow,
    Changed,
    DestinationStatus,
    Explanation,
    OrderRow,
    QuotaStatus,
    RelayStatus,
    SourcePenalty,
    Summary,
    SummaryRow,
    WebhookRow,
    ZoneStatus,
    hurts,
)

N = TypeVar("N", int, float)

MAX_KEYS = 10_000
"""Rows of a summary, as one worker's."""
ONCE_GONE = frozenset({"bounce", "drop"})
"""Verbs after which the next worker of a shared queue finds what is left, not the same again."""


def merge_status(parts: Mapping[int, RelayStatus], own: RelayStatus, *, shared: bool) -> RelayStatus:
    """`own` has what only the supervisor knows; what workers know is added."""
    answers = list(parts.values())
    destinations = _destinations((each for part in answers for each in part.destinations), shared=shared)
    problems = dict.fromkeys(own.problems)
    for worker, part in parts.items():
        for problem in part.problems:
            everywhere = len(parts) > 1 and all(problem in other.problems for other in answers)
            problems[problem if everywhere else f"worker {worker}: {problem}"] = None
    return msgspec.structs.replace(
        own,
        inbound_connections=sum(part.inbound_connections for part in answers),
        zones=_zones([part.zones for part in answers], shared=shared),
        destinations=destinations,
        destinations_total=max(len(destinations), *(part.destinations_total for part in answers), 0),
        problems=tuple(problems),
        source_penalties=_penalties(each for part in answers for each in part.source_penalties),
        limits=_usual({worker: part.limits for worker, part in parts.items()}),
        counted=all(part.counted for part in answers),
        every=0 if not all(part.every for part in answers) else max((p.every for p in answers), default=1),
        free_space=min((p.free_space for p in answers if p.free_space is not None), default=None),
        history_size=_known(sum, [part.history_size for part in answers]),
        history_since=_known(min, [part.history_since for part in answers]),
        name_servers=_usual({worker: part.name_servers for worker, part in parts.items()}),
        orders=merge_orders(part.orders for part in answers),
        quotas=_quotas(each for part in answers for each in part.quotas),
    )


def _quotas(rows: Iterable[QuotaStatus]) -> tuple[QuotaStatus, ...]:
    """All workers count the same usage: the one that has looked last has seen most."""
    found = {(row.user, row.quota): row for row in sorted(rows, key=lambda row: row.used)}
    return tuple(found.values())


def merge_webhooks(rows: Iterable[WebhookRow]) -> list[WebhookRow]:
    """One row for each webhook."""
    merged: dict[str, WebhookRow] = {}
    for row in rows:
        other = merged.get(row.name, row)
        both = (other,) if other is row else (other, row)
        worst = max(
            both,
            key=lambda each: ("ok", "failing").index(each.state) if each.state != "disabled (410)" else 2,
        )
        merged[row.name] = msgspec.structs.replace(
            worst,
            queued=sum(each.queued for each in both),
            delivered=sum(each.delivered for each in both),
            oldest=min((each.oldest for each in both if each.oldest is not None), default=None),
        )
    return list(merged.values())


def merge_orders(parts: Iterable[Sequence[OrderRow]]) -> tuple[OrderRow, ...]:
    """All workers have the same ones, and each counts what it did for them."""
    found: dict[str, OrderRow] = {}
    for row in (row for part in parts for row in part):
        before = found.get(row.id)
        found[row.id] = (
            row
            if before is None
            else msgspec.structs.replace(
                row, held=row.held + before.held, refused=row.refused + before.refused
            )
        )
    return tuple(sorted(found.values(), key=lambda row: -row.since))


def _known(together: Callable[[list[N]], N], parts: Iterable[N | None]) -> N | None:
    known = [each for each in parts if each is not None]
    return together(known) if known else None


def _usual(parts: Mapping[int, str]) -> str:
    """The text that most workers give, once; the other texts with the number of their worker."""
    said = [text for text in parts.values() if text]
    usual = max(said, key=said.count, default="")
    others = [f"worker {worker}: {text}" for worker, text in parts.items() if text and text != usual]
    return "; ".join((usual, *others))


def _zones(parts: Sequence[Sequence[ZoneStatus]], *, shared: bool) -> tuple[ZoneStatus, ...]:
    found: dict[str, list[ZoneStatus]] = {}
    for part in parts:
        for zone in part:
            found.setdefault(zone.name, []).append(zone)
    together = _same_queue if shared else _sum
    return tuple(together(name, zones) for name, zones in found.items())


def _sum(name: str, zones: Sequence[ZoneStatus]) -> ZoneStatus:
    return ZoneStatus(
        name=name,
        ready=sum(zone.ready for zone in zones),
        active=sum(zone.active for zone in zones),
        deferred=sum(zone.deferred for zone in zones),
        held=sum(zone.held for zone in zones),
        oldest_seconds=max(zone.oldest_seconds for zone in zones),
    )


def _same_queue(name: str, zones: Sequence[ZoneStatus]) -> ZoneStatus:
    """Merges counts of a shared queue: each worker counts all of it, and knows its own attempts only."""
    total = max(zone.ready + zone.active + zone.deferred + zone.held for zone in zones)
    active = min(sum(zone.active for zone in zones), total)
    held = max(zone.held for zone in zones)
    deferred = min(max(zone.deferred for zone in zones), max(total - active - held, 0))
    return ZoneStatus(
        name=name,
        ready=max(total - active - held - deferred, 0),
        active=active,
        deferred=deferred,
        held=held,
        oldest_seconds=max(zone.oldest_seconds for zone in zones),
    )


def _destinations(rows: Iterable[DestinationStatus], *, shared: bool) -> tuple[DestinationStatus, ...]:
    found: dict[tuple[str, str, str], DestinationStatus] = {}
    # Of a shared queue each worker counts all.
    together: Callable[[int, int], int] = max if shared else operator.add
    for row in rows:
        key = (row.zone, row.destination, row.hosts)
        before = found.get(key)
        found[key] = row if before is None else _destination(before, row, together)
    return tuple(sorted(found.values(), key=hurts))


def _destination(
    one: DestinationStatus, other: DestinationStatus, together: Callable[[int, int], int]
) -> DestinationStatus:
    later = max(one, other, key=lambda row: row.suspended_until or 0.0)
    turns = [row.next_turn for row in (one, other) if row.next_turn is not None]
    return msgspec.structs.replace(
        later,
        active=one.active + other.active,
        waiting=one.waiting + other.waiting,
        ready=together(one.ready, other.ready),
        deferred=together(one.deferred, other.deferred),
        held=together(one.held, other.held),
        oldest_seconds=max(one.oldest_seconds, other.oldest_seconds),
        reply=later.reply or one.reply or other.reply,
        next_turn=min(turns, default=None),
        reply_class=later.reply_class if later.reply else one.reply_class or other.reply_class,
        per_minute=one.per_minute + other.per_minute,
        max_rate=later.max_rate or one.max_rate or other.max_rate,
        max_connections=max(one.max_connections, other.max_connections),
    )


def _penalties(rows: Iterable[SourcePenalty]) -> tuple[SourcePenalty, ...]:
    found: dict[tuple[str, str, bool], SourcePenalty] = {}
    for row in rows:
        key = (row.source, row.destination, row.ipv6_only)
        if key not in found or found[key].until < row.until:
            found[key] = row
    return tuple(found.values())


def merge_changed(parts: Sequence[Changed], *, shared: bool) -> Changed:
    """Of a shared queue every worker sees every delivery, and leaves alone what others are attempting."""
    whole = msgspec.structs.replace(
        parts[0],
        matched=sum(each.matched for each in parts),
        changed=sum(each.changed for each in parts),
        busy=sum(each.busy for each in parts),
        gone=sum(each.gone for each in parts),
        altered=sum(each.altered for each in parts),
        act=next((each.act for each in parts if each.act), ""),
        no_undo="; ".join(dict.fromkeys(each.no_undo for each in parts if each.no_undo)),
        note="; ".join(dict.fromkeys(each.note for each in parts if each.note)),
    )
    if not shared:
        return whole
    matched = max(each.matched for each in parts)
    changes = [each.changed for each in parts]
    changed = min(sum(changes) if whole.action in ONCE_GONE else max(changes), matched)
    busy = min(each.busy for each in parts)
    return msgspec.structs.replace(whole, matched=matched, changed=changed, busy=busy)


def merge_act(one: ActRow, other: ActRow) -> ActRow:
    """One act in two workers. It can be undone as long as one of them can."""
    return msgspec.structs.replace(
        one,
        at=min(one.at, other.at),
        changed=one.changed + other.changed,
        until=min(one.until, other.until),
        finished=one.finished and other.finished,
        no_undo=one.no_undo and other.no_undo,
        undone_by=one.undone_by and other.undone_by,
    )


def merge_summaries(parts: Sequence[Summary]) -> Summary:
    """Adds what the workers have, and counts no more keys than one of them would."""
    found: dict[str, list[int]] = {}
    other = [0] * (len(parts[0].minutes) + 1)
    for part in parts:
        for row in part.rows:
            ages = found.get(row.key)
            found[row.key] = list(row.ages) if ages is None else _added(ages, row.ages)
        other = _added(other, part.other.ages) if part.other is not None else other
    rows = [SummaryRow(key=key, total=sum(ages), ages=tuple(ages)) for key, ages in found.items()]
    rows.sort(key=lambda row: (-row.total, row.key))
    for row in rows[MAX_KEYS:]:
        other = _added(other, row.ages)
    rest = SummaryRow(key="other", total=sum(other), ages=tuple(other))
    return msgspec.structs.replace(
        parts[0],
        rows=tuple(rows[:MAX_KEYS]),
        other=rest if rest.total else None,
        every=max(part.every for part in parts),
    )


def _added(some: Sequence[int], more: Sequence[int]) -> list[int]:
    return [one + other for one, other in zip(some, more, strict=True)]


def merge_explained(parts: Sequence[Explanation]) -> Explanation:
    """They say the same but for what one of them has met: the longest suspension is told."""
    return max(parts, key=lambda each: each.suspended_until or 0.0)
