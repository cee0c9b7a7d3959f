"""[spool], [redis], [postgres], [s3], [outbox], [history], [admin], [log], [capture], [[webhook]] and
[report]: storage, logging, administration, events sent to other programs over HTTP, and the daily report
by mail.

No secret is in a text of this module.

[log], [history] and [admin]: the log on stderr, what became of mail, HTTP, the control socket.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, urlsplit

from zonerelay.config.credentials.secrets import SecretError, is_public, read_secret
from zonerelay.config.endpoints import parse_listen
from zonerelay.config.options import forms
from zonerelay.config.options import options as declare
from zonerelay.config.options.options import DAY, GB, HOUR, MB, MINUTE, YEAR, options_of
from zonerelay.config.problems import Findings, Report
from zonerelay.config.tables.listener import Network
from zonerelay.config.tables.zone import DeliverySettings
from zonerelay.config.units import format_size


class LogFormat(enum.StrEnum):
    """The format of log lines."""

    JSON = "json"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """The log, which is written to standard error (docs/operate/monitoring.md)."""

    format: LogFormat = declare.choice(LogFormat.JSON)
    """json: one object per line, for log collectors. text: key=value, for people. A terminal always gets text
    with clear addresses.
    """
    redact: bool = declare.switch(True)
    """Replace addresses in the log by stable pseudonyms (a keyed hash), which can still be searched."""
    redact_key_file: Path | None = declare.optional_path()
    """The key of the pseudonyms. Empty: a generated key next to the spool. Machines whose logs are searched
    together need the same.
    """


class HistoryAddresses(enum.StrEnum):
    """How the history stores addresses."""

    HASHED = "hashed"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySettings:
    """Settings of the mail history that `zonerelay log find` searches (docs/operate/history.md)."""

    enabled: bool = declare.switch(True)
    """Record what happens to mail (accepted, rejected, each attempt, the outcome) in the directory history
    next to the spool. Mail never waits for it.
    """
    keep: float = declare.duration(14 * DAY, least=DAY, most=10 * YEAR)
    """How long events are kept."""
    max_size: int = declare.size(1 * GB, least=16 * MB)
    """The maximum size of the file of each worker; then the oldest events are removed. A message with one
    recipient takes about a kilobyte.
    """
    addresses: HistoryAddresses = declare.choice(HistoryAddresses.HASHED)
    """hashed: the history contains the pseudonyms of the log. clear: it contains addresses, for everyone who
    may read the files.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSettings:
    """The HTTP API, the page and metrics (docs/operate/api.md), and the control socket."""

    address: str = declare.text("127.0.0.1:8025", form=forms.listen, optional=True)
    """The HTTP address of /metrics, /healthz and /readyz, of the API at /v1/, and of the page. Empty: no
    HTTP. While the address is in use, the relay runs without HTTP, reports a problem in zonerelay status, and
    tries again.
    """
    page: bool = declare.switch(False)
    """Serve the operators' page at /. On other addresses than loopback it requires a certificate, or a proxy
    in proxy_networks.
    """
    certificate: Path | None = declare.optional_path()
    """A PEM file with the certificate and its chain, which enables TLS. A renewed file is read again."""
    key: Path | None = declare.optional_path(needs="certificate")
    """The private key. Empty: it is in the certificate file."""
    proxy_networks: tuple[Network, ...] = declare.networks(())
    """Trusted reverse proxies, whose X-Forwarded-For and X-Forwarded-Proto are used. Without one, API and
    page need TLS on other addresses than loopback.
    """
    hosts: tuple[str, ...] = declare.texts((), form=forms.domain)
    """Host names allowed in HTTP requests, in addition to localhost and IP addresses ("*.example.org": every
    subdomain), against DNS rebinding. On other addresses than loopback, /metrics, /healthz and /readyz accept
    every name.
    """
    token_file: Path | None = declare.optional_path()
    """A file with one more token, of scope operate: a line of at least 32 characters. Prefer zonerelay token
    add.
    """
    socket: Path | None = declare.optional_path()
    """The Unix socket for the command line; its file permissions control access. Empty: control.sock next to
    the spool.
    """


