"""Splits the client's bytes into command lines, and lines into verb and argument (RFC 5321 4.1.1).

Lines come from `LineReader`, so CR before LF is gone. Control characters and broken UTF-8 are refused here,
once, for every command: the text of a client ends in logs, in header fields and at the next server.
"""

import enum

from zonerelay.model.reply import Reply
from zonerelay.smtp.server.params import MAX_ENVID, MAX_ORCPT
from zonerelay.smtp.server.paths import CommandError, command_error
from zonerelay.smtp.server.sasl import MAX_AUTH_LINE

# Splits a byte stream into command lines. No I/O.
#
# Owns the bytes that have arrived and are not yet a command. Only `<CR><LF>` ends a line (RFC 5321 2.3.8).
# A bare LF is reported at once as a fault instead of being waited out or taken for a line end: a person at
# netcat sees an answer, and text that slipped through another program's CRLF filter with a lone LF in it
# never becomes a command of its own. After that fault the stream has no trustworthy line structure left and
# the caller closes.
#
# Memory: at most `limit` bytes plus what one `feed` brought; an overlong line is dropped as it arrives and
# reported once, when its CRLF does.

CR = 0x0D
_CRLF = b"\r\n"


class LineFault(enum.Enum):
    """The reason why a command line is not accepted."""

    TOO_LONG = "too long"
    BARE_LF = "bare LF"


class LineReader:
    """Splits received bytes into command lines. `feed` bytes, then call `next` until it returns `None`.

    `waiting` is the number of bytes that no call of `next` has returned yet; only this class sets it.
    """

    __slots__ = ("_buffer", "_dropping", "_limit", "_position", "waiting")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        """Discard all input, because bytes received before a TLS handshake may be an attacker's
        (CVE-2011-0411).
        """
        self._buffer = b""
        self._position = 0
        self._dropping = False
        self.waiting = 0

    def only_line(self, data: bytes) -> bytes | None:
        """Return the command line if `data` is exactly one valid line, which most packets are.

        Otherwise return `None`, and consume nothing.
        """
        # While an overlong line is dropped, its last byte waits.
        if self.waiting or len(data) > self._limit or not data.endswith(_CRLF):
            return None
        return data[:-2] if data.find(b"\n") == len(data) - 1 else None

    def feed(self, data: bytes) -> None:
        self._buffer = self._buffer[self._position :] + data if self.waiting else data
        self._position = 0
        self.waiting = len(self._buffer)

    def next(self) -> bytes | LineFault | None:
        """Return the next line without its CRLF, a `LineFault`, or `None` if more bytes are needed."""
        if not self.waiting:
            return None
        start = self._position
        end = self._buffer.find(b"\n", start)
        if end < 0:
            self._drop_overlong()
            return None
        self._position = end + 1
        self.waiting -= end + 1 - start
        dropping, self._dropping = self._dropping, False
        if end == start or self._buffer[end - 1] != CR:
            return LineFault.BARE_LF
        if dropping or end - start >= self._limit:
            return LineFault.TOO_LONG
        return self._buffer[start : end - 1]

    def take(self, count: int) -> bytes:
        """Return up to `count` unprocessed bytes, such as the data after a BDAT command."""
        start = self._position
        taken = self._buffer[start : start + count]
        self._position += len(taken)
        self.waiting -= len(taken)
        return taken

    def _drop_overlong(self) -> None:
        if self.waiting > self._limit or self._dropping:
            self._dropping = True
            # The last byte may be the CR of the line end to come.
            self._buffer = self._buffer[-1:]
            self._position = 0
            self.waiting = 1


COMMAND_LINE = 512  # octets with CRLF, RFC 5321 4.5.3.1.4

# What the extensions add to a command's line (RFC 5321 2.2.1). Constants: aiosmtpd's grow with every EHLO and
# are shared by all connections.
_SIZE, _BODY, _SMTPUTF8 = 26, 17, 10  # RFC 1870 6, RFC 6152 2, RFC 6531 3.4
_AUTH, _HOLD = 500, 34  # RFC 4954 3, RFC 4865 3
_DSN_MAIL = len(" RET=FULL ENVID=") + MAX_ENVID
_DSN_RCPT = len(" NOTIFY=SUCCESS,FAILURE,DELAY ORCPT=") + MAX_ORCPT
# A proxy may use several commands, but need not: names and log-ins are long, and xtext makes them longer.
_XCLIENT = 1536

LIMITS = {
    "MAIL": COMMAND_LINE + _SIZE + _BODY + _SMTPUTF8 + _AUTH + _HOLD + _DSN_MAIL,
    "RCPT": COMMAND_LINE + _DSN_RCPT,
    "AUTH": MAX_AUTH_LINE,
    "XCLIENT": COMMAND_LINE + _XCLIENT,
}
"""Octets of a line with its CRLF, by verb; all others have COMMAND_LINE."""

MAX_LINE = max(COMMAND_LINE, *LIMITS.values())

TOO_LONG = Reply(500, "5.2", "Line too long")

# Never SMTP: a browser that was told to post here, or a probe. Answering its body lines
# as commands is how web pages were made to send mail.
HTTP_VERBS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "PATCH", "PRI"}
)
TLS_HELLO = b"\x16\x03"


_HELLO = frozenset({"EHLO", "HELO"})


def parse_command(line: bytes) -> tuple[str, str]:
    """Return the verb in upper case and the argument without trailing spaces (RFC 5321 4.1.1)."""
    text = line.decode("utf-8", "replace")
    verb, _, argument = text.partition(" ")
    verb = verb.upper()
    if verb in _HELLO:  # a name in another charset is no reason to refuse what a device sends
        text = text.replace("\ufffd", "?")
        argument = argument.replace("\ufffd", "?")
    if not text.isprintable() or "\ufffd" in text:
        if verb in ("MAIL", "RCPT") and not line.isascii():
            raise command_error(553, "6.7", "Address is not valid UTF-8")
        raise command_error(500, "5.2", "Control characters are not allowed in commands")
    if len(line) > COMMAND_LINE - 2 and len(line) > LIMITS.get(verb, COMMAND_LINE) - 2:
        raise CommandError(TOO_LONG)
    return verb, argument.strip(" ")
