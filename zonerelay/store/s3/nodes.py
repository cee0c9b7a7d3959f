"""Keeps this relay's number, session and lease in the bucket, and watches those of the other relays.

A relay renews its lease by writing the object on the condition that no other relay has written it. Other
relays consider a lease over when they have seen it unchanged for `lease` seconds by their own clock, and
write `dead` into it on the same condition. A holder that was only slow then fails to renew it, and knows.
Mail of a session may be taken over once `dead` is written, and not before. A relay that stops writes
`ended`: a relay that starts within `lease` seconds goes on under that session and owns its mail without
touching it.

Without conditions (`alone`) the lease only warns: a relay does not start while another one renews its
lease, and stops taking mail when it finds another relay's session in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from zonerelay.config.settings import S3Settings
from zonerelay.model.clock import Clock
from zonerelay.model.message_id import MAX_WORKERS
from zonerelay.store.common.queue_mark import QueueMark
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.client import ConflictError, MissingError
from zonerelay.store.s3.objects import Objects, check_format
from zonerelay.store.s3.records import LeaseRecord

SETTLING = 0.2
"""Seconds after which a lease without conditions is looked at once more: who wrote last has it."""
READS_AT_ONCE = 16

_log = logging.getLogger("zonerelay.store")


class LeaseLostError(StoreError):
    """Others have found this relay's lease to be over."""


@dataclass(slots=True)
class SeenLease:
    """Another's lease as it was last read, and since when it has not changed."""

    etag: str
    lease: LeaseRecord
    since: float


