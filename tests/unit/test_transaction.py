"""The client's half of a transaction as dialogs: what is written, and what becomes of each recipient."""

import pytest
from msgspec import structs

from tests.support.mail import TEXT, make_message
from tests.support.queueing import delivery
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import BodyType, Mailbox, Message, Notify, Ret
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.smtp.client import transaction as transactions
from zonerelay.smtp.client.extensions import Capabilities
from zonerelay.smtp.client.transaction import BdatFailure, ClientTransaction, Peer, TransactionPhase
from zonerelay.smtp.server.params import MAX_ORCPT, NOTIFY, parse_orcpt

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
    (PIPELINING, 2, [OK, "550 no", GO], "FF", "a missing reply: nobody knows who is refused"),
    (PIPELINING, 1, [OK, OK, "250 what"], "F", "DATA answered with 250"),
    (PIPELINING, 1, [OK, OK, GO, "354 what"], "?", "the final dot answered with 354"),
]


@pytest.mark.parametrize(("capabilities", "count", "replies", "expected", "why"), DIALOGS)
def test_dialog(capabilities: Capabilities, count: int, replies: list[str], expected: str, why: str) -> None:
    transaction = converse(capabilities, count, *replies)
    assert summary(transaction, count) == expected, why
    assert transaction.phase is TransactionPhase.DONE


def test_a_skipped_line_may_have_been_the_missing_reply() -> None:
    transaction = begun(OK, "554 no valid recipients")
    transaction.lost(LOST, skipped=True)
    assert summary(transaction, 1) == "F"
    assert transaction.refused_at is None


def test_pipelined_commands_are_one_write() -> None:
    recipients = to("a@example.com", "b@example.com")
    transaction = ClientTransaction(make_message(), recipients, PIPELINING, PEER)
    assert transaction.begin() == (
        b"MAIL FROM:<sender@example.org>\r\nRCPT TO:<a@example.com>\r\nRCPT TO:<b@example.com>\r\nDATA\r\n"
    )
    assert [transaction.receive(reply(text)) for text in (OK, OK, OK, GO)] == [b"", b"", b"", b""]
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
def test_mail_parameters_where_needed(message: Message, capabilities: Capabilities, expected: bytes) -> None:
    assert mail_line(message, capabilities) == expected


