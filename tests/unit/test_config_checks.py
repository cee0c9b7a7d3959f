"""What must hold between settings, and what a valid configuration still has to say for itself."""

from __future__ import annotations

import pytest

from zonerelay.config.checks import advice
from zonerelay.config.load import load_text
from zonerelay.config.settings import resolve_hostname


def test_the_default_share_of_a_destination_gives_way_to_a_small_zone() -> None:
    (zone,) = load_text("[[zone]]\nmax_connections = 3").zone
    assert zone.max_connections_per_destination == 3


@pytest.mark.parametrize(
    ("text", "fqdn", "name"),
    [
        ('hostname = "relay.example.org"', "other.example.org", "relay.example.org"),
        ("", "Mail.Example.org.", "mail.example.org"),
        ("", "localhost", "[127.0.0.1]"),
        ("", "localhost.localdomain", "[127.0.0.1]"),
        ("", "1f0c2d", "[127.0.0.1]"),
        ("", "my_host.example.org", "[127.0.0.1]"),
        ('[[listener]]\naddress = "[::]:25"\n[[listener]]\naddress = "192.0.2.5:26"', "x", "[192.0.2.5]"),
        ('[[listener]]\naddress = "[2001:db8::5]:25"', "x", "[IPv6:2001:db8::5]"),
    ],
)
def test_the_relay_always_has_a_valid_name(text: str, fqdn: str, name: str) -> None:
    assert resolve_hostname(load_text(text), lambda: fqdn) == name


def test_sound_defaults_need_no_advice() -> None:
    assert advice(load_text(""), "relay.example.org") == ()


def test_of_many_routes_only_those_that_take_everything_are_looked_at() -> None:
    many = "".join(f'[[route]]\nrecipient_domain = ["d{n}.example"]\n' for n in range(1000))
    assert advice(load_text(many + many), "relay.example.org") == ()
    assert len(advice(load_text('[[route]]\nrecipient_domain = ["*"]\n' + many), "relay.example.org")) == 1000
