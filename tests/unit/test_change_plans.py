"""What `explain` says of the changes that a zone makes, and of who signs its mail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.dkim import NOW, entry, keys_of
from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.settings import DkimMode, SrsSettings, ZoneSettings
from zonerelay.control.explain import change_plan, too_large_for
from zonerelay.message.dkim.keys import DkimKeys
from zonerelay.message.srs import Srs
from zonerelay.operations.answers import ChangePlan

SRS = Srs(SrsSettings(domain="srs.example.com"), ["sixteen octets !!"])
PLAIN = ZoneSettings()
OFF = ZoneSettings(dkim=DkimMode.OFF)
REQUIRED = ZoneSettings(dkim=DkimMode.REQUIRED)


def both() -> DkimKeys:
    return keys_of(entry("example.com", "s1"), entry("example.com", "s2", "ed.pem"))


def of(
    zone: ZoneSettings,
    sender: str = "app@example.com",
    *froms: str,
    keys: Callable[[], DkimKeys | None] = both,
) -> ChangePlan | None:
    headers = [("From", value) for value in froms]
    return change_plan(zone, sender, headers, keys=keys, srs=SRS, now=NOW)


def found(plan: ChangePlan | None) -> ChangePlan:
    assert plan is not None
    return plan


def test_the_keys_are_those_for_the_author() -> None:
    plan = found(of(PLAIN, "bounce@other.example", "Ann <ann@example.com>"))
    assert plan.signed_by == (
        "s1._domainkey.example.com (rsa-sha256)",
        "s2._domainkey.example.com (ed25519-sha256)",
    )
    assert (plan.author, plan.author_assumed, plan.unsigned) == ("example.com", False, "")


def test_without_a_from_the_sender_is_taken_for_the_author() -> None:
    plan = found(of(PLAIN))
    assert (plan.author, plan.author_assumed, len(plan.signed_by)) == ("example.com", True, 2)


@pytest.mark.parametrize(
    ("sender", "froms", "why"),
    [
        ("app@example.net", (), "no key for example.net"),
        ("app@example.com", ("x@other.example",), "no key for other.example"),
        ("app@example.com", ("a@example.com", "b@example.com"), "the From address is unknown"),
        ("", (), "the From address is unknown"),
    ],
)
def test_it_says_why_nothing_is_signed(sender: str, froms: tuple[str, ...], why: str) -> None:
    for zone in (PLAIN, REQUIRED):
        plan = found(of(zone, sender, *froms))
        assert (plan.signed_by, plan.unsigned) == ((), why)
        assert plan.must_sign is (zone is REQUIRED)


def test_a_zone_that_signs_nothing_and_changes_nothing_has_no_plan() -> None:
    assert of(OFF) is None
    assert of(PLAIN, keys=lambda: None) is None


def test_keys_that_cannot_be_read_are_said_to_be() -> None:
    def unreadable() -> DkimKeys:
        return keys_of(entry("example.com", "s1", "nowhere.pem"))

    assert "nowhere.pem cannot be read" in found(of(PLAIN, keys=unreadable)).unsigned


def test_srs_and_rules_are_shown() -> None:
    zone = ZoneSettings(dkim=DkimMode.OFF, srs=True, header_remove=("X-Mailer",), header_add=("X-A: b",))
    plan = found(of(zone, "ann@first.example"))
    assert plan.sender.endswith("=first.example=ann@srs.example.com")
    assert (plan.removed, plan.replaced, plan.added) == (("X-Mailer",), (), ("X-A: b",))
    assert found(of(zone, "")).sender == ""


def test_a_message_that_is_too_large_for_the_zone_is_named() -> None:
    zone = ZoneSettings(name="small", max_message_size=1024)
    assert too_large_for(zone, 1024) == too_large_for(zone, None) == too_large_for(PLAIN, 10**9) == ""
    assert too_large_for(zone, 1025).startswith("552 5.3.4 the message has 1025 bytes, but zone small")


@pytest.mark.parametrize("text", ["first\nsecond\n", "nul\0", "tab\t"])
def test_a_file_with_more_than_a_secret_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    with pytest.raises(SecretError, match="more than one line") as refused:
        read_secret(str(file), {})
    assert text[:3] not in str(refused.value).replace(str(file), "")
