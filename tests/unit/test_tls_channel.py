"""The server's side of TLS against Python's ssl as the client: any cut of the wire gives the same octets."""

import gc
import os
import random
import ssl
import weakref
from pathlib import Path

import pytest
from cryptography.hazmat.bindings.openssl.binding import Binding
from OpenSSL import SSL

from tests.support.certificates import Made, make
from tests.support.tls_client import Cut, TlsClient, bytewise, halved, trusting, whole
from zonerelay.inbound.tls.certificate_files import read_pair
from zonerelay.inbound.tls.certificates import build_context
from zonerelay.inbound.tls.channel import MAX_HANDSHAKE, TlsChannel, TlsContext, TlsFault

CUTS = [whole, halved, bytewise]
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


def context_of(made: Made, directory: Path, *, ask: bool = False) -> TlsContext:
    return build_context([read_pair(*made.write(directory, "server"))], ask_certificate=ask)


@pytest.fixture(params=[False, True], ids=["ssl", "pyopenssl"])
def context(tmp_path: Path, request: pytest.FixtureRequest) -> TlsContext:
    """Of both libraries: a listener that asks for certificates has another."""
    return context_of(make("mail.example.org"), tmp_path, ask=request.param)


@pytest.fixture
def asking(tmp_path: Path) -> TlsContext:
    return context_of(make("mail.example.org"), tmp_path, ask=True)


def established(context: TlsContext) -> TlsClient:
    client = TlsClient(TlsChannel(context))
    client.shake()
    assert client.channel.info
    return client


def fault_of(context: TlsContext, *received: bytes) -> str:
    channel = TlsChannel(context)
    try:
        for data in received:
            channel.receive(data)
    except TlsFault as fault:
        return str(fault)
    return ""


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_any_cut_of_the_wire_is_the_same(context: TlsContext, version: ssl.TLSVersion, cut: Cut) -> None:
    client = TlsClient(TlsChannel(context), trusting(version), cut=cut)
    assert client.shake() == b""
    assert client.channel.info
    assert client.send(b"EHLO client.example\r\n") == b"EHLO client.example\r\n"
    assert client.send(b"NOOP\r\nNOOP\r\n" * 2000) == b"NOOP\r\nNOOP\r\n" * 2000
    assert client.decrypt(client.channel.send(b"250 2.0.0 OK\r\n")) == b"250 2.0.0 OK\r\n"
    for piece in cut(client.close()):
        assert client.channel.receive(piece) == b""
    assert client.channel.closed
    assert client.channel.send(b"") == b""
    assert client.decrypt(client.channel.send(b"221 2.0.0 Bye\r\n")) == b"221 2.0.0 Bye\r\n"


def test_the_handshake_tells_version_and_cipher(context: TlsContext) -> None:
    client = TlsClient(TlsChannel(context), trusting(ssl.TLSVersion.TLSv1_3))
    assert client.channel.info is None
    client.shake()
    info = client.channel.info
    assert info is not None
    assert (info.version, info.cipher) == ("TLSv1.3", client.ssl.cipher()[0])
    assert info.certificate == ""


def test_the_server_chooses_the_cipher(context: TlsContext) -> None:
    of_client = trusting(ssl.TLSVersion.TLSv1_2)
    of_client.set_ciphers("ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-ECDSA-AES128-GCM-SHA256")
    client = TlsClient(TlsChannel(context), of_client)
    client.shake()
    assert client.channel.info is not None
    assert "AES" in client.channel.info.cipher
    assert "128" in client.channel.info.cipher


def test_large_data_pass_both_ways(context: TlsContext) -> None:
    client = established(context)
    data = random.Random(1).randbytes(3_000_000)
    assert client.send(data) == data
    assert client.decrypt(client.channel.send(data)) == data


def test_a_command_in_the_same_write_as_the_end_of_the_handshake_is_read(context: TlsContext) -> None:
    client = TlsClient(TlsChannel(context), trusting(ssl.TLSVersion.TLSv1_3))
    assert client.channel.receive(client.hello()) == b""
    finished = client.answer(client.channel.take_output())
    assert client.channel.receive(finished + client.encrypt(b"NOOP\r\n")) == b"NOOP\r\n"
    # Tickets go out in front of the answer.
    assert client.decrypt(client.channel.send(b"250 2.0.0 OK\r\n")) == b"250 2.0.0 OK\r\n"


@pytest.mark.parametrize("version", VERSIONS)
def test_tickets_of_tls_1_3_go_with_the_first_answer(context: TlsContext, version: ssl.TLSVersion) -> None:
    client = TlsClient(TlsChannel(context), trusting(version))
    client.channel.receive(client.hello())
    client.channel.receive(client.answer(client.channel.take_output()))
    assert client.channel.info
    # TLS 1.2 has tickets in the server's last flight, for which the client waits.
    assert (client.channel.take_output() == b"") is (version is ssl.TLSVersion.TLSv1_3)
    assert len(client.channel.send(b"250 2.0.0 OK\r\n")) > (150 if version is ssl.TLSVersion.TLSv1_3 else 20)


