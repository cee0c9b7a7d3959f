"""[[dkim]]: the keys that sign mail, and the zones that require a signature.

The keys themselves are read by `message.dkim`, which also remarks on their dates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.endpoints import is_domain
from zonerelay.config.options import forms
from zonerelay.config.options.forms import date_text
from zonerelay.config.options.options import date, path, text
from zonerelay.config.problems import Report
from zonerelay.config.tables.outbound.zone import DkimMode, ZoneSettings
from zonerelay.config.wording import quoted

MAX_KEY_FILE = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DkimSettings:
    """[[dkim]]: a signing key. Every entry whose domain and dates fit signs (RSA and Ed25519 together)."""

    domain: str = text("", form=forms.domain)
    """The domain in From whose mail is signed: "example.com", or "*.example.com" for every name below it. An
    entry for the very name goes before one with a wildcard.
    """
    selector: str = text("", form=forms.selector)
    """The key's name: its public half is at SELECTOR._domainkey.DOMAIN."""
    key_file: Path = path(Path())
    """The private key, PEM: RSA of at least 1024 bits (use 2048), or Ed25519."""
    signing_domain: str = text("", form=forms.domain)
    """The domain that signs (d=), if it is another one than that in From: with domain = "*.example.com",
    "example.com" needs one key record for all. Empty: the domain in From.
    """
    not_before: float = date()
    """Sign from this time on, so that a key can be published first. Empty: now."""
    not_after: float = date()
    """Sign until this time. Empty: for ever."""


NO_FILE = DkimSettings().key_file


def check_dkim(keys: Sequence[DkimSettings], zones: Sequence[ZoneSettings], report: Report) -> None:
    for at, key in enumerate(keys):
        if report.sound("dkim", at):
            _check_names(key, at, report)
            _check_file(key, at, report)
            _check_dates(key, at, report)
    _check_records(keys, report)
    if not keys and report.sound("dkim"):
        for at, zone in enumerate(zones):
            if zone.dkim is DkimMode.REQUIRED:
                text = "needs a [[dkim]] key: without any, all mail of this zone would wait"
                report.refuse(("zone", at, "dkim"), text)


def dkim_advice(keys: Sequence[DkimSettings], zones: Sequence[ZoneSettings], hostname: str) -> list[str]:
    """The relay's own reports have its name in From (message/dsn.py)."""
    if not keys or any(_covers(key.domain, hostname.lower()) for key in keys):
        return []
    return [
        f"zone[{at}].dkim: required: reports of this relay are from MAILER-DAEMON@{hostname}, for which "
        "there is no [[dkim]] key: in this zone they would wait"
        for at, zone in enumerate(zones)
        if zone.dkim is DkimMode.REQUIRED
    ]


def _covers(domain: str, name: str) -> bool:
    return name.endswith(domain[1:]) if domain.startswith("*.") else name == domain


def read_key_file(path: Path) -> bytes:
    """Raises OSError. What is longer than any key is cut off, and is no key then."""
    with path.open("rb") as file:
        return file.read(MAX_KEY_FILE)


def _check_names(key: DkimSettings, at: int, report: Report) -> None:
    if not key.domain:
        text = 'is missing: say whose mail is signed, as in "example.com" or "*.example.com"'
        report.refuse(("dkim", at, "domain"), text)
    elif not _is_name(key.domain.removeprefix("*.")):
        text = f'{quoted(key.domain)} is no domain that has a key: write "example.com" or "*.example.com"'
        report.refuse(("dkim", at, "domain"), text)
    if not key.selector:
        text = 'is missing: write what is before "._domainkey" in the name of its record: "s2026"'
        report.refuse(("dkim", at, "selector"), text)
    if key.signing_domain and not _is_name(key.signing_domain):
        text = f'{quoted(key.signing_domain)} is no domain to sign with: write one name, "example.com"'
        report.refuse(("dkim", at, "signing_domain"), text)


def _is_name(domain: str) -> bool:
    """No wildcard, no address literal; names beyond ASCII are converted, and checked, with the keys."""
    return is_domain(domain) if domain.isascii() else "*" not in domain


def _check_file(key: DkimSettings, at: int, report: Report) -> None:
    if key.key_file == NO_FILE:
        text = "is missing: say where the private key is; zonerelay dkim new makes one"
        report.refuse(("dkim", at, "key_file"), text)


def _check_dates(key: DkimSettings, at: int, report: Report) -> None:
    if key.not_after and key.not_after <= key.not_before:
        text = f"is not later than not_before = {date_text(key.not_before)}, so this key would never sign"
        report.refuse(("dkim", at, "not_after"), text)


def _check_records(keys: Sequence[DkimSettings], report: Report) -> None:
    """One selector of one domain is one record in DNS, and so one key."""
    taken: dict[tuple[str, str], int] = {}
    for at, key in enumerate(keys):
        domain = key.signing_domain or key.domain
        if not (domain and key.selector and report.sound("dkim", at)):
            continue
        there = taken.setdefault((domain, key.selector.lower()), at)
        other = keys[there]
        if there != at and (key.domain == other.domain or key.key_file != other.key_file):
            text = (
                f"{quoted(key.selector)} of {domain} is dkim[{there}] already, and a record in DNS has one "
                "key: give each its own selector"
            )
            report.refuse(("dkim", at, "selector"), text)
