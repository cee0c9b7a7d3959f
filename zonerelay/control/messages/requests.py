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
OrderEffect = Literal["suspend", "hold"]
ChangeVerb = Literal["retry", "hold", "release", "reroute", "bounce", "drop"]


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
    """Stream matching deliveries, oldest message first; `limit` 0 means all. `after`, the next page: only
    those behind this delivery, in words queue, message id and recipient.
    """

    filter: Filter = Filter()
    limit: int = 0
    after: tuple[str, str, str] | None = None


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
    """Do `action` to every match. An empty filter needs `everything`, so that no slip empties a queue.

    `at`: `retry` makes the matches due then. `reroute` has one of `to_zone`, `next_hop` (a host, with a port
    if not 25, that a zone of the configuration names) and `ask_again` (the zone that the routes choose now).
    `act` is the id of the act, "" for a new one; several requests with the same id are one act. `who`: a
    supervisor says on whose behalf it asks.
    """

    action: ChangeVerb
    filter: Filter = Filter()
    reason: str = ""
    everything: bool = False
    at: float | None = None
    to_zone: str = ""
    next_hop: str = ""
    ask_again: bool = False
    act: str = ""
    who: str = ""


class Undo(_Request, frozen=True, kw_only=True, tag="undo"):
    """Revert what the act `undoes` changed; answered with `Changed`. `act` and `who` as of QueueChange."""

    undoes: str
    reason: str = ""
    act: str = ""
    who: str = ""


class Acts(_Request, frozen=True, kw_only=True, tag="acts"):
    """List the acts of the last 24 hours, the last one first; at most `limit`. `act`: that one alone."""

    act: str = ""
    limit: int = 100


class Selectors(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which mail an order is about, that which comes later too. Everything given must match; `*` in the text
    of addresses and domains matches any text. `destination` is one as `status` has it: a domain or next hop,
    or a host of it. `everything` is all mail, so that no slip stops a relay.
    """

    zone: str | None = None
    destination: str | None = None
    domain: str | None = None
    sender: str | None = None
    user: str | None = None
    recipient: str | None = None
    everything: bool = False


class Suspend(_Request, frozen=True, kw_only=True, tag="suspend"):
    """Give an order, for so many `seconds` or `until` then, if one is given. There is one order for the same
    selectors and `effect`: it takes what is new. `refuse`: clients get 421 for such mail. A supervisor says
    `who` asks, and the `id` that a new order has.
    """

    about: Selectors
    effect: OrderEffect = "suspend"
    seconds: float | None = None
    until: float | None = None
    refuse: bool = False
    stop_clock: bool = False
    reason: str = ""
    id: str = ""
    who: str = ""


class Resume(_Request, frozen=True, kw_only=True, tag="resume"):
    """End the orders, of any effect, that have exactly these selectors, or the one with this `id`."""

    about: Selectors = Selectors()
    id: str = ""
    reason: str = ""
    who: str = ""


class Orders(_Request, frozen=True, kw_only=True, tag="orders"):
    """Asks for the orders in force."""


class Explain(_Request, frozen=True, kw_only=True, tag="explain"):
    """Where mail for an address would go. Nothing is sent. What is not given is unknown, as `size` `None` is.
    With `message_id`, where a message of the queue goes: an answer for each zone and domain of its
    recipients, or of `address` alone.

    `listener` is an address of the configuration, `headers` are names and values. `priority` empty: the
    listener's.
    """

    address: str = ""
    message_id: str = ""
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


class Tail(_Request, frozen=True, kw_only=True, tag="tail"):
    """Stream mail events as they happen, until the client leaves. Everything given must match; `*` matches
    any text, but nothing in what the log has pseudonyms for. Addresses, users and clients are given in
    clear, or as the log has them. `address` is any of them, a Message-ID too.
    """

    address: str = ""
    sender: str = ""
    recipient: str = ""
    domain: str = ""
    zone: str = ""
    user: str = ""
    client: str = ""
    event: str = ""
    message_id: str = ""


class Transcript(_Request, frozen=True, kw_only=True, tag="transcript"):
    """Stream the protocol lines of sessions as they happen: those of one `client` (an address or a network),
    of connections to one `domain` (a recipient domain, an MX host or a next hop), or of one message. It ends
    after `seconds`, `octets` or `sessions`, whichever comes first. A supervisor says `who` asks.
    """

    client: str = ""
    domain: str = ""
    message_id: str = ""
    seconds: float = 300.0
    octets: int = 10_000_000
    sessions: int = 100
    who: str = ""


class PartMetrics(_Request, frozen=True, kw_only=True, tag="part-metrics"):
    """A supervisor asks for every metric of this worker. Never printed, so no outside contract."""


class PartReadiness(_Request, frozen=True, kw_only=True, tag="part-readiness"):
    """A supervisor asks whether this worker is ready for mail. Never printed, so no outside contract."""


Request = (
    Ping | Status | QueueList | QueueCount | QueueShow | QueueTrace | QueueCat | QueueSummary |
    QueueChange | Suspend | Resume | Orders | Undo | Acts | Explain | Resolve | SpoolAcknowledge |
    WebhookList | WebhookTest | WebhookReplay | Tail | Transcript | PartMetrics | PartReadiness
)  # fmt: skip
