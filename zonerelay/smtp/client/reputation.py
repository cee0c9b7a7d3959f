"""Tells whether a refusal is about our address: its reputation, its listing, its name in DNS.

The module is a table of receivers' texts, because no code says it: 5.7.1 is everything from a block list to a
wrong password. Each row has its reason and a reply as it was seen. The text is read as one line in lower
case, without what stands in angle brackets (people's addresses may contain any word).

A refusal of the message, the recipient, the sender's domain or its authentication (SPF, DKIM, DMARC) never
counts, whatever else the text says: the same mail would be refused from any address. Greylisting and limits
on the number of connections do not count either, because they pass.

A reply that matches no row is not about our address. All patterns are bounded, because a stranger wrote the
text.
"""

# ruff: noqa: E501  (a reply is a line)

from __future__ import annotations

import re
from dataclasses import dataclass

from zonerelay.model.reply import Reply

MAX_TEXT = 2000
"""Characters of a reply that are searched."""


@dataclass(frozen=True, slots=True)
class Blame:
    """A row: `pattern` is searched in texts of replies whose code and detail match `code`, when it is given.

    `code` is a pattern for "550 5.7.1". `example` is a reply that the row is for.
    """

    who: str
    reason: str
    example: str
    pattern: str = ""
    code: str = ""


