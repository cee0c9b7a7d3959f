"""Corrects due times that were written while the wall clock was ahead.

`Delivery.corrected_at` decides which due times are corrected, and how. Other times are left alone: the
release time that a sender requested (RFC 4865), a time that an operator chose, and a long retry interval that
starts in the past. A held delivery is corrected when it is released, or when an undo restores its due time.

The queue is read only when there is a reason: the clock has gone back by more than `TOLERANCE` seconds, or at
startup the highest message id in the store, which contains a time, is in the future. If the store fails, the
queue is read again at the next check, `INTERVAL` seconds later, and also while mail is being attempted whose
stored due time is wrong.

Mail does not expire because the wall clock has leapt forward. A leap is more than `LEAP` seconds that the
wall clock gains on CLOCK_BOOTTIME, which also counts the time that the machine sleeps. For mail that was
accepted before the leap, those seconds do not count towards its age until an operator confirms the new time
(`zonerelay spool acknowledge clock`), a day has passed, or the clock goes back. If it goes back by less, the
rest of the leap remains. A leap is recorded in a file next to the spool, so it survives a restart.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from zonerelay import durable
from zonerelay.config.units import span
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import MessageId, first_at
from zonerelay.process.threads import FILES
from zonerelay.queue.operator.operations import ChangeCounts
from zonerelay.store.contract import StoreError
from zonerelay.telemetry.events.events import Events

TOLERANCE = 60.0
INTERVAL = 30.0
LEAP = 3600.0
TRUSTED_AFTER = 86400.0
NAME = "clock"
"""The name under which an operator acknowledges a leap."""


class ClockLeap(msgspec.Struct, frozen=True, kw_only=True):
    """A forward jump of the system clock by `seconds`. `at` is the wall time after the leap."""

    at: float
    seconds: float


class ClockWatch:
    """Detects jumps of the system clock. The due times of a worker's mail are corrected by `correct`
    (`Operations.correct`) after a backward jump, and the last forward jump is stored in the file `path`.
    `run` is to end before the store is closed.
    """

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        events: Events,
        correct: Callable[[Callable[[Delivery], Delivery]], Awaitable[ChangeCounts]],
    ) -> None:
        self._path = path
        self._clock = clock
        self._events = events
        self._correct = correct
        self._ahead = clock.now() - clock.boottime()
        """Seconds by which the wall clock was ahead of CLOCK_BOOTTIME at the last look at both."""
        self._leap = self._stored = _read(path)
        self._is_suspect = False
        self._is_again = False
        """Whether the last check found deliveries that were being attempted."""

    def skipped(self, created: float) -> float:
        """Return the seconds of a message's age that result from clock jumps."""
        leap = self._present()
        return leap.seconds if leap is not None and created < leap.at else 0.0

    def problems(self) -> tuple[str, ...]:
        leap = self._present()
        if leap is None:
            return ()
        return (
            f"the system clock jumped forward by {span(leap.seconds)}; mail does not expire because of this "
            f"jump today. Check the time, and confirm it with `zonerelay spool acknowledge {NAME}`",
        )

    def confirm(self) -> bool:
        """Accept the last forward jump of the clock as time that has really passed. Return false if there was
        no jump.
        """
        found = self._present() is not None
        self._leap = None
        return found

    async def run(self, last: MessageId | None) -> None:
        """Check the clock at intervals, until cancelled. `last` is the highest message id that the store has
        committed.
        """
        if last is not None and last > first_at(self._clock.now() + TOLERANCE):
            self._is_suspect = True
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL)

    async def look(self) -> None:
        try:
            leap = self._present()
            if leap != self._stored:
                await FILES.run(_write, self._path, leap)
                self._stored = leap
        except OSError as error:
            self._events.error("queue.clock", error)
        if not self._is_suspect:
            return
        now = self._clock.now()
        self._is_suspect = False
        try:
            found = await self._correct(lambda delivery: delivery.corrected_at(now))
        except StoreError as error:
            self._is_suspect = True
            self._events.error("queue.clock", error)
            return
        # An outcome writes a new due time, but not if the claim is lost meanwhile (seed 3412).
        again, self._is_again = self._is_again, found.busy > 0
        self._is_suspect = self._is_suspect or self._is_again
        if found.changed or not again:
            self._events.lifecycle("clock-set-back", corrected=found.changed)

    def _present(self) -> ClockLeap | None:
        now = self._clock.now()
        ahead = now - self._clock.boottime()
        gained, self._ahead = ahead - self._ahead, ahead
        self._is_suspect = self._is_suspect or gained < -TOLERANCE
        before = self._leap or ClockLeap(at=now, seconds=0.0)
        if abs(gained) > LEAP:
            at, seconds = now if gained > 0 else before.at + gained, before.seconds + gained
            self._leap = ClockLeap(at=at, seconds=seconds) if seconds > LEAP else None
        elif now > before.at + TRUSTED_AFTER:
            self._leap = None
        return self._leap


def _read(path: Path) -> ClockLeap | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ClockLeap)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError):
        return None


def _write(path: Path, leap: ClockLeap | None) -> None:
    if leap is None:
        path.unlink(missing_ok=True)
    else:
        durable.write(path, msgspec.json.encode(leap))
