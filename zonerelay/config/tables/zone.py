"""[[zone]], [[source]], [[destination]], [[credential]], [retry], [bounce], [delivery] and [dns]: sending
policies, their source addresses, limits and TLS modes for single destinations, logins at smarthosts, retry
schedules, bounces, the time limits of a session, and the resolvers.

A share must not be larger than the whole: a destination's connections are part of its zone's. Rates may have
different periods, so a destination's rate that is faster than its zone's only causes advice. No text in this
module contains a secret.
"""

import enum
import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zonerelay.config import endpoints
from zonerelay.config.endpoints import CAPTURE, NextHopKind
from zonerelay.config.options import forms
from zonerelay.config.options import options as declare
from zonerelay.config.options.options import DAY, HOUR, KB, MB, MINUTE, YEAR
from zonerelay.config.problems import Findings, KeyPath, Report, in_words, quoted, unreachable
from zonerelay.config.units import Rate, format_duration

# [dns]: the resolvers, whether they are trusted, and how long answers are cached.


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsSettings:
    """The DNS resolvers (`[dns]`)."""

    servers: tuple[str, ...] = declare.texts((), form=forms.name_server)
    """Resolvers instead of those in /etc/resolv.conf, which is read again when it changes: "192.0.2.53",
    "127.0.0.1:5353". One on this machine is best.
    """
    trust_ad: bool = declare.switch(False)
    """Trust these servers when they report that DNSSEC validated an answer (the AD bit), which DANE requires.
    Only for a validating resolver on this machine, or over a path that no attacker can tamper with.
    """
    timeout: float = declare.duration(10.0, most=5 * MINUTE)
    """The time limit of one lookup over all servers. After it, the mail is deferred."""
    cache_size: int = declare.count(10_000, least=0)
    """The number of domains whose hosts are cached, at about a kilobyte each."""
    max_ttl: float = declare.duration(1 * HOUR)
    """The maximum time for which an answer is cached, whatever its TTL."""
    negative_ttl: float = declare.duration(1 * MINUTE)
    """How long a failed lookup is cached."""


def dns_advice(dns: DnsSettings) -> Findings:
    if dns.trust_ad and not dns.servers:
        remedy = "set dns.servers to a validating resolver on this machine"
        yield "trust_ad", f"the system's resolvers are not known to be trustworthy; {remedy}"
    for each in dns.servers if dns.trust_ad else ():
        if not ipaddress.ip_address(endpoints.parse_name_server(each).address).is_loopback:
            forge = "an attacker on the path could forge the AD flag of its answers"
            yield "trust_ad", f"{each} is not on this machine; {forge}"


def retry_problems(retry: "RetrySettings", report: Report) -> Findings:
    if report.given("retry", "schedule"):
        if not retry.schedule:
            yield "schedule", 'must contain at least one delay, for example ["5m"]'
        elif retry.policy is not RetryPolicyName.SCHEDULE:
            yield "schedule", f'has no effect with policy = "{retry.policy}"; remove one of them'
    if retry.backoff and report.given("retry", "policy"):
        yield "backoff", "replaces policy; remove one of them"
    if retry.suspend_min > retry.suspend_max:
        yield "suspend_min", "must not be longer than suspend_max, to which it is doubled"


