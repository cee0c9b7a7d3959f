"""[retry], [bounce], [delivery] and [dns]: retry schedules, bounces, the time limits of a session, and the
resolvers.
"""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass
from itertools import pairwise

from zonerelay.config.endpoints import parse_name_server
from zonerelay.config.options import forms
from zonerelay.config.options import options as declare
from zonerelay.config.options.options import DAY, HOUR, KB, MB, MINUTE, YEAR
from zonerelay.config.problems import Findings, Report
from zonerelay.config.units import format_duration

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
        yield (
            "trust_ad",
            "the system's resolvers are not known to be trustworthy; set dns.servers to a validating "
            "resolver on this machine",
        )
    for each in dns.servers if dns.trust_ad else ():
        if not ipaddress.ip_address(parse_name_server(each).address).is_loopback:
            forge = "an attacker on the path could forge the AD flag of its answers"
            yield "trust_ad", f"{each} is not on this machine; {forge}"


def retry_problems(retry: RetrySettings, report: Report) -> Findings:
    if report.given("retry", "schedule"):
        if not retry.schedule:
            yield "schedule", 'is empty: give at least one delay, as in ["5m"]'
        elif retry.policy is not RetryPolicyName.SCHEDULE:
            yield "schedule", f'is not used with policy = "{retry.policy}": leave one of the two out'
    if retry.backoff and report.given("retry", "policy"):
        yield "backoff", "takes the place of policy: leave one of the two out"
    if retry.suspend_min > retry.suspend_max:
        yield "suspend_min", "is longer than suspend_max, up to which it doubles"


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
    """Yield the advice for a schedule, of [retry] or of a zone, in which a delay is shorter than the previous
    one.
    """
    for earlier, later in pairwise(schedule):
        if later < earlier:
            shown = f"{format_duration(later)} is after {format_duration(earlier)}"
            yield "schedule", f"{shown}: mail is tried more often the longer it waits"
            return
