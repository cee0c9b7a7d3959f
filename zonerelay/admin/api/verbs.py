"""The verbs of `/v1/`: a table of methods, paths, scopes and structs, and what each asks of the relay.

Parameters and bodies are structs, checked before a verb sees them; answers are frames of `operations`,
in a struct of their own where several make one answer. `openapi` describes this table and no other.
"""

from __future__ import annotations

import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from aiohttp import web

from zonerelay.admin.api.problems import Problem, wrong
from zonerelay.admin.operators import Operators
from zonerelay.config import toml_text
from zonerelay.config.credentials.identities import Scope, Token
from zonerelay.config.problems import Report
from zonerelay.control.history import Found, TimeLine, Wanted, ask, became, search, time_line
from zonerelay.model.delivery import DeliveryState
from zonerelay.model.priority import Priority
from zonerelay.operations import answers, requests
from zonerelay.operations.catalogue import Call as asked  # noqa: N813
from zonerelay.operations.errors import ControlError, NotFoundError
from zonerelay.process.threads import OPERATORS
from zonerelay.telemetry.logs.address_forms import SearchError

MAX_PAGE = 1000
BEAT = 0.25
QUIET_BEATS = 60
"""An event stream has a sign of life after so many quiet beats, of so many seconds."""

MessageIdText = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
Line = Annotated[str, msgspec.Meta(max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]


F = TypeVar("F")

# --- parameters and bodies ------------------------------------------------------------------------------


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No parameters."""


class Which(requests.Filter, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which deliveries. Everything given must match; `*` in the text fields matches any text. Ages are in
    seconds.
    """

    priority: Priority | None = None
    state: DeliveryState | None = None
    message_id: MessageIdText | None = None

    def filter(self) -> requests.Filter:
        return requests.Filter(**{name: getattr(self, name) for name in requests.Filter.__struct_fields__})


class ListQuery(Which, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = 100
    cursor: Annotated[str, msgspec.Meta(max_length=2000)] = ""


class SummaryQuery(Which, frozen=True, kw_only=True, forbid_unknown_fields=True):
    by: requests.SummaryBy = "domain"
    exact: bool = False


class BodyQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    as_sent: bool = False
    zone: str = ""


class ResolveQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pseudonym: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]


class ConfigQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    which: Literal["effective", "changed", "defaults"] = "effective"


class ActsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = 100


class TailQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything given must match; `*` matches any text. `address` is any address, or a Message-ID."""

    address: Line = ""
    sender: Line = ""
    recipient: Line = ""
    domain: Line = ""
    zone: Line = ""
    user: Line = ""
    client: Line = ""
    event: Line = ""
    message_id: MessageIdText | None = None


class TranscriptQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `client` (an address or a network), `domain` and `message_id`. It ends after `seconds`."""

    client: Line = ""
    domain: Line = ""
    message_id: MessageIdText | None = None
    seconds: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 300.0


class ChangeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`everything` is needed where the filter is empty. With `dry_run` nothing is changed, and the answer is
    a Preview with the first `sample`.
    """

    filter: Which = Which()
    everything: bool = False
    reason: Line = ""
    dry_run: bool = False
    sample: Annotated[int, msgspec.Meta(ge=0, le=100)] = 5


class RetryBody(ChangeBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`at`: due then, in Unix seconds, instead of now."""

    at: Annotated[float, msgspec.Meta(ge=0, le=1e11)] | None = None


class RerouteBody(ChangeBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `to_zone`, `next_hop` (one that a zone of the configuration names) and `ask_again` (the zone
    that the routes choose now).
    """

    to_zone: Line = ""
    next_hop: Line = ""
    ask_again: bool = False


class UndoBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: Line = ""


class SuspendBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An order about mail that is there and mail to come, for so many `seconds`, 0 for until it is ended."""

    about: requests.Selectors
    effect: Literal["suspend", "hold"] = "suspend"
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    refuse: bool = False
    stop_clock: bool = False
    reason: Line = ""


class ResumeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ends the orders with exactly these selectors, or the one with this `id`."""

    about: requests.Selectors = requests.Selectors()
    id: Line = ""
    reason: Line = ""


class ExplainBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is not given is unknown. `headers` are names and values."""

    address: Line
    sender: Line = ""
    user: Line = ""
    listener: Line = ""
    client: Line = ""
    certificate: Line = ""
    priority: Priority | None = None
    size: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    headers: Annotated[tuple[tuple[str, str], ...], msgspec.Meta(max_length=100)] = ()


class AcknowledgeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    loss: Line


# --- answers of several frames --------------------------------------------------------------------------


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """`next` is the cursor of the next page, `null` behind the last one. `missing` says what is not in it."""

    deliveries: tuple[answers.DeliveryRow, ...]
    next: str | None
    missing: tuple[str, ...] = ()


class Preview(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="preview"):
    """What a change would be about."""

    matched: int
    sample: tuple[answers.DeliveryRow, ...]
    missing: tuple[str, ...] = ()


class ChangedAll(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="done"):
    """What a change did. `missing` names the workers that were not reached: what they have is as before."""

    changed: answers.Changed
    missing: tuple[str, ...] = ()


class Summed(msgspec.Struct, frozen=True, kw_only=True):
    summary: answers.Summary
    missing: tuple[str, ...] = ()


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    addresses: tuple[answers.Address, ...]
    more: bool
    missing: tuple[str, ...] = ()


class OrdersActive(msgspec.Struct, frozen=True, kw_only=True):
    orders: tuple[answers.OrderRow, ...]
    missing: tuple[str, ...] = ()


class ActsDone(msgspec.Struct, frozen=True, kw_only=True):
    acts: tuple[answers.ActRow, ...]
    missing: tuple[str, ...] = ()


# --- the table ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """One request, checked. `parameters` and `body` are of the verb's structs, `path` has its segments."""

    operators: Operators
    token: Token
    request: web.Request
    path: Mapping[str, str]
    parameters: Any
    body: Any

    @property
    def caller(self) -> str:
        return f"token {self.token.name}"

    async def one(self, request: requests.Request, answer: type[F]) -> F:
        """Returns the one frame that answers. Raises ControlError."""
        return await self.operators.asking.one(request, answer, self.caller)

    async def all(self, request: requests.Request, answer: type[F]) -> tuple[tuple[F, ...], answers.End]:
        """Returns the frames of one kind, and the end. Raises ControlError."""
        return await self.operators.asking.all(request, answer, self.caller)


Run = Callable[["Call"], Awaitable["Answer"]]
Answer = msgspec.Struct | dict[str, object] | web.StreamResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """`refusal` is the status of a request that the relay understands and cannot carry out."""

    method: str
    path: str
    scope: Scope
    summary: str
    run: Callable[[Call], Awaitable[Answer]]
    answer: object
    parameters: type[msgspec.Struct] = Nothing
    body: type[msgspec.Struct] | None = None
    media: str = "application/json"
    refusal: int = 503
    also: Scope | None = None
    """Another scope that is enough."""
    streams: Mapping[str, object] | None = None
    """`run` reads the body itself, as it comes: media types and what the description says of them."""
    success: int = 200
    audited: bool = False
    """The log tells of it by name: acts, orders and bodies have events of their own."""


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    """What of a body or of parameters is for the request; the rest has its default there."""
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}


async def _status(call: Call) -> Answer:
    return await call.one(requests.Status(), answers.RelayStatus)


async def _list(call: Call) -> Answer:
    wanted: ListQuery = call.parameters
    request = requests.QueueList(filter=wanted.filter(), limit=wanted.limit, cursor=wanted.cursor)
    rows, end = await call.all(request, answers.DeliveryRow)
    return Page(deliveries=rows, next=end.next or None, missing=end.missing)


async def _count(call: Call) -> Answer:
    return await _preview(call, call.parameters.filter(), 0)


async def _preview(call: Call, wanted: requests.Filter, sample: int) -> Preview:
    (found,), end = await call.all(requests.QueueCount(filter=wanted, sample=sample), answers.Count)
    return Preview(matched=found.matched, sample=found.sample, missing=end.missing)


async def _summary(call: Call) -> Answer:
    wanted: SummaryQuery = call.parameters
    request = requests.QueueSummary(by=wanted.by, filter=wanted.filter(), exact=wanted.exact)
    (summary,), end = await call.all(request, answers.Summary)
    return Summed(summary=summary, missing=end.missing)


async def _show(call: Call) -> Answer:
    message_id = call.path["message_id"]
    try:
        return await call.one(requests.QueueShow(message_id=message_id), answers.MessageDetail)
    except NotFoundError:
        settings, now = call.operators.settings(), call.operators.clock.now()
        if told := await ask(became, settings, message_id, now):
            raise NotFoundError(f"{told}; GET /v1/history/{message_id} has its time line") from None
        raise


async def _body(call: Call) -> Answer:
    message_id = call.path["message_id"]
    fields = {
        "Content-Type": "message/rfc822",
        "Content-Disposition": f'attachment; filename="{message_id}.eml"',
        "Content-Security-Policy": "sandbox",
    }
    if call.request.method == "HEAD":  # which reads nothing, so that nothing is to be audited
        await call.one(requests.QueueShow(message_id=message_id), answers.MessageDetail)
        return web.Response(headers=fields)
    wanted: BodyQuery = call.parameters
    request = requests.QueueCat(message_id=message_id, as_sent=wanted.as_sent, zone=wanted.zone)
    response = web.StreamResponse(headers=fields)
    async with aclosing(call.operators.asking.frames(asked(request=request, caller=call.caller))) as frames:
        async for frame in frames:
            if isinstance(frame, answers.MessageBody):
                await response.prepare(call.request)
            elif isinstance(frame, answers.BodyPiece):
                await response.write(frame.octets)
    await response.write_eof()
    return response


def _change(action: requests.ChangeVerb) -> Callable[[Call], Awaitable[Answer]]:
    async def run(call: Call) -> Answer:
        body: ChangeBody = call.body
        wanted = body.filter.filter()
        if body.dry_run:
            return await _preview(call, wanted, body.sample)
        more = {
            name: getattr(body, name)
            for name in ("at", "to_zone", "next_hop", "ask_again")
            if hasattr(body, name)
        }
        request = requests.CHANGES[action](
            filter=wanted,
            everything=body.everything,
            reason=body.reason,
            **more,
        )
        return await _changed(call, request)

    return run


async def _changed(call: Call, request: requests.QueueChange | requests.Undo) -> Answer:
    (changed,), end = await call.all(request, answers.Changed)
    return ChangedAll(changed=changed, missing=end.missing)


async def _acts(call: Call) -> Answer:
    acts, end = await call.all(requests.Acts(limit=call.parameters.limit), answers.ActRow)
    return ActsDone(acts=acts, missing=end.missing)


async def _act(call: Call) -> Answer:
    return await call.one(requests.ActShow(act=call.path["act"]), answers.ActRow)


async def _undo(call: Call) -> Answer:
    return await _changed(call, requests.Undo(undoes=call.path["act"], reason=call.body.reason))


async def _orders(call: Call) -> Answer:
    rows, end = await call.all(requests.Orders(), answers.OrderRow)
    return OrdersActive(orders=rows, missing=end.missing)


async def _suspend(call: Call) -> Answer:
    body: SuspendBody = call.body
    if body.about == requests.Selectors():
        raise wrong("/about", "nothing is selected, and not everything either: which mail?")
    return await call.one(requests.Suspend(**_given(body)), answers.OrderGiven)


async def _resume(call: Call) -> Answer:
    body: ResumeBody = call.body
    if body.about == requests.Selectors() and not body.id:
        raise wrong("/about", "neither selectors nor an id: which orders?")
    return await call.one(
        requests.Resume(about=body.about, id=body.id, reason=body.reason),
        answers.OrdersEnded,
    )


async def _explain(call: Call) -> Answer:
    body: ExplainBody = call.body
    return await call.one(requests.Explain(**_given(body)), answers.Explanation)


async def _resolve(call: Call) -> Answer:
    found, end = await call.all(requests.Resolve(pseudonym=call.parameters.pseudonym), answers.Address)
    return Resolved(addresses=found, more=end.more, missing=end.missing)


async def _acknowledge(call: Call) -> Answer:
    return await call.one(requests.SpoolAcknowledge(loss=call.body.loss), answers.Acknowledged)


async def _find(call: Call) -> Answer:
    try:
        now = call.operators.clock.now()
        return await ask(search, call.operators.settings(), call.parameters, now)
    except SearchError as error:
        raise Problem(422, "invalid", str(error)) from error


async def _time_line(call: Call) -> Answer:
    message_id, now = call.path["message_id"], call.operators.clock.now()
    with suppress(
        ControlError
    ):  # the relay writes the last events down before it says that it has no such mail
        await call.one(requests.QueueShow(message_id=message_id), answers.MessageDetail)
    return await ask(time_line, call.operators.settings(), message_id, now)


async def _config(call: Call) -> Answer:
    def document() -> str:
        settings = call.operators.settings()
        match call.parameters.which:
            case "defaults":
                return toml_text.defaults()
            case "changed":
                return toml_text.changed(settings, Report({}))
        return toml_text.effective(settings, Report({}))

    return tomllib.loads(await OPERATORS.run(document))


async def _tail(call: Call) -> Answer:
    return await _follow(call, requests.Tail(**_given(call.parameters)))


async def _transcript(call: Call) -> Answer:
    return await _follow(call, requests.Transcript(**_given(call.parameters)))


async def _follow(call: Call, request: requests.Tail | requests.Transcript) -> Answer:
    """Ends with the relay, with its client, and with its token."""
    fields = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
    if call.request.method == "HEAD":
        return web.Response(headers=fields)
    response = web.StreamResponse(headers=fields)
    operators = call.operators
    async with operators.streams.one_more(call.token, lambda: operators.is_valid(call.token)):
        frames = operators.asking.frames(asked(request=request, caller=call.caller), beat=BEAT)
        async with aclosing(frames):
            await _stream(call, response, frames)
    response.force_close()
    return response


async def _stream(call: Call, response: web.StreamResponse, frames: AsyncIterator[answers.Frame]) -> None:
    quiet = 0
    async for frame in frames:
        if not response.prepared:  # from here on an error can be told in the stream alone
            await response.prepare(call.request)
            await response.write(b": zonerelay\n\n")
        if not isinstance(frame, answers.Progress):
            await response.write(b"event: %b\ndata: %b\n\n" % (_kind(frame), msgspec.json.encode(frame)))
            continue
        quiet += 1
        if quiet % QUIET_BEATS == 0:
            await response.write(b": still here\n\n")


def _kind(frame: answers.Frame) -> bytes:
    return str(frame.__struct_config__.tag).encode("ascii")


_MESSAGE = "/v1/queue/messages/{message_id}"
_CHANGES: tuple[tuple[requests.ChangeVerb, str, type[ChangeBody]], ...] = (
    ("retry", "Try deliveries again now, or at a time.", RetryBody),
    ("hold", "Keep deliveries in the queue until they are released.", ChangeBody),
    ("release", "Let held deliveries go on.", ChangeBody),
    ("reroute", "Move deliveries to another zone, or to another next hop.", RerouteBody),
    ("bounce", "Give deliveries up and report to their senders.", ChangeBody),
    ("drop", "Remove deliveries for good, without a report.", ChangeBody),
)


def _get(path: str, summary: str, run: Run, answer: object, **more: Any) -> Verb:
    given = {"scope": "read", **more}
    return Verb(method="GET", path=path, summary=summary, run=run, answer=answer, **given)


def _post(path: str, summary: str, run: Run, answer: object, body: type[msgspec.Struct], **more: Any) -> Verb:
    given = {"scope": "operate", "refusal": 409, **more}
    return Verb(method="POST", path=path, summary=summary, run=run, answer=answer, body=body, **given)


VERBS: tuple[Verb, ...] = (
    _get("/v1/status", "What the relay is doing.", _status, answers.RelayStatus),
    _get(
        "/v1/queue",
        "Deliveries, a page at a time, zone by zone, the oldest message first.",
        _list,
        Page,
        parameters=ListQuery,
    ),
    _get("/v1/queue/count", "How many deliveries match.", _count, Preview, parameters=Which),
    _get(
        "/v1/queue/summary", "Deliveries by a property and by age.", _summary, Summed, parameters=SummaryQuery
    ),
    _get(_MESSAGE, "One message with its open deliveries.", _show, answers.MessageDetail),
    _get(
        f"{_MESSAGE}/body",
        "The octets of one message, as received or as its zone sends them. The log tells of it.",
        _body,
        None,
        parameters=BodyQuery,
        media="message/rfc822",
        scope="operate",
        refusal=409,
    ),
    *(
        _post(f"/v1/queue/{name}", summary, _change(name), ChangedAll | Preview, body)
        for name, summary, body in _CHANGES
    ),
    _get("/v1/acts", "What operators did, the last first.", _acts, ActsDone, parameters=ActsQuery),
    _get("/v1/acts/{act}", "One act of an operator.", _act, answers.ActRow),
    _post("/v1/acts/{act}/undo", "Revert what an act changed.", _undo, ChangedAll, UndoBody),
    _get("/v1/orders", "Suspensions and hold rules in force.", _orders, OrdersActive),
    _post("/v1/suspend", "Suspend mail, or hold what comes.", _suspend, answers.OrderGiven, SuspendBody),
    _post("/v1/resume", "End a suspension or a hold rule.", _resume, answers.OrdersEnded, ResumeBody),
    _post(
        "/v1/explain",
        "How mail for an address would travel; nothing is sent.",
        _explain,
        answers.Explanation,
        ExplainBody,
        scope="read",
        refusal=422,
    ),
    _get(
        "/v1/resolve",
        "The addresses in the queue behind a pseudonym of the log.",
        _resolve,
        Resolved,
        audited=True,
        parameters=ResolveQuery,
        scope="operate",
    ),
    _get(
        "/v1/history", "What became of mail, and which time is not covered.", _find, Found, parameters=Wanted
    ),
    _get("/v1/history/{message_id}", "The time line of one message.", _time_line, TimeLine),
    _get(
        "/v1/config",
        "The configuration in force; secrets are references.",
        _config,
        dict[str, Any],
        parameters=ConfigQuery,
    ),
    _get(
        "/v1/tail",
        "Mail events as they happen, as server-sent events.",
        _tail,
        answers.MailEvent | answers.Missed,
        parameters=TailQuery,
        media="text/event-stream",
        refusal=422,
    ),
    _get(
        "/v1/transcript",
        "Protocol lines of sessions as they happen, without secrets, as server-sent events.",
        _transcript,
        answers.TranscriptLine | answers.Missed,
        parameters=TranscriptQuery,
        media="text/event-stream",
        scope="operate",
        refusal=422,
    ),
    _post(
        "/v1/spool/acknowledge",
        "A loss of the spool is dealt with: it is told no more.",
        _acknowledge,
        answers.Acknowledged,
        AcknowledgeBody,
        audited=True,
    ),
)
