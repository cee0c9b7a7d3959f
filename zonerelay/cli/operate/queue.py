"""`queue …`, `acts`, `undo` and `resolve`: the commands that read the queue and change it.

`queue cat` prints the bytes of one message, from the running relay or from a stopped one's spool (`offline`).
A pipe or a file receives the bytes unchanged; on a terminal, control sequences are made harmless.

Single messages are changed immediately, and many only after a preview. A bulk change shows how many
deliveries match and the oldest of them, and then asks for confirmation. Without a terminal it cannot ask, so
it is refused unless `--yes` is given. An empty filter does not match the whole queue; that requires `--all`.
"""

import codecs
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace
from rich.console import RenderableType
from rich.text import Text

from zonerelay.cli.arguments import request_of
from zonerelay.cli.operate import responses
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
    frames = connect(arguments).stream(request_of(arguments, requests.QueueList, limit=limit))
    end = None
    while end is None:
        page = list[answers.DeliveryRow]()
        with output.frames_seen("Scanning the queue") as saw:
            while len(page) < PAGE and end is None:
                saw(frame := next(frames))
                if isinstance(frame, answers.DeliveryRow):
                    page.append(frame)
                elif isinstance(frame, answers.EndFrame):
                    end = frame
        output.print_rows(page, delivery_table, "", as_json=arguments.json)
    if arguments.json:
        return output.completeness(end)
    if end.count == 0:
        output.tell("No delivery matches.")
    elif end.more:
        output.tell(f"Only the first {text.deliveries(limit)} are shown (--limit 0 shows all).")
    elif sys.stdout.isatty():
        output.tell(f"{text.deliveries(end.count)}.")
    return output.completeness(end)


@output.tabular(cut=("from", "to", "last reply"), wide=("zone", "from"))
def delivery_table(row: answers.DeliveryRow) -> output.Row:
    """Return the row of `queue list` for one delivery."""
    now = time.time()
    waits = row.state not in ("held", "active", "suspended", "dropped") and not row.next_turn
    suspended = row.order and f"suspended by {row.order}"
    return {
        "id": row.message_id,
        "age": text.span(now - row.created),
        "state": output.state(row.state + (f" ×{row.attempts}" if row.attempts else "")),
        "next": text.until(row.next_attempt, now) if waits else "",
        "zone": row.zone if row.priority in ("", "normal") else f"{row.zone} {row.priority}",
        "from": text.path(row.sender),
        "to": row.recipient,
        "last reply": suspended or _waits(row, now) or row.reply or _held_back(row, now),
    }


def _waits(row: answers.DeliveryRow, now: float) -> str:
    """Return what a delivery waits for, such as a rate limit, or when dropped mail is destroyed."""
    if row.state == "dropped":
        return f"destroyed {text.until(row.next_attempt, now)}"
    if row.next_turn is not None:
        return text.turn(row.next_turn, row.waiting, row.turns_seconds, now)
    left = f"{exact_span(row.phase_seconds)} " if row.phase_seconds else ""
    return f"waits {left}for {row.phase}" if row.phase else ""


def _held_back(row: answers.DeliveryRow, now: float) -> str:
    """Return a note with the release time that the sender requested (RFC 4865), or "" if it has passed."""
    if row.created <= now or row.state not in ("deferred", "held"):
        return ""
    return f"held by its sender until {text.when(row.created)}"


def show(arguments: Namespace) -> int:
    from zonerelay.cli.operate.log import left_queue

    with left_queue(arguments.config, arguments.message_id):
        request = request_of(arguments, requests.QueueShow)
        return responses.answered(arguments, request, _print_message)[1]


def _print_message(detail: answers.MessageDetail) -> None:
    now, console = time.time(), output.console()
    console.print(output.facts(_message_facts(detail, now)))
    for row in detail.deliveries:
        console.print()
        console.print(output.facts(delivery_facts(row, now, detail.orders)))


