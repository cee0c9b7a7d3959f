"""What a client may do: each command in its place, with what was offered, and no sooner than it is due.

RFC 5321 4.1.4 (order), 4.5.3.1 (lengths), RFC 2920 3.1 (what may be followed by more).
"""

import asyncio
import hashlib
import re
from collections.abc import Iterable
from typing import SupportsIndex

MOST_COMMAND = 512 + 26 + 14 + 10 + 500  # RFC 1870 3, 6152 2, 6531 3.4, 3461 4: of the parameters
FOLLOWED = {"MAIL", "RCPT", "RSET", "BDAT"}
"""Commands that may be followed by others in one group where PIPELINING is offered."""

NEEDS = {
    "SIZE": "SIZE",
    "BODY": "8BITMIME",
    "SMTPUTF8": "SMTPUTF8",
    "RET": "DSN",
    "ENVID": "DSN",
    "NOTIFY": "DSN",
    "ORCPT": "DSN",
}
_BARE = re.compile(rb"\r(?!\n)|(?<!\r)\n|\0")
_DIGEST = re.compile(rb"^X-Digest: ([0-9a-f]{64})\r$", re.MULTILINE)


class Reader(asyncio.StreamReader):
    """Notices octets that come while the client has to wait for an answer."""

    def __init__(self) -> None:
        super().__init__(limit=1 << 20)
        self.hush = False
        self.spoke_early = False

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.spoke_early = self.spoke_early or self.hush
        super().feed_data(data)


def line_problem(line: bytes) -> str:
    if len(line) > MOST_COMMAND:
        return f"a line of {len(line)} octets"
    if _BARE.search(line):
        return f"a bare CR, LF or NUL in {line!r}"
    return ""


def parameter_problem(argument: str, offered: set[str]) -> str:
    """Of MAIL or RCPT."""
    parameters = argument.partition("> ")[2].split()
    for parameter in parameters:
        needed = NEEDS.get(parameter.partition("=")[0].upper(), "nothing known")
        if needed not in offered:
            return f"{parameter} without {needed}"
    return ""


def message_problem(message: bytes, offered: set[str], *, is_report: bool = False) -> str:
    """Of a message without dot-stuffing. A report has the header of another message in it."""
    if _BARE.search(message):
        return "a bare CR, LF or NUL in a message"
    if max(map(len, message.split(b"\r\n"))) > 998:
        return "a line of more than 998 octets"
    if "8BITMIME" not in offered and not message.isascii():
        return "8-bit content without 8BITMIME"
    body = message.partition(b"\r\n\r\n")[2]
    digest = _DIGEST.search(message)
    if digest is not None and not is_report and hashlib.sha256(body).hexdigest() != digest[1].decode():
        return "another body than was sent"
    return ""
