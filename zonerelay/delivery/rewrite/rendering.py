"""Modifies messages as their zone requires: header fields, DKIM signatures, and the sender (SRS).

The stored message never changes, nor do the queue, the logs and the reports. A rendition is a separate
message with another size and perhaps another sender; its body is a new header followed by the stored body.
The zone's rules are applied first (remove, replace, add), the signature last.

Policies:

- A zone that changes nothing costs only one check (`changes`).
- Renditions are cached for a while, so that a message with a hundred destinations is signed once and every
  connection gets the same bytes. One task renders a message; other tasks wait for it.
- A message that cannot be changed (a header without an end, a sender that becomes too long) is sent
  unchanged, which is logged. If the zone requires a signature, the message waits instead.
- The header is read before the message is sent, and the rest too if it has no stored hash (our own reports,
  mail from before there were keys).
- For hosts without 8BITMIME or SMTPUTF8 a message is first converted (`Conversion`), then changed and signed.
  A signature of its author would break, so the zone decides about such mail (`convert`).
- Lines over 998 bytes are converted for every host, because some hosts refuse or break them, which also
  breaks our signature. Mail of an unauthenticated client is not converted for this reason.

StoreError is raised if the store fails, and RenderError with the deferral's reply. The caller turns any other
exception into a deferral.

`Conversion` reads a stored message as it is after a conversion (`message/conversion`): in seven bits for
hosts that accept nothing else, and without lines that some hosts refuse.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Protocol

import msgspec
from msgspec import structs

from zonerelay.config.settings import BodyConversion, DkimMode, ZoneSettings
from zonerelay.message.conversion import ConversionPlan, ConversionSurvey, Encoder, NotConvertibleError
from zonerelay.message.dkim import signature as dkim
from zonerelay.message.dkim.signature import DkimKey, UnsignedField
from zonerelay.message.header import EMPTY_LINE, edit_header, read_header
from zonerelay.message.srs import Srs, SrsError
from zonerelay.model.clock import Clock
from zonerelay.model.envelope import NULL_SENDER, BodyType, Mailbox, Message, MessageId
from zonerelay.model.reply import Reply
from zonerelay.process.tasks import RepeatedWork
from zonerelay.telemetry.events.events import Events


class Conversion(msgspec.Struct, frozen=True):
    """How a message is converted, and its size after the conversion."""

    plan: ConversionPlan
    size: int

    def of(self, message: Message) -> Message:
        message = structs.replace(message, size=self.size, plain_lines=False, long_lines=False, body_hash="")
        if not self.plan.seven_bit:
            return message
        envelope = structs.replace(message.envelope, body=BodyType.SEVEN_BIT, smtputf8=False)
        return structs.replace(message, envelope=envelope, eight_bit=False)

    def reader(self, read_body: ReadBody) -> ReadBody:
        return lambda message_id: _converted(self.plan, read_body(message_id))


async def conversion_of(
    message_id: MessageId, read_body: ReadBody, *, seven_bit: bool, signed_too: bool
) -> Conversion | None:
    """Return the conversion that a message needs, or None if it needs none. The body is read once, or twice
    if it must be converted. Raise NotConvertibleError and StoreError.
    """
    survey = ConversionSurvey(seven_bit=seven_bit)
    async with aclosing(_in_turns(read_body(message_id))) as pieces:
        async for piece in pieces:
            survey.feed(piece)
    survey.finish()
    if not survey.plan.needed:
        return None
    if survey.signed and not signed_too:
        raise NotConvertibleError("the message is already signed by its author")
    size = 0
    async with aclosing(_converted(survey.plan, read_body(message_id))) as written:
        async for piece in written:
            size += len(piece)
    return Conversion(survey.plan, size)


async def _converted(plan: ConversionPlan, pieces: Pieces) -> Pieces:
    """Yield the converted message in chunks. No chunk is empty."""
    writer = Encoder(plan)
    async with aclosing(_in_turns(pieces)) as turns:
        async for piece in turns:
            if written := writer.feed(piece):
                yield written
        if written := writer.finish():
            yield written


async def _in_turns(pieces: Pieces) -> Pieces:
    """Yield the chunks, and let other tasks run after each, because the store may return all of them at once
    and converting one takes up to 35 ms.
    """
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece
            await asyncio.sleep(0)


# Makes DKIM signatures: slow ones in a thread if a CPU core is free for it, others on the event loop.
#
# RSA with 2048 bits takes as long as all other work for a small message, and releases Python's lock during
# this time (from cryptography 49 on), so a thread lets the loop continue. Switching to it and back costs
# half as much as the signature. So the thread gets all digests of one loop iteration at once, and a single
# digest is signed on the loop. All work but the signature is done before.

_AT_ONCE = 8  # digests that the thread gets at a time; their messages wait for the last one

_Job = tuple[UnsignedField, asyncio.Future[bytes]]


class DkimSigner(RepeatedWork):
    """Signs messages with DKIM. `threaded` enables a thread, which starts with the first slow signature."""

    def __init__(self, *, threaded: bool) -> None:
        self._threaded = threaded
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[_Job] = deque()

    async def sign(self, header: bytes, body_hash: str, keys: Sequence[DkimKey], *, now: float) -> bytes:
        """Return the DKIM-Signature fields, each with its CRLF."""
        fields = []
        for each in dkim.unsigned_fields(header, body_hash, keys, now=now):
            if self._threaded and each.key.slow:
                signature = await self._gathered(each)
            else:
                signature = each.key.sign(each.digest)
            fields.append(each.signed(signature))
        return b"".join(fields)

    def _gathered(self, unsigned: UnsignedField) -> asyncio.Future[bytes]:
        signature: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append((unsigned, signature))
        self.begin()
        return signature

    async def _run(self) -> None:
        while self._waiting:
            jobs = [self._waiting.popleft() for _ in range(min(len(self._waiting), _AT_ONCE))]
            if len(jobs) == 1:
                signatures = _signatures(jobs)
            else:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="dkim")
                loop = asyncio.get_running_loop()
                signatures = await loop.run_in_executor(self._thread, _signatures, jobs)
            for (_, future), signature in zip(jobs, signatures, strict=True):
                if future.done():
                    continue
                if isinstance(signature, bytes):
                    future.set_result(signature)
                else:
                    future.set_exception(signature)

    def close(self) -> None:
        """Stop the signing thread. Waiting signatures are cancelled, and later ones are made on the event
        loop.
        """
        self._threaded = False
        while self._waiting:
            self._waiting.popleft()[1].cancel()
        if self._thread is not None:
            self._thread.shutdown(wait=True)


def _signatures(jobs: Sequence[_Job]) -> list[bytes | Exception]:
    signatures: list[bytes | Exception] = []
    for unsigned, _ in jobs:
        try:
            signatures.append(unsigned.key.sign(unsigned.digest))
        except Exception as error:  # noqa: BLE001  (it is raised where the signature is awaited)
            signatures.append(error)
    return signatures


Pieces = AsyncGenerator[bytes, None]
ReadBody = Callable[[MessageId], Pieces]
"""Reads a stored body in chunks. The iterator raises StoreError."""

CheckClaim = Callable[[MessageId], None]
"""Raises ClaimLostError if another relay may be sending the message."""


async def _hash_of(pieces: Pieces) -> str:
    """Return the DKIM body hash for relaxed canonicalization."""
    body = dkim.RelaxedBody()
    async with aclosing(_in_turns(pieces)) as turns:
        async for piece in turns:
            body.feed(piece)
    return body.digest()


async def _spliced(header: bytes, pieces: Pieces, skipped: int) -> Pieces:
    """Yield the chunks with `header` in place of their first `skipped` bytes. No chunk is empty."""
    async with aclosing(pieces):
        async for piece in pieces:
            rest, skipped = piece[skipped:], max(skipped - len(piece), 0)
            if rest:
                yield header + rest
                header = b""
    if header:
        yield header


MAX_HEADER = 1024 * 1024
"""Bytes of a header that are examined, unless a listener accepts longer ones."""
OUR_FIELDS = 64 * 1024
"""Bytes by which a header in the spool may be longer than the client's."""

