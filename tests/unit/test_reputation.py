"""Which replies are about the address that we sent from, and which are about anything else."""

# ruff: noqa: E501  (a reply is a line)

from __future__ import annotations

import re
import time

import pytest

from zonerelay.model.reply import Reply
from zonerelay.smtp.client import reputation
from zonerelay.smtp.client.replies import ReplyParser
from zonerelay.smtp.client.reputation import MAX_TEXT, NOT_OURS, TEXTS, TEXTS_BY_CODE, blames_address


def reply(*lines: str) -> Reply:
    """As it comes from a peer."""
    parser = ReplyParser()
    parser.feed("".join(f"{line}\r\n" for line in lines).encode())
    found = parser.next_reply()
    assert found is not None
    return found


BLAMED = [
    ('Microsoft: on the block list of Outlook.com', ("550 5.7.1 Unfortunately, messages from [192.0.2.1] weren't sent. Please contact your Internet service provider since part of their network is on our block list (S3150).",)),
    ('Microsoft: banned address', ('550 5.7.606 Access denied, banned sending IP [192.0.2.1]. To request removal from this list please visit https://sender.office.com/ and follow the directions. (AS16012609)',)),
    ('Microsoft: rate limit by reputation', ("421 RP-001 (BAY004-MC1F24) Unfortunately, some messages from 192.0.2.1 weren't sent. Please try again.",)),
    ('Microsoft: address under suspicion', ('451 4.7.500 Access denied, please try again later',)),
    ('Microsoft: rate limit by reputation', ('451 4.7.650 The mail server [192.0.2.1] has been temporarily rate limited due to IP reputation. For e-mail delivery information, see https://aka.ms/postmaster (S775)',)),
    ('Google: unsolicited mail from the address', ('421 4.7.28 Our system has detected an unusual rate of unsolicited mail originating from your IP address. To protect our users from spam, mail sent from your IP address has been temporarily rate limited.',)),
    ('Google: low reputation of the address', ('550 5.7.1 [192.0.2.1] Our system has detected that this message is likely suspicious due to the very low reputation of the sending IP address. To best protect our users from spam, the message has been blocked.',)),
    ('Google: not among the addresses that a domain allows', ('421 4.7.0 IP not in whitelist for RCPT domain, closing connection.',)),
    ('Yahoo: complaints about the address', ('421 4.7.0 [TSS04] Messages from 192.0.2.1 temporarily deferred due to unexpected volume or user complaints - 4.16.55.1; see https://postmaster.yahooinc.com/error-codes',)),
    ('Yahoo: on a list of Spamhaus', ("553 5.7.1 [BL21] Connections will not be accepted from 192.0.2.1, because the ip is in Spamhaus's list; see http://postmaster.yahoo.com/550-bl23.html",)),
    ('block lists: Postfix, Exchange and many others: the address is listed', ('554 5.7.1 Service unavailable; Client host [192.0.2.1] blocked using zen.spamhaus.org; https://www.spamhaus.org/query/ip/192.0.2.1',)),
    ('block lists: the address is listed', ('550 5.7.1 Your IP address 192.0.2.1 is listed at zen.spamhaus.org',)),
    ('Exim: the address is listed', ('550 JunkMail rejected - mail.example.org [192.0.2.1]:40000 is in an RBL on zen.spamhaus.org',)),
    ('block lists: the address is listed', ('554 Your IP (192.0.2.1) has been blacklisted',)),
    ("block lists: a receiver's own list", ('550 5.7.1 Access from ip address 192.0.2.1 blocked. Visit https://postmaster.mail.ru',)),
    ('Proofpoint: dynamic reputation; also in front of iCloud', ('554 Blocked - see https://ipcheck.proofpoint.com/?ip=192.0.2.1',)),
    ('Cloudmark: sender intelligence', ('550 5.7.1 IP 192.0.2.1 refused, see https://csi.cloudmark.com/reset-request/?ip=192.0.2.1',)),
    ("Comcast: its own or somebody's block list", ('554 resimta-po-11v.sys.comcast.net comcast 192.0.2.1 Comcast block for spam. Please see https://postmaster.comcast.net/smtp-error-codes.php#BL000001',)),
    ('GMX, WEB.DE: on the block list', ('554 gmx.net (mxgmx104) Nemesis ESMTP Service not available No SMTP service IP address is block listed.',)),
    ('T-Online: unknown or bad', ('554 IP=192.0.2.1 - None/bad reputation. Ask your postmaster for help or to contact tosa@rx.t-online.de for reset. (NOWL)',)),
    ("Orange: limited or shut out for the address's complaints (OFR_506 is about the message)", ('421 Service refused, please try later. OFR_999 [999]',)),
    ('SFR: abuse from the address', ('550 5.7.1 <mail.example.org[192.0.2.1]>: Client host rejected: Abus detecte GU_EIB_02',)),
    ('Cisco: SenderBase', ("554 Your access to this mail system has been rejected due to the sending MTA's poor reputation. If you believe that this failure is in error, please contact the intended recipient via alternate means.",)),
    ('Trend Micro: email reputation', ('550 5.7.1 Mail from 192.0.2.1 has been blocked by Trend Micro Email Reputation Service.',)),
    ('Symantec: connection policy', ('553 Connection rejected by policy [7.3] 38206, please visit https://support.symantec.com',)),
    ('Rackspace: too new to be trusted', ('451 4.7.1 Received too many messages from a new or untrusted IP (G28)',)),
    ('anybody: reputation, in words', ('550 5.7.1 Rejected: poor IP reputation',)),
    ('anybody: no reverse DNS (RFC 7372)', ('550 5.7.25 [2001:db8::1] The IP address sending this message does not have a PTR record setup, or the corresponding forward DNS entry does not point to the sending IP.',)),
    ('anybody: no reverse DNS, in words', ('450 4.7.1 Client host rejected: cannot find your reverse hostname, [192.0.2.1]',)),
    (
        "Google, in four lines",
        (
            "421-4.7.28 [192.0.2.1      15] Our system has detected an unusual rate of",
            "421-4.7.28 unsolicited mail originating from your IP address. To protect our",
            "421-4.7.28 users from spam, mail sent from your IP address has been temporarily",
            "421 4.7.28 rate limited. Please visit https://support.google.com/mail/?p=UnsolicitedRateLimitError",
        ),
    ),
    (
        "Google, low reputation",
        (
            "421-4.7.0 [192.0.2.1] Our system has detected that this message is",
            "421-4.7.0 suspicious due to the very low reputation of the sending IP address.",
            "421 4.7.0 To protect our users from spam",
        ),
    ),
    (
        "Google, IPv6 without PTR, older words",
        (
            "550-5.7.1 [2001:db8::1] Our system has detected that this message does",
            "550-5.7.1 not meet IPv6 sending guidelines regarding PTR records and",
            "550 5.7.1 authentication. Please review https://support.google.com/mail/?p=IPv6AuthError",
        ),
    ),
    (
        "Microsoft, IPv6 without PTR",
        (
            "450 4.7.25 Service unavailable, sending IPv6 address [2001:db8::1] must have reverse DNS record.",
        ),
    ),
    (
        "Microsoft, a customer's list",
        (
            "550 5.7.513 Service unavailable, Client host [192.0.2.1] blocked by example.com using Customer Block "
            "list (AS16012607)",
        ),
    ),
    (
        "Microsoft, Spamhaus",
        (
            "550 5.7.1 Service unavailable, Client host [192.0.2.1] blocked using Spamhaus. To request removal from "
            "this list see https://www.spamhaus.org/query/ip/192.0.2.1 (AS16012611)",
        ),
    ),
    ("Microsoft, busy for this address", ("451 4.7.500 Server busy. Please try again later from [192.0.2.1]. (S77719)",)),
    ("Microsoft, a later form", ("451 4.7.651 The mail server [192.0.2.1] has been temporarily rate limited due to IP reputation. (S3114)",)),
    ("Yahoo, for good", ("553 5.7.2 [TSS09] All messages from 192.0.2.1 will be permanently deferred; Retrying will NOT succeed.",)),
    ("Yahoo, older", ("421 4.7.1 [TS03] All messages from 192.0.2.1 will be permanently deferred; Retrying will NOT succeed.",)),
    ("Yahoo, XBL", ("553 5.7.1 [BL23] Connections not accepted from IP addresses on Spamhaus XBL; see http://postmaster.yahoo.com/errors/550-bl23.html",)),
    ("iCloud", ("550 5.7.1 Mail from IP 192.0.2.1 was rejected due to listing in Spamhaus SBL. For details please see http://www.spamhaus.org/query/bl?ip=192.0.2.1",)),
    ("iCloud through Proofpoint", ("550 5.7.0 Blocked - see https://support.proofpoint.com/dnsbl-lookup.cgi?ip=192.0.2.1",)),
    ("Proofpoint", ("554 5.7.1 Service unavailable; client [192.0.2.1] blocked using Proofpoint Dynamic Reputation",)),
    ("Barracuda", ("554 5.7.1 Service unavailable; Client host [192.0.2.1] blocked using Barracuda Reputation; http://www.barracudanetworks.com/reputation/?r=1&ip=192.0.2.1",)),
    ("no enhanced code", ("550 Service unavailable; Client host [192.0.2.1] blocked using dnsbl.sorbs.net",)),
    ("T-Online", ("554 IP=192.0.2.1 - A problem occurred. (Ask your postmaster for help or to contact tosa@rx.t-online.de to clarify.) (BL)",)),
    (
        "GMX, in its lines",
        (
            "554-gmx.net (mxgmx104) Nemesis ESMTP Service not available",
            "554-No SMTP service",
            "554-IP address is block listed.",
            "554 For explanation visit https://postmaster.gmx.net/en/case?c=r0201&i=ip&v=192.0.2.1",
        ),
    ),
    ("GMX, no name", ("554-gmx.net (mxgmx104) Nemesis ESMTP Service not available", "554-No SMTP service", "554 Bad DNS PTR resource record.")),
    ("Comcast, no name", ("554 IMTA08.westchester.pa.mail.comcast.net comcast 192.0.2.1 Comcast requires that all mail servers must have a PTR record with a valid Reverse DNS entry.",)),
    ("Comcast, name in trouble", ("421 resimta-ch2-01v.sys.comcast.net comcast 192.0.2.1 Reverse DNS failure : Try again later",)),
    ("Rackspace", ("450 4.7.1 Client host 192.0.2.1 has no PTR record (G1F)",)),
    ("Postfix, access map", ("554 5.7.1 <mail.example.org[192.0.2.1]>: Client host rejected: Access denied",)),
    ("Mimecast", ("550 csi.mimecast.org Poor Reputation Sender. - https://community.mimecast.com/docs/DOC-1369#550",)),
    ("mail.ru", ("550 We do not accept mail from dynamic IPs",)),
    ("own list, in words", ("550 5.7.1 Your mail server 192.0.2.1 has been temporarily blacklisted",)),
]  # fmt: skip


