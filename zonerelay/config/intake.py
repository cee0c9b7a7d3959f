"""The settings for taking and keeping mail: [[listener]] and [spool]. Import them from `models`."""

# ruff: noqa: RUF009  (the makers return dataclasses.field(), which is what that rule asks for)

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.options import KB, MB, MINUTE, Form, choice, count, duration, networks, path, size, text

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

OPEN_RELAY_WORDS = "I understand that anybody may relay"


class Backend(enum.StrEnum):
    MEMORY = "memory"
    LEVELDB = "leveldb"


class ListenerTls(enum.StrEnum):
    NONE = "none"


class ListenerAuth(enum.StrEnum):
    OFF = "off"


class BareLineEnds(enum.StrEnum):
    NORMALIZE = "normalize"
    REJECT = "reject"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolSettings:
    """[spool]"""

    backend: Backend = choice(
        Backend.LEVELDB,
        "leveldb keeps every acknowledged message through a crash or a power cut. memory loses everything "
        "when the relay stops: for tests and throw-away use.",
        later=("disk", "redis", "postgres", "s3"),
    )
    path: Path = path(
        Path("/var/lib/zonerelay/spool"),
        "The spool's directory, for one relay alone; the default is the systemd unit's state directory. A "
        "relative path starts at the directory the relay is started in.",
    )
    min_free_space: int = size(
        100 * MB,
        "With less free space than this on the spool's file system new mail is answered 452 4.3.1 and "
        "/readyz says no, so that what is queued can still be delivered. Half of it is kept back in a file "
        "(ballast) and given up when others fill the disk all the same. 0 turns both off.",
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
        "TLS towards clients. This version offers none: keep its listeners on networks you trust.",
        later=("starttls", "implicit"),
    )
    auth: ListenerAuth = choice(
        ListenerAuth.OFF,
        "SMTP AUTH. This version has none: allow_networks alone decides who may relay.",
        later=("optional", "required"),
    )
    allow_networks: tuple[Network, ...] = networks(
        (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")),
        "Who may relay; everybody else is refused. Only this machine by default: a relay is closed until "
        "somebody opens it.",
    )
    open_relay: str = text(
        "",
        f'The words "{OPEN_RELAY_WORDS}", exactly so, let everybody relay, whatever allow_networks says. '
        "Without them allow_networks that cover (nearly) the whole Internet are refused: spammers find an "
        "open relay within hours.",
    )
    bare_line_ends: BareLineEnds = choice(
        BareLineEnds.NORMALIZE,
        "A bare CR or LF in a message can smuggle a second message past another server. normalize makes "
        "bare LF a CRLF and bare CR a space (many applications send bare LF); reject answers 550 5.6.0.",
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
        50, "Open connections from one client address, so that one client cannot use up the total."
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