class RetryPolicyName(enum.StrEnum):
    """The name of a built-in retry policy."""

    SCHEDULE = "schedule"
    EXPONENTIAL = "exponential"
    QUADRATIC = "quadratic"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """The retry schedule for deferred deliveries (docs/deliver/retry.md)."""

    policy: RetryPolicyName = declare.choice(RetryPolicyName.SCHEDULE)
    """schedule: the list below. exponential: 1, 5, 25, 125 and 625 minutes. quadratic: 1, 4, 9, 16 … minutes,
    ten attempts. Only schedule covers the 4 to 5 days of RFC 5321 4.5.4.1.
    """
    schedule: tuple[float, ...] = declare.durations(
        (1 * MINUTE, 5 * MINUTE, 15 * MINUTE, 30 * MINUTE, 1 * HOUR, 2 * HOUR, 4 * HOUR)
    )
    """Delays between attempts. The last one is repeated until max_age."""
    max_attempts: int = declare.count(0, optional=True, most=10_000)
    """Attempts after which a delivery fails. 0: only the limits of the policy and max_age."""
    backoff: str = declare.text("", form=forms.function)
    """A Python function instead of a policy, "module:function" (docs/deliver/retry.md)."""
    jitter: float = declare.ratio(0.1)
    """The fraction by which each delay is varied randomly."""
    max_age: float = declare.duration(5 * DAY, least=1.0, most=YEAR)
    """Mail that could not be delivered for this time is returned to its sender."""
    suspend_min: float = declare.duration(30.0)
    """The first pause of a destination if none of its hosts can be reached. It doubles up to suspend_max."""
    suspend_max: float = declare.duration(10 * MINUTE)
    """The longest such pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BounceSettings:
    """Bounces and other DSNs to senders (RFC 3464)."""

    enabled: bool = declare.switch(True)
    """Send a DSN (RFC 3464) from <> to the sender of mail that could not be delivered."""
    delay_warning: float = declare.duration(4 * HOUR, most=YEAR, optional=True)
    """Notify the sender once if a message has waited this long. 0: never."""
    max_age: float = declare.duration(1 * DAY, least=1.0, most=YEAR)
    """How long a DSN itself is tried."""
    return_size: int = declare.size(50 * KB, most=MB)
    """The maximum size of the returned header in a DSN. A failed message up to this size is returned
    completely if its sender requested that (RET=FULL).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySettings:
    """The time limits for each phase of a session with another server. The defaults are those of RFC 5321
    4.5.3.2, if it has one.
    """

    connect_timeout: float = declare.duration(30.0)
    """Until a host accepts the connection. It is short, because the next MX host may respond immediately."""
    greeting_timeout: float = declare.duration(5 * MINUTE)
    """Until the greeting."""
    ehlo_timeout: float = declare.duration(5 * MINUTE)
    """Until the reply to EHLO or HELO."""
    starttls_timeout: float = declare.duration(2 * MINUTE)
    """Until the reply to STARTTLS, and then for the handshake."""
    mail_timeout: float = declare.duration(5 * MINUTE)
    """Until the reply to MAIL."""
    rcpt_timeout: float = declare.duration(5 * MINUTE)
    """Until the reply to each RCPT."""
    data_timeout: float = declare.duration(2 * MINUTE)
    """Until the reply to DATA."""
    block_timeout: float = declare.duration(3 * MINUTE)
    """Until the peer accepts the next block of the message."""
    final_dot_timeout: float = declare.duration(10 * MINUTE)
    """Until the reply to the message. A timeout here duplicates mail (RFC 1047)."""
    quit_timeout: float = declare.duration(5.0)
    """Until the reply to QUIT."""
    max_hosts_per_attempt: int = declare.count(5, most=100)
    """The number of MX hosts tried in one attempt."""
    remember_broken_tls: float = declare.duration(1 * HOUR, optional=True)
    """How long mail is sent unencrypted to a host whose TLS handshake failed (tls = opportunistic only)."""


def shorter_delays(schedule: tuple[float, ...]) -> Findings:
    """Yield a warning about a retry schedule in which a delay is shorter than the previous one."""
    for earlier, later in pairwise(schedule):
        if later < earlier:
            shown = f"{format_duration(later)} follows {format_duration(earlier)}"
            yield "schedule", f"{shown}, so mail is retried more often the longer it is queued"
            return


DEFAULT_ZONE = "default"
DANE_NEEDS_TRUST = (
    "dane requires validated DNSSEC answers: set trust_ad = true in [dns], with a validating resolver on "
    "this machine"
)


class TlsMode(enum.StrEnum):
    """The TLS mode of a zone for MX hosts."""

    NONE = "none"
    OPPORTUNISTIC = "opportunistic"
    REQUIRED = "required"
    VERIFY = "verify"
    DANE = "dane"


WEAK_TLS = {TlsMode.NONE, TlsMode.OPPORTUNISTIC}


class SourceUnit(enum.StrEnum):
    """Whether a source address is chosen for each message, or for all mail of a sender."""

    MESSAGE = "message"
    SENDER = "sender"


class DkimMode(enum.StrEnum):
    """Whether a zone signs mail with DKIM."""

    OFF = "off"
    SIGN = "sign"
    REQUIRED = "required"


class BodyConversion(enum.StrEnum):
    """Whether messages are converted to 7 bits for hosts without 8BITMIME."""

    UNSIGNED = "unsigned"
    ALWAYS = "always"
    NEVER = "never"