def admin_problems(admin: AdminSettings) -> Findings:
    if admin.address and parse_listen(admin.address).is_unix:
        yield "address", "must be an address and a port; the Unix socket for commands is admin.socket"
    for network in admin.proxy_networks:
        if network.prefixlen == 0:
            claim = "would let every client forge its address; list only the proxies"
            yield "proxy_networks", f"{network} {claim}"
    if admin.page and admin.address and not _keeps_secrets(admin):
        remedy = (
            "set admin.certificate, list a proxy with TLS in admin.proxy_networks, or listen on 127.0.0.1"
        )
        yield "page", f"tokens would be sent to {admin.address} in clear text; {remedy}"


def admin_advice(admin: AdminSettings) -> Findings:
    if admin.token_file is not None:
        others = "zonerelay token add creates tokens with a name, a scope and an expiry date"
        yield "token_file", f"contains a token with all scopes that does not expire; {others}"
    if admin.address and not parse_listen(admin.address).is_loopback:
        api = "the API requires a token"
        if not _keeps_secrets(admin):
            api = "such clients cannot use the API without TLS"
        yield "address", f"metrics and health at {admin.address} can be read from other machines ({api})"


def capture_problems(capture: CaptureSettings) -> Findings:
    if capture.release_to and parse_listen(capture.release_to).is_unix:
        yield "release_to", 'must be a TCP address such as "127.0.0.1:25"'


def spool_problems(spool: SpoolSettings) -> Findings:
    kept = (spool.env_directory or spool.path / "messages", spool.meta_directory or spool.path)
    if spool.scratch_directory in kept:
        yield "scratch_directory", "must be a separate directory, because its files are removed"


def _keeps_secrets(admin: AdminSettings) -> bool:
    """Return whether tokens never cross a network unencrypted, because of loopback, TLS or a TLS proxy."""
    return parse_listen(admin.address).is_loopback or bool(admin.certificate or admin.proxy_networks)


# [capture]: mail that is captured instead of being sent.


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """Captured mail, which is stored for inspection instead of being sent (docs/start/sandbox.md)."""

    keep: float = declare.duration(7 * DAY, least=HOUR, most=10 * YEAR)
    """How long the mail of zones with next_hop = "capture:" is kept, in the directory captured next to the
    spool.
    """
    max_size: int = declare.size(500 * MB, least=MB)
    """The maximum size of all captured mail; then the oldest is removed. A larger message bounces."""
    release_to: str = declare.text("", form=forms.listen, optional=True)
    """The SMTP server to which an operator can release captured mail: this relay or another ("127.0.0.1:25").
    Empty: none.
    """


class UnsafeStore(enum.StrEnum):
    """Unsafe settings of a store that must be enabled explicitly."""

    MAIL_LOSS = "mail-loss"