@pytest.mark.parametrize(("why", "lines"), BLAMED, ids=[why for why, _ in BLAMED])
def test_a_reply_that_blames_our_address(why: str, lines: tuple[str, ...]) -> None:
    assert blames_address(reply(*lines))


@pytest.mark.parametrize(("code", "pattern"), [*(("", each) for each in TEXTS), *TEXTS_BY_CODE])
def test_every_row_of_the_tables_finds_a_reply_as_it_was_seen(code: str, pattern: str) -> None:
    for _, lines in BLAMED:
        seen = reply(*lines)
        text = re.sub(r"<[^<>]*>", " ", seen.text.lower()).replace("\n", " ")
        if re.search(pattern, text) and re.match(code, f"{seen.code} {seen.status}"):
            return
    pytest.fail("no reply")


NOT_BLAMED = [
    ("a recipient who is not there", "550 5.1.1 <ann@example.com>: Recipient address rejected: User unknown"),
    ("a mailbox that is full", "452 4.2.2 The email account that you tried to reach is over quota"),
    ("what an address spells", "550 5.7.1 <blocked using rbl.poor reputation@example.com>: access denied"),
    ("DMARC", "550 5.7.26 Unauthenticated email from example.org is not accepted due to domain's DMARC policy."),
    ("no SPF, Google", "550 5.7.26 This mail has been blocked because the sender is unauthenticated."),
    ("SPF with an address", "550 5.7.23 The message was rejected because of Sender Policy Framework violation"),
    ("SPF, United Internet", "550 Reject due to SPF policy. The originating IP of the message is not permitted"),
    ("SPF, Postfix", "550 5.7.1 <a@b.example>: Recipient address rejected: SPF fail, 192.0.2.1 is not allowed; IP is blocked"),
    ("Microsoft's level", "550 5.7.515 Access denied, sending domain EXAMPLE.ORG doesn't meet the required authentication level."),
    ("Microsoft's level, for now", "451 4.7.515 Access denied, sending domain EXAMPLE.ORG doesn't meet the required authentication level."),
    ("Microsoft, DMARC", "550 5.7.509 Access denied, sending domain example.org does not pass DMARC verification"),
    ("Yahoo, unauthenticated", "550 5.7.9 This mail has been blocked because the sender is unauthenticated."),
    ("Google, links", "421 4.7.28 Gmail has detected an unusual rate of unsolicited mail containing one of your URL domains. To protect our users from spam, mail with the URL has been temporarily limited."),
    ("Google, SPF domain", "421 4.7.28 Gmail has detected an unusual rate of unsolicited mail originating from your SPF domain. To protect our users from spam, mail sent from your domain has been temporarily rate limited."),
    ("Google, domain's reputation", "550 5.7.1 Our system has detected that this message is likely suspicious due to the very low reputation of the sending domain."),
    ("Google, content", "550 5.7.1 [192.0.2.1 12] Our system has detected that this message is likely unsolicited mail."),
    ("Google, a policy of the domain", "550 5.7.1 The user or domain that you are sending to has a policy that prohibited the mail that you sent."),
    ("content", "554 5.7.1 Spam message rejected"),
    ("content, mail.ru", "550 spam message rejected. Please visit http://help.mail.ru/notspam-support/id?c=abc"),
    ("content, Orange", "550 5.2.0 Mail rejete. Mail rejected. OFR_506 [506]"),
    ("content, Yahoo", "554 Message not allowed - [PH01] Email not accepted for policy reasons."),
    ("content, iCloud", "554 5.7.1 [CS01] Message rejected due to local policy. Please visit https://support.apple.com/en-us/HT204137"),
    ("a virus", "554 5.7.1 virus found in message, mail blocked using ClamAV"),
    ("a list of domains", "554 5.7.1 Service unavailable; Sender address [a@example.org] blocked using dbl.spamhaus.org"),
    ("a list of domains of another name", "554 5.7.1 Service unavailable; Sender address [a@example.org] blocked using bad.example.net"),
    ("the EHLO name", "554 5.7.1 Service unavailable; Helo command [mail.example.org] blocked using bad.example.net"),
    ("the domain in words", "550 5.7.1 The domain example.org is listed on our block list"),
    ("a list of links", "554 5.7.1 blocked using multi.surbl.org"),
    ("a list of domains, iCloud", "550 5.7.1 Your email was rejected due to having a domain present in the Spamhaus DBL"),
    ("the EHLO name's domain", "550 5.7.1 Service unavailable, Helo domain is listed in Spamhaus. (S8001)"),
    ("a link in it", "550 5.7.1 Message contains a URL listed in uribl.com black list"),
    ("greylisting", "451 4.7.1 <mail.example.org[192.0.2.1]>: Client host rejected: Greylisted, try again later"),
    ("greylisting, Yahoo", "451 4.7.1 [GL01] Message from (192.0.2.1) temporarily deferred"),
    ("too many connections", "421 4.7.0 mx.example.com Error: too many connections from 192.0.2.1"),
    ("DANE", "454 4.7.322 certificate-expired: Destination mail server's certificate is expired."),
    ("a password", "535 5.7.8 Error: authentication failed: access denied"),
    ("TLS wanted", "530 5.7.0 Must issue a STARTTLS command first"),
    ("relaying", "554 5.7.1 <ann@example.com>: Relay access denied"),
    ("a plain refusal", "550 5.7.1 Access denied"),
    ("a greeting of somebody busy", "421 4.3.2 Service shutting down"),
    ("an acceptance", "250 2.0.0 OK, client host [192.0.2.1] blocked using nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("why", "line"), NOT_BLAMED, ids=[why for why, _ in NOT_BLAMED])
def test_a_reply_that_is_about_something_else(why: str, line: str) -> None:
    assert not blames_address(reply(line))


@pytest.mark.parametrize("pattern", NOT_OURS)
def test_every_exception_keeps_a_reply_from_being_taken_for_a_blame(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = re.compile("|".join(each for each in NOT_OURS if each != pattern))
    monkeypatch.setattr(reputation, "_NOT_OURS", others)
    assert any(blames_address(reply(line)) for _, line in NOT_BLAMED)


@pytest.mark.parametrize(
    "unit", ["<", "domain ", "ip address is ", "listed at ", "in an ", "192.0.2.1 ", "[", "a"]
)
def test_what_a_stranger_writes_costs_little(unit: str) -> None:
    long = Reply(550, "7.1", unit * (60_000 // len(unit)))
    began = time.perf_counter()
    blames_address(long)
    assert time.perf_counter() - began < 0.2
    assert len(long.text) > MAX_TEXT
