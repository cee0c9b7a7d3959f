"""Defines the requests of operators: their fields, constraints and help texts.

Fields that users can set have an `option`; the others are set by a supervisor. A request with an unknown
field is refused, because a request that is only partly understood might change the wrong deliveries.
`answers.py` has the replies, and `catalogue.py` describes how each request is reached.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

from zonerelay.model.delivery import DeliveryState
from zonerelay.model.envelope import Priority
from zonerelay.operations.operation import Unit, option

MAX_PAGE = 1000
MAX_SAMPLE = 100
MAX_IDS = 50_000

SummaryBy = Literal["domain", "site", "sender", "zone", "user", "reply", "priority"]
OrderEffect = Literal["suspend", "hold"]
ChangeVerb = Literal["retry", "hold", "release", "reroute", "bounce", "drop"]
HistoryOutcome = Literal["waiting", "delivered", "deferred", "bounced", "expired", "dropped", "refused"]
ConfigPart = Literal["effective", "changed", "defaults"]

Line = Annotated[str, msgspec.Meta(max_length=1000)]
Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
MessageId = Annotated[Id, option("Message id, as shown in the log", "ID", Unit.MESSAGE_ID)]
OptionalId = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")]
Sender = Annotated[
    Line | None, option("Envelope sender; <> for the null sender", "--sender ADDRESS", word="from")
]
Reason = Annotated[Line, option("Reason, recorded in the log", "--reason TEXT")]


class Filter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The conditions by which a request selects deliveries. All given conditions must match; `*` in a text
    field matches any text. Ages are in seconds.
    """

    sender: Sender = None
    recipient: Annotated[Line | None, option("Recipient address", "--recipient ADDRESS", word="to")] = None
    domain: Annotated[Line | None, option("Recipient domain", "--domain DOMAIN")] = None
    zone: Annotated[Line | None, option("Zone of the deliveries", "--zone ZONE")] = None
    priority: Annotated[Priority | None, option("Priority of the deliveries", "--priority")] = None
    state: Annotated[DeliveryState | None, option("State of the deliveries", "--state")] = None
    min_age: Annotated[
        float | None,
        option("Accepted longer ago, e.g. 30m, 4h, 2d", "--older-than AGE", Unit.DURATION, word="age"),
    ] = None
    max_age: Annotated[
        float | None,
        option("Accepted since, e.g. 30m, 4h, 2d", "--younger-than AGE", Unit.DURATION, word="age"),
    ] = None
    reply_text: Annotated[Line | None, option("The last reply contains this text", "--reply TEXT")] = None
    message_id: Annotated[Id | None, option("Deliveries of one message", word="id")] = None

    @property
    def is_everything(self) -> bool:
        return self == Filter()


