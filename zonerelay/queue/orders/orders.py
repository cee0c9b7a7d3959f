"""Stores the suspensions and hold rules of a relay in a file that all workers share.

`orders.json`, in its own directory next to the spool, is replaced as a whole under a lock, so that concurrent
operators or workers never overwrite each other's changes. A worker checks the file every `LOOK` seconds, so a
worker that was down when an order was given obeys it too. An order that has ended stays in the file for
`KEPT` seconds, for two reasons: a worker that was down then releases at its start what the order held, and
the age of mail does not count the time for which its clock was stopped.

Promise: `give` and `end` return when the change is durable. A file that cannot be read ends the start,
because the relay would send mail that an operator has suspended. Orders apply to one machine, even if several
machines share a store.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from pathlib import Path

import msgspec

from zonerelay import durable
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Mailbox, Message, Origin
from zonerelay.process.files import FileState, file_state
from zonerelay.process.tasks import Alarm, Tasks
from zonerelay.process.threads import FILES
from zonerelay.queue.orders.order import HOLD, MAX_HOSTS, SUSPEND, Order, OrderTable, Subject
from zonerelay.queue.settle.settler import Settler
from zonerelay.store.contract import StoreError
from zonerelay.telemetry.events.events import Events

DIRECTORY = "orders"
LOOK = 5.0
LONGEST_PAUSE = 60.0
"""The longest pause before a file that cannot be written is tried again."""
PATIENCE = 5.0
"""Seconds that a change waits for the lock."""
KEPT = 30 * 86400.0
MAX_ORDERS = 1000
"""The maximum number of active orders. As many ended ones are kept, too."""
AGAIN = 30.0
"""Seconds between two attempts to release what an order held, while the store fails."""

_Change = Callable[[list[Order]], list[Order]]


ZoneOf = Callable[[Origin, str, str], str | None]
"""Returns the zone of a sender's mail to a recipient, or None while it is unknown."""


class OrdersError(ValueError):
    """The suspensions and hold rules cannot be read or changed. The message is for an operator."""


class OrdersFile:
    """The file of a relay's suspensions and hold rules. Its methods block."""

    def __init__(self, home: Path) -> None:
        self.path = home / DIRECTORY / "orders.json"
        self.state: FileState = ()
        """The state of the file when it was last read or written."""

    def read(self, missing: Sequence[Order] = ()) -> list[Order]:
        """Return all suspensions and hold rules, including ended ones, or `missing` if there is no file.
        Raise OrdersError.
        """
        self.state = file_state(self.path)
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=list[Order])
        except FileNotFoundError:
            return list(missing)
        except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise OrdersError(
                f"the suspensions of operators cannot be read: {self.path}: {why}. Restore the file from a "
                "backup; without it the relay would send suspended mail"
            ) from error

    def change(
        self, change: _Change, now: float, missing: Sequence[Order] = (), *, rewrite: bool = False
    ) -> list[Order]:
        """Apply `change` to the suspensions and hold rules in the file, write them durably, and return them.
        Without a file, `missing` is changed. With `rewrite`, the file is written even if nothing changes.
        Raise OrdersError and OSError.
        """
        with durable.locked_directory(self.path.parent, patience=PATIENCE):
            orders = self.read(missing)
            changed = change(orders)
            over = [order.id for order in changed if order.ended is not None and order.ended > now - KEPT]
            over_kept = set(over[-MAX_ORDERS:])
            kept = [order for order in changed if order.ended is None or order.id in over_kept]
            if rewrite or kept != orders:
                durable.write(self.path, msgspec.json.encode(kept))
                self.state = file_state(self.path)
            return kept

    def merge(self, others: Sequence[Order], now: float) -> bool:
        """Add the suspensions and hold rules of another relay whose mail is moved to this one. Ended ones are
        included, because mail that they held must still be released. Return whether any order is new or
        changed. An order that has ended on either side has ended, and an active one ends at the later of its
        ends. Raise OrdersError, also if there would be too many orders, and OSError.
        """
        if not others:
            return False
        with durable.locked_directory(self.path.parent):
            orders = self.read()
            merged = {order.id: order for order in orders}
            for other in others:
                mine = merged.get(other.id, other)
                if (mine.selectors, mine.effect) != (other.selectors, other.effect):
                    raise OrdersError(
                        f"{self.path} contains another suspension with the id {other.id}; resume one of "
                        "them first"
                    )
                merged[other.id] = _later(mine, other)
            if sum(each.is_in_force(now) for each in merged.values()) > MAX_ORDERS:
                raise OrdersError(
                    f"{self.path} would contain more than {MAX_ORDERS:,} active suspensions; resume some "
                    "first"
                )
            changed = sorted(merged.values(), key=lambda each: each.since)
            if changed != orders:
                durable.write(self.path, msgspec.json.encode(changed))
            return changed != orders


