"""TLS that requests a certificate from the client, with pyOpenSSL.

`ssl` ends the handshake of a client whose certificate no known authority has issued. pyOpenSSL accepts any,
because access depends on the fingerprint. It takes half as much time again, so only listeners with
`allow_certificates` use it.
"""

import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeVar

from cryptography.hazmat.bindings.openssl.binding import Binding
from OpenSSL import SSL, crypto

from zonerelay.inbound.tls.certificate_files import CertificateError, CertificatePair

Result = TypeVar("Result")

# One id for all contexts, because a ticket is checked before SNI selects a context. Without an id, OpenSSL
# ends the sessions of clients that resume and have a certificate.
_SESSION_ID = b"zonerelay"

# Before OpenSSL 4, an entry that other code left in this thread's error queue would be taken for our own
# error (SSL_get_error(3)), and pyOpenSSL does not check.
_forget_errors = Binding.lib.ERR_clear_error


class AskingContext:
    """A TLS context that requests a certificate from the client."""

    def __init__(self, pair: CertificatePair, ciphers: str) -> None:
        """Create a context for one certificate and an OpenSSL cipher list."""
        self._context = context = SSL.Context(SSL.TLS_SERVER_METHOD)
        context.set_min_proto_version(SSL.TLS1_2_VERSION)
        context.set_cipher_list(ciphers.encode())
        context.set_options(SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION | SSL.OP_CIPHER_SERVER_PREFERENCE)
        context.set_mode(SSL.MODE_RELEASE_BUFFERS)  # saves 16 KB for each idle session
        # Tickets store sessions at the client; OpenSSL's own cache would keep 20,000 sessions here.
        context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
        context.set_session_id(_SESSION_ID)
        try:
            context.set_verify(SSL.VERIFY_PEER, lambda *_: True)
            context.use_certificate(pair.leaf)
            for certificate in pair.chain:
                context.add_extra_chain_cert(certificate)
            context.use_privatekey(pair.key)
            context.check_privatekey()
        except SSL.Error as error:
            raise CertificateError(f"OpenSSL refuses {pair.name}: {_first_reason(error)}") from error
        except MemoryError as error:
            # cffi raises this if it may not create the code for callbacks from OpenSSL.
            raise CertificateError(
                "allow_certificates needs systemd's MemoryDenyWriteExecute=no, or SELinux's execmem"
            ) from error

    def choose_by(self, choose: "Callable[[str], AskingContext | None]") -> None:
        """Set the function that chooses a context by the name in the client's SNI."""

        def choose_context(connection: SSL.Connection) -> None:
            chosen = choose((connection.get_servername() or b"").decode("ascii", "replace"))
            if chosen is not None:
                connection.set_context(chosen._context)

        self._context.set_tlsext_servername_callback(choose_context)

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, server_side: Literal[True]
    ) -> "AskingSession":
        return AskingSession(SSL.Connection(self._context, None), incoming, outgoing)


class AskingSession:
    """A TLS session of pyOpenSSL with the methods of `ssl.SSLObject` that `TlsChannel` uses."""

    def __init__(self, connection: SSL.Connection, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> None:
        connection.set_accept_state()
        self._connection = connection
        self._incoming = incoming
        self._outgoing = outgoing

    def do_handshake(self) -> None:
        self._run(self._connection.do_handshake)
        _forget_errors()  # accepting an unverified client certificate may leave some

    def read(self, size: int) -> bytes:
        return self._run(lambda: self._connection.recv(size))

    def pending(self) -> int:
        return 1  # perhaps, in pyOpenSSL's buffer

    def write(self, data: bytes | memoryview) -> int:
        return self._run(lambda: self._connection.send(data))

    def unwrap(self) -> None:
        self._run(self._connection.shutdown)

    def version(self) -> str:
        return self._connection.get_protocol_version_name()

    def cipher(self) -> tuple[str, str, int]:
        name, version = self._connection.get_cipher_name(), self._connection.get_cipher_version()
        return name or "", version or "", self._connection.get_cipher_bits() or 0

    def getpeercert(self, binary_form: Literal[True]) -> bytes | None:
        certificate = self._connection.get_peer_certificate()
        return crypto.dump_certificate(crypto.FILETYPE_ASN1, certificate) if certificate else None

    def _run(self, act: Callable[[], Result]) -> Result:
        if data := self._incoming.read():
            self._connection.bio_write(data)
        _forget_errors()
        try:
            return act()
        except SSL.WantReadError as error:
            raise ssl.SSLWantReadError from error
        except SSL.ZeroReturnError as error:
            raise ssl.SSLZeroReturnError from error
        except SSL.Error as error:
            _forget_errors()
            raise _of_ssl(error) from error
        finally:
            with suppress(SSL.WantReadError):
                while True:
                    self._outgoing.write(self._connection.bio_read(1 << 16))


def _of_ssl(error: SSL.Error) -> ssl.SSLError:
    fault = ssl.SSLError()
    fault.reason = _first_reason(error)
    return fault


def _first_reason(error: SSL.Error) -> str:
    """Return the cause of an error, which is the oldest entry in OpenSSL's error queue."""
    queue = error.args[0] if error.args and isinstance(error.args[0], list) else ()
    return queue[0][2] if queue and queue[0][2] else "no reason given"