class Request(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="operation",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The base class of requests. Its tag is the name of the operation. The first sentence of its docstring
    is the help of its command and the summary of its path.
    """


# --- the queue ------------------------------------------------------------------------------------------


class QueueList(Request, frozen=True, kw_only=True, tag="queue-list"):
    """List deliveries, oldest message first. They come zone by zone. A `limit` of 0 means all of them.
    `cursor` is the `next` of the previous page.
    """

    filter: Filter = Filter()
    limit: Annotated[int, option("At most N rows, 0 for all", "--limit N", ge=0)] = 100
    cursor: Annotated[str, option("Cursor of the next page", max_length=2000)] = ""


class QueueCount(Request, frozen=True, kw_only=True, tag="queue-count"):
    """Count deliveries. The answer has the number of matching ones, and the first `sample` of them. With
    `in_bin`, dropped mail is counted too. With `message_ids`, only deliveries of these messages are counted.
    """

    filter: Filter = Filter()
    message_ids: tuple[Id, ...] = ()
    sample: Annotated[int, option("Also list the first N deliveries", ge=0, le=MAX_SAMPLE)] = 0
    in_bin: bool = False


class QueueSummary(Request, frozen=True, kw_only=True, tag="queue-summary"):
    """Count deliveries by property and age. Without `exact`, the numbers of a large queue are estimates."""

    by: Annotated[SummaryBy, option("Property to count by", "--by")] = "domain"
    filter: Filter = Filter()
    exact: Annotated[bool, option("Count every delivery exactly, even in a large queue", "--exact")] = False


class QueueShow(Request, frozen=True, kw_only=True, tag="queue-show"):
    """Show a message and the state of each recipient. Only recipients in the queue have a state."""

    message_id: MessageId


class QueueTrace(Request, frozen=True, kw_only=True, tag="queue-trace"):
    """Show a message's history and its next steps. They are in order of time."""

    message_id: MessageId


class QueueCat(Request, frozen=True, kw_only=True, tag="queue-cat"):
    """Print a message; the log records who has read it. The message is as received or, with `as_sent`, as its
    zone sends it. `zone` chooses one of several zones.
    """

    message_id: MessageId
    as_sent: Annotated[bool, option("As modified and signed by its zone", "--as-sent")] = False
    zone: Annotated[Line, option("With --as-sent: the zone, if there are several", "--zone ZONE")] = ""


class QueueExplain(Request, frozen=True, kw_only=True, tag="queue-explain"):
    """Show the route of a queued message. There is one answer for each zone and domain of its recipients, or
    one for `address` only.
    """

    message_id: Annotated[Id, option("Message in the queue", "--id ID", Unit.MESSAGE_ID)]
    address: Annotated[Line, option("One of its recipients", "ADDRESS")] = ""


class QueueChange(Request, frozen=True, kw_only=True):
    """The common fields of requests that change deliveries, which are selected by `message_ids` and a filter.
    Without ids, an empty filter requires `everything`, so that a slip cannot change the whole queue. With
    `dry_run` nothing is changed; the answer has the number of matches and the first `sample` of them.
    """

    action: ClassVar[ChangeVerb]
    done: ClassVar[str]
    """What has become of the deliveries."""

    message_ids: Annotated[
        tuple[Id, ...], option("Messages, by id", "ID", Unit.MESSAGE_ID, max_length=MAX_IDS)
    ] = ()
    filter: Filter = Filter()
    everything: Annotated[bool, option("All deliveries in the queue", "--all")] = False
    reason: Reason = ""
    dry_run: Annotated[bool, option("Only count what would change", "--dry-run")] = False
    sample: Annotated[int, option("With dry_run: list the first N deliveries", ge=0, le=MAX_SAMPLE)] = 5

    @property
    def is_everything(self) -> bool:
        return self.filter.is_everything and not self.message_ids


class Retry(QueueChange, frozen=True, kw_only=True, tag="queue-retry"):
    """Retry deliveries now or at a given time. `at` is a Unix time."""

    action: ClassVar[ChangeVerb] = "retry"
    done: ClassVar[str] = "will be retried now"

    at: Annotated[
        Seconds | None, option("Time of the retry: +2h, 23:30 or 2026-11-25T23:30", "--at TIME", Unit.TIME)
    ] = None


class Hold(QueueChange, frozen=True, kw_only=True, tag="queue-hold"):
    """Hold deliveries until they are released."""

    action: ClassVar[ChangeVerb] = "hold"
    done: ClassVar[str] = "held"


class Release(QueueChange, frozen=True, kw_only=True, tag="queue-release"):
    """Release held deliveries. They are due then."""

    action: ClassVar[ChangeVerb] = "release"
    done: ClassVar[str] = "released"


class Reroute(QueueChange, frozen=True, kw_only=True, tag="queue-reroute"):
    """Move deliveries to another zone. This is `to_zone`, the zone with this `next_hop`, or the zone that the
    routes choose now (`ask_again`).
    """

    action: ClassVar[ChangeVerb] = "reroute"
    done: ClassVar[str] = "moved"

    to_zone: Annotated[Line, option("Move to this zone", "--zone TARGET")] = ""
    next_hop: Annotated[Line, option("Move to the zone with this next_hop", "--next-hop HOST")] = ""
    ask_again: Annotated[bool, option("Move to the zone that the routes select now", "--ask-again")] = False


class Bounce(QueueChange, frozen=True, kw_only=True, tag="queue-bounce"):
    """Bounce deliveries: fail them and send a DSN. The DSN has the `reason`."""

    action: ClassVar[ChangeVerb] = "bounce"
    done: ClassVar[str] = "bounced"


class Drop(QueueChange, frozen=True, kw_only=True, tag="queue-drop"):
    """Remove deliveries without a DSN. They stay in the bin for 24 hours, from which an undo restores
    them. `purge` also destroys what is in the bin.
    """

    action: ClassVar[ChangeVerb] = "drop"
    done: ClassVar[str] = "dropped"

    purge: Annotated[bool, option("Delete permanently, without undo", "--purge")] = False


CHANGES: dict[ChangeVerb, type[QueueChange]] = {
    each.action: each for each in (Retry, Hold, Release, Reroute, Bounce, Drop)
}


# --- changes that were made -----------------------------------------------------------------------------


class Acts(Request, frozen=True, kw_only=True, tag="acts"):
    """List the changes of the last 24 hours, newest first."""

    limit: Annotated[int, option("At most N changes", "--limit N", ge=1, le=MAX_PAGE)] = 100


class ActShow(Request, frozen=True, kw_only=True, tag="act-show"):
    """Show one change. It must be of the last 24 hours."""

    act: Annotated[Line, option("Id of the change", "ID")]


class Undo(Request, frozen=True, kw_only=True, tag="undo"):
    """Revert one change of the last 24 hours. `undoes` is its id."""

    undoes: Annotated[Line, option("Id of the change, as printed by its command", "ID")]
    reason: Reason = ""


# --- suspensions ----------------------------------------------------------------------------------------


class Selectors(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The conditions that select mail, including mail that arrives later. All given conditions must match;
    `*` in an address or a domain matches any text. `everything` selects all mail; it is required for that, so
    that a slip cannot stop a relay.
    """

    zone: Annotated[Line | None, option("Zone", "--zone ZONE")] = None
    destination: Annotated[
        Line | None, option("Destination or host, as shown by status", "--destination NAME")
    ] = None
    domain: Annotated[Line | None, option("Recipient domain", "--domain DOMAIN")] = None
    sender: Sender = None
    user: Annotated[Line | None, option("Authenticated user who submitted the mail", "--user NAME")] = None
    recipient: Annotated[Line | None, option("Recipient address", "--recipient ADDRESS")] = None
    everything: Annotated[bool, option("All mail", "--all")] = False


class Suspend(Request, frozen=True, kw_only=True, tag="suspend"):
    """Suspend queued and new mail. It is suspended or held (`effect`) for `seconds`, or until it is resumed.
    A request with the same selectors and the same effect replaces the values of the existing suspension.
    With `refuse`, clients get 421 for such mail.
    """

    about: Selectors
    effect: Annotated[OrderEffect, option("Suspend, or hold each delivery separately")] = "suspend"
    seconds: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None,
        option("Resume automatically after this time, e.g. 2h", "--for TIME", Unit.DURATION),
    ] = None
    refuse: Annotated[bool, option("Reject such mail from clients with 421", "--refuse")] = False
    stop_clock: Annotated[bool, option("Do not count this time towards expiry", "--stop-clock")] = False
    reason: Annotated[Line, option("Reason, shown to other operators", "--reason TEXT")] = ""


class Resume(Request, frozen=True, kw_only=True, tag="resume"):
    """End suspensions and release the mail that they held. These are the suspensions and hold rules with
    exactly these selectors, or the one with this `id`.
    """

    about: Selectors = Selectors()
    id: Annotated[Line, option("Id, as shown by suspend --list", "ORDER")] = ""
    reason: Reason = ""


class Orders(Request, frozen=True, kw_only=True, tag="orders"):
    """List the active suspensions and hold rules."""


# --- the relay ------------------------------------------------------------------------------------------


class Ping(Request, frozen=True, kw_only=True, tag="ping"):
    """Check whether a relay responds."""


class Status(Request, frozen=True, kw_only=True, tag="status"):
    """Show the state of the running relay. The answer has its workers, zones, destinations and problems."""


class Explain(Request, frozen=True, kw_only=True, tag="explain"):
    """Show the route of mail for an address without sending any. Conditions about fields that are not given
    are unknown.
    """

    address: Annotated[Line, option("Recipient, or a domain", "ADDRESS")]
    sender: Annotated[Line, option("Envelope sender", "--from ADDRESS")] = ""
    user: Annotated[Line, option("Authenticated user", "--user NAME")] = ""
    listener: Annotated[Line, option("Listener that the mail arrives at", "--listener ADDRESS")] = ""
    client: Annotated[Line, option("IP address of the client", "--client IP", Unit.IP)] = ""
    certificate: Annotated[
        Line, option("Fingerprint of the client's certificate", "--certificate SHA256", Unit.FINGERPRINT)
    ] = ""
    priority: Annotated[Priority | None, option("Priority (default: the listener's)", "--priority")] = None
    size: Annotated[Size | None, option("Size of the message, e.g. 12 MB", "--size SIZE", Unit.SIZE)] = None
    headers: Annotated[
        tuple[tuple[str, str], ...],
        option('Header field, "Name: value", repeatable', "--header FIELD", Unit.HEADER, max_length=100),
    ] = ()


class Resolve(Request, frozen=True, kw_only=True, tag="resolve"):
    """Find the addresses behind a pseudonym in the queue. With `recent`, the last 8,192 addresses of each
    worker are searched instead, which are in memory after their mail has left the queue.
    """

    pseudonym: Annotated[str, option("Pseudonym from the log", "PSEUDONYM", min_length=1, max_length=4000)]
    recent: Annotated[bool, option("Search the relay's memory instead of the queue", "--recent")] = False
    limit: Annotated[int, option("At most N addresses", ge=1, le=MAX_PAGE)] = 100


class Tail(Request, frozen=True, kw_only=True, tag="tail"):
    """Show mail events as they happen. All given conditions must match. `*` matches any text, except in
    fields that the log replaces with pseudonyms. `address` is any address, a user, a client, a Message-ID or
    a message id.
    """

    address: Annotated[Line, option("Address, user, client, Message-ID or message id", "VALUE")] = ""
    sender: Annotated[Line, option("Messages of this sender, or @DOMAIN", "--from ADDRESS")] = ""
    recipient: Annotated[Line, option("Events of this recipient, or @DOMAIN", "--to ADDRESS")] = ""
    domain: Annotated[Line, option("Events of a recipient domain or destination", "--domain DOMAIN")] = ""
    zone: Annotated[Line, option("In a zone", "--zone NAME")] = ""
    user: Annotated[Line, option("Messages of an authenticated user", "--user NAME")] = ""
    client: Annotated[Line, option("Client's messages and rejected commands", "--client ADDRESS")] = ""
    event: Annotated[Line, option("Events with these names: deferred,bounced", "--event NAMES")] = ""
    message_id: Annotated[OptionalId, option("Events of one message", "--id ID", Unit.MESSAGE_ID)] = ""


class Transcript(Request, frozen=True, kw_only=True, tag="transcript"):
    """Show the protocol lines of sessions as they are sent. These are the sessions of one `client` (an
    address or a network), the connections to one `domain` (a recipient domain, an MX host or a next hop), or
    those for one message. The stream ends after `seconds`, a number of bytes or `sessions`, whichever comes
    first.
    """

    client: Annotated[Line, option("Sessions of a client address or network", "--client ADDRESS")] = ""
    domain: Annotated[Line, option("Connections to a domain, MX host or next hop", "--domain DOMAIN")] = ""
    message_id: Annotated[OptionalId, option("Attempts of one message", "--id ID", Unit.MESSAGE_ID)] = ""
    seconds: Annotated[
        float, option("Stop after this time", "--for TIME", Unit.DURATION, gt=0, le=24 * 3600)
    ] = 300.0
    octets: Annotated[
        int, option("Stop after this amount of text", "--size SIZE", Unit.SIZE, ge=1, le=1_000_000_000)
    ] = 10 * 1024 * 1024
    sessions: Annotated[
        int, option("Stop after this number of sessions", "--sessions N", ge=1, le=10_000)
    ] = 100


class ConfigShow(Request, frozen=True, kw_only=True, tag="config-show"):
    """Show the configuration of the running relay."""

    which: Annotated[ConfigPart, option("Which options")] = "effective"


# --- the history ----------------------------------------------------------------------------------------


class HistoryFind(Request, frozen=True, kw_only=True, tag="history-find"):
    """Find messages in the history, newest last. All given conditions must match; of the matches, the newest
    `limit` are returned. `since` and `until` are Unix seconds. Addresses may be pseudonyms.
    """

    about: Annotated[
        str | None, option("Address, @DOMAIN, Message-ID, id, pseudonym or user", "ADDRESS|MESSAGE-ID|ID")
    ] = None
    sender: Sender = None
    recipient: Annotated[str | None, option("Recipient address", "--recipient ADDRESS")] = None
    client: Annotated[str | None, option("IP address of the client", "--client IP")] = None
    user: Annotated[str | None, option("Authenticated user who submitted the mail", "--user NAME")] = None
    zone: Annotated[str, option("Zone", "--zone ZONE")] = ""
    destination: Annotated[str, option("Destination or host; * matches any text", "--destination NAME")] = ""
    reply: Annotated[str, option("Text in a reply from or to a peer", "--reply TEXT")] = ""
    outcome: Annotated[HistoryOutcome | None, option("Outcome; waiting: not attempted yet", "--outcome")] = (
        None
    )
    since: Annotated[float, option("Only events newer than AGE, e.g. 30m, 2d", "--since AGE", Unit.AGO)] = 0.0
    until: Annotated[float | None, option("Only events older than AGE", "--until AGE", Unit.AGO)] = None
    limit: Annotated[int, option("The newest N", "--limit N", ge=1, le=MAX_PAGE)] = 100


class HistoryShow(Request, frozen=True, kw_only=True, tag="history-show"):
    """Show all recorded events of a message. They are in order of time."""

    message_id: MessageId


# --- the spool and webhooks -----------------------------------------------------------------------------


class SpoolAcknowledge(Request, frozen=True, kw_only=True, tag="spool-acknowledge"):
    """Dismiss a reported spool loss."""

    loss: Annotated[Line, option("Id of the loss, as shown by status", "ID")]


class WebhookList(Request, frozen=True, kw_only=True, tag="webhook-list"):
    """List the webhooks and their queued events."""


class WebhookTest(Request, frozen=True, kw_only=True, tag="webhook-test"):
    """Post a webhook.test event now and print the response."""

    name: Annotated[Line, option("Name of the [[webhook]]", "NAME")]


class WebhookReplay(Request, frozen=True, kw_only=True, tag="webhook-replay"):
    """Retry queued events now, even if the endpoint is disabled. With `since` (a Unix time), events that the
    history has from then on are reported again, too.
    """

    name: Annotated[Line, option("Name of the [[webhook]]", "NAME")]
    since: Annotated[
        float | None, option("Resend the events of this period, e.g. 2h", "--since AGE", Unit.AGO)
    ] = None


# --- between a supervisor and its workers ---------------------------------------------------------------


class PartMetrics(Request, frozen=True, kw_only=True, tag="part-metrics"):
    """Return the metrics of a worker."""


class PartReadiness(Request, frozen=True, kw_only=True, tag="part-readiness"):
    """Return the reasons why a worker does not accept mail."""
