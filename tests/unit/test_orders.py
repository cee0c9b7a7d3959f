"""Which mail an order is about, when it is in force, and for how long the age of mail did not count."""

from __future__ import annotations

from typing import Any

import pytest

from zonerelay.config.settings import ZoneSettings
from zonerelay.queue.orders.order import OPEN, Order, OrderTable, Subject

NOW = 1000.0
MAIL = Subject(
    "default", "Bob@Example.com", "news@example.org", "app", "example.com", "mx1.test:25,mx2.test:25"
)


def order(**named: Any) -> Order:  # Any: fields by name
    fields: dict[str, Any] = {"id": "1", "effect": "suspend", "reason": "x", "who": "root", "since": 0.0}
    return Order(**{**fields, **named})


@pytest.mark.parametrize(
    ("named", "is_about"),
    [
        ({"everything": True}, True),
        ({"zone": "default"}, True),
        ({"zone": "other"}, False),
        ({"destination": "example.com"}, True),
        ({"destination": "MX2.test"}, True),
        ({"destination": "mx1.test:25"}, True),
        ({"destination": "mx1.test:25,mx2.test:25"}, True),
        ({"destination": "mx"}, False),
        ({"destination": "somewhere", "hosts": ("mx1.test:25,mx2.test:25",)}, True),
        ({"domain": "example.com"}, True),
        ({"domain": "*.com"}, True),
        ({"domain": "exampleXcom"}, False),
        ({"recipient": "bob@*"}, True),
        ({"sender": "<news@example.org>"}, True),
        ({"sender": "<>"}, False),
        ({"user": "app"}, True),
        ({"user": "ap"}, False),
        ({"sender": "news@*", "domain": "example.net"}, False),
        ({"zone": "default", "until": NOW}, False),
        ({"zone": "default", "until": NOW + 1}, True),
        ({"zone": "default", "ended": 1.0}, False),
    ],
    ids=str,
)
def test_an_order_is_about_mail_that_matches_everything_given(named: dict[str, Any], is_about: bool) -> None:
    given = order(**named)
    assert OrderTable([given], NOW).about(MAIL) == ([given] if is_about else [])


def test_what_needs_no_envelope_waits_in_the_store() -> None:
    by_mx, smarthost = ZoneSettings(), ZoneSettings(next_hop="smart.test")
    domain, closed = order(domain="example.com"), order(zone="default")
    destination, sender, rule = (
        order(destination="x"),
        order(sender="a@*"),
        order(zone="default", effect="hold"),
    )

    def gate(given: Order, zone: ZoneSettings) -> tuple[bool, int, int]:
        found = OrderTable([given], NOW).gate(zone)
        return found.is_closed, len(found.domains), len(found.destinations)

    assert gate(closed, by_mx) == gate(closed, smarthost) == (True, 0, 0)
    assert gate(domain, by_mx) == (False, 1, 0)
    assert gate(domain, smarthost) == (False, 0, 0), "all its mail has one line: each delivery is held"
    assert gate(destination, by_mx) == gate(destination, smarthost) == (False, 0, 1)
    for each in (sender, rule, order(zone="other")):
        assert OrderTable([each], NOW).gate(by_mx) == OPEN
    assert [OrderTable([each], NOW).by_envelope for each in (closed, destination, domain, sender, rule)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_the_age_of_mail_does_not_count_while_its_clock_is_stopped() -> None:
    table = OrderTable(
        [
            order(domain="example.com", since=100.0, ended=200.0, stop_clock=True),
            order(zone="default", since=150.0, ended=250.0, stop_clock=True),
            order(user="app", since=400.0, until=500.0, stop_clock=True),
            order(sender="*", since=600.0, ended=700.0),
            order(zone="other", since=600.0, ended=700.0, stop_clock=True),
            order(recipient="*", since=900.0, stop_clock=True),
        ],
        NOW,
    )
    assert table.paused(MAIL, 0.0, NOW) == 150 + 100 + 100
    assert table.paused(MAIL, 225.0, NOW) == 25 + 100 + 100
    assert table.paused(MAIL, 950.0, NOW) == 50


def test_mail_is_refused_at_the_command_that_names_what_the_order_is_about() -> None:
    table = OrderTable(
        [
            order(id="sender", sender="bad@*", refuse=True),
            order(id="zone", zone="slow", refuse=True),
            order(id="both", user="app", domain="example.com", refuse=True),
            order(id="holds", sender="*"),
        ],
        NOW,
    )

    def refused(*mail: Any) -> str:
        found = table.refuses(*mail)
        return "" if found is None else found.id

    assert refused("bad@example.org", "", None) == "sender"
    assert refused("good@example.org", "app", None) == ""
    assert refused("good@example.org", "app", "a@example.com", "default") == "both"
    assert refused("good@example.org", "", "a@example.com", "slow") == "zone"
    assert refused("good@example.org", "", "a@example.com", None) == "", "the zone is not known yet"


def test_a_hold_rule_lets_pass_what_an_operator_has_released() -> None:
    rule, suspension = order(id="rule", effect="hold", zone="default"), order(id="s", sender="*")
    for act, by_rule in (("", rule), ("rule", rule), ("12345678", None)):
        assert OrderTable([rule], NOW).holding(MAIL, act) == by_rule
        assert OrderTable([suspension], NOW).holding(MAIL, act) == suspension
