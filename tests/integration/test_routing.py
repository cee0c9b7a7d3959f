"""The resolver, the MX router and check_sender_domain against a scripted name server, over UDP and TCP."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import uvloop

from tests.support import dns as fake_dns
from tests.support.dns import GARBAGE, NXDOMAIN, REFUSED, SERVFAIL, SILENCE, TRUNCATED, FakeDns, OnError
from tests.support.inbound import talking
from zonerelay.config.endpoints import parse_listen
from zonerelay.config.settings import DnsSettings, ZoneSettings
from zonerelay.inbound.access.networks import NO_DOMAIN, NO_HOST, NULL_MX, UNKNOWN, SenderDomains
from zonerelay.inbound.state.context import SharedContext
from zonerelay.model.clock import ManualClock
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.routing.addresses import OwnAddresses
from zonerelay.routing.destinations.mx import MxRouter
from zonerelay.routing.destinations.route import Route, Unroutable
from zonerelay.routing.dns.answers import CNAME, TLSA, TXT, DnsStatus, TlsaRecord
from zonerelay.routing.dns.resolver import FAILURE_TTL, MAX_RECORDS, Hosts, Resolver

ZONES: fake_dns.Zones = {
    "example.com": {"MX": ["20 Backup.Example.com", "10 mx.example.com"], "TTL": 300},
    "mx.example.com": {"A": ["192.0.2.1", "192.0.2.2"], "AAAA": ["2001:db8::1"], "TTL": 300},
    "backup.example.com": {"A": ["192.0.2.9"]},
    "only-a.example": {"A": ["192.0.2.3"]},
    "only-aaaa.example": {"AAAA": ["2001:db8::3"]},
    "empty.example": {},
    "null.example": {"MX": ["0 ."]},
    "null-and-more.example": {"MX": ["0 .", "10 mx.example.com"]},
    "alias.example": {"CNAME": ["example.com."]},
    "dangling.example": {"CNAME": ["gone.example."]},
    "circle.example": {"CNAME": ["circle.example."]},
    "literal.example": {"MX": ["10 192.0.2.1"]},
    "half-literal.example": {"MX": ["10 192.0.2.1", "20 mx.example.com"]},
    "dead-mx.example": {"MX": ["10 absent.example"]},
    "equal.example": {"MX": [f"10 mx{n}.equal.example" for n in range(4)]},
    "ours.example": {"MX": ["10 first.example", "20 relay.example.org", "30 last.example"]},
    "first.example": {"A": ["192.0.2.4"]},
    "last.example": {"A": ["192.0.2.5"]},
    "ours-first.example": {"MX": ["10 RELAY.example.org", "20 last.example"]},
    "by-address.example": {"MX": ["10 first.example", "20 disguised.example"]},
    "disguised.example": {"A": ["127.0.0.1"]},
    "implicit-ours.example": {"A": ["127.0.0.1"]},
    "denied-ours.example": {"A": ["127.0.0.1"]},
    "many.example": {"MX": [f"{n} mx{n}.many.example" for n in range(MAX_RECORDS + 50)]},
    "xn--bcher-kva.example": {"MX": ["10 mx.example.com"]},
    "mailhog": {"A": ["192.0.2.7"]},
    "_25._tcp.mx.example.com": {"TLSA": ["3 1 1 " + "ab" * 32, "2 0 0 3000", "3 1 1 ab"], "TTL": 300},
    "policy.example": {"TXT": ['"v=STSv1; " "id=1;"', '"second"', " ".join(['"' + "x" * 255 + '"'] * 17)]},
    "cdn.example": {"CNAME": ["mx.example.com."]},
}


@dataclass
class Bed:
    dns: FakeDns
    clock: ManualClock
    resolver: Resolver
    router: MxRouter
    senders: SenderDomains

    async def route(self, domain: str, zone: ZoneSettings | None = None) -> Route:
        found = await self.router.route(zone or ZoneSettings(), domain)
        assert isinstance(found, Route), found
        return found

    async def hosts(self, domain: str, zone: ZoneSettings | None = None) -> list[str]:
        return [host.name for host in (await self.route(domain, zone)).hosts]

    async def no(self, domain: str, zone: ZoneSettings | None = None) -> Outcome:
        found = await self.router.route(zone or ZoneSettings(), domain)
        assert isinstance(found, Unroutable), found
        assert found.outcome.local
        return found.outcome


@asynccontextmanager
async def bed(
    faults: fake_dns.InjectedFaults | None = None,
    *,
    listeners: Sequence[str] = ("127.0.0.1:25",),
    timeout: float = 0.3,
    trust_ad: bool = False,
    secure: Sequence[str] = (),
    tcp: bool = True,
) -> AsyncIterator[Bed]:
    async with FakeDns(ZONES, faults, tcp=tcp) as dns:
        dns.secure.update(secure)
        clock = ManualClock()
        settings = DnsSettings(servers=(dns.address,), timeout=timeout, trust_ad=trust_ad)
        resolver = Resolver(
            settings, clock, hosts=Hosts(dict.fromkeys(("known", "known.example"), ("192.0.2.8",)))
        )
        router = MxRouter(
            resolver,
            hostname="relay.example.org",
            clock=clock,
            random=random.Random(7),
            own_addresses=OwnAddresses(parse_listen(listener) for listener in listeners),
        )
        try:
            yield Bed(dns, clock, resolver, router, SenderDomains(resolver))
        finally:
            await resolver.close()


# ---- what DNS says ------------------------------------------------------------------------------


async def test_hosts_come_by_preference_in_lower_case_with_the_zones_port() -> None:
    async with bed() as it:
        route = await it.route("Example.COM", ZoneSettings(name="bulk", port=2525))
        assert [(h.name, h.port, h.preference) for h in route.hosts] == [
            ("mx.example.com", 2525, 10),
            ("backup.example.com", 2525, 20),
        ]
        assert (route.zone, route.name) == ("bulk", "example.com")
        assert route.expires == pytest.approx(it.clock.now() + 300)


async def test_equal_preferences_come_in_another_order_each_time() -> None:
    async with bed() as it:
        orders = {tuple(await it.hosts("equal.example")) for _ in range(20)}
        assert len(orders) > 5
        routes = [await it.route("equal.example") for _ in range(5)]
        assert len({route.destination for route in routes}) == 1


@pytest.mark.parametrize(
    ("domain", "hosts"),
    [
        ("only-a.example", ["only-a.example"]),  # without MX the address is the MX
        ("only-aaaa.example", ["only-aaaa.example"]),
        ("alias.example", ["mx.example.com", "backup.example.com"]),
        ("bücher.example", ["mx.example.com"]),
        ("half-literal.example", ["mx.example.com"]),  # beside a host that cannot be used
        ("null-and-more.example", ["mx.example.com"]),
        ("ours.example", ["first.example"]),  # hosts not better than ourselves are cut
    ],
)
async def test_a_domain_leads_to_its_hosts(domain: str, hosts: list[str]) -> None:
    async with bed() as it:
        assert await it.hosts(domain) == hosts


@pytest.mark.parametrize(
    ("domain", "reply"),
    [
        ("absent.example", "550 5.1.2"),
        ("empty.example", "550 5.1.2"),
        ("null.example", "556 5.1.10"),
        ("ours-first.example", "554 5.4.6"),
        ("implicit-ours.example", "554 5.4.6"),
        ("denied-ours.example", "554 5.4.6"),
        ("[127.0.0.1]", "554 5.4.6"),
        ("a..b", "550 5.1.2"),
        ("[192.0.2.256]", "550 5.1.3"),
    ],
)
async def test_what_the_domain_itself_settles_bounces(domain: str, reply: str) -> None:
    async with bed({("denied-ours.example", "MX"): NXDOMAIN}) as it:
        outcome = await it.no(domain)
        assert outcome.verdict is Verdict.BOUNCED
        assert str(outcome.reply).startswith(reply)
        assert outcome.scope is Scope.DOMAIN


NEVER: list[tuple[str, str, OnError | None]] = [
    *(("example.com", "MX", each) for each in (SERVFAIL, REFUSED, SILENCE, GARBAGE, fake_dns.WRONG_ID)),
    ("empty.example", "A", SERVFAIL),
    ("literal.example", "MX", None),  # records without sense
    ("circle.example", "MX", None),
]


@pytest.mark.parametrize(("domain", "kind", "trouble"), NEVER, ids=str)
async def test_trouble_with_a_name_server_or_with_records_never_bounces_mail(
    domain: str, kind: str, trouble: OnError | None
) -> None:
    async with bed({} if trouble is None else {(domain, kind): trouble}, timeout=0.2) as it:
        outcome = await it.no(domain)
        assert (outcome.verdict, outcome.reply.code) == (Verdict.DEFERRED, 451)
        assert trouble is None or outcome.reply.detail == "4.3"


@pytest.mark.parametrize("domain", ["only-a.example", "only-aaaa.example", "cdn.example"])
async def test_a_denied_mx_of_a_name_with_an_address_is_no_mx(domain: str) -> None:
    """A broken server says NXDOMAIN of every type that it does not know (haraka/Haraka#2310)."""
    async with bed({(domain, "MX"): NXDOMAIN}) as it:
        assert await it.hosts(domain) == [domain]
        (host,) = (await it.route("", ZoneSettings(next_hop=f"{domain}:587"))).hosts
        assert (host.name, host.port, host.literal) == (domain, 587, False)


async def test_the_hosts_file_counts_for_a_next_hop_that_dns_denies_but_not_for_a_recipient() -> None:
    async with bed() as it:
        assert await it.hosts("", ZoneSettings(next_hop="known:587")) == ["known"]
        assert (await it.no("known")).verdict is Verdict.BOUNCED


@pytest.mark.parametrize("trouble", [None, SERVFAIL, REFUSED, SILENCE, GARBAGE], ids=str)
@pytest.mark.parametrize("kind", ["A", "AAAA"])
async def test_a_domain_that_one_type_alone_denies_never_bounces(trouble: OnError | None, kind: str) -> None:
    """`None`: the address look-up says that the name exists, without data of its type."""
    denied: fake_dns.InjectedFaults = {
        ("empty.example", each): NXDOMAIN for each in {"MX", "A", "AAAA"} - {kind}
    }
    if trouble is not None:
        denied = {**denied, ("empty.example", kind): trouble}
    async with bed(denied, timeout=0.2) as it:
        outcome = await it.no("empty.example")
        assert (outcome.verdict, outcome.reply.detail) == (Verdict.DEFERRED, "4.3")


async def test_a_domain_that_every_type_denies_bounces() -> None:
    async with bed() as it:
        outcome = await it.no("absent.example")
        assert (outcome.verdict, str(outcome.reply)) == (
            Verdict.BOUNCED,
            "550 5.1.2 domain absent.example does not exist",
        )
        assert [it.dns.count("absent.example", kind) for kind in ("MX", "A", "AAAA")] == [1, 1, 1]


async def test_no_name_server_at_all_never_bounces_mail() -> None:
    async with bed(timeout=0.2) as it:
        settings = DnsSettings(servers=("127.0.0.1:1",), timeout=0.2)
        resolver = Resolver(settings, it.clock, hosts=Hosts({}))
        assert (await resolver.mx("example.com")).status is DnsStatus.TIMEOUT
        await resolver.close()


async def test_a_truncated_answer_is_asked_for_again_over_tcp() -> None:
    async with bed({"example.com": TRUNCATED}) as it:
        assert await it.hosts("example.com") == ["mx.example.com", "backup.example.com"]
        assert it.dns.queries[:2] == [("example.com", "MX", "udp"), ("example.com", "MX", "tcp")]


async def test_a_truncated_answer_without_tcp_never_bounces_mail() -> None:
    async with bed({"example.com": TRUNCATED}, tcp=False) as it:
        outcome = await it.no("example.com")
        assert outcome.verdict is Verdict.DEFERRED
        assert "too long for UDP" in outcome.reply.text
        assert it.resolver.watch.problem() is None


async def test_the_number_of_records_is_bounded_and_the_best_are_kept() -> None:
    async with bed({"many.example": TRUNCATED}, listeners=()) as it:
        hosts = await it.hosts("many.example")
        assert hosts == [f"mx{n}.many.example" for n in range(MAX_RECORDS)]


# ---- ourselves ----------------------------------------------------------------------------------


async def test_we_are_recognised_by_address_where_we_listen_on_the_port() -> None:
    async with bed() as it:
        assert await it.hosts("by-address.example") == ["first.example"]
    async with bed(listeners=("127.0.0.1:2525",)) as it:
        assert await it.hosts("by-address.example") == ["first.example", "disguised.example"]


# ---- next hops and literals ---------------------------------------------------------------------


async def test_a_next_hop_in_brackets_or_an_address_needs_no_mx() -> None:
    async with bed() as it:
        for next_hop, host, port, literal in (
            ("[smtp.example.net]:587", "smtp.example.net", 587, False),
            ("[smtp.example.net]", "smtp.example.net", 25, False),
            ("192.0.2.1:2626", "192.0.2.1", 2626, True),
            ("[2001:db8::1]:2626", "2001:db8::1", 2626, True),
        ):
            (found,) = (await it.route("", ZoneSettings(next_hop=next_hop))).hosts
            assert (found.name, found.port, found.literal) == (host, port, literal)
        assert it.dns.queries == []


async def test_a_next_hop_that_is_a_name_goes_to_its_mx() -> None:
    async with bed() as it:
        route = await it.route("", ZoneSettings(next_hop="example.com:587"))
        assert [(host.name, host.port) for host in route.hosts] == [
            ("mx.example.com", 587),
            ("backup.example.com", 587),
        ]


@pytest.mark.parametrize(
    "next_hop", ["absent.example", "null.example", "ours-first.example", "empty.example"]
)
async def test_a_wrong_next_hop_never_bounces_mail(next_hop: str) -> None:
    async with bed() as it:
        outcome = await it.no("", ZoneSettings(next_hop=next_hop))
        assert (outcome.verdict, outcome.reply.code, outcome.scope) == (Verdict.DEFERRED, 451, Scope.LOCAL)


async def test_a_next_hop_that_cannot_be_parsed_never_bounces_mail() -> None:
    async with bed() as it:
        assert (await it.no("", ZoneSettings(next_hop="two words"))).verdict is Verdict.DEFERRED


async def test_a_domain_that_is_an_address_is_that_address() -> None:
    async with bed() as it:
        (host,) = (await it.route("[IPv6:2001:DB8::1]")).hosts
        assert (host.name, host.literal) == ("2001:db8::1", True)


# ---- addresses ----------------------------------------------------------------------------------


async def test_addresses_alternate_between_the_families() -> None:
    async with bed() as it:
        both = await it.resolver.addresses("mx.example.com", ipv6=True)
        assert both.failure is None
        assert both.ips[0] == "2001:db8::1"
        assert sorted(both.ips[1:]) == ["192.0.2.1", "192.0.2.2"]
        four = await it.resolver.addresses("MX.example.com.", ipv6=False)
        assert "2001:db8::1" not in four.ips


async def test_one_family_in_trouble_does_not_hide_the_other() -> None:
    async with bed({("mx.example.com", "AAAA"): SERVFAIL}) as it:
        assert (await it.resolver.addresses("mx.example.com", ipv6=True)).failure is None


@pytest.mark.parametrize(
    ("name", "detail"), [("absent.example", "4.4"), ("empty.example", "4.4"), ("circle.example", "4.3")]
)
async def test_a_host_without_addresses_is_a_deferral(name: str, detail: str) -> None:
    async with bed() as it:
        found = await it.resolver.addresses(name, ipv6=True)
        assert found.ips == ()
        assert found.failure is not None
        assert (found.failure.code, found.failure.detail) == (451, detail)


async def test_some_names_need_no_dns() -> None:
    async with bed() as it:
        assert (await it.resolver.addresses("192.0.2.1", ipv6=False)).ips == ("192.0.2.1",)
        assert (await it.resolver.addresses("::1", ipv6=True)).ips == ("::1",)
        assert (await it.resolver.addresses("localhost", ipv6=False)).ips == ("127.0.0.1",)
        assert (await it.resolver.addresses("Known", ipv6=True)).ips == ("192.0.2.8",)
        assert it.dns.queries == []
        assert (await it.resolver.addresses("mailhog", ipv6=False)).ips == ("192.0.2.7",)


async def test_a_name_that_is_none_is_a_deferral() -> None:
    async with bed() as it:
        for name in ("", "a..b", "x" * 300):
            assert (await it.resolver.addresses(name, ipv6=True)).failure is not None


# ---- records for the security of connections ------------------------------------------------------


async def test_tlsa_records_come_as_they_are_and_once() -> None:
    async with bed() as it:
        for _ in range(2):
            answer = await it.resolver.lookup("_25._tcp.mx.example.com", TLSA)
        assert set(answer.records) == {
            TlsaRecord(3, 1, 1, b"\xab" * 32),
            TlsaRecord(2, 0, 0, b"0\0"),
            TlsaRecord(3, 1, 1, b"\xab"),  # malformed, which is not for the resolver to judge
        }
        assert it.dns.count("_25._tcp.mx.example.com", "TLSA") == 1


async def test_the_strings_of_a_text_record_are_joined_and_huge_ones_left_out() -> None:
    async with bed() as it:
        answer = await it.resolver.lookup("policy.example", TXT)
        assert set(answer.records) == {"v=STSv1; id=1;", "second"}
        assert (await it.resolver.lookup("absent.example", TXT)).status is DnsStatus.NXDOMAIN


async def test_an_answer_is_secure_where_the_trusted_resolver_says_so() -> None:
    async with bed(trust_ad=True, secure=["example.com", "empty.example", "absent.example"]) as it:
        assert (await it.resolver.mx("example.com")).secure
        assert (await it.resolver.addresses("mx.example.com", ipv6=True)).secure
        assert (await it.resolver.lookup("_25._tcp.mx.example.com", TLSA)).secure
        for name in ("empty.example", "absent.example"):  # a denial is an answer, too
            answer = await it.resolver.lookup(name, TLSA)
            assert (answer.records, answer.secure) == ((), True)
        assert not (await it.resolver.mx("null.example")).secure
        assert not (await it.resolver.lookup("elsewhere.example", TLSA)).secure


async def test_nothing_is_secure_without_trust() -> None:
    async with bed(secure=["example.com", "absent.example"]) as it:
        it.dns.pushy = True  # as anybody on the way could be
        assert not (await it.resolver.mx("example.com")).secure
        assert not (await it.resolver.addresses("mx.example.com", ipv6=True)).secure
        assert not (await it.resolver.lookup("absent.example", TLSA)).secure
        assert (await it.resolver.addresses("192.0.2.1", ipv6=True)).secure is False


async def test_an_alias_is_secure_when_all_of_it_is_and_says_where_it_ends() -> None:
    for secure in (["cdn.example", "example.com"], ["cdn.example"], ["example.com"]):
        async with bed(trust_ad=True, secure=secure) as it:
            found = await it.resolver.addresses("cdn.example", ipv6=True)
            assert (found.secure, found.canonical) == (len(secure) == 2, "mx.example.com")
            alias = await it.resolver.lookup("cdn.example", CNAME)
            assert (alias.records, alias.secure) == (("mx.example.com",), "cdn.example" in secure)


async def test_addresses_are_secure_when_all_of_them_are() -> None:
    async with bed(trust_ad=True, secure=["example.com"]) as it:
        it.dns.insecure.add(("mx.example.com", "AAAA"))
        assert not (await it.resolver.addresses("mx.example.com", ipv6=True)).secure
        assert (await it.resolver.addresses("mx.example.com", ipv6=False)).secure


async def test_breaking_one_family_does_not_take_the_security_of_the_other_away() -> None:
    async with bed({("mx.example.com", "AAAA"): SERVFAIL}, trust_ad=True, secure=["example.com"]) as it:
        found = await it.resolver.addresses("mx.example.com", ipv6=True)
        assert (sorted(found.ips), found.secure) == (["192.0.2.1", "192.0.2.2"], True)


# ---- cache --------------------------------------------------------------------------------------


async def test_answers_live_by_their_ttl_and_failures_shortly() -> None:
    async with bed({"broken.example": SERVFAIL}) as it:
        for _ in range(2):
            await it.router.route(ZoneSettings(), "example.com")
            await it.router.route(ZoneSettings(), "broken.example")
            await it.router.route(ZoneSettings(), "absent.example")
        names = ("example.com", "broken.example", "absent.example")
        assert [it.dns.count(name, "MX") for name in names] == [1, 1, 1]
        for passed, counts in ((16, [1, 2, 1]), (50, [1, 3, 2]), (240, [2, 4, 3])):
            it.clock.advance(passed)
            for name in names:
                await it.router.route(ZoneSettings(), name)
            assert [it.dns.count(name, "MX") for name in names] == counts


async def test_a_thousand_messages_at_once_ask_one_question() -> None:
    async with bed() as it:
        await asyncio.gather(*(it.route("example.com") for _ in range(1000)))
        assert it.dns.count("example.com", "MX") == 1


# ---- the other event loop -----------------------------------------------------------------------


def test_the_same_answers_come_under_uvloop() -> None:
    async def ask() -> None:
        async with bed({"example.com": TRUNCATED, "broken.example": SERVFAIL, "mute.example": SILENCE}) as it:
            assert await it.hosts("example.com") == ["mx.example.com", "backup.example.com"]
            assert ("example.com", "MX", "tcp") in it.dns.queries
            assert (await it.resolver.mx("absent.example")).status is DnsStatus.NXDOMAIN
            assert (await it.resolver.mx("broken.example")).status is DnsStatus.SERVFAIL
            assert (await it.resolver.mx("mute.example")).status is DnsStatus.TIMEOUT

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())


