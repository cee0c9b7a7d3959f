"""Mail with wishes about reports and release times, put into a relay without a client; and its reports."""

import email
import email.policy
from collections.abc import Sequence
from email.message import EmailMessage
from email.message import Message as ParsedMessage

from tests.support.relay import Running
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import BodyType, Envelope, Mailbox, MessageId, Notify, Recipient, Ret

TEXT = b"From: app@example.org\r\nSubject: hello\r\n\r\nThe body.\r\n"


def to(address: str, notify: Notify = Notify.UNSET, orcpt: str = "") -> Recipient:
    return Recipient(address=Mailbox(address), notify=notify, orcpt=orcpt)


async def put(
    running: Running,
    recipients: Sequence[Recipient],
    *,
    sender: str = "app@example.org",
    ret: Ret = Ret.UNSET,
    envid: str = "",
    release: float = 0.0,
    text: bytes = TEXT,
    require_tls: bool = False,
) -> MessageId:
    """Store a message as the listener does after its end of data."""
    worker = running.worker
    now = worker.clock.now()
    addresses = [sender, *(each.address for each in recipients)]
    envelope = Envelope(
        # Its own: another source would give the id that a report in the same millisecond has.
        id=worker.ids.next(),
        sender=Mailbox(sender),
        recipients=tuple(recipients),
        created=now,
        body=BodyType.EIGHT_BIT,
        smtputf8=not all(each.isascii() for each in addresses),
        ret=ret,
        envid=envid,
        require_tls=require_tls,
    )
    deliveries = [
        Delivery(
            queue=queue_of(worker.settings.zone[0].name),
            message_id=envelope.id,
            recipient=each.address,
            created=release or now,
            next_attempt=release,
            notify=each.notify,
            orcpt=each.orcpt,
        )
        for each in recipients
    ]
    async with worker.store.begin(envelope) as writer:
        await writer.write(text)
        await writer.commit(deliveries, eight_bit=not text.isascii())
    return envelope.id


class Report:
    """A delivery report, taken apart: fields about the message, and of each recipient in order."""

    def __init__(self, body: bytes) -> None:
        parsed: EmailMessage = email.message_from_bytes(body, policy=email.policy.default)
        assert parsed.get_content_type() == "multipart/report"
        self.human, status, self.returned = parsed.iter_parts()
        self.status_type = status.get_content_type()
        groups = status.get_payload()
        if isinstance(groups, str):  # the email package knows only message/delivery-status
            decoded = status.get_payload(decode=True)
            assert isinstance(decoded, bytes)
            groups = [email.message_from_bytes(each) for each in decoded.split(b"\r\n\r\n") if each.strip()]
        assert isinstance(groups, list)
        fields = [dict(group.items()) for group in groups if isinstance(group, ParsedMessage)]
        self.message, self.recipients = fields[0], fields[1:]
