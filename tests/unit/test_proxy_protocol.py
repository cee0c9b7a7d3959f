"""PROXY headers as haproxy's proxy-protocol.txt describes them, and everything that is nearly one."""

import ipaddress
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets import front
from tests.support.feeding import cuts
from zonerelay.smtp.server import proxy_protocol
from zonerelay.smtp.server.proxy_protocol import SIGNATURE, ProxyHeader, ProxyReader, XClient, parse_xclient

NOBODY = ProxyHeader("", 0)
TLS_HELLO = b"\x16\x03\x01\x02\x00"


def line(text: str) -> bytes:
    return text.encode() + b"\r\n"


def binary(command: int, family: int, block: bytes, *, length: int | None = None) -> bytes:
    size = len(block) if length is None else length
    return SIGNATURE + bytes([0x20 | command, family]) + struct.pack("!H", size) + block


def addresses(source: str, destination: str, port: int = 56324, to: int = 25) -> bytes:
    packed = b"".join(ipaddress.ip_address(each).packed for each in (source, destination))
    return packed + struct.pack("!HH", port, to)


IPV4 = addresses("192.0.2.1", "198.51.100.9")
IPV6 = addresses("2001:db8::1", "2001:db8::9")
MAPPED = addresses("::ffff:192.0.2.1", "::ffff:198.51.100.9")
TLV = b"\x04\x00\x03abc"

GOOD = [
    (line("PROXY TCP4 192.0.2.1 198.51.100.9 56324 25"), ProxyHeader("192.0.2.1", 56324), "IPv4"),
    (line("PROXY TCP4 0.0.0.0 255.255.255.255 0 65535"), ProxyHeader("0.0.0.0", 0), "the ends of ranges"),
    (line("PROXY TCP6 2001:DB8::1 2001:db8:0::9 1 25"), ProxyHeader("2001:db8::1", 1), "IPv6, any spelling"),
    (line("PROXY TCP6 ::ffff:192.0.2.1 ::ffff:198.51.100.9 1 25"), ProxyHeader("192.0.2.1", 1), "mapped"),
    (line("PROXY UNKNOWN"), NOBODY, "unknown, short form"),
    (line("PROXY UNKNOWN whatever \x01 is here"), NOBODY, "unknown, the rest is ignored"),
    (line("PROXY UNKNOWN " + "f" * (proxy_protocol.MAX_LINE - 16)), NOBODY, "the longest line"),
    (binary(1, 0x11, IPV4), ProxyHeader("192.0.2.1", 56324), "v2 IPv4"),
    (binary(1, 0x21, IPV6), ProxyHeader("2001:db8::1", 56324), "v2 IPv6"),
    (binary(1, 0x21, MAPPED), ProxyHeader("192.0.2.1", 56324), "v2 mapped"),
    (binary(1, 0x11, IPV4 + TLV * 9), ProxyHeader("192.0.2.1", 56324), "v2 with TLVs"),
    (binary(1, 0x31, b"/run/client".ljust(216, b"\0")), NOBODY, "v2 Unix socket"),
    (binary(1, 0x00, b""), NOBODY, "v2 unspecified"),
    (binary(1, 0x00, IPV4), NOBODY, "v2 unspecified, with addresses that are to be ignored"),
    (binary(1, 0x10, IPV4), NOBODY, "v2 family without a transport"),
    (binary(1, 0x01, b""), NOBODY, "v2 transport without a family"),
    (binary(0, 0x00, b""), NOBODY, "v2 local"),
    (binary(0, 0x11, IPV4), NOBODY, "v2 local: the balancer's own addresses are not the client's"),
    (binary(0, 0xFF, b"abc"), NOBODY, "v2 local: its family is ignored"),
    (
        binary(1, 0x11, IPV4.ljust(proxy_protocol.MAX_HEADER - 16, b"\0")),
        ProxyHeader("192.0.2.1", 56324),
        "v2 longest",
    ),
]

