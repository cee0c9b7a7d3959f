"""The settings for how mail leaves: [[source]], [[destination]], [[credential]]. Import from `models`."""

# ruff: noqa: RUF009  (the makers return dataclasses.field(), which is what that rule asks for)

from __future__ import annotations

import enum
from dataclasses import dataclass

from zonerelay.config.options.options import Form, choice, count, rate, text, texts
from zonerelay.config.options.units import Rate


class DestinationTls(enum.StrEnum):
    """As `TlsMode`, or what the zone says."""

    ZONE = "zone"
    NONE = "none"
    OPPORTUNISTIC = "opportunistic"
    REQUIRED = "required"
    VERIFY = "verify"
    DANE = "dane"


class Mechanism(enum.StrEnum):
    """How a credential is shown to a smarthost."""

    AUTO = "auto"
    PLAIN = "plain"
    LOGIN = "login"
    SCRAM_SHA_256 = "scram-sha-256"
    SCRAM_SHA_1 = "scram-sha-1"
    XOAUTH2 = "xoauth2"


class OauthGrant(enum.StrEnum):
    REFRESH_TOKEN = "refresh_token"  # noqa: S105 - the name of a grant (RFC 6749 6), not a secret
    CLIENT_CREDENTIALS = "client_credentials"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """[[source]]: one of this machine's identities; zones name those that they send from."""

    name: str = text("", "What zones, logs and metrics call this source.", form=Form.SOURCE_NAME)
    address: tuple[str, ...] = texts(
        (),
        "The addresses of this machine to send from: one of IPv4, one of IPv6, or both. With one only, hosts "
        "are reached over that family alone.",
        form=Form.IP_ADDRESSES,
    )
    ehlo_name: str = text(
        "",
        "The name to say in EHLO from these addresses; they should resolve back to it. Empty: the zone's.",
        form=Form.EHLO_NAME,
    )
    weight: int = count(
        1,
        "Its share of the mail, compared with the other sources of a zone. 0: none, while it is kept in the "
        "configuration.",
        least=0,
        most=1000,
        optional=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationSettings:
    """[[destination]]: other limits or TLS for some destinations; the first one that matches counts."""

    domain: tuple[str, ...] = texts(
        (),
        'Mail for these recipient domains: "example.com", "*.example.com" (every name below it).',
        form=Form.DOMAINS,
    )
    mx: tuple[str, ...] = texts(
        (),
        "Mail that goes to these MX hosts, or this next hop: written like domains, and all hosts have to "
        'match: "*.mail.protection.outlook.com" is every domain hosted there.',
        form=Form.DOMAINS,
    )
    zone: tuple[str, ...] = texts((), "Only mail of these zones. Empty: of any.")
    tls: DestinationTls = choice(
        DestinationTls.ZONE,
        "zone: what the zone says; otherwise as tls of [[zone]].",
    )
    tls_names: tuple[str, ...] = texts(
        (),
        'Names to accept in the certificate with tls = verify, instead of the host\'s: "example.com", '
        '"*.example.com".',
        form=Form.DOMAINS,
    )
    tls_certificates: tuple[str, ...] = texts(
        (),
        "With tls = verify: accept just these certificates, whoever signed them: SHA-256 fingerprints.",
        form=Form.FINGERPRINTS,
    )
    max_connections: int = count(
        0,
        "Connections to such a destination, instead of max_connections_per_destination. 0: as the zone.",
        optional=True,
        most=10_000,
    )
    max_recipients_per_transaction: int = count(
        0, "Recipients of one transaction. 0: as the zone.", optional=True, most=10_000
    )
    max_messages_per_connection: int = count(0, "Messages on one connection. 0: as the zone.", optional=True)
    max_rate: Rate | None = rate(
        'Transactions to such a destination in a time, instead of max_rate_per_destination: "100/1m". '
        "Empty: as the zone."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialSettings:
    """[[credential]]: how to log in at a smarthost; zones name those that they use. No secret is in here."""

    name: str = text("", "What zones, logs and metrics call this credential.", form=Form.SOURCE_NAME)
    sender: tuple[str, ...] = texts(
        (),
        'Only mail of these envelope senders: "user@example.com", "example.com", "*.example.com", '
        '"<>". Empty: any. A zone takes the first of its credentials that matches.',
        form=Form.ADDRESS_PATTERNS,
    )
    user: str = text("", "The user name that the smarthost knows.")
    password: str = text(
        "",
        'Where the password is: a file ("/etc/zonerelay/smarthost.password"), "env:NAME" (environment) or '
        '"credential:NAME" (systemd\'s LoadCredential). Never the password itself.',
        form=Form.SECRET,
    )
    mechanism: Mechanism = choice(
        Mechanism.AUTO,
        "auto: the strongest that the smarthost offers of SCRAM-SHA-256, SCRAM-SHA-1, PLAIN and LOGIN, or "
        "xoauth2 when token_url is given. One that was refused is not tried in another way.",
    )
    token_url: str = text("", "XOAUTH2: where access tokens are fetched, an https:// address.", form=Form.URL)
    grant: OauthGrant = choice(
        OauthGrant.REFRESH_TOKEN,
        "XOAUTH2: refresh_token, as a user has granted it once; or client_credentials, as an administrator "
        "allows an application.",
    )
    client_id: str = text("", "XOAUTH2: the application's id.")
    client_secret: str = text(
        "", "XOAUTH2: where the application's secret is, as in password. Some need none.", form=Form.SECRET
    )
    refresh_token: str = text(
        "",
        "XOAUTH2: where the refresh token is, as in password. A new one that the server gives is written to "
        "the same file, or kept beside the spool where that cannot be.",
        form=Form.SECRET,
    )
    scope: str = text("", 'XOAUTH2: what to ask for, as in "https://outlook.office365.com/.default".')
