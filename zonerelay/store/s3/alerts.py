"""Tells other relays through SQS that there is mail for a relay with room, and hears their alerts.

An alert names messages, or says that a session has ended. Mail without an alert is found by listing, so
trouble with SQS is logged and stops nothing. An alert is deleted from SQS only after the relay has acted on
it, and a relay without room asks for none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from zonerelay.model.message_id import MessageId, is_message_id
from zonerelay.process.tasks import cancel_all
from zonerelay.store.contract import StoreError
from zonerelay.store.s3.client import Bucket

BATCH = 10
WAIT = 20
"""Seconds that one question waits for an alert; the most that SQS allows."""
PAUSE = 1.0
LONGEST_PAUSE = 60.0
MAX_IDS = 100
"""Messages in one alert."""
MAX_WAITING = 10_000
"""Messages whose alert could not be sent yet; further ones are not announced."""

_log = logging.getLogger("zonerelay.store")


class Alert(msgspec.Struct, omit_defaults=True, frozen=True):
    ids: tuple[str, ...] = ()
    ended: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Alert).decode

Heard = Callable[[Sequence[MessageId]], Awaitable[bool]]


class Alerts:
    """One per store. `heard` is told of messages, or of none: then a relay has stopped. It returns whether
    that is settled: false leaves the alert to others.
    """

    def __init__(self, bucket: Bucket, *, heard: Heard, has_room: Callable[[], bool]) -> None:
        self._bucket = bucket
        self._heard = heard
        self._has_room = has_room
        self._waiting: list[MessageId] = []
        self._something = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._send_all()), loop.create_task(self._listen())]

    def offer(self, message_id: MessageId) -> None:
        """Announces a message that is stored and left to other relays."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(message_id)
            self._something.set()

    async def say_ended(self, session: str) -> None:
        await self._send(Alert(ended=session))

    async def _send_all(self) -> None:
        pause = PAUSE
        while True:
            await self._something.wait()
            some = self._waiting[:MAX_IDS]
            if await self._send(Alert(ids=tuple(some))):
                del self._waiting[: len(some)]
                pause = PAUSE
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            if not self._waiting:
                self._something.clear()

    async def _send(self, alert: Alert) -> bool:
        try:
            await self._bucket.send(_encode(alert).decode())
        except StoreError as error:
            _log.warning("other relays could not be alerted, they find the mail by listing: %s", error)
            return False
        return True

    async def _listen(self) -> None:
        pause = PAUSE
        while True:
            if not self._has_room():
                await asyncio.sleep(PAUSE)
                continue
            try:
                for text, receipt in await self._bucket.receive(BATCH, WAIT):
                    await self._take(text, receipt)
                pause = PAUSE
            except StoreError as error:
                _log.warning("alerts of other relays cannot be heard: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _take(self, text: str, receipt: str) -> None:
        """Raises StoreError; the alert then comes again, here or elsewhere."""
        try:
            ids = [MessageId(name) for name in _decode(text).ids if is_message_id(name)]
        except (ValueError, msgspec.MsgspecError):
            _log.warning("the queue of alerts holds a text that is no alert; it stays there")
            return
        if await self._heard(ids):
            await self._bucket.forget(receipt)
        else:
            await self._bucket.give_back(receipt)

    async def stop(self) -> None:
        await cancel_all(*self._tasks)