BAD = [
    (b"EHLO client\r\n", "SMTP of a client that came without a balancer"),
    (TLS_HELLO, "TLS without a header"),
    (b"\r\nQUIT\r\n", "an empty line is not the signature"),
    (b"proxy TCP4 192.0.2.1 198.51.100.9 1 25\r\n", "lower case"),
    (b"PROXY\r\n", "no family"),
    (b"PROXY \r\n", "an empty family"),
    (b"PROXY  TCP4 192.0.2.1 198.51.100.9 1 25\r\n", "two spaces"),
    (b"PROXY TCP4 192.0.2.1 198.51.100.9 1 25 \r\n", "a space at the end"),
    (b"PROXY TCP4 192.0.2.1 198.51.100.9 1\r\n", "a port is missing"),
    (b"PROXY TCP4 192.0.2.1 198.51.100.9 1 25 7\r\n", "a word too many"),
    (b"PROXY TCP4 192.0.2.1 198.51.100.9 1 25\n", "a bare LF"),
    (b"PROXY TCP4 192.0.2.1\r198.51.100.9 1 25\r\n", "a bare CR"),
    (b"PROXY UNKNOWN\rx\r\n", "a bare CR in what is ignored"),
    (b"PROXY UNKNOWNX\r\n", "a longer word"),
    (b"PROXY UDP4 192.0.2.1 198.51.100.9 1 25\r\n", "another protocol"),
    (b"PROXY TCP4 2001:db8::1 2001:db8::9 1 25\r\n", "IPv6 said to be IPv4"),
    (b"PROXY TCP6 192.0.2.1 198.51.100.9 1 25\r\n", "IPv4 said to be IPv6"),
    (b"PROXY TCP4 192.0.2.1 2001:db8::9 1 25\r\n", "families mixed"),
    (b"PROXY TCP4 192.0.2.01 198.51.100.9 1 25\r\n", "a leading zero may be octal"),
    (b"PROXY TCP4 192.0.2.256 198.51.100.9 1 25\r\n", "out of range"),
    (b"PROXY TCP4 192.0.2 198.51.100.9 1 25\r\n", "three numbers"),
    (b"PROXY TCP4 relay.example 198.51.100.9 1 25\r\n", "a name"),
    (b"PROXY TCP6 fe80::1%eth0 fe80::2 1 25\r\n", "a scope"),
    (b"PROXY TCP4 192.0.2.1 198.51.100.9 65536 25\r\n", "a port out of range"),
    (b"PROXY TCP4 192.0.2.1 198.51.100.9 01 25\r\n", "a port with a leading zero"),
    (b"PROXY TCP4 192.0.2.1 198.51.100.9 -1 25\r\n", "a negative port"),
    (b"PROXY TCP4 192.0.2.1 198.51.100.9 1 \r\n", "an empty port"),
    ("PROXY TCP4 192.0.2.1 198.51.100.9 1 \u0662\u0665\r\n".encode(), "digits that are not ASCII"),
    (b"PROXY UNKNOWN " + b"f" * (proxy_protocol.MAX_LINE - 15) + b"\r\n", "one octet too long"),
    (b"PROXY UNKNOWN " + b"f" * 500, "no end"),
    (SIGNATURE + b"\x11", "version 1 in binary"),
    (SIGNATURE + b"\x22", "an unassigned command"),
    (binary(1, 0x12, IPV4), "UDP"),
    (binary(1, 0x13, IPV4), "an unassigned transport"),
    (binary(1, 0x41, IPV4), "an unassigned family"),
    (binary(1, 0x11, IPV4[:-1]), "an IPv4 block that is too short"),
    (binary(1, 0x21, IPV6[:-1]), "an IPv6 block that is too short"),
    (binary(1, 0x31, b"\0" * 215), "a Unix block that is too short"),
    (binary(1, 0x11, b"", length=proxy_protocol.MAX_HEADER - 15), "one octet too long, before it has come"),
    (SIGNATURE[:-1] + b"\r", "nearly the signature"),
]


