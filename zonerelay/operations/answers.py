"""The frames that answer operators' requests: one JSON object per line.

A client reads frames until `End` or `Problem`, and reports a stream that stops without either as cut. A list
travels as one frame per delivery, so neither side ever holds a whole queue. Times are Unix seconds, ages are
seconds.

Requests are in `requests.py`; this module has the frames of answers, their encoder and their decoder.
`--json` and `/v1/` give the same frames, so their field names are an outside contract: fields may be added,
never renamed or given another meaning.
"""

from __future__ import annotations

import base64
import binascii
import enum

import msgspec

from zonerelay.model.address import Mailbox
from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.message_id import MessageId, is_message_id
from zonerelay.model.queue_name import Priority, QueueName, parse_queue, queue_of
from zonerelay.operations.errors import ControlError, InvalidError, Kind
from zonerelay.queue.orders.order import OrderFields
from zonerelay.telemetry.metrics.instruments import Family

MAX_FRAME = 16 * 1024 * 1024
"""One frame holds at most one message with all its recipients; this is far above any of them."""


# --- parts of frames, under the same promise ------------------------------------------------------------


class ZoneStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ready: int
    active: int
    deferred: int
    held: int
    oldest_seconds: float
    suspended: int = 0
    """An order of an operator keeps them."""


class DestinationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`active` and `waiting` are deliveries in the scheduler's window. `ready`, `deferred` and `held` are
    those of the whole queue (`RelayStatus.every`: how they were counted), `oldest_seconds` is the age of the
    oldest.

    `destination` is the MX domain or next hop that it was first seen as, `hosts` what it stands for.
    `next_turn`: mail waits for its turn at a rate, and that is when the next one is; after `turns_seconds`
    all that are ready have had theirs, if each has a transaction of its own.

    `suspended` are those that an order of an operator keeps; `ready` and `deferred` are without them.

    `reply_class` is the meaning of the last reply (docs/deliver/replies.md). `per_minute` transactions have
    begun in the last minute, of `max_rate` ("" without one); `max_connections` is 0 where it is not known.
    """

    zone: str
    destination: str
    hosts: str
    active: int
    waiting: int
    suspended_until: float | None = None
    reply: str = ""
    next_turn: float | None = None
    turns_seconds: float | None = None
    reply_class: str = ""
    per_minute: int = 0
    max_rate: str = ""
    max_connections: int = 0
    ready: int = 0
    deferred: int = 0
    held: int = 0
    suspended: int = 0
    oldest_seconds: float = 0.0


def hurts(row: DestinationStatus) -> tuple[object, ...]:
    """The order of `status`: suspended before others, then the most deferred mail, then the oldest."""
    return order_of(
        row.suspended_until,
        row.active,
        ready=row.ready,
        deferred=row.deferred,
        held=row.held,
        suspended=row.suspended,
        oldest_seconds=row.oldest_seconds,
    )


def order_of(
    suspended_until: float | None,
    active: int,
    *,
    ready: int,
    deferred: int,
    held: int,
    suspended: int,
    oldest_seconds: float,
) -> tuple[object, ...]:
    is_suspended = suspended_until is not None or suspended > 0
    return (not is_suspended, -deferred, -oldest_seconds, -ready, -active, -held)


class SummaryRow(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    total: int
    ages: tuple[int, ...]


class SourcePenalty(msgspec.Struct, frozen=True, kw_only=True):
    """A destination (its hosts) has refused a source for its reputation: it is passed over there `until`, or
    its IPv6 alone.
    """

    source: str
    destination: str
    until: float
    reply: str
    ipv6_only: bool = False


class QuotaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A quota of a user (`messages_per_hour`) that is nearly used up, or is."""

    user: str
    quota: str
    used: int
    most: int


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One of several workers. `problem`: why the one before it ended, or this one does not answer."""

    worker: int
    pid: int
    state: str
    uptime: float
    restarts: int
    problem: str = ""


class TlsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`because` is who says so: "zone", "destination" or "mta-sts". `dane`: hosts with TLSA records are held
    to them. `names` and `certificates` are accepted instead of the host's name.
    """

    mode: str
    because: str
    dane: bool = False
    names: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()


class StsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The domain's MTA-STS policy. `mode` is "" when none is held; `problem` says why, where there should be
    one.
    """

    mode: str = ""
    policy: str = ""
    expires: float | None = None
    mx: tuple[str, ...] = ()
    problem: str = ""


class RewritePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the `sender` or the `recipient` becomes, and `by` what: `rewrite=2` (they count from 1) or `srs`.

    `problem`: RCPT would be refused instead.
    """

    what: str
    by: str
    becomes: str = ""
    problem: str = ""


class ChangePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the zone changes. `sender` is what SRS makes of it, "" where it stays; `removed`, `replaced` and
    `added` are its rules. `signed_by` are the signatures for the domain `author`, `unsigned` is why there is
    none, and with `must_sign` mail waits then. `author_assumed`: no From was given, the sender's domain is
    taken for it.
    """

    sender: str = ""
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    author: str = ""
    author_assumed: bool = False
    signed_by: tuple[str, ...] = ()
    unsigned: str = ""
    must_sign: bool = False


class AddressPlan(msgspec.Struct, frozen=True, kw_only=True):
    """An IP address of a host, and ours that packets to it leave from: several, with commas between, where
    that depends on the message. `problem`: it would not be used. `learned`: what the relay does differently
    there because of what the host has done.
    """

    address: str
    source: str = ""
    problem: str = ""
    learned: tuple[str, ...] = ()


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One MX host, or the next hop. `problem` says why it cannot be used now.

    `tlsa`: the kinds of its TLSA records that its certificate must match, as "3 1 1" (DANE).
    """

    name: str
    port: int
    preference: int
    addresses: tuple[AddressPlan, ...] = ()
    problem: str = ""
    tlsa: tuple[str, ...] = ()


class SourcePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A source of the zone and its share of the mail. `chosen`: the mail would go out from it; `None` when
    that depends on the message. `refused_until`: the destination has refused it; it, or its IPv6, is passed
    over. `absent`: those of its addresses that this machine has not got.
    """

    name: str
    addresses: tuple[str, ...]
    ehlo_name: str
    share: float
    chosen: bool | None = None
    refused_until: float | None = None
    refused_reply: str = ""
    refused_ipv6_only: bool = False
    absent: tuple[str, ...] = ()


class RouteCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What a `[[route]]` says; they count from 1. `unmatched` are the conditions that do not hold."""

    rule: int
    zone: str
    matches: bool
    unmatched: tuple[str, ...] = ()


# --- frames -----------------------------------------------------------------------------------------


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """A line of an answer. Unknown fields are ignored, so that an older command reads a newer relay."""


class Pong(_Frame, frozen=True, kw_only=True, tag="pong"):
    software: str
    pid: int


class DeliveryRow(_Frame, frozen=True, kw_only=True, tag="delivery"):
    """One recipient of one message. `next_attempt` is 0 when it is due now; `sender` is "" for `<>`.

    `created` is what ages count from; in the future, it is the release that the sender asked for.
    One message's also have `routed`, what chose the zone at acceptance, and `new_zone`, where a new message
    like it would go now, if that is another, with `new_why`.
    """

    message_id: str
    zone: str
    sender: str | None
    recipient: str
    domain: str
    state: str
    created: float
    attempts: int
    next_attempt: float
    size: int | None = None
    reply: str = ""
    host: str = ""
    peer: str = ""
    last_attempt: float | None = None
    in_doubt: bool = False
    priority: str = ""
    order: str = ""
    """The id of the order that it waits for."""
    phase: str = ""
    """What its attempt waits for; `phase_seconds`: how long that can still take, 0 if it is not known."""
    phase_seconds: float = 0.0
    routed: str = ""
    new_zone: str = ""
    new_why: str = ""

    @property
    def queue(self) -> QueueName:
        return queue_of(self.zone, Priority(self.priority or Priority.NORMAL))


class OrderRow(_Frame, OrderFields, frozen=True, kw_only=True, tag="order"):
    """An order of an operator in force. `until` `None`: until it is resumed. `held` are the deliveries that
    it holds by itself, `refused` what clients were refused for it; both since the start of the relay.
    """

    held: int = 0
    refused: int = 0


