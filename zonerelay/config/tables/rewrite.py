"""[[rewrite]], [srs] and [[dkim]]: address rewriting and the signing keys.

Rules cannot run in circles: an address is looked up once, and what it becomes is not looked up again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.endpoints import is_domain
from zonerelay.config.options import forms
from zonerelay.config.options import options as declare
from zonerelay.config.options.forms import date_text
from zonerelay.config.options.options import DAY, YEAR
from zonerelay.config.problems import Findings, quoted, unreachable
from zonerelay.config.tables.listener import ListenerAuth, ListenerSettings
from zonerelay.config.tables.zone import DkimMode, ZoneSettings

# [srs]: rewritten envelope senders, and their secrets. No text of this module has a secret, or its length.

MIN_SECRET = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SrsSettings:
    """SRS: rewritten sender addresses for forwarded mail, in zones with `srs = true`
    (docs/deliver/rewriting.md).
    """

    domain: str = declare.text("", form=forms.domain)
    """The domain of rewritten senders. Its MX must be this relay, and its SPF record must allow the relay's
    addresses.
    """
    secret: str = declare.text("", form=forms.secret, needs="domain")
    """The place of the secret for the hash in rewritten addresses, as in password of [[credential]]; at least
    16 characters.
    """
    old_secrets: tuple[str, ...] = declare.texts((), form=forms.secret)
    """The places of former secrets, which are still accepted."""
    local_domains: tuple[str, ...] = declare.texts((), form=forms.domain)
    """Senders in these domains are not rewritten, because their SPF records allow this relay."""
    max_age: float = declare.duration(21 * DAY, least=DAY, most=YEAR)
    """How long bounces to a rewritten sender are accepted."""
    accept_legacy: bool = declare.switch(False)
    """Accept bounces to addresses in the form of postsrsd, libsrs2 and Mail::SRS, whose short hash can be
    guessed, for max_age after a migration.
    """


def srs_problems(srs: SrsSettings) -> Findings:
    if srs.domain and not is_domain(srs.domain):
        example = 'expected a name such as "srs.example.com"'
        yield "domain", f"{quoted(srs.domain)} is not a domain name; {example}"
    if srs.domain and not srs.secret:
        yield "secret", 'is required: set it to a path such as "/etc/zonerelay/srs.secret"'
    if "*" in srs.local_domains:
        every = '"*" matches every sender; remove srs = true from the zones instead'
        yield ("local_domains", srs.local_domains.index("*")), every


def srs_advice(srs: SrsSettings, listeners: Sequence[ListenerSettings]) -> Findings:
    if srs.domain and all(each.auth is ListenerAuth.REQUIRED for each in listeners):
        yield "domain", 'bounces to rewritten senders are rejected: all listeners have auth = "required"'


def dkim_problems(key: DkimSettings) -> Findings:
    if key.domain and not _is_name(key.domain.removeprefix("*.")):
        yield "domain", f'{quoted(key.domain)} is not a domain; expected "example.com" or "*.example.com"'
    if key.signing_domain and not _is_name(key.signing_domain):
        example = 'expected a single name such as "example.com"'
        yield "signing_domain", f"{quoted(key.signing_domain)} is not a signing domain; {example}"
    if key.not_after and key.not_after <= key.not_before:
        start = f"not_before = {date_text(key.not_before)}"
        yield "not_after", f"is not after {start}, so this key would never be used"


def srs_secrets(srs: SrsSettings, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the SRS secrets: the current one, which signs, and then the old ones. Raise ValueError with the
    option's path if one cannot be read.
    """
    places = {"srs.secret": srs.secret}
    places |= {f"srs.old_secrets[{at}]": place for at, place in enumerate(srs.old_secrets)}
    found: list[str] = []
    for option, place in places.items():
        try:
            found.append(read_secret(place, environment))
            check_srs_secret(place, found[-1])
        except SecretError as error:
            raise ValueError(f"{option}: {error}") from error
    return tuple(found)


def check_srs_secret(place: str, secret: str) -> None:
    """Raise SecretError if the SRS secret is too short."""
    if len(secret) < MIN_SECRET:
        raise SecretError(f"{place} has fewer than {MIN_SECRET} characters")


# [[dkim]]: the keys that sign mail, and the zones that require a signature.
#
# The keys themselves are read by `message.dkim`, which also remarks on their dates.

MAX_KEY_FILE = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DkimSettings:
    """A DKIM signing key (docs/deliver/dkim.md). Every entry whose domain and dates fit signs, RSA and
    Ed25519 together.
    """

    domain: str = declare.text("", form=forms.domain, required=True)
    """The domain in From whose mail is signed: "example.com", or "*.example.com" for every subdomain. An
    exact entry takes precedence over a wildcard.
    """
    selector: str = declare.text("", form=forms.selector, required=True)
    """The selector: the public key is published at SELECTOR._domainkey.DOMAIN."""
    key_file: Path = declare.path(Path())
    """The private key in PEM format: RSA with at least 1024 bits (2048 recommended), or Ed25519."""
    signing_domain: str = declare.text("", form=forms.domain)
    """The signing domain (d=), if it differs from the domain in From: "example.com" for domain =
    "*.example.com" needs only one DNS record.
    """
    not_before: float = declare.date()
    """The time from which the key signs. Empty: now."""
    not_after: float = declare.date()
    """The time until which the key signs. Empty: no limit."""