async def test_several_next_hops_are_one_route_in_the_order_in_which_they_are_written() -> None:
    async with bed() as it:
        zone = ZoneSettings(next_hop="[smart.example]:587, example.com:588, 192.0.2.50, [2001:db8::50]:2525")
        route = await it.route("", zone)
        assert [(host.name, host.port, host.literal) for host in route.hosts] == [
            ("smart.example", 587, False),
            ("mx.example.com", 588, False),
            ("backup.example.com", 588, False),
            ("192.0.2.50", 25, True),
            ("2001:db8::50", 2525, True),
        ]
        assert sorted({host.preference for host in route.hosts}) == [host.preference for host in route.hosts]
        assert route.name == zone.next_hop
        assert route.destination == (await it.route("", zone)).destination


async def test_next_hops_that_share_are_equal_and_their_backups_come_after_all_of_them() -> None:
    async with bed() as it:
        zone = ZoneSettings(next_hop="192.0.2.50, example.com, [smart.example]", next_hop_share=True)
        hosts = (await it.route("", zone)).hosts
        assert {host.name for host in hosts if host.preference == 0} == {
            "192.0.2.50",
            "mx.example.com",
            "smart.example",
        }
        assert [host.name for host in hosts if host.preference] == ["backup.example.com"]


async def test_a_next_hop_that_cannot_be_found_does_not_stop_the_others_and_is_sought_again_soon() -> None:
    async with bed() as it:
        zone = ZoneSettings(next_hop="absent.example, [smart.example]:587")
        route = await it.route("", zone)
        assert [host.name for host in route.hosts] == ["smart.example"]
        assert route.expires - it.clock.now() <= FAILURE_TTL


