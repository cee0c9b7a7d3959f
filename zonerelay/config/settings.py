"""The settings of the whole file: the face of `tables`, which has a frozen class for each TOML table.

Other packages import the names of all tables from here. The loader, the error messages and the check of
`config/zonerelay.toml` are derived from these classes. The docstring of an option is the comment above it in
that file, so it is written for an operator. Durations are seconds (float), sizes are octets (int). The loader
refuses a key that is no field of these classes.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from zonerelay.config.tables.admin import (
    AdminSettings,
    HistoryAddresses,
    HistorySettings,
    LogFormat,
    LogSettings,
)
from zonerelay.config.tables.inbound.access import AccessAction, AccessSettings, AuthSettings
from zonerelay.config.tables.inbound.listener import (
    CLEARTEXT_AUTH_WORDS,
    OPEN_RELAY_WORDS,
    BareLineEnds,
    HeaderControls,
    Idempotency,
    ListenerAuth,
    ListenerProtocol,
    ListenerSettings,
    ListenerTls,
    Network,
)
from zonerelay.config.tables.inbound.sendmail import SendmailSettings
from zonerelay.config.tables.outbound.credential import (
    CredentialSettings,
    Mechanism,
    OauthGrant,
    passwords_that_end,
)
from zonerelay.config.tables.outbound.delivery import (
    BounceSettings,
    DeliverySettings,
    RetryPolicyName,
    RetrySettings,
)
from zonerelay.config.tables.outbound.destination import DestinationSettings, DestinationTls
from zonerelay.config.tables.outbound.dkim import DkimSettings, read_key_file
from zonerelay.config.tables.outbound.dns import DnsSettings
from zonerelay.config.tables.outbound.rewrite import RewriteSettings, RewriteWhere
from zonerelay.config.tables.outbound.route import RouteSettings
from zonerelay.config.tables.outbound.source import SourceSettings
from zonerelay.config.tables.outbound.srs import NOTE, SrsSettings, note_upgrade, srs_secrets, upgraded_at
from zonerelay.config.tables.outbound.zone import Convert, DkimMode, InDoubt, SourceBy, TlsMode, ZoneSettings
from zonerelay.config.tables.store.capture import CaptureSettings
from zonerelay.config.tables.store.outbox import OutboxSettings
from zonerelay.config.tables.store.postgres import PostgresSettings
from zonerelay.config.tables.store.redis import RedisSettings
from zonerelay.config.tables.store.s3 import Addressing, S3Settings
from zonerelay.config.tables.store.spool import LOSS_WORDS, Backend, SpoolSettings, raised_guard, space_guard
from zonerelay.config.tables.webhook import (
    EVENTS,
    ReportSettings,
    WebhookAddresses,
    WebhookSettings,
    webhook_keys,
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
    the relay may use. More than one are looked after by a supervisor (docs/workers.md).
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
