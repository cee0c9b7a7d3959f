"""The client side of SASL: the mechanisms, which respond to a server's challenges. No I/O.

PLAIN (RFC 4616), LOGIN, SCRAM-SHA-1 and SCRAM-SHA-256 without channel binding (RFC 5802, RFC 7677), XOAUTH2.
A `SaslConversation` carries one of them over SMTP (RFC 4954): lines out, replies in, until `done`.

- A SCRAM server must prove that it knows the password too: without its signature a 235 is worth nothing, and
  the conversation ends with a SaslError. Malformed challenges end it as well, and so do iteration counts that
  are an attack on our CPU, or so low that an eavesdropper could guess the password from the exchange.
- SCRAM is not the library scramp's: importing it takes 8 MB and 70 ms (it reads certificates, for a channel
  binding that is not used here), and it refuses salts below 12 bytes, which servers may send.
- The text of a SaslError contains no secret; `without_secrets` removes secrets from a server's reply.
- A log-in is never repeated with another mechanism: each try counts where accounts are locked.
"""

import binascii
import hashlib
import hmac
import json
import re
import stringprep
import unicodedata
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

PASSWORD_MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-1", "PLAIN", "LOGIN")
"""The strongest first."""

XOAUTH2 = "XOAUTH2"
ANY_PASSWORD = "AUTO"  # noqa: S105 - what the configuration calls the choice

MAX_COMMAND = 512
"""Octets of the AUTH command with CRLF; a longer initial response waits for the challenge (RFC 4954 4)."""

MAX_LINE = 12_288
"""Octets of one line of the exchange with CRLF (RFC 4954 4)."""

MIN_ITERATIONS = 4096  # RFC 5802 5.1
MAX_ITERATIONS = 1_000_000  # a quarter of a second
MAX_CHALLENGES = 8

_SHOWN = 200

_REMOVED = "[secret]"
_LEAST_SECRET = 4
_LONG_WORD = re.compile(r"[A-Za-z0-9+/=._~-]{12,}", re.ASCII)


class SaslError(Exception):
    """The server violated the SASL exchange, or the client's response cannot be created. The text is for the
    operator.
    """


@dataclass(frozen=True, slots=True)
class SaslIdentity:
    """The user name and secret of a login at a smarthost. `secret` is the password or the access token."""

    user: str
    secret: str = field(repr=False)


class SaslMechanism:
    """The base class of SASL mechanisms. `name` is its name in EHLO."""

    name: str
    first: bytes | None = None
    """The initial response; `None` when the server speaks first."""
    reads_challenges = True
    """False when the text of a challenge means nothing."""
    explanation = ""
    """The server's words about a refusal inside the exchange, for the operator."""

    def respond(self, challenge: bytes) -> bytes:
        """Return the response to a challenge; the base class raises SaslError for further challenges."""
        raise SaslError("the server sent another challenge after the exchange was complete")

    def accepted(self) -> None:
        """Check that the exchange is complete when the server accepts the login (235). Raise SaslError if a
        challenge of the server is missing.
        """


def choose_mechanism(wanted: str, offered: Collection[str]) -> str | None:
    """Choose a mechanism that the server offers, or return `None`. `wanted` is its name, or ANY_PASSWORD for
    the strongest one with a password.
    """
    candidates = PASSWORD_MECHANISMS if wanted == ANY_PASSWORD else (wanted,)
    return next((name for name in candidates if name in offered), None)


def make_mechanism(name: str, identity: SaslIdentity, nonce: str) -> SaslMechanism:
    """Create the mechanism with this name. `nonce` is unpredictable printable ASCII without commas, for
    SCRAM. Raise SaslError if the identity cannot be sent.
    """
    if name in _SCRAM:
        return ScramMechanism(name, _SCRAM[name], identity, nonce)
    if name in _MECHANISMS:
        return _MECHANISMS[name](identity)
    raise SaslError(f"no such mechanism: {name}")


