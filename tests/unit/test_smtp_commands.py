from __future__ import annotations

import pytest

from zonerelay.smtp.commands import MAX_LINE, parse_command
from zonerelay.smtp.paths import CommandError

TABLE = [
    (b"NOOP", ("NOOP", ""), "bare verb"),
    (b"noop  ", ("NOOP", ""), "verbs have no case; trailing blanks are tolerated"),
    (b"MAIL FROM:<A@b>", ("MAIL", "FROM:<A@b>"), "the argument keeps its case"),
    (b"EHLO   x", ("EHLO", "x"), "several blanks"),
    (b"", ("", ""), "an empty line"),
    ("RCPT TO:<é@x>".encode(), ("RCPT", "TO:<é@x>"), "UTF-8"),
]


@pytest.mark.parametrize(("line", "expected", "reason"), TABLE, ids=[row[2] for row in TABLE])
def test_verb_and_argument(line: bytes, expected: tuple[str, str], reason: str) -> None:
    assert parse_command(line) == expected


@pytest.mark.parametrize(
    "octet", [b"\x00", b"\r", b"\t", b"\x1b", b"\x7f", b"\x0b", "\x85".encode(), "\u2028".encode()]
)
def test_control_characters_are_refused(octet: bytes) -> None:
    with pytest.raises(CommandError, match=r"500 5\.5\.2|553 5\.6\.7"):
        parse_command(b"MAIL FROM:<a" + octet + b"b@c>")


@pytest.mark.parametrize("octets", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf"])
def test_broken_utf8_is_refused(octets: bytes) -> None:
    with pytest.raises(CommandError, match=r"553 5\.6\.7"):
        parse_command(b"RCPT TO:<" + octets + b"@c>")
    with pytest.raises(CommandError, match=r"500 5\.5\.2"):
        parse_command(b"EHLO " + octets)


def test_lines_are_limited_by_verb_and_the_limit_does_not_move() -> None:
    for _ in range(3):
        assert parse_command(b"NOOP " + b"x" * 505)[0] == "NOOP"
        with pytest.raises(CommandError, match="Line too long"):
            parse_command(b"NOOP " + b"x" * 506)
        longest = b"MAIL FROM:<a@b> " + b"x" * (MAX_LINE - 2 - 16)
        assert parse_command(longest)[0] == "MAIL"
        with pytest.raises(CommandError, match="Line too long"):
            parse_command(longest + b"x")
