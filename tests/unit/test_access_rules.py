"""[[access]]: which rule decides, and what it answers."""

from __future__ import annotations

import ipaddress

import pytest

from zonerelay.config.settings import AccessAction, AccessSettings
from zonerelay.inbound.access.networks import DEFERRED, REFUSED, AccessRules
from zonerelay.model.reply import Reply


def rule(
    action: str = "refuse", reply: str = "", client: tuple[str, ...] = (), **more: tuple[str, ...]
) -> AccessSettings:
    networks = tuple(ipaddress.ip_network(each) for each in client)
    return AccessSettings(action=AccessAction(action), reply=reply, client=networks, **more)


def decide(
    *rules: AccessSettings,
    client: str = "192.0.2.1",
    user: str = "",
    sender: str = "a@example.org",
    recipient: str = "b@example.com",
) -> Reply | None:
    return AccessRules(rules).decide(client, user, sender, recipient)


def test_no_rule_refuses_nobody() -> None:
    assert not AccessRules(())
    assert AccessRules((rule(sender=("*",)),))
    assert decide() is None


def test_actions_have_their_usual_replies_or_the_operators() -> None:
    assert decide(rule(sender=("*",))) == REFUSED == Reply(550, "7.1", "Access denied")
    assert decide(rule("defer", sender=("*",))) == DEFERRED
    assert decide(rule("accept", sender=("*",))) is None
    assert decide(rule(reply="554 5.7.2 Ask postmaster", sender=("*",))) == Reply(
        554, "7.2", "Ask postmaster"
    )
    assert decide(rule(reply="554 5 a day", sender=("*",))) == Reply(554, "7.1", "5 a day")
    assert decide(rule("defer", "451 later", sender=("*",))) == Reply(451, "7.1", "later")


def test_the_first_rule_that_matches_decides() -> None:
    friends = rule("accept", sender=("a@example.org",))
    enemies = rule(sender=("example.org",))
    assert decide(friends, enemies) is None
    assert decide(enemies, friends) == REFUSED
    assert decide(friends, enemies, sender="other@example.org") == REFUSED


def test_all_conditions_of_a_rule_must_match() -> None:
    both = rule(sender=("example.org",), recipient=("example.com",), client=("192.0.2.0/24",), user=("app1",))
    assert decide(both, user="app1") == REFUSED
    assert decide(both, user="app2") is None
    assert decide(both, user="app1", client="198.51.100.1") is None
    assert decide(both, user="app1", sender="a@example.net") is None
    assert decide(both, user="app1", recipient="a@example.net") is None


NETWORKS = ("192.0.2.0/25", "198.51.100.7/32", "2001:db8::/32", "2001:db9::1/128")


@pytest.mark.parametrize(
    ("client", "expected", "reason"),
    [
        ("192.0.2.127", True, "in a network"),
        ("192.0.2.128", False, "just outside"),
        ("198.51.100.7", True, "an address"),
        ("198.51.100.8", False, "the next one"),
        ("2001:db8:ffff::1", True, "IPv6"),
        ("2001:db9::1", True, "an IPv6 address"),
        ("2001:db9::2", False, "the next one"),
        ("::c000:201", False, "a number that would be in an IPv4 network"),
        ("", False, "a Unix socket is in no network"),
        ("nonsense", False, "nor is what is no address"),
    ],
)
def test_clients_by_network(client: str, expected: bool, reason: str) -> None:
    assert (decide(rule(client=NETWORKS), client=client) is REFUSED) is expected, reason


def test_a_network_of_everything_is_still_not_a_unix_socket() -> None:
    everywhere = rule(client=("0.0.0.0/0", "::/0"))
    assert decide(everywhere, client="203.0.113.9") is REFUSED
    assert decide(everywhere, client="2001:db8::1") is REFUSED
    assert decide(everywhere, client="") is None


def test_a_star_is_any_user_who_has_logged_in() -> None:
    anyone = rule(user=("*",))
    assert decide(anyone, user="app1") == REFUSED
    assert decide(anyone, user="") is None
    assert decide(rule(user=("app1",)), user="App1") is None  # users are compared exactly
