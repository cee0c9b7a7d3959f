"""The client's half of a transaction with BDAT, in dialogs: what is written, what becomes of whom."""

from __future__ import annotations

import pytest

from tests.support.mail import TEXT, make_message
from tests.unit.test_transaction import LOST, PEER, outcomes, reply, summary, to
from zonerelay.model.outcome import Scope, Verdict
from zonerelay.model.reply import Reply
from zonerelay.smtp.client.chunked import ChunkedTransaction, can_be_chunked
from zonerelay.smtp.client.extensions import Capabilities
from zonerelay.smtp.client.transaction import Phase

PLAIN = Capabilities(chunking=True)
PIPELINING = Capabilities(chunking=True, pipelining=True)
OK, TAKEN, DONE = "250 ok", "250 1 octet", "250 taken"


def begun(capabilities: Capabilities, recipients: int, *, at_once: bool = False) -> ChunkedTransaction:
    deliveries = to(*(f"r{number}@example.com" for number in range(recipients)))
    content = TEXT if at_once else TEXT[:1]
    return ChunkedTransaction(
        make_message(), deliveries, capabilities, PEER, content=content, at_once=at_once
    )


def converse(
    capabilities: Capabilities, recipients: int, *replies: str, at_once: bool = False, between: int = 0
) -> ChunkedTransaction:
    """Play the replies; as soon as it may, the rest goes in `between` chunks and a last one."""
    transaction = begun(capabilities, recipients, at_once=at_once)
    transaction.begin()
    for text in replies:
        assert transaction.phase is not Phase.DONE, f"nobody waits for {text}"
        transaction.receive(reply(text))
        if transaction.phase is Phase.CHUNKS and not transaction.unanswered_chunks and between >= 0:
            for _ in range(between):
                transaction.chunk(b"x\r\n", last=False)
            transaction.chunk(b"y\r\n", last=True)
    if transaction.phase is not Phase.DONE:
        transaction.lost(LOST)
    return transaction


# (capabilities, recipients, replies, summary, why): the first octet, then the rest in one chunk.
DIALOGS = [
    (PIPELINING, 1, [OK, OK, TAKEN, DONE], "D", "the usual"),
    (PLAIN, 1, [OK, OK, TAKEN, DONE], "D", "the usual, step by step"),
    (PIPELINING, 3, [OK, OK, "550 no", OK, TAKEN, DONE], "DBD", "one refused does not stop the others"),
    (PLAIN, 3, [OK, OK, "550 no", OK, TAKEN, DONE], "DBD", "the same, step by step"),
    (PIPELINING, 2, ["550 no", "503 a", "503 b", "503 c", OK], "BB", "MAIL refused for good"),
    (PIPELINING, 2, ["451 no", "503 a", "503 b", "503 c", OK], "FF", "MAIL refused for now"),
    (PLAIN, 2, ["550 no"], "BB", "MAIL refused, step by step: nothing more is asked"),
    (PIPELINING, 1, ["550 no", OK, TAKEN, OK], "B", "a server that forgets its refusal"),
    (PIPELINING, 2, [OK, "550 a", "450 b", "554 nobody", OK], "BF", "all refused, BDAT too: each its own"),
    (PIPELINING, 2, [OK, "550 a", "450 b", "503 nobody", OK], "BF", "all refused, 503: each its own"),
    (PIPELINING, 2, [OK, "550 a", "450 b", TAKEN, OK], "BF", "all refused, BDAT taken: nothing follows"),
    (PLAIN, 2, [OK, "550 a", "450 b", OK], "BF", "all refused, step by step: no BDAT, RSET"),
    (PIPELINING, 3, [OK, OK, "550 no", OK, "451 disk", OK], "FBF", "BDAT refused: those accepted only"),
    (PIPELINING, 3, [OK, OK, "450 no", OK, "554 no", OK], "BFB", "refused for good: those accepted only"),
    (PIPELINING, 3, [OK, OK, "550 no", OK, TAKEN, "554 spam", OK], "BBB", "message refused"),
    (PIPELINING, 2, [OK, OK, "550 no", TAKEN, "451 later", OK], "FB", "message deferred"),
    (PLAIN, 2, [OK, OK, "550 no", TAKEN, "451 later", OK], "FB", "the same, step by step"),
    (PIPELINING, 2, [OK, OK, OK, TAKEN], "??", "lost after the last octet"),
    (PIPELINING, 2, [OK, OK, "550 no", TAKEN], "?B", "lost after the last octet: the refused one is certain"),
    (PIPELINING, 2, [OK, OK, OK], "FF", "lost before the first octet was taken"),
    (PIPELINING, 2, [OK, OK], "FF", "lost at RCPT"),
    (PIPELINING, 1, [], "F", "lost before anything"),
    (PIPELINING, 2, ["421 bye"], "FF", "421 at MAIL"),
    (PIPELINING, 2, [OK, OK, "421 bye"], "FF", "421 at RCPT"),
    (PIPELINING, 2, [OK, OK, OK, "421 bye"], "FF", "421 at the first BDAT"),
    (PIPELINING, 2, [OK, OK, OK, TAKEN, "421 bye"], "FF", "421 at the last BDAT is an answer: no doubt"),
    (PIPELINING, 3, [OK, OK, "452 many", "452 many", TAKEN, DONE], "D--", "too many recipients"),
    (PIPELINING, 2, [OK, OK, "452 many", TAKEN, "554 spam", OK], "BF", "overflow of a refused message"),
    (PIPELINING, 2, [OK, OK, "452 many", TAKEN], "?F", "overflow of a message in doubt: later"),
    (PIPELINING, 1, ["354 what"], "F", "MAIL answered with 354"),
    (PIPELINING, 1, [OK, "354 what"], "F", "RCPT answered with 354"),
    (PIPELINING, 1, [OK, OK, "354 go"], "F", "the first BDAT answered with 354"),
    (PIPELINING, 1, [OK, OK, TAKEN, "354 go"], "?", "the last BDAT answered with 354"),
]


