"""The TLS of one client without I/O: converts between ciphertext and plaintext (pyOpenSSL over memory BIOs).

pyOpenSSL is used because only it lets a server request a certificate without a known issuer and compare its
fingerprint. Memory use is limited to what OpenSSL needs: input is fed in chunks of PIECE bytes and read
immediately, because a memory BIO never shrinks. Before the handshake is complete, a client may send
MAX_HANDSHAKE bytes. A new channel has no access to earlier unencrypted input, as RFC 3207 4.2 requires after
STARTTLS.

A failure is a TlsFault, and final: `take_output` returns the alert, then the connection must be closed. Text
that the same `receive` has decrypted is lost, because no reply to it could be sent.
"""

from __future__ import annotations

import re

from cryptography.hazmat.bindings.openssl.binding import Binding
from OpenSSL import SSL

from zonerelay.inbound.tls.ports import TlsFault, TlsInfo

# Explains TLS failures in terms for an operator, instead of OpenSSL's.
#
# The texts come from fixed lists (OpenSSL's reasons are constants of the library), so they never contain text
# from a client.

_HANDSHAKE_RECORD = 22  # RFC 8446 5.1: the required type of a client's first record
_SSL2_HELLO = 0x80

_WORDS = {
    "inappropriate fallback": "the client offers an older TLS version than it could (a downgrade)",
    "no shared cipher": "the client offers no cipher that is allowed",
    "no shared group": "the client offers no key exchange group that is allowed",
    "no suitable groups": "the client offers no key exchange group that is allowed",
    "no suitable key share": "the client offers no key exchange group that is allowed",
    "no shared signature algorithms": "the client supports no signature algorithm of our certificate",
    "no suitable signature algorithm": "the client supports no signature algorithm of our certificate",
    "wrong version number": "not TLS, or damaged on the way",
    "decryption failed or bad record mac": "a record was damaged on the way or is not TLS",
    "packet length too long": "a record is longer than TLS allows",
    "encrypted length too long": "a record is longer than TLS allows",
    "data length too long": "a record is longer than TLS allows",
    "excessive message size": "a handshake message is longer than allowed",
    "unexpected message": "a handshake message came out of turn",
    "no renegotiation": "the client wants to renegotiate, which is not allowed",
}
_TOO_OLD = frozenset({"unsupported protocol", "version too low", "no protocols available"})
_VERSIONS = {b"\x03\x00": "SSL 3", b"\x03\x01": "TLS 1.0", b"\x03\x02": "TLS 1.1"}
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
    """Return why a first record that begins with this byte is not TLS, or "" if it may be TLS."""
    if octet == _HANDSHAKE_RECORD:
        return ""
    if octet & _SSL2_HELLO:
        return "not TLS, or a hello of SSL 2, which is not allowed"
    return "not TLS: clear text" if chr(octet).isprintable() or octet in b"\r\n\t" else "not TLS"


def fault_text(error: SSL.Error, offered: str) -> str:
    """Return what went wrong. `offered` is the newest TLS version that the client named."""
    if isinstance(error, SSL.SysCallError):
        return "the connection ended within TLS"
    reason = _first_reason(error)
    if alert := _ALERT.fullmatch(reason):
        name = alert[1]
        if name in _ABOUT_OUR_CERTIFICATE:
            return f"the client does not accept our certificate (alert: {name})"
        return f"the client ended TLS (alert: {name})"
    if reason in _TOO_OLD:
        return (
            f"the client offers {offered}, and only TLS 1.2 and 1.3 are allowed: update it, or let it send"
            " without TLS from a network that allow_networks names"
        )
    return _WORDS.get(reason, f"TLS failed: {reason}")


def _first_reason(error: SSL.Error) -> str:
    """Return the cause, which is the oldest entry of OpenSSL's error queue; later ones are callers."""
    queue = error.args[0] if error.args else ()
    return queue[0][2] if queue and queue[0][2] else "no reason given"


MAX_HANDSHAKE = 64 * 1024
"""Bytes that a client may send before its handshake is complete: many times a long certificate chain."""
PIECE = 8 * 1024  # 4 KB would be a third slower; 16 KB would cost 11 KB more per idle session
RECORD = 16 * 1024  # RFC 8446 5.1: the maximum size of a record
OUTPUT = 4 * 1024
"""Bytes per record that we send: replies are short, and the output memory BIO does not shrink either."""

# Before OpenSSL 4, an entry that other code left in this thread's error queue would be taken for our own
# error (SSL_get_error(3)), and pyOpenSSL does not check. `lib` has no types.
_lib, _ffi = Binding.lib, Binding.ffi
_forget_errors = _lib.ERR_clear_error

# Frequent operations call OpenSSL directly: for each call, pyOpenSSL allocates a buffer and raises an
# exception when no more data is available, which is the usual end. This took three quarters of the time of a
# command and its reply. All channels are used on the event loop, so one buffer is sufficient.
_buffer = _ffi.new("char[]", RECORD)
_contents = _ffi.buffer(_buffer)