def test_clear_text_behind_starttls_never_becomes_a_command(context: TlsContext) -> None:
    client = TlsClient(TlsChannel(context))
    with pytest.raises(TlsFault, match="clear text"):
        client.channel.receive(b"MAIL FROM:<a@b.example>\r\n" + client.hello())
    assert not client.channel.info
    with pytest.raises(TlsFault, match="clear text"):
        client.channel.receive(b"\x16\x03\x01")


@pytest.mark.parametrize(
    ("received", "words"),
    [
        ([b"EHLO client.example\r\n"], "not TLS: clear text"),
        ([b"\r"], "not TLS: clear text"),
        ([b"\x00\x00"], "not TLS"),
        ([b"\x80\x2e\x01\x00\x02" + bytes(50)], "SSL 2"),
        ([b"\x16", b"EHLO\r\n"], "TLS"),  # "not TLS" or "longer than TLS allows": OpenSSL's versions differ
        ([b"\x16\x03\x01\x00\x05hello"], "unexpected handshake message"),
        ([b"\x16\x03\x01\xff\xff" + bytes(20)], "longer than TLS allows"),
    ],
)
def test_what_is_not_tls_is_said_in_words(context: TlsContext, received: list[bytes], words: str) -> None:
    assert words in fault_of(context, *received)


@pytest.mark.parametrize(
    ("version", "name"), [(ssl.TLSVersion.TLSv1, "TLS 1.0"), (ssl.TLSVersion.TLSv1_1, "TLS 1.1")]
)
def test_tls_before_1_2_is_refused_by_alert(context: TlsContext, version: ssl.TLSVersion, name: str) -> None:
    client = TlsClient(TlsChannel(context), trusting(version))
    with pytest.raises(TlsFault, match=f"the client offers {name}, but"):
        client.shake()
    client.answer(client.channel.take_output())
    assert "PROTOCOL_VERSION" in str(client.error)


@pytest.mark.parametrize("cipher", ["ECDHE-ECDSA-AES128-SHA256", "ECDHE-ECDSA-AES256-SHA"])
def test_a_client_with_cbc_ciphers_only_is_refused(context: TlsContext, cipher: str) -> None:
    of_client = trusting(ssl.TLSVersion.TLSv1_2)
    of_client.set_ciphers(cipher)
    with pytest.raises(TlsFault, match="the client offers no allowed cipher"):
        TlsClient(TlsChannel(context), of_client).shake()


def test_a_client_that_does_not_trust_us_is_told_by_its_alert(context: TlsContext) -> None:
    client = TlsClient(TlsChannel(context), ssl.create_default_context(), name="mail.example.org")
    client.channel.receive(client.hello())
    alert = client.answer(client.channel.take_output())
    with pytest.raises(TlsFault, match=r"does not accept our certificate \(alert: unknown ca\)"):
        client.channel.receive(alert)


def test_a_client_that_never_completes_its_handshake_meets_a_limit(context: TlsContext) -> None:
    # A handshake message that claims 100 KB, in records of 1 KB: OpenSSL would wait for the rest.
    message = b"\x01" + (100_000).to_bytes(3, "big") + bytes(100_000)
    records = [b"\x16\x03\x01\x04\x00" + message[at : at + 1024] for at in range(0, 99 * 1024, 1024)]
    within = MAX_HANDSHAKE // len(records[0])
    assert fault_of(context, *records[:within]) == ""
    assert "without completing the handshake" in fault_of(context, *records[: within + 1])


def test_large_data_right_behind_the_handshake_are_no_handshake(context: TlsContext) -> None:
    client = TlsClient(TlsChannel(context), trusting(ssl.TLSVersion.TLSv1_3))
    client.channel.receive(client.hello())
    finished = client.answer(client.channel.take_output())
    data = os.urandom(3 * MAX_HANDSHAKE)
    assert client.channel.receive(finished + client.encrypt(data)) == data


def test_a_damaged_record_is_a_fault_and_the_last_word(context: TlsContext) -> None:
    client = established(context)
    wire = bytearray(client.encrypt(b"RCPT TO:<a@b.example>\r\n"))
    wire[-1] ^= 1
    with pytest.raises(TlsFault, match="damaged in transit"):
        client.channel.receive(bytes(wire))
    assert client.channel.take_output() != b""  # the alert
    with pytest.raises(TlsFault, match="damaged in transit"):
        client.channel.receive(client.encrypt(b"NOOP\r\n"))
    assert client.channel.send(b"250 2.0.0 OK\r\n") == b""
    assert client.channel.close() == b""


def test_nothing_of_one_fault_reaches_another_connection(context: TlsContext) -> None:
    healthy, broken = established(context), established(context)
    with pytest.raises(TlsFault):
        broken.channel.receive(b"\x17\x03\x03\x00\x20" + bytes(32))
    assert Binding.lib.ERR_peek_error() == 0
    assert healthy.send(b"NOOP\r\n") == b"NOOP\r\n"


