"""Plans the mail of one zone: its mail in memory, its next claim, and its next batch. Pure and synchronous.

Nothing here awaits, reads a clock or accesses a store. `zone.py` reports what happened and asks for the next
step. The state is consistent between two calls, so there is nothing to lock.

STRATEGIES (policy → the harm it prevents; compare the list at the head of Postfix's qmgr.c)

- Round robin (`selection.py`): destinations with work and a free connection are visited in turn. A visit is a
  few batches on one connection, limited in number and time → a destination with much mail cannot keep the
  connections from the others, and not every message pays for its own connection.
- Unproven destinations: destinations that have not answered yet, or answer slowly, may use only a part of the
  zone's connections → silent hosts and tarpits cannot hold all of them.
- Rates (`destinations.py`): a destination waits aside for the next turn of its rate → a rate-limited
  destination holds no connection while it waits.
- Oldest message first within a destination → no mail waits for ever behind newer mail.
- One domain in a batch if domains are not mixed (`ZoneSettings.mixes_domains`), or as many as the hosts
  announce → no recipient is deferred because of the others, and each outcome is stored when it is known.
- Window: at most `WINDOW` deliveries of a zone and priority wait in memory → memory does not grow with the
  queue, and no queue keeps more urgent mail out of it.
- Precedence (`backlog.py`): urgent mail comes first in claims, in the round robin and in each line → a
  newsletter does not delay a password reset, and a flood of password resets does not block the newsletter.
- New mail (`window.py`): in a zone routed by MX, if much mail waits it becomes backlog, and new mail
  alternates with it → a hundred thousand fresh messages do not delay one message for an idle host.
- Throttle (`selection.py`): while new mail keeps the CPU busy, other mail starts at a limited rate → a
  backlog does not slow down new mail when the CPU is the bottleneck.
- Shares (`window.py`): in a zone routed by MX a line may hold only its share of the window → a slow
  destination cannot fill the window and hide the mail of the others.
- New mail comes from the write that stores it while nothing older waits in the store and its destination has
  not its share → most mail is never claimed, and none overtakes older mail.
- Batched claims: a zone with one route and `LOW_MARK` waiting deliveries claims no more until fewer wait →
  one claim returns hundreds of deliveries.
- Suspension (`Suspension`): nothing waits for a suspended destination. What is claimed for it is deferred
  without a connection, and one probe at a time ends the suspension → dead hosts use neither connections nor
  window.
- Recovery: mail for a suspended destination is due at the latest with the next probe, and all of it can be
  claimed when the destination answers → it leaves as fast as new mail from the first second on.
- Probes: once the window is half full, only a few more destinations begin to wait for a probe → thousands of
  domains that failed together do not fill the window with mail that cannot be sent.
- Rest: if a suspended destination has much mail, nothing more is claimed for it before the next probe, except
  old mail at a steady rate → hundreds of thousands of deliveries for a dead host do not delay other mail.
- Gate (`orders/`): mail that an operator has suspended goes back to the store, and claims skip it → suspended
  mail uses neither memory nor time, however much of it there is.
- Routes expire with their TTL, then the domain is looked up again → mail follows a changed MX.
- Withdrawn deliveries are not planned until they are given back → an attempt never interferes with an
  operator's change.

TABLE. The plan maps domains to lines and keys to destinations. It creates destinations and forgets them; the
hosts of a provider are one destination for thousands of domains. Idle domains and destinations are forgotten
when there are many, so memory does not grow with every domain ever used. Destinations are checked a few at a
time, the least recently checked first, when a new one is created. Domains are checked together, which takes
less than a microsecond for each, after so many new ones that it is rare. Promise: a destination is not
forgotten while mail waits for it, an attempt is active, a domain of it was passed over, or it is suspended.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.limits.worker import ZoneAllowance
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import MessageId, Priority, domain_of
from zonerelay.model.reply import Outcome
from zonerelay.queue.destination import destinations
from zonerelay.queue.destination.backlog import DestinationQueue
from zonerelay.queue.destination.destinations import Destination, Rates, Transition, UnroutedMail, Work
from zonerelay.queue.orders.order import OPEN, Order, OrderGate
from zonerelay.queue.selection import MOST_IN_VISIT, VISIT_SECONDS, BacklogThrottle, RoundRobin
from zonerelay.queue.zone.window import ClaimRequest, PriorityWindow, QueueWindow
from zonerelay.routing.destinations.route import DestinationKey, Route

WINDOW = 4000
MANY_PUT_OFF = 50
"""The number of deliveries put off together for a suspended destination from which claims pass over it,
because there may be many more.
"""
MEASURED = 0.5
UNASKED = 1.0
"""Seconds. The rate of new mail is measured over `MEASURED`, and is unknown again after `UNASKED` without
a question: a time without mail says nothing about how fast mail could leave.
"""
_UNKNOWN: tuple[float, ...] = (math.inf,)
MAX_DOMAINS = 10_000
MAX_DESTINATIONS = 1000
"""Idle domains and destinations are forgotten when there are more than this."""
LOOKED_AT = 8
"""Destinations checked for each new one. If one in eight is idle, their number stays constant."""


class ZonePlan:
    """Plans the deliveries of one zone: which to claim, in which batches to send them, and when. Deliveries
    enter by `add` and leave when they are taken, started or withdrawn. Each is in one place at a time.
    `window` determines what to claim, and `round_robin` when the next batch may start.
    """

    def __init__(
        self,
        zone: ZoneSettings,
        retry: RetrySettings,
        rates: Rates | None = None,
        *,
        window: int = WINDOW,
        shared: ZoneAllowance | None = None,
        throttle: BacklogThrottle | None = None,
        gate: OrderGate = OPEN,
    ) -> None:
        self.zone = zone
        self._gate = gate
        self._rates = Rates() if rates is None else rates
        self._rates.configure(zone.max_rate)
        self._throttle = BacklogThrottle() if throttle is None else throttle
        self.round_robin = RoundRobin(zone, self._rates, shared, self._throttle)
        self._by_domain = not zone.next_hop
        self.window = QueueWindow(window, by_domain=self._by_domain)
        # Each may hold a sixty-fourth of a window that is half full.
        self._most_probed = max(1, window // 256)
        self._probed: set[Destination] = set()
        """Destinations that began to wait for a probe since the window was half full. Some had it since."""
        self._retry = retry
        self._lines: dict[str, DestinationQueue] = {}
        """The lines by domain (`""` in a zone with one next hop)."""
        # Not a dict, where finding the first key takes longer the more keys were removed from the front.
        self._destinations: OrderedDict[DestinationKey, Destination] = OrderedDict()
        self._max_domains = MAX_DOMAINS
        self._works: set[Work] = set()
        self.look_ups = destinations.RouteLookups()
        """The lookups of routes. Each domain that is taken from it must end in `found` or `unroutable`."""
        self._new_started = 0
        """New deliveries that have started since `_measured_since`."""
        self._measured_since = self._asked_at = 0.0
        self._new_rates = _UNKNOWN
        self._parked: dict[Destination, list[Delivery]] = {}
        self._returned: list[Delivery] = []
        self._to_hold: list[tuple[Delivery, Order]] = []
        self._withdrawn: set[DeliveryKey] = set()
        self._is_asked = False
        """Whether a claim is waiting for its reply."""
        self._given_back: set[DeliveryKey] = set()
        """Deliveries given back since the claim was made. The reply may contain one as it was before or after
        that.
        """

    # Events

    def take_new(self, deliveries: Sequence[Delivery], now: float) -> int:
        """Add deliveries that were just stored, as far as there is room in memory and for their destinations.
        Return how many were added, from the first on.
        """
        first = deliveries[0]
        priority = first.priority
        window = self.window.of(priority)
        room = min(len(deliveries), self.window.new_places(window, first))
        count = 0
        while count < room and self._is_taken(deliveries[count], window):
            count += 1
        if count:
            self._enter(deliveries[:count], now, priority)
            self._tidy()
        return count

    def _is_taken(self, delivery: Delivery, window: PriorityWindow) -> bool:
        if delivery.key in self._withdrawn:
            return False
        line = self._lines.get(delivery.domain) if self._by_domain else None
        return line is None or window.takes(line.backlog(window.priority), delivery.domain)

    def add(self, claimed: Sequence[Delivery], now: float, priority: Priority = Priority.NORMAL) -> None:
        """Add newly claimed deliveries of one priority."""
        if self._withdrawn:
            claimed = [delivery for delivery in claimed if delivery.key not in self._withdrawn]
        if self._given_back:
            self._returned += [delivery for delivery in claimed if delivery.key in self._given_back]
            claimed = [delivery for delivery in claimed if delivery.key not in self._given_back]
        self._enter(claimed, now, priority)
        self._tidy()

    def claimed(self, plan: ClaimRequest, count: int) -> None:
        """Record that a claim returned `count` deliveries, which were already added."""
        self._is_asked = False
        self._given_back.clear()
        self.window.claimed(plan, count)
        if plan.domain is None or count >= plan.limit:
            return
        line = self._lines[plan.domain]
        self.window.of(plan.priority).exhausted(line.backlog(plan.priority), plan.domain)
        if isinstance(line, UnroutedMail) and line.share is None and not line.passed_over:
            del self._lines[plan.domain]

    def found(self, domain: str, route: Route, now: float) -> None:
        """Queue the mail of a domain after a lookup has found its route."""
        self.look_ups.ended(domain, found=True)
        line = self._lines[domain]
        destination = self._destination(route, now)
        self._lines[domain] = destination
        destination.domains[domain] = None
        for priority in line.backlogs:
            self._move(line, destination, domain, priority, now)
        self._placed(destination, now)
        for priority in line.backlogs:
            self.window.of(priority).shortened(destination.backlog(priority))

    def unroutable(self, domain: str) -> list[Delivery]:
        """Remove a domain whose lookup has failed, and return the deliveries that were waiting for it."""
        self.look_ups.ended(domain, found=False)
        line = self._lines.pop(domain)
        deliveries = self.window.drain(line)
        self.window.forget(line)
        for priority, backlog in line.backlogs.items():
            if backlog.passed_over:
                self._replace(domain, priority)
        return deliveries

    def finished(self, work: Work, outcomes: Sequence[Outcome], now: float) -> Transition:
        """Record that an attempt has ended. If there are no outcomes, it contacted no peer and nothing was
        learned about the hosts.
        """
        destination = work.destination
        work.yields = not outcomes or self.round_robin.is_awaited(destination)
        self.round_robin.end(destination, work.ticket, now)
        self._works.discard(work)
        was = destination.standing
        if outcomes:
            destination.is_slow = work.seconds > destinations.LONG
        transition = destination.suspension.learn(
            outcomes, epoch=work.epoch, others=destination.active, now=now
        )
        if was is not destinations.Standing.QUICK and destination.standing is destinations.Standing.QUICK:
            self.round_robin.quick(destination)
        if transition is not Transition.NONE:
            self._probes_next_hop(destination)
        if transition is Transition.SUSPENDED:
            self._park(destination)
        else:
            self.round_robin.offer(destination, now)
        return transition

    # Decisions

    def next_work(self, now: float, tick: float = 0.0) -> Work | None:
        """Return the next batch if the connection and rate limits allow one now, or None. The batch must end
        in `finished`. `tick` is a reading of a monotonic clock.
        """
        while (destination := self.round_robin.next(now, tick)) is not None:
            if destination.is_usable(now):
                return self._start(destination, now, tick)
            self._reroute(destination, now)
        return None

    def following(self, work: Work, now: float, tick: float = 0.0) -> Work | None:
        """Return the batch that follows on the same connection, or None. Call it after `finished`."""
        if not work.more or work.yields:
            return None
        destination = work.destination
        used = work.used + work.seconds if work.number > 1 else 0.0
        if used >= VISIT_SECONDS or not destination.is_usable(now):
            return None
        if not self.round_robin.goes_on(destination, now, tick):
            return None
        return self._start(destination, now, tick, number=work.number + 1, used=used)

    @property
    def has_requests(self) -> bool:
        """Whether the zone has to look up routes, or to defer, hold or release deliveries."""
        return bool(self.look_ups.is_wanted or self._parked or self._returned or self._to_hold)

    def new_mail_rate(self, now: float) -> float:
        """Return how many new deliveries per second were started recently, or infinity if that is not known.

        It is the higher of the last two measurements, because the machine may have been busy during one.
        """
        if not 0 <= now - self._asked_at <= UNASKED:
            self._new_rates = _UNKNOWN
            self._measured_since, self._new_started = now, 0
        self._asked_at = now
        seconds = now - self._measured_since
        if seconds >= MEASURED:
            before, rate = self._new_rates[-1], self._new_started / seconds
            self._new_rates = (rate,) if before == math.inf else (before, rate)
            self._measured_since, self._new_started = now, 0
        return max(self._new_rates)

    def plan_claim(self, now: float) -> ClaimRequest | None:
        """Return the next claim, or None. The caller passes the claimed deliveries to `add` and their number
        to `claimed`.
        """
        plan = self.window.next(now)
        self._is_asked = plan is not None
        self._given_back.clear()
        return plan

    def take_parked(self) -> list[tuple[Destination, list[Delivery]]]:
        """Remove and return the deliveries to defer without an attempt, by suspended destination. No more is
        claimed for these destinations before `rested`.
        """
        parked = list(self._parked.items())
        self._parked.clear()
        return parked

    def due_time(self, now: float) -> float:
        """Return the time up to which due mail may be claimed. While the only next hop is suspended, mail
        that was deferred for that reason is excluded.
        """
        line = None if self._by_domain else self._lines.get("")
        if isinstance(line, Destination) and line.suspension.is_suspended(now):
            return min(line.suspension.since, now)
        return now

    def rested(self, destination: Destination) -> None:
        """Allow claims of a destination's mail again, which were excluded because of its suspension."""
        for priority, backlog in destination.backlogs.items():
            self.window.of(priority).rested(backlog)

    def take_returned(self) -> list[Delivery]:
        """Remove and return the deliveries to release. Their destination has used up its share, or an
        operator's change returned them during a claim.
        """
        returned, self._returned = self._returned, []
        return returned

    def take_to_hold(self) -> list[tuple[Delivery, Order]]:
        """Remove and return the deliveries to hold, each with the suspension or hold rule that requires
        it.
        """
        to_hold, self._to_hold = self._to_hold, []
        return to_hold

    # Operators

    def active_keys(self) -> set[DeliveryKey]:
        return {delivery.key for work in self._works for delivery in work.deliveries}

    def withdraw(self, keys: Collection[DeliveryKey]) -> None:
        """Remove these deliveries from the plan, and accept them again only after `give_back`. None of them
        may be active.
        """
        self._withdrawn.update(keys)
        self._returned = self._without_withdrawn(self._returned)
        self._to_hold = [each for each in self._to_hold if each[0].key not in self._withdrawn]
        self._parked = {line: self._without_withdrawn(some) for line, some in self._parked.items()}
        for key in keys:
            line = self._lines.get(domain_of(key.recipient) if self._by_domain else "")
            priority = key.queue.priority
            if line is not None and (delivery := line.remove(key, priority)) is not None:
                window = self.window.of(priority)
                window.left((delivery,))
                window.shortened(line.backlog(priority))
                if isinstance(line, Destination):
                    self.round_robin.emptied(line)

    def _without_withdrawn(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        return [delivery for delivery in deliveries if delivery.key not in self._withdrawn]

    def give_back(self, keys: Collection[DeliveryKey]) -> None:
        self._withdrawn.difference_update(keys)
        if self._is_asked:
            self._given_back.update(keys)

    def resume(self, key: DestinationKey | None) -> list[Destination]:
        """Lift the suspension of one destination, or of all if `key` is None. Return those that were
        suspended or failing.
        """
        resumed, known = [], self._destinations
        for destination in list(known.values()) if key is None else [known.get(key)]:
            if destination is not None and destination.suspension.resume() is Transition.RESUMED:
                self._probes_next_hop(destination)
                resumed.append(destination)
        return resumed

    def destination_of(self, domain: str) -> Destination | None:
        """Return the destination of a domain, or None if a lookup would be needed."""
        line = self._lines.get(domain if self._by_domain else "")
        return line if isinstance(line, Destination) else None

    def shown_destinations(self, now: float) -> Iterator[Destination]:
        """Yield the destinations that have mail or are suspended. They may change during the iteration."""
        for each in list(self._destinations.values()):
            if each.waiting or each.active or not each.suspension.is_forgettable(now):
                yield each

    def drain(self) -> Iterator[list[Delivery]]:
        """Yield all queued deliveries, one destination per step, for a shutdown."""
        self.round_robin.clear()
        self.look_ups.clear()
        for line in dict.fromkeys(self._lines.values()):
            if line.waiting:
                yield self.window.drain(line)
        # Last, because an attempt that ends during the iteration may have put off mail.
        yield [*self.take_returned(), *(delivery for delivery, _ in self.take_to_hold())]
        for _, deliveries in self.take_parked():
            yield deliveries

    def clear(self) -> Iterator[None]:
        """Remove all destinations, one per step. None of them may be active. Destinations and hosts refer to
        each other, so this saves the garbage collector from finding all of them at once.
        """
        self._lines.clear()
        while self._destinations:
            _, destination = self._destinations.popitem()
            self.round_robin.leave(destination)
            yield

    # The table

    def _destination(self, route: Route, now: float) -> Destination:
        """Return the destination of a route, created if necessary, and make it use this route."""
        key = route.destination
        destination = self._destinations.get(key)
        if destination is not None:
            destination.renew(route, self.zone, self._rates, now)
            return destination
        if len(self._destinations) >= MAX_DESTINATIONS:
            self._forget_some(now)
        site = self.round_robin.site(route.site)
        destination = Destination(route, site, self._retry, apart=not self.zone.mixes_domains)
        destination.renew(route, self.zone, self._rates, now)
        self._destinations[key] = destination
        self.round_robin.enter(destination)
        return destination

    def _sort_lines(self, priority: Priority, since: MessageId, *, is_earlier: bool = False) -> int:
        """Move queued mail older than message `since` to the backlog, and return the number of remaining new
        deliveries. `is_earlier` is true if `since` is older than at the last call.
        """
        backlogs = (line.backlogs.get(priority) for line in dict.fromkeys(self._lines.values()))
        return sum(
            backlog.sort(since, is_earlier=is_earlier)
            for backlog in backlogs
            if backlog is not None and (backlog.has_fresh or is_earlier)
        )

    def _tidy(self) -> None:
        """Remove unused domains if there are very many; their routes are looked up again when needed. The
        only domain of a failing destination is kept, so that new mail for it is deferred without DNS queries.
        """
        if len(self._lines) > self._max_domains:
            for destination in self._destinations.values():
                self._tidy_one(destination)
            self._max_domains = max(MAX_DOMAINS, 2 * len(self._lines))

    def _tidy_one(self, destination: Destination) -> None:
        if len(destination.domains) == 1 and destination.suspension.is_failing:
            return
        if destination.waiting:
            keep = {delivery.domain for delivery in destination} | destination.passed_over
        else:
            keep = destination.passed_over
        for domain in destination.domains.keys() - keep:
            del self._lines[domain], destination.domains[domain]

    def _forget_some(self, now: float) -> None:
        for _ in range(min(LOOKED_AT, len(self._destinations))):
            key, destination = next(iter(self._destinations.items()))
            if destination.is_forgettable(now):
                del self._destinations[key]
                self.round_robin.leave(destination)
                for domain in destination.domains:
                    del self._lines[domain]
            else:
                self._destinations.move_to_end(key)

    # Lines

    def _enter(self, deliveries: Sequence[Delivery], now: float, priority: Priority) -> None:
        touched: dict[DestinationQueue, None] = {}
        window = self.window.of(priority)
        since = window.since
        for delivery in deliveries:
            domain = delivery.domain if self._by_domain else ""
            line = self._lines.get(domain)
            if line is None:
                line = self._lines[domain] = UnroutedMail(domain)
            line.add(delivery, priority, since)
            touched[line] = None
        window.entered(deliveries)
        for line in touched:
            self._placed(line, now)
            if self._by_domain:
                window.grew(line.backlog(priority))
        if self._by_domain and window.is_to_be_drawn(now):
            self._draw_line(priority, now)

    def _draw_line(self, priority: Priority, now: float) -> None:
        """Turn the queued mail of a priority into backlog, so that only mail that arrives from now on
        is new.
        """
        window = self.window.of(priority)
        is_earlier = window.is_drawn_earlier(now)
        window.new_waiting = self._sort_lines(priority, window.draw(now), is_earlier=is_earlier)
        self.look_ups.sort()
        self.round_robin.sort()

    def _placed(self, line: DestinationQueue, now: float) -> None:
        """Queue a destination to which mail was added, or defer or release its mail if it is suspended."""
        if self._gate.orders and (order := self._order_about(line)) is not None:
            self._keep(line, order)
        elif isinstance(line, Destination):
            self._probes_next_hop(line)
            suspension = line.suspension
            is_suspended = suspension.is_suspended(now)
            if not is_suspended and not self._may_wait_for_probe(line):
                suspension.wait(now)
                is_suspended = True
            if is_suspended:
                self._park(line)
                return
            suspension.end()
            self.round_robin.offer(line, now, new=True)
        elif isinstance(line, UnroutedMail):
            self.look_ups.want(line)

    def _may_wait_for_probe(self, destination: Destination) -> bool:
        """Return whether a failing destination may wait for a connection for its probe. Its suspension, if
        any, is over, and mail waits for it. When thousands of domains have died together, the suspensions of
        many end at a time when they have few connections. Once the window is half full, only so many begin to
        wait as fill a quarter of it. The others are suspended again, which costs no connection.
        """
        if not self.window.is_half_full or destination.is_queued or destination.active:
            return True
        if not destination.suspension.is_failing:
            return True
        if len(self._probed) >= self._most_probed:
            self._probed = {each for each in self._probed if each.is_queued and each.suspension.is_failing}
            if len(self._probed) >= self._most_probed:
                return False
        self._probed.add(destination)
        return True

    def _order_about(self, line: DestinationQueue) -> Order | None:
        if isinstance(line, Destination):
            return self._gate.keeps(line.route.name, line.label)
        return next(filter(None, map(self._gate.keeps_domain, line.domains)), None)

    def _keep(self, line: DestinationQueue, order: Order) -> None:
        """Release the mail of a destination that an operator has suspended, and claim no more of it. If
        claims already skip too many domains, the mail is held instead.
        """
        deliveries = self.window.drain(line)
        if isinstance(line, Destination):
            self.round_robin.emptied(line)
        if self._by_domain:
            for delivery in deliveries:
                backlog, window = line.backlog(delivery.priority), self.window.of(delivery.priority)
                if delivery.domain not in backlog.passed_over:
                    if not window.may_pass_over():
                        self._to_hold.append((delivery, order))
                        continue
                    window.pass_over(backlog, delivery.domain)
                self._returned.append(delivery)
        else:
            self._returned += deliveries
        for priority, backlog in line.backlogs.items():
            self.window.of(priority).rest(backlog)

    def _probes_next_hop(self, destination: Destination) -> None:
        self.window.is_probing = not self._by_domain and destination.suspension.is_failing

    def _move(
        self, line: DestinationQueue, destination: Destination, domain: str, priority: Priority, now: float
    ) -> None:
        """Move deliveries from a domain to its destination after the lookup. Deliveries beyond the
        destination's share return to the store.
        """
        window = self.window.of(priority)
        old, backlog = line.backlog(priority), destination.backlog(priority)
        backlog.passed_over.update(old.passed_over)
        backlog.is_new = backlog.is_new or old.is_new
        window.forget(old)
        deliveries = line.drain(priority)
        if self._by_domain and not destination.suspension.is_suspended(now) and window.may_pass_over():
            room = max(0, window.share(backlog) - backlog.waiting)
            if len(deliveries) > room:
                window.pass_over(backlog, domain)
                self._returned += deliveries[room:]
                window.left(deliveries[room:])
                del deliveries[room:]
        for delivery in deliveries:
            destination.add(delivery, priority, window.since)
        if self._by_domain:
            window.grew(backlog)

    def _park(self, destination: Destination) -> None:
        deliveries = self.window.drain(destination)
        self.round_robin.emptied(destination)
        if self._by_domain and len(deliveries) >= MANY_PUT_OFF:
            for priority, domain in {(delivery.priority, delivery.domain) for delivery in deliveries}:
                window = self.window.of(priority)
                if window.may_pass_over():
                    window.pass_over(destination.backlog(priority), domain)
        if any(self.window.of(each.priority).is_fresh(each) for each in deliveries):
            self._throttle.started(is_fresh=True)
        if deliveries or destination.passed_over:
            self._parked.setdefault(destination, []).extend(deliveries)
            for priority, backlog in destination.backlogs.items():
                self.window.of(priority).rest(backlog)

    def _reroute(self, destination: Destination, now: float) -> None:
        """Look up the route of a destination's domains again, because the known one has expired."""
        self.window.is_probing = False
        for domain in destination.domains:
            del self._lines[domain]
        destination.domains.clear()
        self.window.forget(destination)
        for priority, backlog in destination.backlogs.items():
            for domain in backlog.passed_over:
                self._replace(domain, priority)
            backlog.passed_over.clear()
            deliveries = destination.drain(priority)
            self.window.of(priority).left(deliveries)
            self._enter(deliveries, now, priority)
        self.round_robin.emptied(destination)

    def _replace(self, domain: str, priority: Priority) -> None:
        """Create a queue for a domain that has none, so that its skipped deliveries are claimed later."""
        line = self._lines.get(domain)
        if line is None:
            line = self._lines[domain] = UnroutedMail(domain)
        backlog = line.backlog(priority)
        backlog.passed_over[domain] = None
        self.window.of(priority).shortened(backlog)

    def _start(
        self, destination: Destination, now: float, tick: float, *, number: int = 1, used: float = 0.0
    ) -> Work:
        priority, deliveries = destination.take(
            destination.limits.max_recipients_per_transaction, destination.most_domains
        )
        window = self.window.of(priority)
        window.left(deliveries)
        is_fresh = window.is_fresh(deliveries[0])
        self._throttle.started(is_fresh=is_fresh)
        if is_fresh:
            self._new_started += len(deliveries)
        ticket = self.round_robin.start(destination, tick)
        work = Work(
            destination,
            destination.route,
            deliveries,
            destination.suspension.epoch,
            ticket,
            number=number,
            used=used,
            more=self._by_domain and number < MOST_IN_VISIT and destination.waiting > 0,
        )
        self._works.add(work)
        self.round_robin.offer(destination, now)
        if self._by_domain:
            window.shortened(destination.backlog(priority))
        return work
