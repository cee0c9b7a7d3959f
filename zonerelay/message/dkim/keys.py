"""Private DKIM keys in PEM files, and the [[dkim]] keys, which are found by the author's domain and the time.

Raises ValueError with the option's path and the problem for a key that cannot be used; no text or repr
contains a byte of a key. `PrivateKey.sign` may run in any thread; an RSA key releases the GIL while it works.
Entries that sign (docs/deliver/dkim.md): those for the domain, else those of the nearest wildcard above it,
within their dates; of several for one signing domain and algorithm the one that began last.

This is the only importer of `cryptography` for DKIM. Import it only when there is a [[dkim]] entry, because
that library takes a while to load.

The module also writes and checks the DNS record of a DKIM public key (RFC 6376 3.6.1, RFC 8463 4.2).

No record makes it fail. The domain's owner has to correct the record, so every finding has the current and
the expected value.
"""

import base64
import binascii
import enum
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed

from zonerelay.config.settings import DkimSettings
from zonerelay.message.dkim.signature import ED25519, RSA, DkimKey

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
    """Generate a private key, and return it as unencrypted PEM (PKCS #8)."""
    key: RSAPrivateKey | Ed25519PrivateKey
    if algorithm == ED25519:
        key = Ed25519PrivateKey.generate()
    else:
        key = rsa.generate_private_key(public_exponent=65537, key_size=GOOD_RSA_BITS)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode("ascii")


def load_private_key(pem: bytes) -> PrivateKey:
    """Read a private key in PEM. Raise ValueError with a text that follows the name of the file."""
    try:
        # The library's own check takes longer than a hundred signatures; ours below finds a broken key too.
        key = serialization.load_pem_private_key(pem, password=None, unsafe_skip_rsa_key_validation=True)
    except TypeError:
        raise ValueError("is encrypted; the relay requires an unencrypted key") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("is not a private key in PEM") from None
    if isinstance(key, RSAPrivateKey):
        return _rsa(key)
    if isinstance(key, Ed25519PrivateKey):
        public = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        return PrivateKey(ED25519, 256, public, key.sign)
    raise ValueError("is neither an RSA nor an Ed25519 key, the only types that DKIM supports")


def _rsa(key: RSAPrivateKey) -> PrivateKey:
    if not MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS:
        verified = f"use {GOOD_RSA_BITS} ({MIN_RSA_BITS} to {MAX_RSA_BITS} are allowed)"
        raise ValueError(f"has an RSA key of {key.key_size} bits; {verified}")

    def sign(digest: bytes) -> bytes:
        return key.sign(digest, _PADDING, _HASHED)

    public = key.public_key()
    digest = hashlib.sha256().digest()
    try:
        public.verify(sign(digest), digest, _PADDING, _HASHED)
    except (InvalidSignature, ValueError):
        raise ValueError("contains a damaged RSA key") from None
    spki = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return PrivateKey(RSA, key.key_size, spki, sign)


ENDS_SOON = 14 * 86_400.0

AsciiDomain = Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DkimEntry(DkimSettings):
    """A [[dkim]] table with its key. Domains are in A-labels."""

    option: str
    key: PrivateKey

    def fits(self, now: float) -> bool:
        return self.not_before <= now and (not self.not_after or now < self.not_after)


