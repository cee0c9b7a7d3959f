"""Imports the messages of a source into a target, through the store interface.

Promises:

- A message is durable before it counts as imported, and it is only sent from the queue.
- A delivery that the import log contains is not stored again, nor is a message that is in the store already.
- Nothing is stored that a listener would refuse: line ends are CRLF (those of other systems are converted;
  messages in our own format with others are refused), and a header has no control characters that hide
  fields.
- An error of the store ends the import. Messages stored before it are in the import log, and the import may
  be run again.

The import log is a file next to the spool, with one line of 32 hexadecimal digits per delivery and without
addresses. A second import of the same mail therefore adds nothing, even if the mail has been delivered in
between. The file may be removed: mail that is still in the spool is recognized without it. Lines are appended
and synced after their messages are durable. An import that was killed between the two, and is run again
before the relay starts, finds those messages in the spool. An incomplete last line is cut off.

Memory: bodies are copied in chunks, and `TOGETHER` messages are stored at a time.
"""

import asyncio
import binascii
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import msgspec
from msgspec import structs

from zonerelay import durable
from zonerelay.message.header import HeaderScanner, HeaderTooLargeError
from zonerelay.model.delivery import Delivery, QueueKind, queue_of
from zonerelay.model.envelope import Envelope, Message, MessageId, first_at
from zonerelay.routing.zones.zones import ZoneChoice, Zones, zone_notes
from zonerelay.smtp.server.line_ends import ChunkReader
from zonerelay.store.contract import MessageWriter, Store
from zonerelay.transfer.files import NO_QUEUE, Source, StoredMessage, TransferError, UnusableMessage, facts_of

TOGETHER = 64
"""Messages that share a sync of the disk."""
MAX_WEIGHT = 32 * 1024 * 1024
"""Octets of bodies that a source has had to read whole, and one body."""
MAX_HEADER = 4 * 1024 * 1024
_TOLERANCE = 3600.0
"""Seconds that a source's clock may be ahead."""


FILE = "imported"
_LENGTH = 33  # length of a line