BLAMES = (
    # Microsoft
    Blame(
        "Microsoft",
        "on the block list of Outlook.com",
        "550 5.7.1 Unfortunately, messages from [192.0.2.1] weren't sent. Please contact your Internet service "
        "provider since part of their network is on our block list (S3150).",
        r"\bmessages from \[?[0-9a-f.:]{3,45}\]? weren't sent|network is on our block list|\((?:a?s)?31[0-9]{2}\)",
    ),
    Blame(
        "Microsoft",
        "banned address",
        "550 5.7.606 Access denied, banned sending IP [192.0.2.1]. To request removal from this list please visit "
        "https://sender.office.com/ and follow the directions. (AS16012609)",
        r"banned sending ip|banned sender",
        r"5\d\d 5\.7\.(?:511|6[0-4]\d)",
    ),
    Blame(
        "Microsoft",
        "rate limit by reputation",
        "421 RP-001 (BAY004-MC1F24) Unfortunately, some messages from 192.0.2.1 weren't sent. Please try again.",
        r"^rp-00[1-3]\b",
    ),
    Blame(
        "Microsoft",
        "address under suspicion",
        "451 4.7.500 Access denied, please try again later",
        r"access denied|server busy|rate limited",
        r"4\d\d 4\.7\.(?:5[0-9]{2}|6[0-9]{2}|8[5-9][0-9])",
    ),
    Blame(
        "Microsoft",
        "rate limit by reputation",
        "451 4.7.650 The mail server [192.0.2.1] has been temporarily rate limited due to IP reputation. For e-mail "
        "delivery information, see https://aka.ms/postmaster (S775)",
        r"rate limited due to ip reputation",
    ),
    # Google
    Blame(
        "Google",
        "unsolicited mail from the address",
        "421 4.7.28 Our system has detected an unusual rate of unsolicited mail originating from your IP address. To "
        "protect our users from spam, mail sent from your IP address has been temporarily rate limited.",
        r"unusual rate of (?:unsolicited )?mail originating from your ip\b",
    ),
    Blame(
        "Google",
        "low reputation of the address",
        "550 5.7.1 [192.0.2.1] Our system has detected that this message is likely suspicious due to the very low "
        "reputation of the sending IP address. To best protect our users from spam, the message has been blocked.",
        r"reputation of the sending ip\b",
    ),
    Blame(
        "Google",
        "not among the addresses that a domain allows",
        "421 4.7.0 IP not in whitelist for RCPT domain, closing connection.",
        r"\bip not in whitelist\b",
    ),
    # Yahoo, AOL
    Blame(
        "Yahoo",
        "complaints about the address",
        "421 4.7.0 [TSS04] Messages from 192.0.2.1 temporarily deferred due to unexpected volume or user complaints - "
        "4.16.55.1; see https://postmaster.yahooinc.com/error-codes",
        r"\[tss?\d{2}\]|due to (?:unexpected volume or )?user complaints",
    ),
    Blame(
        "Yahoo",
        "on a list of Spamhaus",
        "553 5.7.1 [BL21] Connections will not be accepted from 192.0.2.1, because the ip is in Spamhaus's list; see "
        "http://postmaster.yahoo.com/550-bl23.html",
        r"\[bl2\d\]|connections (?:will )?not (?:be )?accepted from (?:ip addresses|[0-9])",
    ),
    # Block lists, as servers quote them
    Blame(
        "block lists",
        "Postfix, Exchange and many others: the address is listed",
        "554 5.7.1 Service unavailable; Client host [192.0.2.1] blocked using zen.spamhaus.org; "
        "https://www.spamhaus.org/query/ip/192.0.2.1",
        r"\bblocked using |client host \[[0-9a-f.:]{3,45}\] blocked|\bip(?: address)? (?:is )?block(?:ed|listed)\b",
    ),
    Blame(
        "block lists",
        "the address is listed",
        "550 5.7.1 Your IP address 192.0.2.1 is listed at zen.spamhaus.org",
        r"\b(?:list(?:ed|ing)|found) (?:at|in|on|by) .{0,60}"
        r"(?:dnsbl|rbl|spamhaus|spamcop|barracuda|sorbs|uceprotect|manitu|abuseat|block ?list|black ?list)",
    ),
    Blame(
        "Exim",
        "the address is listed",
        "550 JunkMail rejected - mail.example.org [192.0.2.1]:40000 is in an RBL on zen.spamhaus.org",
        r"\bis in an? (?:rbl|black ?list|block ?list)\b|\brejected by (?:dnsbl|rbl)\b",
    ),
    Blame(
        "block lists",
        "the address is listed",
        "554 Your IP (192.0.2.1) has been blacklisted",
        r"\b(?:ip|address|host|server|network)\b.{0,60}\b(?:is|are|was|been) (?:temporar(?:y|ily) )?"
        r"(?:on (?:our|a|the) )?(?:black|block)[ -]?list",
    ),
    Blame(
        "block lists",
        "a receiver's own list",
        "550 5.7.1 Access from ip address 192.0.2.1 blocked. Visit https://postmaster.mail.ru",
        r"access from ip address \S{3,45} (?:is )?blocked|\bmail from (?:ip )?\[?[0-9a-f.:]{3,45}\]? (?:has been|was|is) "
        r"(?:blocked|rejected)|\bwe do not accept mail from (?:hosts with )?dynamic ips?",
    ),
    # Receivers of their own kind
    Blame(
        "Proofpoint",
        "dynamic reputation; also in front of iCloud",
        "554 Blocked - see https://ipcheck.proofpoint.com/?ip=192.0.2.1",
        r"ipcheck\.proofpoint\.com|support\.proofpoint\.com/dnsbl-lookup|proofpoint dynamic reputation",
    ),
    Blame(
        "Cloudmark",
        "sender intelligence",
        "550 5.7.1 IP 192.0.2.1 refused, see https://csi.cloudmark.com/reset-request/?ip=192.0.2.1",
        r"csi\.cloudmark\.com|cloudmark sender intelligence",
    ),
    Blame(
        "Comcast",
        "its own or another operator's block list",
        "554 resimta-po-11v.sys.comcast.net comcast 192.0.2.1 Comcast block for spam. Please see "
        "https://postmaster.comcast.net/smtp-error-codes.php#BL000001",
        r"\bcomcast block for spam|#(?:bl|es|rl)0{3}[01]{3}",
    ),
    Blame(
        "GMX, WEB.DE",
        "on the block list",
        "554 gmx.net (mxgmx104) Nemesis ESMTP Service not available No SMTP service IP address is block listed.",
        r"ip address is bl(?:ack|ock) ?listed",
    ),
    Blame(
        "T-Online",
        "unknown or bad",
        "554 IP=192.0.2.1 - None/bad reputation. Ask your postmaster for help or to contact tosa@rx.t-online.de for "
        "reset. (NOWL)",
        r"none/bad reputation|^ip=[0-9a-f.:]{3,45} - a problem occurred",
    ),
    Blame(
        "Orange",
        "limited or shut out for the address's complaints (OFR_506 is about the message)",
        "421 Service refused, please try later. OFR_999 [999]",
        r"\bofr(?:\d{3})?_(?:107|98[89]|990|999)\b",
    ),
    Blame(
        "SFR",
        "abuse from the address",
        "550 5.7.1 <mail.example.org[192.0.2.1]>: Client host rejected: Abus detecte GU_EIB_02",
        r"\bclient host rejected\b",
    ),
    Blame(
        "Cisco",
        "SenderBase",
        "554 Your access to this mail system has been rejected due to the sending MTA's poor reputation. If you "
        "believe that this failure is in error, please contact the intended recipient via alternate means.",
        r"sending mta's poor reputation",
    ),
    Blame(
        "Trend Micro",
        "email reputation",
        "550 5.7.1 Mail from 192.0.2.1 has been blocked by Trend Micro Email Reputation Service.",
        r"email reputation services?\b",
    ),
    Blame(
        "Symantec",
        "connection policy",
        "553 Connection rejected by policy [7.3] 38206, please visit https://support.symantec.com",
        r"connection rejected by policy \[7\.\d",
    ),
    Blame(
        "Rackspace",
        "too new to be trusted",
        "451 4.7.1 Received too many messages from a new or untrusted IP (G28)",
        r"new or untrusted ip\b",
    ),
    Blame(
        "anybody",
        "reputation, in words",
        "550 5.7.1 Rejected: poor IP reputation",
        r"\b(?:poor|bad|low|no|negative)(?: e-?mail| ip| sender)* reputation\b|\bip reputation\b",
    ),
    # The name of the address
    Blame(
        "anybody",
        "no reverse DNS (RFC 7372)",
        "550 5.7.25 [2001:db8::1] The IP address sending this message does not have a PTR record setup, or the "
        "corresponding forward DNS entry does not point to the sending IP.",
        code=r"[45]\d\d [45]\.7\.25",
    ),
    Blame(
        "anybody",
        "no reverse DNS, in words",
        "450 4.7.1 Client host rejected: cannot find your reverse hostname, [192.0.2.1]",
        r"\bptr (?:resource )?records?\b|reverse (?:dns|hostname|mapping)|\brdns\b|bad dns ptr",
    ),
)

