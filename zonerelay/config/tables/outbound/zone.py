"""[[zone]]: a named way of sending: next hop, TLS, limits and retry schedule of its mail.

A share must not be larger than the whole: a destination's connections are part of its zone's. Rates may be
written for times of their own, so a destination's that is faster than its zone's is only remarked.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zonerelay.config.endpoints import CAPTURE, NextHopKind, parse_next_hop, split_next_hops
from zonerelay.config.options import forms
from zonerelay.config.options.options import (
    DAY,
    HOUR,
    YEAR,
    choice,
    count,
    duration,
    durations,
    rate,
    size,
    switch,
    switch_or_auto,
    text,
    texts,
)
from zonerelay.config.problems import KeyPath, Report
from zonerelay.config.tables.outbound.delivery import RetrySettings, shorter_delays
from zonerelay.config.units import Rate, format_duration
from zonerelay.config.wording import in_words, quoted

DEFAULT_ZONE = "default"
DANE_NEEDS_TRUST = (
    "dane needs to know what DNSSEC vouches for: set trust_ad = true in [dns], with a validating resolver on "
    "this machine"
)


class TlsMode(enum.StrEnum):
    """The demand of a zone for TLS towards MX hosts."""

    NONE = "none"
    OPPORTUNISTIC = "opportunistic"
    REQUIRED = "required"
    VERIFY = "verify"
    DANE = "dane"


class SourceBy(enum.StrEnum):
    """The mail that stays with one source: a message, or all mail of a sender."""

    MESSAGE = "message"
    SENDER = "sender"


class DkimMode(enum.StrEnum):
    OFF = "off"
    SIGN = "sign"
    REQUIRED = "required"


class Convert(enum.StrEnum):
    UNSIGNED = "unsigned"
    ALWAYS = "always"
    NEVER = "never"


class InDoubt(enum.StrEnum):
    RETRY = "retry"
    HOLD = "hold"
    BOUNCE = "bounce"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneSettings:
    """[[zone]]. Limits are totals over all workers."""

    name: str = text("default", form=forms.zone_name)
    """What routes, logs, metrics and the spool call this zone: letters, digits, dot, dash and underscore.
    Mail that no route matches goes to the zone named default.
    """

    # Where it goes

    next_hop: str = text("", form=forms.next_hops)
    """Where all mail of this zone goes. Empty: to the MX hosts of each recipient's domain. A smarthost:
    "smtp.example.net" (its MX hosts), "[smtp.example.net]:587" (that host, no MX lookup), "192.0.2.1:25" or
    "[2001:db8::1]:25". Several, with commas between: the first that can be reached is used. "capture:": mail
    is not sent but kept, to be looked at on the page ([capture], docs/sandbox.md).
    """
    next_hop_share: bool = switch(False)
    """Spread the mail over several next hops evenly, not to the first that can be reached."""
    mix_domains: bool | None = switch_or_auto()
    """Whether recipients in several domains may share a transaction. auto: at a next hop yes; at MX hosts
    only where the host announces with LIMITS RCPTDOMAINMAX (RFC 9422) that it takes them, because Google
    defers all but the first domain. true: always; false: never. What a host announces is never exceeded.
    """
    port: int = count(25, most=65_535)
    """The port of MX hosts, and of a next hop that names none. 25 is the port of mail."""
    ipv6: bool = switch(True)
    """Also deliver over IPv6. Turn it off when this machine has no working IPv6."""
    allow_private_addresses: bool = switch(False)
    """Deliver to MX hosts that resolve to loopback or private addresses. Off, because every owner of a domain
    can point an MX at them and so reach servers inside your network. A next_hop is not affected.
    """

    # TLS, and logging in at next hops

    tls: TlsMode = choice(TlsMode.OPPORTUNISTIC)
    """none; opportunistic: STARTTLS when it is offered, any certificate, clear text when it fails, as most of
    the Internet's mail is sent; required: never in clear text; verify: required, and the certificate must be
    valid for the host; dane: required, and the host's TLSA records (RFC 7672) must vouch for the certificate.
    """
    tls_on_connect: bool = switch(False)
    """TLS from the first octet, as smarthosts have it on port 465 (RFC 8314), instead of STARTTLS."""
    dane: bool = switch(True)
    """Where a host has TLSA records, its certificate must match them (RFC 7672). Only with trust_ad in [dns];
    without it nothing is looked up.
    """
    mta_sts: bool = switch(False)
    """Obey the MTA-STS policies of recipient domains (RFC 8461): they are fetched over HTTPS, which must not
    be blocked, and kept on disk.
    """
    credentials: tuple[str, ...] = texts(())
    """Names of [[credential]] to log in at the next hop with; the first that matches the sender. Needs tls =
    verify, or required where the certificate cannot be verified.
    """

    # From which address

    sources: tuple[str, ...] = texts(())
    """Names of [[source]] to send from. Empty: the address that the system chooses."""
    source_by: SourceBy = choice(SourceBy.MESSAGE)
    """message: each message has its source, by weight; sender: each sender, so that his reputation stays with
    one address.
    """
    source_penalty: float = duration(2 * HOUR, most=7 * DAY)
    """How long a source that a destination has refused for its reputation is not used for it, while there is
    another one.
    """
    ehlo_name: str = text("", form=forms.ehlo_name)
    """The name to say in EHLO. Empty: the relay's hostname."""

    # How much: connections, rates, sizes

    max_connections: int = count(100, most=10_000)
    """Open connections of this zone, so that one zone's mail cannot crowd out another's. Hosts that do not
    answer hold some of them, for half a minute each.
    """
    max_connections_per_destination: int = count(10, most=10_000)
    """Open connections to one destination (one set of MX hosts, however many domains they serve). Large
    providers start to refuse mail at 10 to 20.
    """
    max_recipients_per_transaction: int = count(50, most=10_000)
    """Recipients of one message that are sent in one transaction. Servers must take 100 (RFC 5321 4.5.3.1.8);
    some take fewer.
    """
    max_messages_per_connection: int = count(1000)
    """Messages after which a connection is closed and made anew, so that load spreads over the hosts
    again.
    """
    connection_idle_timeout: float = duration(5.0, most=HOUR)
    """How long an idle connection is kept for the next message; longer is impolite to busy servers."""
    max_rate: Rate | None = rate()
    """Transactions of this zone in a time, spread evenly: "600/1m". Empty: no limit."""
    max_rate_per_destination: Rate | None = rate()
    """Transactions to one destination in a time, spread evenly: "100/1m". Empty: no limit."""
    max_message_size: int = size(0, optional=True)
    """Larger messages are returned to the sender (5.3.4). 0: no limit."""

    # How long it is tried

    schedule: tuple[float, ...] = durations(())
    """Delays between attempts of this zone, instead of those of [retry]. Empty: those."""
    max_attempts: int = count(0, optional=True, most=10_000)
    """As max_attempts in [retry], for this zone. 0: that."""
    max_age: float = duration(0.0, optional=True, most=YEAR)
    """How long this zone's mail is tried. 0: as [retry] says."""
    in_doubt: InDoubt = choice(InDoubt.RETRY)
    """The connection broke after the message was sent and before the reply: it may have been delivered. retry
    risks a duplicate, hold waits for an operator, bounce risks a false report. None loses mail.
    """

    # What is changed in it, and how it is sent

    dkim: DkimMode = choice(DkimMode.SIGN)
    """sign: with the [[dkim]] keys of the domain in From, if there are any; required: mail without a key
    waits; off.
    """
    srs: bool = switch(False)
    """Rewrite senders by [srs], for mail that is forwarded through this zone."""
    header_remove: tuple[str, ...] = texts((), form=forms.removed_field)
    """Header fields to take out before sending, by name."""
    header_replace: tuple[str, ...] = texts((), form=forms.new_field)
    """Header fields to replace where a message has them: "Name: new value"."""
    header_add: tuple[str, ...] = texts((), form=forms.new_field)
    """Header fields to add: "Name: value"."""
    chunking: bool = switch(True)
    """Send messages of up to 64 KB with BDAT (RFC 3030) to servers that offer CHUNKING: no line end in them
    can be taken for the end of the message. A server that does not know BDAT, does not answer it or refuses
    one gets DATA for a day; `zonerelay explain` says so.
    """
    convert: Convert = choice(Convert.UNSIGNED)
    """Which mail is written in seven bits for servers without 8BITMIME or SMTPUTF8, and in lines of at most
    998 octets for all, with folded fields, encoded words and quoted-printable: messages that their author has
    not signed with DKIM, all (that breaks such a signature), or none.
    """

    @property
    def mixes_domains(self) -> bool:
        """Recipients in several domains share a transaction where the host announces no limit."""
        return bool(self.next_hop) if self.mix_domains is None else self.mix_domains


