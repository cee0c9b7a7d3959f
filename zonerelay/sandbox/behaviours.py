"""The scripted replies of the sandbox's receiver, which the local part of a recipient selects.

The sandbox prints the table `ADDRESSES`; the sink follows `behaviour_of`.
"""

import re

import msgspec

ADDRESSES: tuple[tuple[str, str], ...] = (
    ("anything-else", "accepted"),
    ("reject-550", "RCPT is rejected permanently, with any 5yz code"),
    ("defer-451", "RCPT is rejected temporarily, with any 4yz code"),
    ("reply-452-4.2.2", "RCPT is answered with exactly this code and enhanced code"),
    ("permerror", "RCPT refused: 550 5.1.1"),
    ("temperror", "RCPT refused: 451 4.3.0"),
    ("greylist", "RCPT is rejected with 451 4.7.1 the first time, accepted later"),
    ("datacmd-451", "DATA is rejected, with any 4yz or 5yz code"),
    ("data-554", "the message is rejected after its final dot, with any 4yz or 5yz code"),
    ("early-552", "the message is rejected halfway, then the connection is closed"),
    ("slow-2s", "RCPT is answered after this number of seconds"),
    ("timeout", "RCPT is never answered"),
    ("close", "the connection is closed at RCPT"),
    ("close-before-dot", "the connection is closed in the middle of the message"),
    ("close-after-dot", "the connection is closed after the final dot, without a reply: in doubt"),
)

_REPLY = re.compile(r"(?:reject|defer|reply)-([245]\d\d)(?:-([245]\.\d{1,3}\.\d{1,3}))?\Z")
_LATER = re.compile(r"(datacmd|data|early)-([45]\d\d)\Z")
_SLOW = re.compile(r"slow-(\d{1,3})s\Z")


class ScriptedReply(msgspec.Struct, frozen=True):
    """A scripted reply of the sandbox's receiver. Replies have no CRLF; an empty one means the usual reply.
    `delay` is in seconds.
    """

    rcpt: str = ""
    data: str = ""
    early: str = ""
    final: str = ""
    delay: float = 0.0
    greylist: bool = False
    silent: bool = False
    close_at_rcpt: bool = False
    close_before_dot: bool = False
    close_after_dot: bool = False


_NAMED = {
    "permerror": ScriptedReply(rcpt="550 5.1.1 no such mailbox"),
    "temperror": ScriptedReply(rcpt="451 4.3.0 try again later"),
    "greylist": ScriptedReply(greylist=True),
    "timeout": ScriptedReply(silent=True),
    "close": ScriptedReply(close_at_rcpt=True),
    "close-before-dot": ScriptedReply(close_before_dot=True),
    "close-after-dot": ScriptedReply(close_after_dot=True),
}
_LATER_AT = {"datacmd": "data", "data": "final", "early": "early"}
_USUAL = ScriptedReply()


def is_behaviour(name: str) -> bool:
    """Return whether a local part requests a scripted reply."""
    return behaviour_of(name) != _USUAL


def behaviour_of(recipient: str) -> ScriptedReply:
    """Return the scripted reply for a recipient, or for a local part alone. A `+suffix` of the local part
    only serves to make addresses different.
    """
    local = (recipient.rpartition("@")[0] or recipient).partition("+")[0].lower()
    if match := _REPLY.match(local):
        return ScriptedReply(rcpt=_reply(match[1], match[2]))
    if match := _LATER.match(local):
        return msgspec.structs.replace(_USUAL, **{_LATER_AT[match[1]]: _reply(match[2], None)})
    if match := _SLOW.match(local):
        return ScriptedReply(delay=float(match[1]))
    return _NAMED.get(local, _USUAL)


def _reply(code: str, enhanced: str | None) -> str:
    return f"{code} {enhanced or code[0] + '.0.0'} as requested by the address"
