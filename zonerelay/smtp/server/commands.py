"""Parses a command line into a verb and its argument (RFC 5321 4.1.1).

Lines come from `LineReader`, so CR before LF is gone. Control characters and broken UTF-8 are refused here,
once, for every command: the text of a client ends in logs, in header fields and at the next server.
"""

from __future__ import annotations

from zonerelay.model.reply import Reply
from zonerelay.smtp.server.dsn import MAX_ENVID, MAX_ORCPT
from zonerelay.smtp.server.paths import CommandError
from zonerelay.smtp.server.sasl import MAX_AUTH_LINE

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


def parse_command(line: bytes) -> tuple[str, str]:
    """Return the verb in upper case and the argument without trailing spaces (RFC 5321 4.1.1)."""
    text = line.decode("utf-8", "replace")
    verb, _, argument = text.partition(" ")
    verb = verb.upper()
    if not text.isprintable() or "\ufffd" in text:
        raise CommandError(_unprintable(line, verb))
    if len(line) > COMMAND_LINE - 2 and len(line) > LIMITS.get(verb, COMMAND_LINE) - 2:
        raise CommandError(TOO_LONG)
    return verb, argument.strip(" ")


def _unprintable(line: bytes, verb: str) -> Reply:
    if verb in ("MAIL", "RCPT") and not line.isascii():
        return Reply(553, "6.7", "Address is not valid UTF-8")
    return Reply(500, "5.2", "Control characters are not allowed in commands")
