"""MTA-STS as texts: the TXT record, the policy, which hosts are in it (RFC 8461 3 and 4.1)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.routing.mta_sts import (
    MAX_LIFE,
    MAX_PATTERNS,
    MIN_LIFE,
    CachedPolicy,
    StsMode,
    StsPolicy,
    parse_policy,
    record_id,
)

DAY = 86_400
GOOD = "version: STSv1\nmode: enforce\nmx: mx1.example.com\nmx: *.example.net\nmax_age: 604800\n"


def policy(*patterns: str, mode: StsMode = StsMode.ENFORCE, max_age: int = DAY) -> StsPolicy:
    return StsPolicy(mode, patterns, max_age)


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (["v=STSv1; id=20260101T000000;"], "20260101T000000"),
        (["v=STSv1;id=a"], "a"),
        (["v=STSv1 ; id=abc ; note=more; x-y.z_1=*"], "abc"),
        (["v=spf1 -all", "v=STSv1; id=1;", "v=STSv2; id=2;"], "1"),
        ([], ""),
        (["v=STSv1; id=1;", "v=STSv1; id=2;"], ""),  # RFC 8461 3.1: one, or none
        (["v=STSv1;"], ""),
        (["v=STSv1; id=;"], ""),
        (["v=STSv1; id=1; id=2;"], ""),
        (["v=STSv1; id=" + "1" * 33], ""),
        (["v=STSv1; id=2026-01-01;"], ""),
        (["v=STSv1; nonsense; id=1"], ""),
        (["V=STSv1; id=1"], ""),
        ([" v=STSv1; id=1"], ""),
        (["v=STSv12; id=1"], ""),
    ],
)
def test_a_record_has_one_id_or_says_nothing(texts: list[str], wanted: str) -> None:
    assert record_id(texts) == wanted


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_policy_is_read_with_either_line_end(ends: str) -> None:
    found = parse_policy(GOOD.replace("\n", ends).encode())
    assert found == policy("mx1.example.com", "*.example.net", max_age=604_800)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("version: STSv1\nmode: none\nmax_age: 0", policy(mode=StsMode.NONE, max_age=0)),
        # Of fields that are there twice the first counts, and what nobody knows is passed over.
        (
            "mode:testing\nmode: enforce\nversion: STSv1\t\nmx:a.example\nnew: 1\nmax_age:10\nmax_age:2\n\n",
            policy("a.example", mode=StsMode.TESTING, max_age=10),
        ),
        (GOOD.replace("604800", "9999999999"), policy("mx1.example.com", "*.example.net", max_age=MAX_LIFE)),
        (
            GOOD.replace("mx1.example.com", "MX1.Bücher.example"),
            policy("mx1.xn--bcher-kva.example", "*.example.net", max_age=604_800),
        ),
    ],
)
def test_a_policy_may_be_written_in_many_ways(text: str, wanted: StsPolicy) -> None:
    assert parse_policy(text.encode()) == wanted


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "version"),
        ("<html>", "invalid line"),
        (GOOD.replace("STSv1", "STSv2"), "version"),
        (GOOD.replace("enforce", "Enforce"), "mode"),
        (GOOD.replace("mode: enforce\n", ""), "mode"),
        (GOOD.replace("604800", "-1"), "max_age"),
        (GOOD.replace("604800", "7d"), "max_age"),
        (GOOD.replace("604800", "12345678901"), "max_age"),
        (GOOD.replace("mx: *.example.net", "mx: .example.net"), "not a host name"),
        (GOOD.replace("mx: *.example.net", "mx: *.*.example.net"), "not a host name"),
        (GOOD.replace("mx: *.example.net", "mx: m*.example.net"), "not a host name"),
        ("version: STSv1\nmode: testing\nmax_age: 10\n", "the policy contains no mx"),
        (GOOD + "mx: m.example\n" * MAX_PATTERNS, "more than"),
    ],
)
def test_what_is_no_policy_is_refused_in_words(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_policy(text.encode())


def test_octets_that_are_no_text_are_refused() -> None:
    with pytest.raises(ValueError, match="UTF-8"):
        parse_policy(GOOD.encode() + b"\xff")


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("mx1.example.com", True),
        ("mx2.example.com", False),
        ("a.example.net", True),
        ("a.b.example.net", False),  # one label, RFC 8461 4.1
        ("example.net", False),
        (".example.net", False),
        ("net", False),
    ],
)
def test_a_wildcard_stands_for_one_label(host: str, *, allowed: bool) -> None:
    assert policy("mx1.example.com", "*.example.net").allows(host) is allowed


@pytest.mark.parametrize(
    ("max_age", "refresh", "expires"),
    [(7 * DAY, DAY, 7 * DAY), (DAY, DAY / 2, DAY), (0, MIN_LIFE / 2, MIN_LIFE)],
)
def test_a_policy_is_refreshed_after_a_day_or_half_its_life(
    max_age: int, refresh: float, expires: float
) -> None:
    held = CachedPolicy.of("example.com", "1", policy("a.example", max_age=max_age), fetched=1000.0)
    assert (held.refresh_from, held.expires) == (1000 + refresh, 1000 + expires)


PIECES = st.sampled_from(
    ["version:", " STSv1", "mode:", "enforce", "mx:", "*.", "a.example", "max_age:", "9", "\n", "\r"]
)


@given(
    st.one_of(
        st.binary(max_size=200), st.lists(PIECES, max_size=30).map(lambda parts: "".join(parts).encode())
    )
)
def test_whatever_a_server_sends_is_a_policy_or_is_refused(body: bytes) -> None:
    try:
        found = parse_policy(body)
    except ValueError as error:
        complaint = str(error)
    else:
        complaint = ""
        assert 0 <= found.max_age <= MAX_LIFE
        assert found.patterns or found.mode is StsMode.NONE
    assert len(complaint) < 200


@given(st.lists(st.text(max_size=60).map(lambda text: f"v=STSv1;{text}"), max_size=2))
def test_whatever_is_in_a_record_is_an_id_or_none(texts: list[str]) -> None:
    found = record_id(texts)
    assert found == "" or found.isalnum()
