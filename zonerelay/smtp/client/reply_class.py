"""The class of a reply, from a fixed list: what an operator wants to know of it at a glance. Pure.

Codes decide where they are enough; a few texts that all large receivers use tell what no code says.
"""

from __future__ import annotations

import re

from zonerelay.model.reply import Reply
from zonerelay.smtp.client.reputation import blames_address

CLASSES = (
    "accepted", "no answer", "dns", "tls", "log-in", "own trouble", "reputation", "greylisted",
    "mailbox full", "too much", "temporary", "permanent",
)  # fmt: skip

_SAID = r"refused us at .{1,20}: ([2-5]\d\d) "
"""In a reply of ours, when a host refused to talk (`delivery/connection/session.py`)."""
_OURS = {"1": "no answer", "2": "no answer", "3": "dns", "4": "dns"}
"""Of our own replies with the subject 4 (RFC 3463 3.5), by detail."""
_GREYLISTED = r"(?i)gr[ea]y-?list|try again later.{0,40}\bgr[ea]y"
_TOO_MUCH = r"(?i)too (?:many|much|fast)|\brate\b|throttl|limit"


def class_of(reply: Reply, *, local: bool) -> str:
    """One of `CLASSES`. `local`: the reply is ours, not a peer's."""
    if local and (said := re.search(_SAID, reply.text)):
        reply, local = Reply(int(said[1]), reply.detail, reply.text), False
    if reply.is_positive:
        return "accepted"
    if blames_address(reply):
        return "reputation"
    if reply.code in (454, 530, 535) or reply.detail == "7.8" or (local and reply.detail == "7.0"):
        return "log-in"
    return _own(reply) if local else _peers(reply)


def _own(reply: Reply) -> str:
    subject, _, detail = reply.detail.partition(".")
    if subject == "4":
        return _OURS.get(detail, "own trouble")
    return {"7": "tls", "1": "dns"}.get(subject, "own trouble")


def _peers(reply: Reply) -> str:
    if reply.detail == "2.2":
        return "mailbox full"
    if reply.is_permanent:
        return "permanent"
    if re.search(_GREYLISTED, reply.text):
        return "greylisted"
    return "too much" if re.search(_TOO_MUCH, reply.text) else "temporary"
