"""Commands of SMTP as octets: lines, verbs, and parameters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets.commands import paths
from tests.support.feeding import cuts
from zonerelay.model.envelope import BodyType
from zonerelay.smtp.server import commands, params
from zonerelay.smtp.server.commands import LineFault, LineReader, parse_command
from zonerelay.smtp.server.params import DSN_RCPT_PARAMETERS, HOLD_MAIL_PARAMETERS, parse_mail, parse_rcpt
from zonerelay.smtp.server.paths import CommandError, literal_address, read_leniently

EXTENDED = params.AUTH_MAIL_PARAMETERS | HOLD_MAIL_PARAMETERS

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
        for verb, limit in commands.LIMITS.items():
            assert commands.COMMAND_LINE < limit <= commands.MAX_LINE
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
        parse_mail(argument, offered=params.MAIL_PARAMETERS | params.DSN_MAIL_PARAMETERS | EXTENDED)
    elif verb == "RCPT":
        parse_rcpt(argument, offered=DSN_RCPT_PARAMETERS)


def read(pieces: list[bytes], limit: int = 20) -> list[bytes | LineFault]:
    reader = LineReader(limit)
    lines: list[bytes | LineFault] = []
    for piece in pieces:
        reader.feed(piece)
        while (line := reader.next()) is not None:
            lines.append(line)
    return lines


LINES = [
    (b"NOOP\r\n", [b"NOOP"], "one line"),
    (b"a\r\nb\r\n\r\n", [b"a", b"b", b""], "a pipelined group, and an empty line"),
    (b"a", [], "no line end yet"),
    (b"a\r", [], "half a line end"),
    (b"a\rb\r\n", [b"a\rb"], "a bare CR ends nothing; the command parser refuses it"),
    (b"a\nb\r\n", [LineFault.BARE_LF, b"b"], "a bare LF is a fault at once"),
    (b"\n", [LineFault.BARE_LF], "nothing but a bare LF"),
    (b"a\r\r\n", [b"a\r"], "only the last CR belongs to the line end"),
    (b"x" * 18 + b"\r\n", [b"x" * 18], "the longest line"),
    (b"x" * 19 + b"\r\nb\r\n", [LineFault.TOO_LONG, b"b"], "one octet more; the next line is read"),
    (b"x" * 90 + b"\r\nb\r\n", [LineFault.TOO_LONG, b"b"], "far too long"),
    (b"x" * 90 + b"\nb\r\n", [LineFault.BARE_LF, b"b"], "a bare LF does not end a long line either"),
]


@pytest.mark.parametrize(("stream", "expected", "reason"), LINES, ids=[row[2] for row in LINES])
def test_lines_are_the_same_in_every_cut(stream: bytes, expected: list[object], reason: str) -> None:
    for pieces in cuts(stream):
        assert read(pieces) == expected, (reason, pieces)


@pytest.mark.parametrize(("stream", "expected", "reason"), LINES, ids=[row[2] for row in LINES])
def test_a_line_alone_is_what_feed_and_next_give(stream: bytes, expected: list[object], reason: str) -> None:
    reader = LineReader(20)
    line = reader.only_line(stream)
    alone = len(expected) == 1 and isinstance(expected[0], bytes)
    assert [line] == (expected if alone else [None]), reason
    assert reader.waiting == 0
    assert reader.next() is None, "nothing was taken"


def test_a_line_behind_waiting_octets_is_not_alone() -> None:
    reader = LineReader(20)
    reader.feed(b"NO")
    assert reader.next() is None
    assert reader.only_line(b"OP\r\n") is None
    reader.feed(b"OP\r\n")
    assert reader.only_line(b"RSET\r\n") is None
    assert reader.next() == b"NOOP"
    assert reader.only_line(b"RSET\r\n") == b"RSET"


def test_the_end_of_an_overlong_line_is_not_a_line_alone() -> None:
    reader = LineReader(20)
    reader.feed(b"x" * 30)
    assert reader.next() is None
    assert reader.only_line(b"RSET\r\n") is None


def test_a_stream_without_line_end_does_not_grow() -> None:
    reader = LineReader(512)
    for _ in range(1000):
        reader.feed(b"x" * 1000)
        assert reader.next() is None
        assert reader.waiting <= 512
    reader.feed(b"\r\nNOOP\r\n")
    assert [reader.next(), reader.next(), reader.next()] == [LineFault.TOO_LONG, b"NOOP", None]


ACCEPTED = [
    ("a@example.org", "the usual"),
    ("A.B-c+d=e@Example.ORG", "case is kept"),
    ("!#$%&'*+-/=?^_`{|}~@example.org", "every atext character, as a sender"),
    ("a@b", "one label"),
    ("a@under_score.example", "underscores exist"),
    ("a@xn--bcher-kva.example", "A-label"),
    ('"a b"@example.org', "quoted, with a space"),
    ('"a@b"@example.org', "an at sign in quotes"),
    ('"a>b<c"@example.org', "brackets in quotes"),
    ('"\\""@example.org', "a quoted quote"),
    ('""@example.org', "an empty quoted string is in the grammar"),
    ("a@[192.0.2.1]", "IPv4 literal"),
    ("a@[IPv6:2001:db8::1]", "IPv6 literal"),
    ("a@[ipv6:::1]", "the tag has no case"),
    ("john..doe@example.org", "two dots: mobile networks gave out such addresses"),
    (".john.@example.org", "dots at the ends"),
    ("reply+" + "a" * 180 + "@example.org", "a long local part"),
    ("a@" + ".".join(["b" * 63] * 3), "long labels"),
    ("a@" + "b." * 125 + "cc", "254 octets of path, 256 with brackets"),
]


@pytest.mark.parametrize(("mailbox", "reason"), ACCEPTED, ids=[row[1] for row in ACCEPTED])
def test_mailbox_is_kept_as_sent(mailbox: str, reason: str) -> None:
    assert parse_mail(f"FROM:<{mailbox}>") == params.MailCommand(mailbox)  # type: ignore[arg-type]  # a literal
    assert parse_rcpt(f"TO:<{mailbox}>").address == mailbox


def test_parameters_of_mail() -> None:
    command = parse_mail("FROM:<é@bücher.example> SIZE=1000 body=8bitmime SMTPUTF8")
    assert (command.size, command.body, command.smtputf8) == (1000, BodyType.EIGHT_BIT, True)
    assert command.sender == "é@bücher.example"


@pytest.mark.parametrize(
    "domain",
    [
        "bü cher.example",
        "-bücher.example",
        "bü\u200bcher.example",
        "\u0301a.example",
        "bu\u0308cher.example",
        "☃.example",
        "é..b",
    ],
)
def test_u_labels_are_letters_digits_and_marks_in_nfc(domain: str) -> None:
    with pytest.raises(CommandError):
        parse_rcpt(f"TO:<a@{domain}>", smtputf8=True)


@pytest.mark.parametrize(
    "address", ["utf-8;\\x{E9}@example.org", "utf-8;é@example.org", "rfc822;a@b", "x400;c+2Bd"]
)
def test_orcpt_types(address: str) -> None:
    assert parse_rcpt(f"TO:<a@b> ORCPT={address}", offered=DSN_RCPT_PARAMETERS).orcpt == address


def test_envid_and_orcpt_hold_any_printable_character() -> None:
    everything = "".join(f"+{code:02X}" for code in range(0x20, 0x7F))
    for xtext in (everything[:99], everything[99:198], everything[198:]):
        assert parse_mail(f"FROM:<> ENVID={xtext}", offered=params.DSN_MAIL_PARAMETERS).envid == xtext
    argument = f"TO:<a@b> ORCPT=x;{everything}"
    assert parse_rcpt(argument, offered=DSN_RCPT_PARAMETERS).orcpt == f"x;{everything}"


@pytest.mark.parametrize(
    "value", ["<>", "+3C+3E", "a@example.org", "e+3Dmc2@example.com", "a+2bb@x", "unknown", "x" * 495]
)
def test_auth_parameter_is_checked_and_forgotten(value: str) -> None:
    plain = parse_mail("FROM:<a@example.org>")
    assert parse_mail(f"FROM:<a@example.org> AUTH={value}", offered=params.AUTH_MAIL_PARAMETERS) == plain


def test_hold_for_is_seconds() -> None:
    for value, seconds in (("1", 1), ("604800", 604_800), ("999999999", 999_999_999)):
        command = parse_mail(f"FROM:<> holdfor={value}", offered=HOLD_MAIL_PARAMETERS)
        assert (command.hold_for, command.hold_until) == (seconds, None)
    assert parse_mail("FROM:<> SIZE=1").hold_for is None


UNTIL = [
    ("2030-01-01T00:00:00Z", 1_893_456_000.0, "UTC"),
    ("2030-01-01t00:00:00z", 1_893_456_000.0, "no case"),
    ("2030-01-01T02:00:00+02:00", 1_893_456_000.0, "east"),
    ("2029-12-31T18:30:00-05:30", 1_893_456_000.0, "west, on another day"),
    ("2030-01-01T00:00:00-00:00", 1_893_456_000.0, "an unknown zone (RFC 3339 4.3) is UTC as well"),
    ("2030-01-01T00:00:00.25Z", 1_893_456_000.25, "a fraction"),
    ("2029-12-31T23:59:60Z", 1_893_456_000.0, "a leap second is the same moment as the one behind it"),
    ("2032-02-29T12:00:00Z", 1_961_668_800.0, "a leap day"),
    ("0001-01-01T00:00:00+14:00", -62_135_647_200.0, "long ago is not for a parser to judge"),
    ("9999-12-31T23:59:59-23:59", 253_402_387_139.0, "nor is the end of time"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "at", "reason"), UNTIL, ids=[row[2] for row in UNTIL])
def test_hold_until_is_a_moment(value: str, at: float, reason: str) -> None:
    command = parse_mail(f"FROM:<> HOLDUNTIL={value}", offered=HOLD_MAIL_PARAMETERS)
    assert (command.hold_for, command.hold_until) == (None, at)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("0123456789-:TtZz.+ "), max_size=30) | st.datetimes().map(str))
def test_any_time_is_a_number_or_a_refusal(text: str) -> None:
    value = text.strip().replace(" ", "T")
    for zone in ("", "Z", "+23:59", "-23:59"):
        paths(f"FROM:<> HOLDUNTIL={value}{zone}".encode())


@settings(max_examples=500, deadline=None)
@given(text=st.text(st.sampled_from('<>@:,."\\ %[]é\x00\r\nab1-=IPv6'), max_size=30))
def test_any_text_gives_a_clean_mailbox_or_a_refusal(text: str) -> None:
    paths(f"<{text}> ".encode())


def test_an_address_without_brackets_is_looked_for_in_linear_time() -> None:
    text = "a@" * 50_000
    assert read_leniently(f"{text} <") == f"<{text}> <"
    assert read_leniently(f"{text}<") == f"{text}<"


def test_address_literals() -> None:
    assert literal_address("[192.0.2.1]") == "192.0.2.1"
    assert literal_address("192.0.2.1") is None