class InDoubtAction(enum.StrEnum):
    """What happens to a delivery whose connection was lost before the final reply."""

    RETRY = "retry"
    HOLD = "hold"
    BOUNCE = "bounce"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneSettings:
    """A sending policy; its limits are totals over all workers (docs/deliver/sending.md). If the file has no
    [[zone]], there is one named default.
    """

    name: str = declare.text("default", form=forms.name)
    """The name of this zone in routes, logs, metrics and the spool: letters, digits, dot, dash and
    underscore.
    """

    # Where it is sent

    next_hop: str = declare.text("", form=forms.next_hops)
    """The destination of all mail of this zone. Empty: the MX hosts of each recipient's domain. A smarthost:
    "smtp.example.net" (its MX hosts), "[smtp.example.net]:587" (that host, no MX lookup), "192.0.2.1:25" or
    "[2001:db8::1]:25". Several, separated by commas: the first that can be reached. "capture:": mail is kept
    for inspection instead of sent (docs/start/sandbox.md).
    """
    next_hop_share: bool = declare.switch(False)
    """Distribute the mail evenly over several next hops, instead of preferring the first."""
    mix_domains: bool | None = declare.switch_or_auto()
    """Whether recipients in several domains may share a transaction. auto: yes at a next hop, and at MX hosts
    that announce it with LIMITS RCPTDOMAINMAX (RFC 9422); true: always; false: never. A limit that a host
    announces is never exceeded.
    """
    port: int = declare.count(25, most=65_535)
    """The port of MX hosts, and of a next hop without a port."""
    ipv6: bool = declare.switch(True)
    """Also deliver over IPv6."""
    allow_private_addresses: bool = declare.switch(False)
    """Deliver to MX hosts that resolve to loopback or private addresses. Every owner of a domain can point an
    MX at servers inside your network. A next_hop is not affected.
    """

    # TLS, and logging in at next hops

    tls: TlsMode = declare.choice(TlsMode.OPPORTUNISTIC)
    """none; opportunistic: STARTTLS if it is offered, with any certificate, and unencrypted if it fails;
    required: never unencrypted; verify: required, and the certificate must be valid for the host; dane:
    required, and the host's TLSA records (RFC 7672) must match the certificate (docs/deliver/tls.md).
    """
    tls_on_connect: bool = declare.switch(False)
    """TLS from the first byte instead of STARTTLS, as on port 465 of smarthosts (RFC 8314)."""
    dane: bool = declare.switch(True)
    """If a host has TLSA records, its certificate must match them (RFC 7672). Without trust_ad in [dns], they
    are not looked up.
    """
    mta_sts: bool = declare.switch(False)
    """Obey the MTA-STS policies of recipient domains (RFC 8461), which are fetched over HTTPS."""
    credentials: tuple[str, ...] = declare.texts(())
    """Names of [[credential]] tables for the login at the next hop; the first that matches the sender is
    used. They require tls = verify or dane, or required if the certificate cannot be verified.
    """

    # From which address

    sources: tuple[str, ...] = declare.texts(())
    """Names of [[source]] to send from. Empty: the address that the system chooses."""
    source_by: SourceUnit = declare.choice(SourceUnit.MESSAGE)
    """message: a source is chosen for each message, by weight; sender: for each sender."""
    source_penalty: float = declare.duration(2 * HOUR, most=7 * DAY)
    """How long a source is not used for a destination that has refused it for its reputation, if there is
    another source.
    """
    ehlo_name: str = declare.text("", form=forms.ehlo_name)
    """The name in EHLO. Empty: the relay's hostname."""

    # How much: connections, rates, sizes

    max_connections: int = declare.count(100, most=10_000)
    """Open connections of this zone. Hosts that do not respond hold some of them, for half a minute each."""
    max_connections_per_destination: int = declare.count(10, most=10_000)
    """Open connections to one destination (one set of MX hosts, however many domains they serve). Large
    providers start to refuse mail at 10 to 20.
    """
    max_recipients_per_transaction: int = declare.count(50, most=10_000)
    """Recipients of one message in one transaction. Servers must accept 100 (RFC 5321 4.5.3.1.8); some accept
    fewer.
    """
    max_messages_per_connection: int = declare.count(1000)
    """Messages after which a connection is closed and opened again."""
    connection_idle_timeout: float = declare.duration(5.0, most=HOUR)
    """How long an idle connection is kept for the next message."""
    max_rate: Rate | None = declare.rate()
    """The maximum rate of transactions of this zone, evenly distributed: "600/1m". Empty: no limit."""
    max_rate_per_destination: Rate | None = declare.rate()
    """The same to one destination: "100/1m"."""
    max_message_size: int = declare.size(0, optional=True)
    """Larger messages are returned to the sender (5.3.4). 0: no limit."""

    # How long it is tried

    schedule: tuple[float, ...] = declare.durations(())
    """Delays between attempts in this zone. Empty: those of [retry]."""
    max_attempts: int = declare.count(0, optional=True, most=10_000)
    """Attempts after which a delivery in this zone fails. 0: max_attempts of [retry]."""
    max_age: float = declare.duration(0.0, optional=True, most=YEAR)
    """How long this zone's mail is tried. 0: max_age of [retry]."""
    in_doubt: InDoubtAction = declare.choice(InDoubtAction.RETRY)
    """What to do if the connection is lost after the message was sent and before the reply. retry risks a
    duplicate; hold waits for an operator; bounce risks a false DSN.
    """

    # What is changed in it, and how it is sent

    dkim: DkimMode = declare.choice(DkimMode.SIGN)
    """sign: with the [[dkim]] keys of the domain in From, if there are any; required: mail without a key
    waits; off.
    """
    srs: bool = declare.switch(False)
    """Rewrite senders with [srs], for mail that is forwarded through this zone."""
    header_remove: tuple[str, ...] = declare.texts((), form=forms.removed_field)
    """Header fields to remove before sending, by name."""
    header_replace: tuple[str, ...] = declare.texts((), form=forms.new_field)
    """Header fields to replace if a message has them: "Name: new value"."""
    header_add: tuple[str, ...] = declare.texts((), form=forms.new_field)
    """Header fields to add: "Name: value"."""
    chunking: bool = declare.switch(True)
    """Send messages of up to 64 KB with BDAT (RFC 3030) to servers that offer CHUNKING, so that no line in
    them can be taken for the end of the message. Servers that do not answer or accept it get DATA for a day;
    `zonerelay explain` shows this.
    """
    convert: BodyConversion = declare.choice(BodyConversion.UNSIGNED)
    """Which mail is converted to seven bits for servers without 8BITMIME or SMTPUTF8, and to lines of at most
    998 bytes for all servers. unsigned: messages without a DKIM signature of their author; always: also
    signed ones, whose signature breaks; never: none.
    """

    @property
    def mixes_domains(self) -> bool:
        """Whether recipients in several domains may share a transaction with a host that announces no
        limit.
        """
        return bool(self.next_hop) if self.mix_domains is None else self.mix_domains


