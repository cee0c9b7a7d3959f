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

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Envelope, Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.common.body.writer import BodyWriter, NewMessage, check_own_message, split
from zonerelay.store.common.write.batches import BatchedUpdate, ChangeOne, changed
from zonerelay.store.common.write.replies import then
from zonerelay.store.contract import (
    SHARED,
    Change,
    Finish,
    Kept,
    KeptKeys,
    Once,
    Postpone,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    Submit,
    check_kept,
)
from zonerelay.store.redis import records as rows
from zonerelay.store.redis.claim_book import ClaimBook
from zonerelay.store.redis.claims import RedisClaims
from zonerelay.store.redis.connection import Argument, Reply, as_list
from zonerelay.store.redis.keeper import RedisHooks, RedisKeeper
from zonerelay.store.redis.reader import RedisReader
from zonerelay.store.surroundings import Surroundings

UPLOAD_KEPT = 15 * 60_000
"""Milliseconds after which the server forgets an upload that no relay goes on with."""

_log = logging.getLogger("zonerelay.store")


class Doubt(NamedTuple):
    """A commit that had no answer: the token that it was begun under, and what stands beside its message."""

    owner: bytes
    beside: Sequence[MessageId] = ()


class RedisStore(RedisReader, RedisClaims, BatchedUpdate):
    """Built by `open_redis`; belongs to the event loop that was running then."""

    def __init__(self, keeper: RedisKeeper, around: Surroundings) -> None:
        book = ClaimBook()
        RedisReader.__init__(self, keeper, book)
        RedisClaims.__init__(self, keeper, book, around.clock)
        self.uploads = 0
        self._keeper: RedisKeeper = keeper
        self._on_news = around.on_news
        self._on_lost = around.on_lost
        self._observe = around.observe_commit
        keeper.hooks = RedisHooks(
            connected=self._connected,
            counted=book.take_all_counts,
            busy=self._heard,
            lease_lost=self._lease_lost,
            beating=self._beating,
        )
        # Uploads under way and commits without an answer, with the token they were begun under.
        self._owners: dict[MessageId, bytes] = {}
        self._doubtful: dict[MessageId, Doubt] = {}
        self._doubtful_submits: set[MessageId] = set()
        self.counts = book.counts
        health = keeper.health
        self.check_writable, self.unhealthy = health.check_writable, health.unhealthy
        self.problems, self.usable = health.problems, health.usable

    async def start(self) -> None:
        """Raises StoreError."""
        await self._keeper.connect()
        self._book.take_all_counts(as_list(await self._keeper.call("HGETALL", self._prefix + b"counts")))
        last = await self._keeper.call("GET", self._prefix + b"last-id")
        if isinstance(last, bytes):
            self._book.note_id(MessageId(last.decode("ascii")))
        self._keeper.start()

    def is_counted(self) -> bool:
        return True  # the server counts

    def begin(self, envelope: Envelope) -> BodyWriter:
        return BodyWriter(self, envelope)

    def submit_chunks(
        self, message_id: MessageId, first: int, chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        owner = self._owners.setdefault(message_id, self._keeper.lease.token)
        asked = self._keeper.run_body("chunks", owner, message_id, UPLOAD_KEPT, first, *chunks)
        self._book.remember_body(message_id, first, chunks)
        return then(asked, _check_upload)

    async def submit_once(
        self, once: Once, message_id: MessageId, submit: Callable[[], asyncio.Future[None]]
    ) -> asyncio.Future[None]:
        return submit()  # the server looks for the key

    async def keep_keys(self, keys: KeptKeys) -> None:
        for identity, kept in keys:
            value = f"{kept.message_id} {kept.digest}"
            left = max(1, math.ceil((kept.until - self._clock.now()) * 1000))
            await self._keeper.call(
                "SET", self._prefix + b"once:" + identity.encode(), value, "PX", left, "NX"
            )

    def submit_message(self, given: NewMessage) -> asyncio.Future[None]:
        message, deliveries, chunks, beside, once = given
        owner = self._owners.get(message.id, self._keeper.lease.token)
        stored = message.chunks - len(chunks)
        key: tuple[Argument, ...] = ("", "", 0)
        if once is not None:
            left = max(1, math.ceil((once.until - self._clock.now()) * 1000))
            key = (once.identity, once.digest, left)
        rows = _delivery_rows(deliveries)
        others = [part for each in beside for part in self._submit_arguments(each)]
        asked = self._keeper.run(
            "commit",
            owner,
            *_head(message),
            stored,
            len(chunks),
            *key,
            *chunks,
            len(rows) // 3,
            *rows,
            *others,
        )
        self._owners.pop(message.id, None)
        self._book.remember(message)
        self._book.remember_body(message.id, stored + 1, chunks)
        started = self._clock.monotonic()

        def committed(reply: Reply) -> None:
            self._observe(self._clock.monotonic() - started)
            status, told = as_list(reply) if len(as_list(reply)) > 1 else (as_list(reply)[0], b"")
            if status == b"KEPT" and once is not None:
                self._book.forget_body(message.id)
                check_kept(once, _kept(told, once))
            _check_upload(status)
            for each in (message, *(other.message for other in beside)):
                self._book.note_id(each.id)
            self._book.take_counts(as_list(reply)[1])

        def failed(error: StoreError) -> None:
            if isinstance(error, StoreFullError):
                self._keeper.full()
            elif once is None:
                # A message with a key that is stored after all is what its client will ask for again.
                self._doubtful[message.id] = Doubt(owner, [other.message.id for other in beside])

        return then(asked, committed, failed)

    def remove_chunks(self, message_id: MessageId, count: int) -> None:
        del count  # all of it is under one key
        owner = self._owners.pop(message_id, self._keeper.lease.token)
        self._book.forget_body(message_id)
        doubt = Doubt(owner)
        try:
            self._abort(message_id, doubt)
        except StoreError:
            self._doubtful[message_id] = doubt

    def _abort(self, message_id: MessageId, doubt: Doubt) -> asyncio.Future[None]:
        # Behind what was sent of the body.
        asked = self._keeper.run_body("abort", doubt.owner, message_id, *doubt.beside)

        def aborted(reply: Reply) -> None:
            if len(as_list(reply)) > 1:
                self._book.take_counts(as_list(reply)[1])

        def failed(_: StoreError) -> None:
            self._doubtful[message_id] = doubt

        return then(asked, aborted, failed)

    async def _keep_uploads(self) -> None:
        """Keeps the server from forgetting uploads that go on. Raises StoreError."""
        if self._owners:
            arguments = [part for upload, owner in self._owners.items() for part in (owner, upload)]
            await self._keeper.run_body("keep", UPLOAD_KEPT, *arguments)

    async def _take_back(self) -> None:
        """Removes doubtful messages, now that the server is there again. Raises StoreError."""
        for message_id, doubt in list(self._doubtful.items()):
            await self._abort(message_id, doubt)
            del self._doubtful[message_id]

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
        parts = _delivery_rows(change.deliveries)
        doubtful = int(change.message.id in self._doubtful_submits)
        return ["S", *_head(change.message), doubtful, len(chunks), *chunks, len(parts) // 3, *parts]

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
            self._book.note_id(message_id)
        self._book.take_counts(counts)

    async def _update_batch(self, keys: Sequence[DeliveryKey], change: ChangeOne) -> int:
        existed = 0
        while keys:
            done, keys = await self._update_once(keys, change)
            existed += done
        return existed

    async def _update_once(
        self, keys: Sequence[DeliveryKey], change: ChangeOne
    ) -> tuple[int, list[DeliveryKey]]:
        """Returns how many existed, and which must be looked at again because they changed meanwhile."""
        arguments: list[Argument] = []
        asked: list[DeliveryKey] = []
        unchanged = 0
        for key, raw in await self.read_records(keys):
            place = rows.address(key)
            old = rows.decode(*place, raw)
            new = changed(old, change)
            if new == old:
                unchanged += 1
                continue
            goes = new is not None and new.queue != old.queue
            arguments += (*place, raw, b"" if new is None else rows.encode(new))
            arguments.append(rows.zone_field(new.queue) if new is not None and goes else b"")
            asked.append(key)
        if not asked:
            return unchanged, []

        def updated(reply: Reply) -> list[Reply]:
            _, counts, answers = as_list(reply)
            self._book.take_counts(counts)
            return as_list(answers)

        answers = await then(self._keeper.run("update", self._keeper.lease.token, *arguments), updated)
        again = [key for key, answer in zip(asked, answers, strict=True) if answer == 0]
        return unchanged + answers.count(1), again

    # --- what the keeper tells

    async def _connected(self) -> None:
        """Settles doubtful messages and lost claims after each connection."""
        await self._take_back()
        await self.reconcile()
        for queue in self._book.queues():
            self._on_news(queue)

    def _heard(self, zone: bytes) -> None:
        name = records.queue_in(zone)
        self._book.quiet.discard(name)
        self._on_news(name)

    def _lease_lost(self) -> None:
        keys = self._book.keys()
        if keys:
            _log.warning("the claims on %d deliveries were lost with the lease", len(keys))
        # Also without any: the relay's number may be another one.
        self._on_lost(keys)

    async def _beating(self) -> None:
        await self._keep_uploads()
        await self.go_round()

    # --- about the store

    def last_message_id(self) -> MessageId | None:
        return self._book.last_id

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


def _head(message: Message) -> tuple[Argument, ...]:
    return (message.id, int(message.envelope.created), records.encode_message(message))


def _delivery_rows(deliveries: Sequence[Delivery]) -> list[Argument]:
    found: list[Argument] = []
    for delivery in deliveries:
        place = rows.address(delivery.key)
        found += (place.zone, place.recipient, rows.encode(delivery))
    return found


def _kept(told: Reply, once: Once) -> Kept:
    if not isinstance(told, bytes) or told.count(b" ") != 1:
        raise StoreCorruptError(f"unreadable idempotency key {told!r:.100}")
    message_id, _, digest = told.decode("ascii", "replace").partition(" ")
    return Kept(MessageId(message_id), digest, once.until)


def _check_upload(status: Reply) -> None:
    if status == b"TAKEN":
        raise StoreError("the message id is another message's")
    if status != b"OK":
        raise StoreError("the body took so long that the spool's server has given it up")
