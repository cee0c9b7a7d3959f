"""One client's TLS session without I/O: converts between ciphertext and plaintext (`ssl` over memory BIOs).

Memory use is limited to what OpenSSL needs: input is fed in chunks of PIECE bytes and read immediately,
because a memory BIO never shrinks. Before the handshake is complete, a client may send MAX_HANDSHAKE bytes. A
new channel has no access to earlier unencrypted input, as RFC 3207 4.2 requires after STARTTLS.

A failure is a TlsFault, and final: `take_output` returns the alert, then the connection must be closed. Text
that the same `receive` has decrypted is lost, because no reply to it could be sent.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from zonerelay.inbound.tls.asking import AskingContext, AskingSession

# Explains TLS failures in terms for an operator, instead of OpenSSL's.
#
# The texts come from fixed lists (OpenSSL's reasons are constants of the library), so they never contain text
# from a client.

_HANDSHAKE_RECORD = 22  # RFC 8446 5.1: the required type of a client's first record
_SSL2_HELLO = 0x80

_WORDS = {
    "inappropriate fallback": "the client offers an older TLS version than it supports (downgrade attack)",
    "no shared cipher": "the client offers no allowed cipher",
    "no shared group": "the client offers no allowed key exchange group",
    "no suitable groups": "the client offers no allowed key exchange group",
    "no suitable key share": "the client offers no allowed key exchange group",
    "no shared signature algorithms": (
        "the client supports no signature algorithm that our certificate can use"
    ),
    "no suitable signature algorithm": (
        "the client supports no signature algorithm that our certificate can use"
    ),
    "wrong version number": "not TLS, or damaged in transit",
    "decryption failed or bad record mac": "a record is not TLS or was damaged in transit",
    "record layer failure": "a record was damaged in transit, or is longer than TLS allows",  # OpenSSL 3.2
    "packet length too long": "a record is longer than TLS allows",
    "encrypted length too long": "a record is longer than TLS allows",
    "data length too long": "a record is longer than TLS allows",
    "excessive message size": "a handshake message is longer than allowed",
    "unexpected message": "unexpected handshake message",
    "callback failed": "the client asks for a server name that is not ASCII",
    "no renegotiation": "the client requested renegotiation, which is not allowed",
}
_TOO_OLD = frozenset({"unsupported protocol", "version too low", "no protocols available"})
_VERSIONS = {b"\x03\x00": "SSL 3", b"\x03\x01": "TLS 1.0", b"\x03\x02": "TLS 1.1"}
_ALERT = re.compile(r"\S+ alert (.+)")  # "tls alert …", "tlsv1 alert …", "sslv3 alert …"
_ABOUT_OUR_CERTIFICATE = {
    "unknown ca", "certificate unknown", "bad certificate", "certificate expired", "certificate revoked",
    "unsupported certificate",
}  # fmt: skip


def first_octet_fault(octet: int) -> str:
    """Return why a connection that begins with this byte is not TLS, or "" if it may be TLS."""
    if octet == _HANDSHAKE_RECORD:
        return ""
    if octet & _SSL2_HELLO:
        return "not TLS, or an SSL 2 hello, which is not allowed"
    return "not TLS: clear text" if chr(octet).isprintable() or octet in b"\r\n\t" else "not TLS"


def fault_text(reason: str, offered: str) -> str:
    """Describe a TLS error in a sentence. `reason` is OpenSSL's; `offered` is the newest TLS version that the
    client named.
    """
    reason = reason.replace("_", " ").lower() or "no reason given"
    if alert := _ALERT.fullmatch(reason):
        name = alert[1]
        if name in _ABOUT_OUR_CERTIFICATE:
            return f"the client does not accept our certificate (alert: {name})"
        return f"the client closed TLS (alert: {name})"
    if reason in _TOO_OLD:
        return (
            f"the client offers {offered}, but only TLS 1.2 and 1.3 are allowed; update it, or let it send "
            "without TLS from a network in allow_networks"
        )
    return _WORDS.get(reason, f"TLS failed: {reason}")


class TlsFault(Exception):
    """The TLS handshake failed or a record was invalid, so the connection must be closed. The text is for the
    operator.
    """


class TlsInfo(msgspec.Struct, frozen=True):
    """The properties of an established TLS session. `version` is such as `"TLSv1.3"`.

    `certificate` is the SHA-256 of the client's certificate in lower-case hexadecimal, `""` if it sent none.
    """

    version: str
    cipher: str
    certificate: str = ""


TlsContext: TypeAlias = "ssl.SSLContext | AskingContext"
TlsSession: TypeAlias = "ssl.SSLObject | AskingSession"

MAX_HANDSHAKE = 64 * 1024
"""Bytes that a client may send before its handshake is complete: many times a long certificate chain."""
PIECE = 8 * 1024  # 4 KB would be a third slower; 16 KB would cost 11 KB more per idle session
RECORD = 16 * 1024  # RFC 8446 5.1: the maximum size of a record
OUTPUT = 4 * 1024
"""Bytes per record that we send: replies are short, and the output memory BIO does not shrink either."""


class TlsChannel:
    """The TLS session of one client, without I/O. `closed` (the client has sent close_notify) and `info` (set
    with the end of the handshake) are for reading.
    """

    __slots__ = (
        "_fault", "_has_tickets", "_in", "_octets", "_offered", "_out", "_session", "closed", "info",
    )  # fmt: skip

    def __init__(self, context: TlsContext) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._in, self._out, server_side=True)
        self._octets = 0
        self._offered = "no known version"
        self._fault = ""  # not the exception, whose traceback would keep this object alive
        self._has_tickets = False  # in the output, and nothing else
        self.closed = False
        self.info: TlsInfo | None = None

    def receive(self, data: bytes) -> bytes:
        """Decrypt received bytes, and return the plaintext, which may be empty. Raise TlsFault on failure."""
        if self._fault:
            raise TlsFault(self._fault)
        try:
            if len(data) <= PIECE:
                return self._feed(data)
            view = memoryview(data)
            return b"".join([self._feed(view[at : at + PIECE]) for at in range(0, len(data), PIECE)])
        except ssl.SSLError as error:
            raise self._failed(fault_text(error.reason, self._offered)) from error

    def take_output(self) -> bytes:
        """Return the bytes of the handshake or an alert that must be sent now. Tickets of TLS 1.3 wait for
        our next reply.
        """
        if self._has_tickets:
            self._has_tickets = False
            return b""
        return self._out.read()

    def send(self, plain: bytes) -> bytes:
        """Encrypt `plain`, and return all bytes to send. Never raise an exception: before the handshake is
        complete, and after a fault, only the pending output is returned.
        """
        if plain and self.info is not None and not self._fault:
            try:
                if len(plain) <= OUTPUT:
                    self._session.write(plain)
                else:
                    return self._send_large(memoryview(plain))
            except ssl.SSLError as error:
                self._failed(fault_text(error.reason, self._offered))  # the next `receive` reports it
        return self._out.read()

    def _send_large(self, plain: memoryview) -> bytes:
        output: list[bytes] = []
        for at in range(0, len(plain), OUTPUT):
            self._session.write(plain[at : at + OUTPUT])
            output.append(self._out.read())
        return b"".join(output)

    def close(self) -> bytes:
        """Return the pending output, followed by close_notify. It may be called in every state, and
        repeatedly.
        """
        if self.info is not None and not self._fault:
            try:
                self._session.unwrap()
            except ssl.SSLWantReadError:
                pass  # for the client's close_notify
            except ssl.SSLError as error:
                # Nothing depends on it: the connection is closed next.
                self._failed(fault_text(error.reason, self._offered))
        return self._out.read()

    def _feed(self, piece: bytes | memoryview) -> bytes:
        """Decrypt at most PIECE received bytes, and return the plaintext."""
        if self.closed or not piece:
            return b""  # RFC 8446 6.1: data after a closure alert must be ignored
        if self.info is None:
            self._admit(piece)
        self._in.write(piece)
        session = self._session
        plain: list[bytes] = []
        try:
            if self.info is None:
                session.do_handshake()
                self.info = _describe(session)
                self._has_tickets = self.info.version == "TLSv1.3"
            while data := session.read(RECORD):
                plain.append(data)
                if not self._in.pending and not session.pending():
                    break  # another call would raise SSLWantReadError, which takes longer than all the rest
            else:
                self.closed = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.closed = True
        return plain[0] if len(plain) == 1 else b"".join(plain)

    def _admit(self, piece: bytes | memoryview) -> None:
        if not self._octets and (text := first_octet_fault(piece[0])):
            raise self._failed(text)
        if not self._octets:  # RFC 8446 4.1.2: a record's header, a message's header, then the version
            self._offered = _VERSIONS.get(bytes(piece[9:11]), self._offered)
        self._octets += len(piece)
        if self._octets > MAX_HANDSHAKE:
            raise self._failed(f"the client sent {MAX_HANDSHAKE} bytes without completing the handshake")

    def _failed(self, text: str) -> TlsFault:
        self._fault = text
        self._has_tickets = False  # but an alert
        return TlsFault(text)


def _describe(session: TlsSession) -> TlsInfo:
    cipher = session.cipher()
    certificate = session.getpeercert(binary_form=True)
    return TlsInfo(
        version=session.version() or "",
        cipher=cipher[0] if cipher else "",
        certificate=hashlib.sha256(certificate).hexdigest() if certificate else "",
    )
