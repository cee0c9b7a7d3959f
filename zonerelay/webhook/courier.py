"""Posts the events of one webhook: claims them from the spool, posts them, and removes them.

Promises:

- An event leaves the spool when the endpoint has accepted it (2xx), or in the same write as a webhook.gap
  event that counts it: when more than `max_queued` events wait, or it has waited longer than `max_age`.
- Events about one message are posted in order, one after the other. Those of different messages are posted
  over a few connections at the same time.
- Nothing here delays mail: webhooks have their own zone in the store, and their own tasks.

Policy: a refused event is retried by the schedule of Standard Webhooks, and only the events about its message
wait for it. If the endpoint does not respond, or refuses several events in a row, all events wait while one
at a time is tried; the first success releases the others. 410 stops the webhook until a reload, a restart or
`zonerelay webhook replay`.

Failure: after a crash, all events that were not removed are posted again, with the same ids.
"""

import asyncio
import heapq
import itertools
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from random import Random
from typing import NamedTuple

import msgspec

from zonerelay.config.problems import masked
from zonerelay.config.settings import WebhookSettings
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, DeliveryKey, webhook_queue
from zonerelay.model.envelope import Mailbox
from zonerelay.process.tasks import Tasks, cancel_all
from zonerelay.store import contract
from zonerelay.store.contract import Change
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.webhook.endpoint import Endpoint, EndpointResponse

