"""The views of the page: the overview, destinations, the queue, one message, the history, the configuration
and the live tail. Views query the relay and change nothing.
"""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from zonerelay.admin.page.command import command_of
from zonerelay.admin.page.filter_text import FilterTextError, parse, term
from zonerelay.admin.page.flow import flow_of, plot_of
from zonerelay.admin.page.visitor import FIELDS, PageError, PageRequest
from zonerelay.admin.requests import BEAT, EVENT_STREAM, events, stream
from zonerelay.config import toml_text
from zonerelay.config.problems import Report
from zonerelay.config.units import parse_duration, when
from zonerelay.control.history import continued, in_words, of_interest
from zonerelay.history.reader import OUTCOMES, HistoryGap
from zonerelay.model.envelope import is_message_id
from zonerelay.operations import answers, requests
from zonerelay.operations.errors import ControlError, NotFoundError
from zonerelay.process.threads import OPERATORS
from zonerelay.store.spool_paths import count_of
from zonerelay.telemetry.events.records import MailEvent, TraceStep
from zonerelay.telemetry.logs.redact import RedactKeyError, UnsearchableError, printable

ROWS = 50
"""Deliveries on one page of the queue."""
HURTING = 15
MOST = 500
"""The maximum number of destinations, recipients and steps on a page."""
RECENT = "1h"
"""The time range that the history shows before a search."""
FOUND = 200
"""Entries of the history on a page."""
MAX_BODY = 256 * 1024
"""Bytes of a body that are shown."""
VERBS = ("retry", "hold", "release", "reroute", "bounce", "drop")
EVENTS = (
    "accepted", "delivered", "deferred", "bounced", "expired", "dropped", "refused", "login-failed", "dsn",
)  # fmt: skip


async def overview(visitor: PageRequest) -> web.StreamResponse:
    status = await visitor.one(requests.Status(), answers.RelayStatus)
    return await visitor.page(
        "overview.html",
        status=status,
        hurting=_with_filters(visitor, [row for row in status.destinations if row.matters][:HURTING]),
        flow=flow_of(status),
        plot=plot_of(status),
    )


async def destinations(visitor: PageRequest) -> web.StreamResponse:
    status = await visitor.one(requests.Status(), answers.RelayStatus)
    name, is_all = visitor.given("name"), bool(visitor.given("all"))
    wanted = [
        row
        for row in status.destinations
        if (is_all or row.matters) and name.lower() in f"{row.destination} {row.hosts}".lower()
    ]
    rows = _with_filters(visitor, wanted[:MOST])
    return await visitor.page("destinations.html", status=status, rows=rows, name=name, all=is_all)


def _with_filters(
    visitor: PageRequest, rows: list[answers.DestinationStatus]
) -> list[tuple[answers.DestinationStatus, str]]:
    """Return each destination with the text of a filter that selects its mail. The name of a next hop is not
    a recipient's domain.
    """
    by_next_hop = {zone.name for zone in visitor.operators.settings().zone if zone.next_hop}
    return [
        (
            row,
            term("zone", row.zone)
            + ("" if row.zone in by_next_hop else f" {term('to', '@' + row.destination)}"),
        )
        for row in rows
    ]


async def queue(visitor: PageRequest) -> web.StreamResponse:
    q = visitor.given("q")
    try:
        wanted = parse(q)
    except FilterTextError as error:
        return await visitor.page("queue.html", 400, q=q, problem=error)
    after = visitor.given("after")
    request = requests.QueueList(filter=wanted, limit=ROWS, cursor=after)
    rows, end = await visitor.all(request, answers.DeliveryRow)
    return await visitor.page(
        "queue.html",
        q=q,
        problem="",
        deliveries=rows,
        more=end.more,
        missing=end.missing,
        is_first=not after,
        next=f"/queue?{urlencode({'q': q, 'after': end.next})}" if end.more else "",
        verbs=VERBS,
        command=command_of(
            requests.QueueShow(message_id=wanted.message_id)
            if wanted.message_id
            else requests.QueueList(filter=wanted)
        ),
    )


def message_id_of(visitor: PageRequest) -> str:
    found = visitor.request.match_info["id"]
    if not is_message_id(found):
        raise PageError(404, "Not found", f"{found} is not a message id")
    return found


async def message(visitor: PageRequest) -> web.StreamResponse:
    message_id = message_id_of(visitor)
    detail, absent, queued = None, "", tuple[TraceStep, ...]()
    try:
        detail = await visitor.one(requests.QueueShow(message_id=message_id), answers.MessageDetail)
        queued, _ = await visitor.all(requests.QueueTrace(message_id=message_id), TraceStep)
    except (NotFoundError, ControlError) as error:
        absent = str(error)
    steps, gaps = list(queued), list[str]()
    try:
        line = await visitor.operators.history().line(
            message_id, answers.addresses_in(detail), visitor.addresses
        )
        steps, gaps = continued(line, queued), _in_words(visitor, line.gaps)
    except RedactKeyError as error:
        gaps.append(str(error))
    return await visitor.page(
        "message.html",
        200 if detail or steps else 404,
        message_id=message_id,
        detail=detail,
        absent=absent,
        steps=steps,
        gaps=gaps,
        most=MOST,
        verbs=VERBS,
    )


