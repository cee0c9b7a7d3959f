"""Receiving servers as they were: what each took for a line, and for the end of data.

Models, each at least as lenient as the server it is named after. What they say of octets that we send shows
whether these could be read as more than one message; that they are lenient enough is tested as well.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Receiver:
    name: str
    line_end: re.Pattern[bytes]
    last_line: re.Pattern[bytes]
    dropped: bytes = b""
    """Octets that are gone before anybody looks for lines."""

    def receive(self, wire: bytes) -> tuple[bytes, bytes] | None:
        """The body without dot-stuffing and its line ends as CRLF, and what would run as commands."""
        wire = wire.translate(None, self.dropped)
        lines: list[bytes] = []
        start = 0
        for end in self.line_end.finditer(wire):
            line = wire[start : end.end()]
            if self.last_line.fullmatch(line):
                return b"".join(lines), wire[end.end() :]
            lines.append(wire[start : end.start()].removeprefix(b".") + b"\r\n")
            start = end.end()
        return None


STRICT = Receiver("RFC 5321", re.compile(rb"\r\n"), re.compile(rb"\.\r\n"))

POSTFIX = Receiver("Postfix before 3.8.4", re.compile(rb"\r*\n"), re.compile(rb"\.\r*\n"))
SENDMAIL = Receiver("Sendmail before 8.18", re.compile(rb"\r?\n"), re.compile(rb"\.\r?\n"))
EXIM = Receiver("Exim before 4.97.1", re.compile(rb"\r\n|\n|\r"), re.compile(rb"\.\r?\n"))
AIOSMTPD = Receiver("aiosmtpd before 1.4.5", re.compile(rb"\r?\n"), re.compile(rb"\.\r\n"))
CLEANER = Receiver(
    "one that repairs bare CR and LF", re.compile(rb"\r\n|\n|\r"), re.compile(rb"\.(?:\r\n|\n|\r)")
)
NUL_DROPPER = Receiver(
    "one that drops NUL", re.compile(rb"\r\n|\n|\r"), re.compile(rb"\.(?:\r\n|\n|\r)"), dropped=b"\x00"
)
TRIMMER = Receiver(
    "one that drops white space at the end of lines",
    re.compile(rb"\r*\n"),
    re.compile(rb"\.[ \t\x00\x0b\x0c\r]*\n"),
)

LENIENT = [POSTFIX, SENDMAIL, EXIM, AIOSMTPD, CLEANER, NUL_DROPPER, TRIMMER]