@pytest.mark.parametrize(("capabilities", "count", "replies", "expected", "why"), DIALOGS)
def test_first_octet_then_the_rest(
    capabilities: Capabilities, count: int, replies: list[str], expected: str, why: str
) -> None:
    transaction = converse(capabilities, count, *replies)
    assert summary(transaction, count) == expected, why
    assert transaction.phase is Phase.DONE
    assert transaction.delivered is ("D" in expected)
    assert not transaction.again


# (recipients, replies, summary, why): MAIL, the RCPTs and the whole message in one write.
AT_ONCE = [
    (1, [OK, OK, DONE], "D", "the usual"),
    (3, [OK, OK, "550 no", "450 later", DONE], "DBF", "each its own answer"),
    (2, [OK, "550 a", "450 b", "554 nobody", OK], "BF", "all refused, BDAT too"),
    (2, [OK, "550 a", "450 b", "503 nobody", OK], "BF", "all refused, BDAT out of order"),
    (2, [OK, "550 a", "450 b", DONE], "BF", "all refused, and nobody's message taken: delivers nothing"),
    (2, ["550 no", "503 a", "503 b", "503 c"], "BB", "MAIL refused"),
    (2, ["550 no", OK, OK, DONE], "BB", "a server that forgets its refusal"),
    (2, [OK, OK, "550 no", "554 spam", OK], "BB", "message refused"),
    (2, [OK, OK, "550 no", "451 later", OK], "FB", "message deferred"),
    (1, [OK, OK, "500 what", OK], "B", "it has taken BDAT before: this is a refusal"),
    (2, [], "??", "lost before anything was answered"),
    (2, [OK], "??", "lost at RCPT"),
    (2, [OK, "550 no"], "B?", "lost at RCPT: the refused one is certain"),
    (2, [OK, OK, "550 no"], "?B", "lost before the reply to the message"),
    (2, [OK, "550 a", "450 b"], "BF", "lost when nobody was accepted: all are certain"),
    (2, ["550 no"], "BB", "lost after MAIL was refused: all are certain"),
    (2, ["421 bye"], "FF", "421 is an answer, at MAIL"),
    (2, [OK, OK, "421 bye"], "FF", "421 is an answer, at RCPT"),
    (2, [OK, OK, OK, "421 bye"], "FF", "421 is an answer, to the message"),
    (2, [OK, OK, "452 many", DONE], "D-", "too many recipients"),
    (2, [OK, OK, "452 many", "451 later", OK], "FF", "too many recipients of a message that is deferred"),
    (1, ["354 what"], "?", "MAIL answered with 354: who knows what it takes"),
    (1, [OK, OK, "354 go"], "?", "the message answered with 354"),
]


