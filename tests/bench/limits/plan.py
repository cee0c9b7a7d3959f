"""Who receives, how they behave, what the relay was told about them, and which mail comes.

A *site* is a set of hosts with addresses of their own in 127.0.1.0/24. Its *lines* are recipient domains that
are treated alike. Both have promises, which are what the relay's configuration says.
"""

from __future__ import annotations

import enum

import msgspec

from tests.bench.limits.ledger import Promise
from tests.support.toml import Table
from zonerelay.config.units import Rate

USUAL = Promise(connections=8, recipients=20, messages=100)
ZONE_CONNECTIONS = 40
PACED_CONNECTIONS = 5
PACED_RATE = (20, 1.0)


class Mood(enum.StrEnum):
    """How a receiver is."""

    PLAIN = "plain"
    SLOW = "slow"  # each reply takes a while
    SLEEPY = "sleepy"  # greets once in a while, then all who wait at the same moment
    GREYLIST = "greylist"  # a recipient is taken at the second try
    MOODY = "moody"  # 421 now and then, at any point, and broken connections
    FEW = "few"  # takes three recipients, and ten messages on a connection
    SILENT = "silent"  # accepts connections and says nothing
    DEAD = "dead"  # nobody listens


class Host(msgspec.Struct, frozen=True):
    number: int
    mood: Mood = Mood.PLAIN
    preference: int = 10

    @property
    def address(self) -> str:
        return f"127.0.1.{self.number}"

    @property
    def name(self) -> str:
        return f"mx{self.number}.test"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """`destination` is its [[destination]], if any. `weight`: its part of the mail that comes unasked."""

    name: str
    domains: tuple[str, ...]
    promise: Promise
    destination: dict[str, str | int | list[str]] = {}
    most_recipients: int = 3
    weight: int = 1


class Site(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    zone: str = "default"
    hosts: tuple[Host, ...]
    lines: tuple[Line, ...]
    promise: Promise


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    sites: tuple[Site, ...]
    zones: dict[str, Promise]
    port: int

    def dns(self) -> dict[str, dict[str, list[str] | int]]:
        zones: dict[str, dict[str, list[str] | int]] = {}
        for site in self.sites:
            for host in site.hosts:
                zones[host.name] = {"A": [host.address], "TTL": 5}
            for line in site.lines:
                for domain in line.domains:
                    records = [f"{host.preference} {host.name}." for host in site.hosts]
                    zones[domain] = {"MX": records, "TTL": 5}
        return zones

    def destinations(self) -> list[Table]:
        return [line.destination for site in self.sites for line in site.lines if line.destination]


def rated(count: int, seconds: float, **other: int) -> Promise:
    return msgspec.structs.replace(USUAL, rate=(count, seconds), **other)


def alone(
    name: str,
    *hosts: Host,
    promise: Promise = USUAL,
    zone: str = "default",
    domains: int = 1,
    most_recipients: int = 3,
    weight: int = 1,
) -> Site:
    """A site with one line, told to the relay by its hosts."""
    line = Line(
        name=name,
        domains=tuple(f"d{n}.{name}.{zone}.test" for n in range(domains)),
        promise=promise,
        destination=_told(promise, mx=[host.name for host in hosts]) if zone == "default" else {},
        most_recipients=most_recipients,
        weight=weight,
    )
    return Site(name=name, zone=zone, hosts=hosts, lines=(line,), promise=promise)


def _told(promise: Promise, **match: list[str]) -> dict[str, str | int | list[str]]:
    """The [[destination]] for what differs from the zone; none when nothing does."""
    told: dict[str, str | int | list[str]] = {}
    if promise.connections != USUAL.connections:
        told["max_connections"] = promise.connections
    if promise.recipients != USUAL.recipients:
        told["max_recipients_per_transaction"] = promise.recipients
    if promise.messages != USUAL.messages:
        told["max_messages_per_connection"] = promise.messages
    if promise.rate is not None:
        told["max_rate"] = str(Rate(*promise.rate))
    return {**match, **told} if told else {}


def standard(port: int) -> Plan:
    sites = (
        alone("provider", Host(1), Host(2), domains=5, weight=30),
        _shared(),
        alone("rated", Host(4), promise=rated(20, 1.0)),
        alone("sleepy", Host(5, Mood.SLEEPY), promise=rated(4, 1.0, messages=1)),
        alone("few", Host(6), promise=_but(connections=2, messages=5), weight=3),
        alone("greylist", Host(7, Mood.GREYLIST), promise=rated(15, 1.0)),
        alone("moody", Host(8, Mood.MOODY), promise=rated(30, 1.0, connections=4)),
        alone("slow", Host(9, Mood.SLOW), promise=_but(connections=6)),
        alone("dead", Host(10, Mood.DEAD)),
        alone("half", Host(11, Mood.DEAD, 5), Host(12), promise=rated(10, 1.0)),
        alone("silent", Host(13, Mood.SILENT), promise=_but(connections=3)),
        alone("changing", Host(14), promise=rated(20, 1.0, connections=6)),
        alone("picky", Host(15, Mood.FEW), promise=_but(recipients=5, connections=3), most_recipients=12),
        alone("x", Host(16), zone="paced", promise=USUAL_PACED),
        alone("y", Host(17, Mood.MOODY), zone="paced", promise=USUAL_PACED),
    )
    zones = {
        "default": Promise(connections=ZONE_CONNECTIONS),
        "paced": Promise(connections=PACED_CONNECTIONS, rate=PACED_RATE),
    }
    return Plan(sites=sites, zones=zones, port=port)


def _but(**other: int) -> Promise:
    return msgspec.structs.replace(USUAL, **other)


USUAL_PACED = _but(connections=3)


def _shared() -> Site:
    """One host, three lines: the zone's terms, fewer connections, and a rate."""
    few = _but(connections=2, recipients=4)
    slow = rated(5, 1.0)
    lines = (
        Line(name="shared a", domains=("a.shared.test",), promise=USUAL, weight=10),
        Line(
            name="shared b",
            domains=("b.shared.test",),
            promise=few,
            destination=_told(few, domain=["b.shared.test"]),
            most_recipients=8,
        ),
        Line(
            name="shared c",
            domains=("c.shared.test",),
            promise=slow,
            destination=_told(slow, domain=["c.shared.test"]),
        ),
    )
    return Site(name="shared", hosts=(Host(3),), lines=lines, promise=USUAL)
