"""What other servers say to us.

Invariants: only `PeerError` is raised, and only for what is no SMTP; the same replies come out of any cut,
before the same fault; a reply's text can be shown; EHLO's list never raises.
"""

import re

from tests.support.feeding import cuttings
from zonerelay.model.reply import Reply
from zonerelay.smtp.client.extensions import parse_ehlo
from zonerelay.smtp.client.replies import MAX_REPLY, PeerError, ReplyParser

_CODE = re.compile(rb"\x00*[2-5][0-9][0-9](?![0-9])(-?)")


def replies(data: bytes) -> None:
    found = [_replies(pieces) for pieces in cuttings(data)]
    assert all(each == found[0] for each in found[1:])
    for reply in found[0][0]:
        assert 200 <= reply.code <= 599
        assert all(line.isprintable() for line in reply.text.split("\n"))
        assert str(reply).isprintable()
        assert len(reply.text) <= MAX_REPLY
        assert reply.is_positive + reply.is_transient + reply.is_permanent == 1
        assert reply.encode().endswith(b"\r\n")


def _replies(pieces: list[bytes]) -> tuple[list[Reply], str]:
    parser, found = ReplyParser(), []
    try:
        for piece in pieces:
            parser.feed(piece)
            while (reply := parser.next_reply()) is not None:
                found.append(reply)
    except PeerError as error:
        return found, _fault(str(error))
    assert parser.has_input == _is_unfinished(b"".join(pieces))
    return found, "more" if parser.has_input else ""


def _fault(text: str) -> str:
    """It goes to a log."""
    assert text.isprintable()
    assert len(text) < 200
    return text


def _is_unfinished(data: bytes) -> bool:
    """A line without its end, or one with a code that announces another; lines without a code are skipped."""
    *lines, last = data.split(b"\n")
    codes = (match for line in reversed(lines) if (match := _CODE.match(line)))
    latest = next(codes, None)
    return last != b"" or (latest is not None and latest[1] == b"-")


def ehlo(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    offered = parse_ehlo(text)
    assert offered.size is None or 0 < offered.size < 10**20
    assert offered.size is None or offered.size_offered
    assert parse_ehlo(text.swapcase()) == offered or not text.isascii()
