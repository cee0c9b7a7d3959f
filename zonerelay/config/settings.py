"""The settings of the whole file: the face of `tables`, which has a frozen class for each TOML table.

The loader, the error messages and the check of `config/zonerelay.toml` are derived from here; the
text of an option is the comment that stands above it there, so it is written for an operator.
Durations are seconds (float), sizes are octets (int). A key that is not a field here is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zonerelay.config.options.options import (
    DAY,
    HOUR,
    KB,
    MB,
    MINUTE,
    Form,
    duration,
    size,
    text,
    workers,
)
from zonerelay.config.tables.access import AccessAction, AccessSettings, AuthSettings
from zonerelay.config.tables.admin import AdminSettings
from zonerelay.config.tables.credential import CredentialSettings, Mechanism, OauthGrant
from zonerelay.config.tables.delivery import DeliverySettings
from zonerelay.config.tables.destination import DestinationSettings, DestinationTls
from zonerelay.config.tables.dkim import DkimSettings
from zonerelay.config.tables.dns import DnsSettings
from zonerelay.config.tables.listener import (
    CLEARTEXT_AUTH_WORDS,
    OPEN_RELAY_WORDS,
    BareLineEnds,
    HeaderControls,
    ListenerAuth,
    ListenerSettings,
    ListenerTls,
    Network,
)
from zonerelay.config.tables.log import LogFormat, LogSettings
from zonerelay.config.tables.outbox import OutboxSettings
from zonerelay.config.tables.postgres import PostgresSettings
from zonerelay.config.tables.redis import RedisSettings
from zonerelay.config.tables.retry import BounceSettings, RetryPolicyName, RetrySettings
from zonerelay.config.tables.rewrite import RewriteSettings, RewriteWhere
from zonerelay.config.tables.route import RouteSettings
from zonerelay.config.tables.s3 import Addressing, S3Settings
from zonerelay.config.tables.source import SourceSettings
from zonerelay.config.tables.spool import LOSS_WORDS, Backend, SpoolSettings
from zonerelay.config.tables.srs import SrsSettings
from zonerelay.config.tables.zone import DkimMode, InDoubt, SourceBy, TlsMode, ZoneSettings
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
