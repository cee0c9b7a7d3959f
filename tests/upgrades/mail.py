"""The queue that every fixture holds: one message for each thing that a spool has to remember.

Every member of a message and of a delivery has two values at least in it, so a new one changes what is stored
(`test_fixtures.py`). Ids and times are always the same.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import structs

from zonerelay.model import envelope as envelopes
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery, DeliveryKey, queue_of, webhook_queue
from zonerelay.model.envelope import BodyType, Envelope, Mailbox, Message, MessageId, Notify, Origin, Priority
from zonerelay.model.reply import Attempt, Reply
from zonerelay.store.contract import BodyFacts, Finish, OwnMessage, Postpone, Store, StoredKey

NOW = 1_700_000_000.0
Expected = dict[str, dict[str, Any]]
"""By the id of each message: it, its open deliveries and the SHA-256 of its body, as JSON has them."""
ACT = "0a1b2c3d"
"""The id of the operator's act that has held mail."""
KEYS = [
    (f"{number:032x}", StoredKey(MessageId(f"{int(NOW * 1000):011x}{number:03x}00"), f"{number:x}" * 32, 4e9))
    for number in (1, 255)
]
"""Idempotency keys by their identities: of a message in the queue, and of one that has left. They are valid
until 2096, because Redis goes by its own clock.
"""
FULL = "full.example"
"""A claim passes this domain over."""
HEAD = b"Received: from app.example.org\r\nFrom: <app@example.org>\r\nSubject: a fixture\r\n\r\n"
LARGE = HEAD + b"".join(b"%06d a line of a body that takes several chunks\r\n" % n for n in range(6000))


@dataclass(frozen=True, slots=True)
class Mail:
    """One message as it comes in, and what becomes of its deliveries.

    `after` are the changed members of a delivery by its recipient; `None`: it is delivered.
    """

    envelope: Envelope
    body: bytes
    facts: BodyFacts
    deliveries: tuple[Delivery, ...]
    after: dict[str, dict[str, Any] | None]  # Any: `replace` takes them by name


LATER = Attempt(at=NOW - 60, reply=Reply(451, "7.1", "greylisted,\ntry later"), host="mx.example.net")
PEER = Attempt(at=NOW - 30, reply=Reply(421, "4.2", "gone"), host="mx", peer="192.0.2.1:25", in_doubt=True)
OURS = Attempt(at=NOW - 10, reply=Reply(450, "", "no address for the host"), local=True)


def queue() -> list[Mail]:
    return [
        _mail(1, "ready@example.org", "one@example.net"),
        _mail(
            2,
            "deferred@example.org",
            *("greylisted@example.net", "in-doubt@example.com", "no-address@example.invalid"),
            after={
                "greylisted@example.net": {"attempts": 1, "next_attempt": NOW + 300, "last": LATER},
                "in-doubt@example.com": {"attempts": 12, "next_attempt": NOW + 86400.25, "last": PEER},
                "no-address@example.invalid": {"next_attempt": NOW + 60, "last": OURS, "warned": True},
            },
        ),
        _mail(
            3, "held@example.org", "held@example.net", after={"held@example.net": {"held": True, "act": ACT}}
        ),
        _mail(
            4,
            "partly@example.org",
            *("gone@example.net", "left@example.net", "waits@example.com"),
            after={
                "gone@example.net": None,
                "waits@example.com": {"attempts": 1, "next_attempt": NOW + 7200, "last": LATER},
            },
        ),
        _mail(5, "large@example.org", "large@example.net", "other@example.com", body=LARGE),
        _mail(
            6,
            "wishes@example.org",
            *("success@example.net", "never@example.net"),
            notify=(Notify.SUCCESS | Notify.FAILURE | Notify.DELAY, Notify.NEVER),
            orcpt="rfc822;an+2Bother@example.net",
            ret=envelopes.Ret.HDRS,
            envid="QQ314159",
        ),
        _mail(7, "urgent@example.org", "urgent@example.net", priority=Priority.HIGH),
        _mail(8, "letters@example.org", "reader@example.net", "reader@example.com", priority=Priority.BULK),
        _mail(
            9,
            "eightbit@example.org",
            "eightbit@example.net",
            body=HEAD + bytes(range(0x80, 0x100)) + b"\r\n..\r\n.a dot, and NUL: \0\r\n",
            facts={"eight_bit": True, "long_lines": True},
        ),
        _mail(10, "übung@bücher.example", '"jörg müller"@bücher.example', "plain@example.net", smtputf8=True),
        _mail(
            11,
            "whole@example.org",
            '"whole 100%"@example.net',
            zone="other",
            origin=Origin(
                client_address="2001:db8::1",
                client_port=40000,
                helo="client.example.org",
                protocol="ESMTPSA",
                listener="submission",
                user="app",
                tls="TLSv1.3",
                certificate="ab" * 32,
                stranger=True,
            ),
            facts={
                "headers": (("From", "Jörg <app@example.org>"), ("Subject", "a fixture")),
                "plain_lines": True,
                "body_hash": "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=",
                "trace": ("listener=submission bare_lf=3",),
            },
        ),
        _mail(
            12,
            "released@example.org",
            "tomorrow@example.net",
            accepted=NOW - 1.5,
            created=NOW + 3600,
            next_attempt=NOW + 3600,
        ),
        _mail(13, "passed@example.org", f"one@{FULL}", f"two@{FULL}"),
        _mail(15, "confidential@example.org", "confidential@example.net", require_tls=True),
        _mail(
            16,
            "",
            f"{int(NOW * 1000):011x}00100.1.1@webhook.invalid",
            body=b'{"type":"message.delivered"}',
            zone=webhook_queue("shop").text,
            origin=Origin(protocol="webhook"),
        ),
        # Its id is the highest that was ever given.
        _mail(255, "finished@example.org", "finished@example.net", after={"finished@example.net": None}),
    ]


