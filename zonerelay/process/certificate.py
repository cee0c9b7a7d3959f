"""Creates self-signed certificates, for a first start and for the sandbox."""

import datetime
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

Name = x509.DNSName | x509.IPAddress


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A certificate and its key in PEM."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    @property
    def fingerprint(self) -> str:
        """The SHA-256 fingerprint of the certificate, as `openssl x509 -fingerprint -sha256` prints it."""
        return self.certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def issue(names: list[Name], now: datetime.datetime, *, days: int) -> IssuedCertificate:
    """Issue a self-signed certificate with an ECDSA P-256 key. Every TLS 1.2 client supports that, and it
    costs a tenth of RSA.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    # A common name has 64 characters at most (RFC 5280 A.1); clients look at subjectAltName.
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, written(names[0])[:64])])
    start = now - datetime.timedelta(hours=1)  # the clocks of clients may differ
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        # Not an authority: a client that trusts this certificate trusts this server only, and no other
        # certificates.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
    )
    return IssuedCertificate(builder.sign(key, hashes.SHA256()), key)


def written(name: Name) -> str:
    return str(name.value)
