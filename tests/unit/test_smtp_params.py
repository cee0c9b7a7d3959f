from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zonerelay.model.envelope import Body, Notify, Ret
from zonerelay.smtp.params import (
    DSN_MAIL_PARAMETERS,
    DSN_RCPT_PARAMETERS,
    MAIL_PARAMETERS,
    RCPT_PARAMETERS,
    MailCommand,
    RcptCommand,
    parse_mail,
    parse_rcpt,
)
from zonerelay.smtp.paths import CommandError, is_address_literal

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
    ("a" * 64 + "@example.org", "the longest local part"),
    ("a@" + ".".join(["b" * 63] * 3), "long labels"),
    ("a@" + "b." * 125 + "cc", "254 octets of path, 256 with brackets"),
]


@pytest.mark.parametrize(("mailbox", "reason"), ACCEPTED, ids=[row[1] for row in ACCEPTED])
def test_mailbox_is_kept_as_sent(mailbox: str, reason: str) -> None:
    assert parse_mail(f"FROM:<{mailbox}>") == MailCommand(mailbox)  # type: ignore[arg-type]  # a literal
    if "%" not in mailbox:
        assert parse_rcpt(f"TO:<{mailbox}>").recipient == mailbox


# The path as it stands behind the colon, and code and detail for MAIL (RCPT says 1.3 for 1.7).
REFUSED = [
    ("a@example.org", 501, "5.2", "no brackets"),
    ("", 501, "5.2", "nothing"),
    ("<a@example.org", 501, "1.7", "no closing bracket"),
    ("a@example.org>", 501, "5.2", "no opening bracket"),
    ("<<a@example.org>>", 501, "1.7", "double brackets"),
    ("<a>", 501, "1.7", "no domain"),
    ("<a@>", 501, "1.7", "empty domain"),
    ("<@example.org>", 501, "1.7", "empty local part"),
    ("<a@b@c>", 501, "1.7", "two at signs"),
    ("<a b@example.org>", 501, "1.7", "a space outside quotes"),
    ("<a(c)@example.org>", 501, "1.7", "a comment"),
    ("<a,b@example.org>", 501, "1.7", "two addresses"),
    ("<.a@example.org>", 501, "1.7", "leading dot"),
    ("<a.@example.org>", 501, "1.7", "trailing dot in the local part"),
    ("<a..b@example.org>", 501, "1.7", "two dots"),
    ("<a@example.org.>", 501, "1.7", "trailing dot in the domain"),
    ("<a@.example.org>", 501, "1.7", "leading dot in the domain"),
    ("<a@exa mple.org>", 501, "1.7", "a space in the domain"),
    ("<a@-example.org>", 501, "1.7", "leading hyphen"),
    ("<a@example-.org>", 501, "1.7", "trailing hyphen"),
    ("<a@" + "b" * 64 + ".org>", 501, "1.7", "label too long"),
    ("<a@192.0.2.1>", 501, "1.7", "an address without its brackets"),
    ("<a@[192.0.2]>", 501, "1.7", "three octets"),
    ("<a@[192.0.2.256]>", 501, "1.7", "256"),
    ("<a@[IPv6:2001:db8::g]>", 501, "1.7", "not hexadecimal"),
    ("<a@[IPv6:fe80::1%eth0]>", 501, "1.7", "a scope"),
    ("<a@[2001:db8::1]>", 501, "1.7", "IPv6 without its tag"),
    ("<a@[X-tag:content]>", 501, "1.7", "a tag that nobody registered"),
    ("<a@[]>", 501, "1.7", "an empty literal"),
    ("<a@[192.0.2.1>", 501, "1.7", "a literal that is not closed"),
    ("<a@[192.0.2.1]x>", 501, "1.7", "text behind a literal"),
    ('<"a@example.org>', 501, "1.7", "a quote that is not closed"),
    ('<"a"b@example.org>', 501, "1.7", "text behind quotes"),
    ('<b"a"@example.org>', 501, "1.7", "text before quotes"),
    ('<"\\"@example.org>', 501, "1.7", "the closing quote is quoted"),
    ("<" + "a" * 65 + "@example.org>", 501, "1.7", "local part too long"),
    ("<a@" + "b." * 125 + "ccc>", 501, "1.7", "path of 257 octets"),
    ("<@a.example,@b.example:u@example.org>", 553, "1.7", "source route"),
    ("<@a.example:u@example.org>", 553, "1.7", "short source route"),
    ("<é@example.org>", 553, "6.7", "non-ASCII local part without SMTPUTF8"),
    ("<a@bücher.example>", 553, "6.7", "U-label without SMTPUTF8"),
]


