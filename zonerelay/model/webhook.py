"""The names of webhook events in the queue: a zone for each webhook, and recipients that say what is told.

An event waits in the spool as a small message of our own. Its one delivery is in the webhook's zone; the
recipient holds the message that the event is about, its place among the events of that message, and how many
events the body holds. So a relay that starts knows the order without reading a body.
"""

from __future__ import annotations

from typing import NamedTuple

from zonerelay.model.address import Mailbox

GAP = "gap"
"""In the place of a message: the event says which others were lost."""


class About(NamedTuple):
    source: str
    step: int
    events: int


def recipient_of(about: About) -> Mailbox:
    return Mailbox(f"{about.source}.{about.step}.{about.events}@webhook.invalid")


def about_of(recipient: Mailbox) -> About:
    """An event of a newer release, whose recipient is not understood, stands alone."""
    source, _, rest = recipient.partition("@")[0].partition(".")
    step, _, count = rest.partition(".")
    return About(source, int(step) if step.isdecimal() else 0, int(count) if count.isdecimal() else 1)