def _later(mine: Order, other: Order) -> Order:
    """Combine two versions of a suspension or hold rule; if either of them has ended, so has the result."""
    ended = mine.ended if mine.ended is not None else other.ended
    until = None if mine.until is None or other.until is None else max(mine.until, other.until)
    return msgspec.structs.replace(mine, ended=ended, until=until)


def _subject(delivery: Delivery, message: Message | None, destination: str, label: str) -> Subject:
    client = ("", "") if message is None else (message.envelope.sender, message.envelope.origin.user)
    return Subject(delivery.zone, delivery.recipient, *client, destination, label)


@dataclass(eq=False, repr=False)
class Orders:
    """The suspensions and hold rules of operators (orders), as a worker applies them. `changed` is called
    when the set of active orders changes. `release` releases the deliveries that ended orders have held, and
    returns their number; it raises StoreError. The settler calls `paused` and `keep`.
    """

    home: InitVar[Path]
    _: KW_ONLY
    settler: Settler
    zone_of: ZoneOf
    changed: Callable[[], None]
    release: Callable[[Sequence[Order]], Awaitable[int]]
    events: Events
    clock: Clock

    def __post_init__(self, home: Path) -> None:
        self._file = OrdersFile(home)
        self._lock = asyncio.Lock()
        self._tasks = Tasks(partial(self.events.error, "queue.orders"))
        self._alarm = Alarm(self.clock.now, lambda: self._tasks.start(self._expire()))
        self._all: list[Order] = []
        self._unreadable = self._unwritten = ""
        self.table = OrderTable()
        self.are_refusing = False
        self.held: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Deliveries and refusals by order, since the start."""

    def read(self) -> None:
        """Read the file of suspensions and hold rules, and apply its content. Blocks. Raise OrdersError."""
        self._put_in_force(self._file.read(self._all))

    def start(self) -> None:
        """Start to watch the file of suspensions and hold rules for changes. Call it when mail can be
        released.
        """
        over = [order for order in self._all if order.id not in self.table.ids]
        if over:
            self._tasks.start(self._release_later(over))
        self._tasks.start(self._watch())

    async def stop(self) -> None:
        self._alarm.cancel()
        await self._tasks.cancel()

    def problems(self) -> tuple[str, ...]:
        """Return why the file of suspensions cannot be read or written (those already read stay active), or
        ().
        """
        if not (self._unreadable or self._unwritten) and self._all and not self._file.path.exists():
            return (
                f"{self._file.path} is missing: its suspensions stay active until the relay stops. Restore"
                " it from a backup; the next suspension also writes it again",
            )
        return tuple(filter(None, (self._unreadable, self._unwritten)))

    def holds(self, delivery: Delivery) -> bool:
        """Return whether the delivery is held by an active suspension or hold rule."""
        return delivery.held and delivery.act in self.table.ids

    def keeping(self, zone: str, domain: str, hosts: str) -> Order | None:
        """Return a suspension that applies to all mail to a domain, or None. `hosts` is "" while they are
        unknown.
        """
        if not self.table.orders:
            return None
        return self.table.keeping(Subject(zone, f"@{domain}", "", "", domain, hosts))

    def order_of(self, delivery: Delivery, message: Message | None, hosts: str) -> str:
        """Return the id of the suspension or hold rule that holds or will hold a delivery, or "". Without the
        message, only orders that do not need the envelope are considered.
        """
        if not self.table.orders:
            return ""
        if delivery.held:
            return delivery.act if self.holds(delivery) else ""
        mail = _subject(delivery, message, delivery.domain, hosts)
        order = self.table.keeping(mail) if message is None else self.table.holding(mail, delivery.act)
        return "" if order is None else order.id

    def endless(self) -> int:
        """Return the number of active suspensions and hold rules without an end time."""
        return sum(order.until is None for order in self.table.orders)

    def in_force(self) -> dict[str, int]:
        """Return the numbers of active suspensions and hold rules by effect. An order that refuses mail is
        counted as `refuse`.
        """
        effects = Counter("refuse" if each.refuse else each.effect for each in self.table.orders)
        return {effect: effects[effect] for effect in (SUSPEND, HOLD, "refuse")}

    def refuse(self, origin: Origin, sender: Mailbox, recipient: Mailbox | None, names_zone: bool) -> str:
        """Return the id of the suspension or hold rule that requires a client to be rejected, or "". Without
        a recipient, check the orders that apply at MAIL. `names_zone` is true if the message may name its
        zone.
        """
        table = self.table
        zone = None if recipient is None or names_zone else self.zone_of(origin, sender, recipient)
        order = table.refuses(sender, origin.user, recipient, zone)
        if order is None:
            return ""
        self.refused[order.id] += 1
        return order.id

    # Changes

    async def give(self, order: Order) -> tuple[Order, bool]:
        """Add a suspension or hold rule, or update the active one with the same selectors and effect. Return
        the order as stored, and whether it is new. Raise OrdersError.
        """
        now = self.clock.now()
        before: Order | None = None
        after = order

        def change(orders: list[Order]) -> list[Order]:
            nonlocal before, after
            same = (
                each
                for each in orders
                if each.is_in_force(now) and (each.selectors, each.effect) == (order.selectors, order.effect)
            )
            before = next(same, None)
            others = [each for each in orders if each is not before]
            if before is None and sum(each.is_in_force(now) for each in orders) >= MAX_ORDERS:
                raise OrdersError(f"the limit of {MAX_ORDERS:,} suspensions is reached; resume some first")
            if before is not None:
                hosts = tuple(dict.fromkeys((*before.hosts, *order.hosts)))[:MAX_HOSTS]
                after = msgspec.structs.replace(order, id=before.id, since=before.since, hosts=hosts)
            return sorted([*others, after], key=lambda each: each.since)

        await self._edit(change)
        names = ("reason", "who", "until", "refuse", "stop_clock")
        if before is None or any(getattr(before, name) != getattr(after, name) for name in names):
            self._tell("order-given" if before is None else "order-changed", after, after.who)
        return after, before is None or before.id == order.id

    async def end(self, is_meant: Callable[[Order], bool], who: str, reason: str) -> tuple[list[Order], int]:
        """End the suspensions and hold rules that `is_meant` selects. Return those that this call, or another
        worker at the same time, has ended, and the number of released deliveries. Raise OrdersError and
        StoreError.
        """
        now = self.clock.now()
        mine = {order.id: order for order in self.table.orders if is_meant(order)}
        ended: list[Order] = []

        def change(orders: list[Order]) -> list[Order]:
            ended[:] = [each for each in orders if each.is_in_force(now) and is_meant(each)]
            ids = {each.id for each in ended}
            return [msgspec.structs.replace(each, ended=now) if each.id in ids else each for each in orders]

        await self._edit(change, release=False)
        for order in ended:
            self._tell("order-ended", order, who, reason)
        over = list((mine | {order.id: order for order in ended}).values())
        try:
            return over, await self.release(over) if over else 0
        except StoreError:
            self._tasks.start(self._release_later(over))
            raise

    def paused(self, delivery: Delivery, message: Message | None, destination: str) -> float:
        if message is None or not self.table.pauses:
            return 0.0
        mail = _subject(delivery, message, delivery.domain, destination)
        return self.table.paused(mail, delivery.created, self.clock.now())

    def keep(
        self, message: Message, deliveries: Sequence[Delivery], name: str, label: str
    ) -> tuple[Delivery, ...]:
        """Hold the deliveries of a message to which a suspension or hold rule applies, and return the others.
        `name` and `label` are those of the destination.
        """
        if not self.table.orders:
            return tuple(deliveries)
        left: list[Delivery] = []
        by_order: dict[Order, list[Delivery]] = {}
        for each in deliveries:
            mail = _subject(each, message, name or each.domain, label)
            order = self.table.holding(mail, each.act)
            if order is None:
                left.append(each)
            else:
                by_order.setdefault(order, []).append(each)
        for order, some in by_order.items():
            self.hold(some, order)
        return tuple(left)

    def hold(self, deliveries: Sequence[Delivery], order: Order) -> None:
        """Hold these deliveries under a suspension or hold rule instead of attempting or settling them."""
        self.settler.hold(deliveries, order.id, partial(self._was_held, order, len(deliveries)))

    def _was_held(self, order: Order, count: int) -> None:
        """Count deliveries that are now durably held. If the order has ended since, release them."""
        self.held[order.id] += count
        if all(each.id != order.id for each in self.table.orders):
            self._tasks.start(self._release_later([order]))

    async def _edit(self, change: _Change, *, release: bool = True) -> None:
        async with self._lock:
            try:
                # Only a write shows whether the file can be written again.
                rewrite = bool(self._unwritten)
                put = partial(self._file.change, change, self.clock.now(), self._all, rewrite=rewrite)
                orders = await FILES.run(put)
            except OSError as error:
                self._unwritten = f"the suspensions cannot be written: {self._file.path}: {error.strerror}"
                raise OrdersError(self._unwritten) from error
            self._unreadable = self._unwritten = ""
            self._take(orders, release=release)

    def _take(self, orders: list[Order], *, release: bool = True) -> None:
        """Apply the suspensions and hold rules that were read from the file."""
        before = self.table.orders
        self._put_in_force(orders)
        if before == self.table.orders:
            return
        self._set_alarm()
        self.changed()
        in_force = {order.id for order in self.table.orders}
        over = [order for order in before if order.id not in in_force]
        if over and release:
            self._tasks.start(self._release_later(over))

    def _put_in_force(self, orders: list[Order]) -> None:
        self._all = orders
        self.table = OrderTable(orders, self.clock.now())
        self.are_refusing = bool(self.table.refusing)

    def _set_alarm(self) -> None:
        ends = [order.until for order in self.table.orders if order.until is not None]
        if ends:
            self._alarm.set(min(ends))

    async def _expire(self) -> None:
        """End suspensions and hold rules that have expired, including those that expired while the relay was
        down.
        """
        over: list[Order] = []

        def change(orders: list[Order]) -> list[Order]:
            now = self.clock.now()
            over[:] = [each for each in orders if each.ended is None and not each.is_in_force(now)]
            ids = {each.id for each in over}
            return [
                msgspec.structs.replace(each, ended=each.until) if each.id in ids else each for each in orders
            ]

        while any(each.ended is None and not each.is_in_force(self.clock.now()) for each in self._all):
            try:
                await self._edit(change)
            except OrdersError as error:  # they are not active anyway; the next check tries again
                self.events.error("queue.orders", error)
                self._take(self._all)
                return
            for order in over:
                self._tell("order-expired", order, order.who)

    async def _release_later(self, over: Sequence[Order]) -> None:
        while True:
            try:
                await self.release(over)
                return
            except StoreError as error:
                self.events.error("queue.orders", error)
                await asyncio.sleep(AGAIN)

    async def _watch(self) -> None:
        self._set_alarm()
        await self._expire()
        pause = LOOK
        while True:
            await asyncio.sleep(pause)
            try:
                await self.look()
                await self._expire()
            except OrdersError as error:
                self.events.error("queue.orders", error)
            pause = min(2 * pause, LONGEST_PAUSE) if self._unwritten else LOOK

    async def look(self) -> None:
        """Read the file of suspensions again if another process has changed it, and apply the changes. Raise
        OrdersError when it becomes unusable.
        """
        if self._unwritten:
            await self._edit(lambda orders: orders)
        elif self._unreadable or file_state(self._file.path) != self._file.state:
            async with self._lock:
                known = self._unreadable
                try:
                    self._take(await FILES.run(self._file.read, self._all))
                    self._unreadable = ""
                except OrdersError as error:
                    self._unreadable = str(error)
                    if self._unreadable != known:
                        raise

    def _tell(self, event: str, order: Order, who: str, reason: str = "") -> None:
        self.events.order(
            event,
            order.id,
            effect=order.effect,
            about=order.about,
            who=who,
            reason=reason or order.reason,
            until=order.until,
        )
