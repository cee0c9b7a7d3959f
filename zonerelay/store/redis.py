"""The Redis spool: `Store` over one server, for any number of relays.

Owns the verbs; the scripts decide (`redis_scripts.py`), the link keeps the connection and the lease
(`redis_link.py`). What concerns one of this relay's claims is sent with the fencing token it was made
under, so that it changes nothing once the lease was lost. Answers are taken in by callbacks, in the order in
which the server gave them, whether or not somebody still waits: memory never lags behind them.

Failure: a commit whose answer was lost is taken back when the server is reachable again, unless somebody has
claimed it by then (the client was told 451). A settle whose answer was lost may be repeated. Claims of which
this relay does not know, because the answer was lost, are given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Envelope, Message
from zonerelay.model.message_id import MessageId
from zonerelay.store import records
from zonerelay.store import redis_records as rows
from zonerelay.store.base import (
    Change,
    Finish,
    Lost,
    News,
    Postpone,
    QueueCounts,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    Submit,
)
from zonerelay.store.body_writer import BodyWriter
from zonerelay.store.checks import check_own_message, split
from zonerelay.store.redis_claims import ClaimBook
from zonerelay.store.redis_link import Hooks, RedisLink
from zonerelay.store.redis_reader import RedisReader, as_list
from zonerelay.store.redis_wire import Argument, Reply
from zonerelay.store.replies import then

CLAIM_BUDGET = 500
"""Deliveries that one script looks at: the server does nothing else meanwhile."""
UPDATE_BATCH = 256
UPLOAD_KEPT = 15 * 60_000
"""Milliseconds after which the server forgets an upload that nobody goes on with."""

_log = logging.getLogger("zonerelay.store")


class RedisStore:
    """Built by `open_redis`; belongs to the event loop that was running then."""

    survives_restart = True

    def __init__(
        self,
        link: RedisLink,
        *,
        clock: Clock,
        observe_commit: Callable[[float], None],
        on_news: News,
        on_lost: Lost,
    ) -> None:
        self.uploads = 0
        self._link = link
        self._prefix = link.terms.prefix
        self._clock = clock
        self._observe = observe_commit
        self._on_news = on_news
        self._on_lost = on_lost
        self._book = ClaimBook()
        self._reader = RedisReader(link, self._book)
        self._counts: dict[str, QueueCounts] = {}
        self._last_id: MessageId | None = None
        # Zones of which the last claim has left nothing, and nothing was heard since.
        self._quiet: set[str] = set()
        self._turns: dict[str, int] = {}
        # Uploads under way and commits without an answer, with the token they were begun under.
        self._owners: dict[MessageId, bytes] = {}
        self._doubtful: dict[MessageId, bytes] = {}
        self._doubtful_submits: set[MessageId] = set()
        self._unsure_of_claims = False
        self.check_writable = link.check_writable
        self.unhealthy = link.unhealthy
        self.read_message = self._reader.read_message
        self.read_body = self._reader.read_body
        self.next_due = self._reader.next_due
        self.oldest = self._reader.oldest
        self.zones = self._reader.zones
        self.scan = self._reader.scan
        self.deliveries_of = self._reader.deliveries_of

    async def start(self) -> None:
        """Raises StoreError."""
        self._take_all_counts(as_list(await self._link.call("HGETALL", self._prefix + b"counts")))
        last = await self._link.call("GET", self._prefix + b"last-id")
        self._last_id = MessageId(last.decode("ascii")) if isinstance(last, bytes) else None
        self._link.hooks = Hooks(
            connected=self._connected,
            counted=self._take_all_counts,
            busy=self._heard,
            lease_lost=self._lease_lost,
            beating=self._beating,
        )
        self._link.start()

    # --- taking mail

    def begin(self, envelope: Envelope) -> BodyWriter:
        return BodyWriter(self, envelope)

    def submit_chunks(
        self, message_id: MessageId, first: int, chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        owner = self._owners.setdefault(message_id, self._link.token)
        asked = self._link.run_body("chunks", owner, message_id, UPLOAD_KEPT, first, *chunks)
        self._book.remember_body(message_id, first, chunks)
        return then(asked, _check_upload)

    def submit_message(
        self, message: Message, deliveries: Sequence[Delivery], chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        owner = self._owners.get(message.id, self._link.token)
        stored = message.chunks - len(chunks)
        asked = self._link.run(
            "commit", owner, *_head(message), stored, len(chunks), *chunks, *_rows(deliveries)
        )
        self._owners.pop(message.id, None)
        self._book.remember(message)
        self._book.remember_body(message.id, stored + 1, chunks)
        started = self._clock.monotonic()

        def committed(reply: Reply) -> None:
            self._observe(self._clock.monotonic() - started)
            _check_upload(as_list(reply)[0])
            self._note_id(message.id)
            self._take_counts(as_list(reply)[1])

        def failed(error: StoreError) -> None:
            if isinstance(error, StoreFullError):
                self._link.full()
            else:
                self._doubtful[message.id] = owner

        return then(asked, committed, failed)

    def remove_chunks(self, message_id: MessageId, count: int) -> None:
        del count  # all of it is under one key
        owner = self._owners.pop(message_id, self._link.token)
        self._book.forget_body(message_id)
        try:
            self._abort(message_id, owner)
        except StoreError:
            self._doubtful[message_id] = owner

    def _abort(self, message_id: MessageId, owner: bytes) -> asyncio.Future[None]:
        # Behind what was sent of the body.
        asked = self._link.run_body("abort", owner, message_id)

        def aborted(reply: Reply) -> None:
            if len(as_list(reply)) > 1:
                self._take_counts(as_list(reply)[1])

        def failed(_: StoreError) -> None:
            self._doubtful[message_id] = owner

        return then(asked, aborted, failed)

    def _note_id(self, message_id: MessageId) -> None:
        self._last_id = max(self._last_id or message_id, message_id)

    # --- handing out

    async def claim(
        self, zone: str, limit: int, *, now: float, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        skip = [records.field(domain) for domain in skip_domains]
        due = repr(now).encode("ascii")

        def command(left: int) -> tuple[Argument, ...]:
            turn = self._turns.get(zone, 0)
            return ("claim", self._link.token, rows.zone_field(zone), left, CLAIM_BUDGET, due, turn, *skip)

        self._quiet.add(zone)  # unless something is heard from here on
        found = await self._claim_all(zone, limit, command)
        if len(found) >= limit:
            self._quiet.discard(zone)
        return found

    async def claim_domain(self, zone: str, domain: str, limit: int, *, now: float) -> list[Delivery]:
        del now  # they were due when they were passed over

        def command(left: int) -> tuple[Argument, ...]:
            return (
                "claim_domain",
                self._link.token,
                rows.zone_field(zone),
                records.field(domain),
                min(left, CLAIM_BUDGET),
            )

        return await self._claim_all(zone, limit, command)

    async def _claim_all(
        self, zone: str, limit: int, command: Callable[[int], tuple[Argument, ...]]
    ) -> list[Delivery]:
        found: list[Delivery] = []
        try:
            while len(found) < limit:
                is_last, some = await self._claim_once(zone, command(limit - len(found)))
                found += some
                if is_last:
                    break
        except BaseException:
            self._quiet.discard(zone)
            self.release([delivery.key for delivery in found])
            raise
        return sorted(found, key=lambda delivery: delivery.key)

    def _claim_once(
        self, zone: str, command: tuple[Argument, ...]
    ) -> asyncio.Future[tuple[bool, list[Delivery]]]:
        name, token, *arguments = command
        assert isinstance(name, str)
        assert isinstance(token, bytes)

        def claimed(reply: Reply) -> tuple[bool, list[Delivery]]:
            answer = as_list(reply)
            if answer[0] != b"OK":
                self._link.lose_lease()
                raise StoreError("the lease on this relay's claims has ended")
            _, is_last, turn, found = answer
            if name == "claim" and isinstance(turn, int):
                self._turns[zone] = turn
            return bool(is_last), self._note_claims(rows.zone_field(zone), token, as_list(found))

        def failed(_: StoreError) -> None:
            self._unsure_of_claims = True

        def unwanted(result: tuple[bool, list[Delivery]]) -> None:
            self.release([delivery.key for delivery in result[1]])

        return then(self._link.run(name, token, *arguments), claimed, failed, unwanted)

    def _note_claims(self, zone: bytes, token: bytes, found: list[Reply]) -> list[Delivery]:
        claimed = []
        for member, record in zip(found[::2], found[1::2], strict=True):
            assert isinstance(member, bytes)
            assert isinstance(record, bytes)
            try:
                delivery = rows.decode_member(zone, member, record)
            except StoreCorruptError as error:
                # It stays claimed, so that it holds nobody up, and stored, for whoever repairs it.
                _log.error("%s", error)
                continue
            if self._book.add(delivery.key, token):
                claimed.append(delivery)
        return claimed

    def release(self, keys: Collection[DeliveryKey]) -> None:
        tokens = [(key, self._book.token(key)) for key in keys if self._book.has(key)]
        if not tokens:
            return
        self._book.drop(tokens)
        for key, _ in tokens:
            self._quiet.discard(key.zone)

        def failed(_: StoreError) -> None:
            self._unsure_of_claims = True

        arguments = [part for key, token in tokens for part in (*rows.address(key), token)]
        try:
            then(self._link.run("release", self._link.token, *arguments), _nothing, failed)
        except StoreError as error:
            failed(error)

    def has_ready(self, zone: str) -> bool:
        return zone not in self._quiet

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
        asked = self._link.run("settle", self._link.token, *arguments)

        def settled(reply: Reply) -> None:
            self._settled(as_list(reply), tokens, submitted)

        def failed(_: StoreError) -> None:
            self._doubtful_submits.update(submitted)

        await then(asked, settled, failed)

    def _submit_arguments(self, change: Submit) -> list[Argument]:
        chunks = split(change.body)
        parts = _rows(change.deliveries)
        doubtful = int(change.message.id in self._doubtful_submits)
        head = _head(change.message)
        return ["S", *head, doubtful, len(chunks), *chunks, len(parts) // 3, *parts]

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
            self._note_id(message_id)
        self._take_counts(counts)

    async def update(
        self, keys: Collection[DeliveryKey], change: Callable[[Delivery], Delivery | None]
    ) -> int:
        wanted = list(dict.fromkeys(keys))
        existed = 0
        for start in range(0, len(wanted), UPDATE_BATCH):
            batch = wanted[start : start + UPDATE_BATCH]
            while batch:
                done, batch = await self._update_batch(batch, change)
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
            self._take_counts(counts)
            return as_list(answers)

        answers = await then(self._link.run("update", self._link.token, *arguments), updated)
        again = [key for key, answer in zip(asked, answers, strict=True) if answer == 0]
        return unchanged + answers.count(1), again

    # --- figures

    def counts(self) -> dict[str, QueueCounts]:
        return {zone: QueueCounts(c.ready, c.deferred, c.held) for zone, c in self._counts.items()}

    def last_message_id(self) -> MessageId | None:
        return self._last_id

    @property
    def node(self) -> int:
        return self._link.number

    def _take_counts(self, reply: Reply) -> None:
        """Of the zones that were changed: name, ready, deferred, held."""
        answer = as_list(reply)
        for at in range(0, len(answer), 4):
            zone, *numbers = answer[at : at + 4]
            assert isinstance(zone, bytes)
            name = records.unfield(zone)
            self._quiet.discard(name)
            ready, deferred, held = (int(number) for number in numbers if isinstance(number, bytes))
            self._counts[name] = QueueCounts(ready, deferred, held)

    def _take_all_counts(self, reply: list[Reply]) -> None:
        counts: dict[str, QueueCounts] = {name: QueueCounts() for name in self._counts}
        for field, number in zip(reply[::2], reply[1::2], strict=True):
            assert isinstance(field, bytes)
            assert isinstance(number, bytes)
            zone = counts.setdefault(records.unfield(field[2:]), QueueCounts())
            setattr(zone, {b"r": "ready", b"d": "deferred", b"h": "held"}[field[:1]], int(number))
        self._counts = counts

    # --- what the link tells

    async def _connected(self) -> None:
        """Once more or for the first time: put right what got lost on the way."""
        for message_id, owner in list(self._doubtful.items()):
            await self._abort(message_id, owner)
            del self._doubtful[message_id]
        await self._reconcile()
        for zone in self._counts:
            self._on_news(zone)

    async def _reconcile(self) -> None:
        """Give back claims that hang on this relay's lease without its knowing."""
        self._unsure_of_claims = False
        token = self._link.token
        stored = await self._link.call("ZRANGE", self._prefix + b"claims", token, token, "BYSCORE")
        unknown = []
        for member in as_list(stored):
            assert isinstance(member, bytes)
            key = rows.parse_claim(member)
            if not self._book.has(key):
                unknown.append(key)
        for start in range(0, len(unknown), UPDATE_BATCH):
            some = unknown[start : start + UPDATE_BATCH]
            arguments = [part for key in some for part in (*rows.address(key), token)]
            await self._link.run("release", b"", *arguments)

    def _heard(self, zone: bytes) -> None:
        name = records.unfield(zone)
        self._quiet.discard(name)
        self._on_news(name)

    def _lease_lost(self) -> None:
        keys = self._book.keys()
        if keys:
            _log.warning("the claims on %d deliveries were lost with the lease", len(keys))
        # Also without any: the relay's number may be another one.
        self._on_lost(keys)

    async def _beating(self) -> None:
        if self._owners:
            arguments = [part for upload, owner in self._owners.items() for part in (owner, upload)]
            await self._link.run_body("keep", UPLOAD_KEPT, *arguments)
        if self._unsure_of_claims:
            await self._reconcile()

    # --- health

    async def probe(self) -> None:
        self._link.check_writable()
        await self._link.call("SET", self._prefix + b"probe", int(self._clock.now()))

    async def close(self) -> None:
        await self._link.close()
        self._book.clear()


def _head(message: Message) -> tuple[Argument, ...]:
    return (message.id, int(message.envelope.created), records.encode_message(message))


def _rows(deliveries: Sequence[Delivery]) -> list[Argument]:
    found: list[Argument] = []
    for delivery in deliveries:
        place = rows.address(delivery.key)
        found += (place.zone, place.recipient, rows.encode(delivery))
    return found


def _check_upload(status: Reply) -> None:
    if status == b"TAKEN":
        raise StoreError("the message id is another message's")
    if status != b"OK":
        raise StoreError("the body took so long that the spool's server has given it up")


def _nothing(_: Reply) -> None:
    """Nothing to learn from it."""
