"""What clients may: guard rails of users, who may relay, [[access]] rules, and what address patterns mean."""

import asyncio
import ipaddress
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.credentials import file_of, user
from zonerelay.cli.spool import home_files
from zonerelay.config import settings as options
from zonerelay.config import user_limits
from zonerelay.config.credentials.file import CredentialsError
from zonerelay.config.settings import AccessAction, AccessSettings, ListenerSettings, Settings, SpoolSettings
from zonerelay.config.user_limits import NONE, UserLimits, UserMode, change_user, changed
from zonerelay.inbound.access.networks import DEFERRED, MAX_REMEMBERED, REFUSED, AccessPolicy, AccessRules
from zonerelay.inbound.limits.quotas import LENGTHS, ExhaustedQuota, QuotaLevel, Quotas, Usage
from zonerelay.inbound.limits.usage_file import UsageFile
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import Origin
from zonerelay.model.reply import Reply
from zonerelay.routing.zones.address_patterns import AddressPatterns
from zonerelay.store.check import Findings

EVERY = (
    *(
        "disabled=true",
        "expires=2027-01-01T12:00:00Z",
        "networks=192.0.2.0/24,::1",
        "recipients=*.x.example, a@y.example",
    ),
    *("zones=bulk", "max_message_size=5MB", "mode=copy", "mailbox=qa@example.org", "idempotency=message-id"),
    *(f"{what}_per_{window}=7" for what in ("messages", "recipients") for window in user_limits.WINDOWS),
    *(f"octets_per_{window}=7KB" for window in user_limits.WINDOWS),
)


