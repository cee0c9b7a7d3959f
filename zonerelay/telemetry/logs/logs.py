"""Writes one JSON or text line per event to standard error, without blocking mail.

Lines gather during one pass of the event loop and leave in one write at its end; at exit, and when an
error reaches the top, what is left is written. `emit` never raises and never waits: when the reader
of a pipe is behind, lines wait in a bounded buffer, then are dropped, and a `log-dropped` event says
how many as soon as there is room. Only `close` waits for a slow reader, for at most a second. No field is
longer than `MAX_FIELD`, whatever it quotes: a longer one ends in "…" and the number of its characters. Of
what a client without permission can cause at will there are `IN_FULL` lines of each kind a minute, and a
`log-limited` line with the number of the others.

Python's own `logging` (libraries, and asyncio's reports of our bugs) arrives here as event `log`.

Refusals in the log: the first ones of each client have a line each, later ones are counted.

A client can have thousands of commands refused in a second, and the log must not fill the disk. In each
interval of `INTERVAL` seconds `IN_FULL` refusals of a client are logged, and `ALL_IN_FULL` of all clients
without permission to relay together. At the end of the interval one line per client (`refused-more`) gives
the number of the others. The metrics count every refusal.
"""

import asyncio
import atexit
import contextlib
import json
import logging
import os
import select
import stat
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import IO

import msgspec

from zonerelay.model.clock import Clock

Tell = Callable[[str, Counter[str]], None]
"""Takes a client, or `others`, and the number of its refusals by reason."""
OTHERS = "others"

IN_FULL = 20
ALL_IN_FULL = 500

MAX_CLIENTS = 1000
"""Clients that are counted by themselves."""
TOLD = 50
"""Of those, the worst have a line each, and the others one line together."""


class _ClientLines:
    """The log lines of one client in an interval: the number written, and the counts of those suppressed."""

    __slots__ = ("more", "shown")

    def __init__(self) -> None:
        self.shown = 0
        self.more: Counter[str] = Counter()


