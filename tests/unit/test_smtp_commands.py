from __future__ import annotations

import pytest

from zonerelay.smtp.server.commands import COMMAND_LINE, LIMITS, MAX_LINE, parse_command
from zonerelay.smtp.server.params import (
    AUTH_MAIL_PARAMETERS,
    DSN_MAIL_PARAMETERS,
    DSN_RCPT_PARAMETERS,
    HOLD_MAIL_PARAMETERS,
    MAIL_PARAMETERS,
    parse_mail,
    parse_rcpt,
)
from zonerelay.smtp.server.paths import CommandError

EXTENDED = AUTH_MAIL_PARAMETERS | HOLD_MAIL_PARAMETERS

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


@pytest.mark.parametrize("octets", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf"])
def test_a_name_in_broken_utf8_is_replaced(octets: bytes) -> None:
    verb, name = parse_command(b"EHLO " + octets)
    assert (verb, name.strip("?")) == ("EHLO", "")


def test_lines_are_limited_by_verb_and_the_limit_does_not_move() -> None:
    for _ in range(3):
        assert parse_command(b"NOOP " + b"x" * 505)[0] == "NOOP"
        with pytest.raises(CommandError, match="Line too long"):
            parse_command(b"NOOP " + b"x" * 506)
        for verb, limit in LIMITS.items():
            assert COMMAND_LINE < limit <= MAX_LINE
            longest = verb.encode() + b" "
            longest += b"x" * (limit - 2 - len(longest))
            assert parse_command(longest)[0] == verb
            with pytest.raises(CommandError, match="Line too long"):
                parse_command(longest + b"x")


LONGEST = [
    (
        "MAIL FROM:<" + "a" * 64 + "@" + "b." * 93 + "cc> SIZE=" + "9" * 20 + " BODY=8BITMIME SMTPUTF8"
        " RET=HDRS ENVID=" + "e" * 100 + " AUTH=" + "+41" * 165 + " HOLDUNTIL=2030-01-01T00:00:00Z",
        "all parameters of MAIL, each as long as it may be",
    ),
    (
        "RCPT TO:<"
        + "a" * 64
        + "@"
        + "b." * 93
        + "cc> NOTIFY=SUCCESS,FAILURE,DELAY ORCPT=rfc822;"
        + "x" * 493,
        "all parameters of RCPT, each as long as it may be",
    ),
    ("XCLIENT NAME=" + "a" * 255 + " HELO=" + "b" * 255 + " LOGIN=" + "c" * 255, "long names"),
    ("AUTH PLAIN " + "A" * 12000, "a large token"),
    ("BDAT 99999999999999999999 LAST", "the largest chunk"),
]


@pytest.mark.parametrize(("line", "reason"), LONGEST, ids=[row[1] for row in LONGEST])
def test_extensions_have_room(line: str, reason: str) -> None:
    verb, argument = parse_command(line.encode())
    assert f"{verb} {argument}" == line
    if verb == "MAIL":
        parse_mail(argument, offered=MAIL_PARAMETERS | DSN_MAIL_PARAMETERS | EXTENDED)
    elif verb == "RCPT":
        parse_rcpt(argument, offered=DSN_RCPT_PARAMETERS)
