"""The settings for taking and keeping mail: [[listener]] and [spool]. Import them from `models`."""

# ruff: noqa: RUF009  (the makers return dataclasses.field(), which is what that rule asks for)

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.options.options import (
    DAY,
    KB,
    MB,
    MINUTE,
    Form,
    choice,
    count,
    duration,
    networks,
    optional_path,
    path,
    paths,
    size,
    switch,
    text,
    texts,
)
from zonerelay.model.priority import Priority

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

OPEN_RELAY_WORDS = "I understand that anybody may relay"
LOSS_WORDS = "I understand that acknowledged mail may be lost"
CLEARTEXT_AUTH_WORDS = "I understand that passwords can be read on the way"


class Backend(enum.StrEnum):
    MEMORY = "memory"
    LEVELDB = "leveldb"
    DISK = "disk"
    REDIS = "redis"
    POSTGRES = "postgres"
    S3 = "s3"


class ListenerTls(enum.StrEnum):
    NONE = "none"
    STARTTLS = "starttls"
    IMPLICIT = "implicit"


class ListenerAuth(enum.StrEnum):
    OFF = "off"
    OPTIONAL = "optional"
    REQUIRED = "required"


class BareLineEnds(enum.StrEnum):
    NORMALIZE = "normalize"
    REJECT = "reject"


