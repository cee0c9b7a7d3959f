"""Which replies are about the address that we sent from, and which are about anything else."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from zonerelay.model.reply import Reply
from zonerelay.smtp.client import reputation
from zonerelay.smtp.client.replies import ReplyParser
from zonerelay.smtp.client.reputation import MAX_TEXT, NOT_OURS, TEXTS, TEXTS_BY_CODE, blames_address

DATA = Path(__file__).parents[1] / "data"


def reply(*lines: str) -> Reply:
    """As it comes from a peer."""
    parser = ReplyParser()
    parser.feed("".join(f"{line}\r\n" for line in lines).encode())
    found = parser.next_reply()
    assert found is not None
    return found


def replies(kind: str) -> list[ParameterSet]:
    """Replies of `tests/data/reputation_replies.txt`, each with the reason why it is there."""
    _, _, text = (DATA / "reputation_replies.txt").read_text().partition(f"=== {kind}\n")
    blocks = [block.splitlines() for block in text.partition("=== ")[0].split("--- ")[1:]]
    return [pytest.param(reply(*lines), id=why) for why, *lines in blocks]


BLAMED, NOT_BLAMED = replies("blamed"), replies("other")


@pytest.mark.parametrize("seen", BLAMED)
def test_a_reply_that_blames_our_address(seen: Reply) -> None:
    assert blames_address(seen)


@pytest.mark.parametrize(("code", "pattern"), [*(("", each) for each in TEXTS), *TEXTS_BY_CODE])
def test_every_row_of_the_tables_finds_a_reply_as_it_was_seen(code: str, pattern: str) -> None:
    for (seen,) in (each.values for each in BLAMED):
        assert isinstance(seen, Reply)
        text = re.sub(r"<[^<>]*>", " ", seen.text.lower()).replace("\n", " ")
        if re.search(pattern, text) and re.match(code, f"{seen.code} {seen.status}"):
            return
    pytest.fail("no reply")


@pytest.mark.parametrize("seen", NOT_BLAMED)
def test_a_reply_that_is_about_something_else(seen: Reply) -> None:
    assert not blames_address(seen)


@pytest.mark.parametrize("pattern", NOT_OURS)
def test_every_exception_keeps_a_reply_from_being_taken_for_a_blame(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = re.compile("|".join(each for each in NOT_OURS if each != pattern))
    monkeypatch.setattr(reputation, "_NOT_OURS", others)
    assert any(blames_address(seen) for (seen,) in (each.values for each in NOT_BLAMED))  # type: ignore[arg-type]  # a Reply


@pytest.mark.parametrize(
    "unit", ["<", "domain ", "ip address is ", "listed at ", "in an ", "192.0.2.1 ", "[", "a"]
)
def test_what_a_stranger_writes_costs_little(unit: str) -> None:
    long = Reply(550, "7.1", unit * (60_000 // len(unit)))
    began = time.perf_counter()
    blames_address(long)
    assert time.perf_counter() - began < 0.2
    assert len(long.text) > MAX_TEXT
