"""Small builders, so that a store test says only what it is about."""

from pathlib import Path

from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import Envelope, Mailbox, Message, MessageId, Origin, Recipient
from zonerelay.model.reply import Attempt, Reply
from zonerelay.store.contract import IdempotencyKey, QueueStore
from zonerelay.store.queue.body import split

NOW = 1_700_000_000.0


def message_id(number: int) -> MessageId:
    return MessageId(f"{number:016x}")


def envelope_for(
    identity: MessageId, *recipients: str, created: float = NOW, sender: str = "from@example.org"
) -> Envelope:
    return Envelope(
        id=identity,
        sender=Mailbox(sender),
        recipients=tuple(Recipient(address=Mailbox(address)) for address in recipients),
        created=created,
        origin=Origin(client_address="127.0.0.1", helo="client.example.org", stranger=True),
    )


def delivery_for(
    envelope: Envelope,
    recipient: str,
    *,
    zone: str = "default",
    next_attempt: float = 0.0,
    held: bool = False,
) -> Delivery:
    return Delivery(
        queue=queue_of(zone),
        message_id=envelope.id,
        recipient=Mailbox(recipient),
        created=envelope.created,
        next_attempt=next_attempt,
        held=held,
    )


def attempt(at: float = NOW) -> Attempt:
    return Attempt(
        at=at, reply=Reply(450, "2.0", "later, please"), host="mx.example.net", peer="192.0.2.1:25"
    )


def own_message(identity: MessageId, body: bytes, recipient: str) -> tuple[Message, Delivery]:
    """A message as a DSN builder makes it."""
    envelope = envelope_for(identity, recipient, sender="")
    return (
        Message(envelope=envelope, size=len(body), chunks=len(split(body))),
        delivery_for(envelope, recipient),
    )


async def store_message(
    store: QueueStore,
    number: int,
    *recipients: str,
    body: bytes = b"Subject: x\r\n\r\nhello\r\n",
    zone: str = "default",
    next_attempt: float = 0.0,
    held: bool = False,
    created: float = NOW,
    once: IdempotencyKey | None = None,
) -> list[Delivery]:
    """Commit one message with one delivery per recipient (default: one)."""
    addresses = recipients or ("to@example.net",)
    envelope = envelope_for(message_id(number), *addresses, created=created)
    deliveries = [
        delivery_for(envelope, address, zone=zone, next_attempt=next_attempt, held=held)
        for address in addresses
    ]
    async with store.begin(envelope) as writer:
        await writer.write(body)
        await writer.commit(deliveries, once=once)
    return deliveries


async def body_of(store: QueueStore, identity: MessageId) -> bytes:
    return b"".join([chunk async for chunk in store.read_body(identity)])


async def claim_ids(store: QueueStore, *, now: float = NOW, limit: int = 100) -> list[int]:
    return [int(d.message_id, 16) for d in await store.claim(queue_of("default"), limit, now=now)]


def flip(path: Path, at: int) -> None:
    """Four octets of a file, in place: who has mapped it sees them."""
    with path.open("r+b") as file:
        file.seek(at)
        octets = file.read(4)
        file.seek(at)
        file.write(bytes(octet ^ 0xFF for octet in octets))


def table_parts(table: bytes) -> tuple[int, int]:
    """Return where the index of a LevelDB table begins, and where the list of its filter block does."""
    values, value, shift = list[int](), 0, 0
    for octet in table[-48:]:
        value |= (octet & 0x7F) << shift
        shift += 7
        if octet < 0x80:
            values.append(value)
            value = shift = 0
    return values[2], values[0]
