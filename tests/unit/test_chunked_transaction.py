"""The client's half of a transaction with BDAT, in dialogs: what is written, what becomes of whom."""

from __future__ import annotations

import pytest

from tests.support.mail import TEXT, make_message
from tests.unit.test_transaction import LOST, PEER, outcomes, reply, summary, to
from zonerelay.model.outcome import Scope, Verdict
from zonerelay.model.reply import Reply
from zonerelay.smtp.client.extensions import Capabilities
from zonerelay.smtp.client.transaction import (
    BdatFailure,
    ChunkedTransaction,
    TransactionPhase,
    can_be_chunked,
)

PLAIN = Capabilities(chunking=True)
PIPELINING = Capabilities(chunking=True, pipelining=True)
OK, TAKEN, DONE = "250 ok", "250 1 octet", "250 taken"


def begun(capabilities: Capabilities, recipients: int, *, probe: bool = True) -> ChunkedTransaction:
    deliveries = to(*(f"r{number}@example.com" for number in range(recipients)))
    return ChunkedTransaction(make_message(), deliveries, capabilities, PEER, content=TEXT, probe=probe)


def converse(
    capabilities: Capabilities, recipients: int, *replies: str, probe: bool = True
) -> ChunkedTransaction:
    """Play the replies. Ends with LOST when the replies end too early."""
    transaction = begun(capabilities, recipients, probe=probe)
    written = transaction.begin()
    for number, text in enumerate(replies):
        assert transaction.phase is not TransactionPhase.DONE, f"nobody waits for {text}"
        assert b"BDAT" not in written or number > recipients, "a body behind an unanswered RCPT"
        written = transaction.receive(reply(text))
    if transaction.phase is not TransactionPhase.DONE:
        transaction.lost(LOST)
    return transaction


UNKNOWN, UNANSWERED, REFUSED, SURPLUS = (
    BdatFailure.UNKNOWN,
    BdatFailure.UNANSWERED,
    BdatFailure.REFUSED,
    BdatFailure.SURPLUS,
)

# (capabilities, recipients, replies, summary, trouble, why): the first octet, then the rest in one chunk.
DIALOGS = [
    (PIPELINING, 1, [OK, OK, TAKEN, DONE], "D", None, "the usual"),
    (PLAIN, 1, [OK, OK, TAKEN, DONE], "D", None, "the usual, step by step"),
    (PIPELINING, 3, [OK, OK, "550 no", OK, TAKEN, DONE], "DBD", None, "one refused does not stop the others"),
    (PLAIN, 3, [OK, OK, "550 no", OK, TAKEN, DONE], "DBD", None, "the same, step by step"),
    (PIPELINING, 2, ["550 no", "503 a", "503 b", OK], "BB", None, "MAIL refused for good"),
    (PIPELINING, 2, ["451 no", "503 a", "503 b", OK], "FF", None, "MAIL refused for now"),
    (PLAIN, 2, ["550 no"], "BB", None, "MAIL refused, step by step: nothing more is asked"),
    (PIPELINING, 1, ["550 no", OK, OK], "B", None, "a server that forgets its refusal"),
    (PIPELINING, 2, [OK, "550 a", "450 b", OK], "BF", None, "all refused: no BDAT, RSET"),
    (PLAIN, 2, [OK, "550 a", "450 b", OK], "BF", None, "all refused, step by step: no BDAT, RSET"),
    (PIPELINING, 3, [OK, OK, "550 no", OK, "451 disk", OK], "FBF", None, "BDAT refused: those accepted only"),
    (PIPELINING, 3, [OK, OK, "450 no", OK, "554 no", OK], "BFB", None, "for good: those accepted only"),
    (PIPELINING, 3, [OK, OK, "550 no", OK, TAKEN, "554 spam"], "BBB", REFUSED, "message refused"),
    (PIPELINING, 2, [OK, OK, "550 no", TAKEN, "451 later"], "FB", REFUSED, "message deferred"),
    (PLAIN, 2, [OK, OK, "550 no", TAKEN, "451 later"], "FB", REFUSED, "the same, step by step"),
    (PIPELINING, 2, [OK, OK, OK, TAKEN], "??", UNANSWERED, "lost after the last octet"),
    (PIPELINING, 2, [OK, OK, "550 no", TAKEN], "?B", UNANSWERED, "the refused one is certain"),
    (PIPELINING, 2, [OK, OK, OK], "FF", UNANSWERED, "lost before the first octet was taken"),
    (PIPELINING, 2, [OK, OK], "FF", None, "lost at RCPT"),
    (PIPELINING, 1, [], "F", None, "lost before anything"),
    (PIPELINING, 2, ["421 bye"], "FF", None, "421 at MAIL"),
    (PIPELINING, 2, [OK, OK, "421 bye"], "FF", None, "421 at RCPT"),
    (PIPELINING, 2, [OK, OK, OK, "421 bye"], "FF", None, "421 at the first BDAT"),
    (PIPELINING, 2, [OK, OK, OK, TAKEN, "421 bye"], "FF", None, "421 at the last is an answer: no doubt"),
    (PIPELINING, 3, [OK, OK, "452 many", "452 many", TAKEN, DONE], "D--", None, "too many recipients"),
    (PIPELINING, 2, [OK, OK, "452 many", TAKEN, "554 spam"], "BF", REFUSED, "overflow of a refused message"),
    (PIPELINING, 2, [OK, OK, "452 many", TAKEN], "?F", UNANSWERED, "overflow of one in doubt: later"),
    (PIPELINING, 1, ["354 what"], "F", SURPLUS, "MAIL answered with 354"),
    (PIPELINING, 1, [OK, "354 what"], "F", SURPLUS, "RCPT answered with 354"),
    (PIPELINING, 2, [OK, OK, "354 what"], "FF", SURPLUS, "the second RCPT answered with 354"),
    (PIPELINING, 3, [OK, OK, "550 no", "354 what"], "FFF", SURPLUS, "354 too early: no refusal is believed"),
    (PIPELINING, 1, [OK, OK, "354 go"], "F", SURPLUS, "the first BDAT answered with 354"),
    (PIPELINING, 1, [OK, OK, TAKEN, "354 go"], "?", SURPLUS, "the last BDAT answered with 354"),
]


