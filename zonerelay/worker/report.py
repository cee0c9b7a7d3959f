"""Sends the report of the last day by mail, once a day at the time in [report].

The first worker sends it for the whole relay. A file next to the spool records the end of the period of the
last report. It is written when the report is in the queue, so a restart sends no report twice, except after a
crash between the two writes. A report that was missed is sent at the next start. Mail never waits for it,
because a thread reads the histories.
"""

import asyncio
from datetime import datetime, timedelta
from pathlib import Path

from zonerelay import durable
from zonerelay.config.settings import Settings
from zonerelay.model.envelope import Envelope, Mailbox, Origin, Recipient
from zonerelay.operations.answers import RelayStatus
from zonerelay.operations.errors import ControlError
from zonerelay.process.tasks import Tasks
from zonerelay.process.threads import FILES, REPORTS
from zonerelay.queue.settle.bounces import PROTOCOL, own_mail
from zonerelay.store.contract import OwnMessage
from zonerelay.worker.endpoints import Endpoints
from zonerelay.worker.worker import Worker

NOTE = "report.sent"
LOOK_EVERY = 30.0
PATIENCE = 5.0
"""Seconds for which a stop waits until a report is stored and recorded."""
DAY = 24 * 3600.0
LONGEST = 7 * DAY
"""The longest period that a report covers."""


class DailyReport:
    """Sends a daily report of the relay by mail. `configure` starts and stops it. Call `close` once."""

    def __init__(self, worker: Worker, endpoints: Endpoints) -> None:
        self._worker, self._endpoints = worker, endpoints
        self._hostname = worker.context.hostname
        self._tasks, self._storing = Tasks(), Tasks()
        self._sent = 0.0
        """The end of the last period whose report this process has sent: the file may be behind."""

    async def configure(self, settings: Settings) -> None:
        await self._tasks.cancel()
        if settings.report.to:
            self._tasks.start(self._run(settings))

    async def close(self) -> None:
        await self._tasks.cancel()
        await self._storing.wait(PATIENCE)
        await self._storing.cancel()

    async def _run(self, settings: Settings) -> None:
        note = settings.spool.path.with_name(NOTE)
        while True:
            try:
                await self._look(settings, note)
            except Exception as error:  # noqa: BLE001 - a report that failed is tried again
                self._worker.events.error("report", error)
            await asyncio.sleep(LOOK_EVERY)

    async def _look(self, settings: Settings, note: Path) -> None:
        now = self._worker.clock.now()
        last = _read(note)
        if last is None or last > now + DAY:
            # The first report covers the time from now on, also after the clock was far ahead.
            await FILES.run(durable.write, note, f"{now:.0f}\n".encode(), mode=0o644)
            return
        due = latest(settings.report.at, now)
        if not max(last, self._sent) < due <= now:
            return
        from zonerelay.control.report import report  # noqa: PLC0415 - loads SQLite

        since = max(last, due - LONGEST)
        queue: RelayStatus | ControlError
        try:
            queue = await self._endpoints.relay_status()
        except ControlError as error:
            queue = error
        text = await REPORTS.run(report, settings, self._hostname, (since, due), queue)
        self._sent = due
        await asyncio.shield(self._storing.start(self._store(self._message(settings, text, due), note, due)))

    async def _store(self, report: OwnMessage, note: Path, due: float) -> None:
        """Store the report as a message, and then record the time for which it was due. A stop waits for
        that, and a reload goes on meanwhile.
        """
        stored = asyncio.Event()
        self._worker.settler.write([report], stored.set)
        await stored.wait()
        await FILES.run(durable.write, note, f"{due:.0f}\n".encode(), mode=0o644)

    def _message(self, settings: Settings, text: str, until: float) -> OwnMessage:
        from zonerelay.message.compose import Address, Draft, compose  # noqa: PLC0415 - once a day

        sender = Mailbox(settings.report.sender or f"postmaster@{self._hostname}")
        recipients = tuple(Recipient(address=Mailbox(each)) for each in settings.report.to)
        identity, now = self._worker.ids.next(), self._worker.clock.now()
        day = datetime.fromtimestamp(until).strftime("%Y-%m-%d")
        draft = Draft(
            message_id=f"<{identity}.report@{self._hostname}>",
            created=now,
            author=Address(sender),
            to=tuple(Address(each.address) for each in recipients),
            subject=f"Mail of {self._hostname} until {day}",
            text=text,
            headers=(("Auto-Submitted", "auto-generated"),),
        )
        origin = Origin(protocol=PROTOCOL)
        envelope = Envelope(id=identity, sender=sender, recipients=recipients, created=now, origin=origin)
        return own_mail(envelope, compose(draft), self._worker.zones.choose)


def latest(at: str, now: float) -> float:
    """Return the latest Unix time, not after `now`, at which the local time of day was `at`."""
    hour, _, minute = at.partition(":")
    day = datetime.fromtimestamp(now)
    found = day.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
    return (found if found.timestamp() <= now else found - timedelta(days=1)).timestamp()


def _read(note: Path) -> float | None:
    try:
        return float(note.read_text())
    except (OSError, ValueError):
        return None
