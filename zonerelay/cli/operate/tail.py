"""`zonerelay tail` and `zonerelay transcript`: print events or protocol lines as they happen, until
Ctrl-C.
"""

import contextlib
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from rich.console import Console
from rich.text import Text

from zonerelay.cli.arguments import request_of
from zonerelay.cli.relay import connect
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import OK, refused
from zonerelay.operations.answers import Frame, StreamGap
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import Tail, Transcript
from zonerelay.telemetry.events.events import Field
from zonerelay.telemetry.events.records import MailEvent, TranscriptLine

SHORT = 16
"""Characters of an address where the terminal is narrow."""

_STYLES = {
    "accepted": "cyan",
    "delivered": "green",
    "deferred": "yellow",
    "bounced": "red",
    "expired": "red",
    "refused": "magenta",
    "refused-more": "magenta",
    "login-failed": "magenta",
}
_LEVELS = {"warning": "yellow", "error": "bold red"}
_ADDRESSES = ("recipient", "sender", "to", "mailbox", "user", "client")
_FIRST = ("id", "recipient", "host", "reply")
"""Fields without their names, which lead the line."""
_LIFECYCLE = frozenset({"starting", "ready", "stopping", "stopped"})
_ARROWS = {"received": "<", "sent": ">", "note": "*"}


def tail(arguments: Namespace) -> int:
    console = output.console()
    wide = console.width >= output.WIDE

    def show(frame: Frame) -> None:
        if isinstance(frame, StreamGap):
            _print(console, _missed(frame))
        elif isinstance(frame, MailEvent):
            _print(console, event_line(frame, wide=wide))

    return _follow(arguments, Tail, show, sys.stdout)


def _follow(
    arguments: Namespace, request: type[Tail | Transcript], show: Callable[[Frame], None], stream: TextIO
) -> int:
    """Print a stream of events or protocol lines until it ends or the user presses Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        for frame in connect(arguments).stream(request_of(arguments, request)):
            if not arguments.json:
                show(frame)
            elif isinstance(frame, MailEvent | TranscriptLine | StreamGap):
                output.print_line(frame, stream)
            stream.flush()
    return OK


class EventLog:
    """Prints log events to a console, in the format of `tail`."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def emit(self, level: str, event: str, fields: Mapping[str, Field]) -> None:
        if event not in _LIFECYCLE:
            mail_event = MailEvent(at=time.time(), level=level, event=event, fields=dict(fields))
            _print(self._console, event_line(mail_event, wide=self._console.width >= output.WIDE))


def _print(console: Console, line: Text) -> None:
    console.print(line, no_wrap=True, overflow="ellipsis", crop=console.is_terminal)


def event_line(event: MailEvent, *, wide: bool) -> Text:
    """Format one event: time, worker, event name and fields, the most useful fields first. The line is cut at
    the width of the terminal. On a narrow terminal, addresses are shortened and the host is omitted (`--json`
    includes it).
    """
    worker = "" if event.worker is None else f"{event.worker} "
    line = Text(f"{_clock(event.at)} {worker}", style="")
    line.append(f"{event.event:<9} ", style=_STYLES.get(event.event) or _LEVELS.get(event.level, ""))
    fields = {name: value for name, value in event.fields.items() if value not in ("", None)}
    if not wide:
        for name in fields.keys() & set(_ADDRESSES):
            address = str(fields[name])
            fields[name] = address if len(address) <= SHORT else address[: SHORT - 1] + "…"
        fields.pop("host", None)
    words = [text.clean(str(fields.pop(name))) for name in _FIRST if name in fields]
    if event.event == "accepted":
        words += [text.clean(f"{fields.pop('sender', '')} > {fields.pop('to', '')}")]
    words += [f"{name}={text.clean(str(value))}" for name, value in fields.items()]
    return line.append(" ".join(words))


def transcript(arguments: Namespace) -> int:
    with _opened(arguments) as (console, stream):

        def show(frame: Frame) -> None:
            if isinstance(frame, StreamGap):
                (console if frame.count else output.chatter()).print(_missed(frame), soft_wrap=True)
            elif isinstance(frame, TranscriptLine):
                console.print(said(frame), soft_wrap=True)

        return _follow(arguments, Transcript, show, stream)


def said(line: TranscriptLine) -> Text:
    """Format a line of a transcript: `<` was received by the relay, `>` was sent by it, `*` is a note."""
    worker = "" if line.worker is None else f"{line.worker}."
    head = f"{_clock(line.at, 3)} {'in' if line.side == 'inbound' else 'out'} {worker}{line.session} "
    style = {"received": "cyan", "sent": "green"}.get(line.direction, "dim")
    peer = f"{line.peer} " if line.direction == "note" else ""
    return Text(head).append(f"{_ARROWS[line.direction]} {peer}{text.clean(line.text)}", style=style)


@contextlib.contextmanager
def _opened(arguments: Namespace) -> Iterator[tuple[Console, TextIO]]:
    if arguments.out is None:
        yield output.console(), sys.stdout
        return
    with refused(OSError, before="cannot write "):
        # The file contains addresses and possibly more, so only its owner may read it.
        descriptor = os.open(arguments.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        try:
            yield output.console(stream), stream
        except ControlError:
            if not stream.tell():
                arguments.out.unlink()
            raise
    output.tell(f"Written to {arguments.out}.")


def _missed(frame: StreamGap) -> Text:
    why = f"{text.plural(frame.count, 'line')} skipped: this reader is too slow" if frame.count else ""
    return Text(f"… {why or text.clean(frame.why)}", style="yellow")


def _clock(at: float, digits: int = 0) -> str:
    fraction = f"{at % 1:.{digits}f}"[1:] if digits else ""
    return time.strftime("%H:%M:%S", time.localtime(at)) + fraction