@pytest.mark.parametrize(("capabilities", "count", "replies", "expected", "trouble", "why"), DIALOGS)
def test_first_octet_then_the_rest(
    capabilities: Capabilities,
    count: int,
    replies: list[str],
    expected: str,
    trouble: BdatFailure | None,
    why: str,
) -> None:
    transaction = converse(capabilities, count, *replies)
    assert summary(transaction, count) == expected, why
    assert transaction.phase is TransactionPhase.DONE
    assert transaction.delivered is ("D" in expected)
    assert transaction.bdat_failure is trouble
    assert not transaction.again


# (recipients, replies, summary, reused, why): the connection has taken a BDAT before.
WITHOUT_PROBE = [
    (1, [OK, OK, DONE], "D", True, "the usual"),
    (3, [OK, OK, "550 no", "450 later", DONE], "DBF", True, "each its own answer"),
    (2, [OK, "550 a", "450 b", OK], "BF", True, "all refused: no BDAT, RSET"),
    (2, [OK, "550 a", "450 b", "554 what"], "BF", False, "all refused, and RSET too"),
    (2, ["550 no", "503 a", "503 b", OK], "BB", True, "MAIL refused"),
    (2, [OK, OK, "550 no", "554 spam"], "BB", False, "message refused: was it consumed?"),
    (2, [OK, OK, "550 no", "451 later"], "FB", False, "message deferred"),
    (1, [OK, OK, "500 what"], "B", False, "it has taken BDAT before: this is a refusal"),
    (2, [OK], "FF", False, "lost at RCPT"),
    (2, [OK, OK, "550 no"], "?B", False, "lost before the reply to the message"),
    (2, [OK, OK, OK, "421 bye"], "FF", False, "421 is an answer, to the message"),
    (2, [OK, OK, "452 many", DONE], "D-", True, "too many recipients"),
    (1, [OK, OK, "354 go"], "?", False, "the message answered with 354"),
]


@pytest.mark.parametrize("capabilities", [PIPELINING, PLAIN], ids=["pipelining", "plain"])
@pytest.mark.parametrize(("count", "replies", "expected", "reused", "why"), WITHOUT_PROBE)
def test_without_a_probe(
    capabilities: Capabilities, count: int, replies: list[str], expected: str, reused: bool, why: str
) -> None:
    if capabilities is PLAIN and why == "MAIL refused":
        replies = replies[:1]
    transaction = converse(capabilities, count, *replies, probe=False)
    assert summary(transaction, count) == expected, why
    assert transaction.phase is TransactionPhase.DONE
    assert transaction.closing is not reused


