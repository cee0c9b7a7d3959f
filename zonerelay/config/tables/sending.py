"""The settings for zones and who goes through which: [[zone]] and [[route]]. Import them from `models`."""

# ruff: noqa: RUF009  (the makers return dataclasses.field(), which is what that rule asks for)

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from zonerelay.config.options.options import (
    DAY,
    HOUR,
    YEAR,
    Form,
    choice,
    count,
    duration,
    durations,
    networks,
    rate,
    size,
    switch,
    switch_or_auto,
    text,
    texts,
)
from zonerelay.config.options.units import Rate
from zonerelay.config.tables.intake import Network


class TlsMode(enum.StrEnum):
    """How a zone treats TLS towards MX hosts."""

    NONE = "none"
    OPPORTUNISTIC = "opportunistic"
    REQUIRED = "required"
    VERIFY = "verify"
    DANE = "dane"


class SourceBy(enum.StrEnum):
    """What stays with one source."""

    MESSAGE = "message"
    SENDER = "sender"


class DkimMode(enum.StrEnum):
    OFF = "off"
    SIGN = "sign"
    REQUIRED = "required"


class InDoubt(enum.StrEnum):
    RETRY = "retry"
    HOLD = "hold"
    BOUNCE = "bounce"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneSettings:
    """[[zone]]. Limits are totals over all workers."""

    name: str = text(
        "default",
        "What routes, logs, metrics and the spool call this zone: letters, digits, dot, dash and "
        "underscore. Mail that no route matches goes to the zone named default.",
        form=Form.ZONE_NAME,
    )

    # Where it goes

    next_hop: str = text(
        "",
        "Where all mail of this zone goes. Empty: to the MX hosts of each recipient's domain. A "
        'smarthost: "smtp.example.net" (its MX hosts), "[smtp.example.net]:587" (that host, no MX '
        'lookup), "192.0.2.1:25" or "[2001:db8::1]:25". Several, with commas between: the first that can be '
        "reached is used.",
        form=Form.NEXT_HOPS,
    )
    next_hop_share: bool = switch(
        False,
        "Spread the mail over several next hops evenly, not to the first that can be reached.",
    )
    mix_domains: bool | None = switch_or_auto(
        "Whether recipients in several domains may share a transaction. auto: at a next hop yes; at MX hosts "
        "only where the host announces with LIMITS RCPTDOMAINMAX (RFC 9422) that it takes them, because "
        "Google defers all but the first domain. true: always; false: never. What a host announces is never "
        "exceeded.",
    )
    port: int = count(
        25, "The port of MX hosts, and of a next hop that names none. 25 is the port of mail.", most=65_535
    )
    ipv6: bool = switch(True, "Also deliver over IPv6. Turn it off when this machine has no working IPv6.")
    allow_private_addresses: bool = switch(
        False,
        "Deliver to MX hosts that resolve to loopback or private addresses. Off, because anybody can "
        "point an MX at them and so reach servers inside your network. A next_hop is not affected.",
    )

    # TLS, and logging in at next hops

    tls: TlsMode = choice(
        TlsMode.OPPORTUNISTIC,
        "none; opportunistic: STARTTLS when it is offered, any certificate, clear text when it fails, as "
        "most of the Internet's mail is sent; required: never in clear text; verify: required, and the "
        "certificate must be valid for the host; dane: required, and the host's TLSA records (RFC 7672) must "
        "vouch for the certificate.",
    )
    tls_on_connect: bool = switch(
        False, "TLS from the first octet, as smarthosts have it on port 465 (RFC 8314), instead of STARTTLS."
    )
    dane: bool = switch(
        True,
        "Where a host has TLSA records, its certificate must match them (RFC 7672). Only with trust_ad in "
        "[dns]; without it nothing is looked up.",
    )
    mta_sts: bool = switch(
        False,
        "Obey the MTA-STS policies of recipient domains (RFC 8461): they are fetched over HTTPS, which must "
        "not be blocked, and kept on disk.",
    )
    credentials: tuple[str, ...] = texts(
        (),
        "Names of [[credential]] to log in at the next hop with; the first that matches the sender. Needs "
        "tls = verify, or required where the certificate cannot be verified.",
    )

    # From which address

    sources: tuple[str, ...] = texts(
        (), "Names of [[source]] to send from. Empty: the address that the system chooses."
    )
    source_by: SourceBy = choice(
        SourceBy.MESSAGE,
        "message: each message has its source, by weight; sender: each sender, so that his reputation stays "
        "with one address.",
    )
    source_penalty: float = duration(
        2 * HOUR,
        "How long a source that a destination has refused for its reputation is not used for it, while there "
        "is another one.",
        most=7 * DAY,
    )
    ehlo_name: str = text("", "The name to say in EHLO. Empty: the relay's hostname.", form=Form.EHLO_NAME)

    # How much: connections, rates, sizes

    max_connections: int = count(
        20, "Open connections of this zone, so that one zone's mail cannot crowd out another's.", most=10_000
    )
    max_connections_per_destination: int = count(
        10,
        "Open connections to one destination (one set of MX hosts, however many domains they serve). "
        "Large providers start to refuse mail at 10 to 20.",
        most=10_000,
    )
    max_recipients_per_transaction: int = count(
        50,
        "Recipients of one message that are sent in one transaction. Servers must take 100 (RFC 5321 "
        "4.5.3.1.8); some take fewer.",
        most=10_000,
    )
    max_messages_per_connection: int = count(
        1000,
        "Messages after which a connection is closed and made anew, so that load spreads over the hosts "
        "again.",
    )
    connection_idle_timeout: float = duration(
        5.0,
        "How long an idle connection is kept for the next message; longer is impolite to busy servers.",
        most=HOUR,
    )
    max_rate: Rate | None = rate(
        'Transactions of this zone in a time, spread evenly: "600/1m". Empty: no limit.'
    )
    max_rate_per_destination: Rate | None = rate(
        'Transactions to one destination in a time, spread evenly: "100/1m". Empty: no limit.'
    )
    max_message_size: int = size(
        0, "Larger messages are returned to the sender (5.3.4). 0: no limit.", optional=True
    )

    # How long it is tried

    schedule: tuple[float, ...] = durations(
        (), "Delays between attempts of this zone, instead of those of [retry]. Empty: those."
    )
    max_attempts: int = count(
        0, "As max_attempts in [retry], for this zone. 0: that.", optional=True, most=10_000
    )
    max_age: float = duration(
        0.0,
        "How long this zone's mail is tried. 0: as [retry] says.",
        optional=True,
        most=YEAR,
    )
    in_doubt: InDoubt = choice(
        InDoubt.RETRY,
        "The connection broke after the message was sent and before the reply: it may have been "
        "delivered. retry risks a duplicate, hold waits for an operator, bounce risks a false report. "
        "None loses mail.",
    )

    # What is changed in it, and how it is sent

    dkim: DkimMode = choice(
        DkimMode.SIGN,
        "sign: with the [[dkim]] keys of the domain in From, if there are any; required: mail without a key "
        "waits; off.",
    )
    srs: bool = switch(False, "Rewrite senders by [srs], for mail that is forwarded through this zone.")
    header_remove: tuple[str, ...] = texts(
        (), "Header fields to take out before sending, by name.", form=Form.REMOVED_FIELDS
    )
    header_replace: tuple[str, ...] = texts(
        (),
        'Header fields to replace where a message has them: "Name: new value".',
        form=Form.NEW_FIELDS,
    )
    header_add: tuple[str, ...] = texts((), 'Header fields to add: "Name: value".', form=Form.NEW_FIELDS)
    chunking: bool = switch(
        True,
        "Send messages with BDAT (RFC 3030) to servers that offer CHUNKING: small ones go in one write "
        "with their commands, which saves a round trip, and no line end in them can be taken for the end of "
        "the message. The price: when a connection breaks before a small message is answered, all of it is "
        "in doubt, also what the server has refused (zones with another in_doubt than retry do not send in "
        "one write). Servers that offer it and do not know it are sent DATA.",
    )

    @property
    def mixes_domains(self) -> bool:
        """Recipients in several domains share a transaction where the host announces no limit."""
        return bool(self.next_hop) if self.mix_domains is None else self.mix_domains


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """[[route]]: first match wins; every condition given must match."""

    zone: str = text(
        "default", "The zone that mail goes to when all conditions given match.", form=Form.ZONE_NAME
    )
    set_priority: str = text(
        "",
        "The priority of mail that goes by this route: high, normal or bulk. Empty: what the user or the "
        "listener gave it.",
        form=Form.PRIORITY,
    )
    recipient_domain: tuple[str, ...] = texts(
        (),
        'The recipient\'s domain is one of these: "example.com"; "*.example.com" is every name below it; '
        '"*" is any.',
        form=Form.DOMAINS,
    )
    recipient: tuple[str, ...] = texts(
        (),
        'The recipient is one of these: "user@example.com", "example.com", "*.example.com", '
        '"bounce-*@example.com".',
        form=Form.ADDRESS_PATTERNS,
    )
    sender_domain: tuple[str, ...] = texts(
        (), "The envelope sender's domain is one of these, written as in recipient_domain.", form=Form.DOMAINS
    )
    sender: tuple[str, ...] = texts(
        (),
        'The envelope sender is one of these, written as in recipient; "<>" is the null sender, that of '
        "reports such as the relay's own.",
        form=Form.ADDRESS_PATTERNS,
    )
    user: tuple[str, ...] = texts((), 'The client authenticated as one of these; "*" is any user.')
    listener: tuple[str, ...] = texts(
        (),
        "The mail came in at one of these listeners, each written as its address is.",
        form=Form.LISTENS,
    )
    client: tuple[Network, ...] = networks(
        (), "The client has one of these addresses, or one in these networks."
    )
    certificate: tuple[str, ...] = texts(
        (),
        "The client showed one of these certificates: SHA-256 fingerprints, as in allow_certificates of "
        "[[listener]], which is what makes a listener ask for them.",
        form=Form.FINGERPRINTS,
    )
    priority: tuple[str, ...] = texts(
        (), 'The message has one of these priorities: "high", "normal", "bulk".', form=Form.PRIORITIES
    )
    min_size: int = size(0, "The message as it came has at least this size. 0: any.", least=1, optional=True)
    max_size: int = size(0, "The message has at most this size. 0: any.", least=1, optional=True)
    header: tuple[str, ...] = texts(
        (),
        'The message has one of these fields: "X-Stream" (any value) or "X-Stream: bulk" (its value '
        "contains the text).",
        form=Form.HEADERS,
    )

    @property
    def conditions(self) -> dict[str, tuple[object, ...]]:
        """Those that are given, by name."""
        named = ((name, getattr(self, name)) for name in _CONDITIONS)
        return {name: value if isinstance(value, tuple) else (value,) for name, value in named if value}


_CONDITIONS = tuple(
    field.name for field in dataclasses.fields(RouteSettings) if field.name not in ("zone", "set_priority")
)
