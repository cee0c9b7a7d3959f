"""What makes two submissions the same one."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.store.builders import envelope_for, message_id
from zonerelay.inbound.cleanup.intake import BLOCK, ContentDigest, identity, key_in
from zonerelay.message.header.headers import Fields
from zonerelay.model.envelope import Origin

FIELDS = (("Subject", "x"), ("From", "a@example.org"))


def digest(body: bytes, piece: int = 1 << 30, fields: Fields = FIELDS) -> str:
    content = ContentDigest(fields)
    for start in range(0, len(body), piece):
        content.feed(body[start : start + piece])
    return content.hexdigest()


LONG = b"".join(
    b"--%d\r\nContent-Type: multipart/x; boundary=%d\r\nline %d\r\n" % (n, n, n) for n in range(3000)
)


@pytest.mark.parametrize("piece", [1, 977, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("body", [b"", b"x", LONG, b"y" * (3 * BLOCK + 5), LONG + b"z" * BLOCK])
def test_pieces_make_no_difference(body: bytes, piece: int) -> None:
    assert digest(body, piece) == digest(body)


def test_boundaries_and_dates_are_not_compared_and_everything_else_is() -> None:
    body = b'--=_1\r\nContent-Type: multipart/alternative;\r\n boundary="=_2"\r\n\r\nhi\r\n--=_1--\r\n'
    assert digest(body) == digest(body.replace(b"=_", b"=+abc"))
    assert digest(body) == digest(body, fields=(("Date", "today"), *FIELDS, ("Message-ID", "<1@x>")))
    assert digest(body) != digest(body.replace(b"hi", b"ho"))
    assert digest(body) != digest(body, fields=(("Subject", "y"), *FIELDS[1:]))
    signature = b"-- \r\n" + b"x" * 100
    assert digest(b"--" + b"x" * 73) != digest(b"--" + b"y" * 73), "too long for a boundary"
    assert digest(signature) != digest(signature[:-1] + b"y")


def test_identity_is_who_what_from_and_to_whom() -> None:
    envelope = envelope_for(message_id(1), "b@example.net", "a@example.net")
    same = envelope_for(message_id(2), "a@example.net", "b@example.net", "a@example.net")
    first = identity("key", "k", envelope)
    assert first == identity("key", "k", same)
    others = [
        identity("message-id", "k", envelope),
        identity("key", "l", envelope),
        identity("key", "k", structs.replace(envelope, origin=Origin(user="v"))),
        identity("key", "k", structs.replace(envelope, sender=envelope.recipients[0].address)),
        identity("key", "k", structs.replace(envelope, recipients=envelope.recipients[:1])),
    ]
    assert len({first, *others}) == 6


@pytest.mark.parametrize("value", ["", " ", "a b", "é", "x" * 256, "a\tb"])
def test_a_key_is_visible_ascii_of_a_bounded_length(value: str) -> None:
    assert key_in((("Idempotency-Key", value),)) is None
    assert key_in((("IDEMPOTENCY-key", f" {'x' * 255} "),)) == "x" * 255
    assert key_in((("Idempotency-Key", "a"), ("Idempotency-Key", "a"))) is None
