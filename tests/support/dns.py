"""A scripted authoritative DNS server on loopback, over UDP and TCP, in this process.

    zones = {
        "example.com": {"MX": ["10 mx1.example.com", "20 mx2.example.com"], "TTL": 300},
        "mx1.example.com": {"A": ["127.0.0.1"], "AAAA": ["::1"]},
        "nullmx.example": {"MX": ["0 ."]},
        "alias.example": {"CNAME": ["mx1.example.com"]},
    }
    troubles = {"broken.example": SERVFAIL, ("example.com", "AAAA"): SILENCE}
    async with FakeDns(zones, troubles) as dns:
        settings = DnsSettings(servers=(dns.address,), timeout=0.5)
        ...
        assert dns.queries == [("example.com", "MX", "udp")]

A name that is not there is NXDOMAIN; a name that is there without the type is NODATA (`{}` has no data at
all). `dns.zones`, `dns.faults` and `dns.secure` may be changed while it runs. Answers about names in or
below `secure` have the AD bit, as a validating resolver's have, when the question asked for it (a `pushy` one
does not wait for that), except those about `insecure` names and types. `dns.edns` says how the server treats
a question with an OPT record, and `dns.options` whether each question had one. Without TCP (`tcp=False`) its
TCP port is closed.
"""

import asyncio
import enum
from collections.abc import Mapping, Sequence
from typing import Self, cast

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from zonerelay.routing.dns import resolver

