"""Notifies other relays through SQS that a relay has stopped, and receives such notifications.

An alert only triggers a check of the other partitions, which happens later anyway. So a failure of SQS is
logged and has no other effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from zonerelay.process.tasks import cancel_all
from zonerelay.store.contract import StoreError
from zonerelay.store.objects.client import Bucket

ALERT = '{"left": true}'
BATCH = 10
WAIT = 20
"""Seconds that one request waits for an alert. SQS allows no more."""
PAUSE = 1.0
LONGEST_PAUSE = 60.0

_log = logging.getLogger("zonerelay.store")


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
