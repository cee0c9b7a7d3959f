"""The client's half of a transaction as dialogs: what is written, and what becomes of each recipient."""

from __future__ import annotations

import pytest

from tests.support.mail import make_message
from tests.support.queueing import delivery
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import BodyType, Message
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.reply import Reply
from zonerelay.smtp.client.extensions import Capabilities
from zonerelay.smtp.client.transaction import ClientTransaction, Peer, TransactionPhase, too_large

PLAIN = Capabilities()
PIPELINING = Capabilities(pipelining=True)
PEER = Peer("mx.example.com", "192.0.2.1:25", "TLSv1.3")
LOST = Reply(451, "4.2", "connection lost")
OK, RCPT_OK, GO, TAKEN = "250 ok", "250 ok", "354 go", "250 taken"


def reply(text: str) -> Reply:
    head, _, rest = text.partition(" ")
    code, _, status = head.partition("/")
    return Reply(int(code), status, rest)


def to(*addresses: str, **wishes: object) -> list[Delivery]:
    return [delivery(address, **wishes) for address in addresses]  # type: ignore[arg-type]  # fields by name


def converse(capabilities: Capabilities, recipients: int, *replies: str) -> ClientTransaction:
    """Play the replies; after 354 the body is sent. Ends with LOST when the replies end too early."""
    deliveries = to(*(f"r{number}@example.com" for number in range(recipients)))
    transaction = ClientTransaction(make_message(), deliveries, capabilities, PEER)
    transaction.begin()
    for text in replies:
        assert transaction.phase is not TransactionPhase.DONE, f"nobody waits for {text}"
        transaction.receive(reply(text))
        if transaction.phase is TransactionPhase.BODY:
            transaction.body_sent()
    if transaction.phase is not TransactionPhase.DONE:
        transaction.lost(LOST)
    return transaction


def begun(*replies: str) -> ClientTransaction:
    """To one recipient; of the body nothing is sent."""
    transaction = ClientTransaction(make_message(), to("a@example.com"), PIPELINING, PEER)
    transaction.begin()
    for text in replies:
        transaction.receive(reply(text))
    return transaction


def outcomes(transaction: ClientTransaction, count: int) -> list[Outcome]:
    assert len(transaction.outcomes) == count
    return [each for each in transaction.outcomes if each is not None]


def summary(transaction: ClientTransaction, count: int) -> str:
    """One letter a recipient: Delivered, deFerred, Bounced, in Doubt as `?`, overflow as `-`."""
    letters = {Verdict.DELIVERED: "D", Verdict.DEFERRED: "F", Verdict.BOUNCED: "B"}
    found = transaction.outcomes
    assert len(found) == count
    return "".join("-" if o is None else "?" if o.in_doubt else letters[o.verdict] for o in found)


