"""The certificates that a server has shown, whoever signed them.

DANE-TA needs all of them, and needs them where the `ssl` module has verified nothing. Python 3.13 has a
public method for it; 3.11 and 3.12 have the same one on the object that `SSLObject` wraps, not yet public.
"""

from __future__ import annotations

import ssl
from typing import Any

_ENCODING_DER = 2  # X509_FILETYPE_ASN1


def peer_chain(tls: ssl.SSLObject) -> list[bytes]:
    """DER, the server's own certificate first; empty when it has shown none."""
    # `Any`: what it is differs between versions of Python, which is why it is asked.
    connection: Any = tls if hasattr(tls, "get_unverified_chain") else tls._sslobj  # type: ignore[attr-defined]
    found = connection.get_unverified_chain() or ()
    return [each if isinstance(each, bytes) else each.public_bytes(_ENCODING_DER) for each in found]
