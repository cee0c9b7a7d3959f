"""What is simulated: `mix` is the whole world; the others put one policy of the queue to the test."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.bench.simulate.world import HOUR, Kind, with_kind
from zonerelay.config.settings import BounceSettings, RetrySettings, ZoneSettings
from zonerelay.config.units import Rate
from zonerelay.model.envelope import Priority
from zonerelay.routing.destinations.route import DestinationLimits

SENDERS = "senders"


def limits(connections: int, rate: Rate | None = None) -> DestinationLimits:
    return DestinationLimits(connections, 50, 1000, rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """Mail that comes besides the stream, at one moment: `recipients` of a kind, `each` per message, over
    `seconds`. `deferred_to`: it has been deferred to this moment.
    """

    at: float = 0.0
    kind: str
    recipients: int
    each: int = 1
    seconds: float = 0.0
    deferred_to: float = 0.0
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A node stops in the middle of its transactions, and starts again with its store after `seconds`."""

    node: int
    at: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`deliveries` at `rate` a second on average, in a swell of `swing`; then until the queue is empty.

    `shares`: of the stream's messages, by priority; all are normal without. `busy`: what part of the mail
    comes to which node; all have the same without.
    """

    name: str
    about: str
    kinds: tuple[Kind, ...]
    deliveries: int
    rate: float
    swing: float = 0.0
    nodes: int = 1
    zone: ZoneSettings = field(default_factory=ZoneSettings)
    retry: RetrySettings = field(default_factory=lambda: RetrySettings(max_age=6 * HOUR))
    bounce: BounceSettings = field(default_factory=BounceSettings)
    injections: tuple[Injection, ...] = ()
    stored: tuple[Injection, ...] = ()
    """What is in the stores when the relays start; when it came counts."""
    shares: Mapping[Priority, float] = field(default_factory=dict)
    busy: tuple[float, ...] = ()
    deaths: tuple[Death, ...] = ()
    every: float = 10.0
    """Seconds between samples."""

    @property
    def has_priorities(self) -> bool:
        return bool(self.shares) or any(each.priority is not Priority.NORMAL for each in self.injections)


MIX = (
    Kind(name="bigone", share=0.18, domains=1, seconds=(0.15, 0.4), limits=limits(40), busy=0.01),
    Kind(name="bigtwo", share=0.12, domains=1, seconds=(0.15, 0.4), limits=limits(30)),
    Kind(
        name="rated", share=0.03, domains=1, seconds=(0.1, 0.3), limits=limits(12, Rate(800, 60.0)),
        most_rate=800.0,
    ),
    Kind(name="strict", share=0.03, domains=1, seconds=(0.1, 0.3), most_connections=6, most_rate=900.0),
    Kind(name="hosted", share=0.12, domains=30_000, sites=1, seconds=(0.1, 0.3), limits=limits(20)),
    Kind(name="fast", share=0.33, domains=45_000, refused=0.02),
    Kind(name="slow", share=0.03, domains=5_000, seconds=(2.0, 10.0), connecting=1.0),
    Kind(name="tarpit", share=0.0005, domains=300, seconds=(60.0, 280.0), connecting=10.0),
    Kind(name="silent", share=0.0005, domains=200, silent=True, seconds=(300.0, 300.0)),
    Kind(name="greylisting", share=0.10, domains=13_000, greylist=300.0),
    Kind(name="dead", share=0.004, domains=2_500, dead=True, connecting=30.0),
    Kind(
        name="returning", share=0.04, domains=3_000, connecting=5.0,
        down=((0.5 * HOUR, 1.5 * HOUR), (4 * HOUR, 7 * HOUR)),
    ),
    Kind(name="nodns", share=0.002, domains=500, no_dns=True, look_up=10.0),
    Kind(name=SENDERS, share=0.0, domains=500),
)  # fmt: skip
"""About 100,000 domains."""

_QUIET = (Kind(name="fast", share=1.0, domains=5_000, even=True), Kind(name=SENDERS, share=0.0, domains=500))
"""Singles, mostly to destinations with nothing else to do: what others do must not delay them."""


_ALL = (
    Scenario(
        name="mix",
        about="100,000 domains of all kinds; a big provider is away for two hours",
        kinds=with_kind(MIX, "bigtwo", down=((2 * HOUR, 4 * HOUR),)),
        deliveries=10_000_000,
        rate=200.0,
        swing=0.5,
        zone=ZoneSettings(max_connections=1000, max_connections_per_destination=20),
        shares={Priority.HIGH: 0.02, Priority.NORMAL: 0.78, Priority.BULK: 0.2},
        every=60.0,
    ),
    Scenario(
        name="comeback",
        about="a provider with a third of the mail comes back after two hours",
        kinds=(
            Kind(
                name="away", share=0.5, domains=1, seconds=(0.1, 0.3), connecting=1.0,
                limits=limits(20, Rate(3000, 60.0)), down=((600.0, 2 * HOUR + 600.0),),
            ),
            *_QUIET,
        ),
        deliveries=200_000,
        rate=20.0,
        zone=ZoneSettings(max_connections=50),
    ),
    Scenario(
        name="due",
        about="100,000 deferred deliveries for 5,000 domains and a provider come due in the same second",
        kinds=(
            Kind(name="late", share=0.0, domains=5_000, even=True),
            Kind(name="provider", share=0.0, domains=1, limits=limits(10)),
            *_QUIET,
        ),
        deliveries=30_000,
        rate=20.0,
        zone=ZoneSettings(max_connections=100),
        injections=(
            Injection(at=60.0, kind="late", recipients=50_000, deferred_to=600.0),
            Injection(at=60.0, kind="provider", recipients=50_000, deferred_to=600.0),
        ),
    ),
    Scenario(
        name="list",
        about="one sender's list of 200,000 recipients in 40 messages, and other people's single messages",
        kinds=(Kind(name="listed", share=0.0, domains=20_000), *_QUIET),
        deliveries=30_000,
        rate=20.0,
        zone=ZoneSettings(max_connections=100),
        injections=(Injection(at=60.0, kind="listed", recipients=200_000, each=5_000, seconds=40.0),),
    ),
    Scenario(
        name="tarpits",
        about="hosts that take minutes, that say nothing, that are dead, that have no DNS; and fast ones",
        kinds=(
            Kind(name="tarpit", share=0.01, domains=200, seconds=(60.0, 280.0), connecting=10.0, even=True),
            Kind(name="dead", share=0.02, domains=200, dead=True, connecting=30.0, even=True),
            Kind(name="silent", share=0.003, domains=50, silent=True, seconds=(300.0, 300.0), even=True),
            Kind(name="nodns", share=0.02, domains=200, no_dns=True, look_up=10.0, even=True),
            *_QUIET,
        ),
        deliveries=60_000,
        rate=20.0,
        zone=ZoneSettings(max_connections=100),
    ),
    Scenario(
        name="rated",
        about="one destination gets more than its rate for an hour, others little",
        kinds=(
            Kind(name="rated", share=1.0, domains=1, limits=limits(10, Rate(600, 60.0))),
            *_QUIET,
        ),
        deliveries=90_000,
        rate=25.0,
        zone=ZoneSettings(max_connections=40),
    ),
    Scenario(
        name="backlog",
        about="relays start on 100,000 fresh deliveries for 10,000 domains; other people's single messages",
        kinds=(Kind(name="old", share=0.0, domains=10_000, even=True), *_QUIET),
        deliveries=20_000,
        rate=20.0,
        zone=ZoneSettings(max_connections=20),
        stored=(Injection(kind="old", recipients=100_000),),
    ),
    Scenario(
        name="flood",
        about="40,000 single messages of many senders in 100 s, more than can be sent; later as usual",
        kinds=(Kind(name="flood", share=0.0, domains=10_000, even=True), *_QUIET),
        deliveries=20_000,
        rate=20.0,
        zone=ZoneSettings(max_connections=20),
        injections=(Injection(at=60.0, kind="flood", recipients=40_000, seconds=100.0),),
    ),
    Scenario(
        name="hosted",
        about="relays start on 100,000 deliveries for 10,000 domains of one provider; other people's singles",
        kinds=(Kind(name="hosted", share=0.0, domains=10_000, sites=1, even=True), *_QUIET),
        deliveries=20_000,
        rate=20.0,
        zone=ZoneSettings(max_connections=20),
        stored=(Injection(kind="hosted", recipients=100_000),),
    ),
    Scenario(
        name="rush",
        about="as backlog; then 6,000 messages for ten hosts in 60 s, nearly what the connections can do",
        kinds=(
            Kind(name="old", share=0.0, domains=10_000, even=True),
            Kind(name="rush", share=0.0, domains=10, even=True),
            *_QUIET,
        ),
        deliveries=2_000,
        rate=1.0,
        zone=ZoneSettings(max_connections=20),
        stored=(Injection(kind="old", recipients=100_000),),
        injections=(Injection(at=60.0, kind="rush", recipients=6_000, seconds=60.0),),
    ),
    Scenario(
        name="crowd",
        about="2,940 messages for 49 hosts in 20 s, with 20 connections; other people's single messages",
        kinds=(Kind(name="crowd", share=0.0, domains=49, connecting=0.3, even=True), *_QUIET),
        deliveries=5_000,
        rate=10.0,
        zone=ZoneSettings(max_connections=20),
        injections=(Injection(at=60.0, kind="crowd", recipients=2_940, seconds=20.0),),
    ),
    Scenario(
        name="priorities",
        about="60,000 bulk messages to a provider and others, a normal stream to the same, rare urgent ones",
        kinds=(
            Kind(name="provider", share=0.5, domains=1, limits=limits(10)),
            Kind(name="fast", share=0.5, domains=5_000, even=True),
            Kind(name=SENDERS, share=0.0, domains=500),
        ),
        deliveries=30_000,
        rate=20.0,
        zone=ZoneSettings(max_connections=30),
        shares={Priority.HIGH: 0.02, Priority.NORMAL: 0.98},
        injections=(
            Injection(at=60.0, kind="provider", recipients=30_000, priority=Priority.BULK),
            Injection(at=60.0, kind="fast", recipients=30_000, priority=Priority.BULK),
        ),
    ),
)  # fmt: skip
NAMES = tuple(each.name for each in _ALL)


def scenario(name: str, *, deliveries: int = 0, nodes: int = 1) -> Scenario:
    """`deliveries` 0: as many as it is made for."""
    found = _ALL[NAMES.index(name)]
    return replace(found, deliveries=deliveries or found.deliveries, nodes=nodes)
