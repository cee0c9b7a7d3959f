"""Explains TLS failures in an operator's words instead of OpenSSL's.

The texts come from fixed lists (OpenSSL's reasons are constants of the library), so no text of a client gets
into them.
"""

from __future__ import annotations

import re

from OpenSSL import SSL

_HANDSHAKE_RECORD = 22  # RFC 8446 5.1: what a client's first record must be
_SSL2_HELLO = 0x80

_WORDS = {
    "unsupported protocol": "the client offers no TLS version that is allowed (1.2 and 1.3 are)",
    "version too low": "the client offers no TLS version that is allowed (1.2 and 1.3 are)",
    "no protocols available": "the client offers no TLS version that is allowed (1.2 and 1.3 are)",
    "inappropriate fallback": "the client offers an older TLS version than it could (a downgrade)",
    "no shared cipher": "the client offers no cipher that is allowed",
    "no shared group": "the client offers no key exchange group that is allowed",
    "no suitable groups": "the client offers no key exchange group that is allowed",
    "no suitable key share": "the client offers no key exchange group that is allowed",
    "no shared signature algorithms": "the client takes no signature that our certificate can give",
    "no suitable signature algorithm": "the client takes no signature that our certificate can give",
    "wrong version number": "not TLS, or damaged on the way",
    "decryption failed or bad record mac": "a record was damaged on the way or is not TLS",
    "packet length too long": "a record is longer than TLS allows",
    "encrypted length too long": "a record is longer than TLS allows",
    "data length too long": "a record is longer than TLS allows",
    "excessive message size": "a handshake message is longer than allowed",
    "unexpected message": "a handshake message came out of turn",
    "no renegotiation": "the client wants to renegotiate, which is not allowed",
}
_ALERT = re.compile(r"\S+ alert (.+)")  # "tls alert …", "tlsv1 alert …", "sslv3 alert …"
_ABOUT_OUR_CERTIFICATE = frozenset(
    {
        "unknown ca",
        "certificate unknown",
        "bad certificate",
        "certificate expired",
        "certificate revoked",
        "unsupported certificate",
    }
)


def first_octet_fault(octet: int) -> str:
    """Return why a first record that begins with this octet is not TLS; "" when it may be."""
    if octet == _HANDSHAKE_RECORD:
        return ""
    if octet & _SSL2_HELLO:
        return "not TLS, or a hello of SSL 2, which is not allowed"
    return "not TLS: clear text" if chr(octet).isprintable() or octet in b"\r\n\t" else "not TLS"


def fault_text(error: SSL.Error) -> str:
    if isinstance(error, SSL.SysCallError):
        return "the connection ended within TLS"
    reason = _first_reason(error)
    if alert := _ALERT.fullmatch(reason):
        name = alert[1]
        if name in _ABOUT_OUR_CERTIFICATE:
            return f"the client does not accept our certificate (alert: {name})"
        return f"the client ended TLS (alert: {name})"
    return _WORDS.get(reason, f"TLS failed: {reason}")


def _first_reason(error: SSL.Error) -> str:
    """The oldest entry of OpenSSL's queue names the cause; what follows are those it passed through."""
    queue = error.args[0] if error.args else ()
    return queue[0][2] if queue and queue[0][2] else "no reason given"
