"""Who may relay, which [[access]] rule decides, and which addresses a pattern means."""

from __future__ import annotations

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.config.settings import AccessAction, AccessSettings, ListenerSettings, UnsafeListener
from zonerelay.inbound.access.networks import DEFERRED, MAX_REMEMBERED, REFUSED, AccessPolicy, AccessRules
from zonerelay.model.envelope import Origin
from zonerelay.model.reply import Reply
from zonerelay.routing.zones.address_patterns import AddressPatterns

# ---- Who may relay -------------------------------------------------------------------------------


ALLOWED = (ipaddress.ip_network("192.0.2.0/24"), ipaddress.ip_network("2001:db8::/32"))

TABLE = [
    ("192.0.2.7", True, "192.0.2.7", "in a network"),
    ("192.0.3.7", False, "192.0.3.7", "in none"),
    ("::ffff:192.0.2.7", True, "192.0.2.7", "IPv4 on a dual-stack socket"),
    ("::ffff:192.0.3.7", False, "192.0.3.7", "the same, outside"),
    ("2001:db8:1::1", True, "2001:db8:1::1", "IPv6"),
    ("fe80::1%eth0", False, "fe80::1", "with a scope"),
    ("::192.0.2.7", False, "::c000:207", "compatible is not mapped"),
]


@pytest.mark.parametrize(("peer", "may", "shown", "reason"), TABLE, ids=[row[3] for row in TABLE])
def test_who_may_relay(peer: str, may: bool, shown: str, reason: str) -> None:
    policy = AccessPolicy(ListenerSettings(allow_networks=ALLOWED))
    for _ in range(2):
        client = policy.identify((peer, 4711))
        assert (client.may_relay, client.address, client.port) == (may, shown, 4711)


def test_nobody_relays_without_networks_and_open_relay_opens_it() -> None:
    closed = AccessPolicy(ListenerSettings(allow_networks=()))
    assert not closed.identify(("127.0.0.1", 1)).may_relay
    opened = AccessPolicy(ListenerSettings(allow_networks=(), unsafe=(UnsafeListener.OPEN_RELAY,)))
    assert opened.identify(("198.51.100.1", 1)).may_relay


def test_a_tcp_client_without_a_name_is_not_taken_for_a_local_one() -> None:
    """A connection that is reset before it is accepted has no peername."""
    tcp = AccessPolicy(ListenerSettings(address="0.0.0.0:25"))
    assert not tcp.identify(None).may_relay
    assert not tcp.identify("").may_relay
    assert AccessPolicy(ListenerSettings(address="unix:/run/x", allow_networks=())).identify("").may_relay


def test_remembered_clients_are_bounded() -> None:
    policy = AccessPolicy(ListenerSettings(allow_networks=ALLOWED))
    for number in range(3 * MAX_REMEMBERED):
        policy.identify((str(ipaddress.ip_address(number)), 1))
    assert policy._decided.cache_info().currsize == MAX_REMEMBERED


# ---- Which [[access]] rule decides ---------------------------------------------------------------


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
    return AccessRules(rules).decide(Origin(client_address=client, user=user), sender, recipient)


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


# ---- Which addresses a pattern means -------------------------------------------------------------


MATCHES: list[tuple[str, str, bool, str]] = [
    ("user@example.com", "user@example.com", True, "the address"),
    ("user@example.com", "user@Example.COM", True, "domains have no case"),
    ("user@example.com", "USER@example.com", True, "nor, in practice, local parts"),
    ("User@Example.com", "user@example.com", True, "in the pattern either"),
    ("user@example.com", '"user"@example.com', True, "quotes change nothing (RFC 5321 4.1.2)"),
    ("user@example.com", '"us\\er"@example.com', True, "nor do backslashes"),
    ('"user"@example.com', "user@example.com", True, "quotes in the pattern"),
    ("user@example.com", "user2@example.com", False, "another user"),
    ("user@example.com", "user@sub.example.com", False, "another domain"),
    ("user@example.com", "", False, "the null sender is nobody"),
    ("example.com", "anyone@example.com", True, "every address of a domain"),
    ("@example.com", "anyone@example.com", True, "the same, written otherwise"),
    ("*@example.com", "anyone@example.com", True, "and once more"),
    ("example.com", '"a@b"@example.com', True, "the last @ counts"),
    ("b", '"a@b"@example.com', False, "not the first one"),
    ("example.com", "anyone@sub.example.com", False, "not the names below it"),
    ("example.com", "anyone@notexample.com", False, "not names that end alike"),
    ("*.example.com", "anyone@sub.example.com", True, "a name below"),
    ("*.example.com", "anyone@a.b.c.example.com", True, "far below"),
    ("*.example.com", "anyone@example.com", False, "not itself"),
    ("*.com", "anyone@example.com", True, "a whole top-level domain"),
    ("*", "anyone@example.com", True, "every address"),
    ("*", "postmaster", True, "a bare postmaster is an address"),
    ("*", "", False, "but the null sender is none"),
    ("<>", "", True, "the null sender"),
    ("<>", "user@example.com", False, "and nobody else"),
    ("bounce-*@example.com", "bounce-17@example.com", True, "a glob"),
    ("bounce-*@example.com", "bounce-@example.com", True, "* is any text, none too"),
    ("bounce-*@example.com", "Bounce-x@example.com", True, "without case"),
    ("bounce-*@example.com", "xbounce-1@example.com", False, "from the start"),
    ("bounce-*@example.com", "bounce-1@example.net", False, "at its domain"),
    ("*-request@example.com", "list-request@example.com", True, "at the end"),
    ("a*b*c@example.com", "a1b2b3c@example.com", True, "two stars"),
    ("a*b*c@example.com", "acb@example.com", False, "in order"),
    ("ab*ba@example.com", "aba@example.com", False, "what is before and behind does not overlap"),
    ("ab*ba@example.com", "abba@example.com", True, "but may touch"),
    ("a*aa*a@example.com", "aaa@example.com", False, "nor does what is between"),
    ("a.c*@example.com", "abc1@example.com", False, "no other character is special"),
    ("a?c@example.com", "abc@example.com", False, "? is a character of its own"),
    ("user@*.example.com", "user@sub.example.com", True, "a user at every name below"),
    ("user@*.example.com", "user@example.com", False, "not at itself"),
    ("user@*.example.com", "other@sub.example.com", False, "nobody else"),
    ("abuse@*", "abuse@example.net", True, "a user everywhere"),
    ("postmaster@*", "postmaster", True, "a bare postmaster too"),
    ("user+*@*", "user+tag@example.org", True, "a glob everywhere"),
    ("bücher.example", "a@xn--bcher-kva.example", True, "U-label and A-label are one domain"),
    ("xn--bcher-kva.example", "a@BÜCHER.example", True, "the other way round"),
    ("*.bücher.example", "a@www.xn--bcher-kva.example", True, "below one"),
    ("user@[192.0.2.1]", "user@[192.0.2.1]", True, "an address literal"),
    ("user@[IPv6:2001:db8::1]", "user@[ipv6:2001:DB8:0::1]", True, "in another spelling"),
]


