"""Domains, addresses, hosts files and name servers; answers of DNS, and how long they are kept."""

import asyncio
import ipaddress
import socket
from pathlib import Path
from typing import Any

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rdataclass
import dns.rdatatype
import dns.resolver
import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.dns_oracle import read_alike
from zonerelay.config.endpoints import NameServer, parse_listen
from zonerelay.config.settings import DnsSettings
from zonerelay.model.clock import ManualClock
from zonerelay.routing import addresses
from zonerelay.routing.addresses import OwnAddresses, ascii_domain, is_literal, is_private, organization
from zonerelay.routing.dns import answers as dns_answers
from zonerelay.routing.dns import resolver as dns_resolver
from zonerelay.routing.dns.answers import AAAA, CNAME, MX, TLSA, TXT, A, DnsStatus, ParsedAnswer, question
from zonerelay.routing.dns.resolver import (
    MAX_CONCURRENT,
    MAX_OF_ONE,
    Hosts,
    Resolver,
    read_answer,
    system_names,
)
from zonerelay.smtp.server.paths import literal_address


@pytest.mark.parametrize(
    ("domain", "ascii_form"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("Bücher.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("faß.example", "xn--fa-hia.example"),  # IDNA 2003 made this fass.example
        ("日本。example", "xn--wgv71a.example"),  # UTS 46: an ideographic full stop is a dot
        ("_dmarc.my_host.example", "_dmarc.my_host.example"),
        ("localhost", "localhost"),
        ("1.example", "1.example"),
    ],
)
def test_a_domain_has_one_ascii_form(domain: str, ascii_form: str) -> None:
    assert ascii_domain(domain) == ascii_form


@pytest.mark.parametrize(
    "domain",
    [
        "",
        ".",
        "a..b",
        "-a.example",
        "a-.example",
        "a b.example",
        "a" * 64 + ".example",
        "a." * 127 + "ab",
        "ü" * 80,
        "\u200b.example",
        "a/b.example",
        "*.example.com",
    ],
)
def test_what_is_no_domain_is_refused(domain: str) -> None:
    with pytest.raises(ValueError):
        ascii_domain(domain)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("[192.0.2.1]", "192.0.2.1"),
        ("[IPv6:2001:db8::1]", "2001:db8::1"),
        ("[ipv6:::1]", "::1"),
        ("[2001:db8::1]", None),
        ("[192.0.2.256]", None),
        ("[IPv6:fe80::1%eth0]", None),
        ("[192.0.2.1", None),
        ("[]", None),
        ("192.0.2.1", None),
    ],
)
def test_address_literals_are_read_strictly(text: str, address: str | None) -> None:
    assert literal_address(text) == address
    assert is_literal(text) is text.startswith("[")


@pytest.mark.parametrize(
    "ip",
    [
        "127.0.0.1",
        "127.255.255.254",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.1",
        "192.0.2.1",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "ff02::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::127.0.0.1",
        "64:ff9b::10.0.0.1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "::ffff:0:127.0.0.1",
        "::ffff:0:169.254.169.254",
        "::ffff:0:8.8.8.8",
        "::8.8.8.8",
        "64:ff9b:1::10.0.0.1",
        "64:ff9b:1:fffe::8.8.8.8",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2001::7f00:1",
        "4000::1",
        "100::1",
        "fec0::1",
        "192.88.99.1",
        "not an address",
    ],
)
def test_addresses_that_the_internet_must_not_lead_to_are_private(ip: str) -> None:
    assert is_private(ip)


@pytest.mark.parametrize(
    "ip",
    [
        "8.8.8.8",
        "172.32.0.1",
        "100.128.0.1",
        "2a00:1450:4001::1",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
        "2002:808:808::",
    ],
)
def test_public_addresses_are_not_private(ip: str) -> None:
    assert not is_private(ip)


