"""Detects replies that reject the relay's own address because of its reputation, a blocklist or its reverse
DNS.

The module is a table of receivers' texts, because no code says it: 5.7.1 is everything from a block list to a
wrong password. The unit test has a reply as it was seen for each row. The text is read as one line in lower
case, without the content of angle brackets (addresses may contain any word).

A refusal of the message, the recipient, the sender's domain or its authentication (SPF, DKIM, DMARC) never
counts, whatever else the text contains: the same mail would be refused from any address. Greylisting and
limits on the number of connections do not count either, because they pass.

A reply that matches no row is not about our address. All patterns are bounded, because the text is untrusted.
"""

# ruff: noqa: E501
import re

from zonerelay.model.reply import Reply

MAX_TEXT = 2000
"""Characters of a reply that are searched."""

TEXTS = (
    # Microsoft: on the block list of Outlook.com
    r"\bmessages from \[?[0-9a-f.:]{3,45}\]? weren't sent|network is on our block list|\((?:a?s)?31[0-9]{2}\)",
    # Microsoft: rate limit by reputation
    r"^rp-00[1-3]\b",
    # Microsoft: rate limit by reputation
    r"rate limited due to ip reputation",
    # Google: unsolicited mail from the address
    r"unusual rate of (?:unsolicited )?mail originating from your ip\b",
    # Google: low reputation of the address
    r"reputation of the sending ip\b",
    # Google: not among the addresses that a domain allows
    r"\bip not in whitelist\b",
    # Yahoo: complaints about the address
    r"\[tss?\d{2}\]|due to (?:unexpected volume or )?user complaints",
    # Yahoo: on a list of Spamhaus
    r"\[bl2\d\]|connections (?:will )?not (?:be )?accepted from (?:ip addresses|[0-9])",
    # block lists: Postfix, Exchange and many others: the address is listed
    r"\bblocked using |client host \[[0-9a-f.:]{3,45}\] blocked|\bip(?: address)? (?:is )?block(?:ed|listed)\b",
    # block lists: the address is listed
    r"\b(?:list(?:ed|ing)|found) (?:at|in|on|by) .{0,60}"
    r"(?:dnsbl|rbl|spamhaus|spamcop|barracuda|sorbs|uceprotect|manitu|abuseat|block ?list|black ?list)",
    # Exim: the address is listed
    r"\bis in an? (?:rbl|black ?list|block ?list)\b|\brejected by (?:dnsbl|rbl)\b",
    # block lists: the address is listed
    r"\b(?:ip|address|host|server|network)\b.{0,60}\b(?:is|are|was|been) (?:temporar(?:y|ily) )?"
    r"(?:on (?:our|a|the) )?(?:black|block)[ -]?list",
    # block lists: a receiver's own list
    r"access from ip address \S{3,45} (?:is )?blocked|\bmail from (?:ip )?\[?[0-9a-f.:]{3,45}\]? (?:has been|was|is) "
    r"(?:blocked|rejected)|\bwe do not accept mail from (?:hosts with )?dynamic ips?",
    # Proofpoint: dynamic reputation; also in front of iCloud
    r"ipcheck\.proofpoint\.com|support\.proofpoint\.com/dnsbl-lookup|proofpoint dynamic reputation",
    # Cloudmark: sender intelligence
    r"csi\.cloudmark\.com|cloudmark sender intelligence",
    # Comcast: its own block list or another one
    r"\bcomcast block for spam|#(?:bl|es|rl)0{3}[01]{3}",
    # GMX, WEB.DE: on the block list
    r"ip address is bl(?:ack|ock) ?listed",
    # T-Online: unknown or bad
    r"none/bad reputation|^ip=[0-9a-f.:]{3,45} - a problem occurred",
    # Orange: limited or shut out for the address's complaints (OFR_506 is about the message)
    r"\bofr(?:\d{3})?_(?:107|98[89]|990|999)\b",
    # SFR: abuse from the address
    r"\bclient host rejected\b",
    # Cisco: SenderBase
    r"sending mta's poor reputation",
    # Trend Micro: email reputation
    r"email reputation services?\b",
    # Symantec: connection policy
    r"connection rejected by policy \[7\.\d",
    # Rackspace: too new to be trusted
    r"new or untrusted ip\b",
    # any receiver: reputation, in words
    r"\b(?:poor|bad|low|no|negative)(?: e-?mail| ip| sender)* reputation\b|\bip reputation\b",
    # any receiver: no reverse DNS, in words
    r"\bptr (?:resource )?records?\b|reverse (?:dns|hostname|mapping)|\brdns\b|bad dns ptr",
)
"""Patterns that blame our address, whatever the reply's code is."""