class SaslConversation:
    """The client side of an AUTH exchange. Call `begin`, then `receive` with each reply of the server until
    `done`; the last reply is the result.
    """

    def __init__(self, mechanism: SaslMechanism) -> None:
        self.mechanism = mechanism
        self.done = False
        self._waiting: bytes | None = None
        self._sent: bytes | None = None
        self._challenges = 0
        self._giving_up: SaslError | None = None

    def begin(self) -> bytes:
        """Return the AUTH command, without CRLF like all lines in this module."""
        name = self.mechanism.name.encode()
        first = self.mechanism.first
        if first is None:
            return b"AUTH " + name
        line = b"AUTH %s %s" % (name, _encoded(first) or b"=")
        if len(line) + 2 <= MAX_COMMAND:
            self._sent = first
            return line
        self._waiting = first
        return b"AUTH " + name

    def receive(self, code: int, text: str) -> bytes:
        """Process a reply of the server, and return the next line to send, which may be empty. Raise
        SaslError, and is done then.
        """
        if code != 334:
            self.done = True
            if self._giving_up is not None:
                raise self._giving_up
            if 200 <= code < 300:
                self.mechanism.accepted()
            return b""
        self._challenges += 1
        if self._giving_up is not None or self._challenges > MAX_CHALLENGES:
            self.done = True
            raise self._giving_up or SaslError("the server sent too many challenges")
        try:
            return self._answer(text)
        except SaslError as error:
            self._giving_up = error
        except Exception as error:  # noqa: BLE001 - a challenge that our code cannot take is the server's trouble
            self._giving_up = SaslError(f"the server's challenge is invalid ({type(error).__name__})")
            self._giving_up.__cause__ = error
        # RFC 4954 4: told so, the server ends the exchange with a reply of its own.
        return b"*"

    def _answer(self, text: str) -> bytes:
        challenge = _decoded(text) if self.mechanism.reads_challenges else b""
        again, self._sent = self._sent, None
        if self._waiting is not None:
            response, self._waiting = self._waiting, None
        elif again is not None and not challenge:
            response = again  # some servers overlook the initial response
        else:
            response = self.mechanism.respond(challenge)
        line = _encoded(response)
        if len(line) + 2 > MAX_LINE:
            raise SaslError(f"the user name and the password or token exceed {MAX_LINE} bytes")
        return line


class PlainMechanism(SaslMechanism):
    """The PLAIN mechanism (RFC 4616)."""

    name = "PLAIN"
    reads_challenges = False

    def __init__(self, identity: SaslIdentity) -> None:
        user, secret = identity.user.encode(), identity.secret.encode()
        if b"\0" in user + secret:
            raise SaslError("the user name or the password contains a NUL, which PLAIN cannot send")
        self.first = b"\0%s\0%s" % (user, secret)


class LoginMechanism(SaslMechanism):
    """The LOGIN mechanism: the first challenge asks for the name, the second for the password."""

    name = "LOGIN"
    reads_challenges = False

    def __init__(self, identity: SaslIdentity) -> None:
        self._answers = [identity.secret.encode(), identity.user.encode()]

    def respond(self, challenge: bytes) -> bytes:
        return self._answers.pop() if self._answers else super().respond(challenge)


class Xoauth2Mechanism(SaslMechanism):
    """The XOAUTH2 mechanism of Google and Microsoft, which sends an access token. A refusal comes as a
    challenge with JSON.
    """

    name = XOAUTH2

    def __init__(self, identity: SaslIdentity) -> None:
        self.first = b"user=%s\x01auth=Bearer %s\x01\x01" % (identity.user.encode(), identity.secret.encode())

    def respond(self, challenge: bytes) -> bytes:
        if self.explanation:
            raise SaslError("the server sent another challenge after it rejected the token")
        self.explanation = _error_in(challenge)
        return b""  # the server says the reply that counts after this


class ScramMechanism(SaslMechanism):
    """The SCRAM mechanism (RFC 5802). `respond` computes for milliseconds: see `is_slow`."""

    def __init__(self, name: str, digest: str, identity: SaslIdentity, nonce: str) -> None:
        self.name = name
        self._digest = digest
        self._password = _prepared(identity.secret, "password").encode()
        self._nonce = nonce
        user = _prepared(identity.user, "user name").replace("=", "=3D").replace(",", "=2C")
        self._bare = f"n={user},r={nonce}"
        self.first = f"n,,{self._bare}".encode()
        self._signature: bytes | None = None
        self._verified = False

    def respond(self, challenge: bytes) -> bytes:
        if self._signature is None:
            return self._prove(challenge)
        return self._verify(challenge)

    def accepted(self) -> None:
        if not self._verified:
            raise SaslError("the server did not prove that it knows the password")

    def _prove(self, challenge: bytes) -> bytes:
        first = _text(challenge)
        fields = _fields(first)
        nonce, salt, iterations = self._checked(fields)
        salted = hashlib.pbkdf2_hmac(self._digest, self._password, salt, iterations)
        final = f"c=biws,r={nonce}"  # biws: "n,,", no channel binding
        signed = f"{self._bare},{first},{final}".encode()
        key = self._hmac(salted, b"Client Key")
        stored = hashlib.new(self._digest, key).digest()
        proof = bytes(a ^ b for a, b in zip(key, self._hmac(stored, signed), strict=True))
        self._signature = self._hmac(self._hmac(salted, b"Server Key"), signed)
        return f"{final},p={_encoded(proof).decode()}".encode()

    def _checked(self, fields: dict[str, str]) -> tuple[str, bytes, int]:
        if "e" in fields:
            raise SaslError(f"the server reported {_shown(fields['e'])}")
        if "m" in fields:
            raise SaslError("the server requires an unknown SCRAM extension")
        nonce = fields.get("r", "")
        if not nonce.startswith(self._nonce) or nonce == self._nonce:
            raise SaslError("the server's nonce does not begin with the client's nonce")
        count = fields.get("i", "")
        if not (count.isascii() and count.isdigit() and len(count) <= 9):
            raise SaslError("the server did not send an iteration count")
        iterations = int(count)
        if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
            allowed = f"allowed are {MIN_ITERATIONS} to {MAX_ITERATIONS}"
            raise SaslError(f"the server requires {iterations} iterations; {allowed}")
        salt = _decoded(fields.get("s", ""))
        if not salt:
            raise SaslError("the server did not send a salt")
        return nonce, salt, iterations

    def _verify(self, challenge: bytes) -> bytes:
        fields = _fields(_text(challenge))
        if "e" in fields:
            self.explanation = _shown(fields["e"])
            return b""
        if self._verified or not hmac.compare_digest(_decoded(fields.get("v", "")), self._signature or b""):
            raise SaslError("the server's signature is wrong, so it does not know the password")
        self._verified = True
        return b""

    def _hmac(self, key: bytes, message: bytes) -> bytes:
        return hmac.digest(key, message, self._digest)