# (capabilities, recipients, replies, summary, why)
DIALOGS = [
    (PIPELINING, 1, [OK, OK, GO, TAKEN], "D", "the usual"),
    (PLAIN, 1, [OK, OK, GO, TAKEN], "D", "the usual, step by step"),
    (PIPELINING, 3, [OK, OK, "550 no", OK, GO, TAKEN], "DBD", "one refused does not stop the others"),
    (PLAIN, 3, [OK, OK, "550 no", OK, GO, TAKEN], "DBD", "the same, step by step"),
    (PIPELINING, 3, [OK, "450 later", "251 moved", "550 no", GO, TAKEN], "FDB", "each its own answer"),
    (PIPELINING, 1, [OK, "252 cannot vrfy", GO, TAKEN], "D", "the first digit decides"),
    (PIPELINING, 2, ["550 no", "503 mail first", "503 mail first", "503 no"], "BB", "MAIL refused for good"),
    (
        PIPELINING,
        2,
        ["451 later", "503 mail first", "503 mail first", "503 no"],
        "FF",
        "MAIL refused for now",
    ),
    (PLAIN, 2, ["550 no"], "BB", "MAIL refused, step by step: nothing more is asked"),
    (PIPELINING, 1, ["550 no", "250 ok", "354 go", "250 taken"], "B", "a server that forgets its refusal"),
    (
        PIPELINING,
        2,
        [OK, "550 a", "550 b", "554 no valid recipients", OK],
        "BB",
        "all refused, DATA too; RSET",
    ),
    (PIPELINING, 2, [OK, "550 a", "450 b", "354 go", "554 nobody"], "BF", "all refused, 354: lone dot"),
    (PIPELINING, 1, [OK, "550 a", "354 go", "250 taken"], "B", "250 for a lone dot delivers nothing"),
    (PLAIN, 2, [OK, "550 a", "550 b", "250 reset"], "BB", "all refused, step by step: no DATA, RSET"),
    (PIPELINING, 3, [OK, OK, "550 no", OK, "451 disk", OK], "FBF", "DATA refused: those accepted only"),
    (
        PIPELINING,
        3,
        [OK, OK, "450 no", OK, "554 no", OK],
        "BFB",
        "DATA refused for good: those accepted only",
    ),
    (PIPELINING, 3, [OK, OK, "550 no", OK, GO, "554 spam"], "BBB", "message refused"),
    (PIPELINING, 2, [OK, OK, "450 no", GO, "451 later"], "FF", "message deferred"),
    (PIPELINING, 2, [OK, OK, OK, GO], "??", "lost after the final dot"),
    (PIPELINING, 2, [OK, OK, "550 no", GO], "?B", "lost after the final dot: the refused one is certain"),
    (PIPELINING, 2, [OK, OK, OK], "FF", "lost before 354"),
    (PIPELINING, 2, [OK, OK, "550 no"], "FB", "lost before 354: the refused one is certain"),
    (PIPELINING, 1, [], "F", "lost before anything"),
    (PIPELINING, 2, [OK, "421 bye"], "FF", "421 at RCPT"),
    (PIPELINING, 2, [OK, OK, "421 bye"], "FF", "421 at the second RCPT"),
    (PIPELINING, 2, [OK, OK, OK, "421 bye"], "FF", "421 at DATA"),
    (PIPELINING, 2, [OK, OK, OK, GO, "421 bye"], "FF", "421 after the final dot is an answer: no doubt"),
    (PIPELINING, 1, ["421 bye"], "F", "421 at MAIL"),
    (PIPELINING, 3, [OK, OK, "452 many", "452 many", GO, TAKEN], "D--", "too many recipients"),
    (PIPELINING, 3, [OK, OK, "552 many", OK, GO, TAKEN], "D-D", "552 at RCPT means 452"),
    (PIPELINING, 2, [OK, OK, "452/5.3 many", GO, TAKEN], "D-", "too many, with its enhanced code"),
    (PIPELINING, 2, [OK, OK, "451/5.3 many", GO, TAKEN], "D-", "too many, with another code"),
    (PIPELINING, 2, [OK, OK, "550/5.3 many", GO, TAKEN], "D-", "too many, with a permanent code"),
    (PIPELINING, 2, [OK, OK, "452/2.2 full", GO, TAKEN], "DF", "452 for a full mailbox is no overflow"),
    (PIPELINING, 2, [OK, OK, "552/2.2 full", GO, TAKEN], "DB", "552 for a full mailbox is what it says"),
    (PIPELINING, 1, [OK, "552 many", "503 no", OK], "F", "552 without anybody accepted: later"),
    (PIPELINING, 2, [OK, OK, "452 many", GO, "554 spam"], "BF", "overflow of a refused message: later"),
    (PIPELINING, 2, [OK, OK, "452 many", GO], "?F", "overflow of a message in doubt: later"),
    (PIPELINING, 1, ["354 what"], "F", "MAIL answered with 354"),
    (PIPELINING, 1, [OK, "354 what"], "F", "RCPT answered with 354"),
    (PIPELINING, 1, [OK, OK, "250 what"], "F", "DATA answered with 250"),
    (PIPELINING, 1, [OK, OK, GO, "354 what"], "?", "the final dot answered with 354"),
]


