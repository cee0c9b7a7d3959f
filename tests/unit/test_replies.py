"""Replies of peers: whatever comes, whose fault it is, and what EHLO offers."""

import re
import time
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets.replies import replies as replies_target
from tests.support.feeding import cuts
from zonerelay.model.reply import Reply
from zonerelay.smtp.client import extensions, reputation
from zonerelay.smtp.client import replies as client_replies
from zonerelay.smtp.client.extensions import NO_LIMITS, Capabilities, PeerLimits, limits_line, parse_ehlo
from zonerelay.smtp.client.replies import MAX_LINE, MAX_REPLY, MAX_SKIPPED, PeerError, ReplyParser
from zonerelay.smtp.client.reputation import MAX_TEXT, NOT_OURS, TEXTS, TEXTS_BY_CODE, blames_address


def parse(pieces: list[bytes]) -> list[Reply]:
    parser, replies = ReplyParser(), []
    for piece in pieces:
        parser.feed(piece)
        while (reply := parser.next_reply()) is not None:
            replies.append(reply)
    return replies


@pytest.mark.parametrize(
    ("raw", "expected", "why"),
    [
        (b"250 2.1.0 Ok\r\n", Reply(250, "1.0", "Ok"), "the usual"),
        (b"250 Ok\r\n", Reply(250, "", "Ok"), "no enhanced code"),
        (b"250\r\n", Reply(250, "", ""), "no text at all"),
        (b"250 \r\n", Reply(250, "", ""), "an empty text"),
        (b"250 2.1.0\r\n", Reply(250, "1.0", ""), "only codes"),
        (b"550 5.1.1 no\n", Reply(550, "1.1", "no"), "bare LF from a sloppy server"),
        (b"550 4.1.1 no\r\n", Reply(550, "", "4.1.1 no"), "the class contradicts the code"),
        (b"550 5.1.1234 no\r\n", Reply(550, "", "5.1.1234 no"), "too many digits for a code"),
        (b"550 5.7.26 no\r\n", Reply(550, "7.26", "no"), "two digits"),
        (b"354 3.0.0 go\r\n", Reply(354, "", "3.0.0 go"), "there is no class 3"),
        (b"550-5.1.1 a\r\n550-5.1.1 b\r\n550 5.1.1 c\r\n", Reply(550, "1.1", "a\nb\nc"), "code on each line"),
        (b"550-5.1.1 a\r\n550 b\r\n", Reply(550, "1.1", "a\nb"), "code on the first line only"),
        (b"250-a\r\n250-\r\n250 c\r\n", Reply(250, "", "a\n\nc"), "an empty line in between"),
        (b"250-a\r\n550 b\r\n", Reply(550, "", "a\nb"), "the last line's code counts"),
        (b"550 5.1.1 gr\xc3\xbc\xc3\x9fe \xff\r\n", Reply(550, "1.1", "grüße \ufffd"), "UTF-8 and not"),
        (b"550 a\x1b[31m\x00\x07\tb\r\n", Reply(550, "", "a?[31m?? b"), "control characters"),
        (b"550 \xe2\x80\xaeevil\r\n", Reply(550, "", "?evil"), "text direction override"),
    ],
)
def test_reply_is_understood_however_it_arrives(raw: bytes, expected: Reply, why: str) -> None:
    for pieces in cuts(raw):
        assert parse(pieces) == [expected], why


@pytest.mark.parametrize(
    "junk",
    [
        b"\r\n",
        b"\n",
        b"hello\r\n",
        b"25 ok\r\n",
        b"2500 ok\r\n",
        b"150 x\r\n",
        b"650 x\r\n",
        b"\xff\r\n",
        b"\0\0\r\n",
        b" 250 no code\r\n",
        b"a\r\n\r\nb\n",
    ],
)
def test_a_line_without_a_code_is_skipped_wherever_it_is(junk: bytes) -> None:
    for pieces in cuts(junk + b"250-a\r\n" + junk + b"250 b\r\n" + junk + b"550 c\r\n"):
        assert parse(pieces) == [Reply(250, "", "a\nb"), Reply(550, "", "c")]
    parser = ReplyParser()
    parser.feed(b"250 a\r\n" + junk)
    assert parser.next_reply() == Reply(250, "", "a")
    assert not parser.has_input
    assert parser.skipped


