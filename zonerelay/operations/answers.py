"""Defines the responses to operators' requests, which are streams of frames: one JSON object per line.

A client reads frames until `EndFrame` or `ErrorFrame`, and reports a stream that stops without either as
truncated. A list is sent as one frame per delivery, so neither side ever holds a whole queue. Times are Unix
seconds, ages are seconds.

Requests are in `requests.py`; this module has the frames of answers, their encoder and their decoder.
`--json` and `/v1/` return the same frames, so their field names are a public contract: fields may be added,
but never renamed or given another meaning.
"""

import base64
import binascii
import enum
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from zonerelay.config.units import deliveries
from zonerelay.model.delivery import DeliveryKey, DeliveryState, QueueName, bin_of, parse_queue, queue_of
from zonerelay.model.envelope import Mailbox, MessageId, Priority, is_message_id
from zonerelay.operations.errors import ControlError, ErrorKind, InvalidError
from zonerelay.queue.orders.order import OrderFields
from zonerelay.telemetry.events.records import MailEvent, TraceStep, TranscriptLine
from zonerelay.telemetry.metrics.families import Family

MAX_FRAME = 128 * 1024 * 1024
"""Bytes. One frame holds at most one message with all its recipients, of which there may be 100,000."""


# --- parts of frames, under the same contract -----------------------------------------------------------


class ZoneStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one zone: its numbers of deliveries by state."""

    name: str
    ready: int
    active: int
    deferred: int
    held: int
    oldest_seconds: float
    suspended: int = 0
    """An order of an operator keeps them."""


class DestinationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one destination: its queued mail, its rate limit, its suspension and its last reply.

    `active` and `waiting` count deliveries in the scheduler's window. `ready`, `deferred` and `held` count
    deliveries in the whole queue (`RelayStatus.every` describes how they were counted), and `oldest_seconds`
    is the age of the oldest one. `suspended` counts deliveries that an operator has suspended; `ready` and
    `deferred` do not include them.

    `destination` is the MX domain or next hop under which the destination was first seen, and `hosts` are its
    hosts. `next_turn` is set while mail waits for a rate limit: it is the time of the next turn. After
    `turns_seconds`, all ready deliveries have had a turn, if each of them needs a transaction of its own.

    `reply_class` is the class of the last reply (docs/deliver/replies.md). `per_minute` transactions have
    begun in the last minute, of at most `max_rate` ("" means no limit). `max_connections` is 0 if it is not
    known.
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

    @property
    def matters(self) -> bool:
        """Whether the destination has mail or is suspended, so that `status` lists it."""
        mail = self.ready or self.active or self.waiting or self.deferred or self.held or self.suspended
        return bool(mail) or self.suspended_until is not None


def hurts(row: DestinationStatus) -> tuple[object, ...]:
    """Return the key by which `status` sorts destinations: suspended ones first, then the most deferred and
    the oldest mail.
    """
    is_suspended = row.suspended_until is not None or row.suspended > 0
    return (not is_suspended, -row.deferred, -row.oldest_seconds, -row.ready, -row.active, -row.held)


class SummaryRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a queue summary: one value of the property, with its counts of deliveries by age."""

    key: str
    total: int
    ages: tuple[int, ...]


class SourcePenalty(msgspec.Struct, frozen=True, kw_only=True):
    """A source (local IP addresses) that a destination has refused because of its reputation. Until `until`,
    the source, or only its IPv6 address, is not used at the destination, which is named by its hosts.
    """

    source: str
    destination: str
    until: float
    reply: str
    ipv6_only: bool = False


class QuotaStatus(msgspec.Struct, frozen=True):
    """A quota of a user (such as `messages_per_hour`) that is used up or nearly used up."""

    user: str
    quota: str
    used: int
    most: int


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one worker process. `problem` is the reason why its previous process ended, or why the
    worker does not respond.
    """

    worker: int
    pid: int
    state: str
    uptime: float
    restarts: int
    problem: str = ""


class TlsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The TLS requirements for a host. `because` names its origin: "zone", "destination" or "mta-sts". With
    `dane`, hosts that have TLSA records must match them. `names` and `certificates` are accepted instead of
    the host's name.
    """

    mode: str
    because: str
    dane: bool = False
    names: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()


class StsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The MTA-STS policy of a domain, as the relay knows it. `mode` is "" if no policy is known; `problem` is
    the reason if there should be one.
    """

    mode: str = ""
    policy: str = ""
    expires: float | None = None
    mx: tuple[str, ...] = ()
    problem: str = ""


class RewritePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the sender or the recipient (`what`) of a message is rewritten. `by` is the rule that rewrites it:
    `rewrite=2` (rules are counted from 1) or `srs`.

    With a `problem`, RCPT would be refused instead.
    """

    what: str
    by: str
    becomes: str = ""
    problem: str = ""


class ChangePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The changes that a zone makes to a message. `sender` is the sender as SRS rewrites it, or "" if it is
    unchanged. `removed`, `replaced` and `added` are the zone's header rules. `signed_by` lists the DKIM
    signatures for the domain `author`. `unsigned` is the reason why there is none; with `must_sign`, the mail
    waits in that case. `author_assumed` means that no From was given, so that the sender's domain is used.
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
    """An IP address of a host, and the local address of connections to it. The local address is a list
    separated by commas if the choice depends on the message. `problem` is the reason why the address would
    not be used. `learned` lists what the relay does differently there because of the host's earlier
    behaviour.
    """

    address: str
    source: str = ""
    problem: str = ""
    learned: tuple[str, ...] = ()


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One MX host of the domain, or a host of the zone's next hop. `problem` is the reason why it cannot be
    used now.

    `tlsa` has the types of the TLSA records that its certificate must match, such as "3 1 1" (DANE).
    """

    name: str
    port: int
    preference: int
    addresses: tuple[AddressPlan, ...] = ()
    problem: str = ""
    tlsa: tuple[str, ...] = ()


class SourcePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A source of the zone (its IP addresses and EHLO name), and its share of the zone's mail. `chosen` is
    true if this mail would be sent from it; `None` means that this depends on the message. Until
    `refused_until`, the source or its IPv6 address is not used, because the destination has refused it.
    `absent` lists those of its addresses that this machine does not have.
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
    """The result of evaluating one `[[route]]`. Rules are counted from 1. `unmatched` lists the conditions
    that do not hold.
    """

    rule: int
    zone: str
    matches: bool
    unmatched: tuple[str, ...] = ()


# --- frames -----------------------------------------------------------------------------------------


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The base class of the frames of a response. Unknown fields are ignored, so that an older command can
    read a newer relay's answer.
    """


class Pong(_Frame, frozen=True, kw_only=True, tag="pong"):
    """The response to a ping."""

    software: str
    pid: int


