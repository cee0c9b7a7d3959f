"""The settings, one frozen class per TOML table, each option with its default and the reason for it.

The loader, the error messages and the check of `config/zonerelay.toml` are derived from here; the
text of an option is the comment that stands above it there, so it is written for an operator.
Durations are seconds (float), sizes are octets (int). A key that is not a field here is an error.
"""

# ruff: noqa: RUF009  (the makers return dataclasses.field(), which is what that rule asks for)

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from zonerelay.config.options.options import (
    DAY,
    HOUR,
    KB,
    MB,
    MINUTE,
    Form,
    choice,
    duration,
    optional_path,
    size,
    switch,
    text,
    texts,
    workers,
)
from zonerelay.config.tables.access import AccessAction, AccessSettings, AuthSettings
from zonerelay.config.tables.attempts import (
    BounceSettings,
    DeliverySettings,
    DnsSettings,
    RetryPolicyName,
    RetrySettings,
)
from zonerelay.config.tables.intake import (
    CLEARTEXT_AUTH_WORDS,
    LOSS_WORDS,
    OPEN_RELAY_WORDS,
    Backend,
    BareLineEnds,
    HeaderControls,
    ListenerAuth,
    ListenerSettings,
    ListenerTls,
    Network,
    RedisSettings,
    SpoolSettings,
)
from zonerelay.config.tables.outbound import (
    CredentialSettings,
    DestinationSettings,
    DestinationTls,
    Mechanism,
    OauthGrant,
    SourceSettings,
)
from zonerelay.config.tables.outbox import OutboxSettings
from zonerelay.config.tables.postgres import PostgresSettings
from zonerelay.config.tables.rewriting import DkimSettings, RewriteSettings, RewriteWhere, SrsSettings
from zonerelay.config.tables.s3 import Addressing, S3Settings
from zonerelay.config.tables.sending import DkimMode, InDoubt, RouteSettings, SourceBy, TlsMode, ZoneSettings
from zonerelay.model.priority import Priority

__all__ = [
    "CLEARTEXT_AUTH_WORDS",
    "DAY",
    "HOUR",
    "KB",
    "LOSS_WORDS",
    "MB",
    "MINUTE",
    "OPEN_RELAY_WORDS",
    "REPEATED",
    "TABLES",
    "AccessAction",
    "AccessSettings",
    "Addressing",
    "AdminSettings",
    "AuthSettings",
    "Backend",
    "BareLineEnds",
    "BounceSettings",
    "CredentialSettings",
    "DeliverySettings",
    "DestinationSettings",
    "DestinationTls",
    "DkimMode",
    "DkimSettings",
    "DnsSettings",
    "HeaderControls",
    "InDoubt",
    "ListenerAuth",
    "ListenerSettings",
    "ListenerTls",
    "LogFormat",
    "LogSettings",
    "Mechanism",
    "Network",
    "OauthGrant",
    "OutboxSettings",
    "PostgresSettings",
    "Priority",
    "RedisSettings",
    "RetryPolicyName",
    "RetrySettings",
    "RewriteSettings",
    "RewriteWhere",
    "RouteSettings",
    "S3Settings",
    "Settings",
    "SourceBy",
    "SourceSettings",
    "SpoolSettings",
    "SrsSettings",
    "Table",
    "TlsMode",
    "ZoneSettings",
]