class DkimKeys:
    """All configured [[dkim]] keys; those that `old` has already loaded are not parsed again.

    `ascii_domain` converts a domain to A-labels, and raises ValueError for a text that is not a domain
    (routing/addresses.py).
    """

    def __init__(
        self,
        settings: Sequence[DkimSettings],
        *,
        read: Callable[[Path], bytes],
        ascii_domain: AsciiDomain,
        old: "DkimKeys | None" = None,
    ) -> None:
        self._loaded: dict[bytes, PrivateKey] = {}  # by the SHA-256 of the file
        known: dict[bytes, PrivateKey] = {} if old is None else old._loaded
        self._ascii_domain = ascii_domain
        self._entries: dict[str, list[DkimEntry]] = {}
        self.entries: list[DkimEntry] = []

        def load(pem: bytes) -> PrivateKey:
            """Parse a private key, or return a loaded one, because checking a key is expensive."""
            digest = hashlib.sha256(pem).digest()
            key = known.get(digest) or self._loaded.get(digest) or load_private_key(pem)
            self._loaded[digest] = key
            return key

        for at, each in enumerate(settings):
            try:
                key = read_key(each.key_file, read, load)
            except ValueError as error:
                raise ValueError(f"dkim[{at}].key_file: {error}") from None
            entry = _entry(each, key, f"dkim[{at}]", ascii_domain)
            self.entries.append(entry)
            self._entries.setdefault(entry.domain, []).append(entry)

    def for_author(self, domain: str, now: float) -> tuple[DkimKey, ...]:
        """Return the keys that sign mail of this domain now, RSA before Ed25519."""
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

    def advice(self, now: float) -> Iterator[str]:
        """Yield warnings about keys, such as `dkim[0].key_file: …`."""
        for entry in self.entries:
            if entry.key.algorithm == RSA and entry.key.bits < GOOD_RSA_BITS:
                weak = f"RSA with {entry.key.bits} bits is weak; create a key with {GOOD_RSA_BITS} bits"
                yield f"{entry.option}.key_file: {weak}"
        for domain, entries in self._entries.items():
            if any(entry.fits(now) for entry in entries):
                yield from _ending(entries, now)
            else:
                yield f"{entries[-1].option}: no key signs mail of {domain} now: {_why(entries, now)}"


