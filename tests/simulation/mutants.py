"""Faults in the relay, one for each promise, that the simulation has to find.

A mutant replaces one function of the relay by one that breaks a rule of DESIGN 2, or a promise of the pages
about limits and several machines. A mutant that no seed finds is a hole in the assertions.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import msgspec

from zonerelay.model.outcome import Outcome, Verdict
from zonerelay.store.contract import ClaimLostError, Submit


@dataclass(frozen=True)
class Mutant:
    """`make` takes the function at `place` (`module:attribute`) and returns the one that is wrong."""

    breaks: str
    place: str
    make: Callable[[Any], Any]
    seed: int = 0
    """One that finds it."""


MUTANTS: dict[str, Mutant] = {}


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Run the body with a mutant in the relay; without a name, with the relay as it is."""
    if not name:
        yield
        return
    mutant = MUTANTS[name]
    module, _, path = mutant.place.partition(":")
    owner: Any = importlib.import_module(f"zonerelay.{module}")
    *parts, attribute = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    with patch.object(owner, attribute, mutant.make(getattr(owner, attribute))):
        yield


def _mutant(breaks: str, place: str, seed: int = 0) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        MUTANTS[make.__name__.replace("_", "-")] = Mutant(breaks, place, make, seed)
        return make

    return register


# DESIGN 2.1: no 250 before the message is durable.


@_mutant("2.1: every batch is synced", "store.leveldb.engine:Database.batch", 1)
def sync_left_out(real: Any) -> Any:
    def batch(self: Any, batches: Any) -> Any:
        made = real(self, batches)
        made.sync = False
        return made

    return batch


@_mutant("2.1: 250 after the write", "store.leveldb.store:LevelDbStore.submit_message", 11)
def answer_before_the_write(real: Any) -> Any:
    def submit(self: Any, given: Any) -> Any:
        real(self, given)
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    return submit


@_mutant("2.1: a failed write is no 250", "store.common.write.group_commit:_refuse", 73)
def failed_write_answered_with_250(real: Any) -> Any:
    return lambda done, reason: done.set_result(None)


MUTANTS["chunk-cut-short"] = Mutant(
    "2.1: a chunk that is not the last ends no message",
    "inbound.session.commands:parse_bdat",
    lambda real: lambda argument: (real(argument)[0], True),
    seed=1,
)


@_mutant("2.1: message ids are never used again", "store.leveldb.reads:QueueReads.last_message_id", 16)
def ids_forgotten(real: Any) -> Any:
    return _nothing


# DESIGN 2.2: nothing is forgotten before its outcome is stored.


@_mutant("2.2: a bounce and its report are one write", "store.leveldb.store:LevelDbStore.settle", 24)
def report_in_a_second_write(real: Any) -> Any:
    async def settle(self: Any, changes: Any, *, lazy: bool = False) -> None:
        reports = [each for each in changes if isinstance(each, Submit)]
        if not reports:
            await real(self, changes, lazy=lazy)
            return
        await real(self, [each for each in changes if not isinstance(each, Submit)])
        await asyncio.sleep(1.0)
        await real(self, reports)

    return settle


@_mutant("2.2: a bounce is reported", "queue.settle.disposition:DispositionPolicy._silence", 5)
def no_reports(real: Any) -> Any:
    return lambda self, envelope, delivery, about: "mutant"


@_mutant("2.2: a lost reply is no delivery", "smtp.client.transaction:Transaction.lost", 5)
def lost_means_delivered(real: Any) -> Any:
    def lost(self: Any, reply: Any) -> None:
        real(self, reply)
        self.outcomes = [
            replace(each, verdict=Verdict.DELIVERED) if isinstance(each, Outcome) and self._accepted else each
            for each in self.outcomes
        ]

    return lost


@_mutant("2.2: each recipient has its own outcome", "smtp.client.transaction:Transaction._not_accepted", 5)
def refusal_of_another(real: Any) -> Any:
    def not_accepted(self: Any, index: int, reply: Any) -> None:
        real(self, 0 if index == 1 and 0 not in self._accepted else index, reply)
        if index and self._accepted:
            self._accepted[-1] = index

    return not_accepted