def read(pieces: list[bytes]) -> tuple[ProxyHeader | None, bytes]:
    """What a session does: what comes behind the header belongs to the next part."""
    reader = ProxyReader()
    for number, piece in enumerate(pieces):
        header = reader.feed(piece)
        if header is not None:
            return header, reader.rest + b"".join(pieces[number + 1 :])
        assert reader.rest == b""
    return None, b""


@pytest.mark.parametrize(("wire", "expected", "reason"), GOOD, ids=[row[2] for row in GOOD])
@pytest.mark.parametrize("rest", [b"", b"EHLO x\r\n", TLS_HELLO], ids=["alone", "early talker", "TLS"])
def test_the_client_is_one_in_any_cut(wire: bytes, expected: ProxyHeader, reason: str, rest: bytes) -> None:
    for pieces in cuts(wire + rest) if len(wire) < 300 else [[wire + rest], [wire[:40], wire[40:] + rest]]:
        assert read(pieces) == (expected, rest), (reason, pieces)


@pytest.mark.parametrize(("wire", "reason"), BAD, ids=[row[1] for row in BAD])
def test_what_is_not_exactly_a_header_is_a_fault_in_every_cut(wire: bytes, reason: str) -> None:
    for pieces in cuts(wire):
        with pytest.raises(proxy_protocol.ProxyFault, match="PROXY header"):
            read(pieces)


def test_a_fault_is_found_before_the_line_ends_when_it_never_does() -> None:
    reader = ProxyReader()
    assert reader.feed(b"PROXY UNKNOWN " + b"f" * (proxy_protocol.MAX_LINE - 15)) is None
    with pytest.raises(proxy_protocol.ProxyFault, match="longer than 107 bytes"):
        reader.feed(b"f")


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"AUTH PLAIN AHVzZXIAc2VjcmV0\r\n", "AUTH, an SMTP command"),
        (b"ehlo ann\r\n", "EHLO, an SMTP command"),
        (TLS_HELLO, "a TLS handshake"),
        (b"jane.doe", "something else"),
        (b"EHLOjane", "something else"),
        (b"\r\nx", "something else"),
    ],
)
def test_the_text_for_the_operator_shows_nothing_that_a_stranger_chose(sent: bytes, kind: str) -> None:
    with pytest.raises(proxy_protocol.ProxyFault) as caught:
        ProxyReader().feed(sent)
    assert str(caught.value) == f"no PROXY header: the connection begins with {kind}"


