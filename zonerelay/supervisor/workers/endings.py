"""Why a worker ended, in words for the log and for `zonerelay status`. Pure."""

from __future__ import annotations

import signal


def ending(status: int, *, killed_because: str = "", last_words: str = "") -> str:
    """`status` as asyncio has it: negative is a signal."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        why = f"killed by {name}"
    else:
        why = f"exited with status {status}"
    if killed_because:
        why = f"{killed_because}; {why}"
    return f"{why}: {last_words}" if last_words else why
