"""[[credential]]: the logins at smarthosts, and the zones that use them.

No text in this module contains a secret.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zonerelay.config.endpoints import parse_next_hop, split_next_hops
from zonerelay.config.options import forms
from zonerelay.config.options import options as declare
from zonerelay.config.problems import Findings
from zonerelay.config.tables.zone import WEAK_TLS, TlsMode, ZoneSettings

_PASSWORDS_END = {
    "office365.com": (
        "Microsoft 365 disables password logins by default at the end of December 2026 (550 5.7.30)"
    ),
    "smtp-mail.outlook.com": "Outlook.com has not accepted passwords since September 2024",
}
"""Smarthosts, including their subdomains, that are ending logins by password. Microsoft: MC786329."""
_OAUTH_KEYS = ("client_id", "client_secret", "refresh_token", "scope")


class SaslMechanismName(enum.StrEnum):
    """The SASL mechanism for a login at a smarthost."""

    AUTO = "auto"
    PLAIN = "plain"
    LOGIN = "login"
    SCRAM_SHA_256 = "scram-sha-256"
    SCRAM_SHA_1 = "scram-sha-1"
    XOAUTH2 = "xoauth2"


class OauthGrant(enum.StrEnum):
    """The OAuth grant with which access tokens are requested."""

    REFRESH_TOKEN = "refresh_token"  # noqa: S105 - the name of a grant (RFC 6749 6), not a secret
    CLIENT_CREDENTIALS = "client_credentials"


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialSettings:
    """A login at a smarthost (docs/deliver/smarthosts.md). Zones name the credentials that they use. Secrets
    are never in this file.
    """

    name: str = declare.text("", form=forms.name)
    """The name of this credential in zones, logs and metrics."""
    sender: tuple[str, ...] = declare.texts((), form=forms.address_pattern)
    """Only for mail of these envelope senders: "user@example.com", "example.com", "*.example.com", "<>".
    Empty: for all mail. A zone uses the first of its credentials that matches.
    """
    user: str = declare.text("")
    """The user name at the smarthost."""
    password: str = declare.text("", form=forms.secret)
    """The place of the password: a file ("/etc/zonerelay/smarthost.password"), "env:NAME" (environment) or
    "credential:NAME" (systemd's LoadCredential), never the password itself.
    """
    mechanism: SaslMechanismName = declare.choice(SaslMechanismName.AUTO)
    """auto: the strongest that the smarthost offers of SCRAM-SHA-256, SCRAM-SHA-1, PLAIN and LOGIN, or
    xoauth2 if token_url is set. After a refused login, no other is tried.
    """
    token_url: str = declare.text("", form=forms.url)
    """XOAUTH2: the https:// URL from which access tokens are fetched."""
    grant: OauthGrant = declare.choice(OauthGrant.REFRESH_TOKEN)
    """XOAUTH2: refresh_token, for access that a user has granted, or client_credentials, for an application
    that an administrator has authorized.
    """
    client_id: str = declare.text("")
    """XOAUTH2: the application's id."""
    client_secret: str = declare.text("", form=forms.secret)
    """XOAUTH2: the place of the application's secret, as in password. Some applications need none."""
    refresh_token: str = declare.text("", form=forms.secret)
    """XOAUTH2: the place of the refresh token, as in password. A new one is written to the same file, or next
    to the spool if that is not possible.
    """
    scope: str = declare.text("")
    """XOAUTH2: the requested scope, as in "https://outlook.office365.com/.default"."""


def credential_problems(credential: CredentialSettings) -> Findings:
    if not credential.user:
        yield "user", "is missing: the name that the smarthost knows"
    if credential.token_url or credential.mechanism is SaslMechanismName.XOAUTH2:
        if credential.password:
            yield "password", "a password cannot be used with XOAUTH2; remove it"
        yield from _oauth_problems(credential)
        return
    if not credential.password:
        example = '"/etc/zonerelay/smarthost.password"'
        yield "password", f"is required: set it to the path of the secret, for example {example}"
    for key in _OAUTH_KEYS:
        if getattr(credential, key):
            yield key, "goes with token_url alone: write that, or leave this out"


def _oauth_problems(credential: CredentialSettings) -> Findings:
    if not credential.token_url:
        yield "token_url", "is missing: XOAUTH2 needs access tokens from somewhere"
        return
    if credential.mechanism not in {SaslMechanismName.AUTO, SaslMechanismName.XOAUTH2}:
        no_tokens = f"{credential.mechanism} does not support access tokens"
        yield "mechanism", f'{no_tokens}; use "xoauth2", or remove token_url'
    if not credential.client_id:
        yield "client_id", "is missing: the application's id at the token server"
    if credential.grant is OauthGrant.REFRESH_TOKEN and not credential.refresh_token:
        yield "refresh_token", "is missing: say where it is, or choose another grant"
    if credential.grant is OauthGrant.CLIENT_CREDENTIALS:
        if not credential.client_secret:
            yield "client_secret", "is missing: client_credentials are that"
        if credential.refresh_token:
            yield "refresh_token", "is not used with grant = client_credentials"


def login_problems(zone: ZoneSettings) -> Findings:
    """Yield the problems of a zone that logs in at its next hop."""
    if zone.credentials and not zone.next_hop:
        every = "would be sent to every MX host; set the zone's next_hop, or remove the credentials"
        yield "credentials", every, "credentials", "next_hop"
    if zone.credentials and zone.tls in WEAK_TLS:
        yield (
            "tls",
            f"is {zone.tls}, but credentials are never sent in clear text; use verify, or required if the "
            "next hop's certificate cannot be verified",
            "credentials",
        )


def credential_advice(credentials: Sequence[CredentialSettings], zones: Sequence[ZoneSettings]) -> Findings:
    used = {name for zone in zones for name in zone.credentials}
    for at, credential in enumerate(credentials):
        if credential.name not in used:
            yield ("credential", at), f"no zone logs in as {credential.name}"
    for_some = {credential.name for credential in credentials if credential.sender}
    for at, zone in enumerate(zones):
        if not zone.credentials:
            continue
        for name, host, why in passwords_that_end(credentials, zone):
            yield ("zone", at, "credentials"), f"{name} is a password for {host}: {why}"
        if zone.tls is TlsMode.REQUIRED:
            yield (
                ("zone", at, "tls"),
                "required: an attacker who can redirect its connections is shown the log-in; verify makes "
                "sure who the next hop is",
            )
        if for_some.issuperset(zone.credentials):
            yield (
                ("zone", at, "credentials"),
                "each is for some senders only; mail of all others, such as reports (<>), waits in this zone "
                "until it is too old",
            )


def passwords_that_end(
    credentials: Sequence[CredentialSettings], zone: ZoneSettings
) -> Iterator[tuple[str, str, str]]:
    """Yield credential, host and reason where a zone logs in with a password and the provider is ending
    password logins.
    """
    passwords = [each.name for each in credentials if each.name in zone.credentials and each.password]
    if not passwords:
        return
    hosts = [parse_next_hop(each).host for each in split_next_hops(zone.next_hop)]
    for host in hosts:
        for ending, why in _PASSWORDS_END.items():
            if f".{host}".endswith(f".{ending}"):
                for name in passwords:
                    yield name, host, f"{why}; use XOAUTH2 (token_url; docs/deliver/smarthosts.md)"