class OrderGiven(_Frame, frozen=True, kw_only=True, tag="order-given"):
    """The order is in force. `new`: there was none with these selectors. `first_expiry`: no mail that it is
    about is too old before this; `None`: there is none yet.
    """

    order: OrderRow
    new: bool
    first_expiry: float | None = None


class OrdersEnded(_Frame, frozen=True, kw_only=True, tag="orders-ended"):
    """These orders are over, none if there was none; so many deliveries that they held were released."""

    orders: tuple[OrderRow, ...] = ()
    released: int = 0


class MessageDetail(_Frame, frozen=True, kw_only=True, tag="message"):
    """Everything the relay knows about a stored message but its body."""

    message_id: str
    created: float
    sender: str
    size: int
    chunks: int
    body: str
    smtputf8: bool
    envid: str
    client: str
    helo: str
    protocol: str
    listener: str
    user: str
    tls: str
    recipients_accepted: int
    headers: tuple[tuple[str, str], ...]
    deliveries: tuple[DeliveryRow, ...]
    orders: tuple[OrderRow, ...] = ()
    """Those that some of the deliveries wait for."""
    recipients: tuple[str, ...] = ()
    """All of the envelope, in its order."""
    require_tls: bool = False


class TraceStep(_Frame, frozen=True, kw_only=True, tag="step"):
    """One thing that happened, or is going to: `at` is Unix seconds; `recipient` "" concerns them all."""

    at: float
    event: str
    recipient: str = ""
    text: str = ""


class MessageBody(_Frame, frozen=True, kw_only=True, tag="body"):
    """Before the pieces of a body: its `size` in octets. `zone` is the one that would send it so, from this
    `sender`; "": it is as it was received.
    """

    message_id: str
    sender: str
    size: int
    zone: str = ""


class BodyPiece(_Frame, frozen=True, kw_only=True, tag="piece"):
    """The next octets of a body, in base64. Line ends are CRLF, dots are not stuffed."""

    octets: bytes


class Summary(_Frame, frozen=True, kw_only=True, tag="summary"):
    """Deliveries by a property, the most first. `minutes` are the bounds of the ages: each row has one more
    count than there are. `other` are those beyond the keys that are counted. `every`: one delivery in so many
    was looked at, and the figures are estimates, if it is not 1.
    """

    by: str
    minutes: tuple[int, ...]
    rows: tuple[SummaryRow, ...]
    other: SummaryRow | None = None
    every: int = 1


class Progress(_Frame, frozen=True, kw_only=True, tag="progress"):
    """Still working. `total` is what the queue held at the start, 0 when that is not known."""

    done: int
    total: int = 0


class Count(_Frame, frozen=True, kw_only=True, tag="count"):
    """How many deliveries match, and the first of them, as many as were asked for. `missing` is that of
    `End`, where there is one document.
    """

    matched: int
    sample: tuple[DeliveryRow, ...] = ()
    missing: tuple[str, ...] = ()


class Changed(_Frame, frozen=True, kw_only=True, tag="changed"):
    """`busy` deliveries are on their way at this moment, so they were left alone.

    `act` is the id of this act. `no_undo`: why it cannot be undone, "" if it can. `undoes` is the act that
    this one has undone: of its deliveries, `gone` have left the queue and `altered` were changed since by
    something else. `note` says the rest in words: where the mail goes now, when it is due.
    """

    action: str
    matched: int
    changed: int
    busy: int
    act: str = ""
    no_undo: str = ""
    undoes: str = ""
    gone: int = 0
    altered: int = 0
    note: str = ""


class ActRow(_Frame, frozen=True, kw_only=True, tag="act"):
    """An act of an operator. `what` is its filter in words, `until` how long it can be undone. `no_undo`: why
    it cannot, "" if it can. `finished` false: it runs, or a crash has ended it.
    """

    act: str
    at: float
    action: str
    who: str
    what: str
    reason: str
    changed: int
    until: float
    finished: bool = True
    no_undo: str = ""
    undoes: str = ""
    undone_by: str = ""


class Acknowledged(_Frame, frozen=True, kw_only=True, tag="acknowledged"):
    """The loss of a spool is told no more."""

    loss: str


