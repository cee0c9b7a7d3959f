"""`queue …`, `acts`, `undo` and `resolve`: the commands that read the queue and change it.

`queue cat` prints the bytes of one message, from the running relay or from a stopped one's spool (`offline`).
A pipe or a file receives the bytes unchanged; on a terminal, control sequences are made harmless.

Single messages are changed immediately, and many only after a preview. A bulk change shows how many
deliveries match and the oldest of them, and then asks for confirmation. Without a terminal it cannot ask, so
it is refused unless `--yes` is given. An empty filter does not match the whole queue; that requires `--all`.
"""

from __future__ import annotations

import codecs
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from msgspec.structs import replace
from rich.table import Table
from rich.text import Text

from zonerelay.cli.arguments import request_of
from zonerelay.cli.relay import connect, load_for_reading, load_settings
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError
from zonerelay.config.units import exact_span
from zonerelay.control.client import ControlClient
from zonerelay.operations import answers, requests
from zonerelay.operations.errors import ControlError, NotRunningError
from zonerelay.telemetry.events.records import TraceStep

_PSEUDONYM = re.compile(r"u-[a-z2-7]+(@d-[a-z2-7]+)?|d-[a-z2-7]+")


SUMMARY_ROWS = 20
DEFAULT_ROWS = 1000
PAGE = 1000
"""Rows per table: the widths of a table are those of all its rows, so they have to be held."""


def list_deliveries(arguments: Namespace) -> int:
    limit = arguments.limit
    if limit is None:
        limit = 0 if arguments.json else DEFAULT_ROWS
    frames, end = (
        connect(arguments).stream(request_of(arguments, requests.QueueList, limit=limit)),
        answers.EndFrame(),
    )

    def rows(saw: Callable[[answers.Frame], None]) -> Iterator[answers.DeliveryRow]:
        nonlocal end
        for frame in frames:
            saw(frame)
            if isinstance(frame, answers.DeliveryRow):
                yield frame
            elif isinstance(frame, answers.EndFrame):
                end = frame

    wide = output.console().width >= output.WIDE
    while True:
        with output.frames_seen("Scanning the queue") as saw:
            page = list(islice(rows(saw), PAGE))
        if not page:
            break
        shown = partial(delivery_table, now=time.time(), wide=wide)
        output.print_rows(page, shown, "", as_json=arguments.json)
    if arguments.json:
        return output.completeness(end)
    chatter = output.chatter()
    if end.count == 0:
        chatter.print("No delivery matches.")
    elif end.more:
        chatter.print(f"The first {text.deliveries(limit)}; there are more (--limit 0 shows them all).")
    elif sys.stdout.isatty():
        chatter.print(f"{text.deliveries(end.count)}.")
    return output.completeness(end)


def delivery_table(rows: Iterable[answers.DeliveryRow], *, now: float, wide: bool) -> Table:
    """Return a table with one delivery per row. A narrow terminal shows the recipient, but not the sender and
    the zone.
    """
    columns = ["id", "age", "state", "next", "zone", "from", "to", "last reply"]
    if not wide:
        columns = [name for name in columns if name not in ("zone", "from")]
    cells = (_delivery_cells(row, now, columns) for row in rows)
    return output.table(columns, cells, cut=("from", "to", "last reply"))


def _delivery_cells(row: answers.DeliveryRow, now: float, columns: Sequence[str]) -> list[output.Cell]:
    tries = f" ×{row.attempts}" if row.attempts else ""
    cells: dict[str, output.Cell] = {
        "id": row.message_id,
        "age": text.span(now - row.created),
        "state": output.state(row.state + tries),
        "next": ""
        if row.state in ("held", "active", "suspended", "dropped") or row.next_turn
        else text.until(row.next_attempt, now),
        "zone": row.zone if row.priority in ("", "normal") else f"{row.zone} {row.priority}",
        "from": text.path(row.sender),
        "to": text.clean(row.recipient),
        "last reply": (row.order and f"suspended by {row.order}")
        or _waits(row, now)
        or text.clean(row.reply)
        or _held_back(row, now),
    }
    return [cells[name] for name in columns]