@pytest.mark.parametrize(("capabilities", "count", "replies", "expected", "why"), DIALOGS)
def test_dialog(capabilities: Capabilities, count: int, replies: list[str], expected: str, why: str) -> None:
    transaction = converse(capabilities, count, *replies)
    assert summary(transaction, count) == expected, why
    assert transaction.phase is TransactionPhase.DONE


def test_pipelined_commands_are_one_write() -> None:
    recipients = to("a@example.com", "b@example.com")
    transaction = ClientTransaction(make_message(), recipients, PIPELINING, PEER)
    assert transaction.begin() == (
        b"MAIL FROM:<sender@example.org>\r\nRCPT TO:<a@example.com>\r\nRCPT TO:<b@example.com>\r\nDATA\r\n"
    )
    assert [transaction.receive(reply(text)) for text in (OK, OK, OK, GO)] == [b"", b"", b"", b""]
    assert transaction.phase is TransactionPhase.BODY


def test_without_pipelining_each_command_waits_for_its_reply() -> None:
    recipients = to("a@example.com", "b@example.com")
    transaction = ClientTransaction(make_message(), recipients, PLAIN, PEER)
    assert transaction.begin() == b"MAIL FROM:<sender@example.org>\r\n"
    assert transaction.receive(reply(OK)) == b"RCPT TO:<a@example.com>\r\n"
    assert transaction.receive(reply("550 no")) == b"RCPT TO:<b@example.com>\r\n"
    assert transaction.receive(reply(OK)) == b"DATA\r\n"
    assert transaction.receive(reply(GO)) == b""
    assert transaction.phase is TransactionPhase.BODY


def test_lone_dot_is_sent_when_354_comes_for_nobody() -> None:
    transaction = begun(OK, "550 no")
    assert transaction.receive(reply(GO)) == b".\r\n"
    assert transaction.phase is TransactionPhase.LONE_DOT
    transaction.receive(reply("554 no"))
    assert (transaction.phase, transaction.closing) == (TransactionPhase.DONE, False)


def test_transaction_left_open_is_reset_so_that_the_connection_can_be_reused() -> None:
    transaction = begun(OK, OK)
    assert transaction.receive(reply("451 later")) == b"RSET\r\n"
    transaction.receive(reply("250 ok"))
    assert (transaction.phase, transaction.closing) == (TransactionPhase.DONE, False)


def test_refused_reset_ends_the_connection() -> None:
    assert converse(PIPELINING, 1, OK, OK, "451 later", "500 what").closing


@pytest.mark.parametrize(
    ("replies", "unanswered"),
    [([], True), (["421 bye"], True), (["354 what"], True), ([OK], False), ([OK, "421 bye"], False)],
)
def test_only_before_mail_is_answered_another_host_may_be_asked(replies: list[str], unanswered: bool) -> None:
    transaction = converse(PIPELINING, 1, *replies)
    assert transaction.unanswered is unanswered
    assert transaction.closing
    assert outcomes(transaction, 1)[0].scope is (Scope.HOST if unanswered else Scope.MESSAGE)


def test_scope_says_who_was_refused() -> None:
    def scopes(*replies: str) -> list[Scope]:
        return [outcome.scope for outcome in outcomes(converse(PIPELINING, 2, *replies), 2)]

    assert scopes(OK, "550 a", "450 b", "554 no", OK) == [Scope.RECIPIENT, Scope.RECIPIENT]
    assert scopes("550 a", "503 b", "503 c", "503 d") == [Scope.MESSAGE, Scope.MESSAGE]
    assert scopes(OK, OK, "550 b", GO, "554 spam") == [Scope.MESSAGE, Scope.RECIPIENT]


def test_outcome_names_the_peer_and_its_words() -> None:
    outcome = outcomes(converse(PIPELINING, 1, OK, OK, GO, "554/7.1 spam"), 1)[0]
    assert (outcome.host, outcome.peer, outcome.tls) == ("mx.example.com", "192.0.2.1:25", "TLSv1.3")
    assert outcome.reply == Reply(554, "7.1", "spam")
    assert not outcome.local
    assert outcome.counts


