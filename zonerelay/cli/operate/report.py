"""`zonerelay report`: what the daily report says, of the time until now."""

from __future__ import annotations

import socket
import time
from argparse import Namespace

from zonerelay.cli.relay import load_for_reading
from zonerelay.cli.terminal import text
from zonerelay.cli.terminal.exits import OK
from zonerelay.config.hostname import resolve_hostname
from zonerelay.control.report import report


def show(arguments: Namespace) -> int:
    settings = load_for_reading(arguments.config)
    now = time.time()
    print(
        text.clean_lines(
            report(settings, resolve_hostname(settings, socket.getfqdn), now - arguments.since, now)
        ),
        end="",
    )
    return OK
