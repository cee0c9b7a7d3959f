"""Tables of rules: [[route]], [[destination]], and the index that finds the rule that counts."""

import ipaddress
import random
import time
from dataclasses import replace

import pytest

from zonerelay.config import settings as tables
from zonerelay.config.settings import AccessAction, DestinationSettings, RouteSettings, TlsMode, ZoneSettings
from zonerelay.config.units import parse_rate
from zonerelay.inbound.access.networks import AccessRules
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import Envelope, Mailbox, MessageId, Origin, Priority
from zonerelay.routing.destinations.mx import DestinationTable, on_terms
from zonerelay.routing.destinations.route import DestinationLimits, MxHost, Route, TlsDemand
from zonerelay.routing.zones import zones as zone_choice
from zonerelay.routing.zones.route_rules import FEW, Headers, RoutedMail, RouteRule
from zonerelay.routing.zones.zones import MAX_NOTE, MAX_NOTES, RuleCheck, ZoneChoice, Zones, zone_notes

ZONES = (ZoneSettings(), ZoneSettings(name="bulk"), ZoneSettings(name="vip"))
FINGERPRINT = "ab" * 32
ORIGIN = Origin(
    user="app", listener="127.0.0.1:2525", client_address="192.0.2.7", certificate=FINGERPRINT, tls="TLSv1.3"
)


def envelope(
    sender: str = "bounce-17@news.example", origin: Origin = ORIGIN, priority: Priority = Priority.BULK
) -> Envelope:
    return Envelope(
        id=MessageId("0" * 16),
        sender=Mailbox(sender),
        recipients=(),
        created=0.0,
        origin=origin,
        priority=priority,
    )


def choice(
    *routes: RouteSettings,
    recipient: str = "bob@example.com",
    of: Envelope | None = None,
    headers: Headers = (),
    size: int = 1000,
    named: str = "",
) -> ZoneChoice:
    return Zones(ZONES, routes).choose(of or envelope(), headers=headers, size=size, named=named)(recipient)


def bulk(**conditions: object) -> RouteSettings:
    return RouteSettings(zone="bulk", **conditions)  # type: ignore[arg-type]  # options by name


