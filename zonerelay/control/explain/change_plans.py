"""For `explain`: what a zone changes in mail before it is sent, and which keys would sign it.

The author is the one of `--header 'From: …'`; without that, the envelope sender is taken for him.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zonerelay.config.settings import DkimMode, ZoneSettings
from zonerelay.control.messages.plans import ChangePlan
from zonerelay.message.dkim.authors import author_domain
from zonerelay.message.srs import Srs, SrsError
from zonerelay.model.address import Mailbox, domain_of
from zonerelay.model.clock import Clock

if TYPE_CHECKING:
    from zonerelay.message.dkim.keys import DkimKeys
    from zonerelay.message.dkim.signature import DkimKey


class ChangePlans:
    """`keys` and `srs` are those of now; `keys` may raise ValueError, with what is wrong."""

    def __init__(
        self, keys: Callable[[], DkimKeys | None], srs: Callable[[], Srs | None], clock: Clock
    ) -> None:
        self._keys = keys
        self._srs = srs
        self._clock = clock

    def of(self, zone: ZoneSettings, sender: str, headers: Sequence[tuple[str, str]]) -> ChangePlan | None:
        """`None` where mail is sent as it came."""
        author, certain = _author(sender, headers)
        signed_by, unsigned = self._signatures(zone, author)
        plan = ChangePlan(
            sender=self._sender(zone, sender),
            removed=zone.header_remove,
            replaced=zone.header_replace,
            added=zone.header_add,
            author=author if signed_by or unsigned else "",
            author_assumed=not certain,
            signed_by=signed_by,
            unsigned=unsigned,
            must_sign=zone.dkim is DkimMode.REQUIRED,
        )
        changes = (plan.sender, plan.removed, plan.replaced, plan.added, signed_by, unsigned)
        return plan if any(changes) else None

    def _signatures(self, zone: ZoneSettings, author: str) -> tuple[tuple[str, ...], str]:
        """Those there would be, or why there is none. Neither where nobody asked for any."""
        if zone.dkim is DkimMode.OFF:
            return (), ""
        try:
            keys = self._keys()
        except ValueError as error:
            return (), str(error)
        if keys is None:
            return (), "there are no keys" if zone.dkim is DkimMode.REQUIRED else ""
        found = keys.for_author(author, self._clock.now()) if author else ()
        if not found:
            return (), f"no key for {author}" if author else "From is not known"
        return tuple(map(_name, found)), ""

    def _sender(self, zone: ZoneSettings, sender: str) -> str:
        """What SRS makes of it; "" where it stays."""
        srs = self._srs() if zone.srs else None
        if srs is None or not sender:
            return ""
        try:
            becomes = srs.forward(Mailbox(sender), self._clock.now())
        except SrsError:
            return ""
        return "" if becomes == sender else str(becomes)


def _name(key: DkimKey) -> str:
    return f"{key.selector}._domainkey.{key.domain} ({key.algorithm})"


def _author(sender: str, headers: Sequence[tuple[str, str]]) -> tuple[str, bool]:
    """His domain, and whether that is certain."""
    given = [value for name, value in headers if name.lower() == "from"]
    if not given:
        return domain_of(Mailbox(sender)) if "@" in sender else "", False
    return author_domain("".join(f"From: {value}\r\n" for value in given).encode()), True
