"""The index gives, of many rules, the one that asking each in turn gives."""

from __future__ import annotations

import ipaddress
import random

from zonerelay.config.settings import AccessAction, AccessSettings, DestinationSettings, RouteSettings
from zonerelay.inbound.access.networks import AccessRules
from zonerelay.model.envelope import Origin
from zonerelay.routing.destinations.destination_table import DestinationTable
from zonerelay.routing.destinations.route import MxHost
from zonerelay.routing.zones.route_rules import RoutedMail, RouteRule
from zonerelay.routing.zones.rule_index import FEW
from zonerelay.routing.zones.zones import Zones

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
            AccessSettings(
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
