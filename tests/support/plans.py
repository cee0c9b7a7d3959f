"""The pure plan of one zone, and what its driver knows: routes, what is active, clocks that a test moves."""

from collections.abc import Iterator
from typing import Any

from msgspec import structs

from tests.support.queueing import DELIVERED, delivery, prove
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import Priority
from zonerelay.model.reply import Outcome
from zonerelay.queue.destination.destinations import Rates, Work
from zonerelay.queue.zone.plan import WINDOW, ZonePlan
from zonerelay.routing.destinations.route import DestinationLimits, MxHost, Route, SiteKey

NOW = 1_700_000_000.0
RETRY = RetrySettings(suspend_min=30.0, suspend_max=600.0)


class PlanBed:
    """Each domain has a host of its own until `domain` says something else. `now` is the wall clock, `tick`
    the monotonic one of rates. With `proven` all destinations have answered before.
    """

    def __init__(
        self,
        *,
        proven: bool = False,
        rates: Rates | None = None,
        window: int = WINDOW,
        driver: dict[str, Any] | None = None,
        **zone: Any,
    ) -> None:
        self._proven = proven
        self.rates = rates or Rates()
        self.queue = ZonePlan(ZoneSettings(**zone), RETRY, self.rates, window=window, **(driver or {}))
        self.rates.changed = self._changed
        self.now, self.tick = NOW, 0.0
        self.works: list[Work] = []
        self._number = 0
        self._limits: dict[str, DestinationLimits] = {}
        self._site: dict[str, str] = {}

    def _changed(self, site: SiteKey, earlier: bool) -> None:
        self.queue.round_robin.changed(site, self.now, earlier=earlier)

    def domain(self, name: str, site: str = "", limits: DestinationLimits | None = None) -> None:
        self._site[name] = site or name
        if limits is not None:
            self._limits[name] = limits

    def message_id(self) -> str:
        self._number += 1
        return f"{self._number:016x}"

    def mail(
        self,
        domain: str,
        count: int = 1,
        *,
        recipients: int = 1,
        priority: Priority = Priority.NORMAL,
        due: float = 0.0,
    ) -> list[Delivery]:
        """So many messages; `due`: the next attempt of what was deferred before."""
        one = delivery(queue=queue_of("default", priority), next_attempt=due)
        return [
            structs.replace(one, message_id=message_id, recipient=f"u{n}@{domain}")
            for message_id in [self.message_id() for _ in range(count)]
            for n in range(recipients)
        ]

    def add(self, domain: str, count: int = 1, *, priority: Priority = Priority.NORMAL, **more: Any) -> None:
        self.queue.add(self.mail(domain, count, priority=priority, **more), self.now, priority)
        self.look_up()

    def look_up(self) -> list[str]:
        """The domains that were looked up, in this order."""
        found: list[str] = []
        while domains := self.queue.look_ups.take():
            found += domains
            for domain in domains:
                self.queue.found(domain, self.route(domain), self.now)
        if self._proven:
            prove(self.queue)
        return found

    def route(self, domain: str) -> Route:
        hosts = (MxHost(f"mx.{self._site.get(domain, domain)}", 25),)
        limits = self._limits.get(domain)
        return Route("default", domain, hosts, 1e12, limits=limits, terms=domain if limits else "")

    def start(self) -> list[str]:
        """The domains of what starts now."""
        before = len(self.works)
        while (work := self.queue.next_work(self.now, self.tick)) is not None:
            self.works.append(work)
        return [work.deliveries[0].domain for work in self.works[before:]]

    def work(self, domain: str) -> Work:
        return next(each for each in self.works if each.deliveries[0].domain == domain)

    def finish(
        self, domain: str, outcome: Outcome = DELIVERED, *, seconds: float = 0.0, turn: bool = True
    ) -> None:
        work = self.work(domain)
        self.works.remove(work)
        work.seconds = seconds
        if turn and work.ticket is not None and not work.ticket.taken:
            work.ticket.take(self.tick)
        self.queue.finished(work, [outcome] * len(work.deliveries), self.now)

    def sent(self) -> Iterator[Delivery]:
        """The first delivery of each batch with one connection, until nothing may start any more."""
        while (work := self.queue.next_work(self.now)) is not None:
            self.queue.finished(work, [DELIVERED] * len(work.deliveries), self.now)
            yield work.deliveries[0]
