"""AUTH and the credentials file.

Invariants: only `CommandError` and `CredentialsError` are raised; an exchange ends after three
responses; what a client said is bounded, and spelled the other way comes out the same; no password and no
hash is shown; a file that was read is written back as the same users.
"""

import base64
import re

from tests.fuzz.targets.commands import refusal
from zonerelay.config.credentials import file as credentials_file
from zonerelay.config.credentials.file import CredentialsError, format_line, parse
from zonerelay.model.reply import Reply
from zonerelay.smtp.server import sasl as server_sasl
from zonerelay.smtp.server.paths import CommandError
from zonerelay.smtp.server.sasl import MAX_USER, MECHANISMS, Credentials, SaslExchange, parse_auth

MAX_RESPONSES = 3
FILE_NAME = "credentials"
_SALT_OR_HASH = re.compile(r"\$[A-Za-z0-9+/]{16}")
_A_PATTERN = re.compile(r"is not a domain|is not an address pattern")  # of a sender; no hash belongs there


def sasl(data: bytes) -> None:
    """An argument of AUTH, and the lines behind it."""
    argument, *lines = data.decode("utf-8", "replace").split("\n")
    try:
        mechanism, initial = parse_auth(argument)
        assert mechanism in MECHANISMS
        said = _converse(SaslExchange(mechanism), [initial, *lines])
    except CommandError as error:
        refusal(error.reply)
        return
    if said is not None:
        _check(said)


def _converse(exchange: SaslExchange, lines: list[str | None]) -> Credentials | None:
    for number, line in enumerate(lines):
        assert number < MAX_RESPONSES
        said = exchange.respond(line)
        if isinstance(said, Credentials):
            return said
        _check_challenge(said)
    return None


def _check_challenge(reply: Reply) -> None:
    assert reply.code == 334
    base64.b64decode(reply.text, validate=True)


def _check(said: Credentials) -> None:
    assert 0 < len(said.user.encode()) <= MAX_USER
    assert 0 < len(said.password.encode()) <= server_sasl.MAX_PASSWORD
    assert said.user.isprintable()
    assert repr(said) == "Credentials()"
    plain = base64.b64encode(f"\0{said.user}\0{said.password}".encode()).decode()
    assert "\0" not in said.password
    assert SaslExchange("PLAIN").respond(plain) == said
    login = SaslExchange("LOGIN")
    login.respond(base64.b64encode(said.user.encode()).decode())
    assert login.respond(base64.b64encode(said.password.encode()).decode()) == said


def credentials(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    try:
        users = parse(text, FILE_NAME)
    except CredentialsError as error:
        _check_error(str(error), text)
        return
    for name, user in users.items():
        assert name == user.name
        assert len(name.encode()) <= credentials_file.MAX_NAME
        assert user.hash not in repr(user)
    assert parse("\n".join(map(format_line, users.values())), FILE_NAME) == users


def _check_error(said: str, text: str) -> None:
    """It names the file and a line that is in it, on one line, and shows no hash."""
    assert "\n" not in said
    assert 1 <= int(said.removeprefix(f"{FILE_NAME}:").partition(":")[0]) <= text.count("\n") + 1
    assert not _SALT_OR_HASH.search(said) or _A_PATTERN.search(said)
