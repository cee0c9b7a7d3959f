"""For `explain`: what becomes of an address when mail comes in, by [[rewrite]] and as a sender of SRS."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zonerelay.control.messages.plans import RewritePlan
from zonerelay.inbound.state.rewriting import Place, Rewriting
from zonerelay.message.srs import Srs, SrsError
from zonerelay.model.address import Mailbox
from zonerelay.model.clock import Clock

SRS = "srs"


class Rewritten(NamedTuple):
    """Who mail is for and from, in the end."""

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
