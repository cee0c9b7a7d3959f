"""Verifies certificate chains up to trust anchors that the caller provides.

OpenSSL checks signatures, dates and the right to sign; the authority need not be self-signed (PARTIAL_CHAIN).
The `ssl` module cannot do this, because it verifies during the handshake, against one store for all
connections. Import this module only when it is needed: cryptography and pyOpenSSL take 9 MB.
UntrustedCertificateError is raised with a message for an operator.
"""

import contextlib
import datetime
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, padding, rsa
from cryptography.hazmat.primitives.serialization import load_der_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from OpenSSL import crypto

from zonerelay.delivery.peer import UntrustedCertificateError

_EXPIRED, _NOT_YET = 10, 9  # X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID
_UNKNOWN_ISSUER = frozenset((2, 7, 18, 19, 20, 21))  # 7: of the same name, with another key

MAX_RSA, MAX_EXPONENT = 8192, 65_537
"""The largest RSA keys of authorities. With larger numbers a server could stop the event loop for seconds."""

# The exceptions that cryptography raises at the malformed part of a certificate.
_UNREADABLE = (ValueError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType)


def verify(chain: Sequence[bytes], anchors: Sequence[bytes], *, now: float) -> None:
    """Verify that the first certificate chains up to one of `anchors`, and that all dates are valid.

    `chain` and `anchors` are DER; `now` is Unix time. Raise UntrustedCertificateError.
    """
    store = crypto.X509Store()
    store.set_flags(crypto.X509StoreFlags.PARTIAL_CHAIN)
    store.set_time(datetime.datetime.fromtimestamp(now, datetime.UTC))
    for anchor in anchors:
        with contextlib.suppress(crypto.Error):  # no chain leads to an unreadable anchor
            store.add_cert(crypto.load_certificate(crypto.FILETYPE_ASN1, anchor))
    try:
        leaf, *others = [crypto.load_certificate(crypto.FILETYPE_ASN1, der) for der in chain]
        crypto.X509StoreContext(store, leaf, others).verify_certificate()
    except crypto.X509StoreContextError as error:
        raise UntrustedCertificateError(_words(error)) from error
    except (crypto.Error, ValueError) as error:
        raise UntrustedCertificateError("the server's certificate chain cannot be read") from error
    if not _is_for_servers(chain[0]):
        raise UntrustedCertificateError("its certificate is not for servers (extended key usage)")


def _is_for_servers(der: bytes) -> bool:
    try:
        usage = x509.load_der_x509_certificate(der).extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    except x509.ExtensionNotFound:
        return True
    except _UNREADABLE:
        return False
    fitting = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE)
    return any(each in usage.value for each in fitting)


def names(der: bytes) -> tuple[str, ...]:
    """Return the DNS names of a certificate, or its common name if it has none (RFC 7672 3.2.3). Raise
    UntrustedCertificateError.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        try:
            alternative = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            found = alternative.value.get_values_for_type(x509.DNSName)
        except x509.ExtensionNotFound:
            found = []
        if not found:
            common = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
            found = [each.value for each in common if isinstance(each.value, str)]
    except _UNREADABLE as error:
        raise UntrustedCertificateError("the names in the server's certificate cannot be read") from error
    return tuple(name.lower().rstrip(".") for name in found)


def is_signed_by(der: bytes, key_der: bytes) -> bool:
    """Return whether the certificate was signed with the private key that belongs to this public key."""
    try:
        certificate, key = x509.load_der_x509_certificate(der), load_der_public_key(key_der)
        signature, signed = certificate.signature, certificate.tbs_certificate_bytes
        digest, parameters = certificate.signature_hash_algorithm, certificate.signature_algorithm_parameters
        if isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
            key.verify(signature, signed)
        elif isinstance(key, rsa.RSAPublicKey) and digest is not None:
            is_slow = key.key_size > MAX_RSA or key.public_numbers().e > MAX_EXPONENT
            if is_slow or not isinstance(parameters, padding.PKCS1v15 | padding.PSS):
                return False
            key.verify(signature, signed, parameters, digest)
        elif isinstance(key, ec.EllipticCurvePublicKey) and isinstance(parameters, ec.ECDSA):
            key.verify(signature, signed, parameters)
        else:
            return False
    except (*_UNREADABLE, TypeError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True


def _words(error: crypto.X509StoreContextError) -> str:
    code = error.errors[0] if error.errors else 0
    depth = error.errors[1] if len(error.errors) > 1 else 0
    whose = "its certificate" if depth == 0 else "the certificate of an issuer"
    if code == _EXPIRED:
        return f"{whose} has expired"
    if code == _NOT_YET:
        return f"{whose} is not valid yet"
    if code in _UNKNOWN_ISSUER:
        return "its certificate was not issued by the authority in the TLSA records"
    return f"{whose} is not valid: {error}"
