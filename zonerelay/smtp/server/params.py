"""Parses the arguments of MAIL and RCPT: a path followed by ESMTP parameters.

SIZE (RFC 1870), BODY (6152), SMTPUTF8 (6531), RET, ENVID, NOTIFY, ORCPT (3461), AUTH (4954), HOLDFOR and
HOLDUNTIL (4865). `parse_mail` and `parse_rcpt` return values or raise `CommandError` with the reply to give.
A parameter that the listener does not offer is refused with 555 5.5.4, whether we could parse it or not (RFC
5321 4.1.1.11). Values keep their case: ENVID and ORCPT belong to the client.

- BODY=BINARYMIME is a bad value (501): the keyword is known, and binary is not offered. Its bodies have no
  lines, so they could not be sent on to nearly any server.
- REQUIRETLS (RFC 8689) is not offered: the RFC demands that each server on the way offers it, which hardly
  one on the Internet does. Mail over HTTP may ask for it.
- AUTH= is checked and dropped: it is another server's word about the author of the message, and no client
  here is trusted to know (RFC 4954 5 then wants it treated as `AUTH=<>`).
"""

import re
from collections.abc import Callable, Collection
from datetime import datetime
from functools import partial
from itertools import permutations
from typing import Any

import msgspec

from zonerelay.model.envelope import BodyType, Mailbox, Notify, Recipient, Ret
from zonerelay.model.reply import Reply
from zonerelay.smtp.server import paths
from zonerelay.smtp.server.paths import CommandError, command_error

# The DSN parameters (RFC 3461 4): RET, ENVID, NOTIFY, ORCPT.
#
# ENVID and ORCPT are checked only and keep their raw text, since they are passed on and returned as they
# came.

MAX_ENVID = 100  # characters of xtext, RFC 3461 4.4
MAX_ORCPT = 500  # characters, RFC 3461 4.2

# RFC 3461 4.2, 4.4: what is encoded is printable, too. It ends in the header fields of reports.
_XTEXT = r"(?:[!-*,-<>-~]|\+[2-6][0-9A-F]|\+7[0-9A-E])+"
# RFC 6533 3: utf-8-addr-xtext allows \x{HEX}; both forms are printable ASCII, so one check serves them.
_UTF8 = r"(?i:utf-8);(?:(?:[!-*,-<>-\[\]-~]|\\x\{[0-9A-F]{2,6}\})+|[^\x00-\x20\x7f+=]+)"
_OTHER = r"(?!(?i:utf-8);)[!#$%&'*+/0-9=?A-Z^_`a-z{|}~-]+;" + _XTEXT
_RET = re.compile("FULL|HDRS")

NOTIFY = {
    ",".join(words): Notify(sum(Notify[word] for word in words))
    for number in (1, 2, 3)
    for words in permutations(("SUCCESS", "FAILURE", "DELAY"), number)
} | {"NEVER": Notify.NEVER}
"""The meaning of each value. Of equal ones, the first is in the order of RFC 3461 4.1's examples."""


def _limited(pattern: str, most: int) -> re.Pattern[str]:
    return re.compile(rf"(?!.{{{most + 1}}})(?:{pattern})")


def _matched(pattern: re.Pattern[str], value: str) -> str:
    if not pattern.fullmatch(value):
        raise ValueError("contains an invalid SMTP parameter")
    return value


parse_envid = partial(_matched, _limited(_XTEXT, MAX_ENVID))
parse_orcpt = partial(_matched, _limited(f"{_UTF8}|{_OTHER}", MAX_ORCPT))


# The parameters that ask to keep a message for later (RFC 4865 3): HOLDFOR, HOLDUNTIL.
#
# Only the grammar is here; code that has a clock decides how far ahead is too far, and what a time in the
# past means. The RFC has no `;C` or `;R` behind the value (that is DELIVERBY, RFC 2852), so they are refused.

MAX_HOLD_FOR = 999_999_999  # seconds, RFC 4865 3: one to nine digits, the first of them not 0

_SECONDS = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
# RFC 3339 5.6 (the RFC's own word for it was lost; erratum 2040 says that it means this).
_DATE_TIME = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:)(\d\d)((?:\.\d{1,20})?(?:Z|[+-]\d\d:[0-5]\d))", re.ASCII
)


def _unix_time(value: str) -> float:
    match = _DATE_TIME.fullmatch(value.upper())
    if match is None:
        raise ValueError
    start, second, rest = match.groups()
    # Clocks show no 60th second; the one behind the 59th is the same moment to Unix time.
    leap = second == "60"
    return datetime.fromisoformat(f"{start}{'59' if leap else second}{rest}").timestamp() + leap


MAIL_PARAMETERS = frozenset({"SIZE", "BODY", "SMTPUTF8"})
RCPT_PARAMETERS: frozenset[str] = frozenset()
DSN_MAIL_PARAMETERS = frozenset({"RET", "ENVID"})
DSN_RCPT_PARAMETERS = frozenset({"NOTIFY", "ORCPT"})
AUTH_MAIL_PARAMETERS = frozenset({"AUTH"})
HOLD_MAIL_PARAMETERS = frozenset({"HOLDFOR", "HOLDUNTIL"})