class Backend(enum.StrEnum):
    """The storage engine of the spool."""

    MEMORY = "memory"
    LEVELDB = "leveldb"
    DISK = "disk"
    REDIS = "redis"
    POSTGRES = "postgres"
    S3 = "s3"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolSettings:
    """The spool, in which mail is stored until it is delivered (docs/store/engines.md)."""

    backend: Backend = declare.choice(Backend.LEVELDB)
    """leveldb: a local database, safe against crashes and power cuts. disk: as safe, in files that people and
    tools can read, for more work per message. redis, postgres: a server that several relays can share. s3: a
    bucket. memory: for tests; everything is lost when the relay stops.
    """
    path: Path = declare.path(Path("/var/lib/zonerelay/spool"))
    """The directory of the spool, used by one relay only; with redis, postgres and s3, of the files next to
    the queue. A relative path starts at the working directory.
    """
    env_directory: Path | None = declare.optional_path(needs='backend = "disk"')
    """disk: the directory of the messages. Empty: messages in path."""
    meta_directory: Path | None = declare.optional_path(needs='backend = "disk"')
    """disk: the directory of the log of queue changes, perhaps on another file system. Empty: path."""
    scratch_directory: Path | None = declare.optional_path(needs='backend = "disk"')
    """disk: the directory of the index, which is rebuilt if it is missing: a fast disk without backup is
    enough. Empty: scratch in path.
    """
    shelve: Path | None = declare.optional_path(needs='backend = "memory"')
    """memory: a file to which the queue is saved at an orderly stop. A crash loses all mail accepted since
    the start.
    """
    min_free_space: int = declare.size(100 * MB, least=MB, optional=True)
    """With less free space on the spool's file system, new mail is rejected with 452 4.3.1 and /readyz fails,
    so that queued mail can still be delivered. Half of it is reserved in a file that is released if the disk
    becomes full anyway. 0: neither. With leveldb, at least four times write_buffer and 4 MB, and more while a
    burst is compacted. With redis: the memory below maxmemory, without a reserve.
    """
    write_buffer: int = declare.size(8 * MB, least=MB, most=256 * MB)
    """The memory in which LevelDB collects writes; it takes about four times this size. Larger buffers were
    not faster in tests.
    """
    idempotency_window: float = declare.duration(DAY, least=60.0, most=7 * DAY)
    """How long an idempotency key is remembered, and a message with the same key gets the first answer and is
    not sent again (docs/send/idempotency.md).
    """


LEVELDB_TABLES = 4
LEVELDB_BATCH = 4 * 1024 * 1024
"""A table of level 0 holds the write buffer and, at most, one batch more. Four of them, or more where much
comes at once, are written again before their space is free.
"""


def space_guard(spool: SpoolSettings) -> int:
    """Return the free space in bytes below which new mail is refused, or 0 if there is no such limit. With
    LevelDB it is at least what LevelDB needs.
    """
    if spool.backend is not Backend.LEVELDB or not spool.min_free_space:
        return spool.min_free_space
    return max(spool.min_free_space, LEVELDB_TABLES * (spool.write_buffer + LEVELDB_BATCH))


def raised_guard(spool: SpoolSettings) -> str:
    """Return a note if the engine needs more free space than `min_free_space`, or an empty string."""
    guard = space_guard(spool)
    if guard == spool.min_free_space:
        return ""
    return (
        f"new mail is rejected when less than {format_size(guard)} are free, because LevelDB needs that "
        "space temporarily during compaction (write_buffer); min_free_space "
        f"is {format_size(spool.min_free_space)}"
    )


def spool_advice(spool: SpoolSettings) -> Findings:
    with contextlib.suppress(OSError):  # it is not there yet, and is made private
        if is_public(spool.path):
            yield "path", f"all users of this machine can list {spool.path}; run chmod o-rwx on it"
    if spool.backend is Backend.MEMORY and spool.shelve is None:
        yield "backend", "memory: every queued message is lost when the relay stops"
    elif spool.backend is Backend.MEMORY:
        lost = "a crash loses the messages that were accepted since the start"
        yield "shelve", f"a shelf is not durable: {lost}"
    if spool.min_free_space == 0:
        yield "min_free_space", "0: new mail is accepted until the disk is full"
    if raised := raised_guard(spool):
        yield "min_free_space", raised


def redis_problems(redis: RedisSettings) -> Findings:
    url = urlsplit(redis.url)
    words = ("password", "username")
    if url.scheme not in _SCHEMES:
        yield "url", "must begin with redis://, rediss:// (TLS) or unix://"
    elif "@" in url.netloc + url.path or any(
        word in key.lower() for key in parse_qs(url.query) for word in words
    ):
        yield "url", "contains a user name or password; use the options user and password instead"
    if redis.ca_file is not None and url.scheme != "rediss":
        yield "ca_file", "has no effect without TLS; the url must begin with rediss://"


# [redis]: the queue on a Redis server. No secret is in a text of this module.

_SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """The Redis server for `[spool] backend = "redis"` (docs/store/redis.md)."""

    url: str = declare.text("redis://127.0.0.1:6379/0", form=forms.any_url)
    """redis://HOST:PORT/DATABASE, rediss:// (TLS) or unix:///PATH?db=DATABASE, without the password."""
    user: str = declare.text("")
    """The ACL user. Empty: the server's default user."""
    password: str = declare.text("", form=forms.secret)
    """The place of the password: a file, env:NAME or credential:NAME. Empty: no password."""
    ca_file: Path | None = declare.optional_path()
    """The certificate authorities for rediss://. Empty: those of the system."""
    prefix: str = declare.text("zonerelay:", form=forms.key_prefix)
    """The prefix of all keys. Relays with the same server, database and prefix share one queue. In a cluster
    use a hash tag: {zonerelay}:.
    """
    lease: float = declare.duration(30.0, least=1.0, most=10 * MINUTE)
    """How long a relay that does not respond keeps its mail; then other relays take it over. It must be
    longer than any pause of a running relay.
    """
    replicas: int = declare.count(0, least=0, most=16, optional=True)
    """The number of replicas that must have a message before it is acknowledged (WAIT). With fewer, no mail
    is accepted.
    """
    timeout: float = declare.duration(10.0, most=MINUTE)
    """The time limit for a reply; after it, the relay reconnects."""
    unsafe: tuple[UnsafeStore, ...] = declare.choices(UnsafeStore)
    """mail-loss: accept a server that may lose acknowledged mail, because it does not sync its append-only
    file before it replies, evicts keys, or hides its settings.
    """


def redis_advice(redis: RedisSettings, spool: SpoolSettings) -> Findings:
    if spool.backend is not Backend.REDIS:
        return
    if redis.unsafe:
        yield "unsafe", "acknowledged mail may be lost when the server or its machine stops"
    yield from _slow_answers("redis", redis)
    if redis.url.startswith("redis://") and not _is_local(redis.url):
        yield "url", "mail is sent to the server in clear text; use rediss:// for TLS"


def _is_local(url: str) -> bool:
    return _LOCAL.fullmatch(urlsplit(url).hostname or "localhost") is not None


def _slow_answers(table: str, settings: RedisSettings | S3Settings) -> Findings:
    if settings.lease <= settings.timeout:
        twice = "one slow reply could let the lease expire, and mail would be sent twice"
        yield "lease", f"is not longer than {table}.timeout: {twice}"


def _database_advice(settings: PostgresSettings | OutboxSettings, delivery: DeliverySettings) -> Findings:
    if settings.lease <= delivery.final_dot_timeout:
        twice = "a relay that loses its connection to the database may send mail twice"
        yield "lease", f"is not longer than delivery.final_dot_timeout: {twice}"
    if is_in_the_open(settings.url):
        unverified = "the certificate of the server is not verified, so an attacker could impersonate it"
        yield "url", f"{unverified}; add ?sslmode=verify-full"


# [postgres]: the queue in a PostgreSQL database.
#
# No URL is in a text of this module: there might be a password in it.

_LOCAL = re.compile(r"localhost|127\.[0-9.]+|::1")


def _hosts(parts: SplitResult) -> list[str]:
    named = parts.netloc.rpartition("@")[2] or "".join(parse_qs(parts.query).get("host", []))
    return [re.sub(r":\d+$", "", host).strip("[]") for host in named.split(",") if host]


