"""Reads a certificate with its chain and its key from PEM files, and checks that they match.

Both files are read completely first, so the checked content is the content that is used. Failures raise
CertificateError, whose text names the wrong file and the remedy, and never contains any part of a key. Names
are A-labels in lower case (`routing/addresses`): those of subjectAltName, or the common name if there
is none.
"""

import errno
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa

from zonerelay.routing.addresses import ascii_domain

MAX_FILE = 1024 * 1024  # a wrong path (a disk image, /dev/zero) must not be read into memory

CertificateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
_CertificateKeys = (rsa.RSAPrivateKey, ec.EllipticCurvePrivateKey, ed25519.Ed25519PrivateKey)
_SPKI = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
_KEY_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?-----END \1-----", re.DOTALL)


class CertificateError(Exception):
    """A certificate cannot be used. The text is for the operator."""


class KeyFileError(CertificateError):
    """The file of the private key cannot be used."""


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """A certificate and its matching key. `not_before` and `not_after` are Unix times."""

    leaf: x509.Certificate
    chain: tuple[x509.Certificate, ...]
    key: CertificateKey = field(repr=False)
    names: tuple[str, ...]
    not_before: float
    not_after: float
    fingerprint: str

    @property
    def name(self) -> str:
        """The certificate's first host name, which identifies it in the log and in metrics."""
        return self.names[0] if self.names else f"sha256-{self.fingerprint[:16]}"


Texts = tuple[bytes, bytes]
"""The contents of the two files."""


def read_pair(certificate: Path, key: Path) -> CertificatePair:
    """Read a certificate and its key; `key` may be the same file. Raise CertificateError on failure."""
    return parse_pair(certificate, key, read_texts(certificate, key))


def read_texts(certificate: Path, key: Path) -> Texts:
    """Read the PEM files of a certificate and its key, without parsing them. Raise CertificateError if a file
    cannot be read.
    """
    text = _read(certificate, "certificate")
    return text, text if key == certificate else _read(key, "private key", KeyFileError)


def parse_pair(certificate: Path, key: Path, texts: Texts) -> CertificatePair:
    """Parse a certificate and its key, and check that they match. Raise CertificateError on failure. It takes
    0.25 s for a 4096-bit RSA key.
    """
    certificate_text, key_text = texts
    chain = _parse_certificates(certificate, certificate_text)
    private_key = _parse_key(key, key_text)
    _match(chain, private_key, certificate, key)
    leaf = chain[0]
    return CertificatePair(
        leaf=leaf,
        chain=tuple(chain[1:]),
        key=private_key,
        names=_names(leaf),
        not_before=leaf.not_valid_before_utc.timestamp(),
        not_after=leaf.not_valid_after_utc.timestamp(),
        fingerprint=leaf.fingerprint(hashes.SHA256()).hex(),
    )


def is_exposed(path: Path) -> bool:
    """Return whether every user of this machine may read the file."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def _read(path: Path, what: str, failure: type[CertificateError] = CertificateError) -> bytes:
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise failure(f"{path} is not a file")
            text = file.read(MAX_FILE + 1)
    except OSError as error:
        raise failure(_read_problem(path, what, error)) from error
    if len(text) > MAX_FILE:
        raise failure(f"{path} is too large for a {what}")
    return text


def _read_problem(path: Path, what: str, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        target = " (a link to a file that does not exist)" if path.is_symlink() else ""
        return f"{path} does not exist{target}; expected the {what} there"
    if error.errno == errno.EACCES:
        remedy = "Give its group read access to the file and access to its parent directories"
        return f"{path} is not readable by the relay's user (uid {os.geteuid()}): permission denied. {remedy}"
    if error.errno == errno.EISDIR:
        return f"{path} is a directory, not a {what}"
    return f"{path} cannot be read: {error.strerror}"


def _parse_certificates(path: Path, text: bytes) -> list[x509.Certificate]:
    if b"-----BEGIN CERTIFICATE-----" not in text:
        raise CertificateError(f"{path} contains no certificate: {_what_it_is(text)}")
    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError as error:
        raise CertificateError(f"{path} contains a damaged certificate: {error}") from error


def _what_it_is(text: bytes) -> str:
    if b"PRIVATE KEY-----" in text:
        return "it is a private key (check whether certificate and key are swapped)"
    if b"CERTIFICATE REQUEST-----" in text:
        return "it is a certificate request (CSR), which must be signed by an authority first"
    if b"-----BEGIN " in text:
        return "it is PEM of another type"
    if text[:1] == b"\x30":
        return "it looks like DER; convert it with openssl x509 -inform DER -outform PEM"
    return "it is not PEM" if text.strip() else "it is empty"


def _parse_key(path: Path, text: bytes) -> CertificateKey:
    if b"PRIVATE KEY-----" not in text:
        what = _what_it_is(text)
        if b"-----BEGIN CERTIFICATE-----" in text:
            what = "only a certificate (check whether certificate and key are swapped)"
        raise KeyFileError(f"{path} contains no private key: {what}")
    try:
        # Parse only this block: the same file may contain certificates and EC PARAMETERS.
        block = _KEY_BLOCK.search(text)
        key = serialization.load_pem_private_key(block[0] if block else text, None)
    except TypeError as error:
        remedy = "store the key without one (openssl pkey) and protect the file by its permissions"
        raise KeyFileError(f"{path} is encrypted with a passphrase; {remedy}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        # The library's text is omitted: no documentation guarantees that it contains nothing of the key.
        raise KeyFileError(f"{path} contains a private key that is damaged or of an unknown type") from error
    if not isinstance(key, _CertificateKeys):
        kind = {dsa.DSAPrivateKey: "DSA", ed448.Ed448PrivateKey: "Ed448"}
        name = next((name for type_, name in kind.items() if isinstance(key, type_)), "this type of")
        raise KeyFileError(f"{path}: {name} keys cannot be used for TLS; use ECDSA P-256 or RSA")
    return key


def _match(
    chain: list[x509.Certificate], key: CertificateKey, certificate_path: Path, key_path: Path
) -> None:
    wanted = key.public_key().public_bytes(*_SPKI)
    for at, certificate in enumerate(chain):
        if _public_key(certificate) != wanted:
            continue
        if at:
            order = "the server's certificate must be first, followed by its issuers"
            raise CertificateError(f"{certificate_path}: the certificates are in the wrong order: {order}")
        return
    check = "check whether only one of them was renewed"
    raise KeyFileError(
        f"the key in {key_path} does not match the certificate in {certificate_path} ({check})"
    )


def _public_key(certificate: x509.Certificate) -> bytes:
    try:
        return certificate.public_key().public_bytes(*_SPKI)
    except (ValueError, UnsupportedAlgorithm):
        return b""  # a key type that is not supported here


def _names(leaf: x509.Certificate) -> tuple[str, ...]:
    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = found.get_values_for_type(x509.DNSName)
    except (x509.ExtensionNotFound, ValueError):
        names = []
    if not names:
        common = leaf.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        names = [str(attribute.value) for attribute in common]
    return tuple(dict.fromkeys(known for name in names if (known := _label_name(name))))


def _label_name(name: str) -> str:
    """Return a host name as clients send it in SNI (RFC 6066 3), or "" if it is not valid."""
    star = "*." if name.startswith("*.") else ""
    try:
        return star + ascii_domain(name.removeprefix(star))
    except ValueError:
        return ""