def _message_facts(detail: answers.MessageDetail, now: float) -> Iterator[tuple[str, output.Fact]]:
    yield "message", detail.message_id
    yield "accepted", f"{text.when(detail.created)}, {text.span(now - detail.created)} ago"
    yield "from", text.path(detail.sender)
    open_count = len(detail.deliveries)
    yield "recipients", f"{detail.recipients_accepted} accepted, {open_count} still in the queue"
    marks = (("SMTPUTF8", detail.smtputf8), ("requires TLS", detail.require_tls))
    extras = (text.size(detail.size), detail.body, *(mark for mark, is_set in marks if is_set))
    yield "size", ", ".join(filter(None, extras))
    yield "client", text.words(detail.client, detail.helo and f"({detail.helo})")
    listener = detail.listener and f"on {detail.listener}"
    yield "received with", text.words(detail.protocol, detail.tls, listener)
    yield "user", detail.user
    yield "envelope id", detail.envid
    for name, value in detail.headers:
        if name.lower() in ("from", "to", "subject", "date", "message-id"):
            yield name.lower(), value


def delivery_facts(
    row: answers.DeliveryRow, now: float, orders: Sequence[answers.OrderRow] = ()
) -> Iterator[tuple[str, output.Fact]]:
    """Yield the details of one recipient's delivery, with the suspension or hold rule that it waits for."""
    yield "to", row.recipient
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
    yield "host", text.words(row.host, row.peer and f"[{row.peer}]")
    yield "reply", row.reply
    if row.in_doubt:
        yield "in doubt", "the connection was lost after the message was sent, so it may have arrived"


def zone_of(row: answers.DeliveryRow) -> Text:
    """Return the zone of a queued message, and the zone that a new message would get, if it is a different
    one.
    """
    why = f" (when it was accepted: {row.routed})" if row.routed else ""
    if not row.new_zone:
        return Text(row.zone + why)
    new = f"a new message would go to zone {row.new_zone} ({row.new_why})"
    return Text(f"{row.zone}{why}; {new}; `queue reroute` moves it", "yellow")


def trace(arguments: Namespace) -> int:
    from zonerelay.cli.operate.log import history_of, trace_table  # SQLite

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
        output.tell(f"Showing only the history: {missing}")
    output.print_rows(steps, trace_table, as_json=arguments.json)
    return OK


def resolve(arguments: Namespace) -> int:
    if not _PSEUDONYM.fullmatch(arguments.pseudonym.strip().strip("<>").lower()):
        return _resolve_address(arguments)
    request, relay = request_of(arguments, requests.Resolve), connect(arguments)
    nothing = "No queued or recent mail has this pseudonym, or the key was changed."
    asked = partial(responses.answered, arguments, view=_addresses, relay=relay)
    found, status = asked(request, nothing=nothing if request.recent else "")
    if not found and not request.recent:
        found, status = asked(replace(request, recent=True), nothing=nothing)
    return status if found else FAILED


@output.tabular()
def _addresses(row: answers.ResolvedAddress) -> output.Row:
    return {"address": row.address, "role": row.role, "message": row.message_id}


def summary(arguments: Namespace) -> int:
    request = request_of(arguments, requests.QueueSummary)
    return responses.answered(arguments, request, partial(_tell_summary, arguments.limit))[1]


def _tell_summary(limit: int | None, found: answers.Summary) -> None:
    if not found.rows:
        output.tell("No delivery matches.")
        return
    limit = len(found.rows) if limit == 0 else limit or SUMMARY_ROWS
    output.console().print(summary_table(found, limit))
    if len(found.rows) > limit:
        output.tell(f"… and {len(found.rows) - limit:,} more (--limit 0 shows all).")
    if found.other is not None:
        output.tell(f"Other: all deliveries that are not in these {len(found.rows):,} rows.")
    if found.every > 1:
        output.tell(f"Estimated from one delivery in {found.every}; --exact counts all (slower).")


