"""The server side of SASL: PLAIN (RFC 4616) and LOGIN within the AUTH exchange of RFC 4954.

One `SaslExchange` turns the client's responses into challenges and, at the end, `Credentials`; another module
checks them. Refusals are `CommandError`s, which end the exchange:

- 501 5.5.2: not strict base64 (one spelling only), not UTF-8, or not a response of the mechanism;
- 501 5.7.0: the client gave up with `*`;
- 535 5.7.8: understood, but no user could have them (empty, too long, unprintable name, acting for another
  user). It is sent before the password is checked, so it reveals nothing about users.

User names and passwords are prepared as RFC 8265 does where clients differ, and no further: other spaces
become U+0020 in passwords, both are NFC. Case is kept. `prepare_*` also serve the code that stores them.
"""

import binascii
import re
import unicodedata
from dataclasses import dataclass, field

from zonerelay.model.reply import Reply
from zonerelay.smtp.server.paths import CommandError, command_error

MECHANISMS = ("PLAIN", "LOGIN")

MAX_AUTH_LINE = 12288
"""RFC 4954 4: what a server has to take in one line of the exchange, CRLF included."""

MAX_USER = 255
"""Octets of UTF-8; RFC 4616 2 says the same."""

MAX_PASSWORD = 1024
"""Octets of UTF-8: generous for a token, and a bound for what is hashed."""

LINE_TOO_LONG = Reply(500, "5.6", "Authentication exchange line is too long")

_MECHANISM = re.compile(r"[A-Za-z0-9_-]{1,20}", re.ASCII)  # RFC 4422 3.1
_CHALLENGES = ("VXNlcm5hbWU6", "UGFzc3dvcmQ6")  # "Username:", "Password:"


@dataclass(frozen=True, slots=True)
class Credentials:
    """The user name and password that a client has sent, before they are checked. `repr` shows neither,
    because users confuse the fields.
    """

    user: str = field(repr=False)
    password: str = field(repr=False)


def parse_auth(argument: str) -> tuple[str, str | None]:
    """Parse the argument of AUTH: the mechanism in upper case, and the initial response as sent, or
    `None`.
    """
    words = argument.split()
    if not 1 <= len(words) <= 2 or not _MECHANISM.fullmatch(words[0]):
        raise command_error(501, "5.4", "Syntax: AUTH mechanism [initial-response]")
    mechanism = words[0].upper()
    if mechanism not in MECHANISMS:
        raise command_error(504, "5.4", "Unrecognized authentication mechanism")
    return mechanism, words[1] if len(words) == 2 else None


class SaslExchange:
    """The server side of one AUTH exchange. `respond` first takes the initial response, then each line of the
    client without CRLF.
    """

    def __init__(self, mechanism: str) -> None:
        self.mechanism = mechanism
        self._plain = mechanism == "PLAIN"
        self._begun = False
        self._user: str | None = None

    def respond(self, text: str | None) -> Reply | Credentials:
        """Process a response of the client, and return the next challenge (334) or the credentials. Raise
        CommandError if the exchange has failed.
        """
        initial, self._begun = not self._begun, True
        # RFC 4954 4: "=" is an empty initial response. Neither mechanism can mean one, so a client that sends
        # it is asked, as if nothing had been sent.
        if text is None or (initial and text == "="):
            return self._challenge()
        if text == "*":
            raise command_error(501, "7.0", "Authentication cancelled")
        response = _decode(text)
        return self._take_plain(response) if self._plain else self._take_login(response)

    def _challenge(self) -> Reply:
        if self._plain:
            return Reply(334, "", "")
        return Reply(334, "", _CHALLENGES[self._user is not None])

    def _take_plain(self, response: str) -> Credentials:
        parts = response.split("\0")
        if len(parts) != 3:
            raise _malformed()
        authzid, user, password = parts
        user = prepare_user(user)
        # Acting for another user is not allowed here (RFC 4616 2: the exchange fails).
        if authzid and prepare_user(authzid) != user:
            raise _impossible()
        return _credentials(user, password)

    def _take_login(self, response: str) -> Reply | Credentials:
        if "\0" in response:
            raise _malformed()
        if self._user is None:
            # An impossible name is refused with its password, when the client expects an answer.
            self._user = prepare_user(response)
            return self._challenge()
        return _credentials(self._user, response)


def prepare_user(name: str) -> str:
    """Normalize a user name to NFC (RFC 8265 3.4, UsernameCasePreserved)."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def prepare_password(password: str) -> str:
    """Normalize a password to NFC with ASCII spaces (RFC 8265 4.2, OpaqueString)."""
    if password.isascii():
        return password
    spaced = "".join(" " if unicodedata.category(c) == "Zs" else c for c in password)
    return unicodedata.normalize("NFC", spaced)


def _credentials(user: str, password: str) -> Credentials:
    password = prepare_password(password)
    possible = (
        0 < len(user.encode()) <= MAX_USER
        and user.isprintable()
        and 0 < len(password.encode()) <= MAX_PASSWORD
    )
    if not possible:
        raise _impossible()
    return Credentials(user, password)


def _decode(text: str) -> str:
    decoded = _strictly(text)
    # Raised out here, because an exception of the decoders holds the response, and with it the password.
    if decoded is None:
        raise _malformed()
    return decoded


def _strictly(text: str) -> str | None:
    try:
        data = binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
        # Bits that are left over must be zero (RFC 4648 3.5): one value has one spelling.
        exact = binascii.b2a_base64(data, newline=False).decode("ascii") == text
        return data.decode() if exact else None
    except ValueError:  # binascii.Error and Unicode's two are ValueErrors
        return None


def _malformed() -> CommandError:
    return command_error(501, "5.2", "Bad authentication response: base64 of UTF-8 expected")


def _impossible() -> CommandError:
    return command_error(535, "7.8", "Authentication credentials invalid")
