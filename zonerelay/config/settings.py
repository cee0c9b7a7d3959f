"""The settings of the whole file: the face of `tables`, which has a frozen class for each TOML table.

Other packages import the names of all tables from here. The loader, the error messages and the reference
(`config/option_text.py`) are derived from these classes; operators read the docstrings of tables and options
there. Durations are seconds (float), sizes are bytes (int).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, replace

from zonerelay.config.endpoints import address_literal, is_domain, parse_listen
from zonerelay.config.options import forms
from zonerelay.config.options.convert import AUTO
from zonerelay.config.options.forms import selector as read_selector
from zonerelay.config.options.options import (
    DAY,
    HOUR,
    KB,
    MAX_WORKERS,
    MB,
    MINUTE,
    duration,
    size,
    table,
    tables,
    tables_of,
    text,
    workers,
)
from zonerelay.config.tables.credential import (
    CredentialSettings,
    Mechanism,
    OauthGrant,
    passwords_that_end,
)
from zonerelay.config.tables.delivery import (
    BounceSettings,
    DeliverySettings,
    DnsSettings,
    RetryPolicyName,
    RetrySettings,
)
from zonerelay.config.tables.listener import (
    BareLineEnds,
    HeaderControls,
    Idempotency,
    ListenerAuth,
    ListenerProtocol,
    ListenerSettings,
    ListenerTls,
    Network,
    SendmailSettings,
    UnsafeListener,
)
from zonerelay.config.tables.rewrite import (
    NOTE,
    DkimSettings,
    RewriteSettings,
    RewriteWhere,
    SrsSettings,
    note_upgrade,
    read_key_file,
    srs_secrets,
    upgraded_at,
)
from zonerelay.config.tables.route import AccessAction, AccessSettings, AuthSettings, RouteSettings
from zonerelay.config.tables.store import (
    Addressing,
    AdminSettings,
    Backend,
    CaptureSettings,
    HistoryAddresses,
    HistorySettings,
    LogFormat,
    LogSettings,
    OutboxSettings,
    PostgresSettings,
    RedisSettings,
    S3Settings,
    SpoolSettings,
    UnsafeStore,
    raised_guard,
    space_guard,
)
from zonerelay.config.tables.webhook import (
    EVENTS,
    ReportSettings,
    WebhookAddresses,
    WebhookSettings,
    webhook_keys,
)
from zonerelay.config.tables.zone import (
    Convert,
    DestinationSettings,
    DestinationTls,
    DkimMode,
    InDoubt,
    SourceBy,
    SourceSettings,
    TlsMode,
    ZoneSettings,
)
from zonerelay.model.queue_name import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The whole file. `hostname` empty: the machine's fully qualified name."""

    hostname: str = text("", form=forms.ehlo_name)
    """The name this relay calls itself in EHLO, in greetings and in Received fields; its address should
    resolve back to it. Empty: the machine's fully qualified name.
    """
    workers: int = workers(1)
    """Processes that share the work, each with a spool of its own: a number, or "auto" for one per core that
    the relay may use. More than one are looked after by a supervisor (docs/operate/workers.md).
    """
    worker_timeout: float = duration(20.0, least=1.0, most=HOUR)
    """With several workers: one that gives no sign of life for so long is replaced."""
    shutdown_timeout: float = duration(30.0, most=HOUR)
    """How long a stopping relay waits for what is in flight. What is cut off is tried again at the next
    start, so a longer wait avoids duplicates.
    """
    max_session_memory: int = size(256 * MB, least=16 * MB)
    """What all client connections together may hold in memory. Near it new connections are answered 421; at
    it the connection that holds most is ended.
    """
    spool: SpoolSettings = table(SpoolSettings)
    redis: RedisSettings = table(RedisSettings)
    postgres: PostgresSettings = table(PostgresSettings)
    s3: S3Settings = table(S3Settings)
    outbox: OutboxSettings = table(OutboxSettings)
    capture: CaptureSettings = table(CaptureSettings)
    listener: tuple[ListenerSettings, ...] = tables(ListenerSettings, ListenerSettings())
    sendmail: SendmailSettings = table(SendmailSettings)
    auth: AuthSettings = table(AuthSettings)
    access: tuple[AccessSettings, ...] = tables(AccessSettings)
    zone: tuple[ZoneSettings, ...] = tables(ZoneSettings, ZoneSettings())
    route: tuple[RouteSettings, ...] = tables(RouteSettings)
    source: tuple[SourceSettings, ...] = tables(SourceSettings)
    destination: tuple[DestinationSettings, ...] = tables(DestinationSettings)
    credential: tuple[CredentialSettings, ...] = tables(CredentialSettings)
    dkim: tuple[DkimSettings, ...] = tables(DkimSettings)
    srs: SrsSettings = table(SrsSettings)
    rewrite: tuple[RewriteSettings, ...] = tables(RewriteSettings)
    retry: RetrySettings = table(RetrySettings)
    bounce: BounceSettings = table(BounceSettings)
    delivery: DeliverySettings = table(DeliverySettings)
    dns: DnsSettings = table(DnsSettings)
    log: LogSettings = table(LogSettings)
    history: HistorySettings = table(HistorySettings)
    webhook: tuple[WebhookSettings, ...] = tables(WebhookSettings)
    report: ReportSettings = table(ReportSettings)
    admin: AdminSettings = table(AdminSettings)


