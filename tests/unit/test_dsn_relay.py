"""What a server with DSN is told of the client's wishes, and that a server without it is told nothing."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.support.mail import make_message
from tests.support.queueing import delivery
from zonerelay.model.address import Mailbox
from zonerelay.model.envelope import Message, Notify, Ret
from zonerelay.model.reply import Reply
from zonerelay.smtp.client.extensions import Capabilities
from zonerelay.smtp.client.transaction import (
    ClientTransaction,
    Peer,
    TransactionPhase,
    mail_parameters,
    original_recipient,
    rcpt_parameters,
)
from zonerelay.smtp.server.params import MAX_ORCPT, parse_notify, parse_orcpt

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
    transaction = ClientTransaction(message(envid="x"), deliveries, Capabilities(dsn=True), Peer())
    ok = Reply(250, "", "ok")
    assert transaction.begin() == b"MAIL FROM:<s@example.org> ENVID=x\r\n"
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
    given = delivery(notify=parse_notify(words), orcpt="rfc822;b@x")
    assert rcpt_parameters(given, smtputf8=False) == f" NOTIFY={words} ORCPT=rfc822;b@x"


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
    assert original_recipient(Mailbox(recipient)) == orcpt
    assert parse_orcpt(orcpt) == orcpt
    made = delivery(recipient, notify=Notify.FAILURE)
    assert rcpt_parameters(made, smtputf8=True) == f" NOTIFY=FAILURE ORCPT={orcpt}"


def test_an_orcpt_that_would_be_too_long_is_not_made() -> None:
    long = Mailbox("ü" * 120 + "@example.com")
    assert len(long) < MAX_ORCPT
    assert rcpt_parameters(delivery(long, notify=SUCCESS), smtputf8=True) == " NOTIFY=SUCCESS"


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
    assert rcpt_parameters(delivery(orcpt=parse_orcpt(given)), smtputf8=smtputf8) == f" ORCPT={sent}"


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


@pytest.mark.parametrize("ret", [Ret.FULL, Ret.HDRS])
def test_mail_parameters(ret: Ret) -> None:
    assert mail_parameters(message(ret=ret).envelope) == f" RET={ret}"
    assert mail_parameters(message(envid="e").envelope) == " ENVID=e"
    assert mail_parameters(message().envelope) == ""
