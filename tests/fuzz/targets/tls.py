"""A TLS client's octets, before the handshake and behind it.

Invariants: only `TlsFault` is raised, and again by every later call; nothing is readable before the
handshake is complete; a channel that failed says its alert and no more; none of the other calls raises.
"""

import contextlib
import functools
import tempfile
from pathlib import Path

import trustme
from OpenSSL import SSL

from tests.support.feeding import in_pieces
from zonerelay.inbound.tls.certificate_files import read_pair
from zonerelay.inbound.tls.certificates import build_context
from zonerelay.inbound.tls.channel import TlsChannel, TlsContext, TlsFault

HELLO = b"hello"


def tls(data: bytes) -> None:
    """A first octet `+` is for a client whose handshake was complete, and who then sends the rest."""
    if data.startswith(b"+"):
        _feed(_established(), data[1:])
    else:
        _feed(TlsChannel(context()), data)


def _feed(channel: TlsChannel, data: bytes) -> None:
    for piece in [*in_pieces(data), data]:
        before = channel.info
        try:
            plain = channel.receive(piece)
        except TlsFault as fault:
            _stays_faulty(channel, str(fault))
            return
        assert before or channel.info or plain == b""
        assert isinstance(channel.take_output(), bytes)
    channel.send(HELLO)
    channel.close()


def _stays_faulty(channel: TlsChannel, text: str) -> None:
    assert text.isprintable()
    assert len(text) < 300
    channel.take_output()
    try:
        channel.receive(HELLO)
    except TlsFault:
        assert channel.send(HELLO) == b""
        assert channel.close() == b""
        return
    raise AssertionError("a fault is final")


def _established() -> TlsChannel:
    channel = TlsChannel(context())
    client = SSL.Connection(SSL.Context(SSL.TLS_CLIENT_METHOD), None)
    client.set_connect_state()
    while channel.info is None:
        with contextlib.suppress(SSL.WantReadError):
            client.do_handshake()
        assert channel.receive(client.bio_read(65536)) == b""
        if output := channel.take_output():
            client.bio_write(output)
    return channel


@functools.cache
def context() -> TlsContext:
    """As a listener has it, with a certificate of this process."""
    issued = trustme.CA().issue_cert("relay.test", "*.relay.test")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "pair.pem")
        issued.private_key_and_cert_chain_pem.write_to_path(path)
        return build_context([read_pair(path, path)], ask_certificate=False)
