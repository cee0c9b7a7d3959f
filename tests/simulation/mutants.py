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
    """`wrong` is called in place of what is at `place` (`module:attribute`), with that as first argument. Its
    docstring is the promise that it breaks. `seed` is one that finds it.
    """

    place: str
    wrong: Callable[..., Any]
    seed: int


MUTANTS: dict[str, Mutant] = {}
_RELEASED = itertools.count()


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
    real = getattr(owner, attribute)

    def wrong(*args: Any, **given: Any) -> Any:
        return mutant.wrong(real, *args, **given)

    with patch.object(owner, attribute, property(wrong) if isinstance(real, property) else wrong):
        yield


def _mutant(place: str, seed: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(wrong: Callable[..., Any]) -> Callable[..., Any]:
        MUTANTS[wrong.__name__.replace("_", "-")] = Mutant(place, wrong, seed)
        return wrong

    return register


# DESIGN 2.1: no 250 before the message is durable.


@_mutant("store.leveldb.engine:Database.batch", 1)
def sync_left_out(real: Any, self: Any, batches: Any) -> Any:
    """2.1: every batch is synced."""
    made = real(self, batches)
    made.sync = False
    return made


@_mutant("store.leveldb.store:LevelDbStore.submit_message", 11)
def answer_before_the_write(real: Any, self: Any, given: Any) -> Any:
    """2.1: 250 after the write."""
    real(self, given)
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


@_mutant("store.common.write.group_commit:refuse", 73)
def failed_write_answered_with_250(real: Any, done: Any, reason: Any) -> Any:
    """2.1: a failed write is no 250."""
    return done.set_result(None)


@_mutant("inbound.session.commands:parse_bdat", 1)
def chunk_cut_short(real: Any, argument: str) -> Any:
    """2.1: a chunk that is not the last ends no message."""
    return real(argument)[0], True


@_mutant("store.leveldb.reads:QueueReads.last_message_id", 16)
async def ids_forgotten(real: Any, *args: Any, **given: Any) -> None:
    """2.1: message ids are never used again."""


# DESIGN 2.2: nothing is forgotten before its outcome is stored.


@_mutant("store.leveldb.store:LevelDbStore.settle", 24)
async def report_in_a_second_write(real: Any, self: Any, changes: Any, *, lazy: bool = False) -> None:
    """2.2: a bounce and its report are one write."""
    reports = [each for each in changes if isinstance(each, Submit)]
    if not reports:
        await real(self, changes, lazy=lazy)
        return
    await real(self, [each for each in changes if not isinstance(each, Submit)])
    await asyncio.sleep(1.0)
    await real(self, reports)


@_mutant("queue.settle.disposition:DispositionPolicy._silence", 5)
def no_reports(real: Any, self: Any, envelope: Any, delivery: Any, about: Any) -> Any:
    """2.2: a bounce is reported."""
    return "mutant"


@_mutant("smtp.client.transaction:Transaction.lost", 5)
def lost_means_delivered(real: Any, self: Any, reply: Any) -> None:
    """2.2: a lost reply is no delivery."""
    real(self, reply)
    self.outcomes = [
        replace(each, verdict=Verdict.DELIVERED) if isinstance(each, Outcome) and self._accepted else each
        for each in self.outcomes
    ]


@_mutant("smtp.client.transaction:Transaction._not_accepted", 5)
def refusal_of_another(real: Any, self: Any, index: int, reply: Any) -> None:
    """2.2: each recipient has its own outcome."""
    real(self, 0 if index == 1 and 0 not in self._accepted else index, reply)
    if index and self._accepted:
        self._accepted[-1] = index


@_mutant("queue.settle.outcome_log:OutcomeLog._keep", 3)
def outcome_not_tried_again(real: Any, self: Any, entries: Any) -> None:
    """2.2: an outcome that could not be written is kept."""
    for entry in entries:
        self._settled(entry)


@_mutant("store.leveldb.write_plan:WritePlan._close", 1)
def message_removed_too_early(real: Any, self: Any, message_id: Any, closed: Any) -> Any:
    """2.2: the last delivery takes the message, no other."""
    return real(self, message_id, closed + 1)


@_mutant("queue.settle.outcome_log:OutcomeLog._flush", 15)
def outcomes_late(real: Any, self: Any) -> None:
    """2.2: outcomes are stored."""
    asyncio.get_running_loop().call_later(10.0, real, self)


@_mutant("store.leveldb.in_flight:InFlight.reset", 11)
def claims_forgotten(real: Any, self: Any) -> None:
    """2.2: claims outlive a failed write."""
    real(self)
    self.claims = {}


# DESIGN 2.3: unknown trouble is temporary.


@_mutant("delivery.batch.batch_state:BatchProgress.host_failed", 1)
def dead_host_bounces(real: Any, self: Any, host: str, trouble: Any, *, counts: bool = True) -> None:
    """2.3: a connection that fails is a deferral."""
    real(self, host, trouble, counts=counts)
    self.settle_open(Outcome(Verdict.BOUNCED, trouble.reply, host=host, local=True))


@_mutant("smtp.client.transaction:Transaction._refuse", 1)
def deferral_is_final(real: Any, self: Any, indices: Any, reply: Any, scope: Any) -> None:
    """2.3: 4yz is temporary."""
    self._settle(list(indices), reply, Verdict.DELIVERED, scope)


@_mutant("queue.settle.settler:Settler.post_unattempted", 4)
def put_off_forgotten(real: Any, self: Any, deliveries: Any, outcome: Any, **given: Any) -> Any:
    """2.3: a retry comes."""


@_mutant("store.leveldb.claims:Claims.next_due", 1)
async def due_mail_not_found(real: Any, *args: Any, **given: Any) -> None:
    """2.3: deferred mail is found when it is due."""


@_mutant("queue.destination.suspension:Suspension.duration", 1)
def suspended_for_ever(real: Any, self: Any) -> Any:
    """2.3: a suspension ends."""
    return 1e9


@_mutant("queue.settle.disposition:DispositionPolicy._next_attempt", 8)
async def never_expires(
    real: Any, self: Any, envelope: Any, delivery: Any, outcome: Any, until: Any, now: float
) -> float:
    """5.1: mail expires."""
    found = await real(self, envelope, delivery, outcome, until, now)
    return now + 5000.0 if found is None else float(found)


# DESIGN 2.5 and bodies.


@_mutant("smtp.client.stuffing:DotStuffer.feed", 1)
def no_dot_stuffing(real: Any, self: Any, data: Any) -> Any:
    """2.5: lines that begin with a dot are doubled."""
    return bytes(data)


@_mutant("store.leveldb.reads:QueueReads.chunks", 1)
async def chunks_out_of_order(real: Any, self: Any, message_id: Any, first: int, last: int) -> Any:
    """Bodies leave as they came."""
    return (await real(self, message_id, first, last))[::-1]


@_mutant("delivery.connection.client_protocol:ClientProtocol.abort", 16)
def connection_not_closed(real: Any, self: Any) -> Any:
    """A connection with a lost reply is not used again."""


# Orders of operators.


@_mutant("queue.orders.orders:OrdersFile.read", 212)
def order_lost(real: Any, self: Any) -> Any:
    """Orders outlive a restart."""
    return []


@_mutant("queue.orders.orders:OrderTable", 145)
def order_not_obeyed(real: Any, orders: Any = (), now: Any = 0.0) -> Any:
    """Suspended mail does not leave."""
    return real((), now)


@_mutant("queue.operator.operations:Operations.release_orders", 44)
async def resume_releases_nothing(real: Any, self: Any, orders: Any) -> int:
    """Resume releases."""
    return 0


# Limits.


@_mutant("routing.destinations.route:DestinationLimits.of_zone", 3)
def destination_limit_ignored(real: Any, zone: Any) -> Any:
    """Limits: connections to a destination."""
    return msgspec.structs.replace(real(zone), max_connections=9)


@_mutant("queue.zone.attempts:BatchTurns.take", 47)
async def turn_not_waited_for(real: Any, self: Any) -> bool:
    """Limits: a batch waits for its turn."""
    self._ticket.end()
    return True


@_mutant("limits.authority:SlotAllocator._in_use", 18)
def place_given_twice(real: Any, self: Any) -> Any:
    """Limits over workers: a place is given once."""
    return 0


@_mutant("limits.authority:SlotAllocator._at_site", 7)
def site_given_twice(real: Any, self: Any, entry: Any) -> Any:
    """Limits over workers: places of a site."""
    return iter(())


@_mutant("limits.authority:Calendar.add", 7)
def turn_given_twice(real: Any, self: Any, at: Any, interval: Any, line: Any) -> Any:
    """Limits over workers: a turn is given once."""


@_mutant("limits.authority:ZoneLimits._declare", 199)
def turns_not_declared(real: Any, self: Any, ask: Any, moments: Any) -> Any:
    """Limits over workers: a new supervisor learns of turns."""


@_mutant("limits.authority:LimitTable.unregister", 16)
def places_of_the_dead_kept(real: Any, self: Any, holder: Any) -> Any:
    """Limits over workers: a dead worker's places come back."""


@_mutant("limits.worker.keeper:LimitKeeper._back", 135)
def places_not_declared(real: Any, self: Any) -> Any:
    """Limits over workers: a new supervisor learns of places."""
    return self._note_back()


@_mutant("limits.authority:Reclaimer.ask", 86)
def passed_over(real: Any, self: Any, waiting: Any, wanted: Any, now: Any) -> Any:
    """Limits over workers: who has more gives way."""


@_mutant("limits.authority:LimitTable._may_allocate", 219)
def no_quiet_time(real: Any, self: Any, now: Any) -> Any:
    """Limits over workers: quiet after a start."""
    return True


@_mutant("queue.selection:RoundRobin.granted", 4)
def grant_not_heard(real: Any, self: Any, now: Any) -> Any:
    """Limits over workers: a grant wakes who waits."""


@_mutant("delivery.connection.session:Slot.release", 3)
def slot_leaks(real: Any, self: Any) -> None:
    """A slot is given back with its connection."""
    if next(_RELEASED) % 5:
        real(self)


# Several machines.


@_mutant("store.keys.partition:Partition.check", 11)
def lease_for_ever(real: Any, self: Any) -> Any:
    """Several machines: a lease ends while a node stands still."""


@_mutant("store.objects.objects:ObjectEngine.is_over", 9)
def living_not_seen(real: Any, self: Any, node: Any, beat: Any) -> Any:
    """Several machines: mail of the living is left alone."""
    return True


@_mutant("store.nodes.store:NodeStore.check_claim", 11)
def claim_not_checked(real: Any, self: Any, message_id: Any) -> Any:
    """Several machines: the claim is checked before the body leaves."""


@_mutant("store.objects.s3:BucketPlace.create", 142)
async def write_not_fenced(real: Any, self: Any, name: str, data: bytes, **other: Any) -> bool:
    """Several machines: a write is fenced."""
    await self.store(other.get("values", ()))
    await self.replace(name, data)
    return True


@_mutant("store.nodes.store:NodeStore._adopt", 12)
async def no_take_over(real: Any, *args: Any, **given: Any) -> None:
    """Several machines: mail of a dead node is taken over."""


@_mutant("store.keys.partition:Partition.check", 103)
def lease_by_monotonic(real: Any, self: Any) -> None:
    """Several machines: a lease counts suspended time."""
    if self._clock.monotonic() >= self._valid_until:
        raise ClaimLostError("the lease of this relay was not renewed in time")


@_mutant("store.objects.objects:ObjectKeys.leave", 42)
async def lease_kept_at_stop(real: Any, *args: Any, **given: Any) -> None:
    """Several machines: a relay that stops gives its lease back."""


@_mutant("store.keys.partition:Partition._come_back", 59)
async def trouble_for_ever(real: Any, *args: Any, **given: Any) -> None:
    """Several machines: it comes back by itself."""


# The clock.


@_mutant("model.delivery:Delivery.corrected_at", 10)
def due_times_of_another_clock(real: Any, self: Any, now: Any) -> Any:
    """A clock that is set back delays no mail."""
    return self


@_mutant("queue.destination.suspension:Suspension.is_suspended", 825)
def suspended_by_another_clock(real: Any, self: Any, now: Any) -> Any:
    """A clock set back prolongs no suspension."""
    return now < self.until and not self._is_over


# DESIGN 2.4: memory is bounded.


@_mutant("queue.zone.window:PriorityWindow.room", 17)
def window_without_bound(real: Any, self: Any) -> int:
    """2.4: the window is bounded."""
    return 1000


@_mutant("store.common.body:BodyCache._evict", 17)
def bodies_without_bound(real: Any, self: Any) -> Any:
    """2.4: bodies in memory are bounded."""


# Idempotency keys.


@_mutant("store.common.once.reservations:Reservations._reserve", 24)
async def key_not_looked_for(real: Any, *args: Any, **given: Any) -> None:
    """A key has one message."""


@_mutant("store.leveldb.scan:once_ops", 25)
def key_not_stored(real: Any, once: Any, message_id: Any) -> Any:
    """The key is in the write of the message."""
    return []