def _waits(row: answers.DeliveryRow, now: float) -> str:
    """Return what a delivery waits for: the end of a phase, its turn at a rate, or its end in the bin."""
    if row.state == "dropped":
        return f"destroyed {text.until(row.next_attempt, now)}"
    if row.next_turn is not None:
        return text.turn(row.next_turn, row.waiting, row.turns_seconds, now)
    left = f"{exact_span(row.phase_seconds)} " if row.phase_seconds else ""
    return f"waits {left}for {text.clean(row.phase)}" if row.phase else ""


def _held_back(row: answers.DeliveryRow, now: float) -> str:
    """Return a text with the release time that the sender requested (RFC 4865), or "" if it has passed."""
    if row.created <= now or row.state not in ("deferred", "held"):
        return ""
    return f"held by its sender until {text.when(row.created)}"


def show(arguments: Namespace) -> int:
    from zonerelay.cli.operate.log import left_queue

    with left_queue(arguments.config, arguments.message_id):
        detail = connect(arguments).ask(request_of(arguments, requests.QueueShow), answers.MessageDetail)
    if arguments.json:
        output.print_document(detail)
        return OK
    now = time.time()
    console = output.console()
    console.print(output.facts(_message_facts(detail, now)))
    for row in detail.deliveries:
        console.print()
        console.print(output.facts(_delivery_facts(row, now, detail.orders)))
    return OK


def _message_facts(detail: answers.MessageDetail, now: float) -> Iterator[tuple[str, output.Cell]]:
    yield "message", detail.message_id
    yield "accepted", f"{text.when(detail.created)}, {text.span(now - detail.created)} ago"
    yield "from", text.path(detail.sender)
    open_count = len(detail.deliveries)
    yield "recipients", f"{detail.recipients_accepted} accepted, {open_count} still in the queue"
    extras = [
        detail.body,
        "SMTPUTF8" if detail.smtputf8 else "",
        "requires TLS" if detail.require_tls else "",
    ]
    yield "size", ", ".join([text.size(detail.size), *filter(None, extras)])
    yield (
        "client",
        text.clean(" ".join(filter(None, [detail.client, f"({detail.helo})" if detail.helo else ""]))),
    )
    yield (
        "received with",
        " ".join(
            filter(None, [detail.protocol, detail.tls, f"on {detail.listener}" if detail.listener else ""])
        ),
    )
    yield "user", text.clean(detail.user)
    yield "envelope id", text.clean(detail.envid)
    for name, value in detail.headers:
        if name.lower() in ("from", "to", "subject", "date", "message-id"):
            yield name.lower(), text.clean(value)


def _delivery_facts(
    row: answers.DeliveryRow, now: float, orders: Sequence[answers.OrderRow]
) -> Iterator[tuple[str, output.Cell]]:
    yield "to", text.clean(row.recipient)
    yield "state", output.state(row.state)
    for order in orders:
        if order.id == row.order:
            yield "order", order_line(order, now)
    yield "attempt", _waits(row, now)
    yield "release", _held_back(row, now)
    yield "zone", zone_of(row)
    if row.priority not in ("", "normal"):
        yield "priority", row.priority
    yield "attempts", str(row.attempts)
    if row.state in ("ready", "deferred") and row.next_turn is None:
        due = text.until(row.next_attempt, now)
        yield "next attempt", due if due == "now" else f"{text.when(row.next_attempt)}, {due}"
    if row.last_attempt is not None:
        yield "last attempt", f"{text.when(row.last_attempt)}, {text.span(now - row.last_attempt)} ago"
    yield "host", " ".join(filter(None, [row.host, f"[{row.peer}]" if row.peer else ""]))
    yield "reply", text.clean(row.reply)
    if row.in_doubt:
        yield "in doubt", "the connection was lost after the whole message was sent: it may have arrived"


def zone_of(row: answers.DeliveryRow) -> Text:
    """Return the zone of a queued message, and the zone that a new message would get, if it is a different
    one.
    """
    why = f" (when it was accepted: {text.clean(row.routed)})" if row.routed else ""
    if not row.new_zone:
        return Text(row.zone + why)
    new = f"a new message would go to zone {row.new_zone} ({text.clean(row.new_why)})"
    return Text(f"{row.zone}{why}; {new}; `queue reroute` moves it", "yellow")


