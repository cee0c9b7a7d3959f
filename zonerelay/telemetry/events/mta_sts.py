"""What is told about MTA-STS policies: log lines and counters, as `events.py` has them for mail.

Domains are shown as destinations are. A failure is a warning even while an older policy serves on: the time
to act is before that expires (RFC 8461 10.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.instruments import Instruments, LabelledCounter

Field = str | int | float | bool | None

LOOK_UPS = ("enforce", "testing", "none", "absent", "failed")
FETCHES = ("fetched", "failed")
MISMATCHES = ("enforce", "testing")
MAX_HOSTS = 5  # named in one line


class StsCounters(Instruments):
    def __init__(self) -> None:
        self.look_ups = LabelledCounter(
            "zonerelay_mta_sts_lookups_total", "MTA-STS policies looked up for a route.", ("result",)
        )
        self.fetches = LabelledCounter(
            "zonerelay_mta_sts_fetches_total", "MTA-STS policies fetched over HTTPS.", ("result",)
        )
        self.mismatches = LabelledCounter(
            "zonerelay_mta_sts_mismatches_total",
            "Routes with MX hosts that the domain's MTA-STS policy does not name.",
            ("mode",),
        )
        super().__init__(self.look_ups, self.fetches, self.mismatches)
        for counter, values in (
            (self.look_ups, LOOK_UPS),
            (self.fetches, FETCHES),
            (self.mismatches, MISMATCHES),
        ):
            counter.declare((value,) for value in values)


class StsEvents:
    """One per worker. Never raises."""

    def __init__(
        self, emit: Callable[[str, str, dict[str, Field]], None], counters: StsCounters, redactor: Redactor
    ) -> None:
        self._emit = emit
        self._counters = counters
        self._redact = redactor

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
