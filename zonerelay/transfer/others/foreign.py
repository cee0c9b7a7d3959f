"""Converts messages of other mail systems to stored messages. No I/O of its own.

Addresses are checked by the SMTP parsers, because another system may have accepted addresses that we would
not send to. An invalid recipient is reported and left out; an invalid DSN option is dropped. A message
without a date is treated as new.
"""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from zonerelay.model import envelope
from zonerelay.model.delivery import Delivery
from zonerelay.model.reply import Attempt, Reply
from zonerelay.smtp.server.params import parse_envid, parse_orcpt
from zonerelay.smtp.server.paths import CommandError, forward_path, reverse_path
from zonerelay.transfer.files import NO_QUEUE, Source, StoredMessage, UnusableMessage

T = TypeVar("T")

_NOWHERE = envelope.Origin()
_NO_ID = envelope.MessageId("")
_NOT_XTEXT = re.compile(r"[^!-*,-<>-~]")
_REPLY = re.compile(r"\b(4\d\d)[ -](?:4\.(\d{1,3}\.\d{1,3})[ -])?\s*(.*)", re.DOTALL)


class OpenRecipient(msgspec.Struct, frozen=True, kw_only=True):
    """A recipient whose delivery in the other system is not complete. `due` is a Unix time; 0 means
    immediately.
    """

    address: str
    notify: envelope.Notify = envelope.Notify.UNSET
    orcpt: str = ""
    attempts: int = 0
    due: float = 0.0
    last: Attempt | None = None


class ForeignMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of another mail system. `key` identifies the message permanently. `created` is in Unix
    seconds, 0 if it is not known. `ret` and `envid` are as in RFC 3461. `weight` is its size in memory in
    bytes.
    """

    key: str
    sender: str
    recipients: Sequence[OpenRecipient]
    created: float
    body: Callable[[], AsyncIterator[bytes]]
    weight: int = 0
    held: bool = False
    eight_bit: bool = False
    ret: envelope.Ret = envelope.Ret.UNSET
    envid: str = ""
    origin: envelope.Origin = _NOWHERE


def source_of(
    entries: Sequence[T],
    read: Callable[[T], Awaitable[ForeignMessage | None]],
    *,
    name: Callable[[T], str],
    octets: int,
    now: float,
    together: int = 1,
) -> Source:
    """Return an import source that reads these entries of another system's queue, `together` at a time.
    `read` returns the message of an entry, or None if it has none, and raises ValueError or OSError if it
    cannot be imported.
    """

    async def read_one(entry: T) -> Sequence[StoredMessage | UnusableMessage]:
        try:
            foreign = await read(entry)
        except (ValueError, OSError) as error:
            return [UnusableMessage(name(entry), str(error))]
        return [] if foreign is None else list(adopted(foreign, now))

    async def read_all() -> AsyncIterator[StoredMessage | UnusableMessage]:
        for start in range(0, len(entries), together):
            for items in await asyncio.gather(*map(read_one, entries[start : start + together])):
                for item in items:
                    yield item

    return Source(messages=len(entries), octets=octets, read=read_all)


def adopted(foreign: ForeignMessage, now: float) -> Iterator[StoredMessage | UnusableMessage]:
    """Convert a message of another system, and yield it and the recipients that cannot be imported."""
    try:
        sender = _mailbox(foreign.sender, reverse_path)
    except CommandError as error:
        yield UnusableMessage(
            foreign.key, f"its sender {foreign.sender!r} is not an address: {error.reply.text}"
        )
        return
    created = min(foreign.created, now) if foreign.created > 0 else now
    deliveries: dict[envelope.Mailbox, Delivery] = {}
    for each in foreign.recipients:
        try:
            address = _mailbox(each.address, forward_path)
        except CommandError as error:
            yield UnusableMessage(
                foreign.key, f"its recipient {each.address!r} is not an address: {error.reply.text}"
            )
            continue
        deliveries[address] = Delivery(
            queue=NO_QUEUE,
            message_id=_NO_ID,
            recipient=address,
            created=created,
            attempts=each.attempts,
            next_attempt=each.due,
            held=foreign.held,
            notify=each.notify,
            orcpt=_checked(parse_orcpt, each.orcpt),
            last=each.last,
        )
    if not deliveries:
        return
    made = envelope.Envelope(
        id=_NO_ID,
        sender=sender,
        recipients=tuple(
            envelope.Recipient(address=each.recipient, notify=each.notify, orcpt=each.orcpt)
            for each in deliveries.values()
        ),
        created=created,
        body=envelope.BodyType.EIGHT_BIT if foreign.eight_bit else envelope.BodyType.SEVEN_BIT,
        smtputf8=not all(each.isascii() for each in (sender, *deliveries)),
        ret=foreign.ret,
        envid=_checked(parse_envid, foreign.envid),
        origin=foreign.origin,
    )
    yield StoredMessage(
        key=foreign.key,
        message=envelope.Message(envelope=made, size=0, chunks=0),
        deliveries=tuple(deliveries.values()),
        body=foreign.body,
        weight=foreign.weight,
        is_ours=False,
    )


def _mailbox(address: str, parse: Callable[[str], tuple[envelope.Mailbox, str]]) -> envelope.Mailbox:
    mailbox, rest = parse(f"<{address}>")
    if rest or not address.isprintable():
        parse("")  # raises if the text continues after the address
    return mailbox


def _checked(parse: Callable[[str | None], str], value: str) -> str:
    try:
        return parse(value) if value else ""
    except ValueError:
        return ""


def number_of(value: object) -> float:
    """Convert a number that another system has stored, or return 0.0 if it is not a number."""
    try:
        number = float(value) if isinstance(value, bytes | int | float) else 0.0
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0


def xtext(text: str) -> str:
    """Encode a string as xtext (RFC 3461 4), for systems that store ENVID and ORCPT decoded."""
    return _NOT_XTEXT.sub(lambda match: f"+{ord(match[0]):02X}", text)


def orcpt_of(decoded: str) -> str:
    """Return an ORCPT value with its address in xtext, or "" if there is none."""
    kind, semicolon, address = decoded.partition(";")
    return f"{kind};{xtext(address)}" if semicolon else ""


def attempt_of(reason: str, at: float) -> Attempt | None:
    """Return the last attempt of a delivery from the text that another system has stored about it, or `None`.

    The text is searched for an SMTP reply. If there is none, or a permanent one, the text itself becomes a
    local reply, because a delivery that is still open was not refused permanently.
    """
    if not reason:
        return None
    text = " ".join(reason.split())
    found = _REPLY.search(text)
    if found is None:
        return Attempt(at=at, reply=Reply(451, "4.0", text), local=True)
    return Attempt(at=at, reply=Reply(int(found[1]), found[2] or "", found[3] or text))