class TlsChannel:
    """A TLS session. `established`, `closed` (the client has sent close_notify) and `info` are for
    reading.
    """

    __slots__ = (
        "_connection",
        "_fault",
        "_in",
        "_octets",
        "_offered",
        "_out",
        "_ssl",
        "closed",
        "established",
        "info",
    )

    def __init__(self, context: SSL.Context) -> None:
        self._connection = SSL.Connection(context, None)
        self._connection.set_accept_state()
        self._ssl = self._connection._ssl
        self._in, self._out = self._connection._into_ssl, self._connection._from_ssl
        self._octets = 0
        self._offered = "no version that is known"
        self._fault = ""  # not the exception, whose traceback would keep this object alive
        self.established = False
        self.closed = False
        self.info: TlsInfo | None = None

    def receive(self, data: bytes) -> bytes:
        """Return the plaintext that became readable, perhaps none. Raise TlsFault on failure."""
        if self._fault:
            raise TlsFault(self._fault)
        if self.closed or not data:
            return b""
        _forget_errors()
        plain: list[bytes] = []
        try:
            if len(data) <= PIECE:
                self._feed(data, plain)
            else:
                view = memoryview(data)
                for at in range(0, len(data), PIECE):
                    self._feed(view[at : at + PIECE], plain)
        except SSL.Error as error:
            raise self._failed(fault_text(error, self._offered)) from error
        return plain[0] if len(plain) == 1 else b"".join(plain)

    def take_output(self) -> bytes:
        """Return the bytes to write now: handshake, tickets, alerts."""
        output = self._take()
        return output[0] if len(output) == 1 else b"".join(output)

    def send(self, plain: bytes) -> bytes:
        """Encrypt `plain`, and return it after the pending output. Never raise an exception: before the
        handshake is complete, and after a fault, only the pending output is returned.
        """
        output: list[bytes] = []
        if self.established and not self._fault:
            view = memoryview(plain)
            _forget_errors()
            try:
                while view:
                    sent = _lib.SSL_write(self._ssl, _ffi.from_buffer(view), min(len(view), OUTPUT))
                    if sent <= 0:
                        self._connection._raise_ssl_error(self._ssl, sent)
                    view = view[sent:]
                    output += self._take()
            except SSL.Error as error:
                self._failed(fault_text(error, self._offered))  # the next `receive` reports it
        return b"".join(output) if output else self.take_output()

    def close(self) -> bytes:
        """Return the pending output and close_notify. It may be called in every state, and repeatedly."""
        if self.established and not self._fault:
            _forget_errors()
            try:
                self._connection.shutdown()
            except SSL.Error as error:
                # Nothing depends on it: the connection is closed next.
                self._failed(fault_text(error, self._offered))
        return self.take_output()

    def _feed(self, piece: bytes | memoryview, plain: list[bytes]) -> None:
        if self.closed:
            return  # RFC 8446 6.1: data after a closure alert must be ignored
        if not self.established:
            self._admit(piece)
        _lib.BIO_write(self._in, _ffi.from_buffer(piece), len(piece))
        try:
            if not self.established:
                self._shake()
            while (count := _lib.SSL_read(self._ssl, _buffer, RECORD)) > 0:
                plain.append(_contents[:count])
            if _lib.SSL_get_error(self._ssl, count) != _lib.SSL_ERROR_WANT_READ:
                self._connection._raise_ssl_error(self._ssl, count)
        except SSL.WantReadError:
            return
        except SSL.ZeroReturnError:
            self.closed = True

    def _admit(self, piece: bytes | memoryview) -> None:
        if not self._octets and (text := first_octet_fault(piece[0])):
            raise self._failed(text)
        if not self._octets:  # RFC 8446 4.1.2: a record's header, a message's header, then the version
            self._offered = _VERSIONS.get(bytes(piece[9:11]), self._offered)
        self._octets += len(piece)
        if self._octets > MAX_HANDSHAKE:
            raise self._failed(f"the client sent {MAX_HANDSHAKE} octets without completing the handshake")

    def _shake(self) -> None:
        self._connection.do_handshake()
        _forget_errors()  # accepting an unverified client certificate may leave some
        self.established = True
        self.info = _describe(self._connection)

    def _take(self) -> list[bytes]:
        pieces: list[bytes] = []
        while (count := _lib.BIO_read(self._out, _buffer, RECORD)) > 0:
            pieces.append(_contents[:count])
            if count < RECORD:
                break
        return pieces

    def _failed(self, text: str) -> TlsFault:
        self._fault = text
        _forget_errors()
        return TlsFault(text)


def _describe(connection: SSL.Connection) -> TlsInfo:
    certificate = connection.get_peer_certificate()
    name = connection.get_servername()
    return TlsInfo(
        version=connection.get_protocol_version_name(),
        cipher=connection.get_cipher_name() or "",
        # OpenSSL's own digest: the certificate is a stranger's, and need not please a stricter parser.
        certificate=certificate.digest("sha256").decode().replace(":", "").lower() if certificate else "",
        server_name=_printable(name) if name else "",
    )


def _printable(name: bytes) -> str:
    text = name.decode("ascii", "replace").lower()
    return text if text.isprintable() else ""
