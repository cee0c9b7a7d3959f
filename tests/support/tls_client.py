"""A TLS client without a socket (Python's ssl over MemoryBIO), and its wire to a TlsChannel."""

import contextlib
import ssl
import warnings
from collections.abc import Callable, Iterable

from zonerelay.inbound.tls.channel import TlsChannel

Cut = Callable[[bytes], Iterable[bytes]]


def whole(data: bytes) -> Iterable[bytes]:
    return [data] if data else []


def halved(data: bytes) -> Iterable[bytes]:
    middle = len(data) // 2
    return [half for half in (data[:middle], data[middle:]) if half]


def bytewise(data: bytes) -> Iterable[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def trusting(newest: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    """A client that encrypts without asking whom it talks to."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if newest is not None:
        if newest < ssl.TLSVersion.TLSv1_2:
            context.set_ciphers("ALL:@SECLEVEL=0")  # without it OpenSSL would not even ask
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # old versions are what is tested
            context.minimum_version = context.maximum_version = newest
    return context


class TlsWire:
    """A client's octets in TLS. `error` is what ended its handshake."""

    def __init__(
        self,
        context: ssl.SSLContext | None = None,
        *,
        name: str | None = None,
        session: ssl.SSLSession | None = None,
    ) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.ssl = (context or trusting()).wrap_bio(
            self._in, self._out, server_hostname=name, session=session
        )
        self.error: ssl.SSLError | None = None

    def _step(self) -> None:
        try:
            self.ssl.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            self.error = error

    def encrypt(self, data: bytes) -> bytes:
        sent = 0
        while sent < len(data):
            sent += self.ssl.write(data[sent:])
        return self._out.read()

    def hello(self) -> bytes:
        """The first flight."""
        self._step()
        return self._out.read()

    def answer(self, wire: bytes) -> bytes:
        """The handshake's next flight."""
        self._in.write(wire)
        self._step()
        return self._out.read()

    def decrypt(self, wire: bytes) -> bytes:
        self._in.write(wire)
        read = []
        try:
            while piece := self.ssl.read(1 << 16):
                read.append(piece)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            self.error = error
        return b"".join(read)

    def close(self) -> bytes:
        """The client's close_notify."""
        with contextlib.suppress(ssl.SSLError):  # it wants an answer, or there was no handshake
            self.ssl.unwrap()
        return self._out.read()


class TlsClient(TlsWire):
    """A client of a channel."""

    def __init__(
        self,
        channel: TlsChannel,
        context: ssl.SSLContext | None = None,
        *,
        name: str | None = None,
        session: ssl.SSLSession | None = None,
        cut: Cut = whole,
    ) -> None:
        super().__init__(context, name=name, session=session)
        self.channel = channel
        self._cut = cut

    def shake(self) -> bytes:
        """The whole handshake; what the channel read meanwhile. A fault of the channel's is raised."""
        got = b""
        for _ in range(20):
            sent = self.hello()
            for piece in self._cut(sent):
                got += self.channel.receive(piece)
            answer = self.channel.take_output()
            self._in.write(answer)
            if not (sent or answer):
                break
        return got

    def send(self, data: bytes) -> bytes:
        """What the channel makes of `data`."""
        return b"".join([self.channel.receive(piece) for piece in self._cut(self.encrypt(data))])
