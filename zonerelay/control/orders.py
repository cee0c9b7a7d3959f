"""Handles `suspend`, `resume` and requests for the active suspensions and hold rules.

An invalid request raises a ControlError that says what to write instead.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Iterable

import msgspec

from zonerelay.config.problems import did_you_mean, in_words
from zonerelay.operations import answers
from zonerelay.operations.catalogue import OperationCall
from zonerelay.operations.errors import InvalidError
from zonerelay.operations.requests import Resume, Selectors, Suspend
from zonerelay.queue.operator.filters import QueueFilter
from zonerelay.queue.operator.operations import Operations
from zonerelay.queue.orders.order import HOLD, MAX_HOSTS, SELECTORS, Order, Subject
from zonerelay.queue.orders.orders import Orders

MAX_TEXT = 400
LOOK = 1.0
"""Seconds for which the mail that an order is about is looked for."""


class OrderAnswers(msgspec.Struct, frozen=True):
    """Handles operators' requests about suspensions and hold rules. `zones` returns the names of configured
    zones.
    """

    orders: Orders
    operations: Operations
    zones: Callable[[], Collection[str]]

    async def in_force(self) -> tuple[answers.OrderRow, ...]:
        """Read the file of suspensions and hold rules, and return the active ones. Raise OrdersError if their
        file cannot be read, and StoreError if the store fails.
        """
        await self.orders.look()
        return self.rows()

    async def suspend(self, request: Suspend, call: OperationCall) -> answers.OrderResult:
        """Add a suspension or hold rule. Raise InvalidError, OrdersError if the file cannot be changed, and
        StoreError if the store fails.
        """
        self._check(request)
        now = call.at or self.operations.clock.now()
        order = Order(
            id=call.id or secrets.token_hex(4),
            effect=request.effect,
            reason=" ".join(request.reason.split()),
            who=call.caller,
            since=now,
            until=None if not request.seconds else now + request.seconds,
            refuse=request.refuse,
            stop_clock=request.stop_clock,
            hosts=self._hosts(request.about),
            **msgspec.structs.asdict(request.about),
        )
        order, new = await self.orders.give(order)
        expiry = await self._expiry(request.about)
        return answers.OrderResult(order=self._row(order), new=new, first_expiry=expiry)

    async def resume(self, request: Resume, who: str) -> answers.OrdersResult:
        """End suspensions and hold rules. Raise the errors of `suspend`."""
        about = request.about
        selectors = tuple(getattr(about, name) for name in SELECTORS)
        if not request.id and about == Selectors():
            text = "no suspension selected: specify its id, or the selectors that it was created with"
            raise InvalidError(text, pointer="/about")

        def is_meant(order: Order) -> bool:
            if request.id:
                return order.id == request.id
            return (order.selectors, order.everything) == (selectors, about.everything)

        ended, released = await self.orders.end(is_meant, who, " ".join(request.reason.split()))
        return answers.OrdersResult(orders=tuple(map(self._row, ended)), released=released)

    async def undo(self, order_id: str, reason: str, who: str) -> answers.ChangeResult | None:
        """End the suspension or hold rule with this id, or return `None` if it does not exist. Raise the
        errors of `suspend`.
        """
        if all(order.id != order_id for order in self.orders.table.orders):
            return None
        ended = await self.resume(Resume(id=order_id, reason=reason), who)
        held = ended.released
        return answers.ChangeResult(
            action="undo",
            matched=held,
            changed=held,
            busy=0,
            undoes=order_id,
            note="the suspension or hold rule has ended",
        )

    def rows(self) -> tuple[answers.OrderRow, ...]:
        """Return the active suspensions and hold rules, newest first."""
        return tuple(map(self._row, reversed(self.orders.table.orders)))

    def about(self, mail: Subject) -> tuple[answers.OrderRow, ...]:
        return tuple(map(self._row, self.orders.table.about(mail)))

    def named_in(self, rows: Iterable[answers.DeliveryRow]) -> tuple[answers.OrderRow, ...]:
        ids = {row.order for row in rows}
        return tuple(row for row in self.rows() if row.id in ids)

    def _row(self, order: Order) -> answers.OrderRow:
        row = msgspec.convert(order, answers.OrderRow, from_attributes=True)
        return msgspec.structs.replace(
            row, held=self.orders.held[order.id], refused=self.orders.refused[order.id]
        )

    def _check(self, request: Suspend) -> None:
        about = request.about
        given = {name: getattr(about, name) for name in SELECTORS if getattr(about, name) is not None}
        if bool(given) is about.everything:
            selectors = "a zone, destination, domain, sender, user or recipient, or everything (--all)"
            text = f"no mail selected: specify {selectors}"
            if given:
                text = "`everything` selects all mail and cannot be combined with other selectors"
            raise InvalidError(text, pointer="/about")
        texts = (*given.values(), request.reason)
        if not request.reason.strip():
            text = "the reason is missing (--reason; it is shown to operators, never to clients)"
            raise InvalidError(text, pointer="/reason")
        if any(len(text) > MAX_TEXT or not text.isprintable() for text in texts):
            text = f"selectors and reason must be printable and have at most {MAX_TEXT} characters"
            raise InvalidError(text, pointer="/about")
        if about.zone is not None and about.zone not in self._known_zones():
            zones = self._known_zones()
            near = did_you_mean(about.zone, zones) or f"; the zones are {in_words(zones)}"
            raise InvalidError(f'zone "{about.zone}" does not exist{near}', pointer="/about/zone")
        if about.domain is not None and about.destination is not None:
            text = "domain and destination cannot be combined, because a destination has its own domains"
            raise InvalidError(text, pointer="/about")
        if request.refuse and (request.effect == HOLD or about.destination is not None):
            what = "refuse cannot be combined with a destination"
            if request.effect == HOLD:
                what = "a hold rule does not reject mail"
            text = f"{what}: refuse requires a zone, domain, sender, user or recipient, or all mail"
            raise InvalidError(text, pointer="/refuse")

    def _known_zones(self) -> list[str]:
        stored = (queue.zone for queue, counts in self.operations.store.counts().items() if counts.total)
        return sorted({*self.zones(), *stored, "default"})

    def _hosts(self, about: Selectors) -> tuple[str, ...]:
        """Return the hosts of the destination that `zonerelay status` shows under this name."""
        wanted = (about.destination or "").lower()
        found = (
            each.key.partition(" ")[2]
            for _, each in (self.operations.scheduler.destinations() if wanted else ())
            if each.route.name.lower() == wanted
        )
        return tuple(dict.fromkeys(found))[:MAX_HOSTS]

    async def _expiry(self, about: Selectors) -> float | None:
        """Return a time before which none of the suspended mail expires. If there is too much mail to check
        within `LOOK` seconds, it is derived from the oldest mail of the zones.
        """
        first_expiry, store = self.operations.settler.first_expiry, self.operations.store
        wanted = QueueFilter(
            zone=about.zone, domain=about.domain, sender=about.sender, recipient=about.recipient
        )
        if wanted != QueueFilter() and about.user is about.destination is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK):
                    found = [
                        first_expiry(delivery.created, delivery.zone, message)
                        async for delivery, message, _ in self.operations.select(wanted)
                    ]
                    return min(found, default=None)
        now = self.operations.clock.now()
        oldest = [
            first_expiry(created, queue.zone)
            for queue in store.counts()
            if about.zone in (None, queue.zone)
            and (created := await store.oldest(queue, now=now)) is not None
        ]
        return min(oldest, default=None)
