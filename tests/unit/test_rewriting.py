"""Which rule of [[rewrite]] counts for an address, and what becomes of recipients that become one."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.config.checks import advice
from zonerelay.config.load import load_text
from zonerelay.config.settings import RewriteScope, RewriteSettings
from zonerelay.inbound.state import transaction as transactions
from zonerelay.inbound.state.transaction import NO_EDITS, ClientRewrites, MailTransaction, RewriteRules
from zonerelay.model.envelope import NULL_SENDER, Mailbox, Notify, Origin, Recipient, recipient_key
from zonerelay.routing.zones.address_patterns import AddressPatterns, AddressTable
from zonerelay.smtp.server.params import MailCommand

LISTENER = "127.0.0.1:2525"


def rule(
    address: str | list[str],
    to: str = "@new.example",
    where: str = "all",
    *,
    user: str = "",
    listener: str = "",
) -> RewriteSettings:
    return RewriteSettings(
        address=tuple([address] if isinstance(address, str) else address),
        to=to,
        where=RewriteScope(where),
        user=tuple(user.split()),
        listener=tuple(listener.split()),
    )


def becomes(
    rules: list[RewriteSettings], address: str, *, user: str = "", kind: RewriteScope = RewriteScope.RECIPIENT
) -> str:
    return ClientRewrites(RewriteRules(rules), LISTENER, user).find(kind, Mailbox(address))[0]


TABLE = [
    ([rule("old.example")], "ann@old.example", "ann@new.example", "a domain"),
    ([rule("old.example")], '"a b"@OLD.example', '"a b"@new.example', "quoted, in any case"),
    ([rule("old.example")], "ann@sub.old.example", "ann@sub.old.example", "not below it"),
    ([rule("*.old.example")], "ann@a.b.old.example", "ann@new.example", "below it"),
    (
        [rule("app-*@old.example", "app@x.example")],
        "app-7@old.example",
        "app@x.example",
        "a part of a local part",
    ),
    ([rule("*", "all@x.example")], "ann@old.example", "all@x.example", "every address"),
    ([rule("*")], "postmaster", "postmaster@new.example", "a postmaster without a domain"),
    ([rule("*")], NULL_SENDER, NULL_SENDER, "the null sender is nobody's"),
    ([rule("old.example", "@bücher.example")], "a@old.example", "a@xn--bcher-kva.example", "an A-label"),
    ([rule("bücher.example")], "a@xn--bcher-kva.example", "a@new.example", "matched in any spelling"),
    ([rule("a@b", "x@y"), rule("x@y", "a@b")], "a@b", "x@y", "once: no circles"),
    ([rule("a@b", "1@y"), rule("b", "2@y")], "a@b", "1@y", "the first of two"),
    ([rule("b", "1@y"), rule("a@b", "2@y")], "a@b", "1@y", "also when the second is nearer"),
    ([rule("*@b", "1@y"), rule("a*@b", "2@y")], "a@b", "1@y", "or has a glob"),
    ([rule(["c", "a*@*"], "1@y"), rule("a*@b", "2@y")], "a@b", "1@y", "a glob at every domain"),
    ([rule("b", "1@y", user="x"), rule("b", "2@y")], "a@b", "2@y", "a rule for a user needs one"),
    ([rule("b", "1@y", listener="h:1"), rule("b", "2@y")], "a@b", "2@y", "another listener"),
    (
        [rule("b", "1@y", listener=f"h:1 {LISTENER}"), rule("b", "2@y")],
        "a@b",
        "1@y",
        "one of these listeners",
    ),
]


@pytest.mark.parametrize(("rules", "address", "wanted", "why"), TABLE, ids=[why for *_, why in TABLE])
def test_first_rule_that_matches(rules: list[RewriteSettings], address: str, wanted: str, why: str) -> None:
    assert becomes(rules, address) == wanted


@pytest.mark.parametrize("where", list(RewriteScope))
def test_rules_by_place(where: RewriteScope) -> None:
    rewrites = ClientRewrites(RewriteRules([rule("b", "1@y", where)]), LISTENER, "")
    kinds = RewriteScope.ALL.kinds
    changed = {kind.value for kind in kinds if rewrites.find(kind, Mailbox("a@b"))[1]}
    every = {"sender", "recipient", "header"}
    assert changed == {"all": every, "envelope": {"sender", "recipient"}}.get(where.value, {where.value})
    assert changed == {kind.value for kind in kinds if rewrites.changes(kind)}


def test_mail_that_no_rule_is_for_is_not_looked_at() -> None:
    rewrites = ClientRewrites(RewriteRules([rule("b", user="x", where="header")]), LISTENER, "w")
    assert not any(rewrites.changes(place) for place in RewriteScope.ALL.kinds)


# Against the patterns as access rules and routes read them, one rule after the other.

NAMES = st.sampled_from(["a", "ab", "b", "a.b", "*", "a*", "*b", "a*b"])
DOMAINS = st.sampled_from(
    ["x.example", "y.example", "s.x.example", "example", "*.example", "*.x.example", "*"]
)
PATTERNS = st.one_of(DOMAINS, st.tuples(NAMES, DOMAINS).map("@".join))
ADDRESSES = st.tuples(
    st.sampled_from(["a", "A", "ab", "aab", '"a"', "c"]),
    st.sampled_from(["x.example", "X.example", "s.x.example", "t.s.x.example", "other.test"]),
).map("@".join)


@given(st.lists(st.lists(PATTERNS, min_size=1, max_size=3), max_size=6), ADDRESSES)
def test_it_is_the_first_whose_patterns_match(rules: list[list[str]], address: str) -> None:
    first = next((at for at, patterns in enumerate(rules, 1) if AddressPatterns(patterns).match(address)), 0)
    found = ClientRewrites(RewriteRules([rule(patterns) for patterns in rules]), LISTENER, "")
    assert found.find(RewriteScope.SENDER, Mailbox(address))[1] == first


@given(st.lists(PATTERNS, max_size=8), ADDRESSES)
def test_the_table_finds_all_patterns_that_match(patterns: list[str], address: str) -> None:
    table = AddressTable()
    for number, pattern in enumerate(patterns):
        table.add(pattern, number)
    wanted = [at for at, pattern in enumerate(patterns) if AddressPatterns([pattern]).match(address)]
    assert table.find(address) == wanted


def test_ten_thousand_rules_cost_what_ten_cost() -> None:
    def seconds(count: int) -> float:
        rules = [rule(f"n{n}@old{n % 50}.example", f"m{n}@new.example") for n in range(count)]
        rules += [rule("*", f"u{n}@new.example", user=f"u{n}") for n in range(count)]
        rewrites = ClientRewrites(RewriteRules(rules), LISTENER, "u7")
        times = []
        for _ in range(5):
            began = time.process_time()
            for _ in range(200):
                assert rewrites.find(RewriteScope.SENDER, Mailbox("n1@old1.example"))[1] == 2
            times.append(time.process_time() - began)
        return min(times)

    assert seconds(10_000) < 4 * seconds(10) + 0.001


# Recipients.


def transaction(recipients: list[Recipient], sender: str = "s@x.example") -> MailTransaction:
    made = MailTransaction(MailCommand(Mailbox(sender)), release=0.0, edits=NO_EDITS)
    made.recipients = {recipient_key(each.address): each for each in recipients}
    return made


def to(address: str, notify: Notify = Notify.UNSET, orcpt: str = "") -> Recipient:
    return Recipient(address=Mailbox(address), notify=notify, orcpt=orcpt)


def rewritten(rules: list[RewriteSettings], recipients: list[Recipient]) -> MailTransaction:
    made = transaction(recipients)
    RewriteRules(rules).rewrite(made, Origin(listener=LISTENER))
    return made


def test_an_original_recipient_beyond_ascii_is_of_type_utf8() -> None:
    made = rewritten([rule("old.example", "x@new.example")], [to("jü@old.example")])
    assert [each.orcpt for each in made.recipients.values()] == ["utf-8;j\\x{FC}@old.example"]


def test_zones_that_a_policy_chose_go_with_the_recipient_and_the_first_counts() -> None:
    made = transaction([to("a@old.example"), to("b@old.example"), to("c@x.example")])
    made.zones = {
        Mailbox("b@old.example"): "bulk",
        Mailbox("a@old.example"): "vip",
        Mailbox("c@x.example"): "z",
    }
    RewriteRules([rule("old.example", "desk@new.example")]).rewrite(made, Origin(listener=LISTENER))
    assert made.zones == {"desk@new.example": "vip", "c@x.example": "z"}
    assert [*made.recipients] == ["desk@new.example", "c@x.example"]


U, N, S, F, D = Notify.UNSET, Notify.NEVER, Notify.SUCCESS, Notify.FAILURE, Notify.DELAY
WISHES = [
    (U, U, U, "neither said anything"),
    (N, N, N, "neither wants to know"),
    (N, U, U, "one wants what is usual"),
    (U, N, U, "the other way round"),
    (S, N, S, "one wants to know"),
    (U, S, S | F | D, "what is usual, and success"),
    (S, U, S | F | D, "the other way round"),
    (S, F, S | F, "both"),
    (F | D, S, S | F | D, "all"),
]


@pytest.mark.parametrize(("one", "other", "wanted", "why"), WISHES, ids=[why for *_, why in WISHES])
def test_whoever_wants_to_be_told_is_told(one: Notify, other: Notify, wanted: Notify, why: str) -> None:
    assert transactions.wishes_of_both(one, other) == wanted


def test_notes_are_bounded() -> None:
    rules = [rule(f"old{n}.example", f"@new{n}.example") for n in range(40)]
    recipients = [to(f"{n}@old{n % 40}.example") for n in range(1000)]
    notes = [*rewritten(rules, recipients).rewriting_notes()]
    assert len(notes) == transactions.MAX_NOTES
    assert notes[0].startswith("rewritten recipient rewrite=1: 0@new0.example, 40@new0.example, ")
    assert notes[0].endswith(f" and {25 - transactions.MAX_NAMED} more")


@pytest.mark.parametrize(
    "to_", ["a b@x", "@", "x@", "@-x.example", "jü@x.example", "@" + "a" * 64 + ".example"]
)
def test_what_is_no_address_is_refused_when_the_rules_are_made(to_: str) -> None:
    with pytest.raises(ValueError, match=r"rewrite\[1\]: "):
        RewriteRules([rule("a"), rule("b", to_)])
    with pytest.raises(ValueError, match=r"rewrite\[0\]: .*cannot be matched"):
        RewriteRules([rule("a..b")])


# What is said about rules that never match


def noted(text: str) -> list[str]:
    return [
        line for line in advice(load_text(text), "relay.example.org") if "rewrite" in line or "srs" in line
    ]


def test_many_rules_are_compared_in_no_time() -> None:
    rules = [f'[[rewrite]]\naddress = ["{n}@old.example"]\nto = "@new.example"\n' for n in range(1500)]
    rules.insert(700, '[[rewrite]]\naddress = ["*"]\nto = "@new.example"\n')
    lines = noted("".join(rules))
    assert len(lines) == 800
    assert lines[0].startswith("rewrite[701]: never matches, because rewrite[700] ")
