"""Real certificates and keys for tests, made in a millisecond (ECDSA P-256)."""

import datetime
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

NOW = 1_700_000_000.0  # where ManualClock begins
DAY = 86400.0

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True)
class Made:
    certificate: x509.Certificate
    key: Key

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.DER)

    @property
    def key_pem(self) -> bytes:
        return self.key_as(serialization.NoEncryption())

    def key_as(self, protection: serialization.KeySerializationEncryption) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection
        )

    @property
    def public_key_der(self) -> bytes:
        return self.key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def server_context(self, *above: "Made") -> ssl.SSLContext:
        """A server's that shows this certificate, and those above it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.NamedTemporaryFile() as file:  # the `ssl` module reads files only
            file.write(self.key_pem + self.pem + b"".join(each.pem for each in above))
            file.flush()
            context.load_cert_chain(file.name)
        return context

    @property
    def fingerprint(self) -> str:
        return self.certificate.fingerprint(hashes.SHA256()).hex()

    def write(self, directory: Path, name: str) -> tuple[Path, Path]:
        """Certificate and key in two files; the key for its owner alone."""
        certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
        certificate.write_bytes(self.pem)
        key.write_bytes(self.key_pem)
        key.chmod(0o600)
        return certificate, key


def make(
    *names: str,
    common_name: str = "",
    starts: float = NOW - DAY,
    ends: float = NOW + 90 * DAY,
    key: Key | None = None,
    serial: int = 0,
    issuer: Made | None = None,
    authority: bool = False,
    usage: x509.ObjectIdentifier | None = None,
) -> Made:
    """Signed by `issuer`, or by itself; `names` go into subjectAltName, `usage` is the extended one."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)] if common_name else [])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(serial or x509.random_serial_number())
        .not_valid_before(datetime.datetime.fromtimestamp(starts, datetime.UTC))
        .not_valid_after(datetime.datetime.fromtimestamp(ends, datetime.UTC))
    )
    if names:
        alternative = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        builder = builder.add_extension(alternative, critical=not common_name)
    if authority:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    return Made(builder.sign(key if issuer is None else issuer.key, hashes.SHA256()), key)


def context_files(made: Sequence[Made], directory: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The values of [[listener]] certificate and key for these certificates."""
    pairs = [each.write(directory, str(at)) for at, each in enumerate(made)]
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
