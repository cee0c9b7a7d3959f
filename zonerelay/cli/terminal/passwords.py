"""Passwords from a terminal, where they are not shown, or from one line of standard input.

Raises CliError. A password is never on the command line, where every user of the machine can read it.
"""

from __future__ import annotations

import getpass
import sys

from zonerelay.cli.terminal.exits import CliError
from zonerelay.smtp.server.sasl import MAX_PASSWORD


def ask(prompt: str) -> str:
    try:
        return getpass.getpass(prompt)
    except EOFError:  # Ctrl-D
        raise CliError("there is no password; nothing was changed") from None


def read_line() -> str:
    """Reads one line; its line end does not belong to the password."""
    # Two octets more than fit: a line end, and one to see that there is more.
    data = sys.stdin.buffer.read(MAX_PASSWORD + 3)
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise CliError("the password is not UTF-8") from None
