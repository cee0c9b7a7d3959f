"""Who a client is, as a load balancer or a server in front of us says: PROXY headers and XCLIENT.

Invariants: only `ProxyFault` or `CommandError` is raised; any cut gives the same client and the same octets
behind the header, or a fault; an address is one in its one spelling, or nothing; what is said is printable.
"""

import ipaddress

from tests.fuzz.targets.commands import refusal
from tests.support.feeding import cuttings
from zonerelay.smtp.server import proxy_protocol
from zonerelay.smtp.server.paths import CommandError
from zonerelay.smtp.server.proxy_protocol import MAX_HEADER, MAX_LINE, MAX_VALUE, ProxyHeader, parse_xclient


def proxy(data: bytes) -> None:
    found = [_proxy(pieces) for pieces in cuttings(data)]
    assert all(each == found[0] for each in found[1:])
    header, rest = found[0]
    if isinstance(header, ProxyHeader):
        assert proxy_protocol.looks_like_proxy(data)
        assert data.endswith(rest)
        assert len(data) - len(rest) <= MAX_HEADER
        _check_address(header.address)
        assert 0 <= header.port <= 65535
    elif header is None:
        assert len(data) < MAX_HEADER


def _proxy(pieces: list[bytes]) -> tuple[ProxyHeader | str | None, bytes]:
    """The header and what is behind it; or "fault"."""
    reader = proxy_protocol.ProxyReader()
    try:
        for number, piece in enumerate(pieces):
            header = reader.feed(piece)
            if header is not None:
                return header, reader.rest + b"".join(pieces[number + 1 :])
    except proxy_protocol.ProxyFault as fault:
        return _fault(str(fault)), b""
    return None, b""


def _fault(text: str) -> str:
    """It goes to a log; how early it is noticed depends on the cut."""
    assert text.isprintable()
    assert len(text) < 10 * MAX_LINE
    return "fault"


def xclient(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    if not text.isprintable():
        return  # `parse_command` lets none of these through
    try:
        said = parse_xclient(text)
    except CommandError as error:
        refusal(error.reply)
        return
    for value in (said.name, said.helo, said.login, said.protocol, said.address):
        assert value is None or (value.isprintable() and len(value) <= MAX_VALUE)
    assert said.protocol in (None, "SMTP", "ESMTP")
    assert said.port is None or 0 <= said.port <= 65535
    _check_address(said.address or "")
    assert parse_xclient(text.replace(" ", "  ")) == said


def _check_address(address: str) -> None:
    assert not address or proxy_protocol.canonical(ipaddress.ip_address(address)) == address