def database_url(text: str) -> str:
    """Check the URL of a PostgreSQL database. Raise ValueError without the URL."""
    try:
        parts = urlsplit(text)
        query = parse_qs(parts.query)
    except ValueError:
        raise ValueError('is not a URL; expected "postgresql://USER@HOST:5432/DATABASE"') from None
    if parts.scheme not in {"postgresql", "postgres"}:
        raise ValueError('must begin with "postgresql://"')
    has_password = ":" in parts.netloc.rpartition("@")[0] or "@" in parts.path
    if has_password or any("password" in key.lower() for key in query):
        raise ValueError("contains a password; set the option password to the path of the password instead")
    if not _hosts(parts):
        raise ValueError("has no host; add a name, an address, or ?host=/run/postgresql for the Unix socket")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresSettings:
    """The database for `[spool] backend = "postgres"` (docs/store/postgres.md). Several relays can
    share it.
    """

    url: str = declare.text("postgresql:///zonerelay?host=/run/postgresql&user=zonerelay", form=database_url)
    """The database: "postgresql://USER@HOST:5432/DATABASE", or a Unix socket, without the password. Over a
    network, add ?sslmode=verify-full&sslrootcert=FILE.
    """
    password: str = declare.text("", form=forms.secret)
    """The place of the password: a file, env:NAME or credential:NAME. Empty: no password."""
    schema: str = declare.text("zonerelay", form=forms.schema)
    """The schema of the tables, created if it does not exist. Relays with the same database and schema share
    one queue.
    """
    node: int = declare.count(0, least=0, most=255, optional=True)
    """The number of this relay among those that share the queue, its own and always the same: after a restart
    it continues with the mail of its number.
    """
    lease: float = declare.duration(15 * MINUTE, least=1.0)
    """How long a relay that does not respond keeps its mail; then other relays take it over. It should be
    longer than any transaction ([delivery] final_dot_timeout alone is 10 minutes): a relay that lost only its
    database connection may still be sending.
    """
    unsafe: tuple[UnsafeStore, ...] = declare.choices(UnsafeStore)
    """mail-loss: accept a server with fsync or full_page_writes off, and keep its synchronous_commit, though
    it may lose acknowledged mail.
    """


def postgres_advice(postgres: PostgresSettings, spool: SpoolSettings, delivery: DeliverySettings) -> Findings:
    if spool.backend is not Backend.POSTGRES:
        return
    yield from _database_advice(postgres, delivery)
    if postgres.unsafe:
        yield "unsafe", "a crash of the database server may lose acknowledged mail"


def s3_problems(s3: S3Settings, spool: SpoolSettings, workers: int) -> Findings:
    if spool.backend is Backend.S3 and not s3.bucket:
        yield "bucket", 'is required with backend = "s3": set it to the name of an existing bucket'
    if spool.backend is Backend.S3 and not s3.shared and workers != 1:
        yield "shared", "false allows only a single worker; set workers = 1"


def is_in_the_open(url: str) -> bool:
    parts = urlsplit(url)
    mode = "".join(parse_qs(parts.query).get("sslmode", []))
    far = [host for host in _hosts(parts) if not host.startswith("/") and not _LOCAL.fullmatch(host)]
    return bool(far) and mode not in {"verify-ca", "verify-full"}


# [s3]: the queue in an S3 bucket. No secret is in a text of this module.

_URLS = ("endpoint_url", "queue_url", "queue_endpoint_url")


class Addressing(enum.StrEnum):
    """The style of the URLs of a bucket."""

    AUTO = "auto"
    PATH = "path"
    VIRTUAL = "virtual"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """The bucket for `[spool] backend = "s3"` (docs/store/s3.md)."""

    bucket: str = declare.text("", form=forms.bucket)
    """The bucket, which must exist."""
    prefix: str = declare.text("zonerelay/", form=forms.object_prefix)
    """The prefix of all objects. Relays with the same bucket and prefix share one queue."""
    endpoint_url: str = declare.text("", form=forms.service_url)
    """The URL of a service other than Amazon's, such as "https://s3.example.org"."""
    region: str = declare.text("", optional=True)
    """The region. Empty: from the environment, or us-east-1."""
    addressing: Addressing = declare.choice(Addressing.AUTO)
    """The style of bucket URLs: path (https://HOST/BUCKET/), virtual (https://BUCKET.HOST/), or auto: path
    with an endpoint_url, otherwise virtual.
    """
    access_key: str = declare.text("", needs="secret_key")
    """The id of the access key. Empty: from AWS_ACCESS_KEY_ID, the shared files of the AWS tools, or the role
    of the machine.
    """
    secret_key: str = declare.text("", form=forms.secret, needs="access_key")
    """The place of the secret key: a file, env:NAME or credential:NAME."""
    ca_file: Path | None = declare.optional_path()
    """The certificate authorities for https. Empty: those of the system."""
    shared: bool = declare.switch(True)
    """Several relays may share the queue, if the service has conditional writes, which are tested at each
    start. false: a second relay is refused.
    """
    lease: float = declare.duration(30.0, least=1.0, most=10 * MINUTE)
    """How long a relay that does not respond keeps its mail; then other relays take it over. It must be
    longer than any pause of a running relay.
    """
    timeout: float = declare.duration(10.0, most=5 * MINUTE)
    """The time limit of one request."""
    max_requests: int = declare.count(50, most=1000)
    """The maximum number of simultaneous requests."""
    queue_url: str = declare.text("", form=forms.service_url, needs="shared")
    """An SQS queue by which relays announce mail that another relay may take over. Empty: relays list the
    bucket.
    """
    queue_endpoint_url: str = declare.text("", form=forms.service_url)
    """The URL of the queue service, if it is not Amazon's."""


