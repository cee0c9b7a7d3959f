"""One message on its way from the connection to the store.

Owns the body between DATA (or the first BDAT) and the reply: its end, its header, the fields of our own in
front, the policy's changes, and the store's writer. The session feeds bytes in as they arrive, without
waiting, and runs `store` in a task of its own, which waits for the disk and for the policy. Between the two
are at most `BACKLOG` bytes and one piece, because the session stops reading beyond that.

Promises:

- 250 is answered only after `commit` has returned (rule 1). The session must not cancel `store` once
  `complete` is true: a client that leaves is no reason to forget a message that it has sent.
- A refusal is remembered, and the body is read to its true end and dropped: a reply in the middle would let
  the rest of the body run as commands. Memory stays flat. A client that does not stop far beyond the limit is
  `hopeless`.
- Unexpected errors are temporary (rule 3): the reply is 451 and never holds the error's text.
- The memory of a message is in the account of all sessions (`SessionMemory`), and nothing else of it.

Makes one delivery for each recipient of a message, in the recipient's zone. No I/O.

The policy's choice of a zone comes first, then the message's own (a zone header), then the routes'.

Mail for more than `MANY` recipients is not fresh: it is stored as if it had come due before it was accepted.
The queue alternates between fresh and due mail, so a list of a million recipients does not delay all other
mail. The same holds for senders of very many messages while the queue is long (`limits/bursts`).

Mail that the mode of a user captures goes to the zone that captures. Without such a zone it is held: it stays
in the queue until an operator releases or drops it.

The idempotency key of a message: where it comes from, and what it makes the same message. No I/O.

A client names it in the field `Idempotency-Key` of the header, or the Message-ID is the key where the
listener or the user says so. `identity` is about who submits and the envelope, `ContentDigest` about what is
submitted.

Compared are From, To, Cc, Reply-To and Subject, and the body without its MIME boundaries: lines that begin
with "--" and have the length of a boundary, and what stands behind "boundary=". An application that composes
the message again makes another Date, other boundaries and perhaps another Message-ID.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence

from zonerelay.config.settings import BareLineEnds, HeaderControls, Idempotency
from zonerelay.config.units import format_size
from zonerelay.inbound.access.guard import Allowance, Guard
from zonerelay.inbound.cleanup.own_headers import edited, own_fields, with_other_addresses, without
from zonerelay.inbound.limits.connections import MANY, Bursts
from zonerelay.inbound.limits.memory import LARGE
from zonerelay.inbound.policy import EndOfData, Headers
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.client_state import ClientState
from zonerelay.inbound.state.context import IDEMPOTENCY_KEY, ListenerContext
from zonerelay.inbound.state.questions import Verdict
from zonerelay.inbound.state.replies import MAX_DRAINED, ServerReply, decided
from zonerelay.inbound.state.rewriting import notes_of
from zonerelay.inbound.state.transaction import NO_EDITS, Edits, HeaderRules, Transaction, mailboxes
from zonerelay.message.dkim.signature import BodyHash
from zonerelay.message.header.headers import (
    Fields,
    Header,
    HeaderScanner,
    HeaderTooLargeError,
    authors,
    lacks_author,
    parse_header,
)
from zonerelay.model.address import Mailbox, path
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Envelope, Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import queue_of
from zonerelay.model.reply import Reply
from zonerelay.routing.zones.zones import Choice, ZoneOf, zone_notes
from zonerelay.smtp.server.line_ends import BodyReader, ChunkReader
from zonerelay.store.contract import (
    CHUNK_SIZE,
    BeingStoredError,
    MessageWriter,
    Once,
    OtherContentError,
    StoredBeforeError,
    StoreError,
    StoreFullError,
)

MAX_KEY = 255
COMPARED = frozenset({"from", "to", "cc", "reply-to", "subject"})
DIGEST_SIZE = 16
BLOCK = 16 * 1024
"""Octets that are looked at together. Blocks begin where the content alone says, however it arrives."""

_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY}}}")
# RFC 2046 5.1.1: a boundary has at most 70 characters; a line of it two dashes in front, perhaps two behind.
_BOUNDARY_LINE = re.compile(rb"^--[^\r\n]{1,72}[ \t]*(?=\r?$)", re.MULTILINE)
_BOUNDARY_VALUE = re.compile(rb"(boundary=)[^\r\n]{1,100}", re.IGNORECASE)


def key_in(fields: Fields) -> str | None:
    """The key that the field names; `None` when there is none that can be used."""
    found = [value.strip() for name, value in fields if name.lower() == IDEMPOTENCY_KEY]
    return found[0] if len(found) == 1 and is_key(found[0]) else None


def is_key(text: str) -> bool:
    """Whether a client may name it as a key."""
    return _KEY.fullmatch(text) is not None


def message_id_in(fields: Fields) -> str:
    """The Message-ID; "" when there is none, or several."""
    found = [value.strip() for name, value in fields if name.lower() == "message-id"]
    return found[0] if len(found) == 1 else ""


def identity(kind: str, key: str, envelope: Envelope, named: Sequence[Mailbox] = ()) -> str:
    """Of two submissions with the same identity the second is a repetition.

    All clients that have not logged in are one submitter: an application may try again from another of its
    machines, and at another node, whose listeners have other addresses. `named` are the recipients that the
    client has named, where the mode of its user has put others in their place.
    """
    recipients = sorted({*(named or mailboxes(envelope.recipients))})
    parts = (kind, key, envelope.origin.user, envelope.sender, *recipients)
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for part in parts:
        octets = part.encode("utf-8", "surrogateescape")
        digest.update(b"%d:%b" % (len(octets), octets))
    return digest.hexdigest()


class ContentDigest:
    """Takes the body in pieces of any size."""

    def __init__(self, fields: Fields) -> None:
        self._digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
        self._rest = bytearray()
        for name, value in fields:
            if (lower := name.lower()) in COMPARED:
                self._digest.update(f"{lower}:{value.strip()}\n".encode("utf-8", "surrogateescape"))
        self._digest.update(b"\n")

    def feed(self, piece: bytes) -> None:
        self._rest += piece
        start = 0
        while len(self._rest) - start >= BLOCK:
            end = self._rest.rfind(b"\n", start, start + BLOCK) + 1 or start + BLOCK
            self._add(self._rest[start:end])
            start = end
        del self._rest[:start]

    def hexdigest(self) -> str:
        """The digest; nothing may be fed after it."""
        self._add(self._rest)
        self._rest = bytearray()
        return self._digest.hexdigest()

    def _add(self, block: bytearray) -> None:
        self._digest.update(_BOUNDARY_VALUE.sub(rb"\1", _BOUNDARY_LINE.sub(b"--", block)))


BY_POLICY = "policy"
BY_MODE = "mode"
OVERDUE = 1.0
"""Seconds for which such mail has been due at its acceptance. A due time of that moment is a sender's."""


