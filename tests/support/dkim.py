"""DKIM keys for tests, and dkimpy as the judge of what was signed with them."""

import base64
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import dkim
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from zonerelay.config.settings import DkimSettings
from zonerelay.message.dkim.keys import DkimKeys, load_private_key, new_private_key
from zonerelay.message.dkim.signature import ED25519, RSA, DkimKey, unsigned_fields
from zonerelay.routing.addresses import ascii_domain

NOW = 1_780_000_000.0


@lru_cache
def rsa_pem(bits: int = 2048, number: int = 0) -> bytes:
    """Another one for each number, the same one for the same."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=bits)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@lru_cache
def ed25519_pem(number: int = 0) -> bytes:
    return new_private_key(ED25519).encode()


PEMS: dict[str, Callable[[], bytes]] = {
    "rsa.pem": rsa_pem,
    "rsa2.pem": lambda: rsa_pem(number=1),
    "weak.pem": lambda: rsa_pem(1024),
    "ed.pem": ed25519_pem,
    "ed2.pem": lambda: ed25519_pem(1),
}


def read(path: Path) -> bytes:
    """Key files that are in no directory."""
    try:
        return PEMS[path.name]()
    except KeyError:
        raise FileNotFoundError(2, "No such file or directory") from None


def entry(
    domain: str,
    selector: str,
    file: str = "rsa.pem",
    *,
    signing_domain: str = "",
    not_before: float = 0.0,
    not_after: float = 0.0,
) -> DkimSettings:
    return DkimSettings(
        domain=domain,
        selector=selector,
        key_file=Path(file),
        signing_domain=signing_domain,
        not_before=not_before,
        not_after=not_after,
    )


def keys_of(*entries: DkimSettings) -> DkimKeys:
    return DkimKeys(entries, read=read, ascii_domain=ascii_domain)


def record(pem: bytes) -> str:
    """Written down here once more, so that the program's own text is no judge of itself."""
    key = load_private_key(pem)
    kind = {RSA: "rsa", ED25519: "ed25519"}[key.algorithm]
    return f"v=DKIM1; k={kind}; p={base64.b64encode(key.public).decode()}"


def records(entries: Sequence[DkimSettings]) -> dict[str, str]:
    """By name, as in DNS."""
    return {
        f"{each.selector}._domainkey.{each.signing_domain or each.domain}": record(read(each.key_file))
        for each in entries
    }


def verified(message: bytes, published: dict[str, str]) -> list[bool]:
    """What dkimpy says of each signature, from top to bottom."""

    def look_up(name: bytes, timeout: int = 5) -> bytes | None:
        found = published.get(name.decode().rstrip("."))
        return found.encode() if found is not None else None

    def verify(at: int) -> bool:
        try:
            return bool(dkim.DKIM(message).verify(at, dnsfunc=look_up))
        except dkim.ValidationError:  # of the body hash
            return False

    count = message.partition(b"\r\n\r\n")[0].lower().count(b"dkim-signature:")
    return [verify(at) for at in range(count)]


def sign(header: bytes, body_hash: str, keys: Sequence[DkimKey], *, now: float) -> bytes:
    """The fields in front of `header`, signed at once."""
    drafts = unsigned_fields(header, body_hash, keys, now=now)
    return b"".join(each.signed(each.key.sign(each.digest)) for each in drafts)
