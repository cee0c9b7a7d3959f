"""The requests of `zonerelay queue …` and other commands to a running relay; `answers.py` has the answers.

The relay refuses a request of another `VERSION`, and one with a field that it does not know: half understood
it might change the wrong deliveries.
"""

from __future__ import annotations

from typing import Literal

import msgspec

VERSION = 1
MAX_REQUEST = 64 * 1024

SummaryBy = Literal["domain", "site", "sender", "zone", "user", "reply", "priority"]
ChangeVerb = Literal["retry", "hold", "release", "bounce", "drop"]


class Filter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which deliveries. Everything given must match; `*` in the text fields matches any text."""

    sender: str | None = None
    recipient: str | None = None
    domain: str | None = None
    zone: str | None = None
    priority: str | None = None
    state: str | None = None
    min_age: float | None = None
    max_age: float | None = None
    reply_text: str | None = None
    message_id: str | None = None

    @property
    def is_everything(self) -> bool:
        return self == Filter()


class _Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", forbid_unknown_fields=True):
    version: int = VERSION


class Ping(_Request, frozen=True, kw_only=True, tag="ping"):
    """Asks whether a relay answers."""


class Status(_Request, frozen=True, kw_only=True, tag="status"):
    """Asks for the depths of queues, the zones and the destinations."""


class QueueList(_Request, frozen=True, kw_only=True, tag="queue-list"):
    """Stream matching deliveries, oldest message first; `limit` 0 means all."""

    filter: Filter = Filter()
    limit: int = 0


class QueueCount(_Request, frozen=True, kw_only=True, tag="queue-count"):
    """Asks for the number of matching deliveries and the first `sample` of them: a bulk verb's preview."""

    filter: Filter = Filter()
    sample: int = 5


class QueueShow(_Request, frozen=True, kw_only=True, tag="queue-show"):
    """Asks for one message with its open deliveries."""

    message_id: str


class QueueTrace(_Request, frozen=True, kw_only=True, tag="queue-trace"):
    """Asks for the history of one message, in order."""

    message_id: str


class QueueCat(_Request, frozen=True, kw_only=True, tag="queue-cat"):
    """Asks for the octets of one message, as received or `as_sent` in its zone; `zone` chooses one of
    several. A supervisor says `who` asks.
    """

    message_id: str
    as_sent: bool = False
    zone: str = ""
    who: str = ""


class QueueSummary(_Request, frozen=True, kw_only=True, tag="queue-summary"):
    """Count the matches by a property and by age. Without `exact` a large queue is estimated."""

    by: SummaryBy = "domain"
    filter: Filter = Filter()
    exact: bool = False


class QueueChange(_Request, frozen=True, kw_only=True, tag="queue-change"):
    """Do `action` to every match. An empty filter needs `everything`, so that no slip empties a queue."""

    action: ChangeVerb
    filter: Filter = Filter()
    reason: str = ""
    everything: bool = False


class Explain(_Request, frozen=True, kw_only=True, tag="explain"):
    """Where mail for an address would go. Nothing is sent. What is not given is unknown, as `size` `None` is.

    `listener` is an address of the configuration, `headers` are names and values. `priority` empty: the
    listener's.
    """

    address: str
    sender: str = ""
    user: str = ""
    listener: str = ""
    client: str = ""
    certificate: str = ""
    priority: str = ""
    size: int | None = None
    headers: tuple[tuple[str, str], ...] = ()


class SpoolAcknowledge(_Request, frozen=True, kw_only=True, tag="spool-acknowledge"):
    """The operator has dealt with a loss of the spool: it is no problem any more."""

    loss: str


class WebhookList(_Request, frozen=True, kw_only=True, tag="webhook-list"):
    """Asks for every webhook, and what waits for it."""


class WebhookTest(_Request, frozen=True, kw_only=True, tag="webhook-test"):
    """Posts an event webhook.test to an endpoint now."""

    name: str


class WebhookReplay(_Request, frozen=True, kw_only=True, tag="webhook-replay"):
    """Try now what waits; with `since` (Unix time) also tell again what the history has from then on."""

    name: str
    since: float | None = None


class Resolve(_Request, frozen=True, kw_only=True, tag="resolve"):
    """Which addresses in the queue a pseudonym from the log stands for."""

    pseudonym: str


class PartMetrics(_Request, frozen=True, kw_only=True, tag="part-metrics"):
    """A supervisor asks for every metric of this worker. Never printed, so no outside contract."""


class PartReadiness(_Request, frozen=True, kw_only=True, tag="part-readiness"):
    """A supervisor asks whether this worker is ready for mail. Never printed, so no outside contract."""


Request = (
    Ping
    | Status
    | QueueList
    | QueueCount
    | QueueShow
    | QueueTrace
    | QueueCat
    | QueueSummary
    | QueueChange
    | Explain
    | Resolve
    | SpoolAcknowledge
    | WebhookList
    | WebhookTest
    | WebhookReplay
    | PartMetrics
    | PartReadiness
)