@pytest.mark.parametrize(("count", "replies", "expected", "why"), AT_ONCE)
def test_all_at_once(count: int, replies: list[str], expected: str, why: str) -> None:
    transaction = converse(PIPELINING, count, *replies, at_once=True)
    assert summary(transaction, count) == expected, why
    assert transaction.phase is Phase.DONE
    assert transaction.delivered is ("D" in expected)


# (chunks between, replies after the first octet's, summary, reused, why)
IN_PIECES = [
    (2, [OK, OK, DONE], "D", True, "the usual"),
    (2, ["552 big", "503 no", "503 no", OK], "B", True, "refused at once; the rest is read"),
    (2, ["552 big", "250 what", "250 what", OK], "B", True, "what follows a refused chunk changes nothing"),
    (2, [OK, "451 disk", "503 no", OK], "F", True, "refused later; the last is read"),
    (2, [OK, OK, "554 spam", OK], "B", True, "the last refused"),
    (2, [OK, "552 big"], "B", False, "lost after a refusal: certain"),
    (2, ["552 big", "421 bye"], "B", False, "421 after a refusal: certain"),
    (2, [OK, OK], "?", False, "lost before the last reply"),
    (2, [OK], "?", False, "lost before the last replies"),
    (2, ["421 bye"], "F", False, "421 is an answer"),
    (2, [OK, "354 go"], "?", False, "354 to a chunk, when all was written"),
    (2, ["552 big", "503 no", "503 no", "500 what", "500 what"], "B", False, "RSET refused"),
]


@pytest.mark.parametrize(("between", "replies", "expected", "reused", "why"), IN_PIECES)
def test_in_pieces(between: int, replies: list[str], expected: str, reused: bool, why: str) -> None:
    replies = [OK, OK, TAKEN, *replies]
    if "RSET" in why:
        replies.pop()  # no second RSET: this server has shown that it reads the octets of BDAT
    transaction = converse(PIPELINING, 1, *replies, between=between)
    assert summary(transaction, 1) == expected, why
    assert transaction.closing is not reused
    assert transaction.phase is Phase.DONE


def test_at_once_is_one_write() -> None:
    transaction = begun(PIPELINING, 2, at_once=True)
    assert transaction.begin() == (
        b"MAIL FROM:<sender@example.org>\r\nRCPT TO:<r0@example.com>\r\nRCPT TO:<r1@example.com>\r\n"
        b"BDAT %d LAST\r\n%b" % (len(TEXT), TEXT)
    )
    assert [transaction.receive(reply(text)) for text in (OK, OK, OK, DONE)] == [b"", b"", b"", b""]


def test_the_first_octet_goes_in_the_place_of_data() -> None:
    transaction = begun(PIPELINING, 1)
    assert transaction.begin() == (
        b"MAIL FROM:<sender@example.org>\r\nRCPT TO:<r0@example.com>\r\nBDAT 1\r\nS"
    )
    assert [transaction.receive(reply(text)) for text in (OK, OK, TAKEN)] == [b"", b"", b""]
    assert transaction.phase.value == "BDAT"
    assert transaction.chunk(b"ubject", last=False) == b"BDAT 6\r\nubject"
    assert transaction.chunk(b": x\r\n", last=True) == b"BDAT 5 LAST\r\n: x\r\n"
    assert transaction.phase is Phase.LAST_CHUNK


@pytest.mark.parametrize("at_once", [False, True])
def test_without_pipelining_each_command_waits_for_its_reply(at_once: bool) -> None:
    transaction = begun(PLAIN, 2, at_once=at_once)
    assert transaction.begin() == b"MAIL FROM:<sender@example.org>\r\n"
    assert transaction.receive(reply(OK)) == b"RCPT TO:<r0@example.com>\r\n"
    assert transaction.receive(reply("550 no")) == b"RCPT TO:<r1@example.com>\r\n"
    assert transaction.receive(reply(OK)) == b"BDAT 1\r\nS"
    assert transaction.receive(reply(TAKEN)) == b""
    assert transaction.phase is Phase.CHUNKS