def check_zone_names(zones: Sequence[ZoneSettings], report: Report) -> None:
    first: dict[str, int] = {}
    for at, zone in enumerate(zones):
        there = first.setdefault(zone.name, at)
        if there != at and report.given("zone", at, "name"):
            report.refuse(("zone", at, "name"), f"{quoted(zone.name)} is the name of zone[{there}] already")
        elif there != at:
            report.refuse(("zone", at, "name"), f"is missing; {quoted(zone.name)} is zone[{there}] already")
    if DEFAULT_ZONE not in first:
        there_is = f"the zones are {in_words(first)}" if first else "there is none"
        text = f'mail that no route matches goes to the zone "{DEFAULT_ZONE}", but {there_is}: add it'
        report.refuse(("zone",), text)


def check_zones(
    zones: Sequence[ZoneSettings], retry: RetrySettings, report: Report, *, trusts_dns: bool
) -> tuple[ZoneSettings, ...]:
    """Returns the zones with default shares that fit. `trusts_dns`: [dns] says that answers are validated."""
    for at, zone in enumerate(zones):
        path: KeyPath = ("zone", at)
        _check_next_hops(zone, path, report)
        _check_times(zone, path, retry, report)
        if zone.tls is TlsMode.DANE and report.sound(*path, "tls"):
            _check_dane(zone, path, trusts_dns, report)
        if zone.tls_on_connect and zone.tls is TlsMode.NONE and report.sound(*path, "tls"):
            text = "is TLS from the first octet, and tls = none is none at all: leave one of the two out"
            report.refuse((*path, "tls_on_connect"), text)
    return tuple(_with_share(zone, ("zone", at), report) for at, zone in enumerate(zones))