def test_lost_connection_is_told_in_our_words() -> None:
    outcome = outcomes(converse(PIPELINING, 1, OK, OK), 1)[0]
    assert outcome.reply == LOST
    assert outcome.local


def test_overflow_that_nobody_will_take_now_costs_no_attempt() -> None:
    transaction = converse(PIPELINING, 2, OK, OK, "452 many", GO, "451 later")
    refused, overflow = outcomes(transaction, 2)
    assert (refused.counts, overflow.counts) == (True, False)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("552/3.4 too big", "B"), ("250 taken", "F")],
    ids=["is heard", "is not believed"],
)
def test_an_answer_in_the_middle_of_the_body(answer: str, expected: str) -> None:
    transaction = begun(OK, OK, GO, answer)
    assert summary(transaction, 1) == expected
    assert transaction.closing


def test_our_own_trouble_blames_no_peer() -> None:
    transaction = begun(OK, OK, GO)
    transaction.abandon(Reply(451, "3.0", "store"))
    outcome = outcomes(transaction, 1)[0]
    assert (outcome.verdict, outcome.scope, outcome.counts) == (Verdict.DEFERRED, Scope.LOCAL, False)
    assert transaction.closing


def mail_line(message: Message, capabilities: Capabilities) -> bytes:
    recipients = [recipient.address for recipient in message.envelope.recipients]
    return ClientTransaction(message, to(*recipients), capabilities, PEER).begin().split(b"\r\n")[0]


ALL = Capabilities(size_offered=True, eight_bit_mime=True, smtputf8=True)


@pytest.mark.parametrize(
    ("message", "capabilities", "expected"),
    [
        (make_message(b"x" * 9), ALL, b"MAIL FROM:<sender@example.org> SIZE=9"),
        (make_message(b"x" * 9), PLAIN, b"MAIL FROM:<sender@example.org>"),
        (make_message(b"x", eight_bit=True), ALL, b"MAIL FROM:<sender@example.org> SIZE=1 BODY=8BITMIME"),
        (
            make_message(b"x", declared=BodyType.EIGHT_BIT),
            Capabilities(eight_bit_mime=True),
            b"MAIL FROM:<sender@example.org> BODY=8BITMIME",
        ),
        (make_message(b"x", eight_bit=True), PLAIN, b"MAIL FROM:<sender@example.org>"),
        (make_message(b"x", smtputf8=True), ALL, b"MAIL FROM:<sender@example.org> SIZE=1 SMTPUTF8"),
        (
            make_message(b"x", sender="ü@example.org"),
            ALL,
            "MAIL FROM:<ü@example.org> SIZE=1 SMTPUTF8".encode(),
        ),
        (
            make_message(b"x", recipients=["a@example.com", "ü@example.com"]),
            ALL,
            b"MAIL FROM:<sender@example.org> SIZE=1 SMTPUTF8",
        ),
        (make_message(b"x", sender=""), PLAIN, b"MAIL FROM:<>"),
        (make_message(b"x", sender='"a@b c"@example.org'), PLAIN, b'MAIL FROM:<"a@b c"@example.org>'),
    ],
)
def test_mail_parameters_only_where_offered_and_needed(
    message: Message, capabilities: Capabilities, expected: bytes
) -> None:
    assert mail_line(message, capabilities) == expected


@pytest.mark.parametrize("bad", ["a\r\nDATA\r\n@x", "a\n@x", "a\r@x", "a@x>\r\nRCPT TO:<b@x"])
def test_address_with_a_line_break_never_becomes_a_command(bad: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        ClientTransaction(make_message(), to(bad), PIPELINING, PEER)
    with pytest.raises(ValueError, match="line break"):
        ClientTransaction(make_message(sender=bad), to("a@x"), PIPELINING, PEER)


def test_announced_limit_is_compared_with_the_message() -> None:
    message = make_message(b"x" * 100)
    refusal = too_large(message, Capabilities(size_offered=True, size=99))
    assert refusal is not None
    assert (refusal.code, refusal.status) == (552, "5.3.4")
    assert too_large(message, Capabilities(size_offered=True, size=100)) is None
    assert too_large(message, Capabilities(size_offered=True)) is None
