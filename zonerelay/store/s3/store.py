"""The S3 store: `Store` over one bucket, which several relays may share.

A message belongs to the relay that accepted it, and a claim is a mark in that relay's memory: handing out
writes nothing. Two rules make that safe. Every write of a message is conditional on no other relay having
written it, and a relay takes over a message only by such a write, after its owner's lease has run out
(`nodes`). This module puts the parts together; each part says what it promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence

from zonerelay.config.settings import S3Settings
from zonerelay.model.envelope import Envelope
from zonerelay.model.message_id import MessageId
from zonerelay.process.tasks import cancel_all
from zonerelay.store.common.body.writer import BodyWriter
from zonerelay.store.common.claims import index_claims
from zonerelay.store.common.queue_mark import QueueMark
from zonerelay.store.contract import SHARED, KeptKeys, NotKeptError, StoreError
from zonerelay.store.s3.adopt import Walks
from zonerelay.store.s3.alerts import Alerts
from zonerelay.store.s3.claims import S3Claims
from zonerelay.store.s3.keeper import S3Keeper
from zonerelay.store.s3.nodes import Nodes
from zonerelay.store.s3.objects import Objects
from zonerelay.store.s3.own_messages import OwnMessages
from zonerelay.store.s3.reader import S3Reader
from zonerelay.store.s3.records import LeaseRecord
from zonerelay.store.s3.uploads import S3Uploads
from zonerelay.store.s3.writer import ObjectWriter
from zonerelay.store.surroundings import Surroundings

CROWDED = 10_000
"""Deliveries that are due here; with more of them, new mail is left to other relays, if there are any."""
LOOK_AGAIN = 600.0
"""Seconds between two walks through the bucket when nothing has been heard."""
LAST_PATIENCE = 5.0
"""Seconds that a relay which stops gives to refusing what it has given up."""
LOAD_PATIENCE = 2.0
"""Seconds that a start waits for the queue to be read; with a longer one the relay works meanwhile."""

_log = logging.getLogger("zonerelay.store")


class S3Store(S3Reader, S3Claims):
    """Built by `open_s3`; belongs to the event loop that was running then."""

    _keeper: S3Keeper

    def __init__(self, objects: Objects, settings: S3Settings, around: Surroundings, mark: QueueMark) -> None:
        self._objects = objects
        clock = self._clock = around.clock
        self._on_news = around.on_news
        self._on_lost = around.on_lost
        mine = self._mine = OwnMessages()
        nodes = self._nodes = Nodes(objects, settings, mark, clock, self._tell)
        keeper = self._keeper = S3Keeper(
            nodes,
            on_health=around.on_health,
            recovered=self._recovered,
            lost=self._lease_lost,
            ended=self._ended,
            tick=self._tick,
        )
        objects.bucket.trouble = keeper.trouble
        writer = self._writer = ObjectWriter(objects, mine, keeper, around)
        self._uploads = S3Uploads(
            objects, mine, keeper, writer, around, owner=self._next_owner, offered=self._offered
        )
        refusals = self._refusals = self._uploads.refusals
        self._walks = Walks(
            objects, mine, nodes, writer, refusals, has_room=self._has_room, on_news=around.on_news
        )
        S3Reader.__init__(self, objects, mine, keeper)
        S3Claims.__init__(self, mine, writer, keeper, self._walks)
        self._alerts: Alerts | None = None
        if settings.queue_url:
            self._alerts = Alerts(objects.bucket, heard=self._heard, has_room=self._has_room)
        self._extensions = 0
        self._left: set[MessageId] = set()
        self._heard_offers: dict[str, int] = {}
        self._next_walk = 0.0
        self._next_round = clock.monotonic() + index_claims.RECONCILE
        self._walking: asyncio.Task[None] | None = None
        self._is_read = False
        self._is_closing = False
        self.unhealthy, self.usable, self.probe = keeper.unhealthy, keeper.usable, keeper.probe
        self.problems = keeper.problems

    # --- start and end

    async def start(self) -> None:
        """Raises StoreError, or StoreOpenError."""
        await self._nodes.join()
        self.heard_ids()
        self._keeper.start()
        self._begin_walk()
        if self._walking is not None:
            await asyncio.wait([self._walking], timeout=LOAD_PATIENCE)
        if self._alerts is not None:
            self._alerts.start()

    async def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if self._alerts is not None:
            await self._alerts.stop()
        await cancel_all(self._walking)
        await self._uploads.close()
        await self._refuse_last()
        await self._writer.drain()
        await self._keeper.close()
        was_usable = self._keeper.unhealthy() is None
        session = self._nodes.session
        self._keeper.closed()
        if was_usable:
            with contextlib.suppress(StoreError):
                await self._nodes.leave()
                if self._alerts is not None and self._mine.ids and self._nodes.company():
                    await self._alerts.say_ended(session)
        await self._objects.bucket.close()

    async def _refuse_last(self) -> None:
        try:
            async with asyncio.timeout(LAST_PATIENCE):
                await self._refusals.settle()
        except (StoreError, TimeoutError):
            left = len(self._refusals.open)
            _log.warning("%d messages were given up; what the service stores of them later is sent", left)

    # --- taking mail

    async def keep_keys(self, keys: KeptKeys) -> None:
        if keys:
            raise NotKeptError("a queue in a bucket cannot remember idempotency keys")

    def begin(self, envelope: Envelope) -> BodyWriter:
        return BodyWriter(self._uploads, envelope)

    def _has_room(self) -> bool:
        return self.ready < CROWDED

    def _next_owner(self) -> str:
        return self._nodes.session if self._has_room() or not self._nodes.company() else ""

    def _offered(self, message_id: MessageId) -> None:
        self._extensions += 1
        self._left.add(message_id)
        if self._alerts is not None:
            self._alerts.offer(message_id)

    # --- figures

    async def left_over(self) -> str:
        return SHARED

    @property
    def node(self) -> int:
        return self._nodes.number

    def last_message_id(self) -> MessageId | None:
        return self._mine.last_id

    # --- what the keeper tells

    def _tell(self) -> LeaseRecord:
        return self.lease(self._extensions, self._clock.now())

    async def _recovered(self) -> None:
        """Settles doubtful messages, now that the service is there again."""
        await self._refusals.settle()
        await self._writer.clean()
        for queue in self.known_queues():
            self._on_news(queue)

    async def _lease_lost(self) -> None:
        """Begins anew. A walk finds the mail that other relays have not taken yet."""
        handed = self._mine.reset()
        self._is_read = False
        if handed:
            _log.warning("the claims on %d deliveries were lost with the lease", len(handed))
        await self._nodes.join()
        # Also without any: the relay's number may be another one.
        self._on_lost(handed)
        self._begin_walk()

    async def _ended(self, sessions: Collection[str]) -> None:
        _log.info("%d sessions of other relays are over: looking for their mail", len(sessions))
        self._begin_walk(shares=bool(self._nodes.company()))

    async def _tick(self) -> None:
        self.heard_ids()
        if self._refusals.open:
            # Given up without trouble, or after what was put right.
            await self._refusals.settle()
        offers = {lease.session: lease.offers for lease in self._nodes.company()}
        is_new = any(number > self._heard_offers.get(session, 0) for session, number in offers.items())
        self._heard_offers = offers
        now = self._clock.monotonic()
        if self._has_room() and (self._left or is_new):
            some = list(self._left)
            self._left.clear()
            if is_new:
                self._begin_walk()
            elif some:
                await self._walks.look_at(some[:1000])
        elif now >= self._next_walk:
            self._begin_walk()
        if self._writer.unfinished:
            self._writer.finish_left()
        if now >= self._next_round:
            self._next_round = now + index_claims.RECONCILE
            for queue in self.known_queues():
                due = await self.next_due(queue)
                if self.has_ready(queue) or (due is not None and due <= self._clock.now()):
                    self._on_news(queue)

    async def _heard(self, ids: Sequence[MessageId]) -> bool:
        """Looks at mail that another relay announces. Returns false when it is left to other relays. Raises
        StoreError.
        """
        self._keeper.check_usable()
        if not ids:
            await self._keeper.probe()
            return True
        await self._walks.look_at(ids)
        # With room all of it was taken, unless others were faster.
        return self._has_room() or all(each in self._mine.ids for each in ids)

    # --- walking

    def is_counted(self) -> bool:
        return self._is_read

    def _begin_walk(self, *, shares: bool = False) -> None:
        # A share now, and what others have left of theirs a while later.
        pause = 2 * self._nodes.lease if shares else LOOK_AGAIN
        self._next_walk = self._clock.monotonic() + pause
        if self._is_closing:
            return
        before = self._walking
        self._walking = asyncio.get_running_loop().create_task(self._walk(before, shares=shares))

    async def _walk(self, before: asyncio.Task[None] | None, *, shares: bool) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            await self._walks.walk(shares=shares)
            # Not by a walk that was under way when the lease was lost: what it found has been forgotten.
            self._is_read = self._is_read or self._walking is asyncio.current_task()
        except StoreError as error:
            _log.warning("the bucket could not be looked through, it is tried again: %s", error)
            self._next_walk = 0.0