@_mutant("2.2: an outcome that could not be written is kept", "queue.settle.outcome_log:OutcomeLog._keep")
def outcome_not_tried_again(real: Any) -> Any:
    def keep(self: Any, entries: Any) -> None:
        for entry in entries:
            self._settled(entry)

    return keep


@_mutant("2.2: the last delivery takes the message, no other", "store.leveldb.write_plan:WritePlan._close", 1)
def message_removed_too_early(real: Any) -> Any:
    return lambda self, message_id, closed: real(self, message_id, closed + 1)


@_mutant("2.2: outcomes are stored", "queue.settle.outcome_log:OutcomeLog._flush", 15)
def outcomes_late(real: Any) -> Any:
    def flush(self: Any) -> None:
        asyncio.get_running_loop().call_later(10.0, real, self)

    return flush


@_mutant("2.2: claims outlive a failed write", "store.leveldb.in_flight:InFlight.reset", 3)
def claims_forgotten(real: Any) -> Any:
    def reset(self: Any) -> None:
        real(self)
        self.claims = {}

    return reset


# DESIGN 2.3: unknown trouble is temporary.


@_mutant(
    "2.3: a connection that fails is a deferral", "delivery.batch.batch_state:BatchProgress.host_failed", 1
)
def dead_host_bounces(real: Any) -> Any:
    def host_failed(self: Any, host: str, trouble: Any, *, counts: bool = True) -> None:
        real(self, host, trouble, counts=counts)
        self.settle_open(Outcome(Verdict.BOUNCED, trouble.reply, host=host, local=True))

    return host_failed


@_mutant("2.3: 4yz is temporary", "smtp.client.transaction:Transaction._refuse", 1)
def deferral_is_final(real: Any) -> Any:
    def refuse(self: Any, indices: Any, reply: Any, scope: Any) -> None:
        self._settle(list(indices), reply, Verdict.DELIVERED, scope)

    return refuse


@_mutant("2.3: a retry comes", "queue.settle.settler:Settler.post_unattempted", 4)
def put_off_forgotten(real: Any) -> Any:
    return lambda self, deliveries, outcome, **given: None


@_mutant("2.3: deferred mail is found when it is due", "queue.zone.claims:Claims.postponed", 4)
def retry_forgotten(real: Any) -> Any:
    return lambda self, when, priority: None


MUTANTS["due-mail-not-found"] = Mutant(
    "2.3: deferred mail is found when it is due",
    "store.leveldb.claims:Claims.next_due",
    lambda real: _nothing,
    seed=1,
)


async def _nothing(*args: Any, **given: Any) -> None:
    """Stands where an answer was."""


@_mutant("2.3: a suspension ends", "queue.destination.suspension:Suspension.duration", 1)
def suspended_for_ever(real: Any) -> Any:
    return lambda self: 1e9


@_mutant("5.1: mail expires", "queue.settle.disposition:DispositionPolicy._next_attempt", 8)
def never_expires(real: Any) -> Any:
    async def next_attempt(
        self: Any, envelope: Any, delivery: Any, outcome: Any, until: Any, now: float
    ) -> float:
        found = await real(self, envelope, delivery, outcome, until, now)
        return now + 5000.0 if found is None else float(found)

    return next_attempt


# DESIGN 2.5 and bodies.


@_mutant("2.5: lines that begin with a dot are doubled", "smtp.client.stuffing:DotStuffer.feed", 1)
def no_dot_stuffing(real: Any) -> Any:
    return lambda self, data: bytes(data)


@_mutant("bodies leave as they came", "store.leveldb.reads:QueueReads.chunks", 1)
def chunks_out_of_order(real: Any) -> Any:
    async def chunks(self: Any, message_id: Any, first: int, last: int) -> Any:
        return (await real(self, message_id, first, last))[::-1]

    return chunks


