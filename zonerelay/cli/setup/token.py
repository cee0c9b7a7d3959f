"""`token add|list|remove`: manages the API tokens, whether or not the relay is running.

A token is generated here and printed once. Only the token goes to standard output, so that a script can read
it; the file contains its hash. A running relay applies the change at its next request.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from zonerelay.cli.relay import load_needed
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import OK, CliError, refused
from zonerelay.config.credentials import file as credentials
from zonerelay.config.credentials import identities
from zonerelay.config.credentials.file import CredentialsError
from zonerelay.config.credentials.identities import IdentitiesError, Scope, Token
from zonerelay.config.settings import Settings


def token(arguments: Namespace) -> int:
    settings = load_needed(arguments.config, "spool")
    path = identities.identities_file(settings.spool.path.parent)
    say = output.chatter().print
    with refused(IdentitiesError):
        match arguments.verb:
            case "add":
                _check_user(settings, arguments.name, arguments.scope, arguments.user)
                made = identities.make_token()
                now = time.time()
                expires = now + arguments.lifetime if arguments.lifetime else 0.0
                added = identities.token_of(
                    made, arguments.name, arguments.scope, created=now, expires=expires, user=arguments.user
                )
                identities.add(path, added)
                print(made)
                until = f"expires {text.when(expires)}" if expires else "does not expire"
                say(f"Token {added.name} with scope {added.scope} {until}. It is not shown again.")
            case "list":
                nothing = "There are no tokens: zonerelay token add NAME --scope read makes one."
                output.print_rows(identities.read(path), _table, nothing, as_json=arguments.json)
            case "remove":
                identities.remove(path, arguments.name)
                say(f"Token {arguments.name} was removed: the next request with it is refused.")
    return OK


def _check_user(settings: Settings, name: str, scope: Scope, user: str) -> None:
    """Raise CliError if the token needs a user and has none, or if the user does not exist."""
    path = settings.auth.credentials
    if not user:
        if scope == "submit":
            raise CliError(
                "a token with the scope submit needs a user, whose limits apply: zonerelay token "
                f"add {name} --scope submit --user USER"
            )
        return
    with refused(CredentialsError, after=f". Add the user first: zonerelay user add {user}"):
        found = credentials.read(path)
    if user not in found:
        raise CliError(f"the user {user} is not in {path}; add it with: zonerelay user add {user}")


def _table(tokens: Sequence[Token]) -> Table:
    now = time.time()
    rows = []
    for each in tokens:
        over = bool(each.expires) and each.expires <= now
        expires: output.Cell = text.when(each.expires) if each.expires else "never"
        if over:
            expires = Text(f"{expires} (over)", style="red")
        rows.append([each.name, each.scope, each.user or "-", text.when(each.created), expires])
    return output.table(["name", "scope", "user", "made", "expires"], rows)