def report() -> OwnMessage:
    """A report of ours, stored together with an outcome."""
    mail = _mail(14, "", "app@example.org")
    return OwnMessage(Message(envelope=mail.envelope, size=len(HEAD), chunks=1), HEAD, mail.deliveries)


def _mail(
    number: int,
    sender: str,
    *recipients: str,
    body: bytes = HEAD + b"a line\r\n",
    facts: BodyFacts | None = None,
    after: dict[str, dict[str, Any] | None] | None = None,
    notify: tuple[Notify, ...] = (Notify.UNSET, Notify.UNSET, Notify.UNSET),
    orcpt: str = "",
    zone: str = "default",
    accepted: float = NOW,
    created: float = NOW,
    next_attempt: float = 0.0,
    **envelope: Any,
) -> Mail:
    wished = tuple(
        envelopes.Recipient(address=Mailbox(address), notify=wish, orcpt=orcpt)
        for address, wish in zip(recipients, notify, strict=False)
    )
    whole = Envelope(
        id=MessageId(f"{int(NOW * 1000):011x}{number:03x}00"),
        sender=Mailbox(sender),
        recipients=wished,
        created=accepted,
        body=BodyType.EIGHT_BIT if (facts or {}).get("eight_bit") else BodyType.SEVEN_BIT,
        **envelope,
    )
    deliveries = tuple(
        Delivery(
            queue=queue_of(zone, whole.priority),
            message_id=whole.id,
            recipient=one.address,
            created=created,
            next_attempt=next_attempt,
            notify=one.notify,
            orcpt=one.orcpt,
        )
        for one in wished
    )
    return Mail(whole, body, facts or {}, deliveries, after or {})


async def write_queue(store: Store) -> Expected:
    """Takes the mail as a running relay would, and leaves some delivered, deferred, held, passed over."""
    expected: Expected = {}
    left = dict[DeliveryKey, Delivery | None]()
    bodies = dict[MessageId, bytes]()
    messages = dict[MessageId, Message]()
    for each in queue():
        async with store.begin(each.envelope) as writer:
            await writer.write(each.body)
            messages[each.envelope.id] = await writer.commit(each.deliveries, **each.facts)
        bodies[each.envelope.id] = each.body
        for delivery in each.deliveries:
            change = each.after.get(delivery.recipient, {})
            left[delivery.key] = None if change is None else structs.replace(delivery, **change)
    for name in sorted({key.queue for key in left}):
        claimed = await store.claim(name, 100, now=NOW, skip_domains={FULL})
        changes: list[Finish | Postpone] = []
        for delivery in claimed:
            after = left[delivery.key]
            if after != delivery:
                changes.append(Finish(delivery) if after is None else Postpone(after))
        await store.settle(changes)
        store.release({delivery.key for delivery in claimed} - {change.delivery.key for change in changes})
    await store.keep_keys(KEYS)
    own = report()
    await store.settle([own])
    messages[own.message.id], bodies[own.message.id] = own.message, own.body
    left |= {delivery.key: delivery for delivery in own.deliveries}
    for delivery in filter(None, left.values()):
        stored = messages[delivery.message_id]
        sheet = expected.setdefault(
            stored.id,
            {
                "message": _json(stored),
                "deliveries": [],
                "body": hashlib.sha256(bodies[stored.id]).hexdigest(),
            },
        )
        sheet["deliveries"].append(_state(delivery))
    return expected


async def read_queue(store: Store) -> Expected:
    """The same of a store that is open."""
    found: Expected = {}
    for queue_name in sorted(await store.queues()):
        async for delivery in store.scan(queue_name):
            if delivery.message_id not in found:
                stored = await store.read_message(delivery.message_id)
                body = b"".join([piece async for piece in store.read_body(delivery.message_id)])
                found[delivery.message_id] = {
                    "message": _json(stored),
                    "deliveries": [],
                    "body": hashlib.sha256(body).hexdigest(),
                }
            found[delivery.message_id]["deliveries"].append(_state(delivery))
    return found


def _state(delivery: Delivery) -> Any:
    return {**_json(delivery), "queue": delivery.queue.text}


def _json(value: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def lacking(expected: Any, found: Any, where: str = "") -> list[str]:
    """The differences between a queue as it was written and as it was read. What the writer did not know of
    may be there.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        return [
            line
            for name, value in expected.items()
            for line in lacking(value, found.get(name), f"{where} {name}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        if expected and isinstance(expected[0], dict):
            expected, found = (sorted(each, key=_name) for each in (expected, found))
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for at, (one, other) in pairs for line in lacking(one, other, f"{where} {at}")]
    return [] if expected == found else [f"{where}: {expected!r} was read as {found!r}"]


def _name(value: dict[str, Any]) -> str:
    return str(value.get("recipient") or value.get("address"))


def clock() -> ManualClock:
    return ManualClock(NOW)