def check_default_zone(zones: Sequence[ZoneSettings], report: Report) -> None:
    names = [zone.name for zone in zones]
    if DEFAULT_ZONE not in names:
        there_is = f"the zones are {in_words(names)}" if names else "no zone is configured"
        text = f'mail that matches no route is sent through the zone "{DEFAULT_ZONE}", but {there_is}; add it'
        report.refuse(("zone",), text)


def zone_problems(
    zone: ZoneSettings, retry: RetrySettings, report: Report, *, trusts_dns: bool, signs: bool, has_srs: bool
) -> Findings:
    """Yield the problems of a zone. `trusts_dns`: [dns] declares that answers are validated. `signs` means
    that there is a DKIM key. `has_srs`: [srs] has a domain.
    """
    hops = endpoints.split_next_hops(zone.next_hop)
    twice = next((hop for at, hop in enumerate(hops) if hop.lower() in map(str.lower, hops[:at])), None)
    if twice is not None:
        yield "next_hop", f"{twice} is listed twice"
    elif CAPTURE in hops[1:] or CAPTURE in hops[:-1]:
        yield "next_hop", f'"{CAPTURE}" cannot be combined with other next hops'
    max_age, whose = zone.max_age or retry.max_age, "max_age" if zone.max_age else "max_age in [retry]"
    if zone.schedule and zone.schedule[0] > max_age and report.sound("retry"):
        first = f"the first delay of {format_duration(zone.schedule[0])} is longer than"
        yield "schedule", f"{first} {whose} = {format_duration(max_age)}", "schedule", "max_age"
    if zone.tls is TlsMode.DANE:
        if not trusts_dns:
            yield "tls", DANE_NEEDS_TRUST
        if not zone.dane:
            yield "dane", "false contradicts tls = dane; remove one of them"
        for hop in hops:
            if endpoints.parse_next_hop(hop).kind is NextHopKind.ADDRESS:
                yield "next_hop", f"{hop} is an address, but tls = dane requires a host name"
    if zone.tls_on_connect and zone.tls is TlsMode.NONE:
        yield "tls_on_connect", "uses implicit TLS, which contradicts tls = none; remove one of them", "tls"
    if zone.dkim is DkimMode.REQUIRED and not signs:
        yield "dkim", "requires a [[dkim]] key: without one, all mail of this zone would be deferred"
    if zone.srs and not has_srs:
        yield "srs", "requires [srs] with a domain and a secret"


