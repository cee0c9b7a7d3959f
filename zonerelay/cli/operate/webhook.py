"""`zonerelay webhook list`, `test` and `replay`: the endpoints that are told of events."""

from __future__ import annotations

import time
from argparse import Namespace

from rich.text import Text

from zonerelay.cli.relay import connect
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK
from zonerelay.control.messages.answers import WebhookReplayed, WebhookRow, WebhookTested
from zonerelay.control.messages.requests import WebhookList, WebhookReplay, WebhookTest

_STYLES = {"ok": "green", "failing": "yellow"}


def list_webhooks(arguments: Namespace) -> int:
    rows, end = connect(arguments.config).all(WebhookList(), WebhookRow)
    if arguments.json:
        for row in rows:
            output.print_line(row)
        return output.completeness(end)
    if not rows:
        output.chatter().print("The configuration has no [[webhook]].")
        return output.completeness(end)
    now = time.time()
    columns = ["name", "state", "queued", "oldest", "delivered", "last answer", "url"]
    output.console().print(
        output.table(
            columns,
            [
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
            ],
            cut=("last answer", "url"),
        )
    )
    return output.completeness(end)


def test(arguments: Namespace) -> int:
    answer = connect(arguments.config).ask(WebhookTest(name=arguments.name), WebhookTested)
    if arguments.json:
        output.print_line(answer)
    else:
        print(f"{arguments.name}: {'taken' if answer.ok else 'not taken'}: {text.clean(answer.text)}")
    return OK if answer.ok else FAILED


def replay(arguments: Namespace) -> int:
    since = None if arguments.since is None else time.time() - arguments.since
    answer = connect(arguments.config).ask(WebhookReplay(name=arguments.name, since=since), WebhookReplayed)
    if arguments.json:
        output.print_line(answer)
    else:
        print(f"{arguments.name}: {text.plural(answer.queued, 'event')} on the way")
    return OK
