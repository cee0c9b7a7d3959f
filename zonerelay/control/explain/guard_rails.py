"""Explains the guard rails of a user (`config/rails`): whether they let a mail pass, and what its mode makes
of it. Quotas that are used up are in the status.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

from zonerelay.config.rails import Mode, Rails
from zonerelay.inbound.access.guard import UNREADABLE, Allowance
from zonerelay.model.address import Mailbox
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import queue_of
from zonerelay.operations.requests import Explain


class Guarded(NamedTuple):
    """The allowance of the user, `None` where it cannot be read. `mailbox`: the mail goes there instead."""

    allowance: Allowance | None
    mailbox: str = ""


class GuardPlans:
    """`rails` gives those of a user, `None` when they cannot be read."""

    def __init__(self, rails: Callable[[str], Awaitable[Rails | None]], clock: Clock) -> None:
        self._rails = rails
        self._clock = clock

    async def of(self, user: str) -> Guarded:
        rails = await self._rails(user)
        if rails is None:
            return Guarded(None)
        return Guarded(Allowance(user, rails), rails.mailbox if rails.mode is Mode.REDIRECT else "")

    def words(self, guarded: Guarded, request: Explain, address: str, zone: str) -> str:
        """A sentence about mail for an address that would go to the zone; "" where nothing is to be said."""
        allowance, recipient = guarded.allowance, Mailbox(address)
        if allowance is None:
            return f"refused with {UNREADABLE.reply}"
        if not request.client and allowance.rails.networks:  # an unknown one may be in these networks
            allowance = replace(allowance, rails=replace(allowance.rails, networks=()))
        delivery = Delivery(
            queue=queue_of(zone), message_id=MessageId("0" * 16), recipient=recipient, created=0.0
        )
        refusal = (
            allowance.mail_refusal(request.client, self._clock.now(), request.size or 0)
            or allowance.rcpt_refusal(recipient, 0)
            or allowance.zone_refusal([delivery])
        )
        if refusal is not None:
            return f"refused with {refusal.reply}"
        mode = f'mode = "{allowance.rails.mode}"'
        if allowance.is_captured(recipient):
            return f"not sent: captured, or held where no zone captures ({mode})"
        if allowance.rails.mode is Mode.COPY:
            return f"a copy goes to {allowance.rails.mailbox} ({mode})"
        return ""