def s3_advice(s3: S3Settings, spool: SpoolSettings) -> Findings:
    if spool.backend is not Backend.S3:
        return
    yield from _slow_answers("s3", s3)
    for name in _URLS:
        url = getattr(s3, name)
        if urlsplit(url).scheme == "http" and not _is_local(url):
            yield name, "mail is sent to the service in clear text; use https:// for TLS"


def outbox_problems(outbox: OutboxSettings, report: Report) -> Findings:
    if not outbox.url:
        others = (key for key in options_of(OutboxSettings) if report.given("outbox", key))
        if not report.given("outbox", "url") and any(others):
            yield "url", 'is required; expected "postgresql://USER@HOST:5432/DATABASE"'
        return
    if outbox.table == outbox.mailbox_table:
        yield "mailbox_table", "must differ from table, the table of messages"


# [outbox]: the database whose rows are sent as mail.
#
# No URL is in a text of this module: there might be a password in it.


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """The outbox, a PostgreSQL table whose rows are sent as mail if `url` is set (docs/send/outbox.md)."""

    url: str = declare.text("", form=database_url)
    """The database of the outbox, in the form of [postgres] url. Empty: no outbox."""
    password: str = declare.text("", form=forms.secret)
    """The place of the password: a file, env:NAME or credential:NAME. Empty: no password."""
    schema: str = declare.text("public", form=forms.sql_name)
    """The schema of the tables."""
    table: str = declare.text("outbound_messages", form=forms.sql_name)
    """The table into which applications insert. Relays with the same table share its rows."""
    mailbox_table: str = declare.text("mailboxes", form=forms.sql_name)
    """The table of mailboxes to which rows may refer."""
    create_tables: bool = declare.switch(False)
    """Create tables that do not exist. Otherwise zonerelay outbox schema prints the SQL."""
    zone: str = declare.text("default", form=forms.name)
    """The zone of rows without a zone and a mailbox."""
    keys: tuple[str, ...] = declare.texts((), form=forms.secret)
    """The places of the keys of smtp_password_encrypted: files, env:NAME or credential:NAME. The first
    encrypts; all decrypt.
    """
    poll_interval: float = declare.duration(10.0, least=0.1, most=10 * MINUTE)
    """How often to look for rows without a notification. Inserts notify the relay at once."""
    lease: float = declare.duration(15 * MINUTE, least=1.0)
    """How long a relay that does not respond keeps its rows; then they return to the queue. It should be
    longer than any transaction, as in [postgres].
    """
    max_attempts: int = declare.count(10, most=1000)
    """The number of failed attempts for a recipient after which the row fails. After attempt n the delay is
    n² minutes.
    """
    max_message_size: int = declare.size(25 * MB)
    """Rows with a larger message fail."""


def outbox_advice(outbox: OutboxSettings, delivery: DeliverySettings) -> Findings:
    if outbox.url:
        yield from _database_advice(outbox, delivery)


# [[webhook]] and [report]: events over HTTP, and the daily report by mail.

