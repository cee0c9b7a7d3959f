"""Writes human-readable tables and JSON for scripts to standard output, and messages to standard error.

Colours are used only on a terminal. A pipe gets the same tables, without a limit on their width.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TextIO, TypeVar

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from zonerelay.cli.terminal.exits import FAILED, OK
from zonerelay.cli.terminal.text import clean, clean_lines

if TYPE_CHECKING:
    from zonerelay.operations.answers import EndFrame

PIPE_WIDTH = 100_000
WIDE = 110
"""Columns of a terminal from which a table of deliveries shows everything."""
DELAY = 1.0
"""Seconds that a command takes before it shows a progress bar."""

Cell = str | int | Text
Row = Mapping[str, Cell]
"""The cells of a table's row by the names of its columns."""
Fact = str | Text | tuple[str, ...]
Reach = Callable[[float, float], None]
"""Takes how much is done, and the total, which is 0 if it is not known."""
R = TypeVar("R")
S = TypeVar("S", bound=msgspec.Struct)


class _Console(Console):
    """A console for human-readable tables. It escapes control characters in untrusted text; control sequences
    of rich itself are kept.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment(clean_lines(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError: rich would exit with status 1, but `main` sets the right status."""
        raise BrokenPipeError


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Discard the store's log lines in the block, because the command prints the same information."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def chatter() -> Console:
    return console(sys.stderr)


def tell(words: str) -> None:
    """Print a sentence for the user to standard error, because scripts read standard output."""
    chatter().print(words, soft_wrap=True)


def console(stream: TextIO | None = None) -> Console:
    stream = stream or sys.stdout
    return _Console(
        file=stream,
        width=None if stream.isatty() else PIPE_WIDTH,
        # Addresses and replies are untrusted text: nothing in them is interpreted as markup, an emoji or a
        # number.
        markup=False,
        emoji=False,
        highlight=False,
    )


@dataclass(frozen=True)
class ByWidth:
    """Content that has a wide and a narrow form, of which the width of the terminal selects one."""

    least: int
    wide: Callable[[], RenderableType]
    narrow: Callable[[], RenderableType]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self.wide() if options.max_width >= self.least else self.narrow()


def tabular(
    *, cut: Collection[str] = (), wide: Collection[str] = ()
) -> Callable[[Callable[[R], Row]], Callable[[Iterable[R]], RenderableType]]:
    """Return a decorator that converts a function for the cells of a row into one for a whole table."""
    return lambda cells: lambda rows: table(map(cells, rows), cut=cut, wide=wide)


def table(
    rows: Iterable[Row], *, cut: Collection[str] = (), wide: Collection[str] = (), gap: int = 2
) -> RenderableType:
    """Return a table with one line per row. Only the columns named in `cut` are shortened with an ellipsis: a
    shortened id could not be copied into the next command. Those in `wide` need a terminal of `WIDE` columns.
    Cells may be untrusted text.
    """
    if wide:
        every = list(rows)
        narrow = ({name: cell for name, cell in row.items() if name not in wide} for row in every)
        return ByWidth(WIDE, *(partial(table, each, cut=cut, gap=gap) for each in (every, narrow)))
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for row in rows:
        for name in () if made.columns else row:
            # rich only narrows columns that may wrap; the cells below are then set not to wrap.
            made.add_column(name.upper(), no_wrap=name not in cut)
        made.add_row(*map(_one_line, row.values()))
    return made


def _one_line(cell: Cell) -> Text:
    if isinstance(cell, Text):
        cell.plain = clean(cell.plain)
        return cell
    return Text(clean(cell) if isinstance(cell, str) else f"{cell:,}", no_wrap=True, overflow="ellipsis")


def facts(pairs: Iterable[tuple[str, Fact]]) -> Table:
    """Return a table of names and values, one pair per row; long values wrap. Values may be untrusted text; a
    tuple has one text per line.
    """
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            lines = "\n".join(map(clean, value if isinstance(value, tuple) else (str(value),)))
            made.add_row(name, Text(lines, value.style if isinstance(value, Text) else ""))
    return made


@contextlib.contextmanager
def progress(text: str, *, octets: bool = False) -> Iterator[Reach]:
    """Show a progress bar on standard error after `DELAY` seconds, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich import progress as rich  # a short command never shows a bar

    amount = rich.DownloadColumn() if octets else rich.MofNCompleteColumn()
    words = rich.TextColumn("{task.description}", markup=False)
    columns = (words, rich.BarColumn(), amount, rich.TimeElapsedColumn())
    bar = rich.Progress(*columns, transient=True, console=chatter())
    task = bar.add_task(text, total=None)
    timer = threading.Timer(DELAY, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:
            bar.stop()


@contextlib.contextmanager
def frames_seen(title: str) -> Iterator[Callable[[msgspec.Struct], None]]:
    """Show a progress bar while the frames of a response arrive. Yield a function to call with each frame."""
    from zonerelay.operations.answers import Progress

    done = total = 0
    with progress(title) as reach:

        def saw(frame: msgspec.Struct) -> None:
            nonlocal done, total
            if isinstance(frame, Progress):
                done, total = max(done, frame.done), frame.total
            elif not total:
                done += 1
            reach(done, total)

        yield saw


def completeness(end: EndFrame) -> int:
    """Print which workers have not answered, so that a list is incomplete, and return the exit status."""
    for missing in end.missing:
        tell(f"Missing in this answer: {missing}")
    return FAILED if end.missing else OK


def state(text: str) -> Text:
    """Return the state of a delivery in its colour."""
    word = text.split(" ", maxsplit=1)[0]
    return Text(
        text,
        style={"deferred": "yellow", "suspended": "yellow", "held": "magenta", "active": "green"}.get(
            word, ""
        ),
    )


def print_document(document: object) -> None:
    """Print one JSON document with indentation."""
    _print_json(msgspec.json.format(msgspec.json.encode(document), indent=2), sys.stdout)


def print_line(row: object, stream: TextIO | None = None) -> None:
    """Print one JSON object on one line."""
    _print_json(msgspec.json.encode(row), stream or sys.stdout)


def print_rows(
    rows: Sequence[S], table_of: Callable[[Sequence[S]], RenderableType], nothing: str = "", *, as_json: bool
) -> None:
    """Print rows as a table, or as JSON lines with `--json`. If there are none, print the text `nothing` for
    the user.
    """
    for row in rows if as_json else ():
        print_line(row)
    if rows and not as_json:
        console().print(table_of(rows))
    elif not rows and nothing:
        tell(nothing)


def print_one(answer: S, tell: Callable[[S], object], *, as_json: bool) -> None:
    """Print a response as a JSON document with `--json`, or call `tell` to print it as text."""
    if as_json:
        print_document(answer)
    else:
        tell(answer)


def print_answer(answer: object, words: str, *, as_json: bool) -> None:
    if as_json:
        print_line(answer)
    else:
        print(words)


def _print_json(document: bytes, stream: TextIO) -> None:
    """Print a JSON document with non-printable characters as escapes (RFC 8259, section 7), because they
    could move the cursor.
    """
    characters = document.decode() + "\n"
    if not characters.replace("\n", "").isprintable():
        escaped = (c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in characters)
        characters = "".join(escaped)
    stream.write(characters)