class ImportRegister:
    """The log of the deliveries that were imported, so that no import repeats them. Opening it raises
    TransferError if it is not valid. All methods raise OSError if the file cannot be used.
    """

    def __init__(self, home: Path) -> None:
        self.path = home / FILE
        durable.append(self.path, b"")  # the file's name is durable before anything is imported
        self._known = _digests_in(self.path)
        os.truncate(self.path, self.path.stat().st_size // _LENGTH * _LENGTH)

    def knows(self, key: str, recipient: str) -> bool:
        return _digest(key, recipient) in self._known

    def add(self, deliveries: Iterable[tuple[str, str]]) -> None:
        """Add deliveries to the import log, each by the key of its message and its recipient. They are
        durable when it returns.
        """
        self.add_digests({_digest(*each) for each in deliveries})

    def add_digests(self, digests: set[bytes]) -> bool:
        """Add digests of deliveries durably to the import log. Return whether there were new ones."""
        fresh = digests - self._known
        if fresh:
            durable.append(self.path, b"".join(digest.hex().encode("ascii") + b"\n" for digest in fresh))
            self._known |= fresh
        return bool(fresh)


def merge_registers(path: Path, target: Path) -> bool:
    """Copy the lines of the import log `path` that the import log `target` does not have. Return whether
    there were any. Raises TransferError if one of them is damaged.
    """
    return path.exists() and ImportRegister(target.parent).add_digests(_digests_in(path))


def _digests_in(path: Path) -> set[bytes]:
    """Return the digests in an import log, without an incomplete last line. Raise TransferError if the log is
    damaged.
    """
    content = path.read_bytes()
    try:
        lines = (content[end - _LENGTH : end - 1] for end in range(_LENGTH, len(content) + 1, _LENGTH))
        return set(map(binascii.unhexlify, lines))
    except ValueError as error:
        raise TransferError(
            f"{path}, the log of imported mail, is damaged: {error}. Without it, mail that has been "
            "delivered since would be imported again; move it away to accept that"
        ) from error


def _digest(key: str, recipient: str) -> bytes:
    return hashlib.sha256(f"{key}\n{recipient}".encode("utf-8", "surrogateescape")).digest()[:16]


class ImportResult(msgspec.Struct):
    """The result of an import, and the output of `spool import --json`. `already` counts deliveries that had
    been imported before, `unusable` counts messages.
    """

    messages: int = 0
    deliveries: int = 0
    already: int = 0
    unusable: int = 0


@dataclass(eq=False, repr=False)
class Loader:
    """Imports messages into one store. `saw` is called for each message, with None or the reason why it
    cannot be imported.
    """

    store: Store
    register: ImportRegister
    zones: Zones
    _: KW_ONLY
    now: float
    saw: Callable[[UnusableMessage | None], None]

    def __post_init__(self) -> None:
        self.loaded = ImportResult()

    async def load(self, source: Source) -> None:
        """Import all messages of a source. Raise StoreError or OSError if the store or the import log fails,
        and any error of the source.
        """
        batch: list[StoredMessage] = []
        async for item in source.read():
            if isinstance(item, UnusableMessage):
                self._refuse(item)
                continue
            batch.append(item)
            if len(batch) == TOGETHER or sum(each.weight for each in batch) > MAX_WEIGHT:
                await self._load(batch)
                batch = []
        await self._load(batch)

    def _refuse(self, item: UnusableMessage) -> None:
        self.loaded.unusable += 1
        self.saw(item)

    async def _load(self, batch: Sequence[StoredMessage]) -> None:
        work: list[tuple[StoredMessage, MessageId]] = []
        taken = set[MessageId]()
        left = [
            tuple(each for each in item.deliveries if not self.register.knows(item.key, each.recipient))
            for item in batch
        ]
        firsts = [
            item.message.id if item.is_ours else self._derived(item, fresh, 0)
            for item, fresh in zip(batch, left, strict=True)
        ]
        known = await self.store.read_messages(firsts)
        for item, fresh, first in zip(batch, left, firsts, strict=True):
            identity = await self._id_for(item, fresh, first, taken, known) if fresh else None
            if identity is None:
                self.loaded.already += len(item.deliveries)
                self.register.add((item.key, each.recipient) for each in fresh)
                self.saw(None)
                continue
            self.loaded.already += len(item.deliveries) - len(fresh)
            taken.add(identity)
            work.append((structs.replace(item, deliveries=fresh), identity))
        results = await asyncio.gather(*(self._write(*each) for each in work), return_exceptions=True)
        done = [item for (item, _), result in zip(work, results, strict=True) if result is None]
        self.register.add((item.key, each.recipient) for item in done for each in item.deliveries)
        for (item, _), result in zip(work, results, strict=True):
            if isinstance(result, UnusableMessage):
                self._refuse(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                self.loaded.messages += 1
                self.loaded.deliveries += len(item.deliveries)
                self.saw(None)

    # --- ids

    async def _id_for(
        self,
        item: StoredMessage,
        fresh: Sequence[Delivery],
        first: MessageId,
        taken: set[MessageId],
        known: dict[MessageId, Message],
    ) -> MessageId | None:
        """Return the id under which a message is to be stored, or `None` if the store has the message
        already.

        Messages in our own format keep their id. The id of others is derived from the source and the time of
        acceptance, so that old mail is sent before new mail, and an import that was killed recognizes what it
        has stored. An id from the future comes from a wrong clock; it is replaced, because this relay's later
        ids would continue from it.
        """
        is_part = len(fresh) < len(item.deliveries) or any(
            self.register.knows(item.key, each.address) for each in item.message.envelope.recipients
        )
        number = 0
        identity = first
        while True:
            if identity not in taken and identity <= first_at(self.now + _TOLERANCE):
                if identity not in known:
                    return identity
                if not is_part and _is_same(known[identity], item):
                    return None
            number += 1
            identity = self._derived(item, fresh, number)
            known |= await self.store.read_messages([identity])

    def _derived(self, item: StoredMessage, deliveries: Sequence[Delivery], number: int) -> MessageId:
        identifying = "\n".join((item.key, str(number), *(each.recipient for each in deliveries)))
        digest = hashlib.sha256(identifying.encode("utf-8", "surrogateescape")).hexdigest()
        when = min(max(item.message.envelope.created, 0.0), self.now)
        return MessageId(first_at(when)[:11] + digest[:5])

    # --- one message

    async def _write(self, item: StoredMessage, identity: MessageId) -> UnusableMessage | None:
        envelope = structs.replace(item.message.envelope, id=identity)
        deliveries = [structs.replace(each, message_id=identity) for each in item.deliveries]
        try:
            async with self.store.begin(envelope) as writer:
                if item.is_ours:
                    await self._write_ours(writer, item, deliveries)
                else:
                    await self._write_foreign(writer, item, envelope, deliveries)
        except (HeaderTooLargeError, ValueError, EOFError) as error:
            why = f"its header exceeds {MAX_HEADER} bytes"
            name = item.message.id if item.is_ours else item.key
            return UnusableMessage(name, why if isinstance(error, HeaderTooLargeError) else str(error))
        return None

    async def _write_ours(
        self, writer: MessageWriter, item: StoredMessage, deliveries: Sequence[Delivery]
    ) -> None:
        message = item.message
        # A webhook event is JSON, whose exact bytes are signed.
        body = _CanonicalBody(is_mail=deliveries[0].queue.kind is not QueueKind.WEBHOOK)
        async for piece in body.pieces(item.body()):
            await writer.write(piece)
        if body.reader.has_bare or body.size != message.size:
            raise ValueError(
                "its body contains line ends other than CRLF, or its size differs from the recorded one"
            )
        facts = facts_of(message)
        facts["eight_bit"] |= body.eight_bit
        facts["plain_lines"] &= body.reader.is_plain
        facts["long_lines"] |= body.reader.has_long
        await writer.commit(deliveries, **facts)

    async def _write_foreign(
        self, writer: MessageWriter, item: StoredMessage, envelope: Envelope, deliveries: Sequence[Delivery]
    ) -> None:
        scanner = HeaderScanner(MAX_HEADER, removes_controls=True)
        body = _CanonicalBody()
        size = 0
        async for piece in body.pieces(item.body()):
            if scanner.header is None:
                scanner.feed(piece)
                if scanner.header is None:
                    continue
                piece = scanner.header.lead + bytes(scanner.held)  # noqa: PLW2901 - what is stored of it
            size += len(piece)
            await writer.write(piece)
        if scanner.header is None:
            piece = scanner.finish().lead + bytes(scanner.held)
            size += len(piece)
            await writer.write(piece)
        assert scanner.header is not None
        fields = scanner.header.fields
        zone_of = self.zones.choose(envelope, headers=fields, size=size)
        choices: list[tuple[str, ZoneChoice]] = []
        routed: list[Delivery] = []
        for delivery in deliveries:
            assert delivery.queue == NO_QUEUE
            choice = zone_of(delivery.recipient)
            choices.append((delivery.recipient, choice))
            queue = queue_of(choice.zone, choice.priority or envelope.priority)
            routed.append(structs.replace(delivery, queue=queue))
        await writer.commit(
            routed,
            headers=fields,
            eight_bit=body.eight_bit,
            plain_lines=body.reader.is_plain,
            long_lines=body.reader.has_long,
            trace=(_note(item), *zone_notes(choices)),
        )


class _CanonicalBody:
    """A message body whose line ends are converted to CRLF, and its properties. The body of a webhook event
    is unchanged.
    """

    def __init__(self, *, is_mail: bool = True) -> None:
        self._is_mail = is_mail
        self.reader = ChunkReader()
        self.size = 0
        self.eight_bit = False

    async def pieces(self, raw: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in raw:
            if piece:
                yield self._read(piece, last=False)
        if rest := self._read(b"", last=True):
            yield rest

    def _read(self, piece: bytes, *, last: bool) -> bytes:
        if not self._is_mail:
            self.size += len(piece)
            return piece
        self.reader.begin(len(piece), last)
        clean = self.reader.feed(piece)
        self.size += len(clean)
        self.eight_bit = self.eight_bit or not clean.isascii()
        return clean


def _note(item: StoredMessage) -> str:
    return f"imported={item.key}"


def _is_same(known: Message, item: StoredMessage) -> bool:
    if not item.is_ours:
        return _note(item) in known.trace
    return known.envelope == item.message.envelope