@pytest.mark.parametrize("code", [500, 501, 502, 503, 504])
def test_a_server_that_does_not_know_bdat_is_to_be_asked_again(code: int) -> None:
    transaction = converse(PIPELINING, 3, OK, OK, "550 no", "452 many", f"{code} what", OK)
    assert summary(transaction, 3) == "-B-"
    assert (transaction.unknown, transaction.again, transaction.closing) == (True, True, False)


def test_a_server_that_takes_the_octet_for_the_beginning_of_a_command_is_brought_in_step() -> None:
    transaction = begun(PIPELINING, 1)
    transaction.begin()
    for text in (OK, OK):
        transaction.receive(reply(text))
    assert transaction.receive(reply("500 BDAT?")) == b"RSET\r\n"
    assert transaction.receive(reply("500 SRSET?")) == b"RSET\r\n"
    assert transaction.receive(reply(OK)) == b""
    assert (transaction.phase, transaction.again, transaction.closing) == (Phase.DONE, True, False)


@pytest.mark.parametrize("replies", [["500 what", "500 what"], ["451 what"], ["421 bye"], []])
def test_a_server_that_cannot_be_brought_in_step_is_left(replies: list[str]) -> None:
    transaction = converse(PIPELINING, 2, OK, OK, "550 no", "502 what", *replies)
    assert summary(transaction, 2) == "FB"
    assert (transaction.unknown, transaction.again, transaction.closing) == (True, False, True)


def test_500_when_nobody_was_accepted_says_nothing_about_bdat() -> None:
    transaction = converse(PIPELINING, 1, OK, "550 no", "503 nobody", OK)
    assert (transaction.unknown, transaction.again) == (False, False)
    assert not transaction.bdat_taken


def test_bdat_is_known_once_one_was_taken() -> None:
    assert converse(PIPELINING, 1, OK, OK, TAKEN).bdat_taken
    assert converse(PIPELINING, 1, OK, OK, DONE, at_once=True).bdat_taken
    assert not converse(PIPELINING, 1, OK, OK, "451 no", OK).bdat_taken


@pytest.mark.parametrize(
    ("at_once", "replies", "unanswered"),
    [(False, [], True), (True, [], False), (True, ["421 bye"], True), (True, [OK], False)],
)
def test_another_host_may_be_asked_only_when_this_one_has_nothing(
    at_once: bool, replies: list[str], unanswered: bool
) -> None:
    transaction = converse(PIPELINING, 1, *replies, at_once=at_once)
    assert transaction.unanswered is unanswered
    assert outcomes(transaction, 1)[0].scope is (Scope.HOST if unanswered else Scope.MESSAGE)


def test_refusal_nobody_asked_for_ends_the_connection() -> None:
    transaction = begun(PIPELINING, 1)
    transaction.begin()
    for text in (OK, OK, TAKEN, "552 big"):
        transaction.receive(reply(text))
    assert summary(transaction, 1) == "B"
    assert transaction.closing


def test_our_own_trouble_blames_no_peer() -> None:
    transaction = begun(PIPELINING, 1)
    transaction.begin()
    for text in (OK, OK, TAKEN):
        transaction.receive(reply(text))
    transaction.chunk(b"x", last=False)
    transaction.abandon(Reply(451, "3.0", "store"))
    [outcome] = outcomes(transaction, 1)
    assert (outcome.verdict, outcome.scope, outcome.in_doubt) == (Verdict.DEFERRED, Scope.LOCAL, False)
    assert transaction.closing


@pytest.mark.parametrize("head", [b"", b"\r\n", b"\n", b" x", b"\tx", b"\0", b"\x7f", b"\xff"])
def test_octets_that_could_be_a_command_line_do_not_go_alone(head: bytes) -> None:
    assert not can_be_chunked(head)
    assert can_be_chunked(b"R" + head)