class LogFormat(enum.StrEnum):
    JSON = "json"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """[log]"""

    format: LogFormat = choice(
        LogFormat.JSON, "json: one object per line for collectors; text: key=value for people. On stderr."
    )
    redact: bool = switch(
        True,
        "Replace addresses in log text by stable pseudonyms (a keyed hash), so that logs hold no personal "
        "data and can still be searched.",
    )
    redact_key_file: Path | None = optional_path(
        "The key of those pseudonyms. Empty: a key of its own, made beside the spool. Share one file "
        "between machines whose logs are to be joined."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSettings:
    """[admin]. `address` empty: no HTTP at all. `socket` empty: `control.sock` beside the spool."""

    address: str = text(
        "127.0.0.1:8025",
        "HTTP: /metrics, /healthz, /readyz. Empty: none at all.",
        form=Form.LISTEN,
        optional=True,
    )
    hosts: tuple[str, ...] = texts(
        (),
        'Names by which HTTP may be asked for besides localhost and addresses ("*.example.org": every name '
        "below it), so that no web page comes here under a name of its own. On another address than loopback "
        "/metrics, /healthz and /readyz answer to every name.",
        form=Form.DOMAINS,
    )
    token_file: Path | None = optional_path(
        "A file with the bearer token for writes over HTTP. There are none yet: nothing reads it."
    )
    socket: Path | None = optional_path(
        "The Unix socket that the command line talks to; its file rights decide who may. Empty: "
        "control.sock beside the spool."
    )


Table = (
    SpoolSettings
    | RedisSettings
    | PostgresSettings
    | S3Settings
    | OutboxSettings
    | ListenerSettings
    | AuthSettings
    | AccessSettings
    | ZoneSettings
    | RouteSettings
    | SourceSettings
    | DestinationSettings
    | CredentialSettings
    | DkimSettings
    | SrsSettings
    | RewriteSettings
    | RetrySettings
    | BounceSettings
    | DeliverySettings
    | DnsSettings
    | LogSettings
    | AdminSettings
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The whole file. `hostname` empty: the machine's fully qualified name."""

    hostname: str = text(
        "",
        "The name this relay calls itself in EHLO, in greetings and in Received fields; its address "
        "should resolve back to it. Empty: the machine's fully qualified name.",
        form=Form.EHLO_NAME,
    )
    workers: int = workers(
        1,
        'Processes that share the work, each with a spool of its own: a number, or "auto" for one per core '
        "that the relay may use. More than one are looked after by a supervisor (docs/workers.md).",
    )
    worker_timeout: float = duration(
        20.0,
        "With several workers: one that gives no sign of life for so long is replaced.",
        least=1.0,
        most=HOUR,
    )
    shutdown_timeout: float = duration(
        30.0,
        "How long a stopping relay waits for what is in flight. What is cut off is tried again at the "
        "next start, so a longer wait avoids duplicates.",
        most=HOUR,
    )
    max_session_memory: int = size(
        256 * MB,
        "What all client connections together may hold in memory. Near it new connections are answered "
        "421; at it the connection that holds most is ended.",
        least=16 * MB,
    )
    spool: SpoolSettings = field(default_factory=SpoolSettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    postgres: PostgresSettings = field(default_factory=PostgresSettings)
    s3: S3Settings = field(default_factory=S3Settings)
    outbox: OutboxSettings = field(default_factory=OutboxSettings)
    listener: tuple[ListenerSettings, ...] = (ListenerSettings(),)
    auth: AuthSettings = field(default_factory=AuthSettings)
    access: tuple[AccessSettings, ...] = ()
    zone: tuple[ZoneSettings, ...] = (ZoneSettings(),)
    route: tuple[RouteSettings, ...] = ()
    source: tuple[SourceSettings, ...] = ()
    destination: tuple[DestinationSettings, ...] = ()
    credential: tuple[CredentialSettings, ...] = ()
    dkim: tuple[DkimSettings, ...] = ()
    srs: SrsSettings = field(default_factory=SrsSettings)
    rewrite: tuple[RewriteSettings, ...] = ()
    retry: RetrySettings = field(default_factory=RetrySettings)
    bounce: BounceSettings = field(default_factory=BounceSettings)
    delivery: DeliverySettings = field(default_factory=DeliverySettings)
    dns: DnsSettings = field(default_factory=DnsSettings)
    log: LogSettings = field(default_factory=LogSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)


TABLES: dict[str, type[Table]] = {
    "spool": SpoolSettings,
    "redis": RedisSettings,
    "postgres": PostgresSettings,
    "s3": S3Settings,
    "outbox": OutboxSettings,
    "listener": ListenerSettings,
    "auth": AuthSettings,
    "access": AccessSettings,
    "zone": ZoneSettings,
    "route": RouteSettings,
    "source": SourceSettings,
    "destination": DestinationSettings,
    "credential": CredentialSettings,
    "dkim": DkimSettings,
    "srs": SrsSettings,
    "rewrite": RewriteSettings,
    "retry": RetrySettings,
    "bounce": BounceSettings,
    "delivery": DeliverySettings,
    "dns": DnsSettings,
    "log": LogSettings,
    "admin": AdminSettings,
}
"""Every table of the file in its order."""

REPEATED = frozenset(
    {"listener", "access", "zone", "route", "source", "destination", "credential", "dkim", "rewrite"}
)
"""Those written in double brackets, [[zone]], as often as wanted."""
