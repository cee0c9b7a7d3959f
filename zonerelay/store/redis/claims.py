"""Hands out deliveries from the Redis spool, and gives them back.

An answer is taken in even when its caller has left; what it claimed for that caller is given back. A claim
whose answer was lost is found by comparing the server's claims with the claim book (`reconcile`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator

from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common import records
from zonerelay.store.common.claims import index_claims
from zonerelay.store.common.write.replies import then
from zonerelay.store.contract import StoreCorruptError, StoreError
from zonerelay.store.redis import records as rows
from zonerelay.store.redis.claim_book import ClaimBook
from zonerelay.store.redis.connection import Argument, Reply, as_list, pairs
from zonerelay.store.redis.keeper import RedisKeeper

CLAIM_BUDGET = 500
"""Deliveries that one script looks at: the server does nothing else meanwhile."""
RELEASE_BATCH = 256

_log = logging.getLogger("zonerelay.store")


class RedisClaims:
    """The claims of one relay."""

    def __init__(self, keeper: RedisKeeper, book: ClaimBook, clock: Clock) -> None:
        self._keeper = keeper
        self._clock = clock
        self._book = book
        self._turns: dict[QueueName, int] = {}
        # What the claims that go on have found so far; what is given back meanwhile leaves them.
        self._finding: list[dict[DeliveryKey, Delivery]] = []
        # An answer was lost that may have brought claims, or a release did not arrive.
        self.is_unsure = False
        self._next_round = float("-inf")
        self._unreadable: set[bytes] = set()
        """Rows of `claims` that stay there."""

    async def claim(
        self, queue: QueueName, limit: int, *, now: float, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        self._book.quiet.add(queue)  # unless something is heard from here on
        command = self._command(queue, repr(now).encode("ascii"), b"", skip_domains)
        found = await self._claim_all(queue, limit, command)
        if len(found) >= limit:
            self._book.quiet.discard(queue)
        return found

    async def claim_new(
        self, queue: QueueName, limit: int, *, since: MessageId, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        command = self._command(queue, b"0", since.encode("ascii"), skip_domains)
        return await self._claim_all(queue, limit, command)

    def _command(
        self, queue: QueueName, due: bytes, since: bytes, skip_domains: Collection[str]
    ) -> Callable[[int], tuple[Argument, ...]]:
        skip = [records.field(domain) for domain in skip_domains]
        name = rows.zone_field(queue)

        def command(left: int) -> tuple[Argument, ...]:
            return ("claim", name, left, CLAIM_BUDGET, due, self._turns.get(queue, 0), since, *skip)

        return command

    async def claim_domain(self, queue: QueueName, domain: str, limit: int, *, now: float) -> list[Delivery]:
        del now  # they were due when they were passed over

        def command(left: int) -> tuple[Argument, ...]:
            return ("claim_domain", rows.zone_field(queue), records.field(domain), min(left, CLAIM_BUDGET))

        return await self._claim_all(queue, limit, command)

    async def _claim_all(
        self, queue: QueueName, limit: int, command: Callable[[int], tuple[Argument, ...]]
    ) -> list[Delivery]:
        self._keeper.lease.check()
        found: dict[DeliveryKey, Delivery] = {}
        self._finding.append(found)
        try:
            while len(found) < limit:
                is_last, _ = await self._claim_once(queue, command(limit - len(found)), found)
                if is_last:
                    break
        except BaseException:
            self._book.quiet.discard(queue)
            self.release(list(found))
            raise
        finally:
            self._finding = [each for each in self._finding if each is not found]
        return sorted(found.values(), key=lambda delivery: delivery.key)

    def _claim_once(
        self, queue: QueueName, command: tuple[Argument, ...], found: dict[DeliveryKey, Delivery]
    ) -> asyncio.Future[tuple[bool, list[Delivery]]]:
        name, *arguments = command
        assert isinstance(name, str)
        token = self._keeper.lease.token

        def claimed(reply: Reply) -> tuple[bool, list[Delivery]]:
            answer = as_list(reply)
            if answer[0] != b"OK":
                self._keeper.lease.lose()
                raise StoreError("the lease on this relay's claims has ended")
            _, is_last, turn, pairs = answer
            if name == "claim" and isinstance(turn, int):
                self._turns[queue] = turn
            some = self._note_claims(rows.zone_field(queue), token, as_list(pairs))
            found.update((delivery.key, delivery) for delivery in some)
            return bool(is_last), some

        def unwanted(result: tuple[bool, list[Delivery]]) -> None:
            self.release([delivery.key for delivery in result[1]])

        return then(self._keeper.run(name, token, *arguments), claimed, self._doubt, unwanted)

    def _doubt(self, _: StoreError) -> None:
        self.is_unsure = True

    def _note_claims(self, zone: bytes, token: bytes, found: list[Reply]) -> list[Delivery]:
        claimed = []
        for member, record in pairs(found):
            try:
                delivery = rows.decode_member(zone, member, record)
            except StoreCorruptError as error:
                # It stays claimed, so that it delays no other, and stored, until an operator repairs it.
                self._unreadable.add(b"%b %b" % (zone, member))
                _log.error("%s", error)
                continue
            if self._book.add(delivery.key, token):
                claimed.append(delivery)
        return claimed

    def release(self, keys: Collection[DeliveryKey]) -> None:
        for found in self._finding:
            for key in keys:
                found.pop(key, None)
        tokens = [(key, self._book.token(key)) for key in keys if self._book.has(key)]
        if not tokens:
            return
        self._book.drop(tokens)
        for key, _ in tokens:
            self._book.quiet.discard(key.queue)

        arguments = [part for key, token in tokens for part in (*rows.address(key), token)]
        try:
            then(self._keeper.run("release", self._keeper.lease.token, *arguments), _nothing, self._doubt)
        except StoreError as error:
            self._doubt(error)

    def has_ready(self, queue: QueueName) -> bool:
        return queue not in self._book.quiet

    async def go_round(self) -> None:
        """Raises StoreError."""
        now = self._clock.monotonic()
        if self.is_unsure or now >= self._next_round:
            self._next_round = now + index_claims.RECONCILE
            await self.reconcile()

    async def reconcile(self) -> None:
        """Gives back claims that hang on this relay's lease unknown to it."""
        self.is_unsure = False
        token = self._keeper.lease.token
        claims = self._keeper.prefix + b"claims"
        # In the turn of the answer: the book has what was claimed or ended before, and nothing of what came
        # after.
        unknown = await then(
            self._keeper.call("ZRANGE", claims, token, token, "BYSCORE"),
            lambda stored: [key for key in self._claimed(stored) if not self._book.has(key)],
        )
        for start in range(0, len(unknown), RELEASE_BATCH):
            some = unknown[start : start + RELEASE_BATCH]
            arguments = [part for key in some for part in (*rows.address(key), token)]
            await self._keeper.run("release", b"", *arguments)

    def _claimed(self, stored: Reply) -> Iterator[DeliveryKey]:
        for member in as_list(stored):
            assert isinstance(member, bytes)
            if member not in self._unreadable:
                yield rows.parse_claim(member)


def _nothing(_: Reply) -> None:
    """The answer holds nothing to learn."""
