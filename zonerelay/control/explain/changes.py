"""The part of `explain` about changes to mail: addresses at the entry, fields and signatures at the exit.

`RewritePlans` covers [[rewrite]] and the reversal of SRS, `ChangePlans` the header rules of a zone, SRS and
DKIM. The author is that of `--header 'From: …'`; without it, the envelope sender is taken for the author.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zonerelay.config.settings import DkimMode, ZoneSettings
from zonerelay.message.dkim.signature import author_domain
from zonerelay.message.srs import Srs, SrsError
from zonerelay.model.address import Mailbox, domain_of
from zonerelay.model.clock import Clock
from zonerelay.operations.answers import ChangePlan

if TYPE_CHECKING:
    from zonerelay.message.dkim.keys import DkimKeys
    from zonerelay.message.dkim.signature import DkimKey
from typing import NamedTuple

from zonerelay.inbound.state.rewriting import Place, Rewriting
from zonerelay.operations.answers import RewritePlan


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
        """Returns the signatures there would be, or why there is none; neither where none is asked for."""
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
        """Returns what SRS makes of the sender; "" where it stays."""
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
    """Returns the domain of the author, and whether that is certain."""
    given = [value for name, value in headers if name.lower() == "from"]
    if not given:
        return domain_of(Mailbox(sender)) if "@" in sender else "", False
    return author_domain("".join(f"From: {value}\r\n" for value in given).encode()), True


SRS = "srs"


class Rewritten(NamedTuple):
    """The recipient and the sender that rewriting leads to, with its steps."""

    recipient: str
    sender: str
    plans: tuple[RewritePlan, ...]


class RewritePlans:
    """`rewriting` and `srs` are those of now."""

    def __init__(
        self, rewriting: Callable[[], Rewriting | None], srs: Callable[[], Srs | None], clock: Clock
    ) -> None:
        self._rewriting = rewriting
        self._srs = srs
        self._clock = clock

    def of(self, recipient: str, sender: str, *, listener: str, user: str) -> Rewritten:
        plans: list[RewritePlan] = []
        recipient = self._reversed(recipient, plans)
        rewriting = self._rewriting()
        if rewriting is not None:
            rewrites = rewriting.of(listener, user)
            found = []
            for place, address in ((Place.SENDER, sender), (Place.RECIPIENT, recipient)):
                other, rule = rewrites.find(place, Mailbox(address))
                if rule:
                    plans.append(RewritePlan(what=place.name.lower(), becomes=other, by=f"rewrite={rule}"))
                found.append(other)
            sender, recipient = found
        return Rewritten(recipient, sender, tuple(plans))

    def _reversed(self, recipient: str, plans: list[RewritePlan]) -> str:
        srs = self._srs()
        if srs is None:
            return recipient
        try:
            first = srs.reverse(Mailbox(recipient), self._clock.now())
        except SrsError as error:
            plans.append(RewritePlan(what="recipient", by=SRS, problem=f"refused with 550 5.1.1: {error}"))
            return recipient
        if first is None:
            return recipient
        plans.append(RewritePlan(what="recipient", becomes=first, by=SRS))
        return first
