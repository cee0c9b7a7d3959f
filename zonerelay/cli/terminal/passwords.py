"""Reads passwords from a terminal, without showing them, or from one line of standard input.

Errors are raised as CliError. A password is never on the command line, where every user of the machine could
read it.
"""

import getpass
import sys

from zonerelay.cli.terminal.exits import CliError
from zonerelay.smtp.server.sasl import MAX_PASSWORD

_NOT_UTF8 = "the password is not UTF-8"


def ask(prompt: str) -> str:
    try:
        return getpass.getpass(prompt)
    except EOFError:  # Ctrl-D
        raise CliError("no password was given; nothing was changed") from None
    except UnicodeDecodeError:  # the terminal has another character set
        raise CliError(_NOT_UTF8) from None


def read_line() -> str:
    """Read a password from one line of standard input, without the line end."""
    # Two bytes more than the maximum: one for the line end, and one to detect a longer line.
    data = sys.stdin.buffer.read(MAX_PASSWORD + 3)
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise CliError(_NOT_UTF8) from None