def summary_table(found: answers.Summary, limit: int) -> RenderableType:
    """Return the table of `queue summary`, with ages in minutes as in qshape. Keys are cut to the width of
    the terminal.
    """
    other = () if found.other is None else (found.other,)
    ages = tuple(map(sum, zip(*(row.ages for row in (*found.rows, *other)), strict=True)))
    total = answers.SummaryRow(key="all", total=sum(ages), ages=ages)

    names = ("total", *map(str, found.minutes), f"{found.minutes[-1]}+")
    rows = []
    for row in (total, *found.rows[:limit], *other):
        counts = (text.short(count) if count else "·" for count in (row.total, *row.ages))
        rows.append({found.by: row.key, **dict(zip(names, counts, strict=True))})
    return output.table(rows, cut=(found.by,), gap=1)


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
            output.tell(f"As sent by zone {frame.zone} with the envelope sender {text.path(frame.sender)}:")
        elif not isinstance(frame, answers.BodyPiece):
            return
        elif sys.stdout.isatty():
            shown = decoder.decode(frame.octets).replace("\r\n", "\n").replace("\r", "")
            sys.stdout.write("\t".join(map(text.clean_lines, shown.split("\t"))))
        else:
            sys.stdout.buffer.write(frame.octets)

    return show


def change(arguments: Namespace) -> int:
    request = request_of(arguments, requests.CHANGES[arguments.verb])
    in_bulk = not request.message_ids
    client = connect(arguments)
    if arguments.dry_run:
        return responses.answered(arguments, request, partial(_tell_preview, request), relay=client)[1]
    if in_bulk and not arguments.yes and not _confirmed(client, request):
        return FAILED
    changed, status = responses.answered(arguments, request, partial(_tell, request), relay=client)
    missing = not in_bulk and changed.matched == 0
    if missing:
        output.tell("The message is not in the queue: it has left it, or the id is wrong.")
    return FAILED if missing or changed.busy else status


def _is_final(request: requests.QueueChange) -> bool:
    return isinstance(request, requests.Bounce) or (isinstance(request, requests.Drop) and request.purge)