def test_every_guard_rail_comes_back_from_the_file() -> None:
    there = changed(NONE, list(EVERY))
    assert [key for key in user_limits.OPTIONS if getattr(there, key) == getattr(NONE, key)] == [
        "second_hash"
    ]
    text = user_limits.UserLimitsFile("credentials.rails.toml").changed("a@x.example", there)
    assert user_limits.parse(text, "file").own("a@x.example") == there
    text = user_limits.parse(text, "file").changed('a"b\\@x.example', there)
    found = user_limits.parse(text, "file")
    assert [found.own(each) for each in found.users()] == [there, there]
    assert user_limits.parse(found.changed("a@x.example", NONE), "file").users() == ['a"b\\@x.example']
    back = [f"{each.partition('=')[0]}=" for each in EVERY]
    assert changed(there, back) == NONE


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("mod=copy", '"mod" is not a key of a user; did you mean mode?'),
        ("second_hash=x", "is not a key of a user"),
        ("mode", "mode: write mode=VALUE"),
        ("mode=redirect", 'mode = "redirect" requires a mailbox'),
        ("mode=listed", 'mode = "listed" requires recipients'),
        ("mailbox=@example.org", "is not an address"),
        ("expires=soon", "expected a date"),
        ("messages_per_day=-1", "must be from 1"),
        ("networks=10.0.0.1/8", 'write "10.0.0.0/8"'),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(assignment: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        changed(NONE, [assignment])


WRONG = '[user.shop]\nmods = "copy"\n[user.other]\ndisabled = true\n'


def test_a_wrong_table_is_its_users_alone_and_no_change_loses_it(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text(file_of(user("shop"), user("other")))
    file = user_limits.file_beside(credentials)
    file.write_text(WRONG)
    found = user_limits.read(file)
    assert found.own("other") == UserLimits(disabled=True)
    with pytest.raises(CredentialsError, match=r"did you mean mode\? \(line 2\)"):
        found.of("shop")

    def change(name: str) -> None:
        change_user(credentials, name, lambda _, there: (user(name), changed(there, ["zones=bulk"])))

    with pytest.raises(CredentialsError, match="did you mean mode"):
        change("shop")
    assert file.read_text() == WRONG
    change("other")
    assert file.read_text().startswith(WRONG.partition("[user.other")[0])
    assert user_limits.read(file).own("other").zones == ("bulk",)
    change_user(credentials, "shop", None)
    assert user_limits.read(file).users() == ["other"]


def test_a_file_without_tables_of_users_is_refused() -> None:
    for text in ("x = 1", "user = 1", "x = 1\n[user.shop]\n", 'user.shop = {mode = "capture"}\n'):
        with pytest.raises(CredentialsError, match="file: expected only tables such as"):
            user_limits.parse(text, "file")
    for text in ("[user.shop", "[[user]]", "[user.a.b]", "[other]"):
        with pytest.raises(CredentialsError, match="file:2: expected only tables such as"):
            user_limits.parse(f"# x\n{text}", "file")
    for text in ("[user.a]\n[user.a]\n", "[user.a]\n[user.'a']\n", '[user."a\\\\"]\r\n[user."a\\u005c"]'):
        with pytest.raises(CredentialsError, match="file:2: a table with this name"):
            user_limits.parse(text, "file")
    with pytest.raises(CredentialsError, match="file:1: Unescaped"):
        user_limits.parse('[user."\\q"]\n', "file")


def test_the_default_holds_for_what_a_user_s_own_table_does_not_say(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text(file_of(user("shop"), user("other")))
    file = user_limits.file_beside(credentials)
    user_limits.change_default(
        credentials, ["recipients_per_day=5000", "networks=192.0.2.0/24", "mode=capture"]
    )

    def change(*assignments: str) -> UserLimits:
        change_user(credentials, "shop", lambda _, there: (user("shop"), changed(there, list(assignments))))
        found = user_limits.read(file).of("shop")
        assert found is not None
        return found

    default = user_limits.read(file).default
    assert user_limits.read(file).of("other") == default
    own = change("recipients_per_day=9", "mode=deliver", "networks=")
    assert (own.recipients_per_day, own.mode, own.networks) == (9, "deliver", default.networks)
    own = change("recipients_per_day=0")
    assert (own.recipients_per_day, own.mode, own.networks) == (0, "deliver", default.networks)
    assert change("recipients_per_day=", "mode=") == default
    user_limits.change_default(credentials, ["networks="])
    assert user_limits.read(file).of("shop") == UserLimits(recipients_per_day=5000, mode=UserMode.CAPTURE)
    with pytest.raises(ValueError, match="requires a mailbox that receives the mail"):
        user_limits.change_default(credentials, ["mode=copy"])
    file.write_text('[default]\nmod = "copy"\n')
    with pytest.raises(CredentialsError, match=r"did you mean mode\? \(line 2\)"):
        user_limits.read(file)


def test_a_new_user_has_no_guard_rails_of_an_older_one(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text(file_of(user("other")))
    file = user_limits.file_beside(credentials)
    file.write_text("[user.shop]\ndisabled = true\n")
    change_user(credentials, "shop", lambda *_: (user("shop"), NONE))
    assert user_limits.read(file).users() == []


Steps = st.lists(st.tuples(st.floats(0, 4000), st.integers(1, 4)), max_size=60)


@given(steps=Steps, most=st.integers(1, 12), window=st.sampled_from(user_limits.WINDOWS))
def test_no_window_has_more_than_its_quota(steps: list[tuple[float, int]], most: int, window: str) -> None:
    quota = changed(NONE, [f"recipients_per_{window}={most}"])
    length, slots = LENGTHS[window]
    usage, now = Usage(None, 1e9), 1e9
    taken: list[tuple[float, int]] = []
    for pause, count in steps:
        now += pause
        usage = Usage(usage.encode(), now)
        full = usage.full(quota, (1, count, 1))
        if full is None:
            usage.add((1, count, 1), now)
            taken.append((now, count))
        elif count <= most:
            later = Usage(usage.encode(), now + full.seconds)
            assert later.full(quota, (1, count, 1)) is None, "there is room when it says"
        for at, _ in taken:
            assert sum(each for when, each in taken if at <= when < at + length) <= most
    old = [count for when, count in taken if when > now - length - length / slots]
    assert next(usage.levels(quota)).used <= sum(old)


def test_a_message_that_never_fits_and_a_clock_that_is_set_back() -> None:
    quota = changed(NONE, ["octets_per_day=1KB", "messages_per_hour=1"])
    usage = Usage(None, 1e9)
    full = usage.full(quota, (1, 1, 2000))
    assert full is not None
    assert math.isinf(full.seconds)
    usage.add((1, 1, 10), 1e9)
    assert usage.full(quota, (1, 1, 10)) is not None
    assert Usage(usage.encode(), 1e9 - 7 * 86400).full(quota, (1, 1, 10)) is None


async def test_several_count_in_one_file_exactly_and_warn_once(tmp_path: Path) -> None:
    clock = ManualClock()
    quota = changed(NONE, ["messages_per_hour=50"])
    near: list[tuple[str, QuotaLevel]] = []

    def quotas() -> Quotas:
        return Quotas(lambda: UsageFile(tmp_path, clock), clock, lambda *said: near.append(said))

    workers = [quotas() for _ in range(3)]
    answers = await asyncio.gather(*(workers[each % 3].take("shop", quota, (1, 1, 10)) for each in range(80)))
    assert answers.count(clock.now()) == 50
    assert near == [("shop", QuotaLevel("messages_per_hour", 40, 50))]
    then = clock.now()
    clock.advance(3540)  # what is given back frees the window as if it had never been counted
    assert isinstance(await workers[1].take("shop", quota, (1, 1, 10)), ExhaustedQuota)
    await workers[0].take("shop", quota, (-1, -1, -10), counted=then)
    assert isinstance(await workers[1].take("shop", quota, (1, 1, 10)), float)
    clock.advance(120)
    for each in workers:
        await each.close()
    again = quotas()
    assert [level.used for level in (await again.usage("shop")).levels(quota)] == [1]
    assert await again.take("other", quota, (1, 1, 10)) == clock.now()
    await again.close()


async def test_usage_is_in_backups_and_looked_at_by_a_check(tmp_path: Path) -> None:
    settings = Settings(spool=SpoolSettings(path=tmp_path / "home" / "spool"))
    quota, clock = changed(NONE, ["messages_per_hour=50"]), ManualClock()
    quotas = Quotas(lambda: UsageFile(tmp_path / "home", clock), clock, lambda *_: None)
    await quotas.take("shop", quota, (1, 1, 10))
    home_files.save(settings, tmp_path / "backup")
    await quotas.close()
    (tmp_path / "home" / "usage" / "usage.db").unlink()
    home_files.restore(settings, tmp_path / "backup")
    again = Quotas(lambda: UsageFile(tmp_path / "home", clock), clock, lambda *_: None)
    assert [level.used for level in (await again.usage("shop")).levels(quota)] == [1]
    await again.close()
    findings = Findings()
    home_files.check(settings, findings)
    assert findings.kept == []
    (tmp_path / "home" / "usage" / "usage.db").write_text("no database" * 100)
    home_files.check(settings, findings)
    assert len(findings.kept) == 1


# Who may relay, which [[access]] rule decides, and which addresses a pattern means


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
    opened = AccessPolicy(ListenerSettings(allow_networks=(), unsafe=(options.UnsafeListener.OPEN_RELAY,)))
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