class LineLimits:
    """Limits on the log lines that clients can cause, per interval of `INTERVAL` seconds. An interval begins
    with a line. A timer of the event loop ends it, or the next line. Threads may call it.
    """

    def __init__(self, tell: Tell, now: Callable[[], float]) -> None:
        self._tell = tell
        self._now = now
        self._lock = threading.RLock()
        self._began = 0.0
        self._clients: dict[str, _ClientLines] = {}
        self._others: Counter[str] = Counter()
        self._shown = 0
        self._timer: asyncio.TimerHandle | None = None

    def shows(self, client: str, reason: str, *, known: bool = False) -> bool:
        """Return whether to log an event of a client as a line; otherwise count it. `known` clients are
        permitted to relay.
        """
        with self._lock:
            if not 0.0 <= self._now() - self._began < INTERVAL:
                self.tell()
            found = self._clients.get(client)
            if found is None:
                if len(self._clients) >= MAX_CLIENTS:
                    self._others[reason] += 1
                    return False
                if not self._clients:
                    self._begin()
                found = self._clients[client] = _ClientLines()
            if found.shown < IN_FULL and (known or self._shown < ALL_IN_FULL):
                found.shown += 1
                self._shown += not known
                return True
            found.more[reason] += 1
            return False

    def tell(self) -> None:
        """End the interval, and log the counts of suppressed lines."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            counted = [(client, found.more) for client, found in self._clients.items() if found.more]
            others, self._others = self._others, Counter()
            self._clients.clear()
            self._shown = 0
        counted.sort(key=lambda each: -each[1].total())
        for client, more in counted[:TOLD]:
            self._tell(client, more)
        for _, more in counted[TOLD:]:
            others += more
        if others:
            self._tell(OTHERS, others)

    def _begin(self) -> None:
        self._began = self._now()
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread
            self._timer = asyncio.get_running_loop().call_later(INTERVAL, self.tell)


Field = str | int | float | bool | None

MAX_BUFFERED = 1024 * 1024
MAX_TRACEBACK_LINES = 40

MAX_FIELD = 1000
"""Characters of one field."""
MAX_TRACEBACK = 8000
MAX_LINE = 16_384
"""Bytes of one line: a control character in a field takes six of them."""
RETRY_SECONDS = 0.1
CLOSE_SECONDS = 1.0
# A pipe that polls as writable takes this much without blocking (POSIX write(2), PIPE_BUF).
PIPE_BUF = select.PIPE_BUF

LIMITED: Mapping[str, str] = {"trouble": "where", "log": "logger", "policy-failed": "step"}
"""Events that clients without permission can cause as often as they like, each with the field by which its
lines are counted. Refusals and failed log-ins have a limit of their own (`telemetry/logs/logs`).
"""
INTERVAL = 60.0

_TIMES = frozenset(("until", "kept_until", "next_attempt", "expires"))
"""Fields with Unix times. People, who read format "text", get them as that of the line."""

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:@/+,<>[]…")


class LogWriter:
    """Writes log lines to a file descriptor. There is one per process; all threads may use it."""

    def __init__(self, *, clock: Clock, descriptor: int, format: str, worker: int | None = None) -> None:
        self._worker: dict[str, Field] = {} if worker is None else {"worker": worker}
        self._now = clock.now
        self._descriptor = descriptor
        self._never_blocks = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._render = _text_line if format == "text" else _json_line
        self._lines: deque[bytes] = deque()
        self._buffered = 0
        self._lock = threading.RLock()
        # The loop itself, not a flag: a loop that was closed in between will never flush.
        self._scheduled_on: asyncio.AbstractEventLoop | None = None
        self._second = -1
        self._stamp = ""
        self._unreported = 0
        self._limits = LineLimits(self._limited, clock.now)
        self.dropped = 0

    def emit(self, level: str, event: str, fields: Mapping[str, Field]) -> None:
        """Queue an event, which is written at the end of the event loop's iteration, or at once without an
        event loop.
        """
        by = LIMITED.get(event)
        if by is None or self._limits.shows(f"{event} {fields.get(by, '')}", event, known=True):
            self._queue(level, event, fields)

    def _limited(self, client: str, more: Counter[str]) -> None:
        event, _, kind = client.partition(" ")
        self._queue("warning", "log-limited", {"of": event, "kind": kind, "count": more.total()})

    def _queue(self, level: str, event: str, fields: Mapping[str, Field]) -> None:
        line = self._line(level, event, fields)
        if self._buffered + len(line) > MAX_BUFFERED:
            self.dropped += 1
            self._unreported += 1
            return
        self._buffered += len(line)
        self._lines.append(line)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no loop runs in this thread
            self.flush()
            return
        if self._scheduled_on is not loop:
            loop.call_soon(self._flush_turn, loop)
            self._scheduled_on = loop

    def flush(self) -> bool:
        """Write as many queued lines as possible without waiting. Return true if nothing is left."""
        with self._lock:
            while self._lines:
                if not self._is_writable(0.0):
                    return False
                self._write(self._next_piece())
            if self._unreported:
                count, self._unreported = self._unreported, 0
                self._write(self._line("error", "log-dropped", {"count": count}))
            # Threads count without the lock, so a sum may be lost.
            self._buffered = 0
            return True

    def close(self) -> None:
        """Write the queued lines, waiting a short time for a slow reader. Later events are still written."""
        self._limits.tell()
        deadline = time.monotonic() + CLOSE_SECONDS
        while not self.flush() and time.monotonic() < deadline:
            self._is_writable(RETRY_SECONDS)

    def _flush_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled_on = None
        if not self.flush():
            self._scheduled_on = loop
            loop.call_later(RETRY_SECONDS, self._flush_turn, loop)

    def _is_writable(self, wait: float) -> bool:
        if self._never_blocks:
            return True
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(wait * 1000))

    def _next_piece(self) -> bytes:
        """Remove and return as many queued lines as fit into one write, or a part of a longer line."""
        lines = self._lines
        if self._never_blocks:
            return b"".join([lines.popleft() for _ in range(len(lines))])  # a thread may add more meanwhile
        taken = [lines.popleft()]
        size = len(taken[0])
        if size > PIPE_BUF:
            lines.appendleft(taken[0][PIPE_BUF:])
            return taken[0][:PIPE_BUF]
        while lines and size + len(lines[0]) <= PIPE_BUF:
            size += len(lines[0])
            taken.append(lines.popleft())
        return b"".join(taken)

    def _write(self, piece: bytes) -> None:
        self._buffered -= len(piece)
        try:
            written = os.write(self._descriptor, piece)
            if written < len(piece):  # a full disk, or a signal in between
                os.write(self._descriptor, piece[written:])
        except OSError:
            # The reader is gone or the disk is full. This cannot be reported anywhere; the count remains.
            self.dropped += piece.count(b"\n")

    def _line(self, level: str, event: str, fields: Mapping[str, Field]) -> bytes:
        now = self._now()
        second = int(now)
        if second != self._second:
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second
        stamp = f"{self._stamp}.{int((now - second) * 1000):03d}Z"
        try:
            whole = {**self._worker, **fields} if self._worker else fields
            line = self._render(stamp, level, event, whole)
            if len(line) > MAX_FIELD:
                line = self._shortened(line, stamp, level, event, whole)
            return line
        except Exception as error:  # noqa: BLE001 - a log line must never stop mail
            return _last_resort(stamp, level, event, fields, error)

    def _shortened(
        self, line: bytes, stamp: str, level: str, event: str, fields: Mapping[str, Field]
    ) -> bytes:
        for most in (MAX_FIELD, MAX_FIELD // 10):
            short = {name: _cut(name, value, most) for name, value in fields.items()}
            if short != fields:
                line = self._render(stamp, level, event, short)
            if len(line) <= MAX_LINE:
                break
        return line


def _cut(name: str, value: Field, most: int) -> Field:
    most = most * MAX_TRACEBACK // MAX_FIELD if name == "traceback" else most
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]}… ({len(value)} characters)"
    return value


_encode = msgspec.json.Encoder().encode


def _json_line(stamp: str, level: str, event: str, fields: Mapping[str, Field]) -> bytes:
    return _encode({"time": stamp, "level": level, "event": event, **fields}) + b"\n"


def _text_line(stamp: str, level: str, event: str, fields: Mapping[str, Field]) -> bytes:
    words = [stamp, f"{level:<7}", event]
    words += [
        f"{name}={_time(value) if name in _TIMES else _text_value(value)}"
        for name, value in fields.items()
        if value not in ("", None)
    ]
    return (" ".join(words) + "\n").encode("utf-8", "backslashreplace")


def _time(value: Field) -> str:
    if not isinstance(value, int | float):
        return _text_value(value)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(value))


def _text_value(value: Field) -> str:
    text = str(value)
    return text if _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=not text.isprintable())


def _last_resort(stamp: str, level: str, event: str, fields: Mapping[str, Field], error: Exception) -> bytes:
    """Format an event in ASCII if a value cannot be formatted normally, such as a text with an unpaired
    surrogate.
    """
    shown = {str(name): _cut("", ascii(value), MAX_FIELD // 10) for name, value in fields.items()}
    whole = {
        "time": stamp,
        "level": level,
        "event": event,
        **shown,
        "log_error": _cut("", ascii(error), MAX_FIELD),
    }
    return json.dumps(whole).encode("ascii") + b"\n"


class _LoggingHandler(logging.Handler):
    """Passes records of Python's logging module to the log. The text may quote anything, so it is redacted
    line by line.
    """

    def __init__(self, sink: LogWriter, redact: Callable[[str], str]) -> None:
        super().__init__()
        self.sink = sink
        self._redact = redact

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields: dict[str, Field] = {"logger": record.name, "text": self._redact(record.getMessage())}
            if record.exc_info:
                lines = "".join(traceback.format_exception(*record.exc_info)).splitlines()
                fields["traceback"] = "\n".join(map(self._redact, lines[-MAX_TRACEBACK_LINES:]))
            self.sink.emit(record.levelname.lower(), "log", fields)
        except Exception as error:  # noqa: BLE001 - a bad format string in a library must not stop mail
            self.sink.emit("error", "log", {"logger": record.name, "text": ascii(error)})


def configure(
    format: str,
    *,
    clock: Clock,
    redact: Callable[[str], str] = str,
    stream: IO[bytes] | None = None,
    worker: int | None = None,
) -> LogWriter:
    """Create the log writer, and send Python's logging to it; a second call replaces the first writer.

    `format` is "json" or "text".
    """
    descriptor = (stream or sys.stderr).fileno()
    sink = LogWriter(clock=clock, descriptor=descriptor, format=format, worker=worker)
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _LoggingHandler):
            root.removeHandler(handler)
            atexit.unregister(handler.sink.close)
            handler.sink.close()
    root.addHandler(_LoggingHandler(sink, redact))
    root.setLevel(logging.WARNING)
    # aiosmtpd logs every command line and address at INFO, whatever the root says.
    logging.getLogger("mail.log").setLevel(logging.WARNING)
    atexit.register(sink.close)
    return sink