def read_key(
    path: Path, read: Callable[[Path], bytes], load: Callable[[bytes], PrivateKey] = load_private_key
) -> PrivateKey:
    """Read the file of a private key. Raise ValueError, which names the file, if it cannot be used."""
    try:
        return load(read(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def _entry(each: DkimSettings, key: PrivateKey, option: str, ascii_domain: AsciiDomain) -> DkimEntry:
    def domain(name: str, text: str) -> str:
        wildcard = "*." if text.startswith("*.") else ""
        try:
            return wildcard + ascii_domain(text.removeprefix("*.")) if text else ""
        except ValueError as error:
            raise ValueError(f"{option}.{name}: {text}: {error}") from None

    domains = {name: domain(name, getattr(each, name)) for name in ("domain", "signing_domain")}
    return DkimEntry(**asdict(each) | domains, option=option, key=key)


def _patterns(name: str) -> Iterator[str]:
    """Yield the patterns that match a domain: the domain itself, and the wildcards above it, the nearest
    first.
    """
    yield name
    dot = name.find(".")
    while dot >= 0:
        yield f"*{name[dot:]}"
        dot = name.find(".", dot + 1)


def _chosen(entries: Sequence[DkimEntry], name: str, now: float) -> tuple[DkimKey, ...]:
    chosen: dict[tuple[bool, str], DkimEntry] = {}
    for entry in entries:
        if entry.fits(now):
            kind = (entry.key.algorithm != RSA, entry.signing_domain)
            other = chosen.get(kind)
            if other is None or entry.not_before > other.not_before:
                chosen[kind] = entry
    return tuple(
        DkimKey(
            entry.signing_domain or name,
            entry.selector,
            entry.key.algorithm,
            entry.key.sign,
            slow=entry.key.algorithm == RSA and entry.key.bits >= GOOD_RSA_BITS,
        )
        for _, entry in sorted(chosen.items(), key=lambda item: item[0])
    )


def _ending(entries: Sequence[DkimEntry], now: float) -> Iterator[str]:
    """Yield warnings about keys that expire soon and have no successor of the same algorithm."""
    for entry in entries:
        if entry.fits(now) and entry.not_after and entry.not_after <= now + ENDS_SOON:
            kind = entry.key.algorithm, entry.signing_domain
            kin = (other for other in entries if (other.key.algorithm, other.signing_domain) == kind)
            if not any(other.fits(entry.not_after) for other in kin):
                yield (
                    f"{entry.option}.not_after: this key expires on {_date(entry.not_after)}, and no other "
                    f"{entry.key.algorithm} key for {entry.domain} replaces it; add one"
                )


def _why(entries: Sequence[DkimEntry], now: float) -> str:
    begins = min((entry.not_before for entry in entries if entry.not_before > now), default=0.0)
    if begins:
        return f"its next key is valid from {_date(begins)}"
    return f"its last key expired on {_date(max(entry.not_after for entry in entries))}"


def _date(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M UTC")


MAX_STRING = 255  # RFC 1035 3.3: bytes of one character-string of a TXT record


class RecordStatus(enum.StrEnum):
    """The result of comparing a DKIM key with its DNS record."""

    OK = "ok"
    MISSING = "missing"
    MISMATCH = "mismatch"
    REVOKED = "revoked"
    TESTING = "testing"
    SEVERAL = "several"
    MALFORMED = "malformed"
    WILDCARD = "wildcard"
    UNKNOWN = "unknown"


class RecordFinding(NamedTuple):
    """The status of a DKIM key's DNS record, with a description of the problem."""

    status: RecordStatus
    detail: str = ""


def record_name(selector: str, domain: str) -> str:
    return f"{selector}._domainkey.{domain}"


def record_text(key: PrivateKey) -> str:
    return f"v=DKIM1; k={_kind(key)}; p={base64.b64encode(key.public).decode('ascii')}"


def strings(record: str) -> list[str]:
    """Split a long TXT record into strings for a zone file. Readers join the strings without a space."""
    return [record[at : at + MAX_STRING] for at in range(0, len(record), MAX_STRING)]


def judge(texts: Sequence[str], key: PrivateKey) -> RecordFinding:
    """Check the TXT records of a DKIM key against the key."""
    return next(_findings(texts, key), RecordFinding(RecordStatus.OK))


def _findings(texts: Sequence[str], key: PrivateKey) -> Iterator[RecordFinding]:
    """Yield the problems of the TXT records of a DKIM key. The caller uses the first one."""
    if not texts:
        yield RecordFinding(RecordStatus.MISSING, "there is no TXT record; publish it")
        return
    if len(texts) > 1:
        detail = f"there are {len(texts)} TXT records, and verifiers use any one of them; remove all but one"
        yield RecordFinding(RecordStatus.SEVERAL, detail)
    if (tags := _tags(texts[0])) is None:
        yield RecordFinding(RecordStatus.MALFORMED, "is not a tag list such as v=DKIM1; k=rsa; p=…")
        return
    kind, ours = tags.get("k", "rsa").lower(), _kind(key)
    version_is_first = next(iter(tags)) == "v" or "v" not in tags
    if tags.get("v", "DKIM1") != "DKIM1" or not version_is_first:
        exactly = "v=DKIM1 must be the first tag, in exactly this form"
        yield RecordFinding(RecordStatus.MALFORMED, exactly)
    if "p" not in tags:
        yield RecordFinding(RecordStatus.MALFORMED, "has no p=, the public key")
    if not (public := tags.get("p", "")):
        yield RecordFinding(RecordStatus.REVOKED, "p= is empty: this key has been revoked")
    if kind != ours:
        yield RecordFinding(RecordStatus.MISMATCH, f"k={kind}, but the key is {ours}")
    if _octets(public) != key.public:
        remedy = "publish the public key that belongs to this file, or use the private key of the record"
        yield RecordFinding(RecordStatus.MISMATCH, f"p= contains another key; {remedy}")
    if "sha256" not in _list(tags.get("h", "sha256")):
        unsuitable = "h= does not allow sha256, which the signatures use"
        yield RecordFinding(RecordStatus.MALFORMED, unsuitable)
    if not {"*", "email"} & set(_list(tags.get("s", "*"))):
        yield RecordFinding(RecordStatus.MALFORMED, "s= does not allow email")
    if "y" in _list(tags.get("t", "")):
        testing = "t=y tells verifiers to treat mail as unsigned; remove it"
        yield RecordFinding(RecordStatus.TESTING, testing)


def _kind(key: PrivateKey) -> str:
    return "rsa" if key.algorithm == RSA else "ed25519"


def _tags(record: str) -> dict[str, str] | None:
    """Parse a DKIM tag list (RFC 6376 3.2). Return `None` if it is invalid or repeats a tag."""
    tags: dict[str, str] = {}
    for part in record.rstrip().removesuffix(";").split(";"):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not name or name in tags:
            return None
        tags[name] = "".join(value.split())
    return tags


def _list(value: str) -> list[str]:
    return [each.lower() for each in value.split(":")]


def _octets(value: str) -> bytes | None:
    try:
        return base64.b64decode(value, validate=True)
    except (ValueError, binascii.Error):
        return None
