"""Keeps the bucket usable: the beat that renews the lease, trouble with the service, recovery.

On trouble new mail is refused and nothing is handed out until a beat works again. A beat writes and lists;
it is tried with growing pauses for as long as it takes. Then the store puts right what is doubtful. When
the lease was lost meanwhile, the store is told, and begins anew under another session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from zonerelay.process.tasks import cancel_all
from zonerelay.store.common.keeper.health import Health
from zonerelay.store.common.queue_mark import StrangeStoreError
from zonerelay.store.contract import StoreError, Unhealthy
from zonerelay.store.s3.nodes import LeaseLostError, Nodes

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
BEATS = 4
"""Renewals in one lease: three may fail."""
LONGEST_BEAT = 10.0


_log = logging.getLogger("zonerelay.store")


class S3Keeper:
    """`recovered` is called after trouble; `lost` when the lease was; `ended` hears of sessions that are
    over; each beat `tick` is called. They may raise StoreError, which is more trouble.
    """

    def __init__(
        self,
        nodes: Nodes,
        *,
        on_health: Callable[[str | None], None],
        recovered: Callable[[], Awaitable[None]],
        lost: Callable[[], Awaitable[None]],
        ended: Callable[[Collection[str]], Awaitable[None]],
        tick: Callable[[], Awaitable[None]],
    ) -> None:
        self.nodes = nodes
        self._health = Health(on_health)
        self._recovered = recovered
        self._lost = lost
        self._ended = ended
        self._tick = tick
        self._every = min(nodes.lease / BEATS, LONGEST_BEAT)
        self._wake = asyncio.Event()
        self._in_trouble = False
        self._closed = False
        self._beating = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.unhealthy = self._reason

    def _reason(self) -> Unhealthy | None:
        reason = self._health.reason
        return reason if reason is not None or self.nodes.holds_lease else Unhealthy.NO_LEASE

    def problems(self) -> tuple[str, ...]:
        reason = self._reason()
        return self._health.problems() or (() if reason is None else (reason,))

    # --- may it be used?

    def check_open(self) -> None:
        if self._closed:
            raise StoreError(Unhealthy.CLOSED)

    def check_usable(self) -> None:
        """Raises StoreError while the service is not there, or the lease is over."""
        reason = self._reason()
        if reason is not None:
            raise StoreError(reason)

    async def usable(self) -> bool:
        return await self._health.wait_while(lambda: self._reason() is not None)

    def trouble(self, error: StoreError) -> None:
        if isinstance(error, StrangeStoreError) and self._health.reason is not Unhealthy.OTHER_QUEUE:
            _log.error("%s", error)
            self._health.set("lease", Unhealthy.OTHER_QUEUE)
        if self._closed or self._in_trouble:
            return
        _log.error("%s: %s", Unhealthy.OBJECTS_DOWN, error)
        self._in_trouble = True
        self._health.set("service", Unhealthy.OBJECTS_DOWN)
        self._wake.set()

    async def probe(self) -> None:
        self.check_usable()
        await self._beat()

    # --- the beat

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def _live(self) -> None:
        pause = FIRST_PAUSE
        while True:
            timer = asyncio.get_running_loop().call_later(
                pause if self._in_trouble else self._every, self._wake.set
            )
            await self._wake.wait()
            timer.cancel()
            self._wake.clear()
            if self._in_trouble:
                await asyncio.sleep(pause)
            try:
                await self._beat()
                pause = FIRST_PAUSE
            except StoreError as error:
                self.trouble(error)
                pause = min(2 * pause, LONGEST_PAUSE, self.nodes.lease / BEATS)
            except Exception as error:  # noqa: BLE001 - a bug must not end the beat: the lease would go with it
                _log.exception("unexpected in the beat of the lease")
                self.trouble(StoreError(repr(error)))

    async def _beat(self) -> None:
        async with self._beating:
            try:
                await self.nodes.renew()
            except LeaseLostError as error:
                _log.warning("%s", error)
                self._health.set("lease", Unhealthy.NO_LEASE)
                await self._lost()
            ended = await self.nodes.look()
            if self._in_trouble:
                await self._recovered()
                self._in_trouble = False
            self._health.set("service", None)
            self._health.set("lease", None)
            if ended:
                await self._ended(ended)
            await self._tick()

    async def close(self) -> None:
        """Ends the beats; the lease stays."""
        await cancel_all(self._task)

    def closed(self) -> None:
        self._closed = True
        self._health.close()
