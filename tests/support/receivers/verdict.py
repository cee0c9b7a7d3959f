"""Who got what, from what was sent and what receivers noted: every recipient once, or a report instead."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.receivers.journal import Arrival, Report
from tests.support.receivers.load import Mail

_FAILED = re.compile(rb"^Final-Recipient: rfc822;\s*(\S+)\r$", re.MULTILINE | re.IGNORECASE)
_STATUS = re.compile(rb"^Status: (\d\.\d+\.\d+)\r$", re.MULTILINE)


@dataclass
class Ledger:
    """By recipient: every one of them is in one message only."""

    arrived: Counter[str] = field(default_factory=Counter)
    doubts: Counter[str] = field(default_factory=Counter)
    """Of those that arrived: how often nobody told the sender."""
    reported: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The statuses that reports gave."""
    clients: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    at: dict[str, float] = field(default_factory=dict)
    """When it first arrived."""

    @classmethod
    def of(cls, report: Report) -> "Ledger":
        ledger = cls()
        for arrival in report.arrivals:
            if arrival.token:
                ledger._arrived(arrival)
            else:
                for status, recipient in failures(arrival.raw):
                    ledger.reported[recipient].append(status)
        return ledger

    def _arrived(self, arrival: Arrival) -> None:
        for recipient in arrival.recipients:
            self.arrived[recipient] += 1
            self.doubts[recipient] += arrival.doubtful
            self.clients[recipient].add(arrival.client)
            self.at.setdefault(recipient, arrival.at)

    def wrongs(self, mails: Sequence[Mail]) -> list[str]:
        """What must not be, for mail that was acknowledged; nothing that arrived is allowed to be unknown."""
        found = []
        for mail in mails:
            for recipient in mail.recipients:
                times, reports = self.arrived[recipient], self.reported.get(recipient, [])
                fails = recipient in mail.failing
                if times > 1 + self.doubts[recipient]:
                    found.append(f"{recipient} got it {times} times")
                if not fails and not times:
                    found.append(f"{recipient} got nothing, and reports {reports}")
                if fails and times:
                    found.append(f"{recipient} got what had to come back")
                if len(reports) != fails:
                    found.append(f"{recipient}: reports {reports}")
        return found

    def lost(self, mails: Sequence[Mail]) -> list[str]:
        """Recipients of acknowledged mail who got nothing, and nobody was told."""
        return [
            recipient
            for mail in mails
            for recipient in mail.recipients
            if not self.arrived[recipient] and not self.reported.get(recipient)
        ]

    def statuses(self, mails: Sequence[Mail]) -> Counter[str]:
        """What reports about them said."""
        return Counter(
            status for mail in mails for each in mail.recipients for status in self.reported.get(each, [])
        )

    def delays(self, mails: Sequence[Mail], sent: Mapping[str, float]) -> list[float]:
        """From each acknowledgement to each arrival, sorted."""
        return sorted(
            self.at[recipient] - sent[mail.token]
            for mail in mails
            for recipient in mail.recipients
            if recipient in self.at and not recipient.startswith("full")
        )


def failures(report: bytes) -> list[tuple[str, str]]:
    """Status and recipient of each failure that a report is about."""
    return [
        (status[1].decode(), failed[1].decode())
        for part in report.split(b"\r\n\r\n")
        if (failed := _FAILED.search(part)) and (status := _STATUS.search(part))
    ]


def percentile(values: Sequence[float], part: float) -> float:
    """Of sorted ones."""
    return values[min(len(values) - 1, int(part * len(values)))]