class DeliveryRow(_Frame, frozen=True, kw_only=True, tag="delivery"):
    """One delivery: the state of one recipient of one message. `next_attempt` is 0 if the delivery is due
    now; `sender` is "" for `<>`.

    Ages are measured from `created`. If it is in the future, it is the release time that the sender
    requested. In the response about one message, `routed` is the rule that chose the zone at acceptance.
    `new_zone` is the zone that would be chosen for a new message like it, if that is a different one, and
    `new_why` is the rule.
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
    next_turn: float | None = None
    """When a rate allows the next transaction, if it waits for that. After `turns_seconds`, all `waiting`
    deliveries to its destination, which has these `hosts`, have had a turn.
    """
    turns_seconds: float = 0.0
    waiting: int = 0
    hosts: str = ""
    routed: str = ""
    new_zone: str = ""
    new_why: str = ""

    @property
    def queue(self) -> QueueName:
        queue = queue_of(self.zone, Priority(self.priority or Priority.NORMAL))
        return bin_of(queue) if self.state == DeliveryState.DROPPED else queue

    def waits_for(self, turn: DestinationStatus) -> "DeliveryRow":
        """Return the row with the state of the rate limit for which its destination waits."""
        return msgspec.structs.replace(
            self,
            next_turn=turn.next_turn,
            turns_seconds=turn.turns_seconds or 0.0,
            waiting=turn.ready,
            hosts=turn.hosts,
        )


class OrderRow(_Frame, OrderFields, frozen=True, kw_only=True, tag="order"):
    """An active suspension or hold rule that an operator has set. `until` is `None` if it lasts until it is
    resumed. `held` counts the deliveries that it holds individually, and `refused` is how often clients were
    refused because of it; both since the start of the relay.
    """

    held: int = 0
    refused: int = 0


class OrderResult(_Frame, frozen=True, kw_only=True, tag="order-given"):
    """The response to a request for a suspension or hold rule: the active rule. `new` is false if one with
    these selectors already existed. None of the mail that it applies to expires before `first_expiry`;
    `None` means that no mail matches yet.
    """

    order: OrderRow
    new: bool
    first_expiry: float | None = None


class OrdersResult(_Frame, frozen=True, kw_only=True, tag="orders-ended"):
    """The result of a resume: the suspensions and hold rules that ended, and the number of deliveries
    released.
    """

    orders: tuple[OrderRow, ...] = ()
    released: int = 0


class MessageDetail(_Frame, frozen=True, kw_only=True, tag="message"):
    """Everything the relay knows about a stored message except its body."""

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


class MessageBody(_Frame, frozen=True, kw_only=True, tag="body"):
    """The frame before the chunks of a message body, with its `size` in bytes. `zone` is the zone that would
    send the message in this form, from this `sender`; "" means that the message is as it was received.
    """

    message_id: str
    sender: str
    size: int
    zone: str = ""


class BodyPiece(_Frame, frozen=True, kw_only=True, tag="piece"):
    """The next bytes of a message body, in base64. Line ends are CRLF, and dots are not stuffed."""

    octets: bytes


class Summary(_Frame, frozen=True, kw_only=True, tag="summary"):
    """Counts of deliveries by a property, largest first. `minutes` are the bounds between the age groups, so
    each row has one more count than there are bounds. `other` sums up the keys that are not counted
    separately. If `every` is not 1, only one in `every` deliveries was counted and the numbers are estimates.
    """

    by: str
    minutes: tuple[int, ...]
    rows: tuple[SummaryRow, ...]
    other: SummaryRow | None = None
    every: int = 1


def summary_of(
    by: str,
    minutes: tuple[int, ...],
    counts: Mapping[str, Sequence[int]],
    other: Sequence[int],
    *,
    every: int,
    most: int | None = None,
) -> Summary:
    """Build a queue summary from counts by key and age, with at most `most` keys."""
    rows = [SummaryRow(key=key, total=sum(ages), ages=tuple(ages)) for key, ages in counts.items()]
    rows.sort(key=lambda row: (-row.total, row.key))
    others = [other, *(row.ages for row in rows[most:])] if most is not None else [other]
    ages = tuple(map(sum, zip(*others, strict=True)))
    rest = SummaryRow(key="other", total=sum(ages), ages=ages)
    return Summary(
        by=by, minutes=minutes, rows=tuple(rows[:most]), other=rest if rest.total else None, every=every
    )


class Progress(_Frame, frozen=True, kw_only=True, tag="progress"):
    """A report about the progress of an operation. `total` is the number of deliveries at the start, or 0 if
    it is not known.
    """

    done: int
    total: int = 0


class Count(_Frame, frozen=True, kw_only=True, tag="count"):
    """The number of matching deliveries, and the first of them, up to the requested number. `missing` has the
    value of `EndFrame.missing` when the answer is a single document.
    """

    matched: int
    sample: tuple[DeliveryRow, ...] = ()
    missing: tuple[str, ...] = ()


class ChangeResult(_Frame, frozen=True, kw_only=True, tag="changed"):
    """The result of a change to the queue. `busy` deliveries are being attempted, or changed by another
    command, and were not changed.

    `act` is the id of this change. `no_undo` is the reason why it cannot be undone, or "" if it can. `undoes`
    is the id of the change that this one has undone. Of its deliveries, `gone` have left the queue and
    `altered` have been changed by something else since. `note` adds details as text: where the mail goes now,
    and when it is due.
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

    def lines(self, done: str = "") -> Iterator[str]:
        """Yield the result as human-readable sentences. The first has the number of deliveries and the
        participle `done`, such as "held".
        """
        if self.undoes:
            were = "was" if self.changed == 1 else "were"
            yield f"{deliveries(self.changed)} {were} restored to the state before change {self.undoes}."
        else:
            yield f"{deliveries(self.changed)} {' '.join(filter(None, (done, self.note)))}."
        for count, what in (
            (self.gone, "left the queue since"),
            (self.altered, "changed again since and not restored"),
            (self.busy, "being attempted, or changed by another command, and left alone: try again"),
        ):
            if count:
                yield f"{deliveries(count)} {what}."
        if self.undoes and self.note:
            yield f"Note: {self.note}."
        if self.no_undo:
            yield f"Change {self.act} cannot be undone: {self.no_undo}."


