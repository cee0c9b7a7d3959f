"""Checks docs/deliver/sending.md: its files load, its pages exist, its replies are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zonerelay.config.checks import advice
from zonerelay.config.load import load_text
from zonerelay.config.settings import Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deliver" / "sending.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```toml\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)
CODE = " ".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "zonerelay").rglob("*.py")))


@pytest.mark.parametrize("text", EXAMPLES, ids=["smarthost", "direct", "forwarder"])
def test_every_file_is_a_configuration_without_a_flaw(text: str) -> None:
    settings = load_text(text)
    assert list(advice(settings, settings.hostname)) == []
    assert all(not listener.unsafe for listener in settings.listener)


def test_the_files_are_what_the_page_says() -> None:
    smarthost, direct, forwarder = map(load_text, EXAMPLES)
    assert smarthost.zone[0].credentials == (smarthost.credential[0].name,)
    assert all(zone.mta_sts and zone.dane and zone.sources for zone in direct.zone)
    assert direct.dkim
    assert forwarder.zone[0].srs
    assert forwarder.srs.domain


def test_every_table_of_the_sending_side_is_in_the_overview() -> None:
    overview = PAGE.partition("## Three whole files")[0]
    for name in ("zone", "route", "source", "destination", "credential", "dkim", "rewrite", "srs", "retry"):
        assert hasattr(Settings(), name)
        assert f"[{name}]" in overview


def test_every_page_and_section_that_it_links_exists() -> None:
    for page, anchor in re.findall(r"\]\(([a-z/.-]+\.md)(?:#([a-z-]+))?\)", PAGE):
        text = (ROOT / "docs" / "deliver" / page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        slugs = {re.sub(r"[^a-z -]", "", each.lower()).replace(" ", "-") for each in headings}
        assert not anchor or anchor in slugs, f"{page}#{anchor}"


@pytest.mark.parametrize(
    "words",
    [
        "waits for its turn at a rate",
        "delivery temporarily suspended: ",
        "cannot log in",
        "no credential of zone ",
        " is for this sender",
        " requires a DKIM signature: ",
        "will be tried from another source",
        "refused us at ",
        "allows none of its MX hosts",
        "has the private address ",
        "cannot be used: ",
        "login-refused",
        "login-broken",
        "dkim-missing",
        "source-refused",
        "source-absent",
    ],
)
def test_what_the_table_quotes_is_what_the_relay_says(words: str) -> None:
    assert words.rstrip(": ") in PAGE
    assert words in CODE
