"""Faults in the relay, one for each promise, that the simulation has to find.

A mutant replaces one function of the relay by one that breaks a rule of DESIGN 2, or a promise of the pages
about limits and several machines. A mutant that no seed finds is a hole in the assertions.
"""

import asyncio
import importlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
from msgspec import structs

from zonerelay.model.reply import Outcome, Verdict
from zonerelay.store.contract import ClaimLostError, OwnMessage

_RELEASED = itertools.count()


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Run the body with a mutant in the relay; without a name, with the relay as it is."""
    if not name:
        yield
        return
    _, place, given = MUTANTS[name]
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(f"zonerelay.{module}")
    *parts, attribute = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    real = getattr(owner, attribute)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return given(real, *args, **kwargs) if callable(given) else given

    with patch.object(owner, attribute, property(wrong) if isinstance(real, property) else wrong):
        yield


async def _release_none(real: Any, self: Any, orders: Any) -> int:
    return 0


async def _return_later(*args: Any, **given: Any) -> None:
    """Do nothing, when it is awaited."""


def _leave_sync_out(real: Any, self: Any, batches: Any) -> Any:
    made = real(self, batches)
    made.sync = False
    return made


def _answer_first(real: Any, self: Any, given: Any) -> Any:
    real(self, given)
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


async def _report_second(real: Any, self: Any, changes: Any, *, lazy: bool = False) -> None:
    reports = [each for each in changes if isinstance(each, OwnMessage)]
    if not reports:
        await real(self, changes, lazy=lazy)
        return
    await real(self, [each for each in changes if not isinstance(each, OwnMessage)])
    await asyncio.sleep(1.0)
    await real(self, reports)


def _deliver_lost(real: Any, self: Any, reply: Any) -> None:
    real(self, reply)
    self.outcomes = [
        structs.replace(each, verdict=Verdict.DELIVERED)
        if isinstance(each, Outcome) and self._accepted
        else each
        for each in self.outcomes
    ]


def _refuse_another(real: Any, self: Any, index: int, reply: Any) -> None:
    real(self, 0 if index == 1 and 0 not in self._accepted else index, reply)
    if index and self._accepted:
        self._accepted[-1] = index


def _forget_outcomes(real: Any, self: Any, entries: Any) -> None:
    for entry in entries:
        self._settled(entry)


def _delay(real: Any, self: Any) -> None:
    asyncio.get_running_loop().call_later(10.0, real, self)


def _forget_claims(real: Any, self: Any) -> None:
    real(self)
    self.claims = {}


def _bounce(real: Any, self: Any, host: str, trouble: Any, *, counts: bool = True) -> None:
    real(self, host, trouble, counts=counts)
    self.settle_open(Outcome(Verdict.BOUNCED, trouble.reply, host=host, local=True))


def _settle_refused(real: Any, self: Any, indices: Any, reply: Any, scope: Any) -> None:
    self._settle(list(indices), reply, Verdict.DELIVERED, scope)


async def _put_off(
    real: Any, self: Any, envelope: Any, delivery: Any, outcome: Any, until: Any, now: float
) -> Any:
    found = await real(self, envelope, delivery, outcome, until, now)
    return now + 5000.0 if found is None else float(found)


async def _reverse_chunks(real: Any, self: Any, message_id: Any, first: int, last: int) -> Any:
    return (await real(self, message_id, first, last))[::-1]


def _raise_limit(real: Any, zone: Any) -> Any:
    return msgspec.structs.replace(real(zone), max_connections=9)


async def _not_wait(real: Any, ticket: Any, clock: Any) -> Any:
    ticket.end()
    return True


def _leak(real: Any, self: Any) -> None:
    if next(_RELEASED) % 5:
        real(self)


async def _write_anyhow(real: Any, self: Any, name: str, data: bytes, **other: Any) -> Any:
    if name.startswith("probe/"):  # the check at the start would refuse the bucket
        return await real(self, name, data, **other)
    await self.store(other.get("values", ()))
    await self.replace(name, data)
    return True


def _check_monotonic(real: Any, self: Any) -> None:
    if self.clock.monotonic() >= self._valid_until:
        raise ClaimLostError("the lease of this relay was not renewed in time")


def _answer_all(real: Any, done: Any, reason: Any) -> None:
    done.set_result(None)


def _close_early(real: Any, self: Any, message_id: Any, closed: Any) -> Any:
    return real(self, message_id, closed + 1)


def _declare_nothing(real: Any, self: Any) -> Any:
    return self._note_back()


def _by_wall(real: Any, self: Any, now: Any) -> Any:
    return now < self.until and not self._is_over


MUTANTS: dict[str, tuple[int, str, Any]] = {
    # 2.1: every batch is synced.
    "sync-left-out": (1, "store.leveldb.engine:Database.batch", _leave_sync_out),
    # 2.1: 250 after the write.
    "answer-before-the-write": (11, "store.queue.store:PartitionStore.submit_message", _answer_first),
    # 2.1: a failed write is no 250.
    "failed-write-answered-with-250": (73, "store.keys.group_commit:refuse", _answer_all),
    # 2.1: a chunk that is not the last ends no message.
    "chunk-cut-short": (
        1,
        "inbound.session.conversation:parse_bdat",
        lambda real, text: (real(text)[0], True),
    ),
    # 2.1: message ids are never used again.
    "ids-forgotten": (16, "store.queue.reads:QueueReads.last_message_id", _return_later),
    # 2.2: a bounce and its report are one write.
    "report-in-a-second-write": (24, "store.queue.store:PartitionStore.settle", _report_second),
    # 2.2: a bounce is reported.
    "no-reports": (5, "queue.settle.settler:DispositionPolicy._silence", "mutant"),
    # 2.2: a lost reply is no delivery.
    "lost-means-delivered": (5, "smtp.client.transaction:ClientTransaction.lost", _deliver_lost),
    # 2.2: each recipient has its own outcome.
    "refusal-of-another": (5, "smtp.client.transaction:ClientTransaction._not_accepted", _refuse_another),
    # 2.2: an outcome that could not be written is kept.
    "outcome-not-tried-again": (3, "queue.settle.settler:OutcomeLog._keep", _forget_outcomes),
    # 2.2: the last delivery takes the message, no other.
    "message-removed-too-early": (1, "store.queue.in_flight:WritePlan._close", _close_early),
    # 2.2: outcomes are stored.
    "outcomes-late": (15, "queue.settle.settler:OutcomeLog._flush", _delay),
    # 2.2: claims outlive a failed write.
    "claims-forgotten": (12, "store.queue.in_flight:InFlight.reset", _forget_claims),
    # 2.3: a connection that fails is a deferral.
    "dead-host-bounces": (1, "delivery.batch.batch_state:BatchState.host_failed", _bounce),
    # 2.3: 4yz is temporary.
    "deferral-is-final": (1, "smtp.client.transaction:ClientTransaction._refuse", _settle_refused),
    # 2.3: a retry comes.
    "put-off-forgotten": (4, "queue.settle.settler:Settler.post_unattempted", None),
    # 2.3: deferred mail is found when it is due.
    "due-mail-not-found": (1, "store.queue.claims:ClaimCursors.next_due", _return_later),
    # 2.3: a suspension ends.
    "suspended-for-ever": (1, "queue.destination.destinations:Suspension.duration", 1e9),
    # 5.1: mail expires.
    "never-expires": (8, "queue.settle.settler:DispositionPolicy._next_attempt", _put_off),
    # 2.5: lines that begin with a dot are doubled.
    "no-dot-stuffing": (1, "smtp.client.stuffing:DotStuffer.feed", lambda real, self, data: bytes(data)),
    # Bodies leave as they came.
    "chunks-out-of-order": (1, "store.queue.reads:QueueReads.chunks", _reverse_chunks),
    # A connection with a lost reply is not used again.
    "connection-not-closed": (16, "delivery.connection.session:ClientProtocol.abort", None),
    # Orders outlive a restart.
    "order-lost": (212, "queue.orders.orders:OrdersFile.read", lambda real, *_: []),
    # Suspended mail does not leave.
    "order-not-obeyed": (178, "queue.orders.orders:OrderTable", lambda real, *_: real()),
    # Resume releases.
    "resume-releases-nothing": (44, "queue.operator.operations:Operations.release_orders", _release_none),
    # Limits: connections to a destination.
    "destination-limit-ignored": (3, "routing.destinations.route:DestinationLimits.of_zone", _raise_limit),
    # Limits: a batch waits for its turn.
    "turn-not-waited-for": (47, "queue.zone.zone:take_turn", _not_wait),
    # Limits over workers: a place is given once.
    "place-given-twice": (18, "limits.authority:SlotAllocator._in_use", 0),
    # Limits over workers: places of a site.
    "site-given-twice": (34, "limits.authority:SlotAllocator._at_site", ()),
    # Limits over workers: a turn is given once.
    "turn-given-twice": (7, "limits.authority:Calendar.add", None),
    # Limits over workers: a new supervisor learns of turns.
    "turns-not-declared": (199, "limits.authority:ZoneLimits._declare", None),
    # Limits over workers: a dead worker's places come back.
    "places-of-the-dead-kept": (16, "limits.authority:LimitTable.unregister", None),
    # Limits over workers: a new supervisor learns of places.
    "places-not-declared": (135, "limits.worker:LimitKeeper._back", _declare_nothing),
    # Limits over workers: who has more gives way.
    "passed-over": (86, "limits.authority:Reclaimer.ask", None),
    # Limits over workers: a grant wakes who waits.
    "grant-not-heard": (4, "queue.selection:RoundRobin.granted", None),
    # A slot is given back with its connection.
    "slot-leaks": (3, "delivery.connection.session:Slot.release", _leak),
    # Several machines: a lease ends while a node stands still.
    "lease-for-ever": (11, "store.keys.partition:Partition.check", None),
    # Several machines: mail of the living is left alone.
    "living-not-seen": (9, "store.objects.engine:ObjectEngine.is_over", True),
    # Several machines: the claim is checked before the body leaves.
    "claim-not-checked": (11, "store.nodes:NodeStore.check_claim", None),
    # Several machines: a write is fenced.
    "write-not-fenced": (142, "store.objects.s3:Bucket.create", _write_anyhow),
    # Several machines: mail of a dead node is taken over.
    "no-take-over": (12, "store.nodes:NodeStore._adopt", _return_later),
    # Several machines: a lease counts suspended time.
    "lease-by-monotonic": (93, "store.keys.partition:Partition.check", _check_monotonic),
    # Several machines: a relay that stops gives its lease back.
    "lease-kept-at-stop": (42, "store.objects.engine:ObjectKeys.leave", _return_later),
    # Several machines: it comes back by itself.
    "trouble-for-ever": (59, "store.keys.partition:Partition._come_back", _return_later),
    # A clock that is set back delays no mail.
    "due-times-of-another-clock": (10, "model.delivery:Delivery.corrected_at", lambda real, self, now: self),
    # A clock set back prolongs no suspension.
    "suspended-by-another-clock": (825, "queue.destination.destinations:Suspension.is_suspended", _by_wall),
    # 2.4: the window is bounded.
    "window-without-bound": (17, "queue.zone.window:PriorityWindow.room", 1000),
    # 2.4: bodies in memory are bounded.
    "bodies-without-bound": (17, "store.queue.body:BodyCache._evict", None),
    # A key has one message.
    "key-not-looked-for": (24, "store.queue.reservations:Reservations._reserve", _return_later),
    # The key is in the write of the message.
    "key-not-stored": (25, "store.queue.store:_once_ops", lambda real, *args: []),
}
"""By name: a seed that finds it, the place as `module:attribute`, and what is there instead: the result, or a
function that is called with the real one as first argument. The comment has the promise that it breaks.
"""