@_mutant("bodies leave as they came", "store.common.body:BodyCache.get", 5)
def body_of_another(real: Any) -> Any:
    def get(self: Any, message_id: Any, count: int) -> Any:
        found = real(self, message_id, count)
        last = next(reversed(self._bodies.values()), None)
        return last if found is not None and last is not None and len(last) == count else found

    return get


@_mutant(
    "a connection with a lost reply is not used again",
    "delivery.connection.client_protocol:ClientProtocol.abort",
    16,
)
def connection_not_closed(real: Any) -> Any:
    return lambda self: None


# Orders of operators.


@_mutant("orders outlive a restart", "queue.orders.orders:OrdersFile.read", 212)
def order_lost(real: Any) -> Any:
    return lambda self: []


@_mutant("suspended mail does not leave", "queue.orders.orders:OrderTable", 145)
def order_not_obeyed(real: Any) -> Any:
    return lambda orders=(), now=0.0: real((), now)


@_mutant("resume releases", "queue.operator.operations:Operations.release_orders", 44)
def resume_releases_nothing(real: Any) -> Any:
    async def release(self: Any, orders: Any) -> int:
        return 0

    return release


# Limits.


@_mutant("limits: connections to a destination", "routing.destinations.route:DestinationLimits.of_zone", 3)
def destination_limit_ignored(real: Any) -> Any:
    return lambda zone: msgspec.structs.replace(real(zone), max_connections=9)


@_mutant("limits: the rate of a destination", "routing.destinations.route:DestinationLimits.of_zone", 7)
def rate_ignored(real: Any) -> Any:
    return lambda zone: msgspec.structs.replace(real(zone), max_rate=None)


@_mutant("limits: a batch waits for its turn", "queue.zone.attempts:BatchTurns.take", 47)
def turn_not_waited_for(real: Any) -> Any:
    async def take(self: Any) -> bool:
        self._ticket.end()
        return True

    return take


@_mutant("limits over workers: a place is given once", "limits.authority:SlotAllocator._in_use", 18)
def place_given_twice(real: Any) -> Any:
    return lambda self: 0


@_mutant("limits over workers: places of a site", "limits.authority:SlotAllocator._at_site", 7)
def site_given_twice(real: Any) -> Any:
    return lambda self, entry: iter(())


@_mutant("limits over workers: a turn is given once", "limits.authority:Calendar.add", 7)
def turn_given_twice(real: Any) -> Any:
    return lambda self, at, interval, line: None


@_mutant("limits over workers: a further turn is asked for", "limits.worker.allowance:LeasedTurns._ask")
def turn_not_asked_for(real: Any) -> Any:
    def ask(self: Any) -> None:
        if not self._watching:
            real(self)

    return ask


@_mutant("limits over workers: a new supervisor learns of turns", "limits.authority:ZoneLimits._declare", 199)
def turns_not_declared(real: Any) -> Any:
    return lambda self, ask, moments: None


@_mutant(
    "limits over workers: a dead worker's places come back", "limits.authority:LimitTable.unregister", 16
)
def places_of_the_dead_kept(real: Any) -> Any:
    return lambda self, holder: None


@_mutant(
    "limits over workers: a new supervisor learns of places", "limits.worker.keeper:LimitKeeper._back", 131
)
def places_not_declared(real: Any) -> Any:
    return lambda self: self._note_back()


@_mutant("limits over workers: who has more gives way", "limits.authority:Reclaimer.ask")
def passed_over(real: Any) -> Any:
    return lambda self, waiting, wanted, now: None


@_mutant("limits over workers: quiet after a start", "limits.authority:LimitTable._may_allocate", 219)
def no_quiet_time(real: Any) -> Any:
    return lambda self, now: True


@_mutant("limits over workers: a grant wakes who waits", "queue.selection:RoundRobin.granted", 4)
def grant_not_heard(real: Any) -> Any:
    return lambda self, now: None


