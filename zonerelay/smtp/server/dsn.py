"""Parses the DSN parameters (RFC 3461 4): RET, ENVID, NOTIFY, ORCPT.

ENVID and ORCPT are checked only and keep their raw text, since they are passed on and returned as they came.
`None` stands for a keyword without a value, which all four refuse.
"""

from __future__ import annotations

import re

from zonerelay.model.envelope import Notify, Ret
from zonerelay.smtp.server.paths import command_error

MAX_ENVID = 100  # characters of xtext, RFC 3461 4.4
MAX_ORCPT = 500  # characters, RFC 3461 4.2

# RFC 3461 4.2, 4.4: what is encoded is printable, too. It ends in the header fields of reports.
_XTEXT = re.compile(r"(?:[!-*,-<>-~]|\+[2-6][0-9A-F]|\+7[0-9A-E])+")
_ADDRESS_TYPE = re.compile(r"[!#$%&'*+/0-9=?A-Z^_`a-z{|}~-]+")
# RFC 6533 3: utf-8-addr-xtext allows \x{HEX}; both forms are printable ASCII, so one check serves them.
_UTF8_XTEXT = re.compile(r"(?:[!-*,-<>-\[\]-~]|\\x\{[0-9A-F]{2,6}\})+")
_UTF8_RAW = re.compile(r"[^\x00-\x20\x7f+=]+")
_NOTIFY = {"SUCCESS": Notify.SUCCESS, "FAILURE": Notify.FAILURE, "DELAY": Notify.DELAY}


def parse_ret(value: str | None) -> Ret:
    text = (value or "").upper()
    if text not in ("FULL", "HDRS"):
        raise command_error(501, "5.4", "RET is FULL or HDRS")
    return Ret(text)


def parse_envid(value: str | None) -> str:
    if not value or len(value) > MAX_ENVID or not _XTEXT.fullmatch(value):
        raise command_error(501, "5.4", f"ENVID is at most {MAX_ENVID} characters of xtext")
    return value


def parse_notify(value: str | None) -> Notify:
    words = (value or "").upper().split(",")
    if words == ["NEVER"]:
        return Notify.NEVER
    notify = Notify.UNSET
    for word in words:
        if word not in _NOTIFY or _NOTIFY[word] in notify:
            raise command_error(501, "5.4", "NOTIFY is NEVER, or some of SUCCESS, FAILURE, DELAY")
        notify |= _NOTIFY[word]
    return notify


def parse_orcpt(value: str | None) -> str:
    kind, _, address = (value or "").partition(";")
    if len(value or "") > MAX_ORCPT or not _ADDRESS_TYPE.fullmatch(kind):
        raise command_error(501, "5.4", "ORCPT is type;xtext")
    if kind.lower() == "utf-8":
        valid = _UTF8_XTEXT.fullmatch(address) or _UTF8_RAW.fullmatch(address)
    else:
        valid = _XTEXT.fullmatch(address)
    if not valid:
        raise command_error(501, "5.4", "ORCPT is type;xtext")
    return f"{kind};{address}"
