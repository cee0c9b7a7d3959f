"""A long queue over several workers, asked and changed through the supervisor: how long each verb takes, and
how much of the queue is in the supervisor's memory meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tests.support.crew import AT_ONCE, client_of, relay_of, status
from tests.support.process import RelayProcess
from tests.support.submit import Submitter
from tests.support.toml import Table
from zonerelay.operations.answers import Changed, DeliveryRow, MessageDetail
from zonerelay.operations.requests import CHANGES, ChangeVerb, Filter, QueueList, QueueShow

DOMAINS = 10
SESSIONS = 18
IN_PART: tuple[ChangeVerb, ...] = ("hold", "drop")
IN_ALL: tuple[ChangeVerb, ...] = ("hold", "release", "retry")
"""In this order: what has been released is being tried, and what is being tried is left alone."""
NOT_MEANWHILE: Mapping[str, Table] = {"retry": {"schedule": ["1h"], "suspend_min": "1h", "suspend_max": "1h"}}
ONE = Filter(domain="d3.example")


class Questions:
    """`good` while every answer was complete."""

    def __init__(self, relay: RelayProcess, ids: list[str]) -> None:
        self._relay = relay
        self._ids = sorted(ids)
        self._some = sum(number % DOMAINS == 3 for number in range(len(ids)))
        self.good = True

    def ask(self) -> None:
        every, some = len(self._ids), self._some
        self._time("status", lambda: status(self._relay).zones[0].deferred, every)
        self._time("list, all", self._list, every)
        self._time("list, one domain of ten", lambda: len(self._rows(QueueList(filter=ONE))), some)
        self._time("list, the first 1,000", lambda: len(self._rows(QueueList(limit=1000))), min(every, 1000))
        self._time("show", self._show, 1)
        for verb in IN_PART:
            self._time(f"{verb}, one domain of ten", partial(self._change, verb, ONE), some)
        for verb in IN_ALL:
            self._time(f"{verb}, all", partial(self._change, verb, Filter()), every - some)

    def _time(self, what: str, question: Callable[[], int], expected: int) -> None:
        began = time.monotonic()
        found = question()
        took = time.monotonic() - began
        self.good = self.good and found == expected
        wrong = "" if found == expected else f"  WRONG: {expected} expected"
        print(f"{what:28}{took:7.2f} s{found:9,}{self._relay.peak_rss() / 1e6:9.1f} MB{wrong}")

    def _list(self) -> int:
        found = [row.message_id for row in self._rows(QueueList(limit=0))]
        return len(found) if found == self._ids else -1

    def _rows(self, request: QueueList) -> list[DeliveryRow]:
        return [each for each in client_of(self._relay).stream(request) if isinstance(each, DeliveryRow)]

    def _show(self) -> int:
        wanted = self._ids[len(self._ids) // 2]
        shown = client_of(self._relay).ask(QueueShow(message_id=wanted), MessageDetail)
        return int(shown.message_id == wanted)

    def _change(self, verb: ChangeVerb, chosen: Filter) -> int:
        request = CHANGES[verb](filter=chosen, everything=chosen.is_everything)
        return client_of(self._relay).ask(request, Changed).matched


async def queues(directory: Path, deliveries: int, *, workers: int) -> bool:
    """Prints; false when an answer was not complete."""
    relay = relay_of(directory, 1, workers=workers, worker_timeout="20s", tables=NOT_MEANWHILE)
    with relay:
        ids = await _fill(relay, deliveries)
        relay.reset_peak()
        print(
            f"{len(ids):,} deliveries, {workers} workers; the supervisor has {relay.peak_rss() / 1e6:.1f} MB"
        )
        questions = Questions(relay, ids)
        await AT_ONCE(questions.ask)
        troubles = relay.events("trouble")
    print("\n".join(str(each) for each in troubles))
    return questions.good and not troubles


async def _fill(relay: RelayProcess, deliveries: int) -> list[str]:
    """All of it has been tried, in vain."""
    recipients = [f"u{number}@d{number % DOMAINS}.example" for number in range(100)]
    sender = Submitter(relay.smtp_port, prefix="queued", size=300, recipients=recipients)
    await sender.run(SESSIONS, deliveries)
    await asyncio.to_thread(
        relay.wait_for,
        lambda: status(relay).zones[0].deferred == deliveries,
        what="all deferred",
        timeout=300,
    )
    return list(sender.ids.values())