NOT_OURS = (
    r"\b(?:spf|dkim|dmarc|arc)\b",
    r"\bgr[ea]y-? ?list",
    r"\b(?:contain\w{0,3}|with|one of your|in)\b.{0,40}\b(?:urls?|links?|attachments?)\b|\bvirus (?:found|detected)\b",
    # Lists of domains, and what Postfix says of them.
    r"\bdbl\b|surbl|uribl|rhsbl|\bdbl\.spamhaus",
    r"(?:sender|recipient|from|to) address \S{0,330} ?blocked using|\b(?:helo|ehlo)\b.{0,80}(?:blocked using|listed)",
    r"\bdomain\b.{0,60}\b(?:listed|blacklisted|blocklisted|blocked)\b",
    r"\bdomain(?:'s)? reputation|reputation of (?:the |your )?(?:sending |from |sender )?domain",
)
"""Patterns of texts about the message, the sender's domain or its authentication, and about greylisting."""

NOT_OURS_DETAILS = re.compile(
    # Recipients and mailboxes; authentication (RFC 7372, Google, Yahoo, Microsoft).
    r"1\.(?:1|2|3|6|10)|2\.[123]|7\.(?:8|9|1[013-9]|2[0-4]|26|27|29|30|32|40|509|515)"
)

_NOT_OURS = re.compile("|".join(NOT_OURS))
_BRACKETED = re.compile(r"<[^<>]{0,330}>")
_TABLE = tuple((re.compile(row.pattern), re.compile(row.code), row) for row in BLAMES)


def blame(reply: Reply) -> Blame | None:
    """Returns the row that says why the reply is about our address; `None` for any other reply."""
    if reply.is_positive or NOT_OURS_DETAILS.fullmatch(reply.detail):
        return None
    text = _BRACKETED.sub(" ", reply.text[:MAX_TEXT].lower()).replace("\n", " ")
    code = f"{reply.code} {reply.status}" if reply.detail else str(reply.code)
    named = next((row for text_, code_, row in _TABLE if code_.match(code) and text_.search(text)), None)
    return None if named is None or _NOT_OURS.search(text) else named
