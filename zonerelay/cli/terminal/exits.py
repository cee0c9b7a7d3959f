"""Exit statuses, and the error that ends a command with a message instead of a traceback."""

import contextlib
import sys
from collections.abc import Iterator

OK = 0
FAILED = 1
USAGE = 2
"""Also a configuration that is wrong."""
INTERRUPTED = 130
BROKEN_PIPE = 141
"""What a shell shows for a program that SIGPIPE ended, as `zonerelay queue list | head` should."""


class CliError(Exception):
    """An error that ends a command with a message. The text is printed to standard error unchanged; `status`
    is the exit status.
    """

    def __init__(self, text: str, status: int = FAILED) -> None:
        super().__init__(text)
        self.status = status


def complain(words: str) -> None:
    """Print an error or a warning to standard error, unless it is empty."""
    from zonerelay.cli.terminal.text import clean_lines

    if words:
        print(f"zonerelay: {clean_lines(words)}", file=sys.stderr)


@contextlib.contextmanager
def refused(
    *errors: type[Exception], status: int = FAILED, before: str = "", after: str = ""
) -> Iterator[None]:
    """Convert these exceptions in the block to CliError, with text before and after the message."""
    try:
        yield
    except errors as error:
        what = str(error)
        if isinstance(error, OSError) and error.strerror:  # Python begins with "[Errno 2]"
            what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        raise CliError(f"{before}{what}{after}", status) from error