@pytest.mark.parametrize("reads", [True, False])
def test_lines_to_skip_are_bounded_in_number_and_octets(reads: bool) -> None:
    for junk, most in ((b"\r\n", MAX_SKIPPED), (b"x" * (MAX_LINE - 1) + b"\n", MAX_REPLY // MAX_LINE)):
        parser = ReplyParser()
        for _ in range(most):
            parser.feed(junk)
            assert not (parser.has_input if reads else parser.next_reply())
        parser.feed(junk)
        assert parser.has_input or junk != b"\r\n"
        with pytest.raises(PeerError):
            parser.next_reply()
    parser = ReplyParser()
    for _ in range(5):  # counted anew for each reply
        parser.feed(b"\r\n" * MAX_SKIPPED + b"250 ok\r\n")
        assert parser.next_reply() == Reply(250, "", "ok")


@pytest.mark.parametrize("raw", [b"250ok", b"250\tok", b"\0\x00250 ok", b"250_ok", b"250 ok\r"])
def test_a_code_is_seen_in_odd_forms(raw: bytes) -> None:
    for pieces in cuts(raw + b"\r\n"):
        [reply] = parse(pieces)
        assert (reply.code, reply.text.strip(" _")) == (250, "ok")


def test_a_long_line_is_cut_and_one_without_an_end_is_an_error() -> None:
    parser = ReplyParser()
    parser.feed(b"250 " + b"x" * 2 * MAX_LINE)
    assert parser.next_reply() is None
    parser.feed(b"\r\n")
    assert parser.next_reply() == Reply(250, "", "x" * MAX_LINE)
    parser.feed(b"250 " + b"x" * MAX_REPLY)
    with pytest.raises(PeerError):
        parser.next_reply()


def test_reply_without_an_end_is_cut_off() -> None:
    with pytest.raises(PeerError):
        parse([b"250-\r\n"] * (MAX_REPLY // 6 + 1))
    assert parse([b"250-\r\n"] * (MAX_REPLY // 6)) == []


def test_input_that_nobody_reads_is_bounded() -> None:
    parser = ReplyParser()
    for _ in range(10):
        parser.feed(b"x" * client_replies.MAX_BACKLOG)
    assert len(parser._buffer) <= 2 * client_replies.MAX_BACKLOG
    with pytest.raises(PeerError):
        parser.next_reply()


def test_a_flood_of_tiny_lines_is_parsed_in_linear_time() -> None:
    parser = ReplyParser()
    parser.feed(b"250 \r\n" * 20_000)
    count = 0
    while parser.next_reply() is not None:
        count += 1
    assert count == 20_000


def test_unread_input_is_visible() -> None:
    parser = ReplyParser()
    assert not parser.has_input
    parser.feed(b"250 ok\r\n4")
    assert parser.next_reply() is not None
    assert parser.has_input
    parser.feed(b"21-bye\r\n")
    assert parser.next_reply() is None
    assert parser.has_input
    parser.feed(b"421 bye\r\n")
    assert parser.next_reply() is not None
    assert not parser.has_input


@given(
    st.lists(st.sampled_from([b"250", b"550", b"-", b" ", b"\r", b"\n"]) | st.binary(max_size=9)).map(
        b"".join
    )
)
def test_any_bytes_are_a_reply_or_a_peer_error_in_every_split(data: bytes) -> None:
    replies_target(data)


def test_text_for_people_has_no_line_breaks() -> None:
    assert client_replies.printable("a\r\nb\u2028c\x85d") == "a  b c d"


# Which replies are about the address that we sent from, and which are about anything else


DATA = Path(__file__).parents[1] / "data"


def reply_of(*lines: str) -> Reply:
    """As it comes from a peer."""
    parser = ReplyParser()
    parser.feed("".join(f"{line}\r\n" for line in lines).encode())
    found = parser.next_reply()
    assert found is not None
    return found


def replies(kind: str) -> list[ParameterSet]:
    """Replies of `tests/data/reputation_replies.txt`, each with the reason why it is there."""
    _, _, text = (DATA / "reputation_replies.txt").read_text().partition(f"=== {kind}\n")
    blocks = [block.splitlines() for block in text.partition("=== ")[0].split("--- ")[1:]]
    return [pytest.param(reply_of(*lines), id=why) for why, *lines in blocks]


BLAMED, NOT_BLAMED = replies("blamed"), replies("other")


@pytest.mark.parametrize("seen", BLAMED)
def test_a_reply_that_blames_our_address(seen: Reply) -> None:
    assert blames_address(seen)


@pytest.mark.parametrize(("code", "pattern"), [*(("", each) for each in TEXTS), *TEXTS_BY_CODE])
def test_every_row_of_the_tables_finds_a_reply_as_it_was_seen(code: str, pattern: str) -> None:
    for (seen,) in (each.values for each in BLAMED):
        assert isinstance(seen, Reply)
        text = re.sub(r"<[^<>]*>", " ", seen.text.lower()).replace("\n", " ")
        if re.search(pattern, text) and re.match(code, f"{seen.code} {seen.status}"):
            return
    pytest.fail("no reply")


@pytest.mark.parametrize("seen", NOT_BLAMED)
def test_a_reply_that_is_about_something_else(seen: Reply) -> None:
    assert not blames_address(seen)


@pytest.mark.parametrize("pattern", NOT_OURS)
def test_every_exception_keeps_a_reply_from_blaming(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = re.compile("|".join(each for each in NOT_OURS if each != pattern))
    monkeypatch.setattr(reputation, "_NOT_OURS", others)
    assert any(blames_address(seen) for (seen,) in (each.values for each in NOT_BLAMED))  # type: ignore[arg-type]  # a Reply


@pytest.mark.parametrize(
    "unit", ["<", "domain ", "ip address is ", "listed at ", "in an ", "192.0.2.1 ", "[", "a"]
)
def test_what_a_stranger_writes_costs_little(unit: str) -> None:
    long = Reply(550, "7.1", unit * (60_000 // len(unit)))
    began = time.perf_counter()
    blames_address(long)
    assert time.perf_counter() - began < 0.2
    assert len(long.text) > MAX_TEXT


# EHLO replies as servers write them


def test_keywords_are_case_insensitive_and_trimmed() -> None:
    assert parse_ehlo("x\n pipelining \r\nChunking\ndsn") == Capabilities(
        pipelining=True, chunking=True, dsn=True
    )


def test_of_a_keyword_on_several_lines_nothing_is_lost() -> None:
    assert parse_ehlo("x\nSIZE 2000\nSIZE 1000\nsize").size == 1000
    assert parse_ehlo("x\nLIMITS RCPTMAX=7\nlimits MAILMAX=8").limits == PeerLimits(rcptmax=7, mailmax=8)
    found = parse_ehlo("x\nstarttls\nsize\t9\npipelining\nchunking\n8bitmime\nsmtputf8\ndsn\nrequiretls")
    assert found == Capabilities(
        pipelining=True,
        size_offered=True,
        size=9,
        eight_bit_mime=True,
        smtputf8=True,
        starttls=True,
        chunking=True,
        dsn=True,
        require_tls=True,
    )


def test_greeting_line_is_not_a_keyword() -> None:
    assert parse_ehlo("PIPELINING at your service") == Capabilities()
    assert parse_ehlo("PIPELINING") == Capabilities()


@pytest.mark.parametrize(
    ("parameter", "why"),
    [
        ("", "no number: no fixed limit"),
        (" 0", "zero: no fixed limit"),
        (" many", "not a number"),
        (" -1", "not a number"),
        (" ١٢", "digits, but not ASCII"),
        (" " + "9" * 21, "more digits than RFC 1870 allows"),
    ],
)
def test_size_without_a_usable_limit(parameter: str, why: str) -> None:
    capabilities = parse_ehlo(f"x\nSIZE{parameter}")
    assert capabilities.size is None, why
    assert capabilities.size_offered


LIMITS = [
    ("LIMITS RCPTMAX=1000", PeerLimits(rcptmax=1000), "one"),
    (
        "LIMITS MAILMAX=5 RCPTMAX=999999 RCPTDOMAINMAX=1",
        PeerLimits(mailmax=5, rcptmax=999_999, rcptdomainmax=1),
        "all that are registered",
    ),
    ("limits  rcptmax=7   MailMax=8", PeerLimits(rcptmax=7, mailmax=8), "no case, several blanks"),
    (
        "LIMITS FUTURE NEW-ONE=a=b:c RCPTMAX=7",
        PeerLimits(rcptmax=7),
        "those that we do not know are passed over",
    ),
    ("LIMITS RCPTMAX=7 RCPTMAX=5 RCPTMAX=6", PeerLimits(rcptmax=5), "the strictest of several"),
    ("LIMITS RCPTMAX=0 MAILMAX=8", PeerLimits(mailmax=8), "zero is not allowed"),
    ("LIMITS RCPTMAX=1000000 MAILMAX=8", PeerLimits(mailmax=8), "seven digits are not allowed"),
    ("LIMITS RCPTMAX=x MAILMAX=8", PeerLimits(mailmax=8), "not a number"),
    ("LIMITS RCPTMAX=\u0667 MAILMAX=8", NO_LIMITS, "digits, but not ASCII"),
    ("LIMITS RCPTMAX MAILMAX=8", PeerLimits(mailmax=8), "no value"),
    ("LIMITS RCPTMAX=7; MAILMAX=8", NO_LIMITS, "bad syntax anywhere makes all of it void"),
    ("LIMITS RCPTMAX= MAILMAX=8", NO_LIMITS, "an empty value is bad syntax"),
    ("LIMITS =7 MAILMAX=8", NO_LIMITS, "so is an empty name"),
    ("LIMITS", NO_LIMITS, "nothing"),
    ("SIZE 5", NO_LIMITS, "not offered"),
]


@pytest.mark.parametrize(("line", "limits", "why"), LIMITS, ids=[row[2] for row in LIMITS])
def test_limits_of_a_server(line: str, limits: PeerLimits, why: str) -> None:
    assert parse_ehlo(f"x\nPIPELINING\n{line}").limits == limits


def test_our_limits_can_be_read_by_anybody() -> None:
    assert limits_line(1000) == "LIMITS RCPTMAX=1000"
    assert parse_ehlo(f"x\n{limits_line(1000)}").limits == PeerLimits(rcptmax=1000)
    assert limits_line(5_000_000) == "LIMITS RCPTMAX=999999"


def test_how_far_ahead_a_message_may_be_held() -> None:
    now = 1_893_456_000.9  # 2030-01-01T00:00:00.9Z
    assert extensions.future_release_line(604_800.0, now) == "FUTURERELEASE 604800 2030-01-08T00:00:00Z"
    assert extensions.future_release_line(1.5, now) == "FUTURERELEASE 1 2030-01-01T00:00:01Z"
    assert extensions.future_release_line(2e9, now).startswith("FUTURERELEASE 999999999 2061-")