MAX_KEPT = 1000
MAX_KEPT_OCTETS = 4 * 1024 * 1024
KEEP_FOR = 900.0
"""Seconds. A signature contains a time, and keys and SRS timestamps change with the day."""

MAX_COMPLAINTS = 1000
"""Reasons for a missing signature that are reported, once each."""

SIGNED, NO_KEY, FAILED = "signed", "no_key", "failed"

_Key = tuple[MessageId, str, bool]


class RenderError(Exception):
    """The message cannot be sent as its zone requires. `reply` is the deferral."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(str(reply))
        self.reply = reply


class SigningKeys(Protocol):
    """Provides the DKIM keys for rendering. `message.dkim.keys` implements it."""

    def for_author(self, domain: str, now: float) -> Sequence[DkimKey]: ...


class RenderedMessage(msgspec.Struct, frozen=True):
    """A message and its body as they are sent, with the changes that the zone makes."""

    message: Message
    read_body: ReadBody


class _ZoneChanges(msgspec.Struct, frozen=True):
    """The changes that one zone makes to every message, from its settings."""

    zone: ZoneSettings
    add: tuple[tuple[str, str], ...]
    replace: tuple[tuple[str, str], ...]
    keys: SigningKeys | None
    srs: Srs | None

    changes_header: bool
    changes_all: bool
    """Whether every message is changed. Otherwise only those are that need a conversion."""

    @classmethod
    def of(cls, zone: ZoneSettings, keys: SigningKeys | None, srs: Srs | None) -> _ZoneChanges:
        add, replace = _rules(zone.header_add), _rules(zone.header_replace)
        keys = None if zone.dkim is DkimMode.OFF else keys
        srs = srs if zone.srs else None
        signs = keys is not None or zone.dkim is DkimMode.REQUIRED
        changes_header = signs or bool(add or replace or zone.header_remove)
        return cls(zone, add, replace, keys, srs, changes_header, changes_header or srs is not None)


class _Rendition(msgspec.Struct, frozen=True, eq=False):
    """A message as modified for one zone. `header` replaces the first `skipped` bytes. Both are empty when
    the header stays unchanged.
    """

    plan: _ZoneChanges
    header: bytes
    skipped: int
    sender: Mailbox
    until: float
    conversion: Conversion | None

    def of(self, message: Message) -> Message:
        if self.conversion is not None:
            message = self.conversion.of(message)
        envelope, header = message.envelope, self.header
        if self.sender != envelope.sender:
            envelope = structs.replace(envelope, sender=self.sender)
        return structs.replace(
            message,
            envelope=envelope,
            size=message.size - self.skipped + len(header),
            plain_lines=message.plain_lines and not (header.startswith(b".") or b"\r\n." in header),
        )


class Renderer:
    """Creates messages as their zones send them, with header changes and signatures. `configure` may be
    called at any time; a rendition in progress ends under the old settings.
    """

    def __init__(
        self, *, read_body: ReadBody, events: Events, clock: Clock, signing: DkimSigner | None = None
    ) -> None:
        self._read_body = read_body
        self._signing = signing or DkimSigner(threaded=False)
        self._events = events
        self._clock = clock
        self._kept: OrderedDict[_Key, _Rendition] = OrderedDict()
        self._rendering: dict[_Key, asyncio.Future[None]] = {}
        self.configure(keys=None, srs=None, max_header_size=0)

    def configure(self, *, keys: SigningKeys | None, srs: Srs | None, max_header_size: int) -> None:
        """Apply new settings. `keys` is None without any [[dkim]]. `max_header_size` is the largest of the
        listeners', in bytes.
        """
        self._keys = keys
        self._srs = srs
        self._max_header = max(max_header_size, MAX_HEADER) + OUR_FIELDS
        self._plans: dict[str, _ZoneChanges] = {}
        self._complained: set[str] = set()
        self._kept.clear()
        self._kept_octets = 0

    def changes(self, zone: ZoneSettings, message: Message) -> bool:
        """Return whether the zone changes the message before sending it."""
        return self._plan(zone).changes_all or _needs_repair(zone, message)

    def _plan(self, zone: ZoneSettings) -> _ZoneChanges:
        plan = self._plans.get(zone.name)
        if plan is None or plan.zone is not zone:
            plan = self._plans[zone.name] = _ZoneChanges.of(zone, self._keys, self._srs)
        return plan

    async def render(self, zone: ZoneSettings, message: Message) -> RenderedMessage:
        """Return the message as this zone sends it, with its header changes and signatures. Raise StoreError
        and RenderError.
        """
        if not self.changes(zone, message):
            return RenderedMessage(message, self._read_body)
        return await self._of_plan(zone, message, seven_bit=False)

    async def in_seven_bits(self, zone: ZoneSettings, message: Message) -> RenderedMessage | None:
        """Return the message converted to 7-bit, or None if the zone does not allow that or the conversion
        would lose content. Raise StoreError and RenderError.
        """
        if zone.convert is BodyConversion.NEVER:
            return None
        try:
            return await self._of_plan(zone, message, seven_bit=True)
        except NotConvertibleError as error:
            self._events.sent_unchanged(message.id, zone.name, f"cannot be converted to 7 bits: {error}")
            return None

    async def _of_plan(self, zone: ZoneSettings, message: Message, *, seven_bit: bool) -> RenderedMessage:
        plan = self._plan(zone)
        key = (message.id, zone.name, seven_bit)
        while (rendition := self._known(key, plan)) is None:
            other = self._rendering.get(key)
            if other is None:
                rendition = await self._make(plan, message, key)
                break
            await asyncio.wait([other])  # if the other task failed, this one tries
        return self._rendered(message, rendition)

    # Cached renditions.

    def _known(self, key: _Key, plan: _ZoneChanges) -> _Rendition | None:
        rendition = self._kept.get(key)
        if rendition is None:
            return None
        if rendition.plan != plan or rendition.until < self._clock.monotonic():
            self._forget(key)
            return None
        self._kept.move_to_end(key)
        return rendition

    def _keep(self, key: _Key, rendition: _Rendition) -> None:
        self._kept[key] = rendition
        self._kept_octets += len(rendition.header)
        while self._kept_octets > MAX_KEPT_OCTETS or len(self._kept) > MAX_KEPT:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: _Key) -> None:
        self._kept_octets -= len(self._kept.pop(key).header)

    # Rendering.

    def _rendered(self, message: Message, rendition: _Rendition) -> RenderedMessage:
        read = self._reader(rendition.conversion)
        return RenderedMessage(
            rendition.of(message),
            lambda message_id: _spliced(rendition.header, read(message_id), rendition.skipped),
        )

    def _reader(self, conversion: Conversion | None) -> ReadBody:
        return self._read_body if conversion is None else conversion.reader(self._read_body)

    async def _make(self, plan: _ZoneChanges, message: Message, key: _Key) -> _Rendition:
        done = self._rendering[key] = asyncio.get_running_loop().create_future()
        try:
            conversion = await self._conversion(plan.zone, message, seven_bit=key[2])
            rendition = await self._rendition(plan, message, conversion)
        finally:
            del self._rendering[key]
            done.set_result(None)
        # A conversion alone is repeated, because its plan may have many parts.
        if plan.changes_all and self._plans.get(plan.zone.name) == plan and key not in self._kept:
            self._keep(key, rendition)
        return rendition

    async def _conversion(
        self, zone: ZoneSettings, message: Message, *, seven_bit: bool
    ) -> Conversion | None:
        """Return how the message must be converted, or None if it need not be. Raise StoreError, and
        NotConvertibleError if 7-bit is required.
        """
        if not (seven_bit or _needs_repair(zone, message)):
            return None
        always = zone.convert is BodyConversion.ALWAYS
        try:
            return await conversion_of(message.id, self._read_body, seven_bit=seven_bit, signed_too=always)
        except NotConvertibleError as error:
            if seven_bit:
                raise
            self._events.sent_unchanged(message.id, zone.name, f"long lines: {error}")
            return None

    async def _rendition(
        self, plan: _ZoneChanges, message: Message, conversion: Conversion | None
    ) -> _Rendition:
        if conversion is not None:
            message = conversion.of(message)
        read = self._reader(conversion)
        now, until = self._clock.now(), self._clock.monotonic() + KEEP_FOR
        sender = self._sender(plan, message, now)
        old = new = b""
        if plan.changes_header:
            header, is_whole = await read_header(read(message.id), self._max_header)
            if not is_whole:
                self._events.sent_unchanged(message.id, plan.zone.name, "the header has no end")
                self._not_signed(plan, "the header has no end")
            else:
                old = header
                new = edit_header(header, add=plan.add, replace=plan.replace, remove=plan.zone.header_remove)
                body = _spliced(b"", read(message.id), len(old) + len(EMPTY_LINE))
                new = await self._signature(plan, message, new, body, now) + new
                if new == old:
                    old = new = b""
        return _Rendition(plan, new, len(old), sender, until, conversion)

    def _sender(self, plan: _ZoneChanges, message: Message, now: float) -> Mailbox:
        sender = message.envelope.sender
        if plan.srs is None:
            return sender
        if message.envelope.origin.stranger:
            # The sender address of an unauthenticated client is not proven. An SRS address for it would let
            # the client write to that person, and have the next host's report sent there.
            return NULL_SENDER
        try:
            return plan.srs.forward(sender, now)
        except SrsError as error:
            self._events.sent_unchanged(message.id, plan.zone.name, f"srs: {error}")
            return sender

    async def _signature(
        self, plan: _ZoneChanges, message: Message, header: bytes, body: Pieces, now: float
    ) -> bytes:
        """Return the DKIM-Signature fields to prepend, or nothing if the message is not signed. Raise
        RenderError if the zone requires a signature and has no key.
        """
        if plan.keys is None:
            self._not_signed(plan, "no [[dkim]] key is configured")
            return b""
        domain = dkim.author_domain(header)
        # The From field of a client that may not relay is not proven, and the client could spread mail with
        # our signature.
        stranger = message.envelope.origin.stranger
        keys = plan.keys.for_author(domain, now) if domain and not stranger else ()
        if not keys:
            self._events.metrics.dkim.add((NO_KEY,))
            why = f"no key for {domain}" if domain else "From contains no author address"
            self._not_signed(plan, "the client was not allowed to relay" if stranger else why)
            return b""
        try:
            body_hash = message.body_hash or await _hash_of(body)
            fields = await self._signing.sign(header, body_hash, keys, now=now)
        except Exception:
            self._events.metrics.dkim.add((FAILED,))
            raise
        self._events.metrics.dkim.add((SIGNED,))
        return fields

    def _not_signed(self, plan: _ZoneChanges, why: str) -> None:
        """Handle a message that cannot be signed. If the zone requires a signature, report it once and
        raise RenderError.
        """
        if plan.zone.dkim is not DkimMode.REQUIRED:
            return
        zone = plan.zone.name
        if why not in self._complained and len(self._complained) < MAX_COMPLAINTS:
            self._complained.add(why)
            self._events.dkim_missing(zone, why)
        raise RenderError(Reply(451, "3.5", f"zone {zone} requires a DKIM signature: {why}"))


def _needs_repair(zone: ZoneSettings, message: Message) -> bool:
    """Return whether a message has lines that are too long and must be converted. Messages of unauthenticated
    clients are left unchanged.
    """
    return (
        message.long_lines
        and zone.convert is not BodyConversion.NEVER
        and not message.envelope.origin.stranger
    )


def _rules(fields: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Split header fields of the form `Name: value` into pairs of a name and a value."""
    parts = (field.partition(":") for field in fields)
    return tuple((name, value.strip()) for name, _, value in parts)