MAX_AUTH = 500  # characters of the whole parameter, RFC 4954 3

_KEYWORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
_SIZE = re.compile(r"[0-9]{1,20}", re.ASCII)  # RFC 1870 3
# RFC 4954 8: xtext, `<>` among it. A mailbox is wanted, but the value is dropped.
_AUTH = _limited(r"(?:[!-*,-<>-~]|\+[0-9A-Fa-f]{2})+", MAX_AUTH - len("AUTH="))
_NOTHING = re.compile("")

_PARSERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "SIZE": ("size", lambda value: int(_matched(_SIZE, value))),
    "BODY": ("body", lambda value: BodyType(value.upper())),
    "SMTPUTF8": ("smtputf8", lambda value: not _matched(_NOTHING, value)),
    "RET": ("ret", lambda value: Ret(_matched(_RET, value.upper()))),
    "ENVID": ("envid", parse_envid),
    "AUTH": ("auth", partial(_matched, _AUTH)),
    "HOLDFOR": ("hold_for", lambda value: int(_matched(_SECONDS, value))),
    "HOLDUNTIL": ("hold_until", _unix_time),
    "NOTIFY": ("notify", lambda value: NOTIFY[value.upper()]),
    "ORCPT": ("orcpt", parse_orcpt),
}
"""The field of each parameter in `MailCommand` or `Recipient`, and its parser, which may raise ValueError or
KeyError. A keyword without a value has "".
"""


class MailCommand(msgspec.Struct, frozen=True):
    """A parsed MAIL command; `size` is the declared size, or 0.

    `hold_for` (seconds) or `hold_until` (Unix time) when the message is to be kept for later, never both.
    """

    sender: Mailbox
    size: int = 0
    body: BodyType = BodyType.SEVEN_BIT
    smtputf8: bool = False
    ret: Ret = Ret.UNSET
    envid: str = ""
    hold_for: int | None = None
    hold_until: float | None = None
    require_tls: bool = False


def parse_mail(argument: str, *, offered: Collection[str] = MAIL_PARAMETERS) -> MailCommand:
    """Parse the argument of MAIL, `FROM:<path> [parameters]`."""
    sender, rest = paths.reverse_path(_after_keyword(argument, "FROM:"))
    if not rest and sender.isascii():
        return MailCommand(sender)
    given = _parameters(rest, offered)
    given.pop("auth", None)
    if "smtputf8" not in given:
        paths.require_ascii(sender)
    if given.keys() >= {"hold_for", "hold_until"}:
        raise CommandError(Reply(501, "5.4", "HOLDFOR and HOLDUNTIL cannot be combined"))  # RFC 4865 4.2, 9)
    return MailCommand(sender, **given)


def parse_rcpt(
    argument: str, *, smtputf8: bool = False, offered: Collection[str] = RCPT_PARAMETERS
) -> Recipient:
    """Parse the argument of RCPT, `TO:<path> [parameters]`; `smtputf8` as declared in this transaction's
    MAIL.
    """
    recipient, rest = paths.forward_path(_after_keyword(argument, "TO:"))
    if not smtputf8:
        paths.require_ascii(recipient)
    if not rest:
        return Recipient(address=recipient)
    return Recipient(address=recipient, **_parameters(rest, offered))


def by_the_grammar(argument: str) -> str:
    """Convert the argument of MAIL or RCPT from a lenient form to the standard syntax."""
    keyword, colon, rest = argument.partition(":")
    return f"{keyword}{colon}{paths.read_leniently(rest.lstrip(' '))}"


def _after_keyword(argument: str, keyword: str) -> str:
    if argument[: len(keyword)].upper() != keyword:
        raise CommandError(Reply(501, "5.2", f"Syntax: {keyword}<address>"))
    return argument[len(keyword) :].lstrip(" ")


def _parameters(rest: str, offered: Collection[str]) -> dict[str, Any]:  # Any: values of every field's type
    """Parse the ESMTP parameters, and return their values by field name."""
    if rest and not rest.startswith(" "):
        raise CommandError(Reply(501, "5.4", "Parameters must be separated by a space"))
    given: dict[str, Any] = {}
    for word in rest.split():
        keyword, equals, value = word.partition("=")
        keyword = keyword.upper()
        if keyword not in offered:
            if not _KEYWORD.fullmatch(keyword):
                raise command_error(501, "5.4", "Bad parameter syntax")
            raise command_error(555, "5.4", "Parameter not recognized or not implemented")
        field, parse = _PARSERS[keyword]
        try:
            # RFC 5321 4.1.2 esmtp-value: no "=" and, without SMTPUTF8 in it, no empty value.
            if field in given or (equals and not value) or "=" in value:
                raise ValueError
            given[field] = parse(value)
        except (KeyError, ValueError):
            raise command_error(501, "5.4", f"Bad or repeated {keyword} parameter") from None
    return given