TABLES = {name: of for name, (of, _) in tables_of(Settings).items()}
"""The class of every table of the file, in its order."""

REPEATED = frozenset(name for name, (_, several) in tables_of(Settings).items() if several)
"""Those written in double brackets, [[zone]], as often as wanted."""


# Says which changes of the configuration a running relay cannot take up without a restart. Pure.

RESTART = (
    "hostname", "workers", "spool", "redis", "postgres", "s3", "outbox", "capture", "sendmail", "delivery",
    "dns", "log", "history", "admin",
)  # fmt: skip
"""What sockets, threads and files were opened with. Everything else changes live."""
NEXT_START = ("spool", "admin", "log")
"""Of these, what stays as it was although workers are replaced: the supervisor's own, and where mail is."""


def needs_restart(old: Settings, new: Settings) -> tuple[str, ...]:
    """Names of the top-level keys that differ and take effect at the next start only."""
    return tuple(name for name in RESTART if getattr(old, name) != getattr(new, name))


def kept_from(old: Settings, new: Settings) -> Settings:
    """Returns the settings of a new worker in a relay that was started with the old settings."""
    return replace(new, **{name: getattr(old, name) for name in NEXT_START})


def taken_up(old: Settings, new: Settings) -> Settings:
    """Returns the settings of a relay that ran with the old settings, after a reload."""
    return replace(new, **{name: getattr(old, name) for name in RESTART})


# The name that the relay calls itself: the configured one, the machine's, or an address literal.

_LOCAL = ("localhost", "localdomain", "local")


def resolve_hostname(settings: Settings, getfqdn: Callable[[], str]) -> str:
    """Return a valid EHLO name (RFC 5321 4.1.1.1), always.

    A machine that has no fully qualified name, as most containers, gets an address literal, which RFC
    5321 4.1.4 provides for exactly this; `advice` tells the operator to set `hostname`.
    """
    if settings.hostname:
        return settings.hostname
    name = getfqdn().rstrip(".").lower()
    return name if is_fully_qualified(name) else _literal(settings)


def is_fully_qualified(name: str) -> bool:
    """A domain of at least two labels that means this machine to others too."""
    return is_domain(name) and "." in name and name.rpartition(".")[2] not in _LOCAL


def _literal(settings: Settings) -> str:
    """Return the first address of a listener that others can see; loopback when there is none."""
    for listener in settings.listener:
        address = parse_listen(listener.address)
        if not (address.is_loopback or address.is_wildcard):
            return address_literal(ipaddress.ip_address(address.host))
    return "[127.0.0.1]"
