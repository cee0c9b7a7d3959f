from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zonerelay.model.envelope import BodyType, Notify, Recipient, Ret
from zonerelay.smtp.server.params import (
    AUTH_MAIL_PARAMETERS,
    DSN_MAIL_PARAMETERS,
    DSN_RCPT_PARAMETERS,
    HOLD_MAIL_PARAMETERS,
    MAIL_PARAMETERS,
    RCPT_PARAMETERS,
    MailCommand,
    parse_mail,
    parse_rcpt,
)
from zonerelay.smtp.server.paths import CommandError, literal_address

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
    assert parse_mail(f"FROM:<{mailbox}>") == MailCommand(mailbox)  # type: ignore[arg-type]  # a literal
    assert parse_rcpt(f"TO:<{mailbox}>").address == mailbox


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
    ("<..@example.org>", 501, "1.7", "only dots"),
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
    ("<" + "a" * 243 + "@example.org>", 501, "1.7", "path of 257 octets, most of it the local part"),
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
    assert parse_rcpt(f"TO:<{spelling}>").address == spelling
    with pytest.raises(CommandError):
        parse_mail(f"FROM:<{spelling}>")


def test_keyword_has_no_case_and_a_space_behind_the_colon_is_skipped() -> None:
    assert parse_mail("from: <a@example.org> size=5") == MailCommand("a@example.org", 5)  # type: ignore[arg-type]
    assert parse_rcpt("To:  <a@example.org>").address == "a@example.org"


@pytest.mark.parametrize(
    "argument", ["", "<a@example.org>", "FROM <a@example.org>", "FROM :<a@example.org>", "TO:<a@b>"]
)
def test_mail_without_from_says_the_syntax(argument: str) -> None:
    with pytest.raises(CommandError, match=r"501 5\.5\.2 Syntax: FROM:<address>"):
        parse_mail(argument)


def test_parameters_of_mail() -> None:
    command = parse_mail("FROM:<é@bücher.example> SIZE=1000 body=8bitmime SMTPUTF8")
    assert (command.size, command.body, command.smtputf8) == (1000, BodyType.EIGHT_BIT, True)
    assert command.sender == "é@bücher.example"


def test_smtputf8_recipient_needs_the_declaration_in_mail() -> None:
    assert parse_rcpt("TO:<用户@例え.example>", smtputf8=True).address == "用户@例え.example"
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
    ("HOLDFOR=60", 555, "FUTURERELEASE is not offered"),
    ("HOLDUNTIL=2030-01-01T00:00:00Z", 555, "FUTURERELEASE is not offered, in its other word"),
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
    assert rcpt == Recipient(
        address=rcpt.address, notify=Notify.SUCCESS | Notify.DELAY, orcpt="rfc822;A+2BB@x"
    )


BAD_DSN = [
    ("RET=SOME", "neither FULL nor HDRS"),
    ("RET", "no value"),
    ("ENVID=a+2x", "bad xtext"),
    ("ENVID=a+2b", "xtext is in upper case"),
    ("ENVID=" + "a" * 101, "too long"),
    ("ENVID", "no value"),
    ("ENVID=a+0Ab", "a line end in disguise"),
    ("ENVID=a+7F", "a control character in disguise"),
    ("ENVID=a+E9", "not ASCII in disguise"),
]


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
    ("ORCPT=rfc822;a+0D+0Ab@x", "a line end in disguise"),
    ("ORCPT=;a@x", "an empty type"),
    ("ORCPT=rfc822;a@x=b", "an equals sign"),
]


@pytest.mark.parametrize(
    "address", ["utf-8;\\x{E9}@example.org", "utf-8;é@example.org", "rfc822;a@b", "x400;c+2Bd"]
)
def test_orcpt_types(address: str) -> None:
    assert parse_rcpt(f"TO:<a@b> ORCPT={address}", offered=DSN_RCPT_PARAMETERS).orcpt == address


def test_envid_and_orcpt_hold_any_printable_character() -> None:
    everything = "".join(f"+{code:02X}" for code in range(0x20, 0x7F))
    for xtext in (everything[:99], everything[99:198], everything[198:]):
        assert parse_mail(f"FROM:<> ENVID={xtext}", offered=DSN_MAIL_PARAMETERS).envid == xtext
    argument = f"TO:<a@b> ORCPT=x;{everything}"
    assert parse_rcpt(argument, offered=DSN_RCPT_PARAMETERS).orcpt == f"x;{everything}"


@pytest.mark.parametrize(
    "value", ["<>", "+3C+3E", "a@example.org", "e+3Dmc2@example.com", "a+2bb@x", "unknown", "x" * 495]
)
def test_auth_parameter_is_checked_and_forgotten(value: str) -> None:
    plain = parse_mail("FROM:<a@example.org>")
    assert parse_mail(f"FROM:<a@example.org> AUTH={value}", offered=AUTH_MAIL_PARAMETERS) == plain


