"""The values through which a session uses TLS, without importing the library.

`certificates` uses cryptography, and `asking` pyOpenSSL. They are imported only if a listener needs them,
because these libraries use more memory than all the rest of a listener.
"""

from __future__ import annotations

import msgspec


class TlsFault(Exception):
    """The handshake failed or a record was invalid, so the connection must be closed. The text is for the
    operator.
    """


class TlsInfo(msgspec.Struct, frozen=True):
    """An established session. `version` is such as `"TLSv1.3"`.

    `certificate` is the SHA-256 of the client's certificate in lower-case hexadecimal, `""` if it sent none.
    """

    version: str
    cipher: str
    certificate: str = ""
