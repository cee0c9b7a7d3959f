"""The settings, one frozen class per TOML table, each field with its default.

The field's metadata says how it is written and why its default is what it is; the loader, the
`config/zonerelay.toml` check and the error messages are all derived from here. Durations are
seconds (float), sizes are octets (int). A key that is not a field here is an error.
"""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

KB = 1024
MB = 1024 * KB
MINUTE = 60.0
HOUR = 60 * MINUTE
DAY = 24 * HOUR

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Backend(enum.StrEnum):
    MEMORY = "memory"
    LEVELDB = "leveldb"


class TlsMode(enum.StrEnum):
    """How a zone treats TLS towards MX hosts."""

    NONE = "none"
    OPPORTUNISTIC = "opportunistic"
    REQUIRED = "required"
    VERIFY = "verify"


class BareLineEnds(enum.StrEnum):
    NORMALIZE = "normalize"
    REJECT = "reject"


class InDoubt(enum.StrEnum):
    RETRY = "retry"
    HOLD = "hold"
    BOUNCE = "bounce"


class LogFormat(enum.StrEnum):
    JSON = "json"
    TEXT = "text"


class RetryPolicyName(enum.StrEnum):
    SCHEDULE = "schedule"
    EXPONENTIAL = "exponential"
    QUADRATIC = "quadratic"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolSettings:
    """[spool]"""

    backend: Backend = Backend.LEVELDB
    path: Path = Path("/var/lib/zonerelay/spool")
    min_free_space: int = 100 * MB
    write_buffer: int = 8 * MB


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """[[listener]]. `open_relay` is the one way to say in words that anybody may relay."""

    address: str = "127.0.0.1:2525"
    allow_networks: tuple[Network, ...] = (
        ipaddress.ip_network("127.0.0.0/8"),
        ipaddress.ip_network("::1/128"),
    )
    open_relay: str = ""
    bare_line_ends: BareLineEnds = BareLineEnds.NORMALIZE
    max_message_size: int = 50 * MB
    max_recipients: int = 1000
    max_connections: int = 1000
    max_connections_per_client: int = 50
    max_commands: int = 100_000
    max_errors: int = 20
    max_received: int = 100
    max_header_size: int = 256 * KB
    idle_timeout: float = 5 * MINUTE
    transaction_timeout: float = 30 * MINUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneSettings:
    """[[zone]]. Limits are totals over all workers."""

    name: str = "default"
    next_hop: str = ""
    port: int = 25
    allow_private_addresses: bool = False
    tls: TlsMode = TlsMode.OPPORTUNISTIC
    ehlo_name: str = ""
    max_connections: int = 20
    max_connections_per_destination: int = 10
    max_recipients_per_transaction: int = 50
    max_messages_per_connection: int = 1000
    connection_idle_timeout: float = 5.0
    ipv6: bool = True
    in_doubt: InDoubt = InDoubt.RETRY


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """[[route]]: first match wins; every condition given must match."""

    zone: str = "default"
    recipient_domain: tuple[str, ...] = ()
    sender_domain: tuple[str, ...] = ()
    user: tuple[str, ...] = ()
    header: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """[retry]. With `policy = "schedule"` the last delay repeats until `max_age`."""

    policy: RetryPolicyName = RetryPolicyName.SCHEDULE
    schedule: tuple[float, ...] = (
        1 * MINUTE,
        5 * MINUTE,
        15 * MINUTE,
        30 * MINUTE,
        1 * HOUR,
        2 * HOUR,
        4 * HOUR,
    )
    max_attempts: int = 0
    backoff: str = ""
    jitter: float = 0.1
    max_age: float = 5 * DAY
    suspend_min: float = 30.0
    suspend_max: float = 10 * MINUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class BounceSettings:
    """[bounce]. `delay_warning` 0 turns warnings off."""

    enabled: bool = True
    delay_warning: float = 4 * HOUR
    max_age: float = 1 * DAY
    return_size: int = 50 * KB


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsSettings:
    """[dns]. `servers` empty: the system's resolvers."""

    servers: tuple[str, ...] = ()
    timeout: float = 10.0
    cache_size: int = 10_000
    max_ttl: float = 1 * HOUR
    negative_ttl: float = 1 * MINUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySettings:
    """[delivery]: how long each phase of a conversation with a peer may take (RFC 5321 4.5.3.2)."""

    connect_timeout: float = 30.0
    greeting_timeout: float = 5 * MINUTE
    ehlo_timeout: float = 5 * MINUTE
    starttls_timeout: float = 2 * MINUTE
    mail_timeout: float = 5 * MINUTE
    rcpt_timeout: float = 5 * MINUTE
    data_timeout: float = 2 * MINUTE
    block_timeout: float = 3 * MINUTE
    final_dot_timeout: float = 10 * MINUTE
    quit_timeout: float = 5.0
    max_hosts_per_attempt: int = 5
    remember_broken_tls: float = 1 * HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """[log]"""

    format: LogFormat = LogFormat.JSON
    redact: bool = True
    redact_key_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSettings:
    """[admin]. `address` empty: no HTTP at all. `socket` empty: `control.sock` beside the spool."""

    address: str = "127.0.0.1:8025"
    token_file: Path | None = None
    socket: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The whole file. `hostname` empty: the machine's fully qualified name."""

    hostname: str = ""
    workers: int | str = 1
    shutdown_timeout: float = 30.0
    spool: SpoolSettings = field(default_factory=SpoolSettings)
    listener: tuple[ListenerSettings, ...] = (ListenerSettings(),)
    zone: tuple[ZoneSettings, ...] = (ZoneSettings(),)
    route: tuple[RouteSettings, ...] = ()
    retry: RetrySettings = field(default_factory=RetrySettings)
    bounce: BounceSettings = field(default_factory=BounceSettings)
    delivery: DeliverySettings = field(default_factory=DeliverySettings)
    dns: DnsSettings = field(default_factory=DnsSettings)
    log: LogSettings = field(default_factory=LogSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