@pytest.mark.parametrize(("path", "code", "detail", "reason"), REFUSED, ids=[row[3] for row in REFUSED])
def test_bad_path_is_refused(path: str, code: int, detail: str, reason: str) -> None:
    with pytest.raises(CommandError) as mail:
        parse_mail(f"FROM:{path}")
    assert (mail.value.reply.code, mail.value.reply.detail) == (code, detail)
    with pytest.raises(CommandError) as rcpt:
        parse_rcpt(f"TO:{path}")
    assert (rcpt.value.reply.code, rcpt.value.reply.detail) == (code, detail.replace("1.7", "1.3"))


def test_null_sender_is_for_mail_only() -> None:
    assert parse_mail("FROM:<>").sender == ""
    with pytest.raises(CommandError):
        parse_rcpt("TO:<>")


@pytest.mark.parametrize("spelling", ["postmaster", "Postmaster", "POSTMASTER"])
def test_postmaster_needs_no_domain_as_a_recipient(spelling: str) -> None:
    assert parse_rcpt(f"TO:<{spelling}>").recipient == spelling
    with pytest.raises(CommandError):
        parse_mail(f"FROM:<{spelling}>")


@pytest.mark.parametrize("hack", ["u%example.com@relay.example", "u%a%b@relay.example", "a@b%c@d"])
def test_percent_hack_is_refused_for_recipients(hack: str) -> None:
    with pytest.raises(CommandError) as error:
        parse_rcpt(f"TO:<{hack}>")
    assert error.value.reply.code in (501, 553)


def test_keyword_has_no_case_and_a_space_behind_the_colon_is_skipped() -> None:
    assert parse_mail("from: <a@example.org> size=5") == MailCommand("a@example.org", 5)  # type: ignore[arg-type]
    assert parse_rcpt("To:  <a@example.org>").recipient == "a@example.org"


@pytest.mark.parametrize(
    "argument", ["", "<a@example.org>", "FROM <a@example.org>", "FROM :<a@example.org>", "TO:<a@b>"]
)
def test_mail_without_from_says_the_syntax(argument: str) -> None:
    with pytest.raises(CommandError, match=r"501 5\.5\.2 Syntax: FROM:<address>"):
        parse_mail(argument)


def test_parameters_of_mail() -> None:
    command = parse_mail("FROM:<é@bücher.example> SIZE=1000 body=8bitmime SMTPUTF8")
    assert (command.size, command.body, command.smtputf8) == (1000, Body.EIGHT_BIT, True)
    assert command.sender == "é@bücher.example"


def test_smtputf8_recipient_needs_the_declaration_in_mail() -> None:
    assert parse_rcpt("TO:<用户@例え.example>", smtputf8=True).recipient == "用户@例え.example"
    with pytest.raises(CommandError, match=r"553 5\.6\.7"):
        parse_rcpt("TO:<用户@例え.example>")


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


BAD_PARAMETERS = [
    ("SIZE=", 501, "no value"),
    ("SIZE", 501, "no equals sign"),
    ("SIZE=-1", 501, "negative"),
    ("SIZE=1x", 501, "not a number"),
    ("SIZE=" + "9" * 21, 501, "21 digits"),
    ("SIZE=1 SIZE=1", 501, "twice"),
    ("SIZE=1=2", 501, "two equals signs"),
    ("BODY=BINARYMIME", 501, "not offered"),
    ("BODY", 501, "no value"),
    ("SMTPUTF8=yes", 501, "takes no value"),
    ("AUTH=<>", 555, "not offered"),
    ("RET=FULL", 555, "DSN is not offered"),
    ("MT-PRIORITY=3", 555, "a keyword with a hyphen is a keyword"),
    ("FOO", 555, "unknown"),
    ("=x", 501, "no keyword"),
    ("F@O=x", 501, "not a keyword"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "code", "reason"), BAD_PARAMETERS, ids=[row[2] for row in BAD_PARAMETERS]
)
def test_bad_parameter_of_mail_is_refused(parameters: str, code: int, reason: str) -> None:
    with pytest.raises(CommandError) as error:
        parse_mail(f"FROM:<a@example.org> {parameters}")
    assert (error.value.reply.code, error.value.reply.detail) == (code, "5.4")