def test_a_listener_with_an_address_is_ours_at_its_port_only() -> None:
    own = OwnAddresses([parse_listen("192.0.2.1:25"), parse_listen("unix:/run/zonerelay.sock")])
    assert own.includes("192.0.2.1", 25)
    assert own.includes("::ffff:192.0.2.1", 25)
    assert not own.includes("192.0.2.1", 2525)
    assert not own.includes("192.0.2.2", 25)
    assert not own.includes("nonsense", 25)
    assert own.has_port(25)
    assert not own.has_port(2525)


def test_a_wildcard_listener_is_ours_on_every_address_of_the_machine() -> None:
    own = OwnAddresses([parse_listen("0.0.0.0:25")])
    assert own.includes("127.0.0.1", 25)
    assert not own.includes("192.0.2.1", 25)
    assert not own.includes("127.0.0.1", 26)
    assert not addresses.is_address_of_this_machine(ipaddress.ip_address("2001:db8::1"))


def test_a_hosts_file_names_hosts_in_any_case_and_its_mistakes_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# comment\n10.0.0.1 MailHog mailhog.test # sink\n::1 mailhog\nbroken line\n\n300.1.1.1 x\n"
    )
    hosts = Hosts(file=file)
    assert hosts.lookup("mailhog") == ("10.0.0.1", "::1")
    assert hosts.lookup("mailhog.test") == ("10.0.0.1",)
    assert hosts.lookup("x") == ()
    assert hosts.lookup("example.com") == ()


def test_localhost_needs_neither_dns_nor_a_hosts_file(tmp_path: Path) -> None:
    hosts = Hosts(file=tmp_path / "absent")
    assert set(hosts.lookup("localhost")) == {"127.0.0.1", "::1"}
    assert hosts.lookup("sink.localhost") == hosts.lookup("localhost")
    assert hosts.lookup("notlocalhost") == ()


# Which name servers the machine has: as dnspython reads /etc/resolv.conf


