"""Receives one message from the connection and writes it to the store.

It processes the body between DATA (or the first BDAT) and the reply: it finds the end of data, parses the
header, adds our own fields, applies the policy's changes, and uses the store's writer. The session feeds
bytes in as they arrive, without waiting, and runs `store` in a separate task, which waits for the disk and
for the policy. At most `BACKLOG` bytes and one more read are buffered between the two, because the session
then stops reading.

Promises:

- 250 is sent only after `commit` has returned (rule 1). The session must not cancel `store` once `complete`
  is true: a message that was sent completely is stored even if the client disconnects.
- A refusal is remembered, and the body is read to its real end and discarded. An earlier reply would let the
  rest of the body run as commands. The discarded bytes use no memory. A client that continues far beyond the
  limit is `hopeless`.
- Unexpected errors are temporary (rule 3): the reply is 451 and never contains the error's text.
- Exactly the memory of a message is counted in the memory account of all sessions (`SessionMemory`).

The module makes one delivery for each recipient, in the recipient's zone. A zone that the policy chose comes
first, then one that the message names (a zone header), then the zone of the routes.

Mail with more than `MANY` recipients is not fresh: it is stored as deferred mail that was due before it was
accepted. The queue alternates between fresh and deferred mail, so a list of a million recipients does not
delay all other mail. The same applies to senders of very many messages while new mail waits long in their
zone (`limits/clients`).

Mail that the mode of a user captures goes to the zone that captures. Without such a zone it is held: it stays
in the queue until an operator releases or drops it.

The module also computes the idempotency key of a message, and compares the content of messages with the same
key. A client sets the key in the header field `Idempotency-Key`. If the listener or the user is configured
so, the Message-ID is the key. `identity` covers the submitter and the envelope, and `ContentDigest` the
content.

The digest includes From, To, Cc, Reply-To and Subject, and the body without its MIME boundaries: lines that
begin with "--" and have the length of a boundary, and the value after "boundary=". An application that
composes the message again produces another Date, other boundaries and perhaps another Message-ID.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import structs

from zonerelay.config.settings import BareLineEnds, HeaderControls, Idempotency
from zonerelay.config.units import format_size
from zonerelay.inbound.access.guard import Allowance, Guard
from zonerelay.inbound.limits.clients import MANY, Bursts
from zonerelay.inbound.limits.memory import LARGE
from zonerelay.inbound.policy import EndOfData, Headers
from zonerelay.inbound.policy.api import Changes, WholeMessage
from zonerelay.inbound.refusal import Refusal
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.client_state import ClientState
from zonerelay.inbound.state.context import IDEMPOTENCY_KEY, ListenerContext, LookupResult
from zonerelay.inbound.state.replies import MAX_DRAINED, ServerReply, decided
from zonerelay.inbound.state.transaction import NO_EDITS, ClientRewrites, HeaderEdits, MailTransaction
from zonerelay.message import header as headers
from zonerelay.message.dkim.signature import BodyHash
from zonerelay.message.header import Fields, Header, HeaderScanner
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import Envelope, Mailbox, Message, MessageId, mailboxes, path
from zonerelay.model.reply import Reply
from zonerelay.routing.zones.zones import ZoneChoice, ZoneOf, zone_notes
from zonerelay.smtp.server.line_ends import BodyReader, ChunkReader
from zonerelay.store import contract
from zonerelay.store.contract import CHUNK_SIZE, IdempotencyKey, MessageWriter

MAX_KEY = 255
COMPARED = frozenset({"from", "to", "cc", "reply-to", "subject"})
DIGEST_SIZE = 16
BLOCK = 16 * 1024
"""Bytes that are processed together. The ends of blocks depend on the content alone, not on how it
arrives.
"""

_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY}}}")
# RFC 2046 5.1.1: a boundary has at most 70 characters. Its line has two more dashes before and perhaps after
# it.
_BOUNDARY_LINE = re.compile(rb"^--[^\r\n]{1,72}+[ \t]*+(?=\r?$)", re.MULTILINE)
_BOUNDARY_VALUE = re.compile(rb"(boundary=)[^\r\n]{1,100}", re.IGNORECASE)


def key_in(fields: Fields) -> str | None:
    """Return the idempotency key in the header, or None if there is no valid one."""
    found = [value.strip() for name, value in fields if name.lower() == IDEMPOTENCY_KEY]
    return found[0] if len(found) == 1 and is_key(found[0]) else None


def is_key(text: str) -> bool:
    """Return whether the text is a valid idempotency key."""
    return _KEY.fullmatch(text) is not None


def message_id_in(fields: Fields) -> str:
    """Return the value of the Message-ID field, or an empty string unless there is exactly one."""
    found = [value.strip() for name, value in fields if name.lower() == "message-id"]
    return found[0] if len(found) == 1 else ""


def identity(kind: str, key: str, envelope: Envelope, named: Sequence[Mailbox] = ()) -> str:
    """Return an identifier that is equal for a submission and its repetitions.

    All clients that have not logged in count as one submitter: an application may try again from another
    machine, and at another node, whose listeners have other addresses. `named` are the recipients that the
    client named, if the mode of its user has replaced them, or some of them may be refused.
    """
    recipients = sorted({*(named or mailboxes(envelope.recipients))})
    parts = (kind, key, envelope.origin.user, envelope.sender, *recipients)
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for part in parts:
        octets = part.encode("utf-8", "surrogateescape")
        digest.update(b"%d:%b" % (len(octets), octets))
    return digest.hexdigest()


class FirstAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The stored response to a message with an idempotency key: its Message-ID and the replies to refused
    recipients.
    """

    message_id: str
    refused: dict[Mailbox, str]

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