class ActRow(_Frame, frozen=True, kw_only=True, tag="act"):
    """A change that an operator made. `what` is its filter as text, and `until` is the time until which it
    can be undone. `no_undo` is the reason why it cannot, or "" if it can. `finished` is false while the
    change runs, or if a crash has interrupted it.
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


class LossDismissal(_Frame, frozen=True, kw_only=True, tag="acknowledged"):
    """The result of dismissing a spool loss, which is no longer reported."""

    loss: str


class ResolvedAddress(_Frame, frozen=True, kw_only=True, tag="address"):
    """An address that was found for a pseudonym. `role` is `sender` or `recipient`."""

    address: str
    role: str
    message_id: str


class RelayStatus(_Frame, frozen=True, kw_only=True, tag="status"):
    """The status of the relay, for `zonerelay status`."""

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
    accepted_per_minute: tuple[int, ...] = ()
    """Messages in each minute of the last hour, or since the start; the minute that runs is the last."""
    delivered_per_minute: tuple[int, ...] = ()
    """Deliveries in each of these minutes."""


class Explanation(_Frame, frozen=True, kw_only=True, tag="explanation"):
    """The route of mail for an address, and the policies that apply.

    With `unroutable`, the mail would get that reply instead, and `verdict` is whether the reply defers or
    bounces it. If `relay_running` is false, the answer was derived from the configuration. `routes` lists the
    evaluated rules, up to the one that matches. `sources` are the sources of the zone, if it has any.
    `ehlo_name` is theirs: several, separated by commas, if the choice depends on the message. `credential`
    describes the credential with which the zone logs in, if it does.

    `tls`, `limits` and `rates` are the ones that apply, and `destination` is the matching [[destination]].
    `address` and `sender` are those of the request. If there is a `rewritten`, everything else describes the
    rewritten addresses. `changes` are the zone's, if it changes anything. `queued` is the delivery, if the
    request was about a message in the queue.
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


class StreamGap(_Frame, frozen=True, kw_only=True, tag="missed"):
    """A gap in a stream, where events were skipped. `count` events (before filtering) or lines are missing
    because the reader is slow; otherwise `why` explains the gap or the end of the stream.
    """

    count: int = 0
    why: str = ""
    worker: int | None = None


class WebhookState(enum.StrEnum):
    """The state of a webhook, from best to worst. `DISABLED` means that the endpoint has responded with 410
    and gets no more events.
    """

    OK = "ok"
    FAILING = "failing"
    DISABLED = "disabled"


class WebhookRow(_Frame, frozen=True, kw_only=True, tag="webhook"):
    """A webhook with its state and its number of queued events. `oldest` is the Unix time of its oldest
    queued event.
    """

    name: str
    state: WebhookState
    queued: int
    oldest: float | None
    delivered: int
    problem: str
    url: str


class WebhookTestResult(_Frame, frozen=True, kw_only=True, tag="webhook-tested"):
    """The endpoint's response to a test event."""

    ok: bool
    text: str


class WebhookReplayResult(_Frame, frozen=True, kw_only=True, tag="webhook-replayed"):
    """The number of a webhook's events that are retried now."""

    queued: int


