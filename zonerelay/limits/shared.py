"""Shares limits between machines through a store with one versioned record for each zone.

There is no server that decides. Each relay reads the record, applies the pure code of `authority.py`, and
writes the record back. If another relay has written in between, the write is refused and the relay starts
again. So a relay that is slow or stopped does not delay the others.

Failure: a relay that is silent for `LEASE` seconds, by the store's clock, loses all its slots. It stops using
them before that (`worker`). While the store is unreachable, every exchange fails at once. When the
store is reachable again, the relay declares everything it holds.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

import msgspec

from zonerelay.limits.authority import AuthorityError, LimitAnswer, LimitRequest, ZoneLimits
from zonerelay.process.tasks import cancel_all

LEASE = 15.0
"""Seconds for which the slots of a relay that has died stay unused."""

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
"""The longest pause in seconds between two attempts to connect."""

MAX_TRIES = 100
"""Attempts to replace a record. Each one fails if another relay has written first."""

GOODBYE = 1.0
"""Seconds for giving everything back at the end."""

T = TypeVar("T")


class VersionedRecord(msgspec.Struct, frozen=True):
    """A stored version of the limits of one zone. `version` identifies the version, and `now` is the store's
    clock.
    """

    data: bytes | None
    version: int
    now: float


class RecordStore(Protocol):
    """Interface: stores records with a version number. All methods raise AuthorityError. A lost connection is
    replaced at the next call.
    """

    name: str

    async def read(self, zone: str) -> VersionedRecord: ...

    async def replace(
        self, zone: str, record: VersionedRecord, data: bytes | None, *, ttl: float, notices: Sequence[str]
    ) -> bool:
        """Replace the stored limits of a zone, keep them for at least `ttl` seconds, and send `notices` to
        the other relays. Return false, with nothing done, if the record has changed.
        """

    async def close(self) -> None:
        """Close the connection. Never raises."""


class SharedRecordStore(RecordStore, Protocol):
    """Interface: records that several machines share."""

    def listening(self, on_notice: Callable[[str], None]) -> AbstractAsyncContextManager[asyncio.Event]:
        """Connect for the block, and yield an event that is set when the connection has ended. `on_notice` is
        called with each notice that another relay has sent.
        """


class SharedAuthority:
    """A limit authority that keeps its state in a store. `owner` is a name of this process that no other
    process has had.
    """

    def __init__(self, store: SharedRecordStore, owner: str, *, lease: float = LEASE) -> None:
        self.name = store.name
        self.lease = lease
        self._store = store
        self._owner = owner
        self._zones: dict[str, int] = {}
        self._news: Callable[[str], None] | None = None
        self._ended: asyncio.Event | None = None
        """The end of the present connection."""
        self._task: asyncio.Task[None] | None = None

    async def start(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        self._news = news
        tried = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._stay_connected(back, gone, tried))
        await tried.wait()

    async def exchange(self, zone: str, request: LimitRequest) -> LimitAnswer:
        ended = self._ended
        if ended is None:
            raise AuthorityError(f"{self.name} is unreachable")
        self._zones[zone] = request.zone_limit
        for _ in range(MAX_TRIES):
            record = await _asked(self._store.read(zone), ended)
            try:
                limits = ZoneLimits.decode(record.data)
            except ValueError as error:
                raise AuthorityError(f"{self.name}: the stored limits are invalid: {error}") from error
            answer, news = limits.exchange(self._owner, request, record.now, until=record.now + self.lease)
            notices = [f"{owner} {zone}" for owner in sorted(news)]
            ttl = max(2 * self.lease, limits.binds_until - record.now)
            data = None if limits.is_empty else limits.encode()
            if data is None and record.data is None:
                return answer
            written = self._store.replace(zone, record, data, ttl=ttl, notices=notices)
            if await _asked(written, ended):
                return answer
        raise AuthorityError(f"{self.name}: gave up after {MAX_TRIES} write conflicts")

    async def close(self) -> None:
        with contextlib.suppress(AuthorityError, TimeoutError):
            async with asyncio.timeout(GOODBYE):
                for zone, limit in list(self._zones.items()):
                    await self.exchange(zone, LimitRequest(limit, everything=True))
        await cancel_all(self._task)
        await self._store.close()

    def _on_notice(self, notice: str) -> None:
        owner, _, zone = notice.partition(" ")
        if owner == self._owner and self._news is not None:
            self._news(zone)

    async def _stay_connected(
        self, back: Callable[[], None], gone: Callable[[str], None], tried: asyncio.Event
    ) -> None:
        now = asyncio.get_running_loop().time
        pause = FIRST_PAUSE
        while True:
            since = now()
            try:
                async with self._store.listening(self._on_notice) as ended:
                    self._ended = ended
                    back()
                    tried.set()
                    await ended.wait()
                reason = "the connection was closed"
            except AuthorityError as error:
                reason = str(error)
            self._ended = None
            tried.set()
            gone(reason)
            if now() - since > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            # This also applies after a connection that was useless, because a failing server may accept many
            # of them.
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


async def _asked(question: Awaitable[T], ended: asyncio.Event) -> T:
    """Await a request to the store, and return the response. After an error, the connection is treated as
    ended.
    """
    try:
        return await question
    except AuthorityError:
        ended.set()
        raise