class ContentDigest:
    """A digest of a message's content, which identifies repetitions. The body is fed in pieces of any
    size.
    """

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
        """Return the digest of the whole content. Nothing may be fed after this."""
        self._add(self._rest)
        self._rest = bytearray()
        return self._digest.hexdigest()

    def _add(self, block: bytearray) -> None:
        self._digest.update(_BOUNDARY_VALUE.sub(rb"\1", _BOUNDARY_LINE.sub(b"--", block)))


BY_POLICY = "policy"
BY_MODE = "mode"
OVERDUE = 1.0
"""Seconds for which such mail is overdue at its acceptance. A due time equal to that moment is set by a
sender.
"""


def first_due(envelope: Envelope, release: float = 0.0) -> float:
    """Return the Unix time of a message's first delivery attempt; 0.0 means at once, before deferred mail."""
    if release:
        return release
    return envelope.created - OVERDUE if len(envelope.recipients) > MANY else 0.0


def deliveries_of(
    envelope: Envelope,
    transaction: MailTransaction,
    zone_of: ZoneOf,
    bursts: Bursts | None = None,
    capture_zone: str = "",
) -> tuple[list[Delivery], tuple[str, ...]]:
    """Create the deliveries of a message, and return them with notes for the trace that explain their zones.

    For retries and DSNs, the age of a message with a release time begins at that time.
    """
    born = max(envelope.created, transaction.release)
    due = first_due(envelope, transaction.release)
    allowance = transaction.allowance
    deliveries: list[Delivery] = []
    choices: list[tuple[str, ZoneChoice]] = []
    for recipient in envelope.recipients:
        zone = transaction.zone_of(recipient.address)
        choice = ZoneChoice(zone, BY_POLICY) if zone else zone_of(recipient.address)
        captured = allowance is not None and allowance.is_captured(recipient.address)
        if captured and capture_zone:
            choice = ZoneChoice(capture_zone, BY_MODE)
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
    if not due and bursts is not None and bursts.is_over(envelope, deliveries):
        due = envelope.created - OVERDUE
        deliveries = [structs.replace(each, next_attempt=due) for each in deliveries]
    return deliveries, zone_notes(choices) if choices else ()


BACKLOG = 256 * 1024
MAX_PIECES = 64  # in the list: an object for every two bytes needs twenty times the counted memory
LIST = 500
"""Recipients. Storing 5,000 takes up to 50 ms of the event loop, in two iterations. If several such messages
arrive at the same time, each has its own iterations and its own write.
"""
SMALL = 16 * 1024  # a complete message that is not larger is stored before it would be counted

_NOTHING_YET = Header()
_OF_STORE: dict[type[contract.StoreError], ServerReply] = {
    contract.StoreFullError: replies.STORE_FULL,
    contract.OtherContentError: replies.OTHER_CONTENT,
    contract.InProgressError: replies.BEING_STORED,
}