def dkim_advice(keys: Sequence[DkimSettings], zones: Sequence[ZoneSettings], hostname: str) -> Findings:
    """Yield warnings if DSNs could not be signed, because no DKIM key is for the relay's host name. The From
    field of the relay's own DSNs has its host name (message/dsn.py).
    """
    if keys and not any(_covers_dkim(key.domain, hostname.lower()) for key in keys):
        for at, zone in enumerate(zones):
            if zone.dkim is DkimMode.REQUIRED:
                bounces = f"bounces from MAILER-DAEMON@{hostname} would be deferred"
                yield (at, "dkim"), f"required: {bounces}, because no [[dkim]] key is for this domain"


def record_problems(keys: Sequence[DkimSettings]) -> Findings:
    """Yield problems of DKIM keys that have the same selector and domain, and so the same DNS record."""
    taken: dict[tuple[str, str], int] = {}
    for at, key in enumerate(keys):
        domain = key.signing_domain or key.domain
        there = taken.setdefault((domain, key.selector.lower()), at)
        other = keys[there]
        differs = key.domain == other.domain or key.key_file != other.key_file
        if domain and key.selector and there != at and differs:
            used = f"{quoted(key.selector)} of {domain} is already used by dkim[{there}]"
            yield (at, "selector"), f"{used}; each key needs its own selector"


def rewrite_problems(rule: RewriteSettings) -> Findings:
    if _NULL_SENDER in rule.address:
        never = '"<>" never matches: the null sender of bounces is not rewritten'
        yield ("address", rule.address.index(_NULL_SENDER)), never


def _covers_dkim(domain: str, name: str) -> bool:
    return name.endswith(domain[1:]) if domain.startswith("*.") else name == domain


def read_key_file(path: Path) -> bytes:
    """Read the file of a private key. Raise OSError if that fails. A file that is longer than any key is cut
    off, and so is not a valid key.
    """
    with path.open("rb") as file:
        return file.read(MAX_KEY_FILE)


def _is_name(domain: str) -> bool:
    """Return whether a domain pattern has no wildcard. Non-ASCII names are converted and checked with the
    keys.
    """
    return is_domain(domain) if domain.isascii() else "*" not in domain


_NULL_SENDER = "<>"


class RewriteScope(enum.StrEnum):
    """The addresses to which a [[rewrite]] applies."""

    ALL = "all"
    ENVELOPE = "envelope"
    SENDER = "sender"
    RECIPIENT = "recipient"
    HEADER = "header"

    @property
    def kinds(self) -> frozenset[RewriteScope]:
        """The kinds of addresses to which the rule applies: SENDER, RECIPIENT and HEADER."""
        envelope = frozenset((RewriteScope.SENDER, RewriteScope.RECIPIENT))
        several = {RewriteScope.ENVELOPE: envelope, RewriteScope.ALL: envelope | {RewriteScope.HEADER}}
        return several.get(self, frozenset((self,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteSettings:
    """A rule that rewrites addresses of incoming mail (docs/deliver/rewriting.md). The first entry that
    matches an address counts.
    """

    address: tuple[str, ...] = declare.texts((), form=forms.address_pattern, required=True)
    """The addresses to change: "user@old.example", "old.example" (every user), "*.old.example",
    "app-*@example.com".
    """
    to: str = declare.text("", form=forms.replacement, required=True)
    """The new address: "user@example.com", or "@example.com" to keep the local part."""
    where: RewriteScope = declare.choice(RewriteScope.ALL)
    """sender, recipient: that envelope address. envelope: both. header: From, Sender, Reply-To, To and Cc.
    all: everywhere.
    """
    user: tuple[str, ...] = declare.texts(())
    """Only mail of these authenticated users; "*" is any user."""
    listener: tuple[str, ...] = declare.texts((), form=forms.listen)
    """Only mail accepted by these listeners, by their addresses."""

    @property
    def conditions(self) -> dict[str, frozenset[str]]:
        """The values of each condition of the rule, by the name of the option."""
        kinds = () if self.where is RewriteScope.ALL else self.where.kinds
        named = {"address": self.address, "where": kinds, "user": self.user, "listener": self.listener}
        return {name: frozenset(values) for name, values in named.items() if values}


def rewrite_advice(rules: Sequence[RewriteSettings]) -> Findings:
    for at, other in unreachable([rule.conditions for rule in rules]):
        yield (at,), f"never matches, because rewrite[{other}] comes first and matches all its addresses"
