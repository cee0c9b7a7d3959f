"""The settings for sending mail: [[zone]], [[route]], [retry], [bounce], [delivery] and [dns].

Import them from `models`.
"""

# ruff: noqa: RUF009  (the makers return dataclasses.field(), which is what that rule asks for)

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from zonerelay.config.intake import Network
from zonerelay.config.options import (
    DAY,
    HOUR,
    KB,
    MB,
    MINUTE,
    YEAR,
    Form,
    choice,
    count,
    duration,
    durations,
    networks,
    rate,
    ratio,
    size,
    switch,
    text,
    texts,
)
from zonerelay.config.units import Rate


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


class RetryPolicyName(enum.StrEnum):
    SCHEDULE = "schedule"
    EXPONENTIAL = "exponential"
    QUADRATIC = "quadratic"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """[[route]]: first match wins; every condition given must match."""

    zone: str = text(
        "default", "The zone that mail goes to when all conditions given match.", form=Form.ZONE_NAME
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


_CONDITIONS = tuple(field.name for field in dataclasses.fields(RouteSettings) if field.name != "zone")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """[retry]. With `policy = "schedule"` the last delay repeats until `max_age`."""

    policy: RetryPolicyName = choice(
        RetryPolicyName.SCHEDULE,
        "schedule: the list below. exponential: 1, 5, 25, 125 and 625 minutes. quadratic: 1, 4, 9, 16 … "
        "minutes, ten attempts. schedule is the default because it alone tries for the 4 to 5 days that "
        "RFC 5321 4.5.4.1 asks for.",
    )
    schedule: tuple[float, ...] = durations(
        (1 * MINUTE, 5 * MINUTE, 15 * MINUTE, 30 * MINUTE, 1 * HOUR, 2 * HOUR, 4 * HOUR),
        "Delays between attempts; the last one repeats until max_age. Short ones first: greylisting and "
        "restarts are over in minutes.",
    )
    max_attempts: int = count(
        0,
        "Attempts after which a delivery is given up; 0: no limit but the policy's own, and max_age.",
        optional=True,
        most=10_000,
    )
    backoff: str = text(
        "",
        'A Python function instead of a policy, "module:function"; it is given the envelope and the '
        "number of attempts and returns seconds, or None to give up.",
        form=Form.FUNCTION,
    )
    jitter: float = ratio(
        0.1,
        "Each delay is varied by up to this part of it, so that mail deferred together does not come back "
        "together.",
    )
    max_age: float = duration(
        5 * DAY,
        "Mail that could not be delivered for this long goes back to its sender.",
        least=1.0,
        most=YEAR,
    )
    suspend_min: float = duration(
        30.0,
        "The first pause of a destination none of whose hosts can be reached; it doubles up to suspend_max.",
    )
    suspend_max: float = duration(
        10 * MINUTE, "The longest such pause: how late mail may be when a destination comes back."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BounceSettings:
    """[bounce]. `delay_warning` 0 turns warnings off."""

    enabled: bool = switch(True, "Report mail that could not be delivered to its sender (RFC 3464), from <>.")
    delay_warning: float = duration(
        4 * HOUR,
        "Tell the sender once when a message has waited this long. 0 turns it off.",
        most=YEAR,
        optional=True,
    )
    max_age: float = duration(
        1 * DAY,
        "How long to try to deliver a report itself. Shorter than for mail: most senders that cannot be "
        "reached for a day were forged.",
        least=1.0,
        most=YEAR,
    )
    return_size: int = size(
        50 * KB,
        "A report returns the header of the message, at most this much of it: a header can be long, and "
        "the report goes to somebody who may never have sent it. A failed message that is no larger comes "
        "back whole when its sender asked for that (RET=FULL).",
        most=MB,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySettings:
    """[delivery]: how long each phase of a conversation with a peer may take (RFC 5321 4.5.3.2)."""

    connect_timeout: float = duration(
        30.0, "Until a host accepts the connection. Short, because the next MX host may answer at once."
    )
    greeting_timeout: float = duration(5 * MINUTE, "Until the greeting; busy servers delay it on purpose.")
    ehlo_timeout: float = duration(5 * MINUTE, "Until the reply to EHLO or HELO.")
    starttls_timeout: float = duration(2 * MINUTE, "Until the reply to STARTTLS, and then for the handshake.")
    mail_timeout: float = duration(5 * MINUTE, "Until the reply to MAIL.")
    rcpt_timeout: float = duration(
        5 * MINUTE, "Until the reply to each RCPT: servers look up each recipient."
    )
    data_timeout: float = duration(2 * MINUTE, "Until the reply to DATA.")
    block_timeout: float = duration(3 * MINUTE, "Until the peer takes the next block of the message.")
    final_dot_timeout: float = duration(
        10 * MINUTE,
        "Until the reply to the message. The longest, because giving up here duplicates mail (RFC 1047).",
    )
    quit_timeout: float = duration(5.0, "Until the reply to QUIT: nothing depends on it.")
    max_hosts_per_attempt: int = count(
        5,
        "MX hosts tried in one attempt, as RFC 5321 5.1 lets us limit; the next attempt starts again.",
        most=100,
    )
    remember_broken_tls: float = duration(
        1 * HOUR,
        "How long a host whose TLS handshake failed is sent mail in clear text (tls = opportunistic "
        "only), so that not every message pays for the failure.",
        optional=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsSettings:
    """[dns]. `servers` empty: the system's resolvers."""

    servers: tuple[str, ...] = texts(
        (),
        'Resolvers to ask instead of the system\'s: "192.0.2.53", "127.0.0.1:5353". One on this machine is '
        "best.",
        form=Form.NAME_SERVERS,
    )
    trust_ad: bool = switch(
        False,
        "Believe these servers that an answer was validated by DNSSEC (the AD bit), which DANE needs. Only "
        "for a validating resolver on this machine, or over a path that nobody can tamper with.",
    )
    timeout: float = duration(
        10.0, "How long one look-up may take over all servers; then its mail is deferred.", most=5 * MINUTE
    )
    cache_size: int = count(
        10_000, "Domains whose hosts are remembered; each takes about a kilobyte of memory.", least=0
    )
    max_ttl: float = duration(
        1 * HOUR,
        "The longest that an answer is reused, whatever its TTL: moves are noticed within this time.",
    )
    negative_ttl: float = duration(
        1 * MINUTE, "How long a failed look-up is reused, so that a queue for one broken domain asks once."
    )
