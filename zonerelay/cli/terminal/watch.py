"""A view on a terminal that is drawn again every few seconds, until the person presses q or Ctrl-C."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable

from rich.console import RenderableType
from rich.live import Live

from zonerelay.cli.terminal import output
from zonerelay.cli.terminal.exits import OK, USAGE, CliError

INTERVAL = 2.0


def watch(view: Callable[[], RenderableType]) -> int:
    """Raises CliError where there is no terminal. The screen is as before at the end."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CliError("--watch draws on a terminal, and here is none", USAGE)
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        with Live(view(), console=output.console(), screen=True, auto_refresh=False) as live:
            while not _left(keys, INTERVAL):
                live.update(view(), refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
    return OK


def _left(keys: int, seconds: float) -> bool:
    """Waits, and returns whether the person wants to leave; other keys do nothing."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([keys], [], [], left)[0] and os.read(keys, 1).lower() in (b"q", b""):
            return True
    return False
