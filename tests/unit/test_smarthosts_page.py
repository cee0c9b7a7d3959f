"""docs/deliver/smarthosts.md cannot drift: its examples load, its numbers and names are those of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from zonerelay.config.checks import advice
from zonerelay.config.endpoints import split_next_hops
from zonerelay.config.load import load_text
from zonerelay.config.settings import CredentialSettings, OauthGrant, RetrySettings
from zonerelay.delivery.auth import accounts
from zonerelay.delivery.auth.logins import senders_of, token_directory
from zonerelay.delivery.connection import session_limits as health
from zonerelay.smtp.client.sasl import PASSWORD_MECHANISMS

PAGE = (Path(__file__).parents[2] / "docs" / "deliver" / "smarthosts.md").read_text()
TEXT = " ".join(PAGE.split())
"""However its lines are broken."""
EXAMPLES = re.findall(r"^```toml\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_is_a_configuration_without_a_flaw(text: str) -> None:
    assert list(advice(load_text(text), "relay.example.org")) == []


def test_the_examples_are_what_the_page_is_about() -> None:
    hops, senders, microsoft, google, providers = map(load_text, EXAMPLES)
    assert len(split_next_hops(hops.zone[0].next_hop)) == 3
    patterns = senders_of(senders.credential)
    assert patterns["newsletter"].match("bounce-7@example.com")
    assert "main" not in patterns
    assert microsoft.credential[0].grant is OauthGrant.CLIENT_CREDENTIALS
    assert google.credential[0].grant is OauthGrant.REFRESH_TOKEN
    assert providers.zone[0].tls_on_connect


def test_every_option_is_explained() -> None:
    assert [each.name for each in fields(CredentialSettings) if each.name not in PAGE] == []
    for option in ("next_hop", "next_hop_share", "credentials", "tls_on_connect"):
        assert option in PAGE


def test_numbers_and_names_are_those_of_the_code() -> None:
    assert (health.FIRST_PAUSE, health.LONGEST_PAUSE) == (30, 600)
    assert "for 30 seconds" in TEXT
    assert (accounts.FIRST_PAUSE, accounts.LONGEST_PAUSE) == (300, 3600)
    assert "for 5 minutes, then 10, 20, 40, and then once an hour" in TEXT
    assert RetrySettings().suspend_max == 600
    assert "`suspend_max`, 10 minutes" in TEXT
    assert f"{', '.join(PASSWORD_MECHANISMS[:-1])} and {PASSWORD_MECHANISMS[-1]}" in TEXT
    assert token_directory(load_text("")).name == "refresh-tokens"
    assert "`refresh-tokens/` next to the spool" in TEXT
