"""The log lines of four subsystems, with their counters: shared limits, MTA-STS, name servers, smarthosts.

Domains are shown as destinations are, and text from remote hosts is redacted. A failed fetch of an MTA-STS
policy is a warning even while an older policy is in force, because an operator has to act before that
expires (RFC 8461 10.2). A refused log-in at a smarthost is an error, because the mail of a whole zone waits
until an operator corrects it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from zonerelay.model.queue_name import queue_of
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.subsystems import (
    RESULTS,
    LimitMetrics,
    NameServerMetrics,
    SmarthostMetrics,
    StsCounters,
    WebhookMetrics,
)

Field = str | int | float | bool | None


MAX_HOSTS = 5  # named in one line


Emit = Callable[[str, str, dict[str, Field]], None]
"""Takes the level, the name of the event and its fields."""


@dataclass(frozen=True, slots=True)
class LimitEvents:
    """One per worker. Never raises."""

    _emit: Emit
    _metrics: LimitMetrics

    def read(self, figures: Callable[[], Mapping[str, tuple[int, int, int]]]) -> None:
        """By zone: places held, connections open, places wished for."""
        self._metrics.attach(figures)

    def waited(self, seconds: float) -> None:
        self._metrics.waits.observe(seconds)

    def lost(self, authority: str, reason: str) -> None:
        self._metrics.lost.value += 1
        self._metrics.reachable.value = 0
        self._emit("warning", "limits-lost", {"from": authority, "reason": reason})

    def restored(self, authority: str) -> None:
        self._metrics.reachable.value = 1
        self._emit("info", "limits-restored", {"from": authority})


@dataclass(frozen=True, slots=True)
class StsEvents:
    """One per worker. Never raises."""

    _emit: Emit
    _counters: StsCounters
    _redact: Redactor

    def looked_up(self, result: str) -> None:
        """`enforce`, `testing`, `none`: by the mode of the policy in force; `absent`, `failed`."""
        self._counters.look_ups.add((result,))

    def fetched(self, domain: str, *, mode: str, policy_id: str, expires: float) -> None:
        self._counters.fetches.add(("fetched",))
        fields: dict[str, Field] = {
            "domain": domain,
            "mode": mode,
            "policy": policy_id,
            "expires": round(expires),
        }
        self._emit("info", "mta-sts-policy", fields)

    def failed(self, domain: str, problem: str, *, kept_until: float | None) -> None:
        """A policy cannot be had; until then, the one before it counts."""
        self._counters.fetches.add(("failed",))
        fields: dict[str, Field] = {"domain": domain, "problem": self._redact.text(problem)}
        if kept_until is not None:
            fields["kept_until"] = round(kept_until)
        self._emit("warning", "mta-sts-failed", fields)

    def mismatch(self, domain: str, hosts: Sequence[str], *, mode: str) -> None:
        """MX hosts that the policy does not name: left out in mode enforce."""
        self._counters.mismatches.add((mode,))
        fields: dict[str, Field] = {"domain": domain, "mode": mode, "hosts": " ".join(hosts[:MAX_HOSTS])}
        self._emit("warning", "mta-sts-mismatch", fields)

    def files(self, problem: str) -> None:
        """A policy on disk cannot be read, or one cannot be kept there."""
        self._emit("warning", "mta-sts-files", {"problem": self._redact.text(problem)})


@dataclass(frozen=True, slots=True)
class NameServerEvents:
    """One per worker. Never raises."""

    _emit: Emit
    _metrics: NameServerMetrics

    def asked(self, result: str) -> None:
        """A question has ended; `result` is one of `DNS_RESULTS`."""
        self._metrics.look_ups.add((result,))

    def lost(self, servers: str, reason: str) -> None:
        """Mail that has to look up a domain waits."""
        self._metrics.lost.value += 1
        self._metrics.reachable.value = 0
        self._emit("error", "name-servers-lost", {"servers": servers, "reason": reason})

    def restored(self, servers: str, seconds: float) -> None:
        self._metrics.reachable.value = 1
        self._emit("info", "name-servers-restored", {"servers": servers, "seconds": round(seconds, 1)})


@dataclass(frozen=True, slots=True)
class SmarthostEvents:
    """One per worker. Never raises."""

    _emit: Emit
    _metrics: SmarthostMetrics
    _redact: Redactor

    def declare(self, zones: Iterable[str]) -> None:
        """Shows the zones that log in, with 0."""
        self._metrics.logins.declare((queue_of(zone).label, result) for zone in zones for result in RESULTS)

    def answered(self, zone: str, result: str) -> None:
        """`ok`, `refused` or `failed` (for now); `broken`: it could not even be tried."""
        self._metrics.logins.add((queue_of(zone).label, result))

    def refused(self, zone: str, credential: str, host: str, reply: str) -> None:
        """The relay does not try again for a while; all mail that needs the credential waits."""
        text = self._redact.text(reply)
        self._emit(
            "error", "login-refused", {"zone": zone, "credential": credential, "host": host, "reply": text}
        )

    def broken(self, zone: str, credential: str, problem: str) -> None:
        """A secret cannot be read, or a token server gives no token."""
        text = self._redact.text(problem)
        self._emit("error", "login-broken", {"zone": zone, "credential": credential, "problem": text})

    def restored(self, zone: str, credential: str, host: str) -> None:
        self._emit("info", "login-restored", {"zone": zone, "credential": credential, "host": host})

    def token_trouble(self, credential: str, problem: str) -> None:
        """While the present token still serves, or a new refresh token could not be written down."""
        text = self._redact.text(problem)
        self._emit("warning", "token-trouble", {"credential": credential, "problem": text})


@dataclass(frozen=True, slots=True)
class WebhookEvents:
    """One per worker. Never raises."""

    _emit: Emit
    metrics: WebhookMetrics

    def failing(self, webhook: str, problem: str) -> None:
        """Its events wait. Told once, until it answers again."""
        self._emit("warning", "webhook-failing", {"webhook": webhook, "problem": problem})

    def restored(self, webhook: str) -> None:
        self._emit("info", "webhook-restored", {"webhook": webhook})

    def disabled(self, webhook: str) -> None:
        """It has answered 410: it wants no more events."""
        self._emit("error", "webhook-disabled", {"webhook": webhook})

    def lost(self, webhook: str, count: int, why: str) -> None:
        """Events that are told no more; an event webhook.gap says so, unless the webhook is gone."""
        self.metrics.told.add((webhook, "lost"), count)
        self._emit("error", "webhook-gap", {"webhook": webhook, "lost": count, "why": why})
