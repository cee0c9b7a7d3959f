"""Defines the settings that the whole configuration file is converted to. The classes in `tables`, one frozen
class for each TOML table, are exported here.

Other packages import the names of all tables from this module, which republishes what the modules of `tables`
define (the one use that PEP 8 has for wildcard imports). The loader, the error messages and the reference
(`config/toml_text.py`) are derived from these classes, whose docstrings are the documentation for operators.
Durations are in seconds (float), sizes in bytes (int).
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, replace

from zonerelay.config.endpoints import address_literal, is_domain, parse_listen
from zonerelay.config.options import forms
from zonerelay.config.options import options as declare
from zonerelay.config.options.convert import AUTO
from zonerelay.config.options.forms import selector as read_selector
from zonerelay.config.options.options import DAY, HOUR, KB, MAX_WORKERS, MB, tables_of
from zonerelay.config.tables.listener import *
from zonerelay.config.tables.rewrite import *
from zonerelay.config.tables.route import *
from zonerelay.config.tables.store import *
from zonerelay.config.tables.zone import *


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of the whole configuration file. If `hostname` is empty, the fully qualified name of the
    machine is used.
    """

    hostname: str = declare.text("", form=forms.ehlo_name)
    """The name of this relay in EHLO, greetings and Received fields, which should resolve to its address.
    Empty: the machine's fully qualified name.
    """
    workers: int = declare.workers(1)
    """The number of worker processes, each with its own spool, or "auto": one per core that the relay may use
    (docs/operate/workers.md).
    """
    worker_timeout: float = declare.duration(20.0, least=1.0, most=HOUR)
    """One of several workers that does not respond for this time is replaced."""
    shutdown_timeout: float = declare.duration(30.0, most=HOUR)
    """How long a stopping relay waits for running transactions. Those that it interrupts are tried again at
    the next start, perhaps as duplicates.
    """
    max_session_memory: int = declare.size(256 * MB, least=16 * MB)
    """The maximum memory of all client connections together. Near it, new connections get 421; at it, the
    connection that uses the most memory is ended.
    """
    spool: SpoolSettings = declare.table(SpoolSettings)
    redis: RedisSettings = declare.table(RedisSettings)
    postgres: PostgresSettings = declare.table(PostgresSettings)
    s3: S3Settings = declare.table(S3Settings)
    outbox: OutboxSettings = declare.table(OutboxSettings)
    capture: CaptureSettings = declare.table(CaptureSettings)
    listener: tuple[ListenerSettings, ...] = declare.tables(ListenerSettings, ListenerSettings())
    sendmail: SendmailSettings = declare.table(SendmailSettings)
    auth: AuthSettings = declare.table(AuthSettings)
    access: tuple[AccessSettings, ...] = declare.tables(AccessSettings)
    zone: tuple[ZoneSettings, ...] = declare.tables(ZoneSettings, ZoneSettings())
    route: tuple[RouteSettings, ...] = declare.tables(RouteSettings)
    source: tuple[SourceSettings, ...] = declare.tables(SourceSettings)
    destination: tuple[DestinationSettings, ...] = declare.tables(DestinationSettings)
    credential: tuple[CredentialSettings, ...] = declare.tables(CredentialSettings)
    dkim: tuple[DkimSettings, ...] = declare.tables(DkimSettings)
    srs: SrsSettings = declare.table(SrsSettings)
    rewrite: tuple[RewriteSettings, ...] = declare.tables(RewriteSettings)
    retry: RetrySettings = declare.table(RetrySettings)
    bounce: BounceSettings = declare.table(BounceSettings)
    delivery: DeliverySettings = declare.table(DeliverySettings)
    dns: DnsSettings = declare.table(DnsSettings)
    log: LogSettings = declare.table(LogSettings)
    history: HistorySettings = declare.table(HistorySettings)
    webhook: tuple[WebhookSettings, ...] = declare.tables(WebhookSettings)
    report: ReportSettings = declare.table(ReportSettings)
    admin: AdminSettings = declare.table(AdminSettings)


TABLES = {name: of for name, (of, _) in tables_of(Settings).items()}
"""The class of every table of the file, in the order of the file."""

REPEATED = frozenset(name for name, (_, several) in tables_of(Settings).items() if several)
"""The names of repeated tables, which are written in double brackets, such as [[zone]]."""


# Determines which changes of the configuration require a restart. No I/O.

RESTART = (
    "hostname", "workers", "spool", "redis", "postgres", "s3", "outbox", "capture", "sendmail", "delivery",
    "dns", "log", "history", "admin",
)  # fmt: skip
"""Keys that sockets, threads and files depend on. All other keys change without a restart."""
NEXT_START = ("spool", "admin", "log")
"""The keys of these that do not change even if workers are replaced: those of the supervisor, and the mail
storage.
"""


def needs_restart(old: Settings, new: Settings) -> tuple[str, ...]:
    """Return the names of top-level keys whose values differ and that take effect only after a restart."""
    return tuple(name for name in RESTART if getattr(old, name) != getattr(new, name))


def kept_from(old: Settings, new: Settings) -> Settings:
    """Return the settings for a worker that is added to a relay that was started with the old settings."""
    return replace(new, **{name: getattr(old, name) for name in NEXT_START})


def taken_up(old: Settings, new: Settings) -> Settings:
    """Return the settings that a running relay with the old settings uses after a reload."""
    return replace(new, **{name: getattr(old, name) for name in RESTART})


# The relay's own name: the configured one, the machine's name, or an address literal.

_LOCAL = ("localhost", "localdomain", "local")


def resolve_hostname(settings: Settings, getfqdn: Callable[[], str]) -> str:
    """Return the relay's EHLO name: `hostname`, or else the machine's name or an address literal (RFC 5321
    4.1.1.1).

    A machine without a fully qualified name, such as most containers, gets an address literal, which RFC 5321
    4.1.4 permits for this case; `advice` recommends setting `hostname`.
    """
    if settings.hostname:
        return settings.hostname
    name = getfqdn().rstrip(".").lower()
    return name if is_fully_qualified(name) else _literal(settings)


def is_fully_qualified(name: str) -> bool:
    """Return whether the name has at least two labels and a top-level domain that is not local."""
    return is_domain(name) and "." in name and name.rpartition(".")[2] not in _LOCAL


def _literal(settings: Settings) -> str:
    """Return the address literal of the first listener address that other hosts can reach, or of loopback."""
    for listener in settings.listener:
        address = parse_listen(listener.address)
        if not (address.is_loopback or address.is_wildcard):
            return address_literal(ipaddress.ip_address(address.host))
    return "[127.0.0.1]"
