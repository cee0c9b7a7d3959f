"""Builds TLS contexts, and chooses a certificate by the name that the client asks for (SNI).

Ciphers are those of Mozilla's "intermediate" list without finite-field DH: forward secret and AEAD. Any
client certificate is accepted, if one is asked for: access is decided by its fingerprint, not by its issuer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from OpenSSL import SSL

from zonerelay.inbound.tls.certificate_files import CertificateError, Pair

CIPHERS = (
    b"ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:"
    b"ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384:"
    b"ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305"
)
CIPHERS_13 = b"TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"

# One name for all contexts: a ticket is looked at before SNI has chosen among them. Without any OpenSSL
# ends the sessions of clients that resume and have a certificate.
_SESSION_ID = b"zonerelay"
_OPTIONS = SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION | SSL.OP_CIPHER_SERVER_PREFERENCE


def build_context(pairs: Sequence[Pair], *, ask_certificate: bool) -> SSL.Context:
    """The context to begin with; it hands over to others by SNI. Raises CertificateError."""
    try:
        return _build(pairs, ask_certificate=ask_certificate)
    except MemoryError as error:
        # What cffi raises when it may not make the code by which OpenSSL calls back.
        raise CertificateError(
            "TLS towards clients needs memory that is writable and executable, and this system forbids it "
            "(systemd: MemoryDenyWriteExecute=no allows it; SELinux: execmem)"
        ) from error


def _build(pairs: Sequence[Pair], *, ask_certificate: bool) -> SSL.Context:
    contexts = [_context(pair, ask_certificate=ask_certificate) for pair in pairs]
    by_name: dict[str, SSL.Context] = {}
    for pair, context in zip(pairs, contexts, strict=True):
        for name in pair.names:
            by_name.setdefault(name, context)  # the first certificate for a name has it
    # For one certificate too: without it OpenSSL forgets the name when a TLS 1.2 session is resumed.
    contexts[0].set_tlsext_servername_callback(_chooser(by_name))
    return contexts[0]


def choose(by_name: Mapping[str, SSL.Context], server_name: bytes | None) -> SSL.Context | None:
    """An exact name, else the wildcard one label up (RFC 6125 6.4.3); `None`: the first certificate."""
    if not server_name:
        return None
    name = server_name.decode("ascii", "replace").lower().removesuffix(".")
    found = by_name.get(name)
    if found is None:
        host, _, domain = name.partition(".")
        found = by_name.get(f"*.{domain}") if host else None
    return found


def _chooser(by_name: Mapping[str, SSL.Context]) -> Callable[[SSL.Connection], None]:
    def choose_context(connection: SSL.Connection) -> None:
        context = choose(by_name, connection.get_servername())
        if context is not None:
            connection.set_context(context)

    return choose_context


def _context(pair: Pair, *, ask_certificate: bool) -> SSL.Context:
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.set_min_proto_version(SSL.TLS1_2_VERSION)
    context.set_cipher_list(CIPHERS)
    context.set_tls13_ciphersuites(CIPHERS_13)
    context.set_options(_OPTIONS)
    context.set_mode(SSL.MODE_RELEASE_BUFFERS)  # 16 KB less for each idle session
    # Tickets resume sessions at the client's expense; OpenSSL's own cache would hold 20,000 of them here.
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_session_id(_SESSION_ID)
    if ask_certificate:
        context.set_verify(SSL.VERIFY_PEER, _accept_any)
    try:
        context.use_certificate(pair.leaf)
        for certificate in pair.chain:
            context.add_extra_chain_cert(certificate)
        context.use_privatekey(pair.key)
        context.check_privatekey()
    except SSL.Error as error:
        reasons = error.args[0] if error.args else ()
        words = ", ".join(reason[2] for reason in reasons) or "no reason given"
        raise CertificateError(f"OpenSSL refuses the certificate for {pair.name}: {words}") from error
    return context


def _accept_any(*_: object) -> bool:
    return True
