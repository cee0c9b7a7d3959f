"""`suspend` and `resume`: manages suspensions and hold rules for queued and new mail."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from zonerelay.cli.arguments import request_of
from zonerelay.cli.relay import connect
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, USAGE, CliError
from zonerelay.operations import answers
from zonerelay.operations.requests import Orders, Resume, Selectors, Suspend


def suspend(arguments: Namespace) -> int:
    if arguments.list:
        return _list(arguments)
    request = request_of(arguments, Suspend, effect="hold" if arguments.hold else "suspend")
    if request.about == Selectors():
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
    request = request_of(arguments, Resume)
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


def _list(arguments: Namespace) -> int:
    orders, end = connect(arguments).all(Orders(), answers.OrderRow)
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