class Nodes:
    """The lease of this relay, with its `number` and `session`, and the `others` by their numbers."""

    def __init__(
        self,
        objects: Objects,
        settings: S3Settings,
        mark: QueueMark,
        clock: Clock,
        tell: Callable[[], LeaseRecord],
    ) -> None:
        """`tell` says what stands in the lease besides session, state and beat."""
        self.number = 0
        self.session = ""
        self.others: dict[int, SeenLease] = {}
        self.held_until = float("-inf")
        self.lease = settings.lease
        self.alone = not settings.shared
        """No other relay shares the queue."""
        self._bucket = objects.bucket
        self._keys = objects.keys
        self._clock = clock
        self._tell = tell
        self._mark = mark
        self._etag = ""
        self._mine = LeaseRecord()
        self.last_ids: set[str] = set()

    @property
    def holds_lease(self) -> bool:
        return self._clock.boottime() < self.held_until

    def live(self) -> set[str]:
        """Returns the sessions that own mail."""
        found = {seen.lease.session for seen in self.others.values() if seen.lease.state != "dead"}
        return found | {self.session}

    def company(self) -> list[LeaseRecord]:
        """The leases of the other relays that run."""
        return [seen.lease for seen in self.others.values() if seen.lease.state == "live"]

    # --- coming and going

    async def join(self) -> None:
        """Takes a number and a session. Raises StoreError, or StoreOpenError."""
        await self._recognise()
        if not await check_format(self._bucket, self._keys):
            with contextlib.suppress(ConflictError):  # another relay's, made just now
                await self._bucket.put(self._keys.format, spelled.VERSIONS, new=not self.alone)
        self.session, self._etag = "", ""
        if self.alone:
            await self._join_alone()
            return
        while True:
            await self.look()
            number, seen = self._choose()
            if await self._take(number, seen):
                self.others.pop(number, None)
                return

    async def _recognise(self) -> None:
        """Raises StrangeStoreError."""

        async def read() -> str | None:
            try:
                return (await self._bucket.get(self._keys.mark)).data.decode("utf-8", "replace")
            except MissingError:
                return None

        async def write(mark: str) -> None:
            with contextlib.suppress(ConflictError):  # another relay's, made just now
                await self._bucket.put(self._keys.mark, mark.encode(), new=not self.alone)

        await self._mark.recognise(read, write, self._clock)

    def _choose(self) -> tuple[int, SeenLease | None]:
        """Returns the number of a relay that has stopped, to go on under its session; otherwise a free
        number.
        """
        for number, seen in sorted(self.others.items()):
            if seen.lease.state == "ended":
                return number, seen
        for number in range(MAX_WORKERS):
            taken = self.others.get(number)
            if taken is None or taken.lease.state == "dead":
                return number, taken
        raise StoreError(f"{MAX_WORKERS} relays share the bucket already")

    async def _take(self, number: int, seen: SeenLease | None) -> bool:
        if seen is not None and seen.lease.state == "ended":
            session, beat = seen.lease.session, seen.lease.beat
        else:
            session, beat = f"{number:02x}{int(self._clock.now() * 1000):012x}", 0
            if seen is not None:
                session = max(session, _following(seen.lease.session, number))
        lease = self._worded(session, beat + 1)
        started = self._clock.boottime()
        try:
            etag = await self._write(number, lease, seen.etag if seen is not None else "")
        except (ConflictError, MissingError):
            return False
        self.number, self.session, self._etag, self._mine = number, session, etag, lease
        self.held_until = started + self.lease
        return True

    async def _join_alone(self) -> None:
        """Raises StoreOpenError while another relay renews its lease."""
        found = await self._read(0)
        if found is not None and found.lease.state == "live":
            _log.warning("waiting %g s: the last relay on this bucket did not stop in order", self.lease)
            await asyncio.sleep(self.lease)
            again = await self._read(0)
            if again is not None and again.etag != found.etag and again.lease.state == "live":
                raise StoreOpenError(
                    "[s3] another relay is using this bucket and prefix, and the service has no conditional "
                    "writes, or shared = false: only one relay at a time may run"
                )
        before = found.lease.session if found is not None else ""
        session = max(f"00{int(self._clock.now() * 1000):012x}", _following(before, 0))
        self.last_ids |= {found.lease.last_id} - {""} if found is not None else set()
        started = self._clock.boottime()
        self._mine = self._worded(session, 1)
        await self._write(0, self._mine, "")
        await asyncio.sleep(min(SETTLING, self.lease / 10))
        settled = await self._read(0)
        if settled is None or settled.lease.session != session:
            raise StoreOpenError(
                "[s3] another relay has started on this bucket and prefix at the same moment"
            )
        self.session, self.held_until = session, started + self.lease

    async def leave(self) -> None:
        """Writes that this relay has stopped. Raises StoreError."""
        if self.session:
            ended = msgspec.structs.replace(self._worded(self.session, self._mine.beat + 1), state="ended")
            await self._write(self.number, ended, self._etag)
            self.session, self.held_until = "", float("-inf")

    # --- the beat

    async def renew(self) -> None:
        """Raises LeaseLostError when the lease is another's, or over; StoreError when that is unknown."""
        started = self._clock.boottime()
        lease = self._worded(self.session, self._mine.beat + 1)
        if self.alone:
            found = await self._read(0)
            if found is None or found.lease.session != self.session:
                self.held_until = float("-inf")
                raise LeaseLostError("another relay has started on this bucket")
        try:
            self._etag = await self._write(self.number, lease, self._etag)
        except (ConflictError, MissingError):
            await self._check_mine()
            self._etag = await self._write(self.number, lease, self._etag)
        self._mine = lease
        self.held_until = started + self.lease

    async def _check_mine(self) -> None:
        """Finds out whether the lease is this relay's own write, whose answer was lost. Raises
        LeaseLostError.
        """
        found = await self._read(self.number)
        if found is None or found.lease.session != self.session or found.lease.state != "live":
            self.held_until = float("-inf")
            raise LeaseLostError("others have found the lease of this relay to be over")
        self._etag = found.etag

    async def look(self) -> set[str]:
        """Reads the other leases, and marks silent ones dead. Returns the sessions that have ended since."""
        if self.alone:
            return set()
        before = self.live()
        names: dict[int, str] = {}
        async for page in self._bucket.pages(self._keys.nodes):
            for listed in page:
                number = self._keys.number_of(listed.key)
                if number is not None and not (self.session and number == self.number):
                    names[number] = listed.etag
        for number in [number for number in self.others if number not in names]:
            del self.others[number]
        changed = [n for n, etag in names.items() if n not in self.others or self.others[n].etag != etag]
        for start in range(0, len(changed), READS_AT_ONCE):
            some = changed[start : start + READS_AT_ONCE]
            for number, seen in zip(some, await asyncio.gather(*map(self._read, some)), strict=True):
                self._note(number, seen)
        await self._bury()
        return before - self.live()

    def _note(self, number: int, seen: SeenLease | None) -> None:
        if seen is None:
            self.others.pop(number, None)
            return
        self.others[number] = seen
        if seen.lease.last_id:
            self.last_ids.add(seen.lease.last_id)

    async def _bury(self) -> None:
        now = self._clock.monotonic()
        for number, seen in list(self.others.items()):
            if seen.lease.state == "dead" or now - seen.since < self.lease or not self.session:
                continue
            dead = msgspec.structs.replace(seen.lease, state="dead", counts={}, oldest={})
            try:
                etag = await self._write(number, dead, seen.etag)
            except (ConflictError, MissingError):
                continue  # it lives, or others were faster
            _log.warning("relay %d was not heard of for %g s: its mail is taken over", number, self.lease)
            self.others[number] = SeenLease(etag, dead, now)

    def _worded(self, session: str, beat: int) -> LeaseRecord:
        return msgspec.structs.replace(self._tell(), session=session, state="live", beat=beat)

    async def _write(self, number: int, lease: LeaseRecord, etag: str) -> str:
        new = not etag and not self.alone
        match = "" if self.alone else etag
        return await self._bucket.put(
            self._keys.node(number), spelled.encode_lease(lease), match=match, new=new
        )

    async def _read(self, number: int) -> SeenLease | None:
        try:
            got = await self._bucket.get(self._keys.node(number))
        except MissingError:
            return None
        return SeenLease(got.etag, spelled.decode_lease(got.data), self._clock.monotonic())


def _following(session: str, number: int) -> str:
    """A session that is later than this one, also when the clock was set back."""
    try:
        return f"{number:02x}{int(session[2:], 16) + 1:012x}"
    except ValueError:
        return f"{number:02x}{1:012x}"
