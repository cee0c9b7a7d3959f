"""The pages that change the queue: actions on matching deliveries, suspensions, hold rules and undo.

Each change of the queue has a preview with the number of deliveries. The preview passes on the filter and not
a list, so that any number of deliveries may match. A change that takes longer than `PATIENCE` seconds
continues in the background, and the page of suspensions and changes lists it.
"""

from contextlib import aclosing
from typing import get_args
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from zonerelay.admin.page.command import command_of
from zonerelay.admin.page.filter_text import FilterTextError, parse
from zonerelay.admin.page.views import VERBS
from zonerelay.admin.page.visitor import PageError, PageRequest
from zonerelay.config.units import deliveries, parse_duration, when
from zonerelay.operations import answers, requests

PATIENCE = 25.0
SAMPLE = 5
MAX_REASON = 200

SELECTORS = requests.Selectors.__struct_fields__


async def preview(visitor: PageRequest) -> web.StreamResponse:
    verb, q, wanted = _asked(visitor)
    found = await visitor.one(requests.QueueCount(filter=wanted, sample=SAMPLE), answers.Count)
    matched = found.matched
    how_many = deliveries(matched)
    return await visitor.page(
        "act.html",
        heading=f"{verb.capitalize()} {how_many}?",
        button=f"{verb.capitalize()} {how_many}",
        verb=verb,
        q=q,
        matched=matched,
        sample=found.sample,
        zones=[zone.name for zone in visitor.operators.settings().zone],
        most=MAX_REASON,
        command=command_of(change_of(verb, wanted, target="ZONE"), "--yes"),
    )


async def change(visitor: PageRequest) -> web.StreamResponse:
    verb, q, wanted = _asked(visitor)
    request = change_of(verb, wanted, reason=_reason(visitor), target=visitor.given("target"))
    same = command_of(request, "--yes")
    return await _carry_out(visitor, request, same, back=f"/queue?{urlencode({'q': q})}")


def change_of(
    verb: requests.ChangeVerb, wanted: requests.Filter, *, reason: str = "", target: str
) -> requests.QueueChange:
    """Return the request that applies an action to the deliveries that match a filter. `target` is the zone
    of a reroute.
    """
    ids = () if wanted.message_id is None else (wanted.message_id,)
    filters = msgspec.structs.replace(wanted, message_id=None)
    more = {"to_zone": target} if verb == "reroute" else {}
    given = {"message_ids": ids, "filter": filters, "reason": reason, "everything": wanted.is_everything}
    return msgspec.convert({**given, **more}, requests.CHANGES[verb])


async def undo(visitor: PageRequest) -> web.StreamResponse:
    request = requests.Undo(undoes=visitor.given("act"), reason=_reason(visitor))
    return await _carry_out(visitor, request, command_of(request), back="/suspensions")


async def _carry_out(
    visitor: PageRequest, request: requests.QueueChange | requests.Undo, same: str, *, back: str
) -> web.StreamResponse:
    changed, lines = None, list[str]()
    missing: tuple[str, ...] = ()
    monotonic = visitor.operators.clock.monotonic
    until = monotonic() + PATIENCE
    async with aclosing(visitor.frames(request, beat=1.0)) as frames:
        async for frame in frames:
            if isinstance(frame, answers.ChangeResult):
                changed = frame
            elif isinstance(frame, answers.EndFrame):
                missing = frame.missing
            elif isinstance(frame, answers.Progress) and monotonic() > until:
                of = f" of {frame.total:,}" if frame.total else ""
                lines.append(
                    f"Still running ({frame.done:,}{of} deliveries checked). The change will be listed below."
                )
                break
    if changed is not None:
        lines += changed.lines("" if isinstance(request, requests.Undo) else request.done)
        if not changed.undoes and changed.matched - changed.busy > changed.changed:
            lines.append(f"{changed.matched:,} matched. The others needed no change or have left the queue.")
    act = "" if changed is None or changed.no_undo else changed.act
    return await visitor.done(*lines, back=back, command=same, act=act, missing=missing)


def _asked(visitor: PageRequest) -> tuple[requests.ChangeVerb, str, requests.Filter]:
    """Return the action and the filter that the operator submitted, the filter both as text and parsed. Raise
    PageError if one of them is invalid.
    """
    verb, q = visitor.given("verb"), visitor.given("q")
    if verb not in VERBS:
        raise PageError(400, "Unknown action", f"{verb}: must be one of {', '.join(VERBS)}")
    try:
        return msgspec.convert(verb, requests.ChangeVerb), q, parse(q)
    except FilterTextError as error:
        raise PageError(400, "Invalid filter", str(error)) from error


# --- suspensions and hold rules ---------------------------------------------------------------------------


async def suspensions(visitor: PageRequest) -> web.StreamResponse:
    orders, _ = await visitor.all(requests.Orders(), answers.OrderRow)
    rows, _ = await visitor.all(requests.Acts(), answers.ActRow)
    given = {name: visitor.given(name) for name in ("what", "value", "zone")}
    return await visitor.page(
        "suspensions.html", orders=orders, acts=rows, given=given, selectors=SELECTORS, most=MAX_REASON
    )


async def suspend(visitor: PageRequest) -> web.StreamResponse:
    what, value, effect = visitor.given("what"), visitor.given("value"), visitor.given("effect")
    if what not in SELECTORS or effect not in get_args(requests.OrderEffect):
        raise PageError(400, "Which mail?", f"choose one of {', '.join(SELECTORS)}")
    if not value and what != "everything":
        raise PageError(400, "Which mail?", f'specify which {what}; to select all mail, choose "all mail"')
    zone = visitor.given("zone")
    about = {what: True if what == "everything" else value, **({"zone": zone} if zone else {})}
    try:
        seconds = parse_duration(visitor.given("for")) if visitor.given("for") else None
    except ValueError as error:
        raise PageError(400, "Specify a duration.", str(error)) from error
    request = requests.Suspend(
        about=msgspec.convert(about, requests.Selectors),
        effect=msgspec.convert(effect, requests.OrderEffect),
        seconds=seconds,
        refuse=bool(visitor.given("refuse")),
        stop_clock=bool(visitor.given("stop_clock")),
        reason=_reason(visitor),
    )
    same = command_of(request, *(["--hold"] if effect == "hold" else []))
    given = await visitor.one(request, answers.OrderResult)
    lines = [f"Suspension {given.order.id} is active; it applies to queued and to new mail."]
    if given.first_expiry is not None:
        lines.append(f"No suspended mail expires before {when(given.first_expiry)}.")
    return await visitor.done(*lines, back="/suspensions", command=same)


async def resume(visitor: PageRequest) -> web.StreamResponse:
    request = requests.Resume(id=visitor.given("order"), reason=_reason(visitor))
    ended = await visitor.one(request, answers.OrdersResult)
    lines = ["The suspension has ended." if ended.orders else "The suspension had already ended."]
    if ended.released:
        lines.append(f"{ended.released:,} held deliveries were released.")
    return await visitor.done(*lines, back="/suspensions", command=command_of(request))


def _reason(visitor: PageRequest) -> str:
    reason = visitor.given("reason")
    if len(reason) > MAX_REASON:
        raise PageError(400, "Too long", f"a reason may have at most {MAX_REASON} characters")
    return reason
