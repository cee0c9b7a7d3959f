"""[srs]: rewritten envelope senders, their secrets, and the time at which their present form was taken up.

A file beside the spool says when a version with the present form of rewritten senders first ran here: for
`max_age` from then on, senders in the old form may still get reports. No secret is in a text of this module,
nor how long one is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zonerelay import durable
from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.endpoints import is_domain
from zonerelay.config.options import forms
from zonerelay.config.options.options import DAY, YEAR, duration, switch, text, texts
from zonerelay.config.problems import Report
from zonerelay.config.tables.inbound.listener import ListenerAuth, ListenerSettings
from zonerelay.config.tables.outbound.zone import ZoneSettings
from zonerelay.config.wording import quoted

MIN_SECRET = 16
NOTE = "srs-form"


@dataclass(frozen=True, slots=True, kw_only=True)
class SrsSettings:
    """[srs]: the sender rewriting scheme, for zones with srs = true. `domain` empty: off."""

    domain: str = text("", form=forms.domain)
    """The domain of rewritten senders: a name whose MX is this relay and whose SPF record allows its
    addresses. Reports to such addresses are taken from every client, and go to the first sender.
    """
    secret: str = text("", form=forms.secret)
    """Where the secret is that signs such addresses, as in password of [[credential]]; at least 16
    characters.
    """
    old_secrets: tuple[str, ...] = texts((), form=forms.secret)
    """Where former secrets are, which are still accepted."""
    local_domains: tuple[str, ...] = texts((), form=forms.domain)
    """Senders in these domains are not rewritten: their SPF records allow this relay. "example.com",
    "*.example.com".
    """
    max_age: float = duration(21 * DAY, least=DAY, most=YEAR)
    """How long reports to a rewritten sender are taken."""
    accept_legacy: bool = switch(False)
    """Take reports to senders in the form of postsrsd, libsrs2 and Mail::SRS, whose short hash can be
    guessed: for max_age after taking over from one of these. After an upgrade from a version of this relay
    with that form it is done without asking.
    """


def check_srs(srs: SrsSettings, zones: Sequence[ZoneSettings], report: Report) -> None:
    if not report.sound("srs"):
        return
    if srs.domain:
        if not is_domain(srs.domain):
            text = f'{quoted(srs.domain)} is no name of a domain: write "srs.example.com"'
            report.refuse(("srs", "domain"), text)
        if not srs.secret:
            report.refuse(("srs", "secret"), 'is missing: say where it is, as in "/etc/zonerelay/srs.secret"')
    elif srs.secret:
        text = "is missing: rewritten senders need a domain whose mail comes to this relay"
        report.refuse(("srs", "domain"), text)
    for at, domain in enumerate(srs.local_domains):
        if domain == "*":
            text = '"*" is every sender: leave srs = true out of the zones instead'
            report.refuse(("srs", "local_domains", at), text)
    if not srs.domain:
        for at, zone in enumerate(zones):
            if zone.srs:
                report.refuse(("zone", at, "srs"), "needs [srs] with a domain and a secret")


def srs_advice(srs: SrsSettings, listeners: Sequence[ListenerSettings]) -> Iterator[str]:
    if srs.domain and all(each.auth is ListenerAuth.REQUIRED for each in listeners):
        yield (
            "srs.domain: reports to rewritten senders cannot come in: they are from strangers, and every "
            'listener has auth = "required"'
        )


def srs_secrets(srs: SrsSettings, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The one that signs, then the former ones. Raises ValueError with the option's path."""
    places = [("srs.secret", srs.secret)]
    places += [(f"srs.old_secrets[{at}]", place) for at, place in enumerate(srs.old_secrets)]
    return tuple(_read(path, place, environment) for path, place in places)


def note_upgrade(spool: Path, now: float) -> None:
    """Before anything else is written beside the spool, or a first start would look like an upgrade: 0 stands
    for a machine that has no senders in the old form. Raises OSError.
    """
    note = spool.with_name(NOTE)
    if note.exists():
        return
    ran_before = spool.with_name("redact.key").exists() or (spool.is_dir() and any(spool.iterdir()))
    durable.create(note, f"{now if ran_before else 0:.0f}\n".encode(), mode=0o644)


def upgraded_at(spool: Path) -> float:
    """Unix time; 0.0 for never, and where the file says nothing."""
    try:
        return float(spool.with_name(NOTE).read_text())
    except (OSError, ValueError):
        return 0.0


def try_srs(srs: SrsSettings, environment: Mapping[str, str], report: Report) -> None:
    """Refuses a secret that a start could not read or would find too short."""
    if srs.domain:
        _try(("srs", "secret"), srs.secret, environment, report)
        for at, place in enumerate(srs.old_secrets):
            _try(("srs", "old_secrets", at), place, environment, report)


def _try(path: tuple[str | int, ...], place: str, environment: Mapping[str, str], report: Report) -> None:
    try:
        _read("", place, environment)
    except ValueError as error:
        report.refuse(path, str(error))


def _read(path: str, place: str, environment: Mapping[str, str]) -> str:
    prefix = f"{path}: " if path else ""
    try:
        secret = read_secret(place, environment)
    except SecretError as error:
        raise ValueError(f"{prefix}{error}") from error
    if len(secret) < MIN_SECRET:
        raise ValueError(f"{prefix}{place} holds fewer than {MIN_SECRET} characters")
    return secret
