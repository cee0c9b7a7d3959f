"""Messages, deliveries and a small body store for tests that send mail without a spool."""

import random
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tests.support.event_log import EventLog, events_into
from zonerelay.config.settings import CredentialSettings, DeliverySettings, SourceSettings, ZoneSettings
from zonerelay.delivery.auth.logins import Logins, senders_of
from zonerelay.delivery.auth.oauth import Post, post
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.delivery.rewrite.rendering import Renderer
from zonerelay.delivery.source import SourceSelection
from zonerelay.model.clock import Clock, ManualClock
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import BodyType, Envelope, Mailbox, Message, MessageId, Recipient
from zonerelay.model.reply import Reply
from zonerelay.routing.destinations.route import Batch, MxHost, Route
from zonerelay.routing.dns.answers import CNAME, Addresses, DnsAnswer, DnsStatus, RecordType, TlsaRecord
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.store.contract import CHUNK_SIZE, ClaimLostError, StoreError
from zonerelay.telemetry.events.events import Events

ZONE = ZoneSettings(allow_private_addresses=True, chunking=True)
TEXT = b"Subject: test\r\n\r\nHello.\r\n"


def make_message(
    body: bytes = TEXT,
    *,
    sender: str = "sender@example.org",
    recipients: Sequence[str] = ("anybody@example.com",),
    eight_bit: bool = False,
    declared: BodyType = BodyType.SEVEN_BIT,
    smtputf8: bool = False,
    require_tls: bool = False,
    size: int | None = None,
) -> Message:
    envelope = Envelope(
        id=MessageId("00000000000000aa"),
        sender=Mailbox(sender),
        recipients=tuple(Recipient(address=Mailbox(each)) for each in recipients),
        created=0.0,
        body=declared,
        smtputf8=smtputf8,
        require_tls=require_tls,
    )
    size = len(body) if size is None else size
    return Message(envelope=envelope, size=size, chunks=1 + size // CHUNK_SIZE, eight_bit=eight_bit)


def make_batch(message: Message, route: Route, zone: ZoneSettings = ZONE) -> Batch:
    deliveries = tuple(
        Delivery(queue=queue_of(zone.name), message_id=message.id, recipient=each.address, created=0.0)
        for each in message.envelope.recipients
    )
    return Batch(zone, route, message, deliveries)


def route_to(
    *ports: int, host: str = "127.0.0.1", preferences: Sequence[int] = (), literal: bool = True
) -> Route:
    """One host per port; without `preferences` each is less preferred than the one before."""
    ranks = preferences or range(len(ports))
    hosts = tuple(
        MxHost(host, port, preference=rank, literal=literal) for port, rank in zip(ports, ranks, strict=True)
    )
    return Route("default", "example.com", hosts, expires=1e12)


@dataclass
class Bodies:
    """`read_body` for one message; `fails_after` pieces the store breaks."""

    body: bytes = TEXT
    piece_size: int = CHUNK_SIZE
    fails_after: int | None = None
    reads: int = 0
    open_now: int = 0
    lost: bool = False

    def check_claim(self, message_id: MessageId) -> None:
        if self.lost:
            raise ClaimLostError(f"message {message_id}: the lease on it was lost")

    async def read(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
        self.reads += 1
        self.open_now += 1
        try:
            for number, at in enumerate(range(0, len(self.body), self.piece_size)):
                if number == self.fails_after:
                    raise StoreError("the disk is gone")
                yield self.body[at : at + self.piece_size]
        finally:
            self.open_now -= 1


@dataclass
class Names:
    """Answers for addresses; a name that is not listed is a DNS failure.

    `secure` names are vouched for by DNSSEC. `records` are answers about TLSA;
    of what is not listed there are none, securely.
    """

    known: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    secure: Collection[str] = ()
    canonical: Mapping[str, str] = field(default_factory=dict)
    records: Mapping[str, DnsAnswer[TlsaRecord]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def addresses(self, name: str, *, ipv6: bool) -> Addresses:
        self.asked.append(name)
        ips = self.known.get(name, ())
        if ips:
            return Addresses(ips, secure=name in self.secure, canonical=self.canonical.get(name, ""))
        return Addresses((), Reply(451, "4.3", f"no answer for {name}"))

    async def lookup(self, name: str, kind: RecordType[Any]) -> DnsAnswer[Any]:
        if kind is CNAME:
            self.asked.append(f"alias {name}")
            return DnsAnswer(DnsStatus.OK, (self.canonical[name],), 1e12, f"alias {name}" in self.secure)
        self.asked.append(name)
        return self.records.get(name, DnsAnswer(DnsStatus.NXDOMAIN, (), 1e12, secure=True))


def make_renderer(bodies: Bodies, *, clock: Clock, log: EventLog | None = None) -> Renderer:
    return Renderer(read_body=bodies.read, events=events_into(log or EventLog(), clock), clock=clock)


def make_logins(
    clock: Clock,
    *credentials: CredentialSettings,
    events: Events | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path = Path("/nowhere"),
    zone: ZoneSettings = ZONE,
    post: Post = post,
) -> Logins:
    events = events or events_into(EventLog(), clock)
    logins = Logins(clock, events, environment or {}, directory=directory, post=post)
    logins.configure(credentials, senders_of(credentials), [zone])
    return logins


def make_courier(
    bodies: Bodies | None = None,
    *,
    settings: DeliverySettings | None = None,
    names: Names | None = None,
    clock: Clock | None = None,
    sources: SourceSelection | None = None,
    observe_tls: "TlsResults | None" = None,
    renderer: Renderer | None = None,
    logins: Logins | None = None,
) -> SmtpCourier:
    clock, bodies = clock or ManualClock(), bodies or Bodies()
    events = events_into(EventLog(), clock)
    events.outbound_tls = observe_tls or TlsResults()  # type: ignore[method-assign]
    return SmtpCourier(
        settings or DeliverySettings(quit_timeout=0.5),
        hostname="relay.example.org",
        resolver=cast(Resolver, names or Names()),
        sources=sources or make_sources(clock),
        logins=logins or make_logins(clock),
        read_body=bodies.read,
        check_claim=bodies.check_claim,
        renderer=renderer or make_renderer(bodies, clock=clock),
        events=events,
        clock=clock,
        random=random.Random(1),
    )


@dataclass
class TlsResults:
    """Level and result of each connection, in order; `news` are the fallbacks that were explained."""

    seen: list[tuple[str, str]] = field(default_factory=list)
    news: list[str] = field(default_factory=list)

    def __call__(self, zone: str, level: str, result: str, *, host: str = "", why: str = "") -> None:
        self.seen.append((level, result))
        if why:
            self.news.append(f"{host}: {why}")


@dataclass
class Reported:
    """What the sources have told, in order."""

    events: list[tuple[str, ...]] = field(default_factory=list)

    def source_refused(self, zone: str, source: str, destination: str, reply: Reply, until: float) -> None:
        self.events.append(("refused", source))

    def source_refused_again(self, source: str) -> None:
        self.events.append(("refused again", source))

    def source_absent(self, source: str, address: str, problem: str) -> None:
        self.events.append(("absent", source, address))

    def source_back(self, source: str, address: str) -> None:
        self.events.append(("back", source, address))


def make_sources(
    clock: Clock, sources: Sequence[SourceSettings] = (), reported: Reported | None = None
) -> SourceSelection:
    selection = SourceSelection(clock, cast(Events, reported or Reported()))
    selection.configure(sources)
    return selection