class Intake:
    """Receives the body of one message: parses its header, applies changes, and writes it to the store."""

    _key_kind = "key"
    _digest: ContentDigest | None = None
    """The digest of a message with an idempotency key. Most messages have no key and never set this
    attribute.
    """

    def __init__(
        self,
        envelope: Envelope,
        transaction: MailTransaction,
        client_state: ClientState,
        context: ListenerContext,
        on_room: Callable[[], None],
    ) -> None:
        settings = context.settings
        self.envelope = envelope
        self.task: asyncio.Task[None] | None = None  # the session's task that runs `store`
        self.refusal: ServerReply | None = None
        self.detail = ""
        self.first_answer = ""  # if the message was submitted before: see `FirstAnswer`
        self.complete = False  # the end of data has arrived
        self.backlog = 0  # received bytes that the store has not accepted yet
        self.transaction = transaction
        self._client_state = client_state
        self._context = context
        self._on_room = on_room
        self._settings = settings
        self._chunks = ChunkReader() if transaction.chunked else None
        self.body = self._chunks or BodyReader()  # its `rest` belongs to commands
        self._scanner: HeaderScanner | None = HeaderScanner(
            settings.max_header_size, removes_controls=settings.header_controls is HeaderControls.REMOVE
        )
        self._header = _NOTHING_YET
        self._hash = BodyHash() if context.hash_bodies else None
        self._eight_bit = False
        self.size = 0  # received bytes of the message
        self._stored = 0  # with our own fields
        self._wire = 0
        self._ready: list[bytes] = []
        self._ready_size = 0
        self._key = transaction.idempotency_key
        self._undecided = b""  # the header, and the bytes received with it, while the policy decides
        self.held = 0  # bytes in the memory account of all sessions
        self._behind_others = False  # other large bodies are read first
        self._waiter: asyncio.Future[None] | None = None

    def begin_chunk(self, size: int, *, last: bool) -> None:
        """Start receiving a BDAT chunk of `size` bytes."""
        assert self._chunks is not None
        self._chunks.begin(size, last)

    @property
    def chunk_done(self) -> bool:
        """Whether the current BDAT chunk has arrived, and the message continues in another one."""
        return self._chunks is not None and self._chunks.chunk_done and not self.complete

    # `LargeBodies` calls the following two.

    @property
    def held_up(self) -> bool:
        """Whether reading must pause, because received bytes wait to be stored or other large bodies come
        first.
        """
        return self._behind_others or self.backlog > BACKLOG

    def resume_reading(self) -> None:
        self._behind_others = False
        self._on_room()

    @property
    def hopeless(self) -> bool:
        """Whether the client has sent far more bytes than the limit without ending the message."""
        return self._wire > 2 * self._settings.max_message_size + MAX_DRAINED

    @property
    def worth_storing(self) -> bool:
        """Whether enough bytes are waiting for one write to the store, or the message has arrived
        completely.
        """
        return self.complete or self._ready_size >= CHUNK_SIZE or bool(self._undecided)

    def feed(self, data: bytes) -> None:
        self._wire += len(data)
        body = self.body
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
        if self._wire > LARGE:
            bodies = self._context.large_bodies
            self._behind_others = not self.complete and not bodies.may_read(self, len(data))
            if self.complete:
                bodies.leave(self)
        if self._waiter is not None and self.worth_storing:
            self._wake()

    async def store(self) -> MessageId | None:
        """Store the body and commit the message, and return its id, or None if it was refused: see `refusal`.
        Raise only CancelledError.
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
                        self._waiter = asyncio.get_running_loop().create_future()
                        await self._waiter
        except contract.StoredBeforeError as error:
            self._context.events.repeated(error.message_id, self.envelope)
            self.first_answer = error.answer
            return error.message_id
        except contract.StoreError as error:
            self.refuse(_OF_STORE.get(type(error), replies.STORE_FAILURE), str(error))
        except Exception as error:  # noqa: BLE001 - rule 3
            self._fail(error)
        # Without a commit, the store discards the written data.
        assert self.refusal is not None
        return None

    def _take(self, piece: bytes) -> None:
        self.size += len(piece)
        allowance = self.transaction.allowance
        if self.size > self._settings.max_message_size:
            self.refuse(replies.too_big(self._settings.max_message_size))
        elif allowance is not None and (refusal := allowance.size_refusal(self.size)) is not None:
            self.refuse(self._context.guarded(refusal))
        elif self.body.has_bare and self._settings.bare_line_ends is BareLineEnds.REJECT:
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
        except headers.HeaderTooLargeError:
            self.refuse(replies.header_too_big(self._settings.max_header_size))
            return
        if scanner.header is not None:
            self._begin_body(scanner, scanner.header)

    def _begin_body(self, scanner: HeaderScanner, header: Header) -> None:
        """Process the header section, now that it has arrived completely."""
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
        elif self.transaction.over_quota is not None and not self._key:
            self.refuse(context.guarded(self.transaction.over_quota))
        elif header.received > self._settings.max_received:
            self.refuse(replies.MAIL_LOOP)
        elif client_state.is_bound and not client_state.may_write_as(headers.authors(header, held)):
            self.refuse(replies.FROM_NOT_YOURS)
        else:
            rewrites = self.transaction.rewrites
            self._open(held if rewrites is None else self._rewritten(rewrites, held, scanner.size))

    def _open(self, held: bytes) -> None:
        """Pass the header with the relay's own fields to the store, or keep it for the policy's decision."""
        if Headers in self._context.asked:
            self._undecided = held
            self.backlog += len(held)
        elif self.transaction.edits is not NO_EDITS:
            self._append(self._edited(held))
        else:
            self._append(self._own_fields(self._header))
            self._append(held)

    def _rewritten(self, rewrites: ClientRewrites, held: bytes, size: int) -> bytes:
        """Return the received bytes with rewritten addresses in the header, their first `size` bytes."""
        lead = self._header.lead
        whole = lead + held[:size]
        rewritten = rewrites.rewrite_header(whole)
        if rewritten == whole:
            return held
        block = rewritten[len(lead) :]
        self._header = headers.parse_header(block).without(self._context.dropped)
        return block + held[size:]

    def _dropped_from(self, header: Header) -> Header:
        """Return the header without the fields that the relay removes from every message. A zone header
        applies if its client is trusted.
        """
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
            if (key := key_in(header.fields)) is None:
                self.refuse(replies.BAD_KEY)
            self._key = self._key or key or ""
        gone = context.dropped & header.names
        self.transaction.edits = self.transaction.edits.and_those_of(HeaderEdits(remove=tuple(gone)))
        return header.without(gone)

    def _once(self) -> IdempotencyKey:
        assert self._digest is not None
        context, transaction = self._context, self.transaction
        return IdempotencyKey(
            identity(self._key_kind, self._key, self.envelope, transaction.asked or transaction.named),
            self._digest.hexdigest(),
            context.clock.now() + context.idempotency_window,
            FirstAnswer(message_id_in(self._stored_fields()), transaction.refused).text(),
        )

    def _edited(self, held: bytes) -> bytes:
        """Return the header and the bytes after it (`held`) with the relay's own fields and the policy's
        edits.
        """
        edits, header = self.transaction.edits, self._header
        names = header.names - {name.lower() for name in edits.remove} | {
            name.lower() for name, _ in edits.add
        }
        rest = headers.edit_header(header.lead + held, add=edits.add, remove=edits.remove)
        return self._own_fields(structs.replace(header, names=names, lead=b"")) + rest

    def _own_fields(self, header: Header) -> bytes:
        """Return the header fields that the relay adds: Received, and required fields that are missing."""
        return headers.trace_fields(
            self.envelope, header, hostname=self._context.hostname, hide_client=self._settings.hide_client
        )

    async def _decide_header(self) -> None:
        """Call the policy with the header, and apply its decision. Bytes that arrive in the meantime are
        queued after it.
        """
        verdict = await self._context.ask(Headers(**self._event()))
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

    def _event(self) -> dict[str, Any]:  # Any: values of every field's type
        """Return the fields that all policy events about the message share."""
        envelope = self.envelope
        return {
            "client": self._client_state.info,
            "message_id": envelope.id,
            "sender": envelope.sender,
            "recipients": mailboxes(envelope.recipients),
            "fields": self._header.fields,
        }

    def _refused_by(self, verdict: LookupResult) -> bool:
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
        """Discard the rest of the message, and send the refusal after its end."""
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
        """Add the change of this message's memory use to the total of all sessions."""
        held = self.backlog if self._scanner is None else self.backlog + len(self._scanner.held)
        if held != self.held:
            self._context.memory.used += held - self.held
            self.held = held

    def release(self) -> None:
        """Stop counting this message in the memory of all sessions and among the large bodies."""
        if self._wire > LARGE:
            self._context.large_bodies.leave(self)
        self._context.memory.used -= self.held
        self.held = 0

    def _fail(self, error: Exception) -> None:
        self._context.events.error("inbound", error, message_id=self.envelope.id)
        self.refuse(replies.LOCAL_ERROR)

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
        if self.transaction.unless_repeated is not None:
            await self._ask(writer, self.transaction.unless_repeated)
            return None
        if EndOfData in self._context.asked:
            verdict = await self._context.ask(EndOfData(**self._event(), size=self.size))
            if self._refused_by(verdict):
                return None
            self.transaction.decide(verdict.decision)
        if self.transaction.allowance is not None and self._context.guard is not None:
            return await self._count(writer, self._context.guard, self.transaction.allowance)
        return await self._take_turn(writer)

    async def _count(self, writer: MessageWriter, guard: Guard, allowance: Allowance) -> MessageId | None:
        """Count the message against the quotas of its user, unless it is refused."""
        sent = len(self.transaction.named), self.size
        counted = await guard.take(allowance, *sent)
        if isinstance(counted, Refusal):
            await self._ask(writer, self._context.guarded(counted))
            return None
        accepted: MessageId | None = None
        try:
            if self.refusal is None:
                accepted = await self._take_turn(writer)
        finally:
            if accepted is None:
                await guard.give_back(allowance, *sent, counted)
        return accepted

    async def _ask(self, writer: MessageWriter, refusal: ServerReply) -> None:
        """Refuse the message; raise StoredBeforeError instead if it repeats a stored one."""
        if self._key:
            with suppress(contract.NotStoredBeforeError):
                await writer.commit((), once=structs.replace(self._once(), asks_only=True))
        self.refuse(refusal)

    async def _take_turn(self, writer: MessageWriter) -> MessageId | None:
        if len(self.envelope.recipients) <= LIST:
            return await self._accept(writer)
        async with self._context.lists:
            return await self._accept(writer)

    async def _accept(self, writer: MessageWriter) -> MessageId | None:
        zone_of = self._context.choose_zone(
            self.envelope, headers=self._header.fields, size=self.size, named=self.transaction.zone_named
        )
        deliveries, zones = deliveries_of(
            self.envelope, self.transaction, zone_of, self._context.bursts, self._context.capture_zone
        )
        allowance = self.transaction.allowance
        if allowance is not None and (barred := allowance.zone_refusal(deliveries)):
            self.refuse(self._context.guarded(barred))
            return None
        sizes = self._context.zone_sizes
        if sizes and all(self._stored > sizes.get(each.zone, self._stored) for each in deliveries):
            # A message that is too large for only some of its zones bounces in those.
            limit = max(sizes[each.zone] for each in deliveries)
            answer = replies.in_detail(
                replies.TOO_BIG, f"Message exceeds {format_size(limit)}, the maximum size that can be relayed"
            )
            self.refuse(answer, "larger than the limits of its zones")
            return None
        if len(deliveries) > LIST:
            await asyncio.sleep(0)
        webhooks = self._context.webhooks
        message = await writer.commit(
            deliveries,
            companions=None if webhooks is None else webhooks.accepted,
            once=self._once() if self._key else None,
            headers=self._stored_fields(),
            eight_bit=self._eight_bit,
            plain_lines=self.body.is_plain,
            long_lines=self.body.has_long,
            body_hash=self._hash.digest() if self._hash is not None else "",
            trace=self._trace(zones),
        )
        # In the next iteration: the client does not wait for it.
        asyncio.get_running_loop().call_soon(self._announce, message)
        return self.envelope.id

    def _stored_fields(self) -> Fields:
        """Return the header fields of the message, including the Message-ID and From that the relay added."""
        fields = self._header.fields
        if headers.lacks_author(self.envelope, self._header):
            fields = (*fields, ("From", path(self.envelope.sender)))
        if "message-id" in self._header.names:
            return fields
        added = (value for name, value in self.transaction.edits.add if name.lower() == "message-id")
        value = next(added, f"<{self.envelope.id}@{self._context.hostname}>")
        return (*fields, ("Message-ID", value))

    def _announce(self, message: Message) -> None:
        """Log the accepted message. The message is durable, so the client gets 250 even if this fails."""
        context = self._context
        try:
            context.events.accepted(message, bare_lf=self.body.bare_lf, bare_cr=self.body.bare_cr)
        except Exception as error:  # noqa: BLE001 - a 451 here would make the client send it twice
            context.events.error("inbound", error, message_id=message.id)

    def _trace(self, zones: Sequence[str]) -> tuple[str, ...]:
        notes = [f"listener={self.envelope.origin.listener}", *zones, *self.transaction.notes]
        if self.body.has_bare:
            notes.append(self._line_ends())
        if self._client_state.tls is not None:
            notes.append(f"cipher={self._client_state.tls.cipher}")
        if self.transaction.rewritten or self.transaction.rewrites is not None:
            notes += self.transaction.rewriting_notes()
        if self.transaction.release:
            notes.append(f"release={self.transaction.release:.0f}")
        return tuple(notes)

    def _line_ends(self) -> str:
        return f"bare_lf={self.body.bare_lf} bare_cr={self.body.bare_cr}"

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