def trace(arguments: Namespace) -> int:
    from zonerelay.cli.operate.log import history_of, print_steps  # SQLite

    steps: list[TraceStep] = []
    missing: ControlError | None = None
    try:
        frames = connect(arguments).stream(request_of(arguments, requests.QueueTrace))
        steps += [frame for frame in frames if isinstance(frame, TraceStep)]
    except ControlError as error:  # not in the queue, or the relay does not run: search the history instead
        missing = error
    steps = history_of(arguments.config, arguments.message_id, steps)
    if missing is not None:
        if not steps:
            raise missing
        output.chatter().print(f"Only from the history: {missing}")
    print_steps(steps, as_json=arguments.json)
    return OK


def resolve(arguments: Namespace) -> int:
    if not _PSEUDONYM.fullmatch(arguments.pseudonym.strip().strip("<>").lower()):
        return _resolve_address(arguments)
    request, relay = request_of(arguments, requests.Resolve), connect(arguments)
    with output.frames_seen("Scanning the queue") as saw:
        found, end = relay.all(request, answers.ResolvedAddress, saw)
        if not found and not request.recent:
            found, end = relay.all(replace(request, recent=True), answers.ResolvedAddress)
    nothing = "Neither mail in the queue nor recent mail has this pseudonym, or the key has changed."
    output.print_rows(found, _addresses, nothing, as_json=arguments.json)
    return output.completeness(end) if found else FAILED


def _addresses(found: Iterable[answers.ResolvedAddress]) -> Table:
    rows = ((text.clean(each.address), each.role, each.message_id) for each in found)
    return output.table(["address", "role", "message"], rows)


def summary(arguments: Namespace) -> int:
    request, title = request_of(arguments, requests.QueueSummary), "Scanning the queue"
    found, status = output.answered(connect(arguments), request, answers.Summary, title)
    limit = len(found.rows) if arguments.limit == 0 else arguments.limit or SUMMARY_ROWS
    output.print_one(found, partial(_tell_summary, limit), as_json=arguments.json)
    return status


def _tell_summary(limit: int, found: answers.Summary) -> None:
    chatter = output.chatter()
    if not found.rows:
        chatter.print("No delivery matches.")
        return
    output.console().print(summary_table(found, limit))
    if len(found.rows) > limit:
        chatter.print(f"… and {len(found.rows) - limit:,} more (--limit 0 shows them all).")
    if found.other is not None:
        chatter.print(f"Other: all beyond the first {len(found.rows):,} that were met.")
    if found.every > 1:
        chatter.print(
            f"Estimated from one delivery in {found.every}; --exact counts all, which takes longer."
        )


def summary_table(found: answers.Summary, limit: int) -> Table:
    """Return a table of the summary, with ages in minutes as in qshape. Keys are cut to the width of the
    terminal.
    """
    other = () if found.other is None else (found.other,)
    ages = tuple(map(sum, zip(*(row.ages for row in (*found.rows, *other)), strict=True)))
    total = answers.SummaryRow(key="all", total=sum(ages), ages=ages)
    columns = [found.by, "total", *map(str, found.minutes), f"{found.minutes[-1]}+"]
    cells = [
        [text.clean(row.key), *(text.short(count) if count else "·" for count in (row.total, *row.ages))]
        for row in (total, *found.rows[:limit], *other)
    ]
    return output.table(columns, cells, cut=(found.by,), gap=1)


def _resolve_address(arguments: Namespace) -> int:
    from zonerelay.cli.operate.log import pseudonym_of  # SQLite

    pseudonym = pseudonym_of(load_for_reading(arguments.config), arguments.pseudonym)
    answer = {"kind": "pseudonym", "address": arguments.pseudonym, "pseudonym": pseudonym}
    output.print_answer(answer, pseudonym, as_json=arguments.json)
    return OK


def cat(arguments: Namespace) -> int:
    request = request_of(arguments, requests.QueueCat)
    if request.zone and not request.as_sent:
        raise CliError(
            "--zone can be used only with --as-sent: the stored body is the same in all zones", USAGE
        )
    show = output.print_line if arguments.json else _byte_writer()
    try:
        for frame in connect(arguments).stream(request):
            if isinstance(frame, answers.MessageBody | answers.BodyPiece):
                show(frame)
    except NotRunningError:
        # A running relay answers without the imports that the offline case needs.
        from zonerelay.cli.operate.offline import print_body

        print_body(load_settings(arguments.config), request, show)
    return OK


