"""The big queue: which deliveries it holds, where they go, and how it is put into a spool.

Half are deferred over a day, two fifths are for one domain whose host refuses connections, and a tenth is
spread over many domains. It is written through the store itself, in batches, because a million
SMTP transactions would measure something else.
"""

import asyncio
import base64
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.dns import Records
from zonerelay.config.settings import Backend, Settings, SpoolSettings
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import Envelope, Mailbox, Message, MessageIdSource, Origin, Recipient
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import OwnMessage, Store
from zonerelay.store.open import open_store

DEAD = "dead.example"
TOGETHER = 500
"""Messages in one write."""
DAY = 86_400.0
HEADER = b"From: <list@example.org>\r\nTo: undisclosed-recipients:;\r\nSubject: big queue\r\n\r\n"
OTHERS = 10


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many of each kind. `size` is a body's, in octets."""

    deferred: int
    dead: int
    spread: int
    domains: int
    size: int = 1024

    @property
    def total(self) -> int:
        return self.deferred + self.dead + self.spread

    def recipients(self, randomness: random.Random) -> Iterator[tuple[str, bool]]:
        """Every recipient and whether it is deferred, kinds mixed as they would have come in."""
        kinds = ["deferred"] * self.deferred + ["dead"] * self.dead + ["spread"] * self.spread
        randomness.shuffle(kinds)
        for number, kind in enumerate(kinds):
            if kind == "dead":
                yield f"r{number}@{DEAD}", False
            else:
                yield f"r{number}@{domain(number % self.domains)}", kind == "deferred"


STANDARD = Crowd(deferred=500_000, dead=400_000, spread=100_000, domains=10_000)


def domain(number: int) -> str:
    return f"crowd{number}.example"


def address(number: int) -> str:
    """A loopback address for each domain, so that each is a destination."""
    return f"127.{64 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def names(crowd: Crowd) -> dict[str, Records]:
    """The DNS of the crowd, and of the other mail (`dN.example.com`)."""
    found: dict[str, Records] = {
        # The sink listens on IPv4 only: connections to this one are refused.
        DEAD: {"MX": ["10 mx.dead.example"], "TTL": 3600},
        "mx.dead.example": {"AAAA": ["::1"], "TTL": 3600},
    }
    for number in range(crowd.domains):
        found |= _host(domain(number), address(number + 1))
    for number in range(OTHERS):
        found |= _host(f"d{number}.example.com", f"127.32.0.{number + 1}")
    return found


def _host(name: str, at: str) -> dict[str, Records]:
    return {name: {"MX": [f"10 mx.{name}"], "TTL": 3600}, f"mx.{name}": {"A": [at], "TTL": 3600}}


async def fill(path: Path, crowd: Crowd, say: Callable[[int], None]) -> None:
    """Write the crowd into a new spool; `say` is told how many are written."""
    async with opened(path) as store:
        clock = SystemClock()
        ids = MessageIdSource(clock)
        randomness = random.Random(1)
        # Every body another one, or compression would make nothing of them.
        text = base64.b64encode(randomness.randbytes(1 << 20))
        now = clock.now()
        batch: list[OwnMessage] = []
        written = 0
        for recipient, is_deferred in crowd.recipients(randomness):
            due = now + randomness.uniform(0, DAY) if is_deferred else 0.0
            start = randomness.randrange(len(text) - crowd.size)
            body = HEADER + text[start : start + crowd.size] + b"\r\n"
            batch.append(_message(ids, recipient, created=now, due=due, body=body))
            if len(batch) == TOGETHER:
                await store.settle(batch)
                written += len(batch)
                batch.clear()
                say(written)
        await store.settle(batch)
        await asyncio.sleep(0.1)


def _message(ids: MessageIdSource, recipient: str, *, created: float, due: float, body: bytes) -> OwnMessage:
    envelope = Envelope(
        id=ids.next(),
        sender=Mailbox("list@example.org"),
        recipients=(Recipient(address=Mailbox(recipient)),),
        created=created,
        origin=Origin(client_address="127.0.0.1", helo="client.example.org"),
    )
    delivery = Delivery(
        queue=queue_of("default"),
        message_id=envelope.id,
        recipient=Mailbox(recipient),
        created=created,
        next_attempt=due,
    )
    return OwnMessage(Message(envelope=envelope, size=len(body), chunks=1), body, (delivery,))


@contextlib.asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Store]:
    spool = SpoolSettings(backend=Backend.LEVELDB, path=path, min_free_space=0)
    store = await open_store(Settings(spool=spool), StoreContext(clock=SystemClock()))
    try:
        yield store
    finally:
        await store.close()
