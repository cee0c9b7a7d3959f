"""TLS on the way out as it is configured: what is refused, and what is noted."""

from __future__ import annotations

import pytest

from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load_text

TRUST = '[dns]\ntrust_ad = true\nservers = ["127.0.0.1"]\n'

REFUSED = [
    (
        "DANE without trust",
        '[[zone]]\ntls = "dane"',
        "zone[0].tls: dane requires validated DNSSEC answers: set",
    ),
    (
        "DANE for a destination without trust",
        '[[destination]]\ndomain = ["example.com"]\ntls = "dane"',
        "destination[0].tls: dane requires validated DNSSEC answers: set",
    ),
    (
        "DANE and no DANE",
        f'{TRUST}[[zone]]\ntls = "dane"\ndane = false',
        "zone[0].dane: tls = dane asks for it",
    ),
    (
        "DANE of an address",
        f'{TRUST}[[zone]]\ntls = "dane"\nnext_hop = "[smtp.example.net]:587, 192.0.2.1:25"',
        "zone[0].next_hop: 192.0.2.1:25 is an address",
    ),
    (
        "TLS at once and never",
        '[[zone]]\ntls = "none"\ntls_on_connect = true',
        "zone[0].tls_on_connect: uses implicit TLS, which contradicts tls",
    ),
]


@pytest.mark.parametrize(("text", "problem"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f'{TRUST}[[zone]]\ntls = "dane"\nnext_hop = "[smtp.example.net]:465"\ntls_on_connect = true',
        f'{TRUST}[[zone]]\ndane = false\n[[destination]]\ndomain = ["example.com"]\ntls = "dane"',
        '[[zone]]\nnext_hop = "192.0.2.1:465"\ntls_on_connect = true',
    ],
)
def test_is_accepted_without_a_note(text: str) -> None:
    assert not [note for note in notes(text) if "tls" in note or "dns" in note]


def notes(text: str) -> tuple[str, ...]:
    return advice(load_text(text), "relay.example.org")


NOTED = [
    (
        "a resolver far away",
        '[dns]\ntrust_ad = true\nservers = ["127.0.0.1", "192.0.2.53", "[::1]:53"]',
        "dns.trust_ad: 192.0.2.53 is not on this machine",
    ),
    (
        "a resolver that nobody named",
        "[dns]\ntrust_ad = true",
        "dns.trust_ad: the system's resolvers are not known to",
    ),
    ("DANE for everybody", f'{TRUST}[[zone]]\ntls = "dane"', "zone[0].tls: dane: mail of zone default for"),
    ("MX hosts on 465", "[[zone]]\ntls_on_connect = true", "zone[0].tls_on_connect: MX hosts do not speak"),
]


@pytest.mark.parametrize(("text", "note"), [row[1:] for row in NOTED], ids=[row[0] for row in NOTED])
def test_is_noted(text: str, note: str) -> None:
    found = [each for each in notes(text) if each.startswith(note)]
    assert len(found) == 1, notes(text)
