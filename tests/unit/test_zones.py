from __future__ import annotations

import pytest

from zonerelay.config.settings import RouteSettings, ZoneSettings
from zonerelay.model.address import Mailbox
from zonerelay.model.envelope import Envelope, Origin
from zonerelay.model.message_id import MessageId
from zonerelay.routing.zones.route_rules import Headers, RoutedMail
from zonerelay.routing.zones.zones import Zones

ZONES = (ZoneSettings(), ZoneSettings(name="bulk", port=26), ZoneSettings(name="vip"))


def envelope(sender: str = "app@sender.example", user: str = "") -> Envelope:
    origin = Origin(user=user)
    return Envelope(id=MessageId("0" * 16), sender=Mailbox(sender), recipients=(), created=0.0, origin=origin)


def choose(
    route: RouteSettings,
    recipient: str = "bob@example.com",
    *,
    headers: tuple[tuple[str, str], ...] = (),
    sender: str = "app@sender.example",
    user: str = "",
) -> str:
    return zone_of(Zones(ZONES, (route,)), envelope(sender, user), recipient, headers=headers)


def zone_of(
    zones: Zones, of: Envelope, recipient: str = "bob@example.com", *, headers: Headers = (), size: int = 1000
) -> str:
    return zones.choose(of, headers=headers, size=size)(recipient).zone


def test_without_routes_everything_goes_to_the_default_zone() -> None:
    assert zone_of(Zones(ZONES), envelope()) == "default"


@pytest.mark.parametrize(
    ("pattern", "recipient", "matches"),
    [
        ("example.com", "bob@example.com", True),
        ("example.com", "bob@EXAMPLE.com", True),
        ("Example.COM", "bob@example.com", True),
        ("example.com", "bob@sub.example.com", False),
        ("*.example.com", "bob@sub.example.com", True),
        ("*.example.com", "bob@a.b.example.com", True),
        ("*.example.com", "bob@example.com", False),
        ("*.example.com", "bob@notexample.com", False),
        ("*", "bob@anything.example", True),
        ("bücher.example", "bob@xn--bcher-kva.example", True),
        ("xn--bcher-kva.example", "bob@bücher.example", True),
        ("[192.0.2.1]", "bob@[192.0.2.1]", True),
        ("example.com", "bob@[192.0.2.1]", False),
        ("example.com", '"bob@example.com"@other.example', False),
        ("*", "postmaster", False),
    ],
)
def test_recipient_domains(pattern: str, recipient: str, matches: bool) -> None:
    zone = choose(RouteSettings(zone="bulk", recipient_domain=("unrelated.example", pattern)), recipient)
    assert zone == ("bulk" if matches else "default")


@pytest.mark.parametrize(
    ("condition", "matches"),
    [
        ("X-Priority", True),
        ("x-priority: 5", True),
        ("X-Priority: (lowest)", True),
        ("X-Priority: 1", False),
        ("X-Absent", False),
        ("List-Id: news", True),
    ],
)
def test_headers(condition: str, matches: bool) -> None:
    headers = (("X-PRIORITY", "5 (Lowest)"), ("List-Id", "<other.example>"), ("List-Id", "<News.example>"))
    assert choose(RouteSettings(zone="bulk", header=(condition,)), headers=headers) == (
        "bulk" if matches else "default"
    )


def test_senders_and_users() -> None:
    assert choose(RouteSettings(zone="bulk", sender_domain=("sender.example",))) == "bulk"
    assert choose(RouteSettings(zone="bulk", sender_domain=("sender.example",)), sender="") == "default"
    assert choose(RouteSettings(zone="bulk", user=("app",)), user="app") == "bulk"
    assert choose(RouteSettings(zone="bulk", user=("app",)), user="App") == "default"
    assert choose(RouteSettings(zone="bulk", user=("app",))) == "default"


def test_every_condition_of_a_route_must_match() -> None:
    route = RouteSettings(zone="bulk", recipient_domain=("example.com",), user=("app",))
    assert choose(route, user="app") == "bulk"
    assert choose(route, user="other") == "default"
    assert choose(route, "bob@example.org", user="app") == "default"


def test_the_first_matching_route_wins_and_is_explained() -> None:
    zones = Zones(
        ZONES,
        (
            RouteSettings(zone="vip", user=("boss",)),
            RouteSettings(
                zone="bulk", recipient_domain=("*.example.com",), sender_domain=("sender.example",)
            ),
            RouteSettings(zone="vip"),
        ),
    )
    found = zones.explain("bob@a.example.com", RoutedMail(sender="app@sender.example"))
    assert (found.zone, found.rule) == ("bulk", 2)
    assert found.reason == "sender_domain matches sender.example and recipient_domain matches *.example.com"
    last = zones.explain("bob@example.com", RoutedMail(sender=""))
    assert (last.zone, last.rule, last.reason) == ("vip", 3, "the route has no condition")
    assert zone_of(zones, envelope(), "bob@a.example.com") == "bulk"


def test_explaining_no_match_says_so() -> None:
    assert Zones(ZONES).explain("bob@example.com", RoutedMail(sender="")).reason == "there are no routes"
    zones = Zones(ZONES, (RouteSettings(zone="bulk", user=("x",)),))
    assert zones.explain("bob@example.com", RoutedMail(sender="")).rule == 0


def test_the_default_zone_need_not_be_configured() -> None:
    zones = Zones((ZoneSettings(name="bulk", port=2525),))
    assert (zones.get("bulk").name, zones.get("bulk").port) == ("bulk", 2525)
    assert zones.get("default") == ZoneSettings()
    assert zones.names == ("bulk",)
