"""Which addresses a pattern means: in access rules, in routes, and for the senders of a user."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.routing.zones.address_patterns import AddressPatterns

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


@given(pattern=st.text("ab*", max_size=8), text=st.text("ab", max_size=8))
def test_globs_match_as_a_regular_expression_would(pattern: str, text: str) -> None:
    expected = re.fullmatch(pattern.replace("*", "[ab]*"), text) is not None
    mailbox = f'"{text}"@x.example'
    assert AddressPatterns([f'"{pattern}"@x.example']).match(mailbox) is expected


def test_ten_thousand_patterns_cost_no_more_than_one() -> None:
    many = [f"user{n}@example{n}.com" for n in range(3_000)]
    many += [f"domain{n}.example" for n in range(3_000)] + [f"*.below{n}.example" for n in range(3_000)]
    many += [f"glob-*@globs{n}.example" for n in range(1_000)]
    patterns = AddressPatterns(many)

    def seconds(it: AddressPatterns) -> float:
        began = time.process_time()
        for _ in range(2000):
            it.match("nobody@some.where.example")
        return time.process_time() - began

    few = AddressPatterns([many[0], many[3_000], many[6_000], many[9_000]])
    assert min(seconds(patterns) for _ in range(5)) < 5 * min(seconds(few) for _ in range(5))
    assert patterns.match("glob-1@globs999.example")
    assert patterns.match("a@b.below2999.example")


def test_globs_of_one_domain_may_begin_with_texts_of_any_length() -> None:
    globs = [f"{'x' * n}-*@example.com" for n in (3, 0, 9, 1)]
    patterns = AddressPatterns([*globs, "*-z@example.com"])
    for glob in globs:
        assert patterns.find(glob.replace("*", "17")) == glob
    assert patterns.find("xx-17@example.com") == ""
    assert patterns.find("xx-z@example.com") == "*-z@example.com"


LOCALS = st.text("ab*", min_size=1, max_size=4)
LABELS = st.sampled_from(["a", "b"])
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
PATTERNS = st.one_of(
    NAMES,
    NAMES.map("*.{}".format),
    NAMES.map("@{}".format),
    st.sampled_from(["*", "<>", "a@*", "a*@*"]),
    st.builds("{}@{}".format, LOCALS, NAMES),
    st.builds("{}@*.{}".format, LOCALS, NAMES),
)
MAILBOXES = st.one_of(
    st.just(""), st.just("a"), st.builds("{}@{}".format, st.text("abAB", min_size=1, max_size=4), NAMES)
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