async def test_next_hops_of_which_none_can_be_found_bounce_nothing() -> None:
    async with bed() as it:
        outcome = await it.no("", ZoneSettings(next_hop="absent.example, null.example"))
        assert (outcome.verdict, outcome.scope) == (Verdict.DEFERRED, Scope.LOCAL)
        assert "absent.example" in outcome.reply.text
        assert "null.example" in outcome.reply.text


async def test_a_host_of_two_next_hops_is_tried_once() -> None:
    async with bed() as it:
        zone = ZoneSettings(next_hop="[backup.example.com], example.com")
        assert await it.hosts("", zone) == ["backup.example.com", "mx.example.com"]


# ---- check_sender_domain --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("domain", "expected", "reason"),
    [
        ("", None, "the null sender"),
        ("[192.0.2.1]", None, "an address literal"),
        ("[IPv6:2001:db8::1]", None, "an IPv6 literal"),
        ("example.com", None, "has an MX"),
        ("EXAMPLE.com", None, "in any case"),
        ("bücher.example", None, "a U-label"),
        ("null.example", NULL_MX, "null MX"),
        ("null-and-more.example", None, "a null MX beside another is a mistake (RFC 7505 3)"),
        ("only-a.example", None, "an implicit MX"),
        ("only-aaaa.example", None, "an implicit MX with IPv6"),
        ("known.example", NO_DOMAIN, "a name of the hosts file that DNS denies"),
        ("empty.example", NO_HOST, "has neither an MX nor an address"),
        ("missing.example", NO_DOMAIN, "no such domain"),
        ("alias.example", None, "an alias of a good one"),
        ("dangling.example", NO_DOMAIN, "an alias of nothing"),
        ("b\u0378.example", NO_DOMAIN, "not a domain"),
    ],
)
async def test_what_dns_says_of_a_domain(domain: str, expected: Reply | None, reason: str) -> None:
    async with bed() as it:
        assert await it.senders.check(domain) == expected, reason


