"""The [[dkim]] keys: read once, then looked up by the author's domain and the time.

Promises ValueError, with the option's path, for a key that cannot be used; no key is ever in a text of this
module. Which entries sign (docs/dkim.md): those for the very domain, else those of the nearest wildcard
above it, as far as their dates fit; of several for one signing domain and algorithm the one that began last.

`cryptography` signs here and nowhere else; this module is imported when there is a [[dkim]] entry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from zonerelay.config.models import DkimSettings
from zonerelay.message.dkim import ED25519, RSA, DkimKey

# RFC 8301 3.2: signers must use 1024 at least and should use 2048; verifiers need not take more than 4096.
MIN_RSA_BITS = 1024
GOOD_RSA_BITS = 2048
MAX_RSA_BITS = 4096
MAX_CACHED = 4096  # key sets of domains below wildcards, which strangers may choose

_PADDING = padding.PKCS1v15()
_HASHED = Prehashed(hashes.SHA256())


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """`bits` of an Ed25519 key are 256."""

    algorithm: str
    bits: int
    sign: Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class _Entry:
    key: PrivateKey
    selector: str
    signing_domain: str
    not_before: float
    not_after: float

    def fits(self, now: float) -> bool:
        return self.not_before <= now and (not self.not_after or now < self.not_after)


class DkimKeys:
    """`ascii_domain` makes A-labels, and raises ValueError for what is no domain (routing/idna.py)."""

    def __init__(
        self,
        settings: Sequence[DkimSettings],
        *,
        read: Callable[[Path], bytes],
        ascii_domain: Callable[[str], str],
    ) -> None:
        self._ascii_domain = ascii_domain
        self._entries: dict[str, list[_Entry]] = {}
        self.notes: list[str] = []
        loaded: dict[Path, PrivateKey] = {}
        for at, each in enumerate(settings):
            path = f"dkim[{at}]"
            if each.key_file not in loaded:
                loaded[each.key_file] = _load(each.key_file, read, f"{path}.key_file")
                self._note(loaded[each.key_file], f"{path}.key_file")
            self._add(each, loaded[each.key_file], path)

    def for_author(self, domain: str, now: float) -> tuple[DkimKey, ...]:
        """RSA before Ed25519; empty when nothing signs for this domain."""
        try:
            name = self._ascii_domain(domain)
        except ValueError:
            return ()
        for pattern in _patterns(name):
            entries = self._entries.get(pattern)
            if entries is not None:
                keys = _chosen(entries, name, now)
                if keys:
                    return keys
        return ()

    def _add(self, each: DkimSettings, key: PrivateKey, path: str) -> None:
        entry = _Entry(
            key=key,
            selector=each.selector,
            signing_domain=self._domain(each.signing_domain, f"{path}.signing_domain"),
            not_before=each.not_before,
            not_after=each.not_after,
        )
        self._entries.setdefault(self._domain(each.domain, f"{path}.domain"), []).append(entry)

    def _domain(self, domain: str, path: str) -> str:
        wildcard = "*." if domain.startswith("*.") else ""
        try:
            return wildcard + self._ascii_domain(domain.removeprefix("*.")) if domain else ""
        except ValueError as error:
            raise ValueError(f"{path}: {domain}: {error}") from None

    def _note(self, key: PrivateKey, path: str) -> None:
        if key.algorithm == RSA and key.bits < GOOD_RSA_BITS:
            self.notes.append(f"{path}: RSA with {key.bits} bits is weak: make a key of {GOOD_RSA_BITS}")


def load_private_key(pem: bytes) -> PrivateKey:
    """Raises ValueError; the text begins with `is` or `has`, for a file's name before it."""
    try:
        # The library's own check takes longer than a hundred signatures; ours below finds a broken key too.
        key = load_pem_private_key(pem, password=None, unsafe_skip_rsa_key_validation=True)
    except TypeError:
        raise ValueError("is encrypted: the relay needs the key without a password") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("is no private key in PEM: RSA or Ed25519") from None
    if isinstance(key, RSAPrivateKey):
        return _rsa(key)
    if isinstance(key, Ed25519PrivateKey):
        return PrivateKey(ED25519, 256, key.sign)
    raise ValueError("is neither an RSA nor an Ed25519 key, which are those that DKIM has")


def _rsa(key: RSAPrivateKey) -> PrivateKey:
    if not MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS:
        raise ValueError(
            f"has an RSA key of {key.key_size} bits: {MIN_RSA_BITS} to {MAX_RSA_BITS} are verified "
            f"everywhere, use {GOOD_RSA_BITS}"
        )

    def sign(digest: bytes) -> bytes:
        return key.sign(digest, _PADDING, _HASHED)

    digest = hashlib.sha256().digest()
    try:
        key.public_key().verify(sign(digest), digest, _PADDING, _HASHED)
    except (InvalidSignature, ValueError):
        raise ValueError("has an RSA key whose numbers do not fit together") from None
    return PrivateKey(RSA, key.key_size, sign)


def _load(path: Path, read: Callable[[Path], bytes], option: str) -> PrivateKey:
    try:
        return load_private_key(read(path))
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{option}: {path} {error}") from None


def _patterns(name: str) -> Iterator[str]:
    """The domain itself, then the wildcards that it is below, the nearest first."""
    yield name
    dot = name.find(".")
    while dot >= 0:
        yield f"*{name[dot:]}"
        dot = name.find(".", dot + 1)


def _chosen(entries: Sequence[_Entry], name: str, now: float) -> tuple[DkimKey, ...]:
    chosen: dict[tuple[bool, str], _Entry] = {}
    for entry in entries:
        if entry.fits(now):
            kind = (entry.key.algorithm != RSA, entry.signing_domain)
            other = chosen.get(kind)
            if other is None or entry.not_before > other.not_before:
                chosen[kind] = entry
    return tuple(
        DkimKey(entry.signing_domain or name, entry.selector, entry.key.algorithm, entry.key.sign)
        for _, entry in sorted(chosen.items(), key=lambda item: item[0])
    )