def networks(*texts: str) -> tuple[object, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


CONDITIONS = [
    (bulk(recipient=("bob@example.com",)), True, "recipient matches bob@example.com"),
    (bulk(recipient=("ann@example.com", "<>")), False, "recipient"),
    (bulk(recipient=("b*@*.example", "b*@example.com")), True, "recipient matches b*@example.com"),
    (bulk(sender=("bounce-*@news.example",)), True, "sender matches bounce-*@news.example"),
    (bulk(sender=("*.example",)), True, "sender matches *.example"),
    (bulk(sender=("<>", "example")), False, "sender"),
    (bulk(user=("app",)), True, "user matches app"),
    (bulk(user=("*",)), True, "user matches app"),
    (bulk(user=("App",)), False, "user"),
    (bulk(listener=("0.0.0.0:25", "127.0.0.1:2525")), True, "listener matches 127.0.0.1:2525"),
    (bulk(listener=("127.0.0.1:25",)), False, "listener"),
    (bulk(client=networks("10.0.0.0/8", "192.0.2.0/24")), True, "client matches 192.0.2.7"),
    (bulk(client=networks("192.0.2.8", "::/0")), False, "client"),
    (bulk(certificate=(FINGERPRINT,)), True, f"certificate matches {FINGERPRINT}"),
    (bulk(certificate=("cd" * 32,)), False, "certificate"),
    (bulk(priority=("normal", "bulk")), True, "priority matches bulk"),
    (bulk(priority=("high", "normal")), False, "priority"),
    (bulk(min_size=1000), True, "min_size matches 1000 bytes"),
    (bulk(min_size=1001), False, "min_size"),
    (bulk(max_size=1000), True, "max_size matches 1000 bytes"),
    (bulk(max_size=999), False, "max_size"),
    (bulk(header=("X-Stream: news",)), True, "header matches X-Stream: news"),
    (bulk(header=("X-Other",)), False, "header"),
    (bulk(sender_domain=("news.example",)), True, "sender_domain matches news.example"),
    (bulk(recipient_domain=("*.com",)), True, "recipient_domain matches *.com"),
]


@pytest.mark.parametrize(("route", "matches", "words"), CONDITIONS)
def test_each_condition_alone(route: RouteSettings, matches: bool, words: str) -> None:
    headers = (("X-Stream", "Newsletter"),)
    expected = ZoneChoice("bulk", f"route=1 {words}") if matches else ZoneChoice("default", "no route")
    assert choice(route, headers=headers) == expected
    assert words.partition(" ")[0] in route.conditions
    mail = RoutedMail("bounce-17@news.example", ORIGIN, priority="bulk", headers=headers, size=1000)
    explained = Zones(ZONES, (route,)).explain("bob@example.com", mail)
    assert explained.zone == expected.zone
    assert explained.checks == (RuleCheck(1, "bulk", () if matches else (words,)),)
    if matches:
        assert explained.reason == words


OPTIONS = RouteSettings.__dataclass_fields__.keys() - {"zone", "set_priority"}


def test_every_option_of_a_route_but_where_mail_goes_is_a_condition() -> None:
    assert {name for route, _, _ in CONDITIONS for name in route.conditions} == OPTIONS


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_report_of_our_own_matches_by_what_it_has(name: str) -> None:
    """From <>, from no client, of normal priority; a recipient, a size and a header it has."""
    route = next(route for route, matches, _ in CONDITIONS if matches and name in route.conditions)
    own = Origin(protocol="internal")
    report = envelope("", own, Priority.NORMAL)
    chosen = choice(route, of=report, headers=(("X-Stream", "news"),))
    has = {"recipient", "recipient_domain", "priority", "min_size", "max_size", "header"}
    assert chosen.zone == ("bulk" if name in has else "default")
    assert choice(bulk(sender=("<>",)), of=report).zone == "bulk"


def test_all_conditions_of_a_route_must_match_and_the_first_route_wins() -> None:
    routes = (
        replace(bulk(sender=("news.example",), user=("other",)), zone="default"),
        replace(bulk(sender=("news.example",), recipient=("example.com",), max_size=2000), zone="vip"),
        bulk(sender=("news.example",)),
    )
    why = "max_size matches 1000 bytes and sender matches news.example and recipient matches example.com"
    assert choice(*routes) == ZoneChoice("vip", f"route=2 {why}")
    assert choice(*routes, recipient="bob@example.net").zone == "bulk"
    assert choice(*routes, size=2001).zone == "bulk"
    assert choice(*routes, of=envelope("a@b.example")) == ZoneChoice("default", "no route")


def test_explaining_says_for_each_route_before_which_conditions_do_not_hold() -> None:
    routes = (
        bulk(recipient_domain=("other.example",), user=("x",), min_size=5),
        bulk(sender=("bounce-*@news.example",)),
        bulk(recipient_domain=("*",)),
    )
    found = Zones(ZONES, routes).explain("bob@example.com", RoutedMail("bounce-1@news.example", Origin()))
    assert found.checks == (
        RuleCheck(1, "bulk", ("user", "min_size", "recipient_domain")),
        RuleCheck(2, "bulk"),
    )
    assert (found.rule, found.reason) == (2, "sender matches bounce-*@news.example")


def test_a_size_that_nobody_knows_matches_no_bound() -> None:
    routes = (bulk(max_size=10), bulk(min_size=1))
    found = Zones(ZONES, routes).explain("bob@example.com", RoutedMail("", Origin()))
    assert [check.unmatched for check in found.checks] == [("max_size",), ("min_size",)]


def test_without_routes_there_is_nothing_to_say() -> None:
    assert choice() == ZoneChoice("default", "")


def test_a_zone_that_the_message_names_goes_before_the_routes_if_there_is_one() -> None:
    route = bulk(recipient_domain=("*",))
    assert choice(route, named="vip") == ZoneChoice("vip", "zone-header")
    assert choice(named="vip") == ZoneChoice("vip", "zone-header")
    unknown = choice(route, named="VIP")
    assert unknown.zone == "bulk"
    assert unknown.why == (
        'the zone header contains an unknown zone: "VIP"; route=1 recipient_domain matches *'
    )
    assert (
        choice(named="x" * 1000).why == f'the zone header contains an unknown zone: "{"x" * 64}…"; no route'
    )


def test_a_route_whose_pattern_is_no_domain_is_refused() -> None:
    with pytest.raises(ValueError, match=r"route\[1\]: .* cannot be matched"):
        Zones((ZoneSettings(),), (bulk(user=("x",)), bulk(sender=("b\u0378.example",))))


def test_holders_of_the_zones_see_those_that_they_have_taken_up() -> None:
    zones = Zones(ZONES, (bulk(recipient_domain=("*",)),))
    zones.take_up(Zones((ZoneSettings(),)))
    assert zones.names == ("default",)
    assert zones.choose(envelope(), headers=(), size=1)("a@example.com").zone == "default"


def test_ten_thousand_patterns_cost_no_more_than_a_few() -> None:
    def seconds(number: int) -> float:
        domains = tuple(f"*.domain{n}.example" for n in range(number))
        people = tuple(f"user{n}@example{n}.org" for n in range(number))
        globs = tuple(f"bounce{n}-*@news.example" for n in range(number))
        routes = (bulk(recipient_domain=domains), bulk(sender=globs), bulk(recipient=people))
        zones, of, best = Zones(ZONES, routes), envelope("bounce17x-1@news.example"), 1.0
        for _ in range(5):
            began = time.thread_time()
            for _ in range(1000):
                zones.choose(of, headers=(), size=1)("someone@mail.example.com")
            best = min(best, time.thread_time() - began)
        return best

    assert seconds(10_000) < 5 * seconds(10)


# ---- notes for the trace --------------------------------------------------------------------------


def test_a_header_is_searched_once_for_all_recipients(monkeypatch: pytest.MonkeyPatch) -> None:
    mail, searches = RoutedMail("", Origin()), list[str]()

    def values(name: str) -> tuple[str, ...]:
        searches.append(name)
        return ("none",)

    monkeypatch.setattr(mail, "values", values)
    rule = RouteRule(RouteSettings(zone="bulk", header=("X-Mailer: lists",)), 1)
    assert not any(rule.matches(mail, f"{number}@example.com") for number in range(3))
    assert searches == ["x-mailer"]


def test_one_reason_for_all_recipients_is_one_short_note() -> None:
    chosen = ZoneChoice("bulk", "route=2 sender matches news.example")
    recipients = [(f"u{n}@example.com", chosen) for n in range(1000)]
    assert zone_notes(recipients) == ("zone=bulk route=2 sender matches news.example",)


def test_several_reasons_name_their_recipients() -> None:
    policy, route = ZoneChoice("vip", "policy"), ZoneChoice("default", "no route")
    notes = zone_notes([("a@x", policy), *((f"u{n}@x", route) for n in range(zone_choice.MAX_NAMED + 2))])
    assert notes == ("zone=default no route: u0@x, u1@x, u2@x, u3@x, u4@x and 2 more", "zone=vip policy: a@x")


def test_nothing_to_choose_is_no_note() -> None:
    assert zone_notes([("a@x", ZoneChoice("default", ""))]) == ()


def test_notes_are_bounded_whatever_the_recipients_are() -> None:
    long = "x" * 250
    chosen = [(f"{long}{n}@example.com", ZoneChoice("bulk", f"route={n} {long}")) for n in range(1000)]
    notes = zone_notes(chosen)
    assert len(notes) == MAX_NOTES + 1
    assert max(map(len, notes)) <= MAX_NOTE
    assert notes[-1] == f"{1000 - MAX_NOTES} more recipients by other routes"


def test_a_route_gives_its_mail_a_priority_and_others_leave_it() -> None:
    urgent = replace(bulk(sender=("news.example",)), set_priority=Priority.BULK)
    assert choice(urgent).priority is Priority.BULK
    assert choice(bulk(sender=("news.example",))).priority is None
    assert choice(replace(urgent, sender=("other.example",))).priority is None


# The index gives, of many rules, the one that asking each in turn gives


RULES = 40
ASKED = 300
DOMAINS = ("one.example", "two.example", "mail.one.example", "[192.0.2.1]", "xn--mnchen-3ya.example")
PATTERNS = (
    *("one.example", "*.one.example", "two.example", "a@one.example", "b*@two.example", "*", "<>"),
    *("*@mail.one.example", "münchen.example"),
)
DOMAIN_PATTERNS = ("one.example", "*.one.example", "two.example", "*", "münchen.example", "[192.0.2.1]")
ADDRESSES = ("", *(f"{local}@{domain}" for local in ("a", "B", "bob") for domain in DOMAINS), "postmaster")
USERS = ("", "app", "shop")
CLIENTS = ("", "192.0.2.1", "192.0.2.9", "2001:db8::1")
NETWORKS = tuple(map(ipaddress.ip_network, ("192.0.2.0/24", "192.0.2.1/32", "2001:db8::/32", "0.0.0.0/0")))


def some(random: random.Random, values: tuple[object, ...]) -> tuple[object, ...]:
    """Mostly none: a rule with all conditions matches nothing."""
    return tuple(random.sample(values, random.choice((0, 0, 1, 2))))


def test_access_rules() -> None:
    for seed in range(8):
        draw = random.Random(seed)
        settings = [
            tables.AccessSettings(
                action=AccessAction.REFUSE,
                client=some(draw, NETWORKS),  # type: ignore[arg-type]
                user=some(draw, ("app", "shop", "*")),  # type: ignore[arg-type]
                sender=some(draw, PATTERNS),  # type: ignore[arg-type]
                recipient=some(draw, PATTERNS),  # type: ignore[arg-type]
                reply=f"550 5.7.1 rule {number}",
            )
            for number in range(RULES)
        ]
        many, each = AccessRules(settings), [AccessRules([one]) for one in settings]
        for _ in range(ASKED):
            origin = Origin(client_address=draw.choice(CLIENTS), user=draw.choice(USERS))
            mail = origin, draw.choice(ADDRESSES), draw.choice(ADDRESSES)
            expected = next((reply for one in each if (reply := one.decide(*mail)) is not None), None)
            assert many.decide(*mail) == expected


def test_routes() -> None:
    for seed in range(8):
        draw = random.Random(seed)
        routes = [
            RouteSettings(
                zone=f"z{number}",
                client=some(draw, NETWORKS),  # type: ignore[arg-type]
                user=some(draw, ("app", "shop", "*")),  # type: ignore[arg-type]
                sender=some(draw, PATTERNS),  # type: ignore[arg-type]
                sender_domain=some(draw, DOMAIN_PATTERNS),  # type: ignore[arg-type]
                recipient=some(draw, PATTERNS),  # type: ignore[arg-type]
                recipient_domain=some(draw, DOMAIN_PATTERNS),  # type: ignore[arg-type]
                header=draw.choice(((), ("X-Bulk",))),
            )
            for number in range(RULES)
        ]
        zones, rules = (
            Zones((), routes),
            [RouteRule(route, number + 1) for number, route in enumerate(routes)],
        )
        for _ in range(ASKED):
            mail = RoutedMail(
                draw.choice(ADDRESSES),
                Origin(user=draw.choice(USERS), client_address=draw.choice(CLIENTS)),
                headers=draw.choice(((), (("X-Bulk", "yes"),))),
            )
            recipient = draw.choice(ADDRESSES[1:])
            expected = next((r.zone for r in rules if r.matches(mail, recipient)), "default")
            assert zones._by_routes(mail)(recipient).zone == expected
            assert zones.explain(recipient, mail).zone == expected


def test_destinations() -> None:
    hosts = [
        MxHost("mx.one.example", 25),
        MxHost("mx.two.example", 25),
        MxHost("192.0.2.1", 25, literal=True),
    ]
    for seed in range(8):
        draw = random.Random(seed)
        settings = [
            DestinationSettings(
                zone=some(draw, ("default", "bulk")),  # type: ignore[arg-type]
                domain=some(draw, DOMAIN_PATTERNS[:-1]),  # type: ignore[arg-type]
                mx=some(draw, ("mx.one.example", "*.two.example", "*", "[192.0.2.1]")),  # type: ignore[arg-type]
            )
            for _ in range(RULES)
        ]
        table, each = DestinationTable(settings), [DestinationTable([one]) for one in settings]
        for _ in range(ASKED):
            domain, some_hosts = draw.choice(("", *DOMAINS)), draw.sample(hosts, draw.randint(0, 2))
            zone = draw.choice(("default", "bulk", "other"))
            found = table.find(zone, domain, some_hosts)
            numbers = (at for at, one in enumerate(each) if one.find(zone, domain, some_hosts))
            assert (None if found is None else found.number) == next(numbers, None)


def test_a_look_up_asks_few_of_many_rules() -> None:
    many = 1000
    recipients = [f"r@customer{number}.example" for number in range(many)]
    zones = Zones((), [RouteSettings(zone="bulk", recipient_domain=(each[2:],)) for each in recipients])
    index = zones._index
    asked = dict.fromkeys(("listener", "user", "certificate", "client", "sender", "sender_domain"), "")
    for number, each in enumerate(recipients):
        found = index.find({**asked, "recipient": each, "recipient_domain": each})
        assert list(found) == [number]
    assert many > FEW


# [[destination]]: which entry a route meets, and what comes of it


NOW = ManualClock().now()
OUTLOOK = ("a.mail.protection.outlook.com", "b.mail.protection.outlook.com")


def route(*hosts: str, zone: str = "default", secure: bool = False, literal: bool = False) -> Route:
    found = tuple(MxHost(host, 25, literal=literal) for host in hosts or ("mx.example.com",))
    return Route(zone, "example.com", found, NOW + 300, secure=secure)


def entry(**options: object) -> DestinationSettings:
    return DestinationSettings(**options)  # type: ignore[arg-type]  # options by name


def number(table: tuple[DestinationSettings, ...], domain: str, found: Route) -> int | None:
    met = DestinationTable(table).find(found.zone, domain, found.hosts)
    return None if met is None else met.number


@pytest.mark.parametrize(
    ("conditions", "holds"),
    [
        ({}, True),
        ({"domain": ("example.com",)}, True),
        ({"domain": ("EXAMPLE.com", "example.net")}, True),
        ({"domain": ("*.example.com",)}, False),
        ({"domain": ("*.com",)}, True),
        ({"domain": ("*",)}, True),
        ({"mx": ("*.mail.protection.outlook.com",)}, True),
        ({"mx": ("a.mail.protection.outlook.com",)}, False),  # all hosts, not one of them
        ({"mx": OUTLOOK}, True),
        ({"mx": ("mail.protection.outlook.com",)}, False),
        ({"zone": ("default", "bulk")}, True),
        ({"zone": ("bulk",)}, False),
        ({"domain": ("example.com",), "mx": ("*.example.com",)}, False),
        ({"domain": ("example.com",), "mx": ("*.outlook.com",), "zone": ("default",)}, True),
    ],
)
def test_an_entry_holds_when_all_its_conditions_do(conditions: dict[str, object], *, holds: bool) -> None:
    assert (number((entry(**conditions),), "example.com", route(*OUTLOOK)) == 0) is holds


def test_the_first_entry_that_holds_counts() -> None:
    table = (entry(domain=("other.example",)), entry(mx=("*.example.com",)), entry())
    assert number(table, "example.com", route()) == 1
    assert number(table, "example.net", route("mx.example.net")) == 2
    assert number((), "example.com", route()) is None


def test_a_next_hop_has_hosts_and_no_domain() -> None:
    assert number((entry(domain=("*",)), entry(mx=("smtp.example.net",))), "", route("smtp.example.net")) == 1
    assert number((entry(mx=("[192.0.2.1]",)),), "", route("192.0.2.1", literal=True)) == 0
    assert number((entry(mx=("[ipv6:2001:db8::1]",)),), "", route("2001:db8::1", literal=True)) == 0
    assert number((entry(mx=("*.0.2.1",)),), "", route("192.0.2.1", literal=True)) is None


def test_an_international_domain_is_compared_as_dns_has_it() -> None:
    table = (entry(domain=("bücher.example",)),)
    assert number(table, "xn--bcher-kva.example", route()) == 0
    assert number(table, "BÜCHER.example", route()) == 0


def test_limits_that_are_not_given_are_the_zones() -> None:
    zone = ZoneSettings(max_connections_per_destination=7, max_rate_per_destination=parse_rate("5/1s"))
    met = DestinationTable((entry(max_connections=2),)).find("default", "", route().hosts)
    assert met is not None
    found = on_terms(zone, route(), met)
    assert found.limits == DestinationLimits(2, 50, 1000, parse_rate("5/1s"))
    assert (found.tls, found.terms) == (None, "destination[0]")
    assert found.limits_in(zone) == found.limits


def test_an_entry_that_says_nothing_keeps_later_ones_away() -> None:
    table = DestinationTable((entry(domain=("example.com",)), entry(tls=TlsMode.NONE)))
    met = table.find("default", "example.com", route().hosts)
    assert met is not None
    assert on_terms(ZoneSettings(), route(), met) == route()


@pytest.mark.parametrize(
    ("options", "demand"),
    [
        ({"tls": TlsMode.NONE}, TlsDemand(TlsMode.NONE, because="destination")),
        ({"tls": TlsMode.REQUIRED}, TlsDemand(TlsMode.REQUIRED, because="destination")),
        ({"tls": TlsMode.DANE}, TlsDemand(TlsMode.DANE, dane=True, because="destination")),
        (
            {"tls": TlsMode.VERIFY, "tls_names": ("*.example.com",)},
            TlsDemand(TlsMode.VERIFY, names=("*.example.com",), because="destination"),
        ),
        (
            {"tls": TlsMode.VERIFY, "tls_certificates": ("ab" * 32,)},
            TlsDemand(TlsMode.VERIFY, certificates=("ab" * 32,), because="destination"),
        ),
    ],
)
def test_an_entry_with_tls_of_its_own_stands_alone(options: dict[str, object], demand: TlsDemand) -> None:
    met = DestinationTable((entry(**options),)).find("default", "", route().hosts)
    found = on_terms(ZoneSettings(tls=TlsMode.VERIFY), route(secure=True), met)
    terms = "destination[0] dane" if demand.dane else "destination[0]"
    assert (found.tls, found.limits, found.terms) == (demand, None, terms)


def test_lines_for_the_same_hosts_differ_in_their_terms_and_share_the_site() -> None:
    table = DestinationTable((entry(domain=("strict.example",), tls=TlsMode.VERIFY),))
    zone = ZoneSettings()
    strict = on_terms(zone, route(), table.find("default", "strict.example", route().hosts))
    other = on_terms(zone, route(), table.find("default", "other.example", route().hosts))
    assert strict.site == other.site
    assert strict.destination != other.destination


@pytest.mark.parametrize(
    ("zone", "secure", "demand", "terms"),
    [
        (ZoneSettings(), False, None, ""),
        (ZoneSettings(), True, TlsDemand(dane=True), "dane"),
        (ZoneSettings(dane=False), True, None, ""),
        (ZoneSettings(tls=TlsMode.NONE), True, None, ""),
        (ZoneSettings(tls=TlsMode.VERIFY), True, TlsDemand(TlsMode.VERIFY, dane=True), "dane"),
        (ZoneSettings(tls=TlsMode.DANE, dane=False), True, TlsDemand(TlsMode.DANE, dane=True), "dane"),
        (ZoneSettings(tls=TlsMode.DANE), False, None, ""),
    ],
)
def test_dane_is_demanded_where_dnssec_vouches_for_the_hosts(
    zone: ZoneSettings, *, secure: bool, demand: TlsDemand | None, terms: str
) -> None:
    found = on_terms(zone, route(secure=secure), None)
    assert (found.tls, found.terms) == (demand, terms)


def test_the_cost_of_an_entry_does_not_grow_with_its_patterns() -> None:
    def seconds(count: int) -> float:
        patterns = tuple(f"d{at}.example.net" for at in range(count))
        table = DestinationTable((entry(domain=patterns, mx=("*.example.net", *patterns)),))
        hosts = route("mx.example.com").hosts

        def once() -> float:
            before = time.perf_counter()
            for _ in range(200):
                table.find("default", "example.com", hosts)
            return time.perf_counter() - before

        return min(once() for _ in range(5))

    assert seconds(20_000) < 5 * seconds(10)


def test_a_pattern_that_is_no_domain_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r'"ü\.\.example" cannot be matched'):
        DestinationTable((entry(domain=("ü..example",)),))