def _byte_writer() -> Callable[[answers.Frame], None]:
    """Return a function that writes the bytes of a message to standard output."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(frame: answers.Frame) -> None:
        if isinstance(frame, answers.MessageBody) and frame.zone:
            output.chatter().print(f"As zone {frame.zone} sends it, from {text.path(frame.sender)}:")
        elif not isinstance(frame, answers.BodyPiece):
            return
        elif sys.stdout.isatty():
            shown = decoder.decode(frame.octets).replace("\r\n", "\n").replace("\r", "")
            sys.stdout.write("\t".join(map(text.clean_lines, shown.split("\t"))))
        else:
            sys.stdout.buffer.write(frame.octets)

    return show


SAMPLE = 5


def change(arguments: Namespace) -> int:
    request = request_of(arguments, requests.CHANGES[arguments.verb])
    in_bulk = not request.message_ids
    client = connect(arguments)
    if arguments.dry_run:
        return _dry_run(client, request, as_json=arguments.json)
    if in_bulk and not arguments.yes and not _confirmed(client, request):
        return FAILED
    changed, status = output.answered(client, request, answers.ChangeResult, arguments.verb.capitalize())
    output.print_one(changed, partial(_tell, request), as_json=arguments.json)
    missing = not in_bulk and changed.matched == 0
    if missing:
        output.chatter().print("No such message in the queue: delivered, given up, or never here.")
    return FAILED if missing or changed.busy else status


def _is_final(request: requests.QueueChange) -> bool:
    return isinstance(request, requests.Bounce) or (isinstance(request, requests.Drop) and request.purge)


def _preview(client: ControlClient, request: requests.QueueChange) -> answers.Count:
    asked = replace(request, dry_run=True, sample=SAMPLE)
    return output.answered(client, asked, answers.Count, "Counting")[0]


def _confirmed(client: ControlClient, request: requests.QueueChange) -> bool:
    """Show what a change selects, and ask. Raise CliError if there is no terminal, or nothing is selected."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CliError(
            "standard input is not a terminal: add --yes to confirm, or --dry-run to preview", USAGE
        )
    found = _preview(client, request)
    chatter = output.chatter()
    if not found.matched:
        chatter.print("No delivery matches.")
        raise CliError("", OK)
    chatter.print(delivery_table(found.sample, now=time.time(), wide=chatter.width >= output.WIDE))
    if found.matched > len(found.sample):
        chatter.print(f"… and {found.matched - len(found.sample):,} more")
    final = " This cannot be undone." if _is_final(request) else ""
    chatter.print(f"\n{request.action.capitalize()} {text.deliveries(found.matched)}?{final} [y/N] ", end="")
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    chatter.print("Nothing was changed.")
    return False


def _dry_run(client: ControlClient, request: requests.QueueChange, *, as_json: bool) -> int:
    found = _preview(client, request)
    if as_json:
        output.print_document(found)
        return OK
    console = output.console()
    if found.sample:
        console.print(delivery_table(found.sample, now=time.time(), wide=console.width >= output.WIDE))
    final = ", which could not be restored" if _is_final(request) else ""
    what = f"{request.action} would change {text.deliveries(found.matched)}{final}"
    console.print(f"{what}; nothing was changed.")
    return OK


def _tell(request: requests.QueueChange | requests.Undo, changed: answers.ChangeResult) -> None:
    done = "" if isinstance(request, requests.Undo) else request.done
    if (at := getattr(request, "at", None)) is not None:
        # Round to minutes: the time that the command itself takes would turn "+2h" into "in 1h59m".
        done = f"will be retried at {text.when(at)} ({text.until(at + 30, time.time())})"
    first, *others = changed.lines(done)
    output.console().print(first)
    if changed.changed and not changed.no_undo:
        others.append(f"zonerelay undo {changed.act} reverts this, within 24 hours.")
    for line in others:
        output.chatter().print(line)


def acts(arguments: Namespace) -> int:
    rows, end = connect(arguments).all(request_of(arguments, requests.Acts), answers.ActRow)
    nothing = "No changes by operators in the last 24 hours."
    output.print_rows(rows, _act_table, nothing, as_json=arguments.json)
    return output.completeness(end)


def _act_table(rows: Sequence[answers.ActRow]) -> Table:
    columns = ("act", "time", "by", "verb", "changed", "undo", "which")
    return output.table(columns, map(_act_cells, rows), cut=("by", "which"))