def check_shares(zones: Sequence[ZoneSettings], report: Report) -> tuple[ZoneSettings, ...]:
    """Return the zones, with a limit per destination that exceeds the limit of the zone reduced to it. Refuse
    a larger limit that the file contains.
    """
    key = "max_connections_per_destination"
    for at, zone in enumerate(zones):
        most, whole = zone.max_connections_per_destination, zone.max_connections
        if most > whole and report.given("zone", at, key) and report.sound("zone", at, "max_connections"):
            text = f"{most} is more than max_connections = {whole}, the limit of the whole zone"
            report.refuse(("zone", at, key), text)
    return tuple(
        replace(
            zone,
            max_connections_per_destination=min(zone.max_connections_per_destination, zone.max_connections),
        )
        for zone in zones
    )


def zone_advice(zone: ZoneSettings) -> Findings:
    yield from _tls_advice(zone)
    yield from shorter_delays(zone.schedule)
    if is_faster(zone.max_rate_per_destination, zone.max_rate):
        slower = f"max_rate = {zone.max_rate} of the whole zone is slower"
        yield "max_rate_per_destination", f"never reached: {slower}"
    if zone.mix_domains and not zone.next_hop:
        defer = "Google and other providers defer all recipients except those in the first domain"
        yield "mix_domains", f"true in a zone that sends to MX hosts: {defer}"
    if zone.next_hop_share and len(endpoints.split_next_hops(zone.next_hop)) < 2:
        yield "next_hop_share", "has no effect, because the zone has fewer than two next hops"
    if zone.mta_sts and zone.next_hop:
        yield "mta_sts", "has no effect with a next_hop, because policies apply only to MX hosts"


def _tls_advice(zone: ZoneSettings) -> Iterator[tuple[str, str]]:
    if zone.next_hop:
        return
    if zone.tls is TlsMode.NONE:
        yield "tls", f"none: mail of zone {zone.name} is sent in clear text even where TLS is offered"
    if zone.tls is TlsMode.DANE:
        mail = f"mail of zone {zone.name} to domains without DNSSEC and TLSA records"
        yield "tls", f"dane: {mail} is not delivered"
    if zone.tls_on_connect:
        yield "tls_on_connect", "requires a next_hop, because MX hosts do not support implicit TLS"


def is_faster(rate: Rate | None, whole: Rate | None) -> bool:
    return rate is not None and whole is not None and rate.interval < whole.interval


# [[source]]: the addresses that zones send from.
#
# The file is valid whether or not this machine has the addresses. `check-config` and the start report missing
# ones, because an address may come up later than the relay.