EVENTS = (
    "message.accepted", "delivery.delivered", "delivery.deferred", "delivery.bounced", "delivery.expired",
    "delivery.in_doubt", "delivery.held", "destination.suspended", "destination.resumed",
    "spool.unhealthy", "spool.recovered",
)  # fmt: skip


class WebhookAddresses(enum.StrEnum):
    """How webhook events contain addresses."""

    PSEUDONYM = "pseudonym"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """An HTTP endpoint that receives signed events about mail (docs/operate/webhooks.md)."""

    name: str = declare.text("webhook", form=forms.name)
    """The name in logs, metrics and zonerelay webhook."""
    url: str = declare.text("", form=forms.any_url, required=True)
    """The https:// URL to which events are posted."""
    events: tuple[str, ...] = declare.texts(())
    """The types of events to post. Empty: all."""
    secret: str = declare.text("", form=forms.secret, required=True)
    """The place of the signing secret, as in password of [[credential]]: whsec_ and 24 to 64 bytes in base64
    (HMAC-SHA256), or whsk_ and 32 bytes (Ed25519).
    """
    old_secrets: tuple[str, ...] = declare.texts((), form=forms.secret)
    """The places of former secrets. During a key rotation, events are signed with all secrets."""
    addresses: WebhookAddresses = declare.choice(WebhookAddresses.PSEUDONYM)
    """pseudonym: events contain the pseudonyms of the log. clear: they contain addresses."""
    private: bool = declare.switch(False)
    """Allow addresses that are not public (loopback, 10.0.0.0/8 …) and http:// URLs."""
    timeout: float = declare.duration(20.0, least=1.0, most=60.0)
    """The time limit for the endpoint's response."""
    max_queued: int = declare.count(10_000, least=100, most=1_000_000)
    """The maximum number of waiting events in a worker's spool. Then the oldest are dropped, and an event
    webhook.gap has their number.
    """
    max_age: float = declare.duration(3 * DAY, least=60.0, most=14 * DAY)
    """Events that wait longer are dropped in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """The daily report by mail (docs/operate/report.md)."""

    to: tuple[str, ...] = declare.texts((), form=forms.address)
    """The recipients of the report: "postmaster@example.com"."""
    at: str = declare.text("06:00", form=forms.time_of_day)
    """The local time at which it is sent. A missed report is sent at the next start."""
    sender: str = declare.text("", form=forms.address)
    """The sender, in the envelope and in From. Empty: postmaster at the relay's hostname."""


def webhook_problems(webhook: WebhookSettings) -> Findings:
    parts = urlsplit(webhook.url)
    if webhook.url and (not parts.hostname or parts.scheme not in ("https", "http")):
        yield "url", 'is not a URL that events can be posted to; expected "https://…"'
    elif parts.scheme == "http" and not webhook.private:
        yield "url", "http:// is not encrypted; use https://, or set private = true"


def webhook_advice(webhook: WebhookSettings) -> Findings:
    if webhook.addresses is WebhookAddresses.CLEAR:
        yield "addresses", f"clear: events for {webhook.name} contain full email addresses"


def webhook_keys(webhook: WebhookSettings, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the signing secrets of a webhook: the current one, and then the old ones. Raise SecretError if
    one cannot be read.
    """
    keys = {place: read_secret(place, environment) for place in (webhook.secret, *webhook.old_secrets)}
    for each in keys.items():
        check_webhook_key(*each)
    return tuple(keys.values())


def check_webhook_key(place: str, secret: str) -> None:
    """Raise SecretError if the secret is not a valid key for signing events."""
    kind, _, encoded = secret.partition("_")
    try:
        octets = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except binascii.Error as error:
        raise SecretError(f"{place} is not valid base64 after its prefix") from error
    if (kind, len(octets)) != ("whsk", 32) and not (kind == "whsec" and 24 <= len(octets) <= 64):
        raise SecretError(f"{place} must contain whsec_ with 24 to 64 bytes in base64, or whsk_ with 32")