def test_replies_are_the_registered_ones() -> None:
    assert [(r.code, r.status) for r in (NULL_MX, NO_DOMAIN, NO_HOST, UNKNOWN)] == [
        (550, "5.7.27"),
        (550, "5.1.8"),
        (550, "5.1.8"),
        (451, "4.4.3"),
    ]


@pytest.mark.parametrize("trouble", [SERVFAIL, REFUSED, SILENCE, GARBAGE])
@pytest.mark.parametrize("kind", ["MX", "A", "AAAA"])
async def test_dns_trouble_is_temporary(trouble: OnError, kind: str) -> None:
    async with bed({("empty.example", kind): trouble}) as it:
        assert await it.senders.check("empty.example") == UNKNOWN


async def test_the_unexpected_is_temporary() -> None:
    class Broken(Resolver):
        async def mx(self, domain: str) -> None:  # type: ignore[override]  # a resolver with a bug
            raise RuntimeError("a bug")

    broken = SenderDomains(Broken(DnsSettings(), ManualClock(), hosts=Hosts({})))
    async with talking(check_sender_domain=True, shared=SharedContext(sender_domains=broken)) as (
        house,
        talk,
    ):
        await talk.ask(b"EHLO client")
        assert (await talk.ask(b"MAIL FROM:<a@example.com>")).startswith(b"451 4.3.0")
        assert "a bug" in house.log.named("trouble")[0]["error"]
