"""Stores objects in a bucket, using PUT with If-None-Match, or without it for a single relay.

The client never sends a change twice. A PUT without a response may arrive later, and the log resolves that
(`objects`). A versioned bucket keeps a version and a delete marker for each removed object until a lifecycle
rule expires them.

`Alerts` tells other relays through SQS that a relay has stopped. An alert only triggers a check of the other
partitions, which happens later anyway. So a failure of SQS is logged and has no other effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from zonerelay import durable
from zonerelay.config.settings import S3Settings
from zonerelay.model.clock import Clock
from zonerelay.process.tasks import cancel_all, gathered
from zonerelay.store.context import ReadSecret, secret_of
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.keys.port import MAX_NODES
from zonerelay.store.objects.client import Bucket, ConflictError, MissingError, RequestRejectedError
from zonerelay.store.objects.engine import AHEAD, Object, ObjectEngine, checked_values
from zonerelay.store.objects.index import ValueLocation

ALERT = '{"left": true}'
BATCH = 10
WAIT = 20
"""Seconds that one request waits for an alert. SQS allows no more."""
PAUSE = 1.0
LONGEST_PAUSE = 60.0

_log = logging.getLogger("zonerelay.store")


class S3Engine(ObjectEngine):
    """The engine for a bucket, with one prefix. The indexes of this process are in a directory below
    `indexes` that no other process uses. Raises StoreOpenError.
    """

    def __init__(
        self, settings: S3Settings, indexes: Path, clock: Clock, environment: Mapping[str, str]
    ) -> None:
        place = BucketPlace(settings, secret_of("s3.secret_key", settings.secret_key, environment))
        index, self._lock = _free_directory(indexes)
        super().__init__(place, index, clock=clock, lease=settings.lease)
        self._alerts = Alerts(place.bucket) if settings.queue_url else None
        self.check = place.check

    async def wait(self, seconds: float) -> None:
        """Wait until the other partitions should be checked: an alert has arrived, or `seconds` have
        passed.
        """
        await (self._alerts.wait(seconds) if self._alerts else asyncio.sleep(seconds))

    async def close(self) -> None:
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        if self._alerts:
            await self._alerts.say_left()
        await super().close()
        os.close(lock)


def _free_directory(indexes: Path) -> tuple[Path, int]:
    """Return a directory that this process has locked. If it has an index, the log need not be read."""
    try:
        for number in range(MAX_NODES):
            path = indexes / f"{number}"
            durable.make_directory(path)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return path, lock
            os.close(lock)
    except OSError as error:
        raise StoreOpenError(f"{indexes} cannot be used: {error}") from error
    raise StoreOpenError(f"{indexes}: in use by {MAX_NODES} processes")


class BucketPlace:
    """Objects with one prefix in a bucket."""

    def __init__(self, settings: S3Settings, read_secret_key: ReadSecret) -> None:
        self.is_conditional = settings.shared
        self.bucket = Bucket(settings, read_secret_key)
        self._prefix = settings.prefix

    # --- the requirements of a queue

    async def check(self) -> None:
        """Test the operations that the queue needs. Raises StoreOpenError if the bucket is unsuitable, and
        StoreError if objects cannot be written, read, listed or removed.
        """
        if await self.read("format") is not None:
            raise StoreOpenError(
                f"the prefix {self._prefix} contains a queue of zonerelay 0.1.0, which this release does "
                "not read. Nothing was changed. Start 0.1.0 on it until its mail is sent; then use another "
                "prefix for this release, or remove the remaining objects"
            )
        bucket = self.bucket
        await self._check_versions(bucket)
        name = f"probe/{uuid.uuid4().hex}"
        key = self._prefix + name
        if self.is_conditional:
            await self._try_conditions(bucket, key)
        else:
            await bucket.put(key, b"12")
        if await self.read(name) != b"12" or await self._read(name, 1, 1) != b"2":
            raise StoreOpenError("the service does not return what was written")
        async for _ in bucket.pages(key):
            break
        await bucket.delete(key)

    async def _try_conditions(self, bucket: Bucket, key: str) -> None:
        try:
            await bucket.put(key, b"12", new=True)
        except ConflictError:
            raise _unfit("rejects a PUT with If-None-Match: * for a new object") from None
        except RequestRejectedError as error:
            await bucket.put(key, b"12")  # raises if nothing may be written at all
            raise _unfit(f"does not support a PUT with If-None-Match: * ({error})") from error
        try:
            await bucket.put(key, b"3", new=True)
        except ConflictError:
            return
        raise _unfit("accepts a PUT with If-None-Match: * although the object exists")

    async def _check_versions(self, bucket: Bucket) -> None:
        if await bucket.retention():
            raise StoreOpenError(
                "the bucket locks every new object (object lock with a default retention), so the queue "
                "could not delete any; use a bucket without it"
            )
        if await bucket.is_versioned():
            _log.warning(
                "the bucket keeps versions: of each object that is removed a version and a marker stay, and"
                " are paid for. Give it a lifecycle rule that expires noncurrent versions and expired delete"
                " markers after a day (docs/store/s3.md, How to configure the bucket)"
            )

    # --- objects

    async def create(
        self, name: str, data: bytes, *, values: Sequence[Object] = (), makes_room: bool = False
    ) -> bool:
        await self.store(values)
        try:
            await self.bucket.put(self._prefix + name, data, new=self.is_conditional)
        except ConflictError:
            return False
        return True

    async def store(self, values: Sequence[Object]) -> None:
        await _all(lambda name, pieces: self.replace(name, b"".join(pieces)), values)

    async def replace(self, name: str, data: bytes) -> None:
        await self.bucket.put(self._prefix + name, data)

    async def read(self, name: str) -> bytes | None:
        return await self._read(name)

    async def _read(self, name: str, first: int = 0, length: int = 0) -> bytes | None:
        with contextlib.suppress(MissingError):
            return await self.bucket.get(self._prefix + name, first, length)
        return None

    async def read_values(self, name: str, spans: Sequence[ValueLocation]) -> list[bytes] | None:
        start, end = spans[0].first, spans[-1].first + spans[-1].size
        data = await self._read(name, start, end - start)
        if data is None:
            return None
        values = [data[each.first - start : each.first - start + each.size] for each in spans]
        return checked_values(values, spans, name)

    async def names(self, prefix: str) -> AsyncIterator[list[str]]:
        async for keys in self.bucket.pages(self._prefix + prefix):
            yield [key.removeprefix(self._prefix) for key in keys]

    async def remove(self, names: Sequence[str]) -> None:
        await _all(lambda name: self.bucket.delete(self._prefix + name), [(name,) for name in names])

    async def room(self) -> int | None:
        return None

    async def close(self) -> None:
        await self.bucket.close()


def _unfit(what: str) -> StoreOpenError:
    return StoreOpenError(
        f"the service {what}, so relays cannot share a queue on it; with [s3] shared = false a single "
        "relay can use it"
    )


async def _all(act: Callable[..., Awaitable[object]], wanted: Sequence[tuple[object, ...]]) -> None:
    """Call `act` with all arguments, several at the same time. Raises the first error after all of these
    calls have ended.
    """
    for first in range(0, len(wanted), AHEAD):
        await gathered(act(*one) for one in wanted[first : first + AHEAD])


class Alerts:
    """Sends and receives notifications about stopped relays. It listens from the first `wait` on."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._heard = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, seconds: float) -> None:
        """Wait for an alert of another relay for at most `seconds`."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._listen())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._heard.wait()
        self._heard.clear()

    async def _listen(self) -> None:
        pause = PAUSE
        while True:
            try:
                for _, receipt in await self._bucket.receive(BATCH, WAIT):
                    self._heard.set()
                    await self._bucket.forget(receipt)
                pause = PAUSE
            except StoreError as error:
                _log.warning("alerts of other relays cannot be heard: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def say_left(self) -> None:
        """Stop listening, and notify another relay that this one has left its partition, if it was a node."""
        if self._task is None:
            return
        await cancel_all(self._task)
        try:
            await self._bucket.send(ALERT)
        except StoreError as error:
            _log.warning("other relays could not be alerted, they find the mail a while later: %s", error)