def test_an_error_that_others_left_in_openssl_is_not_taken_for_ours(context: TlsContext) -> None:
    other = SSL.Context(SSL.TLS_SERVER_METHOD)

    def leave_an_error() -> None:
        Binding.lib.SSL_CTX_set_cipher_list(other._context, b"no such cipher")
        assert Binding.lib.ERR_peek_error() != 0

    client = TlsClient(TlsChannel(context))
    hello = client.hello()
    leave_an_error()
    client.channel.receive(hello)
    finished = client.answer(client.channel.take_output())
    leave_an_error()
    client.channel.receive(finished)
    wire = client.encrypt(b"NOOP\r\n")
    leave_an_error()
    assert client.channel.receive(wire) == b"NOOP\r\n"
    leave_an_error()
    assert client.decrypt(client.channel.send(b"250 2.0.0 OK\r\n")) == b"250 2.0.0 OK\r\n"
    leave_an_error()
    assert client.channel.close() != b""


def test_after_close_notify_nothing_is_read_and_answers_still_go_out(context: TlsContext) -> None:
    client = established(context)
    wire = client.encrypt(b"QUIT\r\n") + client.close()
    assert client.channel.receive(wire + b"\x17\x03\x03\x00\x01x") == b"QUIT\r\n"
    assert client.channel.closed
    assert client.channel.receive(b"more") == b""
    assert client.decrypt(client.channel.send(b"221 2.0.0 Bye\r\n")) == b"221 2.0.0 Bye\r\n"


def test_closing_says_close_notify_once(context: TlsContext) -> None:
    client = established(context)
    client.answer(client.channel.close())
    assert client.ssl.read(1) == b""  # the end; without close_notify it would want more
    assert client.channel.close() == b""


def test_closing_before_the_handshake_is_complete_says_nothing(context: TlsContext) -> None:
    assert TlsChannel(context).close() == b""


def test_nothing_is_said_in_clear_text_before_the_handshake_is_complete(context: TlsContext) -> None:
    client = TlsClient(TlsChannel(context))
    assert client.channel.send(b"421 4.4.2 Too slow\r\n") == b""
    client.channel.receive(client.hello())
    flight = client.channel.send(b"421 4.4.2 Too slow\r\n")
    assert flight.startswith(b"\x16\x03\x03")
    client.channel.receive(client.answer(flight))
    assert client.channel.info
    assert client.decrypt(client.channel.take_output()) == b""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_without_certificate_is_welcome_too(asking: TlsContext, version: ssl.TLSVersion) -> None:
    client = TlsClient(TlsChannel(asking), trusting(version))
    client.shake()
    assert client.channel.info is not None
    assert client.channel.info.certificate == ""


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_certificate_that_nobody_signed_is_accepted_and_reported(
    asking: TlsContext, tmp_path: Path, version: ssl.TLSVersion, cut: Cut
) -> None:
    made = make(common_name="some client", ends=1_600_000_000.0, starts=1_500_000_000.0)  # expired, too
    client = TlsClient(TlsChannel(asking), _with_certificate(made, tmp_path, version), cut=cut)
    client.shake()
    assert client.channel.info is not None
    assert client.channel.info.certificate == made.fingerprint
    assert Binding.lib.ERR_peek_error() == 0
    assert client.send(b"NOOP\r\n") == b"NOOP\r\n"


def _with_certificate(made: Made, directory: Path, version: ssl.TLSVersion) -> ssl.SSLContext:
    context = trusting(version)
    context.load_cert_chain(*made.write(directory, "client"))
    return context


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("with_certificate", [False, True])
def test_sessions_are_resumed_and_remember_the_clients_certificate(
    asking: TlsContext, tmp_path: Path, version: ssl.TLSVersion, with_certificate: bool
) -> None:
    made = make(common_name="client")
    of_client = _with_certificate(made, tmp_path, version) if with_certificate else trusting(version)
    first = TlsClient(TlsChannel(asking), of_client, name="mail.example.org")
    first.shake()
    first.decrypt(first.channel.send(b"220 relay.example.org ESMTP\r\n"))
    again = TlsClient(TlsChannel(asking), of_client, name="mail.example.org", session=first.ssl.session)
    again.shake()
    assert again.ssl.session_reused
    assert again.channel.info == first.channel.info
    assert first.channel.info is not None
    assert first.channel.info.certificate == (made.fingerprint if with_certificate else "")
    assert again.send(b"NOOP\r\n") == b"NOOP\r\n"


def test_a_channel_goes_with_its_last_reference(context: TlsContext) -> None:
    """A fault must not keep it for the garbage collector: strangers decide how many there are."""
    gc.collect()
    gc.disable()
    try:
        client = established(context)
        wire = bytearray(client.encrypt(b"NOOP\r\n"))
        wire[-1] ^= 1
        with pytest.raises(TlsFault):
            client.channel.receive(bytes(wire))
        watched = weakref.ref(client.channel._session)
        del client
        assert watched() is None
    finally:
        gc.enable()
