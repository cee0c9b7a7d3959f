"""Records that a queue at rest has none of: what a crash leaves half done, and what relays have agreed on."""

from __future__ import annotations

import msgspec

from tests.upgrades import mail
from zonerelay.limits.authority.book import Book
from zonerelay.limits.values import Claim, Request, TurnAsk
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.store.common import records
from zonerelay.store.s3 import records as s3

FILE = "passing.json"
INTENT, BOOK = "intent on S3", "limit book"


def written() -> dict[str, str]:
    """In hexadecimal digits."""
    return {INTENT: s3.encode_head(_head()).hex(), BOOK: _book().encode().hex()}


def read_again(passing: dict[str, str]) -> dict[str, str]:
    """As this release writes what it has read."""
    return {
        INTENT: s3.encode_head(s3.decode_head("queue/…", bytes.fromhex(passing[INTENT]).rstrip(b"\n"))).hex(),
        BOOK: Book.decode(bytes.fromhex(passing[BOOK])).encode().hex(),
    }


def _head() -> s3.Head:
    """A removal that has been decided, with its report, and a step in another message."""
    one, other = (mail.queue()[at] for at in (0, 3))
    own = mail.report()
    (delivery,) = one.deliveries
    step: Delivery = other.deliveries[0]
    (row,) = s3.rows([step])
    report = s3.Report(
        message=msgspec.Raw(records.encode_message(own.message)),
        deliveries=s3.rows(own.deliveries),
        inline=own.body,
    )
    return s3.Head(
        format=s3.FORMAT,
        owner="00018bcfe56800",
        rev=2,
        message=Message(envelope=one.envelope, size=len(one.body), chunks=1),
        deliveries=s3.rows([delivery]),
        body="queue/body/of-its-own",
        intent=s3.HeadIntent(
            reports=(report,),
            steps=(
                s3.Step(step.message_id, row.zone, row.recipient, 1, row.record),
                s3.Step(step.message_id, row.zone, row.recipient, 2, s3.GONE),
            ),
        ),
        refused=mail.NOW,
    )


def _book() -> Book:
    book = Book()
    turns = (TurnAsk("example.net", "example.net", 1.0, 0.5, 2),)
    claims = (Claim("example.net", "example.com", 2, 3), Claim("example.org", "example.org", 1, 1))
    book.exchange("one", Request(4, claims, turns, everything=True), mail.NOW, until=mail.NOW + 60)
    book.exchange("two", Request(4, claims, everything=True), mail.NOW + 1, until=mail.NOW + 61)
    return book
