"""Parses the arguments of MAIL and RCPT: a path, then ESMTP parameters.

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

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from zonerelay.model.address import Mailbox
from zonerelay.model.envelope import Body, Notify, Recipient, Ret
from zonerelay.model.reply import Reply
from zonerelay.smtp.server.dsn import parse_envid, parse_notify, parse_orcpt, parse_ret
from zonerelay.smtp.server.futurerelease import parse_hold_for, parse_hold_until
from zonerelay.smtp.server.paths import CommandError, forward_path, require_ascii, reverse_path

MAIL_PARAMETERS = frozenset({"SIZE", "BODY", "SMTPUTF8"})
RCPT_PARAMETERS: frozenset[str] = frozenset()
DSN_MAIL_PARAMETERS = frozenset({"RET", "ENVID"})
DSN_RCPT_PARAMETERS = frozenset({"NOTIFY", "ORCPT"})
AUTH_MAIL_PARAMETERS = frozenset({"AUTH"})
HOLD_MAIL_PARAMETERS = frozenset({"HOLDFOR", "HOLDUNTIL"})

MAX_AUTH = 500  # characters of the whole parameter, RFC 4954 3

_KEYWORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
_SIZE = re.compile(r"[0-9]{1,20}", re.ASCII)  # RFC 1870 3
_AUTH = re.compile(r"(?:[!-*,-<>-~]|\+[0-9A-Fa-f]{2})+")  # RFC 4954 8: xtext, `<>` among it

Parameters = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class MailCommand:
    """MAIL: `size` is what the client declared, 0 if it did not.

    `hold_for` (seconds) or `hold_until` (Unix time) when the message is to be kept for later, never both.
    """

    sender: Mailbox
    size: int = 0
    body: Body = Body.SEVEN_BIT
    smtputf8: bool = False
    ret: Ret = Ret.UNSET
    envid: str = ""
    hold_for: int | None = None
    hold_until: float | None = None
    require_tls: bool = False


def parse_mail(argument: str, *, offered: Collection[str] = MAIL_PARAMETERS) -> MailCommand:
    """`FROM:<path> [parameters]`."""
    sender, rest = reverse_path(_after_keyword(argument, "FROM:"))
    if not rest and sender.isascii():
        return MailCommand(sender)
    given = _parameters(rest, offered)
    smtputf8 = "SMTPUTF8" in given
    if given.get("SMTPUTF8") is not None:
        raise _bad_value("SMTPUTF8")
    if not smtputf8:
        require_ascii(sender)
    if "AUTH" in given:
        _check_auth(given["AUTH"])
    if "HOLDFOR" in given and "HOLDUNTIL" in given:
        raise CommandError(Reply(501, "5.4", "Only one of HOLDFOR and HOLDUNTIL"))  # RFC 4865 4.2, 9)
    return MailCommand(
        sender,
        size=_size(given),
        body=_body(given),
        smtputf8=smtputf8,
        ret=parse_ret(given["RET"]) if "RET" in given else Ret.UNSET,
        envid=parse_envid(given["ENVID"]) if "ENVID" in given else "",
        hold_for=parse_hold_for(given["HOLDFOR"]) if "HOLDFOR" in given else None,
        hold_until=parse_hold_until(given["HOLDUNTIL"]) if "HOLDUNTIL" in given else None,
    )


def parse_rcpt(
    argument: str, *, smtputf8: bool = False, offered: Collection[str] = RCPT_PARAMETERS
) -> Recipient:
    """`TO:<path> [parameters]`; `smtputf8` as declared in this transaction's MAIL."""
    recipient, rest = forward_path(_after_keyword(argument, "TO:"))
    if not smtputf8:
        require_ascii(recipient)
    if not rest:
        return Recipient(address=recipient)
    given = _parameters(rest, offered)
    return Recipient(
        address=recipient,
        notify=parse_notify(given["NOTIFY"]) if "NOTIFY" in given else Notify.UNSET,
        orcpt=parse_orcpt(given["ORCPT"]) if "ORCPT" in given else "",
    )


def _after_keyword(argument: str, keyword: str) -> str:
    if argument[: len(keyword)].upper() != keyword:
        raise CommandError(Reply(501, "5.2", f"Syntax: {keyword}<address>"))
    return argument[len(keyword) :].lstrip(" ")


def _parameters(rest: str, offered: Collection[str]) -> Parameters:
    if rest and not rest.startswith(" "):
        raise CommandError(Reply(501, "5.4", "Parameters must be separated by a space"))
    given: Parameters = {}
    for word in rest.split():
        keyword, equals, value = word.partition("=")
        keyword = keyword.upper()
        if keyword not in offered:
            raise _unknown(keyword)
        # RFC 5321 4.1.2 esmtp-value: no "=" and, without SMTPUTF8 in it, no empty value.
        if keyword in given or (equals and not value) or "=" in value:
            raise _bad_value(keyword)
        given[keyword] = value if equals else None
    return given


def _unknown(keyword: str) -> CommandError:
    if not _KEYWORD.fullmatch(keyword):
        return CommandError(Reply(501, "5.4", "Bad parameter syntax"))
    return CommandError(Reply(555, "5.4", "Parameter not recognized or not implemented"))


def _bad_value(keyword: str) -> CommandError:
    return CommandError(Reply(501, "5.4", f"Bad or repeated {keyword} parameter"))


def _size(given: Parameters) -> int:
    if "SIZE" not in given:
        return 0
    value = given["SIZE"]
    if value is None or not _SIZE.fullmatch(value):
        raise _bad_value("SIZE")
    return int(value)


def _body(given: Parameters) -> Body:
    if "BODY" not in given:
        return Body.SEVEN_BIT
    try:
        return Body((given["BODY"] or "").upper())
    except ValueError:
        raise _bad_value("BODY") from None


def _check_auth(value: str | None) -> None:
    """RFC 4954 8 wants a mailbox in it; what is dropped is no reason to refuse mail for."""
    if value is None or len(value) > MAX_AUTH - len("AUTH=") or not _AUTH.fullmatch(value):
        raise _bad_value("AUTH")