def _act_cells(row: answers.ActRow) -> tuple[str, ...]:
    if row.undone_by:
        undo = f"by {row.undone_by}"
    else:
        undo = "no" if row.no_undo else text.span(row.until - time.time())
    reason = f" ({row.reason})" if row.reason else ""
    which = f"{row.what}{reason}" if row.finished else f"{row.what}{reason}, not finished"
    at = text.when(row.at)[5:16]
    changed = f"{row.changed:,}" if row.finished else f"up to {row.changed:,}"
    return row.act, at, text.clean(row.who), row.action, changed, undo, text.clean(which)


def undo(arguments: Namespace) -> int:
    request = request_of(arguments, requests.Undo)
    changed, status = output.answered(connect(arguments), request, answers.ChangeResult, "Undo")
    output.print_one(changed, partial(_tell, request), as_json=arguments.json)
    return FAILED if changed.busy else status


# --- suspensions and hold rules, for queued and new mail ---------------------------------------------------


def suspend(arguments: Namespace) -> int:
    if arguments.list:
        return _list_orders(arguments)
    request = request_of(arguments, requests.Suspend, effect="hold" if arguments.hold else "suspend")
    if request.about == requests.Selectors():
        raise CliError(
            "no mail selected: specify --zone, --domain, --sender or another selector, or --all", USAGE
        )
    if not request.reason:
        raise CliError(
            "the reason is missing: specify --reason (shown to operators, never to clients)", USAGE
        )
    answer, status = output.answered(connect(arguments), request, answers.OrderResult, "Suspend")
    if arguments.json:
        output.print_document(answer)
        return status
    now, order = time.time(), answer.order
    end = "until resumed" if order.until is None else f"until {text.when(order.until)}"
    print(f"Order {order.id}{'' if answer.new else ', which was in force already'}: {what_of(order)}, {end}.")
    print(f"To end it: zonerelay resume {order.id}")
    for line in _clock(answer, now):
        output.chatter().print(line)
    return status


def _clock(given: answers.OrderResult, now: float) -> Iterator[str]:
    if given.order.stop_clock or given.first_expiry is None:
        return
    at, until = given.first_expiry, given.order.until
    if until is not None and until < at:
        return
    when = "now already" if at <= now else f"{text.when(at)}, {text.until(at, now)}"
    yield (
        f"The first of this mail is too old: {when}. It waits all the same, and has one attempt after the"
        " end, but returns to its sender if that fails. --stop-clock prevents that."
    )


def resume(arguments: Namespace) -> int:
    request = request_of(arguments, requests.Resume)
    ended, status = output.answered(connect(arguments), request, answers.OrdersResult, "Resume")
    output.print_one(ended, _tell_ended, as_json=arguments.json)
    return status if ended.orders else FAILED


def _tell_ended(ended: answers.OrdersResult) -> None:
    for order in ended.orders:
        print(f"Order {order.id} is over: {what_of(order)}.")
    if not ended.orders:
        output.chatter().print("There is no such order (zonerelay suspend --list shows those in force).")
    if ended.released:
        print(f"{text.deliveries(ended.released)} released that it held.")


def _list_orders(arguments: Namespace) -> int:
    orders, end = connect(arguments).all(requests.Orders(), answers.OrderRow)
    now = time.time()
    nothing = "There are no active suspensions."
    output.print_rows(orders, lambda rows: orders_table(rows, now), nothing, as_json=arguments.json)
    return output.completeness(end)


def what_of(order: answers.OrderRow) -> str:
    """Return a description of the suspension or hold rule."""
    doing = "holds" if order.effect == "hold" else "rejects and suspends" if order.refuse else "suspends"
    return f"{doing} {text.clean(order.about)}{' with its clock stopped' if order.stop_clock else ''}"


def order_line(order: answers.OrderRow, now: float) -> Text:
    """Return a one-line description of the suspension or hold rule."""
    end = "" if order.until is None else f" until {text.when(order.until)}"
    line = f"{order.id} by {text.clean(order.who)}, {text.span(now - order.since)} ago{end}: "
    return Text(f"{line}{what_of(order)} ({text.clean(order.reason)})", style="yellow")


def orders_table(orders: Sequence[answers.OrderRow], now: float) -> Table:
    rows = [
        (
            order.id,
            Text(what_of(order), style="yellow"),
            text.clean(order.who),
            text.span(now - order.since),
            "–" if order.until is None else text.until(order.until, now),
            text.clean(order.reason),
        )
        for order in orders
    ]
    return output.table(["order", "what", "by", "for", "ends", "reason"], rows, cut=("what", "reason"))