def test_parameters_need_a_space_before_them() -> None:
    with pytest.raises(CommandError, match=r"501 5\.5\.4"):
        parse_mail("FROM:<a@example.org>SIZE=5")


def test_rcpt_takes_no_parameter_while_dsn_is_not_offered() -> None:
    with pytest.raises(CommandError, match=r"555 5\.5\.4"):
        parse_rcpt("TO:<a@example.org> NOTIFY=NEVER")


def test_dsn_parameters_when_offered() -> None:
    mail = parse_mail("FROM:<> RET=hdrs ENVID=Ab+2Bc", offered=MAIL_PARAMETERS | DSN_MAIL_PARAMETERS)
    assert (mail.ret, mail.envid) == (Ret.HDRS, "Ab+2Bc")
    rcpt = parse_rcpt(
        "TO:<a@example.org> NOTIFY=success,DELAY ORCPT=rfc822;A+2BB@x",
        offered=RCPT_PARAMETERS | DSN_RCPT_PARAMETERS,
    )
    assert rcpt == RcptCommand(rcpt.recipient, Notify.SUCCESS | Notify.DELAY, "rfc822;A+2BB@x")


BAD_DSN = [
    ("RET=SOME", "neither FULL nor HDRS"),
    ("RET", "no value"),
    ("ENVID=a+2x", "bad xtext"),
    ("ENVID=a+2b", "xtext is in upper case"),
    ("ENVID=" + "a" * 101, "too long"),
    ("ENVID", "no value"),
]


@pytest.mark.parametrize(("parameters", "reason"), BAD_DSN, ids=[row[1] for row in BAD_DSN])
def test_bad_dsn_parameter_of_mail(parameters: str, reason: str) -> None:
    with pytest.raises(CommandError, match=r"501 5\.5\.4"):
        parse_mail(f"FROM:<> {parameters}", offered=DSN_MAIL_PARAMETERS)


BAD_DSN_RCPT = [
    ("NOTIFY=NEVER,SUCCESS", "NEVER stands alone"),
    ("NOTIFY=SUCCESS,SUCCESS", "twice"),
    ("NOTIFY=SOMETIMES", "unknown"),
    ("NOTIFY", "no value"),
    ("ORCPT=a@example.org", "no type"),
    ("ORCPT=rfc822;", "no address"),
    ("ORCPT=rfc822;a+zz", "bad xtext"),
    ("ORCPT=rfc822;" + "a" * 500, "too long"),
    ("ORCPT", "no value"),
]


@pytest.mark.parametrize(("parameters", "reason"), BAD_DSN_RCPT, ids=[row[1] for row in BAD_DSN_RCPT])
def test_bad_dsn_parameter_of_rcpt(parameters: str, reason: str) -> None:
    with pytest.raises(CommandError, match=r"501 5\.5\.4"):
        parse_rcpt(f"TO:<a@example.org> {parameters}", offered=DSN_RCPT_PARAMETERS)


@pytest.mark.parametrize(
    "address", ["utf-8;\\x{E9}@example.org", "utf-8;é@example.org", "rfc822;a@b", "x400;c+2Bd"]
)
def test_orcpt_types(address: str) -> None:
    assert parse_rcpt(f"TO:<a@b> ORCPT={address}", offered=DSN_RCPT_PARAMETERS).orcpt == address


@settings(max_examples=500, deadline=None)
@given(text=st.text(st.sampled_from('<>@:,."\\ %[]é\x00\r\nab1-=IPv6'), max_size=30), utf8=st.booleans())
def test_any_text_gives_a_clean_mailbox_or_a_refusal(text: str, utf8: bool) -> None:
    try:
        mailbox = parse_rcpt(f"TO:<{text}> ", smtputf8=utf8).recipient
    except CommandError:
        return
    assert not any(ord(c) < 32 for c in mailbox)
    assert utf8 or mailbox.isascii()
    assert len(mailbox.encode()) <= 254


def test_address_literals() -> None:
    assert is_address_literal("[192.0.2.1]")
    assert not is_address_literal("192.0.2.1")