class Address(_Frame, frozen=True, kw_only=True, tag="address"):
    """An address behind a pseudonym. `role` is `sender` or `recipient`."""

    address: str
    role: str
    message_id: str


class RelayStatus(_Frame, frozen=True, kw_only=True, tag="status"):
    software: str
    pid: int
    hostname: str
    backend: str
    uptime: float
    state: str
    listeners: tuple[str, ...]
    inbound_connections: int
    zones: tuple[ZoneStatus, ...]
    destinations: tuple[DestinationStatus, ...]
    destinations_total: int
    problems: tuple[str, ...] = ()
    source_penalties: tuple[SourcePenalty, ...] = ()
    limits: str = ""
    workers: tuple[WorkerStatus, ...] = ()
    counted: bool = True
    """False: what was found at the start is still being counted, and the figures of `zones` are too low."""
    guard: str = ""
    """Below how much free space new mail is refused, where the configuration says less."""
    every: int = 1
    """Of the queue one delivery in so many was looked at for `destinations`; 0: that is not done yet."""
    free_space: int | None = None
    """Octets where the spool is, the least of several places. None: the queue is elsewhere."""
    name_servers: str = ""
    """In words, with the outage if there is one."""
    history_size: int | None = None
    """Octets, of all workers. None: no history is kept."""
    captured_messages: int | None = None
    """Captured mail that is kept. None: none was ever captured."""
    captured_size: int | None = None
    """Octets."""
    history_since: float | None = None
    """When its oldest event was, as far as is known."""
    taken_up: float = 0.0
    """When the configuration in force was taken up, at the start or by a reload."""
    refused: float | None = None
    """When a reload was refused, if none has been taken up since; `problems` has the reason."""
    orders: tuple[OrderRow, ...] = ()
    """Those in force."""
    quotas: tuple[QuotaStatus, ...] = ()
    """Of users who have sent lately."""


class Explanation(_Frame, frozen=True, kw_only=True, tag="explanation"):
    """Where mail would go and under which policy. With `unroutable` it would get that reply instead, and
    `verdict` says whether that defers or bounces it. `relay_running` false: read from the configuration.
    `routes` are those that were asked, up to the one that matches. `sources` are the zone's, if it has any;
    `ehlo_name` is theirs, several with commas between where that depends on the message. `credential` is the
    one that the zone logs in with, if it does, in words.
    `tls`, `limits` and `rates` are those in force, `destination` is the [[destination]] that was met.
    `address` and `sender` are as asked about; with `rewritten`, all else is about what they become.
    `changes` are the zone's, if it changes anything. `queued` is the delivery, where a message of the queue
    was asked about.
    """

    address: str
    sender: str
    domain: str
    zone: str
    rule: int
    reason: str
    next_hop: str
    route: str
    hosts: tuple[HostPlan, ...]
    unroutable: str
    verdict: str
    tls: str
    ehlo_name: str
    limits: dict[str, int]
    suspended_until: float | None = None
    suspended_reply: str = ""
    relay_running: bool = True
    routes: tuple[RouteCheck, ...] = ()
    sources: tuple[SourcePlan, ...] = ()
    credential: str = ""
    destination: str = ""
    tls_demand: TlsPlan | None = None
    mta_sts: StsPlan | None = None
    rates: dict[str, str] = {}
    rewritten: tuple[RewritePlan, ...] = ()
    changes: ChangePlan | None = None
    priority: str = ""
    orders: tuple[OrderRow, ...] = ()
    """Those for which it would wait, or be refused."""
    guard_rails: str = ""
    """What those of the user make of it, in words."""
    queued: DeliveryRow | None = None


class MailEvent(_Frame, frozen=True, kw_only=True, tag="event"):
    """An event, with the fields of its line in the log: addresses are pseudonyms there unless
    `[log] redact = false`. `worker` is set where there are several.
    """

    at: float
    event: str
    level: str = "info"
    fields: dict[str, str | int | float | bool | None] = {}
    worker: int | None = None


class Missed(_Frame, frozen=True, kw_only=True, tag="missed"):
    """Of a stream, so many are missing here, because the reader is slow: events before they are filtered, or
    lines. Or `why` there is a gap or an end, in words.
    """

    count: int = 0
    why: str = ""
    worker: int | None = None


