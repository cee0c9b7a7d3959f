"""Encrypts and decrypts the passwords of mailboxes as the database stores them. AES-256-GCM binds each
password to its server.

    zr1.<base64url of a 12-byte nonce and the ciphertext>

The server and the user name are the associated data, so somebody who can write to the table cannot have a
password sent to another server. The first key encrypts. Decryption tries every key, so keys can be replaced
one after the other. On failure: PasswordError, whose text holds no secret.
"""

import base64
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PREFIX = "zr1."
KEY_SIZE = 32
NONCE_SIZE = 12
MAX_SEALED = 4096


class PasswordError(Exception):
    """A key or an encrypted password cannot be used. The text is for the operator and holds no secret."""


def read_key(text: str) -> bytes:
    """Read a key of 32 bytes in base64 (`openssl rand -base64 32`) or hexadecimal. Raises PasswordError."""
    text = "".join(text.split())
    try:
        key = bytes.fromhex(text) if len(text) == 2 * KEY_SIZE else _unbase64(text)
    except ValueError:
        key = b""
    if len(key) != KEY_SIZE:
        raise PasswordError(
            f"is not a base64-encoded key of {KEY_SIZE} bytes; create one with openssl rand -base64 32"
        )
    return key


def seal(password: str, key: bytes, nonce: bytes, *, host: str, port: int, user: str) -> str:
    sealed = AESGCM(key).encrypt(nonce, password.encode(), _bound(host, port, user))
    return PREFIX + base64.urlsafe_b64encode(nonce + sealed).decode()


def unseal(sealed: str, keys: Sequence[bytes], *, host: str, port: int, user: str) -> str:
    """Decrypt a mailbox password; the host, port and user are authenticated with it. Raises PasswordError."""
    if not sealed.startswith(PREFIX) or len(sealed) > MAX_SEALED:
        raise PasswordError("was not written by zonerelay outbox encrypt-password")
    try:
        data = _unbase64(sealed.removeprefix(PREFIX))
    except ValueError:
        raise PasswordError("is damaged: it is not valid base64") from None
    if not keys:
        raise PasswordError("cannot be decrypted: [outbox] keys contains no key")
    for key in keys:
        try:
            opened = AESGCM(key).decrypt(data[:NONCE_SIZE], data[NONCE_SIZE:], _bound(host, port, user))
            return opened.decode()
        except (InvalidTag, ValueError):
            continue
    raise PasswordError(
        "cannot be decrypted with any key of [outbox] keys: the key, host, port or user was changed"
    )


def _bound(host: str, port: int, user: str) -> bytes:
    return f"{host.lower()}:{port}:{user}".encode()


def _unbase64(text: str) -> bytes:
    """Decode base64 in the standard or the URL-safe alphabet, with or without padding. Raises ValueError."""
    plain = text.rstrip("=").replace("-", "+").replace("_", "/")
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