def _confirmed(client: ControlClient, request: requests.QueueChange) -> bool:
    """Show which deliveries a change selects, and ask for confirmation. Raise CliError if there is no
    terminal, or nothing is selected.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CliError(
            "standard input is not a terminal: add --yes to confirm, or --dry-run to preview", USAGE
        )
    found, chatter = client.ask(replace(request, dry_run=True), answers.Count), output.chatter()
    if not found.matched:
        output.tell("No delivery matches.")
        raise CliError("", OK)
    chatter.print(delivery_table(found.sample))
    if found.matched > len(found.sample):
        chatter.print(f"… and {found.matched - len(found.sample):,} more")
    final = " This cannot be undone." if _is_final(request) else ""
    chatter.print(f"\n{request.action.capitalize()} {text.deliveries(found.matched)}?{final} [y/N] ", end="")
    if sys.stdin.buffer.readline().strip().lower() in (b"y", b"yes"):
        return True
    output.tell("Nothing was changed.")
    return False


def _tell_preview(request: requests.QueueChange, found: answers.Count) -> None:
    console = output.console()
    if found.sample:
        console.print(delivery_table(found.sample))
    final = ", which could not be restored" if _is_final(request) else ""
    what = f"{request.action} would change {text.deliveries(found.matched)}{final}"
    console.print(f"{what}; nothing was changed.")


def _tell(request: requests.QueueChange | requests.Undo, changed: answers.ChangeResult) -> None:
    done = getattr(request, "done", "")
    if (at := getattr(request, "at", None)) is not None:
        # Round to minutes: the time that the command itself takes would turn "+2h" into "in 1h59m".
        done = f"will be retried at {text.when(at)} ({text.until(at + 30, time.time())})"
    first, *others = changed.lines(done)
    output.console().print(first)
    if changed.changed and not changed.no_undo:
        others.append(f"zonerelay undo {changed.act} reverts this change within 24 hours.")
    for line in others:
        output.tell(line)


def acts(arguments: Namespace) -> int:
    nothing = "No changes by operators in the last 24 hours."
    return responses.answered(arguments, request_of(arguments, requests.Acts), _acts, nothing)[1]


@output.tabular(cut=("by", "which"))
def _acts(row: answers.ActRow) -> output.Row:
    undo = "no" if row.no_undo else text.span(row.until - time.time())
    reason = f" ({row.reason})" if row.reason else ""
    return {
        "act": row.act,
        "time": text.when(row.at)[5:16],
        "by": row.who,
        "verb": row.action,
        "changed": f"{'' if row.finished else 'up to '}{row.changed:,}",
        "undo": f"by {row.undone_by}" if row.undone_by else undo,
        "which": f"{row.what}{reason}{'' if row.finished else ', not finished'}",
    }


def undo(arguments: Namespace) -> int:
    request = request_of(arguments, requests.Undo)
    changed, status = responses.answered(arguments, request, partial(_tell, request))
    return FAILED if changed.busy else status


# --- suspensions and hold rules, for queued and new mail ---------------------------------------------------


def suspend(arguments: Namespace) -> int:
    if arguments.list:
        nothing = "There are no active suspensions."
        return responses.answered(arguments, requests.Orders(), orders_table, nothing)[1]
    request = request_of(arguments, requests.Suspend, effect="hold" if arguments.hold else "suspend")
    return responses.answered(arguments, request, _tell_order)[1]


def _tell_order(answer: answers.OrderResult) -> None:
    now, order = time.time(), answer.order
    end = "until resumed" if order.until is None else f"until {text.when(order.until)}"
    print(f"Order {order.id}{'' if answer.new else ' (already active)'}: {what_of(order)}, {end}.")
    print(f"To end it: zonerelay resume {order.id}")
    at = answer.first_expiry
    if at is not None and not order.stop_clock and (order.until is None or order.until >= at):
        first = f"No mail expires before {text.when(at)}, {text.until(at, now)}."
        output.tell(
            f"{'Some mail may have expired already.' if at <= now else first} Expired mail is attempted once "
            "when the suspension ends, and then returned to its sender. --stop-clock prevents this."
        )


def resume(arguments: Namespace) -> int:
    request = request_of(arguments, requests.Resume)
    ended, status = responses.answered(arguments, request, _tell_ended)
    return status if ended.orders else FAILED


def _tell_ended(ended: answers.OrdersResult) -> None:
    for order in ended.orders:
        print(f"Order {order.id} has ended: {what_of(order)}.")
    if not ended.orders:
        output.tell("No such suspension or hold rule is active (see zonerelay suspend --list).")
    if ended.released:
        print(f"{text.deliveries(ended.released)} released.")


def what_of(order: answers.OrderRow) -> str:
    """Return a description of a suspension or hold rule."""
    doing = "holds" if order.effect == "hold" else "rejects and suspends" if order.refuse else "suspends"
    return f"{doing} {text.clean(order.about)}{' with its clock stopped' if order.stop_clock else ''}"


def order_line(order: answers.OrderRow, now: float) -> Text:
    """Return a one-line description of a suspension or hold rule, with its times."""
    end = "" if order.until is None else f" until {text.when(order.until)}"
    line = f"{order.id} by {order.who}, {text.span(now - order.since)} ago{end}: "
    return Text(f"{line}{what_of(order)} ({order.reason})", style="yellow")


@output.tabular(cut=("what", "reason"))
def orders_table(row: answers.OrderRow) -> output.Row:
    """Return the table row for one suspension or hold rule."""
    now = time.time()
    return {
        "order": row.id,
        "what": Text(what_of(row), style="yellow"),
        "by": row.who,
        "for": text.span(now - row.since),
        "ends": "–" if row.until is None else text.until(row.until, now),
        "reason": row.reason,
    }
