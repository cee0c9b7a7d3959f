"""A progress bar for a command that takes longer than a second; it is shown on a terminal only."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from zonerelay.control.messages.answers import Frame

DELAY = 1.0


class ProgressBar:
    """Counts frames, or octets, and shows a bar on standard error from `DELAY` seconds on."""

    def __init__(self, text: str, *, enabled: bool = True, octets: bool = False) -> None:
        self._text = text
        self._octets = octets
        self._done = 0
        self._total = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        if enabled and sys.stderr.isatty():
            self._timer = threading.Timer(DELAY, self._show)
            self._timer.daemon = True

    def __enter__(self) -> Self:
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            self._timer = None

    def reach(self, done: int, total: int) -> None:
        """So much of the whole is done; a `total` of 0 is not known."""
        self._done, self._total = done, total
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total or None)

    def saw(self, frame: Frame) -> None:
        """Note one frame: a sign of progress, or one more result."""
        from zonerelay.control.messages.answers import Progress

        if isinstance(frame, Progress):
            self.reach(max(self._done, frame.done), frame.total)
        elif not self._total:
            self.reach(self._done + 1, 0)

    def _show(self) -> None:
        """Runs in the timer's thread, because the main one waits for the relay."""
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        from zonerelay.cli.terminal.output import chatter

        with self._lock:
            if self._timer is None:
                return
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn() if self._octets else MofNCompleteColumn(),
                TimeElapsedColumn(),
                transient=True,
                console=chatter(),
            )
            self._task = self._bar.add_task(self._text, total=self._total or None, completed=self._done)
            self._bar.start()
