"""Where a new password comes from: a terminal (asked twice, not shown), standard input, or random numbers.

Never from the command line, where every user of the machine can read it. What is refused is refused before
anything is changed.
"""

from __future__ import annotations

import getpass
import secrets
import sys
from argparse import Namespace

from zonerelay.cli.terminal.exits import FAILED, USAGE, CliError
from zonerelay.smtp.server.sasl import MAX_PASSWORD, prepare_password

MIN_PASSWORD = 8
"""Characters. Shorter ones are found by trying, whatever the hash."""

_GENERATED_OCTETS = 18  # 24 characters, 144 bits


def new_password(arguments: Namespace, name: str) -> str:
    """Raises CliError. A generated one is for the caller to show, once it is in force."""
    if arguments.generate:
        return secrets.token_urlsafe(_GENERATED_OCTETS)
    if arguments.password_stdin:
        return _checked(_from_input(), name)
    if not sys.stdin.isatty():
        raise CliError(
            "nobody to ask for a password on this input: add --password-stdin to read it from there, "
            "or --generate to get one",
            USAGE,
        )
    password = _checked(_asked(f"Password for {name}: "), name)
    if prepare_password(_asked("The same again: ")) != password:
        raise CliError("the two are not the same; nothing was changed")
    return password


def _asked(prompt: str) -> str:
    try:
        return getpass.getpass(prompt)
    except EOFError:  # Ctrl-D
        raise CliError("there is no password; nothing was changed") from None


def _from_input() -> str:
    """One line; its line end does not belong to the password."""
    # Two octets more than fit: a line end, and one to see that there is more.
    data = sys.stdin.buffer.read(MAX_PASSWORD + 3)
    try:
        password = data.decode()
    except UnicodeDecodeError:
        password = ""
    if data and not password:
        raise CliError("the password is not UTF-8", FAILED)
    return password.removesuffix("\n").removesuffix("\r")


def _checked(password: str, name: str) -> str:
    if not password:
        raise CliError("there is no password; nothing was changed")
    if not all(c.isprintable() or c.isspace() for c in password) or "\n" in password or "\r" in password:
        raise CliError("a password is one line without control characters; nothing was changed")
    # What is hashed is what a client's password will be turned into.
    prepared = prepare_password(password)
    if len(prepared.encode()) > MAX_PASSWORD:
        raise CliError(f"a password has at most {MAX_PASSWORD} octets; nothing was changed")
    if len(prepared) < MIN_PASSWORD or prepared == name:
        raise CliError(
            f"too weak: a password needs {MIN_PASSWORD} characters or more and is not the user's name "
            "(--generate makes a good one); nothing was changed"
        )
    return prepared