class MetricFamilies(_Frame, frozen=True, kw_only=True, tag="families"):
    """The metrics of a worker, for its supervisor. They are never printed, so they are not a public
    contract.
    """

    families: tuple[Family, ...]


class UnreadyReasons(_Frame, frozen=True, kw_only=True, tag="reasons"):
    """The reasons why a worker is not ready, for its supervisor; none if it is ready. They are not a public
    contract.
    """

    reasons: tuple[str, ...]


class EndFrame(_Frame, frozen=True, kw_only=True, tag="end"):
    """The last frame of a complete response. `more` is true if a limit cut a list short; `next` is then the
    cursor of the next page, if there are pages. `missing` describes the workers that did not answer and the
    spools that are damaged; the response does not include their mail.
    """

    count: int = 0
    more: bool = False
    missing: tuple[str, ...] = ()
    next: str = ""


class ErrorFrame(_Frame, frozen=True, kw_only=True, tag="problem", omit_defaults=True):
    """The last frame of a failed response; `detail` is a human-readable message."""

    code: ErrorKind
    detail: str
    pointer: str = ""


Frame = (
    Pong | DeliveryRow | OrderRow | OrderResult | OrdersResult | MessageDetail | TraceStep |
    MessageBody | BodyPiece | Summary | Progress | Count | ChangeResult | ActRow | LossDismissal |
    ResolvedAddress | RelayStatus | Explanation | WebhookRow | WebhookTestResult | WebhookReplayResult |
    MailEvent | StreamGap | TranscriptLine | MetricFamilies | UnreadyReasons | EndFrame | ErrorFrame
)  # fmt: skip


# --- lines ------------------------------------------------------------------------------------------

_frame = msgspec.json.Decoder(Frame)
_encoder = msgspec.json.Encoder()


def encode(value: msgspec.Struct) -> bytes:
    return _encoder.encode(value) + b"\n"


def decode_frame(line: bytes) -> Frame:
    """Decode one line of a response to a frame. Raise ControlError if the line is not a frame."""
    try:
        frame: Frame = _frame.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ControlError(f"the response is not valid for this command: {error}") from error
    return frame


class LineSplitter:
    """Splits a stream of bytes into lines of at most `MAX_FRAME` bytes. It holds the one that is not
    complete.
    """

    def __init__(self) -> None:
        self._begun: list[bytes] = []

    def take(self, piece: bytes) -> list[bytes]:
        """Add received bytes, and return the lines that they complete. Raise ControlError if a line is too
        long.
        """
        first, *others = piece.split(b"\n")
        self._begun.append(first)
        if not others:
            if sum(map(len, self._begun)) > MAX_FRAME:
                raise ControlError("the response has a frame that is too long")
            return []
        whole = b"".join(self._begun)
        self._begun = [others.pop()]
        return [whole, *others]


def addresses_in(frame: object) -> list[str]:
    """Return the addresses that a response frame contains."""
    match frame:
        case ResolvedAddress():
            return [frame.address]
        case MessageDetail():
            return [each for each in (frame.sender, frame.user, *frame.recipients) if each]
    return []


def problem_of(error: ControlError) -> ErrorFrame:
    return ErrorFrame(code=error.kind, detail=str(error), pointer=error.pointer)


def cursor_of(row: DeliveryRow) -> str:
    """Return the cursor with which a client requests the rows of a list after this one."""
    return (
        base64.urlsafe_b64encode(_encoder.encode((row.queue.text, row.message_id, row.recipient)))
        .decode()
        .rstrip("=")
    )


def place_of(cursor: str) -> DeliveryKey:
    """Decode a cursor to the position in a list that it represents. Raise InvalidError if the cursor is not
    valid.
    """
    try:
        octets = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        queue, message_id, recipient = msgspec.json.decode(octets, type=tuple[str, str, str])
    except (binascii.Error, msgspec.DecodeError, ValueError):
        raise InvalidError("invalid cursor", pointer="/cursor") from None
    if not is_message_id(message_id):
        raise InvalidError("invalid cursor", pointer="/cursor")
    return DeliveryKey(parse_queue(queue), MessageId(message_id), Mailbox(recipient))