SCHEDULE = (5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
"""Seconds after each failure of an event."""
CONNECTIONS = 4
DOWN_AFTER = 5
"""Failures one after the other, whatever they are, after which the endpoint counts as down."""
PAUSE_MOST = 300.0
PAGE = 250
"""Bodies that are claimed at a time, when fewer are in memory that could be posted."""
LOOK_AGAIN = 30.0
"""Seconds after which old events are looked for, and those of other machines that share the store."""
KEPT = 0.9
"""The part of a full queue that stays, so that not each event costs a write of its own."""

Write = Callable[[Sequence[Change], Callable[[], None] | None], None]
"""`write(changes, then)`: one atomic write, tried until it succeeds."""

MakeGap = Callable[[int, str, float, float], contract.OwnMessage]
"""`make_gap(count, why, first, last)`: the event that tells of lost ones."""


GAP = "gap"
"""In the place of a message: the event says which others were lost."""


class EventPosition(NamedTuple):
    """The position of an event: the id of its message, the number of the event among those of the message,
    and the number of events in the body. It is stored as the recipient of the event's delivery, so that a
    starting relay knows the order without reading bodies. The position of a gap is the number of events that
    it counts.
    """

    source: str
    step: int
    events: int

    def recipient(self, webhook: str) -> Mailbox:
        """Return the position as a recipient address, which is different for each webhook. Webhooks may share
        a stored message.
        """
        return Mailbox(f"{self.source}.{self.step}.{self.events}@{webhook}.webhook.invalid")

    @classmethod
    def read(cls, recipient: Mailbox) -> "EventPosition":
        """Parse the recipient address of an event's delivery. An address with an unknown form, such as that
        of a newer release, counts as a single event.
        """
        source, _, rest = recipient.partition("@")[0].partition(".")
        step, _, count = rest.partition(".")
        return cls(source, int(step) if step.isdecimal() else 0, int(count) if count.isdecimal() else 1)


class EventPost(msgspec.Struct, eq=False):
    """One request body to be posted, with one or several events. `delivery` is `None` for an event that is
    not stored; `events` are read when it is posted.
    """

    about: EventPosition
    created: float
    delivery: Delivery | None = None
    events: Sequence[tuple[str, bytes]] = ()
    done: int = 0

    @property
    def place(self) -> tuple[int, str]:
        return self.about.step, self.delivery.message_id if self.delivery else ""


class MessagePosts(msgspec.Struct, eq=False):
    """The request bodies about one message, in order."""

    items: list[EventPost] = msgspec.field(default_factory=list)
    is_busy: bool = False
    attempts: int = 0


@dataclass(eq=False, repr=False)
class WebhookCourier:
    """Posts the events of one webhook. Call `start` once, and `stop` at the end."""

    settings: WebhookSettings
    keys: Sequence[str]
    _: KW_ONLY
    read_keys: InitVar[Callable[[], Sequence[str]]]
    store: contract.QueueStore
    write: Write
    make_gap: MakeGap
    events: Events
    clock: Clock
    random: Random

    def __post_init__(self, read_keys: Callable[[], Sequence[str]]) -> None:
        self.endpoint = Endpoint(self.settings, self.clock, read_keys)
        self.redact = Redactor(b"", enabled=False)
        """How its events show addresses."""
        self.problem = ""
        self.is_disabled = False
        self.delivered = 0
        self._queue = webhook_queue(self.settings.name)
        self._claimed = 0
        self._leaving = 0
        self._events_held = 0
        self._lines: dict[str, MessagePosts] = {}
        self._items: dict[EventPost, None] = {}
        self._ready: deque[MessagePosts] = deque()
        self._later: list[tuple[float, int, MessagePosts]] = []
        self._serial = itertools.count()
        self._failures = 0
        self._pause = 0.0
        """Until then nothing is posted, because the endpoint is down; 0: it is not."""
        self._has_news = True
        self._wake = asyncio.Event()
        self._posts = Tasks(partial(self.events.error, "webhook"))
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def url(self) -> str:
        """The URL of the endpoint for display, with possible secrets masked."""
        return masked(self.settings.url)

    @property
    def state(self) -> str:
        return "disabled" if self.is_disabled else "failing" if self.problem else "ok"

    @property
    def queued(self) -> int:
        """The number of events that have not been posted. A body that is only in the spool counts as one
        event.
        """
        return self._events_held + max(0, self.store.waiting(self._queue) - self._claimed - self._leaving)

    @property
    def oldest(self) -> float | None:
        """The Unix time at which the oldest event that has not been posted was created."""
        return next((item.created for item in self._items), None)

    def start(self) -> None:
        """Start posting events. Do nothing if the courier has already started."""
        self._task = self._task or asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Stop posting; the remaining events stay in the spool, for the next courier or the next start."""
        task, self._task = self._task, None
        await cancel_all(task)
        await self._posts.cancel()
        self.store.release([item.delivery.key for item in self._items if item.delivery is not None])
        await self.endpoint.poster.close()

    def stored(self, deliveries: Sequence[Delivery], is_next: bool) -> int:
        """Add new events, which the store has just made durable (`store.contract.Stored`)."""
        taken = 0
        if is_next and self._task is not None and not self._has_news:
            while taken < len(deliveries) and self._has_room():
                self._take_one(deliveries[taken])
                taken += 1
        if taken < len(deliveries) or self.queued > self.settings.max_queued:
            self.notify()
        elif taken:
            self._wake.set()
        return taken

    def notify(self) -> None:
        """Schedule a read of new events from the store."""
        self._has_news = True
        if self._has_room() or self.queued > self.settings.max_queued:
            self._wake.set()

    def put(self, event_id: str, body: bytes) -> None:
        """Queue an event only in memory, so that a crash loses it."""
        item = EventPost(EventPosition(event_id, 0, 1), self.clock.now(), events=[(event_id, body)])
        self._add(item)
        self._wake.set()

    def forget(self, keys: Collection[DeliveryKey]) -> None:
        """Drop queued events that another relay has taken over."""
        for item in [each for each in self._items if each.delivery and each.delivery.key in keys]:
            line = self._lines[item.about.source]
            if not (line.is_busy and line.items[0] is item):
                self._remove(item, line)

    def retry(self) -> int:
        """Retry all events now, even if the endpoint has responded with 410, and return their number."""
        self.is_disabled = False
        self._failures, self._pause = 0, 0.0
        self._release()
        self._wake.set()
        return self.queued

    # Removing events from the store

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._take()
                self._lose_old()
            except contract.StoreError as error:
                self.events.error("webhook", error)
            self._pump()
            try:
                async with asyncio.timeout(self._seconds()):
                    await self._wake.wait()
            except TimeoutError:
                self._has_news = self._has_news or not len(self._posts)

    async def _take(self) -> None:
        while self._has_news:
            if self._has_room():
                self._has_news = False
                found = await self.store.claim(self._queue, PAGE, now=self.clock.now())
                for delivery in found:
                    self._take_one(delivery)
                self._has_news = self._has_news or len(found) == PAGE
            if self.queued > self.settings.max_queued:
                self._lose(
                    lambda _, queued: queued > self.settings.max_queued * KEPT,
                    "more than max_queued events were queued",
                )
            if not self._has_room():
                return

    def _has_room(self) -> bool:
        """Return whether more events may be claimed from the store. While none can be posted, they stay in
        the store.
        """
        return len(self._items if self._pause or self.is_disabled else self._ready) < PAGE

    def _take_one(self, delivery: Delivery) -> None:
        self._add(EventPost(EventPosition.read(delivery.recipient), delivery.created, delivery))

    def _add(self, item: EventPost) -> None:
        line = self._lines.get(item.about.source)
        if line is None:
            line = self._lines[item.about.source] = MessagePosts()
            self._ready.append(line)
        # A later claim may return older events, which other workers may have had.
        insort(
            line.items, item, lo=min(1 if line.is_busy else 0, len(line.items)), key=lambda each: each.place
        )
        self._items[item] = None
        self._events_held += item.about.events
        self._claimed += item.delivery is not None

    def _remove(self, item: EventPost, line: MessagePosts) -> None:
        line.items.remove(item)
        del self._items[item]
        self._events_held -= item.about.events
        self._claimed -= item.delivery is not None
        if not line.items and self._lines.get(item.about.source) is line:
            del self._lines[item.about.source]

    def _lose_old(self) -> None:
        before = self.clock.now() - self.settings.max_age
        self._lose(lambda item, _: item.created < before, "they were queued for longer than max_age")

    def _lose(self, is_over: Callable[[EventPost, int], bool], why: str) -> None:
        """Drop the oldest events while `is_over` is true, and store a gap event that reports it in the same
        write.
        """
        lost: list[EventPost] = []
        queued = self.queued
        for item in self._items:
            line = self._lines[item.about.source]
            if item.about.source == GAP or (line.is_busy and line.items[0] is item):
                continue
            if not is_over(item, queued):
                break
            lost.append(item)
            queued -= item.about.events
        if not lost:
            return
        for item in lost:
            self._remove(item, self._lines[item.about.source])
        count = sum(item.about.events - item.done for item in lost)
        self.events.webhook_lost(self.name, count, why)
        changes: list[Change] = []
        if not self.is_disabled:
            gaps = self._earlier_gaps()
            total, lost = count + sum(each.about.step for each in gaps), [*lost, *gaps]
            first, last = min(each.created for each in lost), max(each.created for each in lost)
            changes.append(self.make_gap(total, why, first, last))
        self._end(changes, [item.delivery for item in lost if item.delivery is not None], self.notify)

    def _end(
        self,
        changes: Sequence[Change],
        deliveries: Sequence[Delivery],
        then: Callable[[], None] | None = None,
    ) -> None:
        """Remove the deliveries of events from the store, in one write with `changes`."""
        self._leaving += len(deliveries)

        def ended() -> None:
            self._leaving -= len(deliveries)
            if then is not None:
                then()

        self.write([*changes, *map(contract.Finish, deliveries)], ended)

    def _earlier_gaps(self) -> list[EventPost]:
        """Remove and return earlier gap events that have not been posted, because the new gap event includes
        them.
        """
        line = self._lines.get(GAP)
        if line is None or line.is_busy:
            return []
        found = [item for item in line.items if not item.events]
        for item in found:
            self._remove(item, line)
        return found

    # Posting

    def _seconds(self) -> float:
        """Return the seconds until the next event may be posted."""
        now, due = self.clock.monotonic(), []
        if not self.is_disabled and len(self._posts) < self._most:
            due += [max(self._pause, now)] if self._ready else []
            due += [max(self._pause, self._later[0][0])] if self._later else []
        return min([LOOK_AGAIN, *(max(each - now, 0.0) for each in due)])

    @property
    def _most(self) -> int:
        return 1 if self._failures else CONNECTIONS

    def _pump(self) -> None:
        now = self.clock.monotonic()
        while self._later and self._later[0][0] <= now:
            self._ready.append(heapq.heappop(self._later)[2])
        if self.is_disabled or now < self._pause:
            return
        while self._ready and len(self._posts) < self._most:
            line = self._ready.popleft()
            if not line.items or line.is_busy:
                continue
            line.is_busy = True
            self._posts.start(self._post(line)).add_done_callback(lambda _: self._wake.set())

    async def _post(self, line: MessagePosts) -> None:
        """Post the events about a message in order, until one fails."""
        wait = SCHEDULE[0]  # the store cannot be read
        try:
            while line.items and not self.is_disabled:
                try:
                    answer = await self._post_item(line.items[0])
                except contract.ClaimLostError:
                    self._give_back(line.items[0], line)
                    continue
                if not answer.ok:
                    wait = self._failed(line, answer)
                    return
                self._worked(line)
                item = line.items[0]
                self._remove(item, line)
                if item.delivery is not None:
                    self._end([], [item.delivery])
        finally:
            line.is_busy = False
            if line.items:
                heapq.heappush(self._later, (self.clock.monotonic() + wait, next(self._serial), line))

    def _give_back(self, item: EventPost, line: MessagePosts) -> None:
        """Release the claim on an event in the store, because another relay may be posting it."""
        self._remove(item, line)
        assert item.delivery is not None
        self.store.release([item.delivery.key])
        self.notify()

    async def _post_item(self, item: EventPost) -> EndpointResponse:
        if not item.events and item.delivery is not None:
            try:
                item.events = await self._read(item.delivery)
            except contract.MessageNotFoundError:
                return EndpointResponse(ok=True, text="")  # there is nothing left to report
        for event_id, body in item.events[item.done :]:
            if item.delivery is not None:
                self.store.check_claim(item.delivery.message_id)
            answer = await self.endpoint.post(event_id, body)
            if not answer.ok:
                return answer
            item.done += 1
            self.delivered += 1
            self.events.metrics.webhook_events.add((self.name, "delivered"))
        return EndpointResponse(ok=True, text="")

    async def _read(self, delivery: Delivery) -> list[tuple[str, bytes]]:
        body = b"".join([piece async for piece in self.store.read_body(delivery.message_id)])
        return [
            (name.decode(), event) for name, _, event in (line.partition(b"\t") for line in body.splitlines())
        ]

    def note(self, problem: str) -> None:
        """Record and report why no event can be posted now."""
        if not self.problem:
            self.events.webhook_failing(self.name, problem)
        self.problem = problem

    def _worked(self, line: MessagePosts) -> None:
        line.attempts = 0
        was_down, self._failures, self._pause = self._pause > 0, 0, 0.0
        if was_down:
            self._release()
        if self.problem:
            self.problem = ""
            self.events.webhook_restored(self.name)

    def _release(self) -> None:
        self._ready.extend(line for _, _, line in sorted(self._later))
        self._later.clear()

    def _failed(self, line: MessagePosts, answer: EndpointResponse) -> float:
        """Record a failed post, and return the delay of the next retry in seconds."""
        self.events.metrics.webhook_events.add((self.name, "failed"))
        line.attempts += 1
        now = self.clock.monotonic()
        # Those that were under way when the first one failed are not a further sign.
        self._failures += now >= self._pause
        self.note(answer.text)
        if answer.gone:
            self.is_disabled = True
            self.events.webhook_disabled(self.name)
        if (answer.down or self._failures >= DOWN_AFTER) and now >= self._pause:
            pause = min(SCHEDULE[0] * 2 ** min(self._failures - 1, 10), PAUSE_MOST)
            self._pause = now + max(self._jittered(pause), answer.wait)
        step = SCHEDULE[min(line.attempts, len(SCHEDULE)) - 1]
        return max(self._jittered(step), answer.wait)

    def _jittered(self, seconds: float) -> float:
        return seconds * self.random.uniform(0.8, 1.2)