@_mutant("a slot is given back with its connection", "delivery.connection.session:Slot.release", 3)
def slot_leaks(real: Any) -> Any:
    released = itertools.count()

    def release(self: Any) -> None:
        if next(released) % 5:
            real(self)

    return release


# Several machines.


@_mutant(
    "several machines: a lease ends while a node stands still", "store.keys.partition:Partition.check", 11
)
def lease_for_ever(real: Any) -> Any:
    return lambda self: None


@_mutant(
    "several machines: mail of the living is left alone", "store.objects.objects:ObjectEngine.is_over", 9
)
def living_not_seen(real: Any) -> Any:
    return lambda self, node, beat: True


@_mutant(
    "several machines: the claim is checked before the body leaves",
    "store.nodes.store:NodeStore.check_claim",
    11,
)
def claim_not_checked(real: Any) -> Any:
    return lambda self, message_id: None


@_mutant("several machines: a write is fenced", "store.objects.s3:BucketPlace.create", 446)
def write_not_fenced(real: Any) -> Any:
    async def create(self: Any, name: str, data: bytes, **other: Any) -> bool:
        await self.store(other.get("values", ()))
        await self.replace(name, data)
        return True

    return create


@_mutant("several machines: mail of a dead node is taken over", "store.nodes.store:NodeStore._adopt", 12)
def no_take_over(real: Any) -> Any:
    return _nothing


@_mutant("several machines: not before the lease is over", "store.objects.objects:ObjectEngine.is_over", 42)
def taken_over_too_early(real: Any) -> Any:
    def is_over(self: Any, node: int, beat: Any) -> Any:
        lease, self.lease = self.lease, 0.05
        try:
            return real(self, node, beat)
        finally:
            self.lease = lease

    return is_over


@_mutant("several machines: a lease counts suspended time", "store.keys.partition:Partition.check", 103)
def lease_by_monotonic(real: Any) -> Any:
    def check(self: Any) -> None:
        if self._clock.monotonic() >= self._valid_until:
            raise ClaimLostError("the lease of this relay was not renewed in time")

    return check


@_mutant(
    "several machines: a relay that stops gives its lease back", "store.objects.objects:ObjectKeys.leave", 42
)
def lease_kept_at_stop(real: Any) -> Any:
    return _nothing


@_mutant("several machines: it comes back by itself", "store.keys.partition:Partition._come_back", 59)
def trouble_for_ever(real: Any) -> Any:
    return _nothing


# The clock.


@_mutant("a clock that is set back delays no mail", "model.delivery:Delivery.corrected_at", 10)
def due_times_of_another_clock(real: Any) -> Any:
    return lambda self, now: self


@_mutant("a clock that is set back delays no mail", "queue.operator.clock_watch:ClockWatch.look", 10)
def clock_not_watched(real: Any) -> Any:
    return _nothing


@_mutant(
    "a clock set back prolongs no suspension", "queue.destination.suspension:Suspension.is_suspended", 825
)
def suspended_by_another_clock(real: Any) -> Any:
    return lambda self, now: now < self.until and not self._is_over


# DESIGN 2.4: memory is bounded.


@_mutant("2.4: the window is bounded", "queue.zone.window:PriorityWindow.room", 17)
def window_without_bound(real: Any) -> Any:
    return property(lambda self: 1000)


@_mutant("2.4: bodies in memory are bounded", "store.common.body:BodyCache._evict", 17)
def bodies_without_bound(real: Any) -> Any:
    return lambda self: None


# Idempotency keys.


@_mutant("a key has one message", "store.common.once.reservations:Reservations._reserve", 19)
def key_not_looked_for(real: Any) -> Any:
    return _nothing


@_mutant("the key is in the write of the message", "store.leveldb.scan:once_ops", 25)
def key_not_stored(real: Any) -> Any:
    return lambda once, message_id: []


FOUND_BY = {name: each.seed for name, each in MUTANTS.items() if each.seed}
"""The seed that is known to find each, for a test that does not look for another."""