def first_due(envelope: Envelope, release: float = 0.0) -> float:
    """Return the Unix time of the first attempt; 0.0 means at once, before deferred mail."""
    if release:
        return release
    return envelope.created - OVERDUE if len(envelope.recipients) > MANY else 0.0


def deliveries_of(
    envelope: Envelope,
    transaction: Transaction,
    zone_of: ZoneOf,
    bursts: Bursts | None = None,
    capture_zone: str = "",
) -> tuple[list[Delivery], tuple[str, ...]]:
    """Return the deliveries, and notes for the trace that say what chose which zone.

    The age of a message with a time of release counts from that time, for retries and reports.
    """
    born = max(envelope.created, transaction.release)
    due = first_due(envelope, transaction.release)
    if not due and bursts is not None and bursts.is_over(envelope):
        due = envelope.created - OVERDUE
    allowance = transaction.allowance
    deliveries: list[Delivery] = []
    choices: list[tuple[str, Choice]] = []
    for recipient in envelope.recipients:
        zone = transaction.zone_of(recipient.address)
        choice = Choice(zone, BY_POLICY) if zone else zone_of(recipient.address)
        captured = allowance is not None and allowance.is_captured(recipient.address)
        if captured and capture_zone:
            choice = Choice(capture_zone, BY_MODE)
        if choice.why:
            choices.append((recipient.address, choice))
        deliveries.append(
            Delivery(
                queue=queue_of(choice.zone, choice.priority or envelope.priority),
                message_id=envelope.id,
                recipient=recipient.address,
                created=born,
                next_attempt=due,
                held=captured and not capture_zone,
                notify=recipient.notify,
                orcpt=recipient.orcpt,
            )
        )
    return deliveries, zone_notes(choices) if choices else ()