def _check_dane(zone: ZoneSettings, path: KeyPath, trusts_dns: bool, report: Report) -> None:
    if not trusts_dns:
        report.refuse((*path, "tls"), DANE_NEEDS_TRUST)
    if not zone.dane and report.sound(*path, "dane"):
        report.refuse((*path, "dane"), "tls = dane asks for it: leave one of the two out")
    if not report.sound(*path, "next_hop"):
        return
    for hop in split_next_hops(zone.next_hop):
        if parse_next_hop(hop).kind is NextHopKind.ADDRESS:
            report.refuse((*path, "next_hop"), f"{hop} is an address, and TLSA records belong to names")


def _check_next_hops(zone: ZoneSettings, path: KeyPath, report: Report) -> None:
    hops = split_next_hops(zone.next_hop)
    if len(hops) > 1 and report.sound(*path, "next_hop"):
        twice = next((hop for at, hop in enumerate(hops) if hop.lower() in map(str.lower, hops[:at])), None)
        if twice is not None:
            report.refuse((*path, "next_hop"), f"{twice} is in the list twice")
        elif CAPTURE in hops:
            report.refuse((*path, "next_hop"), f'"{CAPTURE}" stands alone: what is captured is not sent')


def zone_advice(zones: Sequence[ZoneSettings]) -> Iterator[str]:
    for at, zone in enumerate(zones):
        for key, found in _advice(zone):
            yield f"zone[{at}].{key}: {found}"


def _advice(zone: ZoneSettings) -> Iterator[tuple[str, str]]:
    yield from _tls_advice(zone)
    yield from shorter_delays(zone.schedule)
    if is_faster(zone.max_rate_per_destination, zone.max_rate):
        yield (
            "max_rate_per_destination",
            f"never reached: max_rate = {zone.max_rate} of the whole zone is slower",
        )
    if zone.mix_domains and not zone.next_hop:
        yield (
            "mix_domains",
            "true in a zone that is routed by MX: Google and others defer all recipients of a transaction "
            "but those in the first domain",
        )
    if zone.next_hop_share and len(split_next_hops(zone.next_hop)) < 2:
        yield "next_hop_share", "has no effect: there is one next hop, or none"
    if zone.mta_sts and zone.next_hop:
        yield "mta_sts", "has no effect: policies are about MX hosts, not a next_hop"


def _tls_advice(zone: ZoneSettings) -> Iterator[tuple[str, str]]:
    if zone.next_hop:
        return
    if zone.tls is TlsMode.NONE:
        yield "tls", f"none: mail of zone {zone.name} is sent in clear text even where TLS is offered"
    if zone.tls is TlsMode.DANE:
        yield (
            "tls",
            f"dane: mail of zone {zone.name} for domains without DNSSEC and TLSA records is not delivered; "
            "it comes back when it is too old",
        )
    if zone.tls_on_connect:
        yield "tls_on_connect", "MX hosts do not speak TLS from the first octet: it is for a next_hop"


def _check_times(zone: ZoneSettings, path: KeyPath, retry: RetrySettings, report: Report) -> None:
    """A schedule whose first delay is beyond the age of mail would be none."""
    max_age = zone.max_age or retry.max_age
    if not zone.schedule or zone.schedule[0] <= max_age:
        return
    if report.sound(*path, "schedule") and report.sound(*path, "max_age") and report.sound("retry"):
        whose = "max_age" if zone.max_age else "max_age in [retry]"
        report.refuse(
            (*path, "schedule"),
            f"the first delay of {format_duration(zone.schedule[0])} is longer than "
            f"{whose} = {format_duration(max_age)}, when mail is given up",
        )


def _with_share(zone: ZoneSettings, path: KeyPath, report: Report) -> ZoneSettings:
    """A destination's share is part of its zone's connections; the default share gives way silently."""
    if zone.max_connections_per_destination <= zone.max_connections:
        return zone
    key = (*path, "max_connections_per_destination")
    if report.given(*key) and report.sound(*key) and report.sound(*path, "max_connections"):
        report.refuse(
            key,
            f"{zone.max_connections_per_destination} is more than max_connections = {zone.max_connections}, "
            "the limit of the whole zone",
        )
    return replace(zone, max_connections_per_destination=zone.max_connections)


def is_faster(rate: Rate | None, whole: Rate | None) -> bool:
    return rate is not None and whole is not None and rate.interval < whole.interval
