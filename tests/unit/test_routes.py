"""[[route]]: each condition, the order of routes, what they say, and the notes for the trace."""

from __future__ import annotations

import ipaddress
import time
from dataclasses import replace

import pytest

from zonerelay.config.settings import RouteSettings, ZoneSettings
from zonerelay.model.address import Mailbox
from zonerelay.model.envelope import Envelope, Origin
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import Priority
from zonerelay.routing.zones.route_rules import Headers, RoutedMail
from zonerelay.routing.zones.zones import (
    MAX_NAMED,
    MAX_NOTE,
    MAX_NOTES,
    RuleCheck,
    ZoneChoice,
    Zones,
    zone_notes,
)

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


def test_one_reason_for_all_recipients_is_one_short_note() -> None:
    chosen = ZoneChoice("bulk", "route=2 sender matches news.example")
    recipients = [(f"u{n}@example.com", chosen) for n in range(1000)]
    assert zone_notes(recipients) == ("zone=bulk route=2 sender matches news.example",)


def test_several_reasons_name_their_recipients() -> None:
    policy, route = ZoneChoice("vip", "policy"), ZoneChoice("default", "no route")
    notes = zone_notes([("a@x", policy), *((f"u{n}@x", route) for n in range(MAX_NAMED + 2))])
    assert notes == ("zone=default no route: u0@x, u1@x, u2@x, u3@x, u4@x and 2 more", "zone=vip policy: a@x")


def test_nothing_to_choose_is_no_note() -> None:
    assert zone_notes([("a@x", ZoneChoice("default", ""))]) == ()


def test_notes_are_bounded_whatever_the_recipients_are() -> None:
    long = "x" * 250
    chosen = [(f"{long}{n}@example.com", ZoneChoice("bulk", f"route={n} {long}")) for n in range(1000)]
    notes = zone_notes(chosen)
    assert len(notes) == MAX_NOTES + 1
    assert max(map(len, notes)) <= MAX_NOTE
    assert notes[-1] == f"{1000 - MAX_NOTES} more recipients, by other routes"


def test_a_route_gives_its_mail_a_priority_and_others_leave_it() -> None:
    urgent = replace(bulk(sender=("news.example",)), set_priority="bulk")
    assert choice(urgent).priority is Priority.BULK
    assert choice(bulk(sender=("news.example",))).priority is None
    assert choice(replace(urgent, sender=("other.example",))).priority is None