LOOKS = [
    (b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\r\n", True, "version 1"),
    (b"PROXY nonsense", True, "version 1, or meant to be"),
    (binary(1, 0x11, IPV4), True, "version 2"),
    (b"EHLO x\r\n", False, "SMTP"),
    (TLS_HELLO, False, "TLS"),
    (b"", False, "nothing"),
    (b"\r\n", False, "an empty line"),
]


@pytest.mark.parametrize(("data", "expected", "reason"), LOOKS, ids=[row[2] for row in LOOKS])
def test_what_looks_like_a_header_from_an_unlisted_peer(data: bytes, expected: bool, reason: str) -> None:
    assert proxy_protocol.looks_like_proxy(data) is expected, reason


ADDRESSES = st.one_of(
    st.tuples(st.ip_addresses(v=4), st.ip_addresses(v=4)),
    st.tuples(st.ip_addresses(v=6), st.ip_addresses(v=6)),
)


@given(ADDRESSES, st.integers(0, 65535), st.booleans(), st.binary(max_size=60), st.data())
def test_what_a_balancer_encodes_comes_out_again(
    pair: tuple[ipaddress.IPv4Address, ipaddress.IPv4Address],
    port: int,
    as_line: bool,
    rest: bytes,
    data: st.DataObject,
) -> None:
    source, destination = pair
    if as_line:
        wire = line(f"PROXY TCP{source.version} {source} {destination} {port} 25")
    else:
        family = 0x11 if source.version == 4 else 0x21
        tlvs = data.draw(st.binary(max_size=100))
        wire = binary(1, family, addresses(str(source), str(destination), port) + tlvs)
    mapped = getattr(source, "ipv4_mapped", None)
    at = data.draw(st.integers(0, len(wire)))
    header, left = read([wire[:at], wire[at:] + rest])
    assert header == ProxyHeader(str(mapped or source), port)
    assert left == rest


@given(st.one_of(st.binary(), st.binary().map(SIGNATURE.__add__), st.binary().map(b"PROXY ".__add__)))
def test_any_bytes_are_a_header_a_fault_or_waited_for_in_bounds(data: bytes) -> None:
    front.proxy(data)


XCLIENTS = [
    (
        "NAME=client.example.org ADDR=192.0.2.1",
        XClient(name="client.example.org", address="192.0.2.1"),
        "two",
    ),
    ("name=a addr=192.0.2.1", XClient(name="a", address="192.0.2.1"), "names in any case"),
    ("ADDR=IPV6:2001:DB8::1", XClient(address="2001:db8::1"), "IPv6 in canonical form"),
    ("ADDR=ipv6:::ffff:192.0.2.1", XClient(address="192.0.2.1"), "mapped is IPv4"),
    ("PORT=56324 PROTO=esmtp", XClient(port=56324, protocol="ESMTP"), "a port and a protocol"),
    ("PROTO=SMTP", XClient(protocol="SMTP"), "the other protocol"),
    ("HELO=[192.0.2.1]", XClient(helo="[192.0.2.1]"), "what a client without a name says"),
    ("HELO=my+20host", XClient(helo="my host"), "xtext"),
    ("LOGIN=j+C3+B6rg+40example.org", XClient(login="j\u00f6rg@example.org"), "xtext of UTF-8"),
    ("LOGIN=a+2bb", XClient(login="a+b"), "lower case hexadecimal, which some senders use"),
    (
        "NAME=[UNAVAILABLE] ADDR=[unavailable] PORT=[Unavailable] HELO=[UNAVAILABLE] LOGIN=[UNAVAILABLE]",
        XClient(name="", address="", port=0, helo="", login=""),
        "nobody knows",
    ),
    ("NAME=[TEMPUNAVAIL]", XClient(name=""), "nobody knows now"),
    ("DESTADDR=192.0.2.9 DESTPORT=25", XClient(), "where the client has connected to is dropped"),
    ("DESTADDR=[UNAVAILABLE] DESTPORT=[UNAVAILABLE]", XClient(), "or is not known"),
    (
        f"HELO={'x' * proxy_protocol.MAX_VALUE}",
        XClient(helo="x" * proxy_protocol.MAX_VALUE),
        "the longest value",
    ),
    ("  NAME=a   PORT=1 ", XClient(name="a", port=1), "spaces"),
]


@pytest.mark.parametrize(("argument", "expected", "reason"), XCLIENTS, ids=[row[2] for row in XCLIENTS])
def test_what_a_server_in_front_says(argument: str, expected: XClient, reason: str) -> None:
    assert parse_xclient(argument) == expected, reason


def test_every_keyword_that_is_offered_is_understood() -> None:
    for keyword in proxy_protocol.KEYWORDS.split():
        value = "SMTP" if keyword == "PROTO" else "[UNAVAILABLE]"
        parse_xclient(f"{keyword}={value}")


@given(st.text(max_size=60))
def test_any_text_is_understood_or_refused(text: str) -> None:
    for argument in (text, f"NAME={text}", f"LOGIN={text}", f"ADDR={text}"):
        front.xclient(argument.encode())


LOGINS = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=40)


@given(LOGINS.filter(lambda login: login.upper() not in ("[UNAVAILABLE]", "[TEMPUNAVAIL]")))
def test_a_login_that_was_encoded_as_xtext_comes_out_again(login: str) -> None:
    encoded = "".join(
        chr(octet) if 33 <= octet <= 126 and chr(octet) not in "+=" else f"+{octet:02X}"
        for octet in login.encode()
    )
    assert parse_xclient(f"LOGIN={encoded}").login == login
