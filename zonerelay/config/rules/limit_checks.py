"""Limits, rates and times of zones: what cannot hold together, and what has no effect.

A share must not be larger than the whole: a destination's connections are part of its zone's. Rates may be
written for times of their own, so a destination's that is faster than its zone's is only remarked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from zonerelay.config.options.problems import Report
from zonerelay.config.options.units import Rate, format_duration
from zonerelay.config.settings import DestinationSettings, Settings, ZoneSettings


def check_limits(settings: Settings, report: Report) -> tuple[ZoneSettings, ...]:
    """The zones, with default shares that fit."""
    for at, zone in enumerate(settings.zone):
        _check_times(zone, at, settings, report)
    return tuple(_with_share(zone, at, report) for at, zone in enumerate(settings.zone))


def limit_advice(settings: Settings) -> Iterator[str]:
    yield from _shorter_delays("retry", settings.retry.schedule)
    for at, zone in enumerate(settings.zone):
        yield from _shorter_delays(f"zone[{at}]", zone.schedule)
        if _is_faster(zone.max_rate_per_destination, zone.max_rate):
            shown = f"never reached: max_rate = {zone.max_rate} of the whole zone is slower"
            yield f"zone[{at}].max_rate_per_destination: {shown}"
        if zone.mix_domains and not zone.next_hop:
            yield (
                f"zone[{at}].mix_domains: true in a zone that is routed by MX: Google and others defer all "
                "recipients of a transaction but those in the first domain"
            )
    for at, destination in enumerate(settings.destination):
        zones = _zones_of(destination, settings)
        if zones and all(_is_faster(destination.max_rate, zone.max_rate) for zone in zones):
            yield f"destination[{at}].max_rate: never reached: max_rate of {_named(zones)} is slower"


def _check_times(zone: ZoneSettings, at: int, settings: Settings, report: Report) -> None:
    """A schedule whose first delay is beyond the age of mail would be none."""
    max_age = zone.max_age or settings.retry.max_age
    if not zone.schedule or zone.schedule[0] <= max_age:
        return
    if report.sound("zone", at, "schedule") and report.sound("zone", at, "max_age") and report.sound("retry"):
        whose = "max_age" if zone.max_age else "max_age in [retry]"
        report.refuse(
            ("zone", at, "schedule"),
            f"the first delay of {format_duration(zone.schedule[0])} is longer than "
            f"{whose} = {format_duration(max_age)}, when mail is given up",
        )


def _with_share(zone: ZoneSettings, at: int, report: Report) -> ZoneSettings:
    """A destination's share is part of its zone's connections; the default share gives way silently."""
    if zone.max_connections_per_destination <= zone.max_connections:
        return zone
    key = ("zone", at, "max_connections_per_destination")
    if report.given(*key) and report.sound(*key) and report.sound("zone", at, "max_connections"):
        report.refuse(
            key,
            f"{zone.max_connections_per_destination} is more than max_connections = {zone.max_connections}, "
            "the limit of the whole zone",
        )
    return replace(zone, max_connections_per_destination=zone.max_connections)


def _zones_of(destination: DestinationSettings, settings: Settings) -> list[ZoneSettings]:
    """Those whose mail the entry is asked for."""
    return [zone for zone in settings.zone if not destination.zone or zone.name in destination.zone]


def _named(zones: list[ZoneSettings]) -> str:
    return f"zone {zones[0].name}" if len(zones) == 1 else "all its zones"


def _is_faster(rate: Rate | None, whole: Rate | None) -> bool:
    return rate is not None and whole is not None and rate.interval < whole.interval


def _shorter_delays(path: str, schedule: tuple[float, ...]) -> Iterator[str]:
    for earlier, later in pairwise(schedule):
        if later < earlier:
            shown = f"{format_duration(later)} comes after {format_duration(earlier)}"
            yield f"{path}.schedule: {shown}: mail is tried more often the longer it waits"
            return
