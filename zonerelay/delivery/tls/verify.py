"""Checks the server's identity after a finished handshake, before any command inside TLS.

OpenSSL has checked the chain to a trusted authority and its dates during the handshake. Names, fingerprints
and TLSA records are checked here, so that a refusal can report what the certificate contains instead.
"""

from __future__ import annotations

import ssl
from typing import Any, NamedTuple

from zonerelay.delivery.peer import UntrustedCertificateError
from zonerelay.delivery.tls import dane
from zonerelay.delivery.tls.dane import fingerprint, matching_name, names_in, shown_names
from zonerelay.delivery.tls.plan import MTA_STS, TlsRequirements
from zonerelay.smtp.client.replies import printable

ENCRYPTED = "encrypted"
"""The security of a connection without a demand on the certificate."""

_TOO_WEAK = {"DH_KEY_TOO_SMALL": "its Diffie-Hellman key", "EE_KEY_TOO_SMALL": "the key of its certificate"}
_UNKNOWN_ISSUER = (
    "its certificate is not issued by an authority that this machine trusts, or an intermediate certificate "
    "is missing"
)
_VERIFY_CODES = {
    9: "its certificate is not valid yet",
    10: "its certificate has expired",
    18: "its certificate is self-signed, and this machine does not trust it",
} | dict.fromkeys((2, 19, 20, 21), _UNKNOWN_ISSUER)
"""OpenSSL's X509_V_ERR_ codes."""


class PeerVerification(NamedTuple):
    """The result of verifying a certificate. `security` is as in `Session.security`. `only_for` is the one
    next hop for which the certificate is valid.
    """

    security: str
    only_for: str = ""


def prove(plan: TlsRequirements, tls: ssl.SSLObject, *, now: float) -> PeerVerification:
    """Return the security of the connection. Raise UntrustedCertificateError."""
    if tls.session_reused and not plan.may_resume:
        raise UntrustedCertificateError("it resumed a session, so its present certificate is unknown")
    if plan.verify:
        _check_names(plan, tls)
    if plan.certificates:
        _check_fingerprint(plan, tls)
    if plan.tlsa:
        name = dane.verify(peer_chain(tls), plan.tlsa, plan.tlsa_names, now=now)
        return PeerVerification("dane", name if name and name == plan.next_hop else "")
    if plan.verify or plan.certificates:
        return PeerVerification("mta-sts" if plan.level == MTA_STS else "verified")
    return PeerVerification(ENCRYPTED)


def handshake_words(error: BaseException) -> str:
    """Return why a handshake failed, as a message for an operator. A library's error has OpenSSL's as its
    cause.
    """
    if error.__cause__ is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__
    if isinstance(error, ssl.SSLCertVerificationError):
        unknown = f"its certificate is not valid: {error.verify_message}"
        return _VERIFY_CODES.get(error.verify_code, unknown)
    if isinstance(error, ssl.SSLError) and (weak := _TOO_WEAK.get(error.reason)):
        return f'{weak} is too small; with tls = "opportunistic", a zone sends to this host in clear text'
    if isinstance(error, ssl.SSLError) and error.reason:
        return str(error.reason).lower().replace("_", " ")
    return printable(str(error)) or type(error).__name__


def _check_names(plan: TlsRequirements, tls: ssl.SSLObject) -> None:
    names = names_in(tls.getpeercert() or {})
    if matching_name(plan.names, names) is None:
        wanted = " or ".join(plan.names)
        raise UntrustedCertificateError(f"its certificate is for {shown_names(names)}, not for {wanted}")


def _check_fingerprint(plan: TlsRequirements, tls: ssl.SSLObject) -> None:
    shown = tls.getpeercert(binary_form=True)
    if not shown:
        raise UntrustedCertificateError("the server presented no certificate")
    if fingerprint(shown) not in plan.certificates:
        raise UntrustedCertificateError(
            f"its certificate is not one of the expected ones; its fingerprint is {fingerprint(shown)}"
        )


_ENCODING_DER = 2  # X509_FILETYPE_ASN1


def peer_chain(tls: ssl.SSLObject) -> list[bytes]:
    """Return the certificates that the server has sent, in DER, its own first; none when it has sent none.

    DANE-TA needs the whole chain, verified or not. Python 3.13 has a public method for it; 3.11 and 3.12 have
    the same method, not public yet, on the object that `SSLObject` wraps.
    """
    # `Any`: the object differs between versions of Python.
    connection: Any = tls if hasattr(tls, "get_unverified_chain") else tls._sslobj  # type: ignore[attr-defined]
    found = connection.get_unverified_chain() or ()
    return [each if isinstance(each, bytes) else each.public_bytes(_ENCODING_DER) for each in found]