TEXTS_BY_CODE = (
    # Microsoft: banned address
    (r"5\d\d 5\.7\.(?:511|6[0-4]\d)", r"banned sending ip|banned sender"),
    # Microsoft: address under suspicion
    (r"4\d\d 4\.7\.(?:5[0-9]{2}|6[0-9]{2}|8[5-9][0-9])", r"access denied|server busy|rate limited"),
    # any receiver: no reverse DNS (RFC 7372)
    (r"[45]\d\d [45]\.7\.25", ""),
)
"""Pairs: a pattern for "550 5.7.1", and one for the text of replies with such a code."""

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
_TEXTS = "|".join(TEXTS)
"""Compiled with the first refusal."""
_TEXTS_BY_CODE = tuple((re.compile(code), re.compile(text)) for code, text in TEXTS_BY_CODE)


def blames_address(reply: Reply) -> bool:
    """Return whether the reply rejects the relay's own IP address, because of its reputation for example."""
    if reply.is_positive or NOT_OURS_DETAILS.fullmatch(reply.detail):
        return False
    text = _BRACKETED.sub(" ", reply.text[:MAX_TEXT].lower()).replace("\n", " ")
    code = f"{reply.code} {reply.status}" if reply.detail else str(reply.code)
    named = re.search(_TEXTS, text) or any(c.match(code) and t.search(text) for c, t in _TEXTS_BY_CODE)
    return bool(named) and _NOT_OURS.search(text) is None


# The class of a reply, from a fixed list: what an operator wants to know of it at a glance. Pure.
#
# Codes decide where they are enough; a few texts that all large receivers use tell what no code says.

CLASSES = (
    "accepted", "no answer", "dns", "tls", "log-in", "own trouble", "reputation", "greylisted",
    "mailbox full", "too much", "temporary", "permanent",
)  # fmt: skip

_SAID = r"rejected the session at .{1,20}: ([2-5]\d\d) "
"""In a reply of ours, when a host rejected the session (`delivery/connection/session.py`)."""
_OURS = {"1": "no answer", "2": "no answer", "3": "dns", "4": "dns"}
"""Of our own replies with the subject 4 (RFC 3463 3.5), by detail."""
_GREYLISTED = r"(?i)gr[ea]y-?list|try again later.{0,40}\bgr[ea]y"
_TOO_MUCH = r"(?i)too (?:many|much|fast)|\brate\b|throttl|limit"


def class_of(reply: Reply, *, local: bool) -> str:
    """Return the class of a reply, which is one of `CLASSES`. With `local`, the reply is the relay's own."""
    if local and (said := re.search(_SAID, reply.text)):
        reply, local = Reply(int(said[1]), reply.detail, reply.text), False
    if reply.is_positive:
        return "accepted"
    if blames_address(reply):
        return "reputation"
    if reply.code in (454, 530, 535) or reply.detail == "7.8" or (local and reply.detail == "7.0"):
        return "log-in"
    return _own(reply) if local else _peers(reply)


def _own(reply: Reply) -> str:
    subject, _, detail = reply.detail.partition(".")
    if subject == "4":
        return _OURS.get(detail, "own trouble")
    return {"7": "tls", "1": "dns"}.get(subject, "own trouble")


def _peers(reply: Reply) -> str:
    if reply.detail == "2.2":
        return "mailbox full"
    if reply.is_permanent:
        return "permanent"
    if re.search(_GREYLISTED, reply.text):
        return "greylisted"
    return "too much" if re.search(_TOO_MUCH, reply.text) else "temporary"
