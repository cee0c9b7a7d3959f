"""The Redis spool: `Store` over one server, for any number of relays.

The scripts decide (`scripts`), the keeper has the connection and the lease, and this module puts the parts
together and settles. A request about a claim carries the fencing token of the claim, so it changes nothing
after the lease is lost. Callbacks take in the answers in the order in which the server gave them, even when
their callers have left, so memory never lags behind the server.

Failure: a commit whose answer was lost is taken back when the server is reachable again, unless another
relay has claimed it by then (the client was told 451). A settle whose answer was lost may be repeated.
Claims that this relay does not know of, because an answer was lost, are given back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Envelope
from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.common.body.chunks import check_own_message, split
from zonerelay.store.common.body.writer import BodyWriter
from zonerelay.store.common.write.batches import in_batches
from zonerelay.store.common.write.replies import then
from zonerelay.store.contract import SHARED, Change, Finish, Postpone, StoreError, Submit
from zonerelay.store.redis import records as rows
from zonerelay.store.redis.claim_book import ClaimBook
from zonerelay.store.redis.claims import RedisClaims
from zonerelay.store.redis.connection import Argument, Reply, as_list
from zonerelay.store.redis.counts import RedisCounts
from zonerelay.store.redis.keeper import Hooks, RedisKeeper
from zonerelay.store.redis.reader import RedisReader
from zonerelay.store.redis.uploads import RedisUploads, delivery_rows, head
from zonerelay.store.surroundings import Surroundings

UPDATE_BATCH = 256

_log = logging.getLogger("zonerelay.store")


class RedisStore:
    """Built by `open_redis`; belongs to the event loop that was running then."""

    def __init__(
        self,
        keeper: RedisKeeper,
        around: Surroundings,
    ) -> None:
        self._keeper = keeper
        self._prefix = keeper.terms.prefix
        self._clock = around.clock
        self._on_news = around.on_news
        self._on_lost = around.on_lost
        book, figures = self._book, self._figures = ClaimBook(), RedisCounts()
        reader = self._reader = RedisReader(keeper, book)
        claims = self._claims = RedisClaims(keeper, book, figures, around.clock)
        self._uploads = RedisUploads(
            keeper, book, figures, clock=around.clock, observe_commit=around.observe_commit
        )
        self._doubtful_submits: set[MessageId] = set()
        self.claim, self.claim_new = claims.claim, claims.claim_new
        self.claim_domain, self.release = claims.claim_domain, claims.release
        self.has_ready = claims.has_ready
        self.read_message, self.read_body = reader.read_message, reader.read_body
        self.read_messages = reader.read_messages
        self.next_due, self.oldest, self.zones = reader.next_due, reader.oldest, reader.zones
        self.scan, self.deliveries_of = reader.scan, reader.deliveries_of
        self.counts = figures.counts
        self.unhealthy = keeper.unhealthy
        self.problems = keeper.problems
        self.usable = keeper.usable

    async def start(self) -> None:
        """Raises StoreError."""
        self._figures.take_all(as_list(await self._keeper.call("HGETALL", self._prefix + b"counts")))
        last = await self._keeper.call("GET", self._prefix + b"last-id")
        if isinstance(last, bytes):
            self._figures.note_id(MessageId(last.decode("ascii")))
        self._keeper.hooks = Hooks(
            connected=self._connected,
            counted=self._figures.take_all,
            busy=self._heard,
            lease_lost=self._lease_lost,
            beating=self._beating,
        )
        self._keeper.start()

    def is_counted(self) -> bool:
        return True  # the server counts

    def begin(self, envelope: Envelope) -> BodyWriter:
        return BodyWriter(self._uploads, envelope)

    # --- settling

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        del lazy  # what is sent in one turn of the loop shares its sync anyway
        if not changes:
            return
        arguments: list[Argument] = []
        tokens: list[tuple[DeliveryKey, bytes]] = []
        submitted: list[MessageId] = []
        for change in changes:
            if isinstance(change, Submit):
                check_own_message(change)
                arguments += self._submit_arguments(change)
                submitted.append(change.message.id)
                continue
            key = change.delivery.key
            token = self._book.token(key)
            tokens.append((key, token))
            arguments += ("F" if isinstance(change, Finish) else "P", *rows.address(key), token)
            if isinstance(change, Postpone):
                arguments.append(rows.encode(change.delivery))
        asked = self._keeper.run("settle", self._keeper.lease.token, *arguments)

        def settled(reply: Reply) -> None:
            self._settled(as_list(reply), tokens, submitted)

        def failed(_: StoreError) -> None:
            self._doubtful_submits.update(submitted)

        await then(asked, settled, failed)

    def _submit_arguments(self, change: Submit) -> list[Argument]:
        chunks = split(change.body)
        parts = delivery_rows(change.deliveries)
        doubtful = int(change.message.id in self._doubtful_submits)
        return ["S", *head(change.message), doubtful, len(chunks), *chunks, len(parts) // 3, *parts]

    def _settled(
        self, answer: list[Reply], tokens: list[tuple[DeliveryKey, bytes]], submitted: list[MessageId]
    ) -> None:
        if answer[0] != b"OK":
            raise StoreError("some claims were lost: what belongs together must be settled by itself")
        _, counts, lost = answer
        if lost:
            _log.warning("%s deliveries were settled after their claim was lost: nothing was changed", lost)
        self._book.drop(tokens)
        for message_id in submitted:
            self._doubtful_submits.discard(message_id)
            self._figures.note_id(message_id)
        self._figures.take(counts)

    async def update(
        self, keys: Collection[DeliveryKey], change: Callable[[Delivery], Delivery | None]
    ) -> int:
        existed = 0
        for batch in in_batches(keys, UPDATE_BATCH):
            left = batch
            while left:
                done, left = await self._update_batch(left, change)
                existed += done
        return existed

    async def _update_batch(
        self, keys: list[DeliveryKey], change: Callable[[Delivery], Delivery | None]
    ) -> tuple[int, list[DeliveryKey]]:
        """How many existed, and which must be looked at again because they changed meanwhile."""
        arguments: list[Argument] = []
        asked: list[DeliveryKey] = []
        unchanged = 0
        for key, raw in await self._reader.read_records(keys):
            place = rows.address(key)
            old = rows.decode(*place, raw)
            new = change(old)
            if new is not None and new.key != key:
                raise StoreError("a change may not turn a delivery into another one")
            if new == old:
                unchanged += 1
                continue
            arguments += (*place, raw, b"" if new is None else rows.encode(new))
            asked.append(key)
        if not asked:
            return unchanged, []

        def updated(reply: Reply) -> list[Reply]:
            _, counts, answers = as_list(reply)
            self._figures.take(counts)
            return as_list(answers)

        answers = await then(self._keeper.run("update", self._keeper.lease.token, *arguments), updated)
        again = [key for key, answer in zip(asked, answers, strict=True) if answer == 0]
        return unchanged + answers.count(1), again

    # --- what the keeper tells

    async def _connected(self) -> None:
        """Once more or for the first time: put right what got lost on the way."""
        await self._uploads.take_back()
        await self._claims.reconcile()
        for zone in self._figures.zones():
            self._on_news(zone)

    def _heard(self, zone: bytes) -> None:
        name = records.unfield(zone)
        self._figures.quiet.discard(name)
        self._on_news(name)

    def _lease_lost(self) -> None:
        keys = self._book.keys()
        if keys:
            _log.warning("the claims on %d deliveries were lost with the lease", len(keys))
        # Also without any: the relay's number may be another one.
        self._on_lost(keys)

    async def _beating(self) -> None:
        await self._uploads.keep()
        await self._claims.go_round()

    # --- about the store

    def last_message_id(self) -> MessageId | None:
        return self._figures.last_id

    async def left_over(self) -> str:
        return SHARED

    @property
    def node(self) -> int:
        return self._keeper.lease.number

    async def probe(self) -> None:
        await self._keeper.run("probe", int(self._clock.now()))

    async def close(self) -> None:
        await self._keeper.close()
        self._book.clear()