DEFAULT_TTL = 60


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the relay give up on servers in a tenth of a second, and remember nothing."""
    for module, name, seconds in (
        (resolver, "TRY_TIMEOUT", 0.1),
        (resolver, "PROBE_PAUSE", 0.1),
        (resolver, "FAILURE_TTL", 0.0),
        (resolver, "MIN_TTL", 0.0),
    ):
        monkeypatch.setattr(module, name, seconds)


class OnError(enum.Enum):
    SERVFAIL = "servfail"
    REFUSED = "refused"
    NXDOMAIN = "no such name"  # to this type, although the name may have others
    SILENCE = "silence"  # no answer at all
    TRUNCATED = "truncated"  # over UDP; the whole answer over TCP
    WRONG_ID = "wrong id"  # an answer to another question, then silence
    GARBAGE = "garbage"  # octets that are no DNS message


class Edns(enum.Enum):
    """How a server treats a question with an OPT record (RFC 6891 6.2.3 and 7)."""

    TAKEN = "taken"
    IGNORED = "ignored"  # a whole answer without OPT
    FORMERR = "formerr"
    HEADER = "formerr, header only"
    NOTIMP = "notimp"
    SERVFAIL = "servfail"
    REFUSED = "refused"
    BADVERS = "badvers"
    SILENCE = "silence"
    GARBAGE = "garbage"


SERVFAIL = OnError.SERVFAIL
REFUSED = OnError.REFUSED
NXDOMAIN = OnError.NXDOMAIN
SILENCE = OnError.SILENCE
TRUNCATED = OnError.TRUNCATED
WRONG_ID = OnError.WRONG_ID
GARBAGE = OnError.GARBAGE

Records = Mapping[str, Sequence[str] | int]
"""Record texts by type; `"TTL"` is a number."""
Zones = Mapping[str, Records]
InjectedFaults = Mapping[str | tuple[str, str], OnError]
"""By name, or by name and type."""


class FakeDns:
    def __init__(
        self,
        zones: Zones,
        faults: InjectedFaults | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        edns: Edns = Edns.TAKEN,
        tcp: bool = True,
    ) -> None:
        self._host, self._port, self._with_tcp = host, port, tcp
        self.edns = edns
        self.options: list[bool] = []
        self.zones: dict[str, Records] = {name.lower(): data for name, data in zones.items()}
        self.faults: dict[str | tuple[str, str], OnError] = dict(faults or {})
        self.secure: set[str] = set()
        self.insecure: set[tuple[str, str]] = set()
        self.pushy = False
        self.queries: list[tuple[str, str, str]] = []
        self.address = ""
        self._udp: asyncio.DatagramTransport | None = None
        self._tcp: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for _ in range(20):  # the TCP port of the same number may be taken
            udp, _protocol = await loop.create_datagram_endpoint(
                lambda: _Udp(self), local_addr=(self._host, self._port)
            )
            port: int = udp.get_extra_info("sockname")[1]
            try:
                self._tcp = await asyncio.start_server(self._converse, self._host, port)
            except OSError:
                udp.close()
                continue
            if not self._with_tcp:
                self._tcp.close()
            self._udp, self.address = udp, f"{self._host}:{port}"
            return self
        raise OSError("no port is free for both UDP and TCP")

    async def __aexit__(self, *error: object) -> None:
        assert self._udp is not None
        assert self._tcp is not None
        self._udp.close()
        self._tcp.close()
        for task in list(self._conversations):
            task.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)
        await self._tcp.wait_closed()
        await asyncio.sleep(0)

    def count(self, name: str, kind: str) -> int:
        """How often a question was asked, over either transport."""
        return sum(query[:2] == (name, kind) for query in self.queries)

    def answer(self, wire: bytes, transport: str) -> bytes | None:
        question = dns.message.from_wire(wire)
        name = question.question[0].name.to_text(omit_final_dot=True).lower()
        kind = dns.rdatatype.to_text(question.question[0].rdtype)
        self.queries.append((name, kind, transport))
        self.options.append(question.edns >= 0)
        if question.edns >= 0 and self.edns not in (Edns.TAKEN, Edns.IGNORED):
            return _refusal_of_edns(wire, question, self.edns)
        trouble = self.faults.get(name) or self.faults.get((name, kind))
        if trouble is SILENCE:
            return None
        if trouble is GARBAGE:
            return wire[:2] + b"\xff" * 7
        response = dns.message.make_response(question)
        if self.edns is Edns.IGNORED:
            response.use_edns(False)
        if trouble is SERVFAIL or trouble is REFUSED:
            response.set_rcode(dns.rcode.SERVFAIL if trouble is SERVFAIL else dns.rcode.REFUSED)
        elif trouble is NXDOMAIN:
            response.set_rcode(dns.rcode.NXDOMAIN)
            response.authority.append(_soa(name))
        elif trouble is TRUNCATED and transport == "udp":
            response.flags |= dns.flags.TC
        else:
            self._fill(response, name, kind)
            asked = question.flags & dns.flags.AD or self.pushy
            if asked and (name, kind) not in self.insecure and self._vouches_for(name, response):
                response.flags |= dns.flags.AD
        if trouble is WRONG_ID:
            response.id ^= 0x5555
        return response.to_wire(max_size=65535, origin=dns.name.root)

    def _vouches_for(self, name: str, response: dns.message.Message) -> bool:
        names = [name, *(rrset.name.to_text(omit_final_dot=True).lower() for rrset in response.answer)]
        return all(any(f".{each}".endswith(f".{zone}") for zone in self.secure) for each in names)

    def _fill(self, response: dns.message.Message, name: str, kind: str) -> None:
        response.flags |= dns.flags.AA | dns.flags.RA
        for _ in range(10):  # a chain of aliases, or a circle of them
            data = self.zones.get(name)
            if data is None:
                response.set_rcode(dns.rcode.NXDOMAIN)
                break
            found = next((each for each in (kind, "CNAME") if each in data), None)
            if found is None:
                break
            response.answer.append(_rrset(name, found, data))
            if found == kind:
                return
            name = response.answer[-1][0].to_text().rstrip(".").lower()
        response.authority.append(_soa(name))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(2), "big")
                answer = self.answer(await reader.readexactly(size), "tcp")
                if answer is not None:
                    writer.write(len(answer).to_bytes(2, "big") + answer)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._conversations.discard(task)
            writer.close()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: FakeDns) -> None:
        self._server = server
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Neither loop's transport is an instance of what asyncio's documentation says it is.
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._server.answer(data, "udp")
        if answer is not None and self._transport is not None:
            self._transport.sendto(answer, addr)


def _refusal_of_edns(wire: bytes, question: dns.message.Message, how: Edns) -> bytes | None:
    if how is Edns.SILENCE:
        return None
    if how is Edns.GARBAGE:
        return wire[:2] + b"\xff" * 7
    response = dns.message.make_response(question)
    if how is not Edns.BADVERS:  # who does not know OPT does not write one
        response.use_edns(False)
    if how is Edns.HEADER:
        response.question.clear()
    response.set_rcode(dns.rcode.from_text("FORMERR" if how is Edns.HEADER else how.name))
    return response.to_wire()


def _soa(name: str) -> dns.rrset.RRset:
    data = f"ns.{name} root.{name} 1 3600 600 86400 {DEFAULT_TTL}"
    return dns.rrset.from_text(f"{name}.", DEFAULT_TTL, "IN", "SOA", data)


def _rrset(name: str, kind: str, data: Records) -> dns.rrset.RRset:
    records, ttl = data[kind], data.get("TTL", DEFAULT_TTL)
    assert not isinstance(records, int)
    assert isinstance(ttl, int)
    return dns.rrset.from_text_list(f"{name}.", ttl, "IN", kind, list(records), origin=dns.name.root)