@pytest.mark.parametrize("bad", ["a\r\nDATA\r\n@x", "a\n@x", "a\r@x", "a@x>\r\nRCPT TO:<b@x"])
def test_address_with_a_line_break_never_becomes_a_command(bad: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        ClientTransaction(make_message(), to(bad), PIPELINING, PEER)
    with pytest.raises(ValueError, match="line break"):
        ClientTransaction(make_message(sender=bad), to("a@x"), PIPELINING, PEER)


def test_announced_limit_is_compared_with_the_message() -> None:
    message = make_message(b"x" * 100)
    refusal = transactions.too_large(message, Capabilities(size_offered=True, size=99))
    assert refusal is not None
    assert (refusal.code, refusal.status) == (552, "5.3.4")
    assert transactions.too_large(message, Capabilities(size_offered=True, size=100)) is None
    assert transactions.too_large(message, Capabilities(size_offered=True)) is None


# What a server with DSN is told of the client's wishes, and that a server without it is told nothing


DSN = Capabilities(pipelining=True, dsn=True, smtputf8=True)
NO_DSN = Capabilities(pipelining=True, smtputf8=True)
SUCCESS = Notify.SUCCESS


def message(*, ret: Ret = Ret.UNSET, envid: str = "", sender: str = "s@example.org") -> Message:
    made = make_message(sender=sender)
    return structs.replace(made, envelope=structs.replace(made.envelope, ret=ret, envid=envid))


def script(of: Message, capabilities: Capabilities, *recipients: dict[str, object]) -> list[str]:
    deliveries = [delivery(**each) for each in recipients]  # type: ignore[arg-type]  # fields by name
    begun = ClientTransaction(of, deliveries, capabilities, Peer()).begin().decode()
    assert begun.endswith("\r\nDATA\r\n")
    return begun.split("\r\n")[:-2]


def test_a_server_with_dsn_gets_everything_as_it_was_given() -> None:
    assert script(
        message(ret=Ret.HDRS, envid="Ab+2Bc"),
        DSN,
        {"recipient": "b@example.com", "notify": SUCCESS | Notify.FAILURE, "orcpt": "rfc822;Bob+2BX@old"},
        {"recipient": "c@example.com"},
        {"recipient": "d@example.com", "orcpt": "x-local;d"},
    ) == [
        "MAIL FROM:<s@example.org> RET=HDRS ENVID=Ab+2Bc",
        "RCPT TO:<b@example.com> NOTIFY=SUCCESS,FAILURE ORCPT=rfc822;Bob+2BX@old",
        "RCPT TO:<c@example.com>",
        "RCPT TO:<d@example.com> ORCPT=x-local;d",
    ]


def test_a_server_gets_no_wishes_that_it_does_not_know_or_nobody_had() -> None:
    wishes: dict[str, object] = {"notify": SUCCESS, "orcpt": "rfc822;b@example.com"}
    bare = ["MAIL FROM:<s@example.org>", "RCPT TO:<b@example.com>"]
    assert script(message(ret=Ret.FULL, envid="x"), NO_DSN, {"recipient": "b@example.com", **wishes}) == bare
    assert script(message(), DSN, {"recipient": "b@example.com"}) == bare


def test_without_pipelining_every_command_has_its_own_parameters() -> None:
    deliveries = [delivery("b@example.com", notify=SUCCESS), delivery("c@example.com", notify=Notify.NEVER)]
    transaction = ClientTransaction(
        message(ret=Ret.FULL, envid="x"), deliveries, Capabilities(dsn=True), Peer()
    )
    ok = Reply(250, "", "ok")
    assert transaction.begin() == b"MAIL FROM:<s@example.org> RET=FULL ENVID=x\r\n"
    assert transaction.receive(ok) == b"RCPT TO:<b@example.com> NOTIFY=SUCCESS ORCPT=rfc822;b@example.com\r\n"
    assert transaction.receive(ok) == b"RCPT TO:<c@example.com> NOTIFY=NEVER ORCPT=rfc822;c@example.com\r\n"
    assert transaction.receive(ok) == b"DATA\r\n"


@pytest.mark.parametrize("capabilities", [DSN, NO_DSN])
def test_the_outcome_tells_whether_the_peer_knows_the_wishes(capabilities: Capabilities) -> None:
    transaction = ClientTransaction(message(), [delivery(notify=SUCCESS)], capabilities, Peer())
    transaction.begin()
    for code in (250, 250, 354):
        transaction.receive(Reply(code, "", "ok"))
    assert transaction.phase is TransactionPhase.BODY
    transaction.body_sent()
    transaction.receive(Reply(250, "0.0", "taken"))
    (outcome,) = transaction.outcomes
    assert outcome is not None
    assert outcome.dsn_passed is capabilities.dsn


@pytest.mark.parametrize(
    "words", ["NEVER", "SUCCESS", "FAILURE", "DELAY", "SUCCESS,FAILURE,DELAY", "SUCCESS,DELAY"]
)
def test_notify_says_what_was_said(words: str) -> None:
    given = delivery(notify=NOTIFY[words], orcpt="rfc822;b@x")
    assert transactions.rcpt_parameters(given, smtputf8=False) == f" NOTIFY={words} ORCPT=rfc822;b@x"


@pytest.mark.parametrize(
    ("recipient", "orcpt"),
    [
        ("b@example.com", "rfc822;b@example.com"),
        ("a+b=c@example.com", "rfc822;a+2Bb+3Dc@example.com"),
        ('"a b"@example.com', 'rfc822;"a+20b"@example.com'),
        ("jürgen@bücher.example", r"utf-8;j\x{FC}rgen@b\x{FC}cher.example"),
        ("a+ü@example.com", r"utf-8;a\x{2B}\x{FC}@example.com"),
        ("😀@example.com", r"utf-8;\x{1F600}@example.com"),
    ],
)
def test_an_orcpt_is_made_of_the_address_for_who_gave_only_notify(recipient: str, orcpt: str) -> None:
    assert transactions.original_recipient(Mailbox(recipient)) == orcpt
    assert parse_orcpt(orcpt) == orcpt
    made = delivery(recipient, notify=Notify.FAILURE)
    assert transactions.rcpt_parameters(made, smtputf8=True) == f" NOTIFY=FAILURE ORCPT={orcpt}"


def test_an_orcpt_that_would_be_too_long_is_not_made() -> None:
    long = Mailbox("ü" * 120 + "@example.com")
    assert len(long) < MAX_ORCPT
    assert transactions.rcpt_parameters(delivery(long, notify=SUCCESS), smtputf8=True) == " NOTIFY=SUCCESS"


@pytest.mark.parametrize(
    ("given", "smtputf8", "sent"),
    [
        ("utf-8;jürgen@example.com", True, "utf-8;jürgen@example.com"),
        ("utf-8;jürgen@example.com", False, r"utf-8;j\x{FC}rgen@example.com"),
        (r"utf-8;j\x{FC}rgen@example.com", True, r"utf-8;j\x{FC}rgen@example.com"),
        (r"utf-8;j\x{FC}rgen@example.com", False, r"utf-8;j\x{FC}rgen@example.com"),
        ("UTF-8;plain@example.com", False, "UTF-8;plain@example.com"),
    ],
)
def test_a_utf8_orcpt_takes_the_form_that_the_server_knows(given: str, smtputf8: bool, sent: str) -> None:
    assert (
        transactions.rcpt_parameters(delivery(orcpt=parse_orcpt(given)), smtputf8=smtputf8)
        == f" ORCPT={sent}"
    )


def test_smtputf8_in_mail_decides_about_the_form() -> None:
    wishes: dict[str, object] = {"recipient": "b@example.com", "orcpt": "utf-8;ü@x.example"}
    assert script(message(), DSN, wishes)[1] == r"RCPT TO:<b@example.com> ORCPT=utf-8;\x{FC}@x.example"
    assert script(message(sender="ü@example.org"), DSN, wishes) == [
        "MAIL FROM:<ü@example.org> SMTPUTF8",
        "RCPT TO:<b@example.com> ORCPT=utf-8;ü@x.example",
    ]


@pytest.mark.parametrize("bad", ["x\r\nDATA", "x\n", "x\r"])
def test_a_wish_with_a_line_break_never_becomes_a_command(bad: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        script(message(envid=bad), DSN, {"recipient": "b@example.com"})
    with pytest.raises(ValueError, match="line break"):
        script(message(), DSN, {"recipient": "b@example.com", "orcpt": bad})


# The client's half of a transaction with BDAT, in dialogs: what is written, what becomes of whom


BDAT = Capabilities(chunking=True)
PIPED_BDAT = Capabilities(chunking=True, pipelining=True)
CHUNK, DONE = "250 1 octet", "250 taken"


def begun_chunks(
    capabilities: Capabilities, recipients: int, *, probe: bool = True
) -> transactions.ChunkedTransaction:
    deliveries = to(*(f"r{number}@example.com" for number in range(recipients)))
    return transactions.ChunkedTransaction(
        make_message(), deliveries, capabilities, PEER, content=TEXT, probe=probe
    )


def converse_in_chunks(
    capabilities: Capabilities, recipients: int, *replies: str, probe: bool = True
) -> transactions.ChunkedTransaction:
    """Play the replies. Ends with LOST when the replies end too early."""
    transaction = begun_chunks(capabilities, recipients, probe=probe)
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
CHUNKED_DIALOGS = [
    (PIPED_BDAT, 1, [OK, OK, CHUNK, DONE], "D", None, "the usual"),
    (BDAT, 1, [OK, OK, CHUNK, DONE], "D", None, "the usual, step by step"),
    (PIPED_BDAT, 3, [OK, OK, "550 no", OK, CHUNK, DONE], "DBD", None, "one refused does not stop the others"),
    (BDAT, 3, [OK, OK, "550 no", OK, CHUNK, DONE], "DBD", None, "the same, step by step"),
    (PIPED_BDAT, 2, ["550 no", "503 a", "503 b", OK], "BB", None, "MAIL refused for good"),
    (PIPED_BDAT, 2, ["451 no", "503 a", "503 b", OK], "FF", None, "MAIL refused for now"),
    (BDAT, 2, ["550 no"], "BB", None, "MAIL refused, step by step: nothing more is asked"),
    (PIPED_BDAT, 1, ["550 no", OK, OK], "B", None, "a server that forgets its refusal"),
    (PIPED_BDAT, 2, [OK, "550 a", "450 b", OK], "BF", None, "all refused: no BDAT, RSET"),
    (BDAT, 2, [OK, "550 a", "450 b", OK], "BF", None, "all refused, step by step: no BDAT, RSET"),
    (PIPED_BDAT, 3, [OK, OK, "550 no", OK, "451 disk", OK], "FBF", None, "BDAT refused: those accepted only"),
    (PIPED_BDAT, 3, [OK, OK, "450 no", OK, "554 no", OK], "BFB", None, "for good: those accepted only"),
    (PIPED_BDAT, 3, [OK, OK, "550 no", OK, CHUNK, "554 spam"], "BBB", REFUSED, "message refused"),
    (PIPED_BDAT, 2, [OK, OK, "550 no", CHUNK, "451 later"], "FB", REFUSED, "message deferred"),
    (BDAT, 2, [OK, OK, "550 no", CHUNK, "451 later"], "FB", REFUSED, "the same, step by step"),
    (PIPED_BDAT, 2, [OK, OK, OK, CHUNK], "??", UNANSWERED, "lost after the last octet"),
    (PIPED_BDAT, 2, [OK, OK, "550 no", CHUNK], "?B", UNANSWERED, "the refused one is certain"),
    (PIPED_BDAT, 2, [OK, OK, OK], "FF", UNANSWERED, "lost before the first octet was taken"),
    (PIPED_BDAT, 2, [OK, OK], "FF", None, "lost at RCPT"),
    (PIPED_BDAT, 1, [], "F", None, "lost before anything"),
    (PIPED_BDAT, 2, ["421 bye"], "FF", None, "421 at MAIL"),
    (PIPED_BDAT, 2, [OK, OK, "421 bye"], "FF", None, "421 at RCPT"),
    (PIPED_BDAT, 2, [OK, OK, OK, "421 bye"], "FF", None, "421 at the first BDAT"),
    (PIPED_BDAT, 2, [OK, OK, OK, CHUNK, "421 bye"], "FF", None, "421 at the last is an answer: no doubt"),
    (PIPED_BDAT, 3, [OK, OK, "452 many", "452 many", CHUNK, DONE], "D--", None, "too many recipients"),
    (PIPED_BDAT, 2, [OK, OK, "452 many", CHUNK, "554 spam"], "BF", REFUSED, "overflow of a refused message"),
    (PIPED_BDAT, 2, [OK, OK, "452 many", CHUNK], "?F", UNANSWERED, "overflow of one in doubt: later"),
    (PIPED_BDAT, 1, ["354 what"], "F", SURPLUS, "MAIL answered with 354"),
    (PIPED_BDAT, 1, [OK, "354 what"], "F", SURPLUS, "RCPT answered with 354"),
    (PIPED_BDAT, 2, [OK, OK, "354 what"], "FF", SURPLUS, "the second RCPT answered with 354"),
    (PIPED_BDAT, 3, [OK, OK, "550 no", "354 what"], "FFF", SURPLUS, "354 too early: no refusal is believed"),
    (PIPED_BDAT, 1, [OK, OK, "354 go"], "F", SURPLUS, "the first BDAT answered with 354"),
    (PIPED_BDAT, 1, [OK, OK, CHUNK, "354 go"], "?", SURPLUS, "the last BDAT answered with 354"),
]


@pytest.mark.parametrize(("capabilities", "count", "replies", "expected", "trouble", "why"), CHUNKED_DIALOGS)
def test_first_octet_then_the_rest(
    capabilities: Capabilities,
    count: int,
    replies: list[str],
    expected: str,
    trouble: BdatFailure | None,
    why: str,
) -> None:
    transaction = converse_in_chunks(capabilities, count, *replies)
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


@pytest.mark.parametrize("capabilities", [PIPED_BDAT, BDAT], ids=["pipelining", "plain"])
@pytest.mark.parametrize(("count", "replies", "expected", "reused", "why"), WITHOUT_PROBE)
def test_without_a_probe(
    capabilities: Capabilities, count: int, replies: list[str], expected: str, reused: bool, why: str
) -> None:
    if capabilities is BDAT and why == "MAIL refused":
        replies = replies[:1]
    transaction = converse_in_chunks(capabilities, count, *replies, probe=False)
    assert summary(transaction, count) == expected, why
    assert transaction.phase is TransactionPhase.DONE
    assert transaction.closing is not reused


MAIL, RCPT = b"MAIL FROM:<sender@example.org>\r\n", b"RCPT TO:<r%d@example.com>\r\n"


def test_what_is_written() -> None:
    first, rest = b"BDAT 1\r\nS", b"BDAT %d LAST\r\n%b" % (len(TEXT) - 1, TEXT[1:])
    whole = b"BDAT %d LAST\r\n%b" % (len(TEXT), TEXT)
    for probe, replies, written in (
        (True, (OK, OK, OK, CHUNK, DONE), [b"", b"", first, rest, b""]),
        (False, (OK, OK, OK, DONE), [b"", b"", whole, b""]),
    ):
        transaction = begun_chunks(PIPED_BDAT, 2, probe=probe)
        assert transaction.begin() == MAIL + RCPT % 0 + RCPT % 1
        assert [transaction.receive(reply(text)) for text in replies] == written
        transaction = begun_chunks(BDAT, 2, probe=probe)
        assert transaction.begin() == MAIL
        assert [transaction.receive(reply(text)) for text in replies] == [RCPT % 0, RCPT % 1, *written[2:]]


@pytest.mark.parametrize("code", [500, 501, 502, 503, 504])
def test_a_server_that_does_not_know_bdat_is_to_be_asked_again(code: int) -> None:
    transaction = converse_in_chunks(PIPED_BDAT, 3, OK, OK, "550 no", "452 many", f"{code} what", OK)
    assert summary(transaction, 3) == "-B-"
    assert (transaction.bdat_failure, transaction.again, transaction.closing) == (UNKNOWN, True, False)


@pytest.mark.parametrize("said", ["500 BDAT?", "451 disk"])
def test_a_server_that_takes_the_octet_for_the_beginning_of_a_command_is_brought_in_step(said: str) -> None:
    transaction = begun_chunks(PIPED_BDAT, 1)
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
    transaction = converse_in_chunks(PIPED_BDAT, 2, OK, OK, "550 no", "502 what", *replies)
    assert summary(transaction, 2) == "FB"
    assert (transaction.bdat_failure, transaction.again, transaction.closing) == (UNKNOWN, False, True)


def test_bdat_is_known_once_one_was_taken() -> None:
    assert converse_in_chunks(PIPED_BDAT, 1, OK, OK, CHUNK).bdat_taken
    assert converse_in_chunks(PIPED_BDAT, 1, OK, OK, DONE, probe=False).bdat_taken
    assert not converse_in_chunks(PIPED_BDAT, 1, OK, OK, "451 no", OK).bdat_taken
    assert not converse_in_chunks(PIPED_BDAT, 1, OK, "550 no", OK).bdat_taken


@pytest.mark.parametrize(
    ("replies", "unanswered"), [([], True), (["421 bye"], True), ([OK], False), ([OK, "421 bye"], False)]
)
def test_another_host_may_be_asked_when_this_one_has_nothing(replies: list[str], unanswered: bool) -> None:
    transaction = converse_in_chunks(PIPED_BDAT, 1, *replies)
    assert transaction.unanswered is unanswered
    assert outcomes(transaction, 1)[0].scope is (Scope.HOST if unanswered else Scope.MESSAGE)


def test_our_own_trouble_with_chunks_blames_no_peer() -> None:
    transaction = begun_chunks(PIPED_BDAT, 1)
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
    assert not transactions.can_be_chunked(head)
    assert transactions.can_be_chunked(b"R" + head)