@pytest.mark.parametrize(
    ("pattern", "mailbox", "expected", "reason"), MATCHES, ids=[row[3] for row in MATCHES]
)
def test_pattern(pattern: str, mailbox: str, expected: bool, reason: str) -> None:
    assert AddressPatterns([pattern]).match(mailbox) is expected, reason
    among_others = AddressPatterns(["x@y.example", "z.example", "*.w.example", "q*@v.example", pattern])
    assert among_others.match(mailbox) is expected, reason


@pytest.mark.parametrize(
    "pattern", ["exa mple.com", "user@exa..mple", "user@*foo.example", "user@b\u0378.example"]
)
def test_a_pattern_whose_domain_is_none_is_refused_in_words(pattern: str) -> None:
    with pytest.raises(ValueError, match="cannot be matched: not a "):
        AddressPatterns([pattern])


def test_a_mailbox_whose_domain_is_no_domain_matches_what_is_written_alike_or_nothing() -> None:
    patterns = AddressPatterns(["example.com", "*"])
    assert patterns.match("user@b\u0378.example")
    assert not AddressPatterns(["example.com"]).match("user@b\u0378.example")


def test_globs_of_one_domain_may_begin_with_texts_of_any_length() -> None:
    globs = [f"{'x' * n}-*@example.com" for n in (3, 0, 9, 1)]
    patterns = AddressPatterns([*globs, "*-z@example.com"])
    for glob in globs:
        assert patterns.find(glob.replace("*", "17")) == glob
    assert patterns.find("xx-17@example.com") == ""
    assert patterns.find("xx-z@example.com") == "*-z@example.com"


LOCALS = st.text("ab*", min_size=1, max_size=4)
LABELS = st.sampled_from(["a", "b"])
DOMAINS = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
PATTERNS = st.one_of(
    DOMAINS,
    DOMAINS.map("*.{}".format),
    DOMAINS.map("@{}".format),
    st.sampled_from(["*", "<>", "a@*", "a*@*"]),
    st.builds("{}@{}".format, LOCALS, DOMAINS),
    st.builds("{}@*.{}".format, LOCALS, DOMAINS),
)
MAILBOXES = st.one_of(
    st.just(""), st.just("a"), st.builds("{}@{}".format, st.text("abAB", min_size=1, max_size=4), DOMAINS)
)


def naive(pattern: str, mailbox: str) -> bool:
    """What the words of a pattern say, one by one."""
    if "<>" in (pattern, mailbox or "<>"):
        return pattern == (mailbox or "<>")
    local, _, domain = pattern.rpartition("@")
    box, _, host = mailbox.rpartition("@") if "@" in mailbox else (mailbox, "", "")
    hosts = r".+\." + re.escape(domain[2:]) if domain.startswith("*.") else re.escape(domain)
    locals_ = "".join(".*" if each == "*" else re.escape(each) for each in local or "*")
    fits = domain == "*" or re.fullmatch(hosts, host) is not None
    return fits and re.fullmatch(locals_, box, re.IGNORECASE) is not None


@given(patterns=st.lists(PATTERNS, max_size=8), mailbox=MAILBOXES)
def test_what_is_found_is_what_a_naive_search_finds(patterns: list[str], mailbox: str) -> None:
    matching = [pattern for pattern in patterns if naive(pattern, mailbox)]
    found = AddressPatterns(patterns).find(mailbox)
    assert (found in matching) if matching else found == ""
    assert AddressPatterns(patterns).match(mailbox) is bool(matching)