class TranscriptLine(_Frame, frozen=True, kw_only=True, tag="line"):
    """A line of a session, without its line end. `direction` is "received" or "sent" by the relay, or "note"
    for what is no line: the octets of a body, a handshake, what was left out. `session` counts from 1 at
    each worker; `side` is "inbound" or "outbound", `peer` the address at the other end.
    """

    at: float
    session: int
    side: str
    peer: str
    direction: str
    text: str
    worker: int | None = None


class WebhookState(enum.StrEnum):
    """From the best to the worst; `DISABLED`: the endpoint has answered 410 and gets no more events."""

    OK = "ok"
    FAILING = "failing"
    DISABLED = "disabled"


class WebhookRow(_Frame, frozen=True, kw_only=True, tag="webhook"):
    """A webhook; `oldest` is Unix time."""

    name: str
    url: str
    state: WebhookState
    problem: str
    queued: int
    oldest: float | None
    delivered: int


class WebhookTested(_Frame, frozen=True, kw_only=True, tag="webhook-tested"):
    """What the endpoint has answered."""

    ok: bool
    text: str


class WebhookReplayed(_Frame, frozen=True, kw_only=True, tag="webhook-replayed"):
    """How many events wait for the endpoint now."""

    queued: int


class Families(_Frame, frozen=True, kw_only=True, tag="families"):
    """The metrics of a worker, for its supervisor. Never printed, so no outside contract."""

    families: tuple[Family, ...]


class Reasons(_Frame, frozen=True, kw_only=True, tag="reasons"):
    """A worker's reasons against being ready, for its supervisor; none is good. No outside contract."""

    reasons: tuple[str, ...]


class End(_Frame, frozen=True, kw_only=True, tag="end"):
    """The answer is complete. `more` is true when a limit cut a list short, and `next` is the cursor of the
    rest, if it can be asked for. `missing` names, in words, the workers that did not answer, and spools that
    are damaged: what they have is not in it.
    """

    count: int = 0
    more: bool = False
    missing: tuple[str, ...] = ()
    next: str = ""


class Problem(_Frame, frozen=True, kw_only=True, tag="problem", omit_defaults=True):
    """The request failed; `detail` is for a person."""

    code: Kind
    detail: str
    pointer: str = ""


Frame = (
    Pong | DeliveryRow | OrderRow | OrderGiven | OrdersEnded | MessageDetail | TraceStep |
    MessageBody | BodyPiece | Summary | Progress | Count | Changed | ActRow | Acknowledged | Address |
    RelayStatus | Explanation | WebhookRow | WebhookTested | WebhookReplayed | MailEvent | Missed |
    TranscriptLine | Families | Reasons | End | Problem
)  # fmt: skip


# --- lines ------------------------------------------------------------------------------------------

_frame = msgspec.json.Decoder(Frame)
_encoder = msgspec.json.Encoder()


def encode(value: msgspec.Struct) -> bytes:
    return _encoder.encode(value) + b"\n"


def decode_frame(line: bytes) -> Frame:
    """Raises ControlError when the line is no frame."""
    try:
        frame: Frame = _frame.decode(line)
    except msgspec.DecodeError as error:
        raise ControlError(f"not an answer that this command understands: {error}") from error
    return frame


def problem_of(error: ControlError) -> Problem:
    return Problem(code=error.kind, detail=str(error), pointer=error.pointer)


def cursor_of(row: DeliveryRow) -> str:
    """Return the place behind this row, for the next page of a list."""
    return (
        base64.urlsafe_b64encode(_encoder.encode((row.queue.text, row.message_id, row.recipient)))
        .decode()
        .rstrip("=")
    )


def place_of(cursor: str) -> DeliveryKey:
    """Return the place that `cursor_of` has named. Raises InvalidError."""
    try:
        octets = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        queue, message_id, recipient = msgspec.json.decode(octets, type=tuple[str, str, str])
    except (binascii.Error, msgspec.DecodeError, ValueError):
        raise InvalidError("this is no cursor of a page", pointer="/cursor") from None
    if not is_message_id(message_id):
        raise InvalidError("this is no cursor of a page", pointer="/cursor")
    return DeliveryKey(parse_queue(queue), MessageId(message_id), Mailbox(recipient))