COPIES = 2
SLICE = 4 * CHUNK_SIZE  # bytes that are processed in one iteration of the event loop


class WholeIntake(Intake):
    """Holds a whole message in memory for an aiosmtpd handler, before any of it is stored.

    The memory account of all sessions counts the body twice: first the received buffer and the whole message,
    then the whole message and the data for the store. The listener's size limit is at most `policy_max_size`,
    and a larger message is refused without calling the handler, so no handler gets a part of a message.

    If the handler accepts, its changes to the envelope are checked and applied. Then [[rewrite]] applies, and
    the message (from the client or from the handler) is processed like every message: size, header, loop
    check, DKIM hash, store.
    """

    def __init__(self, *parts: Any) -> None:  # Any: what an Intake takes
        super().__init__(*parts)
        self._gathered = bytearray()  # a list of bytes objects would use forty times the counted memory
        self._whole = b""
        self._counted = 0  # bytes of the received buffer, then of the whole message
        # The header is parsed in the message that the handler accepts.
        self._later, self._scanner = self._scanner, None
        self._gathers = True

    async def store(self) -> MessageId | None:
        try:
            await self._ask_handler()
        except Exception as error:  # noqa: BLE001 - rule 3
            self._fail(error)
        return await super().store() if self.refusal is None else None

    def _take(self, piece: bytes) -> None:
        if not self._gathers:
            super()._take(piece)
            return
        self._counted += len(piece)
        if self._counted > self._settings.max_message_size:
            self.refuse(replies.too_big(self._settings.max_message_size))
        elif self.body.has_bare and self._settings.bare_line_ends is BareLineEnds.REJECT:
            self.refuse(replies.BARE_LINE_ENDS, self._line_ends())
        else:
            self._gathered += piece
            self._charge()

    def _charge(self) -> None:
        super()._charge()
        extra = COPIES * self._counted
        self._context.memory.used += extra
        self.held += extra

    def refuse(self, answer: ServerReply, detail: str = "") -> None:
        self._gathered, self._whole, self._counted = bytearray(), b"", 0
        super().refuse(answer, detail)

    async def _ask_handler(self) -> None:
        context, client_state, transaction = self._context, self._client_state, self.transaction
        self._whole, self._gathered, self._gathers = bytes(self._gathered), bytearray(), False
        event = WholeMessage(
            client=client_state.info,
            mail=transaction.mail,
            recipients=transaction.recipients,
            content=self._whole,
        )
        verdict = await context.ask(event)
        if self._refused_by(verdict):
            return
        changes = verdict.decision
        if isinstance(changes, Changes):
            failed = None
            if changes.of_envelope:
                failed = context.change_envelope(changes, transaction, client_state, step=WholeMessage.step)
            if failed is not None:
                self.refuse(*failed)
                return
            if changes.content is not None:
                self._whole, self._counted = changes.content, len(changes.content)
                self.body = ChunkReader()
                self.body.begin(len(self._whole), last=True)
        origin = client_state.origin
        if context.rewriting is not None:
            context.rewriting.rewrite(transaction, origin)
        transaction.apply_mode()
        before = self.envelope
        self.envelope = transaction.envelope(before.id, before.created, origin, before.priority)
        self._scanner = self._later
        self._charge()

    async def _commit(self, writer: MessageWriter) -> MessageId | None:
        """Pass the whole message to the store, then commit it."""
        for at in range(0, max(len(self._whole), 1), SLICE):
            piece = self._whole[at : at + SLICE]
            is_made = isinstance(self.body, ChunkReader) and not self.body.done
            self._take(self.body.feed(piece) if is_made else piece)
            if self.refusal is None and self._ready:
                await self._write(writer)
            if self.refusal is not None:
                return None
        if self._scanner is not None:
            self._begin_body(self._scanner, self._scanner.finish())
        if self.refusal is None and self._ready:
            await self._write(writer)
        return await super()._commit(writer) if self.refusal is None else None
