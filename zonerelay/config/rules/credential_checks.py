"""[[credential]], next hops and the zones that use them: what must hold, what may surprise, and the secrets.

No secret is in a text of this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zonerelay.config.credentials.secrets import SecretError, is_public, read_secret, secret_path
from zonerelay.config.options.endpoints import split_next_hops
from zonerelay.config.options.problems import Report
from zonerelay.config.options.toml_lines import KeyPath
from zonerelay.config.options.wording import did_you_mean, in_words, quoted
from zonerelay.config.settings import (
    CredentialSettings,
    DestinationTls,
    Mechanism,
    OauthGrant,
    Settings,
    TlsMode,
    ZoneSettings,
)

_WEAK = {TlsMode.NONE, TlsMode.OPPORTUNISTIC}
_WEAK_THERE = {DestinationTls.NONE, DestinationTls.OPPORTUNISTIC}
_OAUTH_KEYS = ("client_id", "client_secret", "refresh_token", "scope")


def check_credentials(settings: Settings, report: Report) -> None:
    _check_names(settings.credential, report)
    for at, credential in enumerate(settings.credential):
        path: KeyPath = ("credential", at)
        if report.sound(*path):
            _check_password(credential, path, report)
            _check_oauth(credential, path, report)
    for at, zone in enumerate(settings.zone):
        _check_next_hops(zone, ("zone", at), report)
        if zone.credentials and report.sound("zone", at, "credentials"):
            _check_zone(zone, ("zone", at), settings.credential, report)
    _check_destinations(settings, report)


def credential_advice(settings: Settings) -> Iterator[str]:
    used = {name for zone in settings.zone for name in zone.credentials}
    by_name = {credential.name: credential for credential in settings.credential}
    for at, credential in enumerate(settings.credential):
        if credential.name not in used:
            yield f"credential[{at}]: no zone logs in as {credential.name}"
    for at, zone in enumerate(settings.zone):
        if zone.next_hop_share and len(split_next_hops(zone.next_hop)) < 2:
            yield f"zone[{at}].next_hop_share: has no effect: there is one next hop, or none"
        if not zone.credentials:
            continue
        if zone.tls is TlsMode.REQUIRED:
            yield (
                f"zone[{at}].tls: required: whoever can redirect its connections is shown the log-in; "
                "verify makes sure who the next hop is"
            )
        if all(by_name[name].sender for name in zone.credentials if name in by_name):
            yield (
                f"zone[{at}].credentials: each is for some senders only; mail of all others, such as reports "
                "(<>), waits in this zone until it is too old"
            )


def try_credentials(settings: Settings, environment: Mapping[str, str], report: Report) -> Iterator[str]:
    """What a start would find out: are the secrets there. Notes; problems go into the report."""
    for at, credential in enumerate(settings.credential):
        for key in ("password", "client_secret", "refresh_token"):
            reference = getattr(credential, key)
            if reference:
                yield from _try(reference, ("credential", at, key), environment, report)


def _try(reference: str, path: KeyPath, environment: Mapping[str, str], report: Report) -> Iterator[str]:
    where = f"credential[{path[1]}].{path[2]}"
    try:
        read_secret(reference, environment)
        file = secret_path(reference, environment)
        if file is not None and is_public(file):
            yield f"{where}: every user of this machine can use {file}: chmod o-rwx it"
    except SecretError as error:
        if reference.startswith("/"):
            report.refuse(path, str(error))
        else:  # what the service is given need not be there in a terminal
            yield f"{where}: cannot be tried here: {error}"


def _check_names(credentials: Sequence[CredentialSettings], report: Report) -> None:
    first: dict[str, int] = {}
    for at, credential in enumerate(credentials):
        path: KeyPath = ("credential", at, "name")
        if not report.sound(*path):
            continue
        if not credential.name:
            report.refuse(path, "is missing: zones name the credentials that they log in with")
            continue
        there = first.setdefault(credential.name, at)
        if there != at:
            report.refuse(path, f"{quoted(credential.name)} is the name of credential[{there}] already")


def _check_password(credential: CredentialSettings, path: KeyPath, report: Report) -> None:
    if not credential.user:
        report.refuse((*path, "user"), "is missing: the name that the smarthost knows")
    if credential.token_url or credential.mechanism is Mechanism.XOAUTH2:
        if credential.password:
            text = "a password is not used with XOAUTH2: leave it out"
            report.refuse((*path, "password"), text)
    elif not credential.password:
        text = 'is missing: say where it is, as in "/etc/zonerelay/smarthost.password"'
        report.refuse((*path, "password"), text)


def _check_oauth(credential: CredentialSettings, path: KeyPath, report: Report) -> None:
    if not credential.token_url:
        if credential.mechanism is Mechanism.XOAUTH2:
            report.refuse((*path, "token_url"), "is missing: XOAUTH2 needs access tokens from somewhere")
            return
        for key in _OAUTH_KEYS:
            if getattr(credential, key):
                report.refuse((*path, key), "goes with token_url alone: write that, or leave this out")
        return
    if credential.mechanism not in {Mechanism.AUTO, Mechanism.XOAUTH2}:
        text = f'{credential.mechanism} does not take access tokens: write "xoauth2", or leave token_url out'
        report.refuse((*path, "mechanism"), text)
    if not credential.client_id:
        report.refuse((*path, "client_id"), "is missing: the application's id at the token server")
    if credential.grant is OauthGrant.REFRESH_TOKEN and not credential.refresh_token:
        report.refuse((*path, "refresh_token"), "is missing: say where it is, or choose another grant")
    if credential.grant is OauthGrant.CLIENT_CREDENTIALS:
        if not credential.client_secret:
            report.refuse((*path, "client_secret"), "is missing: client_credentials are that")
        if credential.refresh_token:
            report.refuse((*path, "refresh_token"), "is not used with grant = client_credentials")


def _check_next_hops(zone: ZoneSettings, path: KeyPath, report: Report) -> None:
    hops = split_next_hops(zone.next_hop)
    if len(hops) > 1 and report.sound(*path, "next_hop"):
        twice = next((hop for at, hop in enumerate(hops) if hop.lower() in map(str.lower, hops[:at])), None)
        if twice is not None:
            report.refuse((*path, "next_hop"), f"{twice} is in the list twice")


def _check_zone(
    zone: ZoneSettings, path: KeyPath, credentials: Sequence[CredentialSettings], report: Report
) -> None:
    if not zone.next_hop and report.sound(*path, "next_hop"):
        text = "would be shown to every MX host there is: give the zone a next_hop, or leave them out"
        report.refuse((*path, "credentials"), text)
    if zone.tls in _WEAK and report.sound(*path, "tls"):
        text = (
            f"is {zone.tls}, and credentials are never sent in clear text: write verify; or required, where "
            "the next hop's certificate cannot be verified"
        )
        report.refuse((*path, "tls"), text)
    names = [credential.name for credential in credentials]
    if not all(report.sound("credential", at, "name") for at in range(len(names))):
        return
    for index, name in enumerate(zone.credentials):
        if name not in names:
            near = did_you_mean(name, names) or (f"; there is {in_words(names)}" if names else "")
            text = f"no [[credential]] is named {quoted(name)}{near}"
            report.refuse((*path, "credentials", index), text)
        elif name in zone.credentials[:index]:
            report.refuse((*path, "credentials", index), f"{quoted(name)} is in the list twice")


def _check_destinations(settings: Settings, report: Report) -> None:
    """A [[destination]] that names a zone with credentials must not lower its TLS."""
    with_credentials = {zone.name for zone in settings.zone if zone.credentials}
    for at, entry in enumerate(settings.destination):
        path: KeyPath = ("destination", at, "tls")
        named = [name for name in entry.zone if name in with_credentials]
        if entry.tls in _WEAK_THERE and named and report.sound(*path):
            text = f"{entry.tls}: zone {named[0]} logs in, which is never done without TLS"
            report.refuse(path, text)
