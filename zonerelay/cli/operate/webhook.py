"""`zonerelay webhook list`, `test` and `replay`: the endpoints that receive events."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from zonerelay.cli.arguments import request_of
from zonerelay.cli.relay import connect
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK
from zonerelay.operations.answers import WebhookReplayed, WebhookRow, WebhookTested
from zonerelay.operations.requests import WebhookList, WebhookReplay, WebhookTest

_STYLES = {"ok": "green", "failing": "yellow"}


def list_webhooks(arguments: Namespace) -> int:
    rows, end = connect(arguments).all(WebhookList(), WebhookRow)
    nothing = "No [[webhook]] is configured."
    output.print_rows(rows, _table, nothing, as_json=arguments.json)
    return output.completeness(end)


def _table(rows: Sequence[WebhookRow]) -> Table:
    now = time.time()
    cells: list[list[output.Cell]] = [
        [
            row.name,
            Text(row.state, style=_STYLES.get(row.state, "red")),
            f"{row.queued:,}",
            "-" if row.oldest is None else text.span(now - row.oldest),
            f"{row.delivered:,}",
            text.clean(row.problem) or "-",
            text.clean(row.url),
        ]
        for row in rows
    ]
    columns = ["name", "state", "queued", "oldest", "delivered", "last answer", "url"]
    return output.table(columns, cells, cut=("last answer", "url"))


def test(arguments: Namespace) -> int:
    answer = connect(arguments).ask(request_of(arguments, WebhookTest), WebhookTested)
    words = f"{arguments.name}: {'taken' if answer.ok else 'not taken'}: {text.clean(answer.text)}"
    output.print_answer(answer, words, as_json=arguments.json)
    return OK if answer.ok else FAILED


def replay(arguments: Namespace) -> int:
    answer = connect(arguments).ask(request_of(arguments, WebhookReplay), WebhookReplayed)
    words = f"{arguments.name}: {text.plural(answer.queued, 'event')} being sent"
    output.print_answer(answer, words, as_json=arguments.json)
    return OK
