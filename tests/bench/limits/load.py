"""Mail for every line of a plan: what is unlimited as fast as the relay takes it, what is limited never runs
dry.

Each message goes to recipients in one domain. So that the queue stays bounded, the relay is sent mail for the
quick lines alone while it holds `MOST_QUEUED` deliveries, and nothing while it holds twice as many; of a line
with a rate it gets half as much again as that lets through.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

from tests.bench.limits.plan import Line, Mood, Plan, Site
from tests.support.smtp_client import SmtpClient, connected

SESSIONS = 12
MOST_QUEUED = 6000
QUICK = 10
"""The weight of lines that take whatever comes."""

AHEAD = 40
"""Messages for a line with a rate that are sent at once, before its rate counts."""

_TEXT = (
    b"From: <load@example.org>\r\nSubject: limits\r\nMessage-ID: <limits@example.org>\r\n\r\n" + b"x" * 800
)


class Feed:
    """What to send next. `queued` is how many deliveries the relay holds."""

    def __init__(self, plan: Plan, queued: Callable[[], int]) -> None:
        self._random = random.Random(2)
        self._queued = queued
        self._began = time.monotonic()
        self._given: dict[str, int] = {}
        self.sent = 0
        lines = [(site, line) for site in plan.sites for line in site.lines]
        self._limited = [(line, _per_second(site, line)) for site, line in lines if _per_second(site, line)]
        self._free = [line for site, line in lines if not _per_second(site, line)]
        self._quick = [line for line in self._free if line.weight >= QUICK]

    def next(self) -> Line | None:
        passed = time.monotonic() - self._began
        for line, per_second in self._limited:
            if self._given.get(line.name, 0) < AHEAD + 1.5 * per_second * passed:
                self._given[line.name] = self._given.get(line.name, 0) + 1
                return line
        queued = self._queued()
        if queued > 2 * MOST_QUEUED:
            return None
        free = self._quick if queued > MOST_QUEUED else self._free
        return self._random.choices(free, [line.weight for line in free])[0]

    def recipients(self, line: Line) -> list[bytes]:
        domain = self._random.choice(line.domains).encode()
        number = self._random.randint(1, line.most_recipients)
        self.sent += 1
        return [b"u%d.%d@%s" % (self.sent, one, domain) for one in range(number)]


def _per_second(site: Site, line: Line) -> float:
    """Messages that the line's receivers let through; 0: as many as come."""
    if all(host.mood in (Mood.DEAD, Mood.SILENT) for host in site.hosts):
        return 0.5
    if line.promise.rate is None:
        return 10.0 if site.zone != "default" or site.hosts[0].mood is not Mood.PLAIN else 0.0
    return line.promise.rate[0] / line.promise.rate[1]


async def send(feed: Feed, host: str, port: int) -> None:
    """`SESSIONS` clients, until they are cancelled; one that is refused or cut off begins anew."""

    async def client() -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):
                await _session(feed, host, port)
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        for _ in range(SESSIONS):
            group.create_task(client())


async def _session(feed: Feed, host: str, port: int) -> None:
    async with connected(port, b"EHLO load.example.org", host=host) as client:
        while True:
            line = feed.next()
            if line is None:
                await asyncio.sleep(0.1)
                continue
            recipients = feed.recipients(line)
            client.write(b"MAIL FROM:<load@example.org>\r\n")
            client.write(b"".join(b"RCPT TO:<%s>\r\n" % each for each in recipients) + b"DATA\r\n")
            await _accepted(client, 2 + len(recipients))
            client.write(_TEXT + b"\r\n.\r\n")
            await _accepted(client, 1)


async def _accepted(client: SmtpClient, count: int) -> None:
    if refused := await client.refusals(count):
        raise ConnectionError(refused[0])