@pytest.mark.parametrize(
    "text",
    [
        "nameserver 192.0.2.1\n",
        "# nameserver 192.0.2.9\n; nameserver 192.0.2.8\nsearch example.com\nnameserver 192.0.2.1\n",
        "nameserver\t2001:db8::1  # first\n  nameserver 192.0.2.2\nnameserver\noptions rotate timeout:1\n",
        "nameserver fe80::1%lo\n",
        "nameservers 192.0.2.1\nnameserver 127.0.0.53",
    ],
)
def test_servers_of_the_machine(text: str, tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text(text)
    theirs = dns.resolver.Resolver(str(file)).nameservers
    assert system_names(str(file)).servers == [NameServer(str(each)) for each in theirs]


@pytest.mark.parametrize("text", [None, "", "search example.com\n"])
def test_a_machine_that_names_none_asks_itself(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    if text is not None:
        file.write_text(text)
    assert system_names(str(file)).servers == [NameServer("127.0.0.1")]


def test_a_server_that_is_no_address_is_skipped_as_libc_does(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text("nameserver https://dns.example/query\nnameserver 192.0.2.1\n")
    assert system_names(str(file)).servers == [NameServer("192.0.2.1")]


@pytest.mark.parametrize(
    ("text", "search"),
    [
        ("search a.example b.example\n", ["a.example", "b.example"]),
        ("domain a.example\nsearch b.example\n", ["b.example"]),
        ("search b.example\ndomain a.example\n", ["a.example"]),
        ("nameserver 192.0.2.1\n", ["machine.example"]),
    ],
)
def test_the_search_list_is_the_last_one_or_the_domain_of_the_machine(
    text: str, search: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "relay.machine.example")
    file = tmp_path / "resolv.conf"
    file.write_text(text)
    assert system_names(str(file)).search == search


class Asked(Resolver):
    """A resolver whose answers count what was asked and live for 10 s; they wait for `gate`."""

    def __init__(self, domains: int = 10) -> None:
        self.clock = ManualClock()
        settings = DnsSettings(servers=("192.0.2.1",), cache_size=domains)
        super().__init__(settings, self.clock, hosts=Hosts({}))
        self.count = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def get(self, name: str = "x") -> dns_answers.DnsAnswer[str]:
        return await self.lookup(name, A)

    async def _ask(self, name: str, kind: object) -> dns_answers.DnsAnswer[Any]:
        self.count += 1
        await self.gate.wait()
        return dns_answers.DnsAnswer(DnsStatus.OK, (str(self.count),), self.clock.monotonic() + 10.0)


async def test_an_answer_is_reused_until_it_expires() -> None:
    asked = Asked()
    assert (await asked.get()).records == ("1",)
    asked.clock.step(-3600)  # an operator setting the clock changes nothing
    asked.clock.advance(9.9)
    assert (await asked.get()).records == ("1",)
    asked.clock.advance(0.2)
    assert (await asked.get()).records == ("2",)


async def test_the_oldest_answer_makes_room() -> None:
    asked = Asked(domains=1)
    for name in ("a", "b", "c", "d", "e", "b", "a"):
        await asked.get(name)
        assert len(asked._answers) <= dns_resolver.ANSWERS == 4
    assert asked.count == 6  # b was still there, a was not


async def test_equal_questions_are_asked_once_and_a_caller_that_leaves_does_not_matter() -> None:
    asked = Asked()
    asked.gate.clear()
    callers = [asyncio.create_task(asked.get()) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.sleep(0)
    asked.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await callers[0]
    assert [(await caller).records for caller in callers[1:]] == [("1",), ("1",)]
    assert asked.count == 1


async def test_closing_gives_up_what_is_being_asked() -> None:
    asked = Asked()
    asked.gate.clear()
    caller = asyncio.create_task(asked.get())
    await asyncio.sleep(0)
    await asked.close()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_names_of_one_organization_do_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(DnsSettings(servers=("192.0.2.1",), timeout=0.05), ManualClock(), hosts=Hosts({}))
    asked: list[str] = []

    async def never(name: str, *_: object) -> Any:
        asked.append(name)
        await asyncio.Event().wait()

    monkeypatch.setattr(resolver, "_read", never)
    names = [f"mx{number}.silent.example" for number in range(MAX_CONCURRENT)]
    asking = [asyncio.create_task(resolver.lookup(name, A)) for name in [*names, "mx.other.example"]]
    # Those that had no place within their time have no answer.
    late = await asyncio.gather(*asking[MAX_OF_ONE:-1])
    assert {each.status for each in late} == {DnsStatus.TIMEOUT}
    assert asked == [*names[:MAX_OF_ONE], "mx.other.example"]
    await resolver.close()


@pytest.mark.parametrize(
    ("name", "whole"),
    [("mx.a.example.com", "example.com"), ("a.b.co.uk", "b.co.uk"), ("co.uk", "co.uk"), ("x", "x"), ("", "")],
)
def test_the_organization_of_a_name(name: str, whole: str) -> None:
    assert organization(name) == whole


# Our reader of plain DNS answers says what dnspython says, or nothing


NAME = "mail.example.com"
KINDS: dict[str, dns_answers.RecordType[object]] = {
    kind.name: kind  # type: ignore[misc]  # of several types
    for kind in (MX, A, AAAA, TLSA, TXT, CNAME)
}
DATA = {
    "MX": ["10 mx.example.com.", "20 MX.Example.NET.", "0 .", "10 mx\\.dot.example.", "5 192.0.2.1."],
    "A": ["192.0.2.1", "192.0.2.2", "127.0.0.1"],
    "AAAA": ["2001:db8::1", "::ffff:192.0.2.1", "::1", "::192.0.2.1", "2001:0:0:1::", "::"],
    "TLSA": ["3 1 1 " + "ab" * 32, "2 0 0 3000", "3 1 1 ab"],
    "TXT": ['"v=STSv1; " "id=1;"', '"v=STSv1; id=1;"', '""', '"' + "x" * 255 + '"'],
    "CNAME": ["a0.example.net."],
    "SOA": [
        "ns.example.com. post.example.com. 1 2 3 4 60",
        "ns.example.com. post.example.com. 1 2 3 4 4294967295",
    ],
    "NS": ["ns.example.com."],
    "RRSIG": ["MX 8 2 300 20300101000000 20200101000000 1 example.com. AAAA"],
}
ABOVE = [NAME, "example.com", "com", ".", "example.net", "other.example.com", "MAIL.example.COM"]


def packet(kind: str, *answer: str, authority: tuple[str, ...] = (), name: str = NAME) -> dns.message.Message:
    """Records as in a zone file: owner, TTL, type, data."""
    made = dns.message.make_response(dns.message.make_query(name, kind, use_edns=0))
    for section, lines in ((made.answer, answer), (made.authority, authority)):
        for line in lines:
            owner, ttl, type_, data = line.split(" ", 3)
            section.append(dns.rrset.from_text(f"{owner}.".replace("..", "."), int(ttl), "IN", type_, data))
    return made


def reading(made: dns.message.Message, kind: dns_answers.RecordType[object]) -> ParsedAnswer[object]:
    wire = made.to_wire()
    read_alike(wire, NAME, kind)
    return read_answer(wire, NAME, kind)


def test_plain_answers_of_every_kind() -> None:
    assert reading(packet("MX", f"{NAME} 300 MX 10 MX.example.com."), KINDS["MX"]) == ParsedAnswer(
        DnsStatus.OK, (dns_answers.MxRecord(10, "mx.example.com"),), 300.0
    )
    assert reading(packet("MX", f"{NAME} 300 MX 0 ."), KINDS["MX"]) == ParsedAnswer(
        DnsStatus.OK, (dns_answers.MxRecord(0, ""),), 300.0
    )
    found = reading(packet("AAAA", f"{NAME} 9 AAAA 2001:db8::1", f"{NAME} 8 AAAA ::1"), KINDS["AAAA"])
    assert found == ParsedAnswer(DnsStatus.OK, ("2001:db8::1", "::1"), 8.0)
    found = reading(packet("TLSA", f"{NAME} 9 TLSA 3 1 1 abcd"), KINDS["TLSA"])
    assert found == ParsedAnswer(DnsStatus.OK, (dns_answers.TlsaRecord(3, 1, 1, b"\xab\xcd"),), 9.0)
    found = reading(packet("TXT", f'{NAME} 9 TXT "one" "two"'), KINDS["TXT"])
    assert found == ParsedAnswer(DnsStatus.OK, ("onetwo",), 9.0)


def test_a_signed_answer_is_plain() -> None:
    made = packet("MX", f"{NAME} 300 MX 10 mx.example.com.", f"{NAME} 60 RRSIG {DATA['RRSIG'][0]}")
    made.flags |= dns.flags.AD
    found = read_alike(made.to_wire(), NAME, MX)
    assert found == ParsedAnswer(
        DnsStatus.OK, (dns_answers.MxRecord(10, "mx.example.com"),), 300.0, authentic=True
    )


def test_aliases_are_followed_and_the_least_ttl_counts() -> None:
    aliases = [f"{NAME} 30 CNAME b.example.", "b.example 20 CNAME c.example."]
    made = packet("A", *aliases, "c.example 99 A 192.0.2.1")
    assert reading(made, KINDS["A"]) == ParsedAnswer(
        DnsStatus.OK, ("192.0.2.1",), 20.0, canonical="c.example"
    )
    asked = packet("CNAME", *aliases)
    assert reading(asked, KINDS["CNAME"]) == ParsedAnswer(DnsStatus.OK, ("b.example",), 30.0)


def test_a_denial_lives_as_long_as_its_soa_says() -> None:
    soa = "example.com 900 SOA ns.example.com. post.example.com. 1 2 3 4 60"
    assert reading(packet("MX", authority=(soa,)), KINDS["MX"]) == ParsedAnswer(DnsStatus.NODATA, (), 60.0)
    made = packet("MX", f"{NAME} 50 CNAME gone.example.com.", authority=(soa,))
    made.set_rcode(dns.rcode.NXDOMAIN)
    made.flags |= dns.flags.AD
    assert reading(made, KINDS["MX"]) == ParsedAnswer(DnsStatus.NXDOMAIN, (), 50.0, authentic=True)
    found = reading(packet("MX"), KINDS["MX"])
    assert found == ParsedAnswer(DnsStatus.NODATA, (), 300.0)


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.REFUSED])
def test_a_server_that_says_that_it_failed_is_understood(rcode: dns.rcode.Rcode) -> None:
    made = packet("MX")
    made.set_rcode(rcode)
    assert reading(made, KINDS["MX"]) == ParsedAnswer(DnsStatus.SERVFAIL, (), 0.0)
    made.question.clear()
    assert reading(made, KINDS["MX"]) == ParsedAnswer(DnsStatus.SERVFAIL, (), 0.0)


def unusual() -> dict[str, dns.message.Message]:
    long = [f"a{n}.example 9 CNAME a{n + 1}.example." for n in range(16)]
    made = {
        "another question": packet("MX", name="other.example"),
        "another type": packet("A"),
        "a circle": packet("MX", f"{NAME} 9 CNAME b.example.", f"b.example 9 CNAME {NAME}."),
        "too many aliases": packet("MX", f"{NAME} 9 CNAME a0.example.", *long),
        "no such name, and data": packet("MX", f"{NAME} 9 MX 10 mx.example."),
        "truncated": packet("MX"),
        "no response": packet("MX"),
        "another opcode": packet("MX"),
        "a code of EDNS": packet("MX"),
        "another failure": packet("MX"),
        "two aliases of one name": packet("MX", f"{NAME} 9 CNAME b.example.", f"{NAME} 9 CNAME c.example."),
    }
    made["no such name, and data"].set_rcode(dns.rcode.NXDOMAIN)
    made["truncated"].flags |= dns.flags.TC
    made["no response"].flags &= ~dns.flags.QR
    made["another opcode"].set_opcode(dns.opcode.STATUS)
    made["a code of EDNS"].set_rcode(dns.rcode.BADVERS)
    made["another failure"].set_rcode(dns.rcode.NOTIMP)
    return made


UNUSUAL = {
    "truncated": DnsStatus.NO_TCP,
    "a code of EDNS": DnsStatus.SERVFAIL,
    "another failure": DnsStatus.SERVFAIL,
    "two aliases of one name": DnsStatus.NODATA,
}
"""All others are invalid."""


@pytest.mark.parametrize("what", unusual())
def test_unusual_answers_are_read_by_dnspython(what: str) -> None:
    made = unusual()[what]
    assert read_alike(made.to_wire(), NAME, MX) is None
    assert reading(made, KINDS["MX"]).status is UNUSUAL.get(what, DnsStatus.BAD)


def test_unusable_records_are_left_out_and_alone_they_are_invalid() -> None:
    odd, usual = f"{NAME} 9 MX 10 m\\*x.example.", f"{NAME} 9 MX 10 mx.example."
    assert reading(packet("MX", odd, usual), KINDS["MX"]).records == (dns_answers.MxRecord(10, "mx.example"),)
    assert reading(packet("MX", odd), KINDS["MX"]).status is DnsStatus.BAD


def test_of_thousands_of_records_few_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{NAME} 9 MX {each} {'a.' * 100}{NAME}." for each in range(2000)]
    plain = packet("MX", *lines).to_wire(max_size=65535)
    aliased = packet("MX", f"{NAME} 9 CNAME b.example.", *lines).to_wire(max_size=65535)
    monkeypatch.setattr(dns.message, "from_wire", None)
    assert len(read_answer(plain, NAME, KINDS["MX"]).records) == dns_answers.MAX_RECORDS
    assert read_answer(aliased, NAME, KINDS["MX"]).status is DnsStatus.BAD


def test_no_packet_that_was_cut_off_is_an_answer() -> None:
    for made in (
        packet("MX", f"{NAME} 9 CNAME b.example.", "b.example 9 MX 10 mx.example."),
        packet("MX", f"{NAME} 9 MX 10 mx.example."),
    ):
        made.use_edns(False)
        wire = made.to_wire()
        assert read_answer(wire, NAME, MX).status is DnsStatus.OK
        assert {read_answer(wire[:n], NAME, MX).status for n in range(len(wire))} == {DnsStatus.BAD}


def test_a_question_is_what_dnspython_would_ask() -> None:
    asked = dns.message.from_wire(question(0x1234, NAME, MX.code, wants_dnssec=False))
    other = dns.message.make_query(NAME, "MX", use_edns=False, id=0x1234)
    assert asked.to_wire() == other.to_wire()
    careful = dns.message.from_wire(question(1, NAME, MX.code, wants_dnssec=True))
    assert careful.flags == dns.flags.RD | dns.flags.AD
    assert (careful.ednsflags, careful.payload) == (dns.flags.DO, dns_answers.EDNS_PAYLOAD)


@pytest.mark.parametrize(
    ("name", "is_plain"),
    [
        ("example.com", True),
        ("_25._tcp.mx-1.example.com", True),
        ("localhost", True),
        ("x" * 63 + ".example", True),
        ("x" * 64 + ".example", False),
        (".".join(["x" * 49] * 5) + ".exa", True),
        (".".join(["x" * 49] * 5) + ".exam", False),
        ("example.com.", False),
        ("a..b", False),
        ("", False),
        ("Example.com", False),
        ("bücher.example", False),
        ("a\\.b", False),
        ("example.com\n", False),
    ],
)
def test_plain_names(name: str, is_plain: bool) -> None:
    assert dns_answers.is_plain_name(name) is is_plain
    if is_plain:
        asked = dns.message.from_wire(question(1, name, A.code, wants_dnssec=False))
        assert asked.question[0].name == dns.name.from_text(name)


@st.composite
def packets(draw: st.DrawFn) -> tuple[bytes, dns_answers.RecordType[object]]:
    """Answers of all kinds, likely ones and unlikely ones, some of them damaged."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    query = dns.message.make_query(NAME, kind, use_edns=draw(st.sampled_from([0, -1])))
    made = dns.message.make_response(query)
    owner = NAME
    for number in range(draw(st.sampled_from([0, 0, 0, 1, 2, 15, 16]))):
        alias = f"A{number}.example.net."
        made.answer.append(dns.rrset.from_text(f"{owner}.", 99 - number, "IN", "CNAME", alias))
        owner = alias.lower().rstrip(".")
    kinds = st.sampled_from([kind, kind, *DATA])
    rows = st.tuples(
        st.sampled_from([owner, owner, *ABOVE]),
        st.sampled_from([0, 60, 3600, 2**31 - 1]),
        kinds.flatmap(lambda each: st.sampled_from([(each, data) for data in DATA[each]])),
        st.sampled_from([False, False, False, True]),
    )
    for section, most in ((made.answer, 4), (made.authority, 2), (made.additional, 2)):
        for name, ttl, (each, data), is_chaos in draw(st.lists(rows, max_size=most)):
            class_ = "CH" if is_chaos and each in ("MX", "TXT", "SOA") else "IN"
            section.append(dns.rrset.from_text(f"{name}.".replace("..", "."), ttl, class_, each, data))
    made.set_rcode(dns.rcode.Rcode(draw(st.sampled_from([0, 0, 0, 3, 2, 5, 16]))))
    made.flags |= draw(st.sampled_from([0, dns.flags.AD, dns.flags.TC, dns.flags.RA | dns.flags.AA]))
    return damaged(draw, made.to_wire(max_size=65535)), KINDS[kind]


def damaged(draw: st.DrawFn, packet: bytes) -> bytes:
    wire = bytearray(packet)
    for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
        wire[draw(st.integers(0, len(wire) - 1))] = draw(st.integers(0, 255))
    return bytes(wire[: draw(st.integers(0, len(wire)))] if draw(st.booleans()) else wire)


@given(packets())
def test_we_read_packets_as_dnspython_does(made: tuple[bytes, dns_answers.RecordType[object]]) -> None:
    read_alike(made[0], NAME, made[1])