BACKLOG = 256 * 1024
MAX_PIECES = 64  # that wait side by side: an object for every two octets is twenty times what is accounted
LIST = 500
"""Recipients. To store 5,000 takes up to 50 ms of the loop, in two turns of it: of several such messages that
are here at once, each has its own, and its own write.
"""
SMALL = 16 * 1024  # a message that is here whole, and no larger, is gone before it would be counted

_NOTHING_YET = Header()
_OF_KEYS: dict[type[StoreError], ServerReply] = {
    OtherContentError: replies.OTHER_CONTENT,
    BeingStoredError: replies.BEING_STORED,
}


class Intake:
    _key_kind = "key"
    _digest: ContentDigest | None = None
    """Of a message with an idempotency key: most have none, and do not set these."""

    def __init__(
        self,
        envelope: Envelope,
        transaction: Transaction,
        client_state: ClientState,
        context: ListenerContext,
        on_room: Callable[[], None],
    ) -> None:
        settings = context.settings
        self.envelope = envelope
        self.task: asyncio.Task[None] | None = None  # the session's, that runs `store`
        self.refusal: ServerReply | None = None
        self.detail = ""
        self.complete = False  # the end of data has arrived
        self.backlog = 0  # octets taken from the wire that the store has not taken yet
        self.transaction = transaction
        self._client_state = client_state
        self._context = context
        self._on_room = on_room
        self._settings = settings
        self._chunks = ChunkReader() if transaction.chunked else None
        self._body = self._chunks or BodyReader()
        self._scanner: HeaderScanner | None = HeaderScanner(
            settings.max_header_size,
            removes_controls=settings.header_controls is HeaderControls.REMOVE,
        )
        self._header = _NOTHING_YET
        self._hash = BodyHash() if context.hash_bodies else None
        self._eight_bit = False
        self._size = 0
        self._stored = 0  # with our own fields
        self._wire = 0
        self._ready: list[bytes] = []
        self._ready_size = 0
        self._key = transaction.idempotency_key
        self._undecided = b""  # the header and what came with it, while the policy thinks about it
        self.held = 0  # octets in the account of all sessions
        self._waiter: asyncio.Future[None] | None = None

    @property
    def rest(self) -> bytes:
        """The bytes that followed the end of data, or of the chunk: commands."""
        return self._body.rest

    @property
    def size(self) -> int:
        """Bytes of the message that have arrived."""
        return self._size

    def begin_chunk(self, size: int, *, last: bool) -> None:
        """The next `size` bytes belong to the message (BDAT)."""
        assert self._chunks is not None
        self._chunks.begin(size, last)

    @property
    def chunk_done(self) -> bool:
        """The chunk is here, but the message goes on in the next one."""
        return self._chunks is not None and self._chunks.chunk_done and not self.complete

    @property
    def is_large(self) -> bool:
        """So much has come that `LargeBodies` decides when to read on."""
        return self._wire > LARGE

    @property
    def hopeless(self) -> bool:
        """The client has sent far more than the limit and still no end of data."""
        return self._wire > 2 * self._settings.max_message_size + MAX_DRAINED

    @property
    def worth_storing(self) -> bool:
        """A chunk of the store's size is waiting, or the whole rest."""
        return self.complete or self._ready_size >= CHUNK_SIZE or bool(self._undecided)

    def feed(self, data: bytes) -> None:
        self._wire += len(data)
        body = self._body
        piece = body.feed(data)
        self.complete = body.done
        if self.refusal is None:
            try:
                self._take(piece)
                if body.done and self._scanner is not None:
                    self._begin_body(self._scanner, self._scanner.finish())
            except Exception as error:  # noqa: BLE001 - rule 3: unknown trouble is temporary
                self._fail(error)
        if self.backlog > SMALL or not self.complete:
            self._charge()
        if self._waiter is not None and self.worth_storing:
            self._wake()

    async def store(self) -> MessageId | None:
        """Carry the body to the store and return the id under which it is; None: see `refusal`. Raises only
        CancelledError.
        """
        try:
            async with self._context.store.begin(self.envelope) as writer:
                while self.refusal is None:
                    if self._undecided:
                        await self._decide_header()
                    elif self._ready and self.worth_storing:
                        await self._write(writer)
                    elif self.complete:
                        return await self._commit(writer)
                    else:
                        await self._wait()
        except StoredBeforeError as error:
            self._context.events.repeated(error.message_id, self.envelope)
            return error.message_id
        except StoreFullError as error:
            self.refuse(replies.STORE_FULL, str(error))
        except (OtherContentError, BeingStoredError) as error:
            self.refuse(_OF_KEYS[type(error)], str(error))
        except StoreError as error:
            self.refuse(replies.STORE_TROUBLE, str(error))
        except Exception as error:  # noqa: BLE001 - rule 3
            self._fail(error)
        # Left without commit: the store forgets what was written.
        assert self.refusal is not None
        return None

    def _take(self, piece: bytes) -> None:
        self._size += len(piece)
        allowance = self.transaction.allowance
        if self._size > self._settings.max_message_size:
            self.refuse(replies.too_big(self._settings.max_message_size))
        elif allowance is not None and (refusal := allowance.size_refusal(self._size)) is not None:
            self.refuse(replies.guarded(refusal))
        elif self._body.has_bare and self._settings.bare_line_ends is BareLineEnds.REJECT:
            self.refuse(replies.BARE_LINE_ENDS, self._line_ends())
        elif piece:
            self._eight_bit = self._eight_bit or not piece.isascii()
            if self._scanner is not None:
                self._scan(self._scanner, piece)
                return
            self._append(piece)
            if self._hash is not None:
                self._hash.feed(piece)
            if self._digest is not None:
                self._digest.feed(piece)

    def _scan(self, scanner: HeaderScanner, piece: bytes) -> None:
        try:
            scanner.feed(piece)
        except HeaderTooLargeError:
            self.refuse(replies.header_too_big(self._settings.max_header_size))
            return
        if scanner.header is not None:
            self._begin_body(scanner, scanner.header)

    def _begin_body(self, scanner: HeaderScanner, header: Header) -> None:
        """The header is known."""
        context, client_state = self._context, self._client_state
        self._scanner = None
        held = bytes(scanner.held)
        if self._hash is not None:
            self._hash.feed(header.lead + held)
        self._header = header if context.dropped.isdisjoint(header.names) else self._dropped_from(header)
        if client_state.idempotency is not Idempotency.OFF and not self._key:
            self._key, self._key_kind = message_id_in(header.fields), "message-id"
        if self._key:
            self._digest = ContentDigest(header.fields)
            self._digest.feed(held[scanner.size :])
        if header.controls:
            self.refuse(replies.HEADER_CONTROLS)
        elif self.refusal is not None:
            return
        elif header.received > self._settings.max_received:
            self.refuse(replies.MAIL_LOOP)
        elif client_state.is_bound and not client_state.may_write_as(authors(header, held)):
            self.refuse(replies.FROM_NOT_YOURS)
        else:
            rewrites = self.transaction.rewrites
            self._open(held if rewrites is None else self._rewritten(rewrites, held, scanner.size))

    def _open(self, held: bytes) -> None:
        """Accept the header: our own fields go first, then the bytes that came."""
        if Headers in self._context.consultants.asked:
            self._undecided = held
            self.backlog += len(held)
        elif self.transaction.edits is not NO_EDITS:
            self._append(self._edited(held))
        else:
            self._append(own_fields(self.envelope, self._header, self._context))
            self._append(held)

    def _rewritten(self, rewrites: HeaderRules, held: bytes, size: int) -> bytes:
        """Rewrite addresses in the first `size` bytes, which are the header."""
        block = with_other_addresses(rewrites, self._header.lead, held[:size])
        if block is None:
            return held
        self._header = without(parse_header(block), self._context.dropped)
        return block + held[size:]

    def _dropped_from(self, header: Header) -> Header:
        """Drop fields that no message keeps. A zone header counts if its client is trusted."""
        client_state, origin, context = self._client_state, self.envelope.origin, self._context
        zone_header = context.zone_header
        if (
            zone_header is not None
            and client_state.grants.may_relay
            and zone_header.trusts(origin.client_address, origin.user)
        ):
            named = self.transaction.zone_named or zone_header.zone_in(header.fields)
            self.transaction.zone_named = named
        if IDEMPOTENCY_KEY in header.names and client_state.grants.may_relay:
            self._take_key(header)
        gone = context.dropped & header.names
        self.transaction.edits = self.transaction.edits.and_those_of(Edits(remove=tuple(gone)))
        return without(header, gone)

    def _take_key(self, header: Header) -> None:
        key = key_in(header.fields)
        if key is None:
            self.refuse(replies.BAD_KEY)
        else:
            self._key = self._key or key

    def _once(self) -> Once:
        assert self._digest is not None
        context = self._context
        return Once(
            identity(self._key_kind, self._key, self.envelope, self.transaction.named),
            self._digest.hexdigest(),
            context.clock.now() + context.idempotency_window,
        )

    def _edited(self, held: bytes) -> bytes:
        return edited(self.envelope, self._header, held, self.transaction.edits, self._context)

    async def _decide_header(self) -> None:
        """Ask the policy about the header; bytes that come meanwhile wait behind it."""
        envelope, header = self.envelope, self._header
        event = Headers(
            client=self._client_state.info,
            message_id=envelope.id,
            sender=envelope.sender,
            recipients=mailboxes(envelope.recipients),
            fields=header.fields,
        )
        verdict = await self._context.consultants.ask(event)
        held, self._undecided = self._undecided, b""
        if self.refusal is not None or self._refused_by(verdict):
            return
        self.transaction.decide(verdict.decision)
        lines = self._edited(held)
        self._ready.insert(0, lines)
        self._ready_size += len(lines)
        self._stored += len(lines)
        self.backlog += len(lines) - len(held)
        self._charge()

    def _refused_by(self, verdict: Verdict) -> bool:
        reply: Reply | None = verdict.decision.reply
        if reply is not None:
            self.refuse(decided(reply, verdict.reason))
        return reply is not None

    def _append(self, piece: bytes) -> None:
        if len(self._ready) >= MAX_PIECES:
            self._ready = [b"".join(self._ready)]
        self._ready.append(piece)
        self._ready_size += len(piece)
        self._stored += len(piece)
        self.backlog += len(piece)

    def refuse(self, answer: ServerReply, detail: str = "") -> None:
        """Keep nothing of the message: this is the reply at its end."""
        self.refusal = answer
        self.detail = detail
        self._scanner = None
        self._ready = []
        self.backlog -= self._ready_size + len(self._undecided)
        self._ready_size = 0
        self._undecided = b""
        self._charge()
        if self._waiter is not None:
            self._wake()

    def _charge(self) -> None:
        """Keep the account of all sessions' memory."""
        held = self.backlog if self._scanner is None else self.backlog + len(self._scanner.held)
        if held != self.held:
            self._context.memory.used += held - self.held
            self.held = held

    def release(self) -> None:
        """Take this message out of the account of memory."""
        self._context.memory.used -= self.held
        self.held = 0

    def _fail(self, error: Exception) -> None:
        self._context.events.trouble("inbound", error, message_id=self.envelope.id)
        self.refuse(replies.TROUBLE)

    async def _write(self, writer: MessageWriter) -> None:
        ready, self._ready = self._ready, []
        size, self._ready_size = self._ready_size, 0
        try:
            await writer.write(b"".join(ready))
        finally:
            self.backlog -= size
            if self.held:
                self._charge()
            if not self.complete:
                self._on_room()

    async def _commit(self, writer: MessageWriter) -> MessageId | None:
        if EndOfData in self._context.consultants.asked and await self._refused_at_the_end():
            return None
        if self.transaction.allowance is not None and self._context.guard is not None:
            return await self._count(writer, self._context.guard, self.transaction.allowance)
        return await self._take_turn(writer)

    async def _count(self, writer: MessageWriter, guard: Guard, allowance: Allowance) -> MessageId | None:
        """Count the message in the quotas of its user, for as long as it is not refused."""
        sent = len(self.transaction.named), self._size
        refusal = await guard.take(allowance, *sent)
        if refusal is not None:
            if refusal.quota:
                self._context.events.metrics.quota_refused.add((refusal.quota,))
            self.refuse(replies.guarded(refusal))
        accepted: MessageId | None = None
        try:
            if self.refusal is None:
                accepted = await self._take_turn(writer)
        finally:
            if accepted is None and refusal is None:
                await guard.give_back(allowance, *sent)
        return accepted

    async def _take_turn(self, writer: MessageWriter) -> MessageId | None:
        if len(self.envelope.recipients) <= LIST:
            return await self._accept(writer)
        async with self._context.lists:
            return await self._accept(writer)

    async def _accept(self, writer: MessageWriter) -> MessageId | None:
        zone_of = self._context.choose_zone(
            self.envelope, headers=self._header.fields, size=self._size, named=self.transaction.zone_named
        )
        deliveries, zones = deliveries_of(
            self.envelope, self.transaction, zone_of, self._context.bursts, self._context.capture_zone
        )
        allowance = self.transaction.allowance
        if allowance is not None and (barred := allowance.zone_refusal(deliveries)):
            self.refuse(replies.guarded(barred))
            return None
        sizes = self._context.zone_sizes
        if sizes and all(self._stored > sizes.get(each.zone, self._stored) for each in deliveries):
            # A message too large for only some of its zones bounces from those.
            limit = max(sizes[each.zone] for each in deliveries)
            answer = replies.in_detail(
                replies.TOO_BIG,
                f"Message is larger than {format_size(limit)}, which is as much as is sent on",
            )
            self.refuse(answer, "larger than its zones send")
            return None
        if len(deliveries) > LIST:
            await asyncio.sleep(0)
        webhooks = self._context.webhooks
        message = await writer.commit(
            deliveries,
            beside=None if webhooks is None else webhooks.accepted,
            once=self._once() if self._key else None,
            headers=self._stored_fields(),
            eight_bit=self._eight_bit,
            plain_lines=self._body.is_plain,
            long_lines=self._body.has_long,
            body_hash=self._hash.digest() if self._hash is not None else "",
            trace=self._trace(zones),
        )
        self._announce(message, deliveries)
        return self.envelope.id

    def _stored_fields(self) -> Fields:
        """Return the fields of the message, with the Message-ID and the author that it has got here."""
        fields = self._header.fields
        if lacks_author(self.envelope, self._header):
            fields = (*fields, ("From", path(self.envelope.sender)))
        if "message-id" in self._header.names:
            return fields
        added = (value for name, value in self.transaction.edits.add if name.lower() == "message-id")
        value = next(added, f"<{self.envelope.id}@{self._context.hostname}>")
        return (*fields, ("Message-ID", value))

    async def _refused_at_the_end(self) -> bool:
        envelope = self.envelope
        event = EndOfData(
            client=self._client_state.info,
            message_id=envelope.id,
            sender=envelope.sender,
            recipients=mailboxes(envelope.recipients),
            fields=self._header.fields,
            size=self._size,
        )
        verdict = await self._context.consultants.ask(event)
        if self._refused_by(verdict):
            return True
        self.transaction.decide(verdict.decision)
        return False

    def _announce(self, message: Message, deliveries: list[Delivery]) -> None:
        """Tell the log and the queue. The message is durable: the client gets 250 even on an error here."""
        context = self._context
        try:
            context.events.accepted(message, bare_lf=self._body.bare_lf, bare_cr=self._body.bare_cr)
            # What is stored as due has its time told: were the clock set back, no claim would find it now.
            for queue, due in {each.queue: each.next_attempt for each in deliveries}.items():
                context.notify(queue, due)
            if context.webhooks is not None:
                context.webhooks.notify()
        except Exception as error:  # noqa: BLE001 - a 451 here would make the client send it twice
            context.events.trouble("inbound", error, message_id=message.id)

    def _trace(self, zones: Sequence[str]) -> tuple[str, ...]:
        notes = [f"listener={self.envelope.origin.listener}", *zones, *self.transaction.notes]
        if self._body.has_bare:
            notes.append(self._line_ends())
        if self._client_state.tls is not None:
            notes.append(f"cipher={self._client_state.tls.cipher}")
        if self.transaction.rewritten or self.transaction.rewrites is not None:
            notes += notes_of(self.transaction)
        if self.transaction.release:
            notes.append(f"release={self.transaction.release:.0f}")
        return tuple(notes)

    def _line_ends(self) -> str:
        return f"bare_lf={self._body.bare_lf} bare_cr={self._body.bare_cr}"

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