BAD_AUTH = [
    ("AUTH", "no value"),
    ("AUTH=", "an empty one"),
    ("AUTH=a+4", "bad xtext"),
    ("AUTH=a+zz", "bad xtext digits"),
    ("AUTH=a=b", "an equals sign"),
    ("AUTH=\xe9@x", "not ASCII"),
    ("AUTH=<> AUTH=<>", "twice"),
    ("AUTH=" + "x" * 496, "too long"),
]


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


BAD_HOLD = [
    ("HOLDFOR", "no value"),
    ("HOLDFOR=", "an empty value"),
    ("HOLDFOR=0", "not at all"),
    ("HOLDFOR=01", "a leading zero"),
    ("HOLDFOR=-1", "negative"),
    ("HOLDFOR=1.5", "a fraction"),
    ("HOLDFOR=1000000000", "ten digits"),
    ("HOLDFOR=\u0667", "a digit that is not ASCII"),
    ("HOLDFOR=60;R", "DELIVERBY has such endings, this has not"),
    ("HOLDFOR=1 HOLDFOR=1", "twice"),
    ("HOLDFOR=60 HOLDUNTIL=2030-01-01T00:00:00Z", "both words"),
    ("HOLDUNTIL", "no time"),
    ("HOLDUNTIL=tomorrow", "in words"),
    ("HOLDUNTIL=1893456000", "Unix time"),
    ("HOLDUNTIL=2030-01-01", "no time of day"),
    ("HOLDUNTIL=2030-01-01T00:00:00", "no zone"),
    ("HOLDUNTIL=2030-01-01T00:00Z", "no seconds"),
    ("HOLDUNTIL=20300101T000000Z", "the basic format of ISO 8601"),
    ("HOLDUNTIL=2030-W01-1T00:00:00Z", "a week"),
    ("HOLDUNTIL=2030-02-30T00:00:00Z", "a day that does not exist"),
    ("HOLDUNTIL=2030-13-01T00:00:00Z", "month 13"),
    ("HOLDUNTIL=0000-01-01T00:00:00Z", "year 0"),
    ("HOLDUNTIL=2030-01-01T24:00:00Z", "hour 24"),
    ("HOLDUNTIL=2030-01-01T00:60:00Z", "minute 60"),
    ("HOLDUNTIL=2030-01-01T00:00:61Z", "second 61"),
    ("HOLDUNTIL=2030-01-01T00:00:00.Z", "a point and no fraction"),
    ("HOLDUNTIL=2030-01-01T00:00:00+24:00", "a zone of a whole day"),
    ("HOLDUNTIL=2030-01-01T00:00:00+01:60", "a zone with minute 60"),
    ("HOLDUNTIL=2030-01-01T00:00:00+0100", "a zone without its colon"),
    ("HOLDUNTIL=2030-01-01T00:00:00Zx", "text behind it"),
    ("HOLDUNTIL=\u0662030-01-01T00:00:00Z", "a year not in ASCII"),
]


OF_MAIL = [
    *((DSN_MAIL_PARAMETERS, *row) for row in BAD_DSN),
    *((AUTH_MAIL_PARAMETERS, *row) for row in BAD_AUTH),
    *((HOLD_MAIL_PARAMETERS, *row) for row in BAD_HOLD),
]


@pytest.mark.parametrize(("offered", "parameters", "reason"), OF_MAIL)
def test_bad_parameter_that_was_offered_for_mail(
    offered: frozenset[str], parameters: str, reason: str
) -> None:
    with pytest.raises(CommandError, match=r"501 5\.5\.4"):
        parse_mail(f"FROM:<> {parameters}", offered=offered)


@pytest.mark.parametrize(("parameters", "reason"), BAD_DSN_RCPT, ids=[row[1] for row in BAD_DSN_RCPT])
def test_bad_dsn_parameter_of_rcpt(parameters: str, reason: str) -> None:
    with pytest.raises(CommandError, match=r"501 5\.5\.4"):
        parse_rcpt(f"TO:<a@example.org> {parameters}", offered=DSN_RCPT_PARAMETERS)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("0123456789-:TtZz.+ "), max_size=30) | st.datetimes().map(str))
def test_any_time_is_a_number_or_a_refusal(text: str) -> None:
    value = text.strip().replace(" ", "T")
    for zone in ("", "Z", "+23:59", "-23:59"):
        with suppress(CommandError):
            command = parse_mail(f"FROM:<> HOLDUNTIL={value}{zone}", offered=HOLD_MAIL_PARAMETERS)
            assert isinstance(command.hold_until, float)


@settings(max_examples=500, deadline=None)
@given(text=st.text(st.sampled_from('<>@:,."\\ %[]é\x00\r\nab1-=IPv6'), max_size=30), utf8=st.booleans())
def test_any_text_gives_a_clean_mailbox_or_a_refusal(text: str, utf8: bool) -> None:
    try:
        mailbox = parse_rcpt(f"TO:<{text}> ", smtputf8=utf8).address
    except CommandError:
        return
    assert not any(ord(c) < 32 for c in mailbox)
    assert utf8 or mailbox.isascii()
    assert len(mailbox.encode()) <= 254


def test_address_literals() -> None:
    assert literal_address("[192.0.2.1]") == "192.0.2.1"
    assert literal_address("192.0.2.1") is None