async def body(visitor: PageRequest) -> web.StreamResponse:
    """Show the source of a message as plain text. The relay's log names the reader."""
    message_id, as_sent = message_id_of(visitor), visitor.given("as") == "sent"
    found, octets = None, bytearray()
    request = requests.QueueCat(message_id=message_id, as_sent=as_sent)
    async with aclosing(visitor.frames(request)) as frames:
        async for frame in frames:
            if isinstance(frame, answers.MessageBody):
                found = frame
            elif isinstance(frame, answers.BodyPiece):
                octets += frame.octets
            if len(octets) > MAX_BODY:
                break
    return await visitor.page(
        "body.html",
        message_id=message_id,
        found=found,
        text=octets[:MAX_BODY].decode("utf-8", "replace"),
        is_cut=len(octets) > MAX_BODY,
        most=MAX_BODY,
        command=command_of(request),
    )


async def history(visitor: PageRequest) -> web.StreamResponse:
    given = {name: visitor.given(name) for name in ("value", "since", "outcome", "reply")}
    common = {"given": given, "outcomes": OUTCOMES, "asked": any(given.values())}

    wanted = given if common["asked"] else {**given, "since": RECENT}
    try:
        answer = await _found(visitor, wanted)
    except (ValueError, RedactKeyError, UnsearchableError) as error:
        return await visitor.page("history.html", 400, problem=error, **common)
    return await visitor.page("history.html", problem="", **common, **answer)


async def _found(visitor: PageRequest, given: Mapping[str, str]) -> dict[str, object]:
    """Search the history, and return the values for the template `history`. Raise ValueError,
    UnsearchableError or RedactKeyError if the search is not possible.
    """
    value, outcome, now = given["value"], given["outcome"], visitor.now
    since = now - parse_duration(given["since"]) if given["since"] else 0.0
    wanted = {"about": value or None, "outcome": outcome or None, "reply": given["reply"]}
    query = msgspec.convert({**wanted, "since": since}, requests.HistoryFind)
    answer = await visitor.operators.history().found(
        msgspec.structs.replace(query, limit=FOUND), [value] if value else [], visitor.addresses
    )
    gaps = _in_words(visitor, of_interest(answer, asked=bool(since)))
    if answer.other_machines:
        gaps.append("other machines that share the queue were not searched: each has its own history")
    return {
        "found": answer.found[::-1],
        "more": answer.more,
        "counted": answer.refused_more if not answer.found or outcome == "refused" else 0,
        "gaps": gaps,
        "command": command_of(query, now=now),
    }


def _in_words(visitor: PageRequest, gaps: Sequence[HistoryGap]) -> list[str]:
    return in_words(gaps, when, several=count_of(visitor.operators.settings()) > 1)


async def configuration(visitor: PageRequest) -> web.StreamResponse:
    changed = bool(visitor.given("changed"))
    shown = toml_text.changed if changed else toml_text.effective
    # Without the file's lines, every value would be marked as derived.
    text = await OPERATORS.run(shown, visitor.operators.settings(), Report())
    text = text.replace(f"  # {toml_text.DERIVED}", "")
    return await visitor.page("configuration.html", text=text, changed=changed)


async def tail(visitor: PageRequest) -> web.StreamResponse:
    given = {name: visitor.given(name) for name in ("address", "event", "zone")}
    return await visitor.page(
        "tail.html",
        given=given,
        events=EVENTS,
        stream=f"/tail/events?{urlencode(given)}",
        command=command_of(msgspec.convert(given, requests.Tail)),
    )


async def tail_events(visitor: PageRequest) -> web.StreamResponse:
    """Stream events to the browser as server-sent events, until the operator leaves or the session ends."""
    wanted = requests.Tail(
        address=visitor.given("address"), event=visitor.given("event"), zone=visitor.given("zone")
    )
    session, sessions = visitor.session, visitor.sessions
    assert session is not None
    admitted = visitor.operators.one_more(session.token, lambda: session in sessions.open())
    found = visitor.operators.asking.batches(visitor.asked(wanted), beat=BEAT)
    fields = {**FIELDS, "Content-Type": EVENT_STREAM}
    try:
        return await stream(visitor.request, found, events(_event), admitted, fields)
    except ControlError as error:
        body = b"retry: 60000\n" + _event(answers.StreamGap(why=str(error)))
        return web.Response(body=body, headers=fields)


def _event(frame: answers.Frame) -> bytes:
    """Format an event for page.js, which shows all events of a message in one row."""
    shown = {"at": "", "name": "missed", "message": ""}
    match frame:
        case MailEvent():
            fields = {name: value for name, value in frame.fields.items() if value not in ("", None)}
            message_id = str(fields.get("id", ""))
            if is_message_id(message_id):
                del fields["id"]
                shown["message"] = message_id
            what = " ".join(f"{name}={value}" for name, value in fields.items())
            shown |= {"at": when(frame.at), "name": frame.event}
        case answers.StreamGap():
            what = frame.why or f"{frame.count:,} events were skipped, because they arrived too fast"
        case _:
            return b": the end\n\n"
    return b"data: " + msgspec.json.encode({**shown, "what": printable(what)}) + b"\n\n"