class HeaderControls(enum.StrEnum):
    REJECT = "reject"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolSettings:
    """[spool]"""

    backend: Backend = choice(
        Backend.LEVELDB,
        "leveldb keeps every acknowledged message through a crash or a power cut. disk does too, in files "
        "that people and tools can read, for more work per message (docs/disk-queue.md). redis and postgres "
        "keep it on a server that several relays can share (docs/redis.md, docs/postgres.md), s3 in a bucket "
        "(docs/s3.md); [redis], [postgres] and [s3] say where. memory loses everything when the relay stops: "
        "for tests and throw-away use.",
    )
    path: Path = path(
        Path("/var/lib/zonerelay/spool"),
        "The spool's directory, for one relay alone (redis: only what lies beside it); the default is the "
        "systemd unit's state directory. A relative path starts at the directory the relay is started in.",
    )
    env_directory: Path | None = optional_path(
        "With disk: where the messages lie (<id>.env). Absent: in path."
    )
    meta_directory: Path | None = optional_path(
        "With disk: where the states of their deliveries lie (<id>.meta); it may be the same directory. "
        "Absent: in path."
    )
    scratch_directory: Path | None = optional_path(
        "With disk: where files are written before they are renamed into those two, so it has to be on the "
        'same file system, and a directory of its own. Absent: "scratch" in path.'
    )
    shelve: Path | None = optional_path(
        "With memory: a file of Python's shelve that the queue is also written to, so that it survives an "
        "orderly restart. It is not durable: a crash loses what was written last, and can damage all of it."
    )
    min_free_space: int = size(
        100 * MB,
        "With less free space than this on the spool's file system new mail is answered 452 4.3.1 and "
        "/readyz says no, so that what is queued can still be delivered. Half of it is kept back in a file "
        "(ballast) and given up when others fill the disk all the same. 0 turns both off. With leveldb less "
        "than four times write_buffer and 4 MB counts as that, for so much it needs to move its tables. With "
        "redis it is the memory below the server's maxmemory, if that is set, and there is no ballast.",
        least=MB,
        optional=True,
    )
    write_buffer: int = size(
        8 * MB,
        "What LevelDB gathers in memory before it writes a table file. Larger buffers were not faster "
        "here and cost about four times their size in memory.",
        least=MB,
        most=256 * MB,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """[redis]: used when `[spool] backend` says so."""

    url: str = text(
        "redis://127.0.0.1:6379/0",
        "redis://HOST:PORT/DATABASE, rediss:// (TLS) or unix:///PATH?db=DATABASE. The password is not here.",
    )
    user: str = text("", "The ACL user to log in as; empty: the server's default user.")
    password: str = text(
        "",
        "Where the password is: a file, env:NAME or credential:NAME. Empty: none is needed.",
        form=Form.SECRET,
    )
    ca_file: Path | None = optional_path("Whose certificates to trust with rediss://; empty: the system's.")
    prefix: str = text(
        "zonerelay:",
        "What the names of all keys begin with. Relays with the same server, database and prefix share one "
        "queue. In braces ({zonerelay}:) the queue stays in one slot of a cluster.",
    )
    lease: float = duration(
        30.0,
        "How long the deliveries that this relay has claimed stay its own when it is not heard of; then "
        "other relays take them over. Longer than any pause of a relay that is alive.",
        least=1.0,
        most=10 * MINUTE,
    )
    replicas: int = count(
        0,
        "Replicas of the server that must have a message before it is acknowledged (WAIT). With fewer of "
        "them no mail is taken.",
        least=0,
        most=16,
        optional=True,
    )
    timeout: float = duration(
        10.0, "How long to wait for an answer before the connection is given up and made again.", most=MINUTE
    )
    accept_loss: str = text(
        "",
        f'The words "{LOSS_WORDS}", exactly so, make do with a server that does '
        "not sync its append-only file before it answers, that evicts keys or does not say. Without them it "
        "is refused.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """[[listener]]. `open_relay` is the one way to say in words that anybody may relay."""

    address: str = text(
        "127.0.0.1:2525",
        'Where to listen: "127.0.0.1:2525", "[::]:25" (every address), "unix:/run/zonerelay/smtp.sock". '
        "Loopback and an unprivileged port are the default because they are safe and need no rights.",
        form=Form.LISTEN,
    )
    tls: ListenerTls = choice(
        ListenerTls.NONE,
        "none; starttls: offered in EHLO (ports 25 and 587); implicit: from the first octet (port 465). "
        "Other than none needs a certificate: zonerelay cert self-signed makes one for a start.",
    )
    certificate: tuple[Path, ...] = paths(
        'A PEM file, or several: ["a.pem", "b.pem"]. Each is a certificate with its chain, as certbot\'s '
        "fullchain.pem. Of several, the name that the client asks for (SNI) chooses; the first serves "
        "everybody else. Files that change are read again by themselves."
    )
    key: tuple[Path, ...] = paths(
        "The private keys, one PEM file for each certificate, in the same order. Empty: the keys are in the "
        "certificate files."
    )
    require_tls: bool = switch(
        False,
        "With starttls: in clear text nothing but EHLO, STARTTLS, NOOP, RSET and QUIT is taken; everything "
        "else is answered 530 5.7.0.",
    )
    auth: ListenerAuth = choice(
        ListenerAuth.OFF,
        "SMTP AUTH (PLAIN, LOGIN) for the users of [auth], who may relay from anywhere. optional: "
        "allow_networks may relay without it. required: nobody sends mail without it, or a certificate of "
        "allow_certificates. Offered over TLS only.",
    )
    cleartext_auth: str = text(
        "",
        f'The words "{CLEARTEXT_AUTH_WORDS}", exactly so, offer AUTH without TLS too: for a network that '
        "nobody else can listen to.",
    )
    max_auth_failures: int = count(
        3,
        "Failed log-ins in one connection; then 421. Each answer comes later than the one before.",
        most=100,
    )
    allow_networks: tuple[Network, ...] = networks(
        (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")),
        "Clients that may relay without logging in; everybody else is refused (550 5.7.1), unless auth or "
        "allow_certificates lets them. Only this machine by default: a relay is closed until somebody opens "
        "it.",
    )
    allow_certificates: tuple[str, ...] = texts(
        (),
        "SHA-256 fingerprints of client certificates that may relay, as openssl x509 -noout -fingerprint "
        "-sha256 prints them. Clients are asked for a certificate; none, or one not listed here, changes "
        "nothing.",
        form=Form.FINGERPRINTS,
    )
    open_relay: str = text(
        "",
        f'The words "{OPEN_RELAY_WORDS}", exactly so, let everybody relay, whatever allow_networks says. '
        "Without them allow_networks that cover (nearly) the whole Internet are refused: spammers find an "
        "open relay within hours.",
    )
    proxy_networks: tuple[Network, ...] = networks(
        (),
        "Load balancers that speak the PROXY protocol (version 1 or 2). Connections from there must begin "
        "with its header; from anywhere else the header ends the session. What a client may is decided by "
        "its own address, never the balancer's.",
    )
    xclient_networks: tuple[Network, ...] = networks(
        (),
        "Servers in front of this one, such as nginx, that may say with XCLIENT who the client is and as "
        "whom it has logged in. Trust them as you trust the relay itself.",
    )
    check_sender_domain: bool = switch(
        False,
        "Ask DNS about the sender's domain at MAIL: 550 5.7.27 when it says that it takes no mail (null "
        "MX), 550 5.1.8 when it does not exist, 451 4.4.3 when DNS does not answer.",
    )
    policy: str = text(
        "",
        'A policy of your own in Python, "module:Class", asked at every step (docs/policy.md). '
        '"zonerelay.policies.quota:Quota" comes with the relay.',
        form=Form.FUNCTION,
    )
    policy_file: Path | None = optional_path(
        "A file for that policy: what is in it is the policy's business."
    )
    policy_timeout: float = duration(
        5.0, "How long the policy may think about one step; then the client is answered 451.", most=5 * MINUTE
    )
    priority: Priority = choice(
        Priority.NORMAL,
        "Of mail that comes in here: high, normal or bulk, where neither the user nor a route gives it "
        "another. Within a zone what is high goes first and what is bulk last.",
    )
    drop_headers: tuple[str, ...] = texts(
        ("Bcc", "Resent-Bcc", "Return-Path", "Content-Length"),
        "Header fields that are taken out of every message: blind copies must not show, and the others "
        "are for the end of the way.",
    )
    zone_header: str = text(
        "",
        'A header field, such as "X-Sending-Zone", in which clients that are trusted to do so name the zone '
        "of their mail; no [[route]] is asked then. It is taken out of every message that comes in here; "
        "from anybody else, and when there is no such zone, that is all. Empty: no such field.",
        form=Form.FIELD_NAME,
    )
    zone_header_users: tuple[str, ...] = texts(
        (), 'Users who are trusted to name zones; "*" is every user who may log in.'
    )
    zone_header_networks: tuple[Network, ...] = networks(
        (),
        "Addresses and networks of clients that are trusted to name zones, if they may relay. By default "
        "nobody is, because a zone can have better addresses, and no limits.",
    )
    hide_client: bool = switch(
        False,
        "Leave the client's name and address out of the Received field: for submission, where they are "
        "people's. The log still has them.",
    )
    bare_line_ends: BareLineEnds = choice(
        BareLineEnds.NORMALIZE,
        "A bare CR or LF in a message can smuggle a second message past another server. normalize makes "
        "bare LF a CRLF and bare CR a space (many applications send bare LF); reject answers 550 5.6.0.",
    )
    header_controls: HeaderControls = choice(
        HeaderControls.REJECT,
        "NUL in the header, or a control character in a field's name, hides a field from all readers but "
        "those that drop it. reject answers 550 5.6.0; remove takes these characters out, as Postfix does "
        "with message_strip_characters.",
    )
    max_message_size: int = size(
        50 * MB,
        "Announced in EHLO and enforced while the message arrives. It costs disk, not memory.",
    )
    max_recipients: int = count(
        1000,
        "Recipients per message; more are answered 452 4.5.3, and the client sends the message again for "
        "them. RFC 5321 4.5.3.1.8 asks for at least 100.",
        most=100_000,
    )
    max_connections: int = count(1000, "Open connections on this listener; the next one is answered 421.")
    max_connections_per_client: int = count(
        50,
        "Open connections from one client (an IPv4 address, an IPv6 /64), so that one client cannot use up "
        "the total.",
    )
    max_connections_per_network: int = count(
        200,
        "Open connections from one network (IPv4 /24, IPv6 /48), so that a client with many addresses "
        "cannot use up the total.",
    )
    max_commands: int = count(
        100_000,
        "Commands in one connection: enough for a client that keeps its connection all day, and an end "
        "for one that only sends NOOP.",
        least=10,
        most=1_000_000_000,
    )
    max_errors: int = count(
        20,
        "Refused or unknown commands in one connection; then 421: a client in that state is lost or "
        "guessing.",
    )
    max_received: int = count(
        100,
        "Received fields in a message; more means that it goes in circles: 554 5.4.6. RFC 5321 6.3 asks "
        "for at least 100.",
        least=10,
        most=1000,
    )
    max_header_size: int = size(
        256 * KB,
        "The header section of a message is held in memory, so it is bounded.",
        least=4 * KB,
        most=16 * MB,
    )
    idle_timeout: float = duration(
        5 * MINUTE,
        "How long to wait for the client's next command or data; RFC 5321 4.5.3.2.7 asks for 5 minutes.",
    )
    transaction_timeout: float = duration(
        30 * MINUTE,
        "How long one message may take from MAIL to its last octet, so that a client that sends an octet "
        "a minute does not hold a connection for ever.",
    )
    min_data_rate: int = count(
        500,
        "Octets a second that a message must come in with on average, once idle_timeout has passed. Slower "
        "clients are cut off (421): a few octets a minute would hold a connection for hours. 0: any rate.",
        optional=True,
    )
    max_hold: float = duration(
        7 * DAY,
        "How far ahead clients that may relay can set the time of delivery (FUTURERELEASE, RFC 4865). 0: "
        "not offered.",
        least=1.0,
        most=30 * DAY,
        optional=True,
    )
