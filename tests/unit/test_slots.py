"""Connections that are open: by zone, by site, and by lines that share one."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from zonerelay.config.settings import ZoneSettings
from zonerelay.delivery.connection.session import Slot, Slots
from zonerelay.delivery.peer import Terms
from zonerelay.routing.destinations.route import DestinationLimits, MxHost, Route

ZONE = ZoneSettings(max_connections=20)
USUAL = DestinationLimits(
    max_connections=4, max_recipients_per_transaction=50, max_messages_per_connection=100
)
ROUTE = Route("default", "example.com", (MxHost("mx.example.com", 25),), expires=1e12)


def line(name: str, most: int) -> Terms:
    return Terms(
        ZONE, structs.replace(ROUTE, limits=structs.replace(USUAL, max_connections=most), terms=name)
    )


def slots() -> tuple[Slots, list[Slot]]:
    released: list[Slot] = []
    return Slots(released.append), released


def fill(slots: Slots, terms: Terms) -> list[Slot]:
    taken = []
    while not slots.site_is_full(terms):
        taken.append(slots.take(terms))
    return taken


def test_lines_with_equal_limits_share_them() -> None:
    counted, released = slots()
    one, other = line("", 4), line("mta-sts", 4)
    (first, *_) = fill(counted, one)
    assert counted.open_in("default") == 4
    assert counted.site_is_full(other)
    first.release()
    first.release()
    assert released == [first]
    assert len(fill(counted, other)) == 1
    assert counted.site_is_full(one)


def test_a_line_with_fewer_is_neither_exceeded_nor_shut_out() -> None:
    counted, _ = slots()
    many, few = line("", 4), line("destination[0]", 2)
    taken = fill(counted, many)
    assert counted.site_is_full(few)
    for slot in taken[:3]:
        slot.release()
    assert len(fill(counted, few)) == 2
    assert len(fill(counted, many)) == 1


def test_a_line_with_more_leaves_the_others_theirs() -> None:
    counted, _ = slots()
    large, usual = line("destination[1]", 6), line("", 2)
    fill(counted, usual)
    assert len(fill(counted, large)) == 4
    assert counted.site_is_full(usual)


def test_a_lower_limit_counts_at_once() -> None:
    counted, _ = slots()
    taken = fill(counted, line("", 4))
    assert counted.site_is_full(line("", 2))
    for slot in taken[:3]:
        slot.release()
    assert len(fill(counted, line("", 2))) == 1


def test_nothing_is_kept_of_what_is_over() -> None:
    counted, _ = slots()
    for slot in fill(counted, line("", 4)):
        slot.release()
    assert counted._at_site == {}
    assert counted.open_in("default") == 0


def test_zones_do_not_share_hosts() -> None:
    counted, _ = slots()
    fill(counted, line("", 4))
    elsewhere = Terms(replace(ZONE, name="bulk"), structs.replace(ROUTE, zone="bulk", limits=USUAL))
    assert not counted.site_is_full(elsewhere)