_SCRAM = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-1": "sha1"}
_MECHANISMS: dict[str, Callable[[SaslIdentity], SaslMechanism]] = {
    each.name: each for each in (PlainMechanism, LoginMechanism, Xoauth2Mechanism)
}


def is_slow(mechanism: SaslMechanism) -> bool:
    """Return whether `receive` should run in a thread, because hashing a password is slow."""
    return isinstance(mechanism, ScramMechanism)


def without_secrets(text: str, identity: SaslIdentity) -> str:
    """Remove secrets from a server's text, because it may repeat them."""
    user, password = identity.user.encode(), identity.secret.encode()
    whole = (
        password,
        b"\0%s\0%s" % (user, password),
        b"user=%s\x01auth=Bearer %s\x01\x01" % (user, password),
    )
    # The longest comes first, because a shorter one may be a part of it.
    spellings = sorted((_encoded(each).decode() for each in whole), key=len, reverse=True)
    for secret in (*spellings, identity.secret):
        if len(secret) >= _LEAST_SECRET:
            text = text.replace(secret, _REMOVED)
    secrets = " ".join((*spellings, identity.secret))
    return _LONG_WORD.sub(lambda word: _REMOVED if word[0] in secrets else word[0], text)


def _error_in(challenge: bytes) -> str:
    """Return the error in an XOAUTH2 challenge, `{"status":"401","schemes":"bearer","scope":"…"}`, as one
    line of text.
    """
    try:
        found = json.loads(challenge)
    except (ValueError, RecursionError):  # invalid UTF-8 and deeply nested lists included
        found = None
    if not isinstance(found, dict) or not found:
        return "the token was rejected"
    said = ", ".join(f"{name} {value}" for name, value in found.items() if isinstance(value, str | int))
    return f"the token was rejected: {said[:_SHOWN]}" if said else "the token was rejected"


def _fields(message: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in message.split(","):
        name, mark, value = part.partition("=")
        if len(name) != 1 or not mark:
            raise SaslError("the server's message is not a SCRAM message")
        found.setdefault(name, value)
    return found


def _text(challenge: bytes) -> str:
    try:
        return challenge.decode()
    except UnicodeDecodeError as error:
        raise SaslError("the server's message is not a SCRAM message") from error


def _encoded(octets: bytes) -> bytes:
    return binascii.b2a_base64(octets, newline=False)


def _decoded(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text.encode("ascii"), strict_mode=True) if text else b""
    except ValueError as error:  # binascii.Error and UnicodeEncodeError are
        raise SaslError("the server sent invalid base64") from error


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:_SHOWN])


_FORBIDDEN: tuple[Callable[[str], bool], ...] = tuple(
    getattr(stringprep, f"in_table_{table}")
    for table in ["c12", "c21_c22", "c3", "c4", "c5", "c6", "c7", "c8", "c9"]
)


def _prepared(text: str, what: str) -> str:
    """Prepare a user name or password for SCRAM (SASLprep, RFC 4013). ASCII stays unchanged. The rules for
    right-to-left text are left to the server. Raise SaslError if the text is not allowed.
    """
    if not text.isascii():
        spaced = "".join(" " if stringprep.in_table_c12(c) else c for c in text)
        text = unicodedata.ucd_3_2_0.normalize(
            "NFKC", "".join(c for c in spaced if not stringprep.in_table_b1(c))
        )
    if not text or any(forbidden(c) for c in text for forbidden in _FORBIDDEN):
        raise SaslError(f"the {what} is empty or contains characters that SCRAM cannot send (RFC 4013)")
    return text
