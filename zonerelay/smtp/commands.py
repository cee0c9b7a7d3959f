"""Command lines: a verb and its argument (RFC 5321 4.1.1).

Lines come from `LineReader`, so CR before LF is gone. Control characters and broken UTF-8 are refused here,
once, for every command: what a client says ends in logs, in header fields and at the next server.
"""

from __future__ import annotations

from zonerelay.model.reply import Reply
from zonerelay.smtp.paths import CommandError

COMMAND_LINE = 512  # octets with CRLF, RFC 5321 4.5.3.1.4

# What each offered extension adds to a command's line: SIZE (RFC 1870 6), BODY (RFC 6152 2),
# SMTPUTF8 (RFC 6531 3.4). A constant: aiosmtpd's grows with every EHLO and is shared by all connections.
_LIMITS = {"MAIL": COMMAND_LINE + 26 + 17 + 10}
MAX_LINE = max(COMMAND_LINE, *_LIMITS.values())

TOO_LONG = Reply(500, "5.2", "Line too long")

# Never SMTP: a browser that was told to post here, or a probe. Answering its body lines
# as commands is how web pages were made to send mail.
HTTP_VERBS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "PATCH", "PRI"}
)
TLS_HELLO = b"\x16\x03"


def parse_command(line: bytes) -> tuple[str, str]:
    """Verb in upper case and argument (trailing spaces dropped, RFC 5321 4.1.1 asks to tolerate them)."""
    text = line.decode("utf-8", "replace")
    verb, _, argument = text.partition(" ")
    verb = verb.upper()
    if not text.isprintable() or "\ufffd" in text:
        raise CommandError(_unprintable(line, verb))
    if len(line) > COMMAND_LINE - 2 and len(line) > _LIMITS.get(verb, COMMAND_LINE) - 2:
        raise CommandError(TOO_LONG)
    return verb, argument.strip(" ")


def _unprintable(line: bytes, verb: str) -> Reply:
    if verb in ("MAIL", "RCPT") and not line.isascii():
        return Reply(553, "6.7", "Address is not valid UTF-8")
    return Reply(500, "5.2", "Control characters are not allowed in commands")
