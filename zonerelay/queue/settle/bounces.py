"""Creates the delivery status notification for a sender, to be stored with the outcomes that it reports.

A report goes from the null sender to the original sender (RFC 3464 2, RFC 5321 4.5.5). Afterwards it is an
ordinary message, which is routed, queued and retried like any other. It returns the header of the original
message. It returns the whole message if it reports a failure, the sender requested that (RET=FULL) and the
message is no larger than `bounce.return_size` (RFC 3461 6.2). If the original cannot be read, the report is
made without it. `ReportError` means that no report can be made at all.
"""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass

from msgspec import structs

from zonerelay.config.settings import BounceSettings, ZoneSettings
from zonerelay.message.dsn import DsnKind, Notice, RecipientReport, compose
from zonerelay.message.header import fits_lines, parse_header, read_header
from zonerelay.model import envelope as envelopes
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import BodyType, Envelope, Message, MessageIdSource
from zonerelay.routing.zones.zones import ChooseZone, zone_notes
from zonerelay.store.contract import CHUNK_SIZE, OwnMessage, QueueStore, StoreError
from zonerelay.telemetry.events.events import Events

PROTOCOL = "internal"
"""`Origin.protocol` of messages that the relay creates itself."""

_END_OF_HEADER = b"\r\n\r\n"


class ReportError(Exception):
    """A DSN could not be created. The outcomes that it should report must be kept."""


@dataclass(eq=False, repr=False)
class DsnMaker:
    """Creates delivery status notifications."""

    _: KW_ONLY
    store: QueueStore
    ids: MessageIdSource
    choose_zone: ChooseZone
    hostname: str
    events: Events
    clock: Clock

    def configure(self, bounce: BounceSettings, zones: Sequence[ZoneSettings]) -> None:
        """Apply new settings for bounces and zones."""
        self.bounce = bounce
        self._zone_sizes = {zone.name: zone.max_message_size for zone in zones if zone.max_message_size}

    async def report(
        self,
        kind: DsnKind,
        message: Message,
        reports: Sequence[RecipientReport],
        *,
        retry_until: float | None = None,
    ) -> OwnMessage:
        """Create one DSN about all these recipients. Raise ReportError."""
        require_tls = message.envelope.require_tls
        # RFC 8689 5: the report about such a message also requires TLS, and returns only the header.
        wants_whole = (
            kind is DsnKind.FAILED and message.envelope.ret is envelopes.Ret.FULL and not require_tls
        )
        if wants_whole and message.eight_bit:
            # If no host accepted 8-bit content, none may accept the report that contains it.
            wants_whole = not any(report.outcome.reply.detail == "6.3" for report in reports)
        header, whole = await self._original(message, whole=wants_whole)
        now = self.clock.now()

        def made(whole: bytes) -> OwnMessage:
            dsn_id = self.ids.next()
            text = compose(
                Notice(
                    kind=kind,
                    message=message,
                    original_header=header,
                    reports=reports,
                    hostname=self.hostname,
                    dsn_id=dsn_id,
                    now=now,
                    retry_until=retry_until,
                    whole_message=whole,
                )
            )
            sender = message.envelope.sender
            envelope = Envelope(
                id=dsn_id,
                sender=envelopes.NULL_SENDER,
                recipients=(envelopes.Recipient(address=sender),),
                created=now,
                body=BodyType.SEVEN_BIT if text.isascii() else BodyType.EIGHT_BIT,
                smtputf8=not (text.partition(_END_OF_HEADER)[0].isascii() and sender.isascii()),
                origin=envelopes.Origin(protocol=PROTOCOL),
                require_tls=require_tls,
            )
            return own_mail(envelope, text, self.choose_zone)

        try:
            submit = made(whole)
            # The zone would return a report that is too large, and no report is made about a report.
            submit = made(b"") if whole and self._is_too_large(submit) else submit
            return structs.replace(submit, about=tuple(report.delivery.key for report in reports))
        except Exception as error:
            raise ReportError(f"{kind} report: {type(error).__name__}: {error}") from error

    def _is_too_large(self, submit: OwnMessage) -> bool:
        size = submit.message.size
        return any(size > self._zone_sizes.get(each.zone, size) for each in submit.deliveries)

    async def _original(self, message: Message, *, whole: bool) -> tuple[bytes, bytes]:
        """Return the header of the original message, in whole lines up to the size limit. With `whole`,
        return the message too if its size allows it.
        """
        text, most = b"", self.bounce.return_size
        while True:
            try:
                header, _ = await read_header(self.store.read_body(message.id), most)
                if whole and message.size <= most:
                    async with aclosing(self.store.read_body(message.id)) as body:
                        text = b"".join([piece async for piece in body])
            except StoreError as error:
                if await self.store.usable():
                    continue  # it was repaired, and nothing can be stored before that
                self.events.error("queue.report_header", error, message_id=message.id)
                return b"", b""
            if len(header) > most:
                header = b"".join(header[:most].rpartition(b"\r\n")[:2])
            return header, text if fits_lines(text) else b""


def own_mail(envelope: Envelope, octets: bytes, choose_zone: ChooseZone) -> OwnMessage:
    """Return a message of the relay itself, with deliveries in the zones that the routes choose."""
    headers = parse_header(octets.partition(_END_OF_HEADER)[0] + b"\r\n").fields
    zone_of = choose_zone(envelope, headers=headers, size=len(octets))
    choices = [(each.address, zone_of(each.address)) for each in envelope.recipients]
    message = Message(
        envelope=envelope,
        size=len(octets),
        chunks=-(-len(octets) // CHUNK_SIZE),
        eight_bit=not octets.isascii(),
        headers=headers,
        trace=(f"protocol={PROTOCOL}", *zone_notes(choices)),
    )
    deliveries = tuple(
        Delivery(
            queue=queue_of(choice.zone, choice.priority or envelope.priority),
            message_id=envelope.id,
            recipient=address,
            created=envelope.created,
        )
        for address, choice in choices
    )
    return OwnMessage(message, octets, deliveries)
