"""Creates, reads and uses private DKIM keys in PEM. The only importer of `cryptography` for DKIM.

Raises ValueError that says what is wrong with a key. No text or repr contains an byte of a key. `sign` may
run in any thread; an RSA key releases the GIL while it works.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from zonerelay.message.dkim.signature import ED25519, RSA

# RFC 8301 3.2: signers must use 1024 at least and should use 2048; verifiers need not take more than 4096.
MIN_RSA_BITS = 1024
GOOD_RSA_BITS = 2048
MAX_RSA_BITS = 4096

_PADDING = padding.PKCS1v15()
_HASHED = Prehashed(hashes.SHA256())


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """A private DKIM key. `sign` takes a SHA-256, 32 bytes. `public` is the value of p= (RFC 6376 3.6.1, RFC
    8463 4.2).
    """

    algorithm: str
    bits: int
    public: bytes
    sign: Callable[[bytes], bytes] = field(repr=False)


def new_private_key(algorithm: str) -> str:
    """Return a new key as PEM (PKCS #8), without a password."""
    key: RSAPrivateKey | Ed25519PrivateKey
    if algorithm == ED25519:
        key = Ed25519PrivateKey.generate()
    else:
        key = rsa.generate_private_key(public_exponent=65537, key_size=GOOD_RSA_BITS)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode("ascii")


def load_private_key(pem: bytes) -> PrivateKey:
    """Read a key. Raise ValueError, whose text begins with a verb and follows a file's name."""
    try:
        # The library's own check takes longer than a hundred signatures; ours below finds a broken key too.
        key = load_pem_private_key(pem, password=None, unsafe_skip_rsa_key_validation=True)
    except TypeError:
        raise ValueError("is encrypted; the relay requires an unencrypted key") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("is not a private key in PEM") from None
    if isinstance(key, RSAPrivateKey):
        return _rsa(key)
    if isinstance(key, Ed25519PrivateKey):
        public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return PrivateKey(ED25519, 256, public, key.sign)
    raise ValueError("is neither an RSA nor an Ed25519 key, the only types that DKIM supports")


def _rsa(key: RSAPrivateKey) -> PrivateKey:
    if not MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS:
        raise ValueError(
            f"has an RSA key of {key.key_size} bits; {MIN_RSA_BITS} to {MAX_RSA_BITS} are verified "
            f"everywhere, {GOOD_RSA_BITS} are recommended"
        )

    def sign(digest: bytes) -> bytes:
        return key.sign(digest, _PADDING, _HASHED)

    public = key.public_key()
    digest = hashlib.sha256().digest()
    try:
        public.verify(sign(digest), digest, _PADDING, _HASHED)
    except (InvalidSignature, ValueError):
        raise ValueError("has an RSA key with inconsistent numbers") from None
    spki = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return PrivateKey(RSA, key.key_size, spki, sign)