_FAMILIES = {4: "IPv4", 6: "IPv6"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """A source address for outgoing connections (docs/deliver/sources.md). Zones name the sources that they
    use. Without any, the system chooses.
    """

    name: str = declare.text("", form=forms.name, required=True)
    """The name of this source in zones, logs and metrics."""
    address: tuple[str, ...] = declare.texts((), form=forms.ip_address, required=True)
    """The addresses of this machine to send from: one IPv4 address, one IPv6 address, or both. With one,
    hosts are reached over that address family only.
    """
    ehlo_name: str = declare.text("", form=forms.ehlo_name)
    """The name in EHLO from these addresses, which should resolve back to it. Empty: the zone's."""
    weight: int = declare.count(1, least=0, most=1000, optional=True)
    """The share of the mail, relative to the other sources of a zone. 0: none."""


def check_sources(sources: Sequence[SourceSettings], zones: Sequence[ZoneSettings], report: Report) -> None:
    """Report combinations of sources with which a zone could not send its mail. Names of sources are checked
    before.
    """
    known = {source.name: source for source in sources}
    for at, zone in enumerate(zones if report.all_sound("source", "name", len(sources)) else ()):
        path: KeyPath = ("zone", at, "sources")
        named = [known[name] for name in zone.sources if name in known]
        if not named or not report.sound(*path):
            continue
        if not any(source.weight for source in named):
            report.refuse(path, "all these sources have weight = 0, so no mail of this zone could be sent")
        for each in named if not zone.ipv6 and report.sound("zone", at, "ipv6") else ():
            if each.address and all(":" in ip for ip in each.address):
                only = f"{quoted(each.name)} has only IPv6 addresses, but this zone has ipv6 = false"
                report.refuse(path, only)


def source_advice(sources: Sequence[SourceSettings], zones: Sequence[ZoneSettings]) -> Findings:
    used = {name for zone in zones for name in zone.sources}
    for at, source in enumerate(sources):
        if source.name not in used:
            yield (at,), f"the source {source.name} is not used by any zone"


def address_problems(sources: Sequence[SourceSettings]) -> Findings:
    taken: dict[str, int] = {}
    for at, source in enumerate(sources):
        for index, address in enumerate(source.address):
            problem = _problem_of(address) or _problem_beside(address, source.address[:index])
            there = taken.setdefault(address, at)
            if not problem and there != at:
                problem = f"{address} is already an address of source[{there}]; its mail would use two names"
            if problem:
                yield (at, "address", index), problem


def _problem_of(text: str) -> str:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return f'{quoted(text)} is an IPv4 address; write "{address.ipv4_mapped}"'
        if address.scope_id is not None or address.is_link_local:
            return f"{quoted(text)} is a link-local address, which cannot be used as a source"
    return ""


def _problem_beside(text: str, before: tuple[str, ...]) -> str:
    family = ipaddress.ip_address(text).version
    if all(ipaddress.ip_address(other).version != family for other in before):
        return ""
    return f"a source may have only one {_FAMILIES[family]} address; add another [[source]] for {text}"


def destination_problems(
    entry: "DestinationSettings", zones: Sequence[ZoneSettings], *, trusts_dns: bool
) -> Findings:
    """Yield the problems of a [[destination]] table. `trusts_dns`: [dns] declares that answers are validated,
    as DANE needs.
    """
    if entry.tls_names and entry.tls_certificates:
        whatever = "the names in these certificates are not checked; remove tls_names"
        yield "tls_certificates", whatever
    own = _zones_of(entry, zones)
    most = max((zone.max_connections for zone in own), default=entry.max_connections)
    if most < entry.max_connections:
        more = f"{entry.max_connections} is more than max_connections = {most}, the limit of the whole zone"
        yield "max_connections", more
    named = [zone.name for zone in own if entry.zone and zone.credentials]
    if entry.tls in WEAK_TLS and named:
        yield "tls", f"is {entry.tls}, but zone {named[0]} logs in, which requires TLS"
    if entry.tls is TlsMode.DANE and not trusts_dns:
        yield "tls", DANE_NEEDS_TRUST


# [[destination]]: limits and TLS of a zone for some of its destinations.


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationSettings:
    """Other limits or TLS for some destinations (docs/deliver/destinations.md). The first entry whose
    conditions all match is used; options that it omits are as in the zone.
    """

    domain: tuple[str, ...] = declare.texts((), form=forms.domain)
    """Mail for these recipient domains: "example.com", "*.example.com" (every name below it)."""
    mx: tuple[str, ...] = declare.texts((), form=forms.domain)
    """Mail for these MX hosts, or this next hop, written like domains. All hosts must match:
    "*.mail.protection.outlook.com" is every domain hosted there.
    """
    zone: tuple[str, ...] = declare.texts(())
    """Only mail of these zones. Empty: of all."""
    tls: TlsMode | None = declare.choice_or("zone", TlsMode)
    """zone: as in the zone; otherwise as tls of [[zone]]."""
    tls_names: tuple[str, ...] = declare.texts((), form=forms.domain, needs='tls = "verify"')
    """Names to accept in the certificate with tls = verify, instead of the host's: "example.com",
    "*.example.com".
    """
    tls_certificates: tuple[str, ...] = declare.texts((), form=forms.fingerprint, needs='tls = "verify"')
    """With tls = verify: accept only these certificates, whoever issued them, by their SHA-256
    fingerprints.
    """
    max_connections: int = declare.count(0, optional=True, most=10_000)
    """Instead of max_connections_per_destination. 0: as in the zone."""
    max_recipients_per_transaction: int = declare.count(0, optional=True, most=10_000)
    """Recipients of one transaction. 0: as in the zone."""
    max_messages_per_connection: int = declare.count(0, optional=True)
    """Messages on one connection. 0: as in the zone."""
    max_rate: Rate | None = declare.rate()
    """Instead of max_rate_per_destination: "100/1m". Empty: as in the zone."""


def destination_advice(
    destinations: Sequence[DestinationSettings], zones: Sequence[ZoneSettings]
) -> Findings:
    named = ({"domain": each.domain, "mx": each.mx, "zone": each.zone} for each in destinations)
    conditions = [{name: frozenset(values) for name, values in each.items() if values} for each in named]
    for at, other in unreachable(conditions):
        yield (at,), f"never matches, because destination[{other}] comes first and matches all its mail"
    for at, entry in enumerate(destinations):
        own = _zones_of(entry, zones)
        if entry.domain and own and all(zone.next_hop for zone in own):
            compared = "to a next hop, not by domain; use mx to match the next hop"
            yield (at, "domain"), f"never matches: {_of(own)} {compared}"
        if own and all(is_faster(entry.max_rate, zone.max_rate) for zone in own):
            whose = f"zone {own[0].name}" if len(own) == 1 else "all its zones"
            yield (at, "max_rate"), f"never reached: max_rate of {whose} is slower"


def _zones_of(entry: DestinationSettings, zones: Sequence[ZoneSettings]) -> list[ZoneSettings]:
    """Return the zones whose mail a [[destination]] table can match."""
    return [zone for zone in zones if not entry.zone or zone.name in entry.zone]


def _of(zones: Sequence[ZoneSettings]) -> str:
    if len(zones) == 1:
        return f"mail of zone {zones[0].name} is sent"
    return f"mail of zones {in_words(zone.name for zone in zones)} is sent"


# [[credential]]: the logins at smarthosts, and the zones that use them.


_PASSWORDS_END = {
    "office365.com": (
        "Microsoft 365 disables password logins by default at the end of December 2026 (550 5.7.30)"
    ),
    "smtp-mail.outlook.com": "Outlook.com has not accepted passwords since September 2024",
}
"""Smarthosts, including their subdomains, that are ending logins by password. Microsoft: MC786329."""


class SaslMechanismName(enum.StrEnum):
    """The SASL mechanism for a login at a smarthost."""

    AUTO = "auto"
    PLAIN = "plain"
    LOGIN = "login"
    SCRAM_SHA_256 = "scram-sha-256"
    SCRAM_SHA_1 = "scram-sha-1"
    XOAUTH2 = "xoauth2"


class OauthGrant(enum.StrEnum):
    """The OAuth grant with which access tokens are requested."""

    REFRESH_TOKEN = "refresh_token"  # noqa: S105 - the name of a grant (RFC 6749 6), not a secret
    CLIENT_CREDENTIALS = "client_credentials"


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialSettings:
    """A login at a smarthost (docs/deliver/smarthosts.md). Zones name the credentials that they use. Secrets
    are never in this file.
    """

    name: str = declare.text("", form=forms.name, required=True)
    """The name of this credential in zones, logs and metrics."""
    sender: tuple[str, ...] = declare.texts((), form=forms.address_pattern)
    """Only for mail of these envelope senders: "user@example.com", "example.com", "*.example.com", "<>".
    Empty: for all mail. A zone uses the first of its credentials that matches.
    """
    user: str = declare.text("", required=True)
    """The user name at the smarthost."""
    password: str = declare.text("", form=forms.secret)
    """The place of the password: a file ("/etc/zonerelay/smarthost.password"), "env:NAME" (environment) or
    "credential:NAME" (systemd's LoadCredential), never the password itself.
    """
    mechanism: SaslMechanismName = declare.choice(SaslMechanismName.AUTO)
    """auto: the strongest that the smarthost offers of SCRAM-SHA-256, SCRAM-SHA-1, PLAIN and LOGIN, or
    xoauth2 if token_url is set. After a refused login, no other is tried.
    """
    token_url: str = declare.text("", form=forms.url)
    """XOAUTH2: the https:// URL from which access tokens are fetched."""
    grant: OauthGrant = declare.choice(OauthGrant.REFRESH_TOKEN)
    """XOAUTH2: refresh_token, for access that a user has granted, or client_credentials, for an application
    that an administrator has authorized.
    """
    client_id: str = declare.text("", needs="token_url")
    """XOAUTH2: the application's id."""
    client_secret: str = declare.text("", form=forms.secret, needs="token_url")
    """XOAUTH2: the place of the application's secret, as in password. Some applications need none."""
    refresh_token: str = declare.text("", form=forms.secret, needs="token_url")
    """XOAUTH2: the place of the refresh token, as in password. A new one is written to the same file, or next
    to the spool if that is not possible.
    """
    scope: str = declare.text("", needs="token_url")
    """XOAUTH2: the requested scope, as in "https://outlook.office365.com/.default"."""


def credential_problems(credential: CredentialSettings) -> Findings:
    if credential.token_url or credential.mechanism is SaslMechanismName.XOAUTH2:
        if credential.password:
            yield "password", "a password cannot be used with XOAUTH2; remove it"
        yield from _oauth_problems(credential)
    elif not credential.password:
        example = '"/etc/zonerelay/smarthost.password"'
        yield "password", f"is required: set it to the path of the secret, for example {example}"


def _oauth_problems(credential: CredentialSettings) -> Findings:
    if not credential.token_url:
        yield "token_url", "is required: set it to the URL of the server that issues access tokens"
        return
    if credential.mechanism not in {SaslMechanismName.AUTO, SaslMechanismName.XOAUTH2}:
        no_tokens = f"{credential.mechanism} does not support access tokens"
        yield "mechanism", f'{no_tokens}; use "xoauth2", or remove token_url'
    if not credential.client_id:
        yield "client_id", "is required: set it to the id of the application at the token server"
    if credential.grant is OauthGrant.REFRESH_TOKEN and not credential.refresh_token:
        yield "refresh_token", "is required: set it to the path of the secret, or choose another grant"
    if credential.grant is OauthGrant.CLIENT_CREDENTIALS:
        if not credential.client_secret:
            yield "client_secret", "is required with grant = client_credentials"
        if credential.refresh_token:
            yield "refresh_token", "has no effect with grant = client_credentials; remove it"


def login_problems(zone: ZoneSettings) -> Findings:
    """Yield the problems of a zone with credentials for its next hop."""
    if zone.credentials and not zone.next_hop:
        every = "would be sent to every MX host; set the zone's next_hop, or remove the credentials"
        yield "credentials", every, "credentials", "next_hop"
    if zone.credentials and zone.tls in WEAK_TLS:
        remedy = "use verify, or required if the next hop's certificate cannot be verified"
        yield "tls", f"is {zone.tls}, but a login is never sent in clear text; {remedy}", "credentials"


def credential_advice(credentials: Sequence[CredentialSettings], zones: Sequence[ZoneSettings]) -> Findings:
    used = {name for zone in zones for name in zone.credentials}
    for at, credential in enumerate(credentials):
        if credential.name not in used:
            yield ("credential", at), f"the credential {credential.name} is not used by any zone"
    for_some = {credential.name for credential in credentials if credential.sender}
    for at, zone in enumerate(zones):
        if not zone.credentials:
            continue
        for name, host, why in passwords_that_end(credentials, zone):
            yield ("zone", at, "credentials"), f"{name} uses a password at {host}: {why}"
        if zone.tls is TlsMode.REQUIRED:
            redirects = "an attacker who can redirect connections could read the password or token"
            yield ("zone", at, "tls"), f"required: {redirects}; verify prevents that"
        if for_some.issuperset(zone.credentials):
            others = "mail of other senders, such as bounces (<>), stays queued until it expires"
            yield ("zone", at, "credentials"), f"each credential is limited to some senders; {others}"


def passwords_that_end(
    credentials: Sequence[CredentialSettings], zone: ZoneSettings
) -> Iterator[tuple[str, str, str]]:
    """Yield the credential, the host and the reason for each password login that the provider is going to
    disable.
    """
    passwords = [each.name for each in credentials if each.name in zone.credentials and each.password]
    if not passwords:
        return
    hosts = [endpoints.parse_next_hop(each).host for each in endpoints.split_next_hops(zone.next_hop)]
    for host in hosts:
        for ending, why in _PASSWORDS_END.items():
            if f".{host}".endswith(f".{ending}"):
                for name in passwords:
                    yield name, host, f"{why}; use XOAUTH2 (token_url; docs/deliver/smarthosts.md)"