MAIL, RCPT = b"MAIL FROM:<sender@example.org>\r\n", b"RCPT TO:<r%d@example.com>\r\n"


def test_what_is_written() -> None:
    first, rest = b"BDAT 1\r\nS", b"BDAT %d LAST\r\n%b" % (len(TEXT) - 1, TEXT[1:])
    whole = b"BDAT %d LAST\r\n%b" % (len(TEXT), TEXT)
    for probe, replies, written in (
        (True, (OK, OK, OK, TAKEN, DONE), [b"", b"", first, rest, b""]),
        (False, (OK, OK, OK, DONE), [b"", b"", whole, b""]),
    ):
        transaction = begun(PIPELINING, 2, probe=probe)
        assert transaction.begin() == MAIL + RCPT % 0 + RCPT % 1
        assert [transaction.receive(reply(text)) for text in replies] == written
        transaction = begun(PLAIN, 2, probe=probe)
        assert transaction.begin() == MAIL
        assert [transaction.receive(reply(text)) for text in replies] == [RCPT % 0, RCPT % 1, *written[2:]]


@pytest.mark.parametrize("code", [500, 501, 502, 503, 504])
def test_a_server_that_does_not_know_bdat_is_to_be_asked_again(code: int) -> None:
    transaction = converse(PIPELINING, 3, OK, OK, "550 no", "452 many", f"{code} what", OK)
    assert summary(transaction, 3) == "-B-"
    assert (transaction.bdat_failure, transaction.again, transaction.closing) == (UNKNOWN, True, False)


@pytest.mark.parametrize("said", ["500 BDAT?", "451 disk"])
def test_a_server_that_takes_the_octet_for_the_beginning_of_a_command_is_brought_in_step(said: str) -> None:
    transaction = begun(PIPELINING, 1)
    transaction.begin()
    for text in (OK, OK):
        transaction.receive(reply(text))
    assert transaction.receive(reply(said)) == b"RSET\r\n"
    assert transaction.receive(reply("500 SRSET?")) == b"RSET\r\n"
    assert transaction.receive(reply(OK)) == b""
    assert (transaction.phase, transaction.closing) == (TransactionPhase.DONE, False)
    assert transaction.again is (said[0] == "5")


@pytest.mark.parametrize("replies", [["500 what", "500 what"], ["451 what"], ["421 bye"], []])
def test_a_server_that_cannot_be_brought_in_step_is_left(replies: list[str]) -> None:
    transaction = converse(PIPELINING, 2, OK, OK, "550 no", "502 what", *replies)
    assert summary(transaction, 2) == "FB"
    assert (transaction.bdat_failure, transaction.again, transaction.closing) == (UNKNOWN, False, True)


def test_bdat_is_known_once_one_was_taken() -> None:
    assert converse(PIPELINING, 1, OK, OK, TAKEN).bdat_taken
    assert converse(PIPELINING, 1, OK, OK, DONE, probe=False).bdat_taken
    assert not converse(PIPELINING, 1, OK, OK, "451 no", OK).bdat_taken
    assert not converse(PIPELINING, 1, OK, "550 no", OK).bdat_taken


@pytest.mark.parametrize(
    ("replies", "unanswered"), [([], True), (["421 bye"], True), ([OK], False), ([OK, "421 bye"], False)]
)
def test_another_host_may_be_asked_only_when_this_one_has_nothing(
    replies: list[str], unanswered: bool
) -> None:
    transaction = converse(PIPELINING, 1, *replies)
    assert transaction.unanswered is unanswered
    assert outcomes(transaction, 1)[0].scope is (Scope.HOST if unanswered else Scope.MESSAGE)


def test_our_own_trouble_blames_no_peer() -> None:
    transaction = begun(PIPELINING, 1)
    transaction.begin()
    for text in (OK, OK):
        transaction.receive(reply(text))
    transaction.abandon(Reply(451, "3.0", "store"))
    [outcome] = outcomes(transaction, 1)
    assert (outcome.verdict, outcome.scope, outcome.in_doubt) == (Verdict.DEFERRED, Scope.LOCAL, False)
    assert transaction.closing
    assert transaction.bdat_failure is None


@pytest.mark.parametrize("head", [b"", b"\r\n", b"\n", b" x", b"\tx", b"\0", b"\x7f", b"\xff"])
def test_octets_that_could_be_a_command_line_do_not_go_alone(head: bytes) -> None:
    assert not can_be_chunked(head)
    assert can_be_chunked(b"R" + head)
