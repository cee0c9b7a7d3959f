"""Delivers the batches of zones whose next hop is "capture:" to captured mail.

The capture store has synced the message before there is an outcome, so a crash between the two repeats the
batch, and a message with the same id is the same message there. A full disk or any other error of the file is
a deferral with scope LOCAL. A message that can never be stored bounces. Only one message at a time is in
memory. Old messages are searched every `EXPIRED` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from zonerelay.config.settings import Settings
from zonerelay.delivery.batch.batch_state import unreadable
from zonerelay.delivery.rewrite.rendering import CheckClaim, ReadBody
from zonerelay.model.clock import Clock
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.process.tasks import cancel_all
from zonerelay.process.threads import CAPTURE
from zonerelay.routing.destinations.route import Batch
from zonerelay.store.contract import ClaimLostError, StoreError

if TYPE_CHECKING:
    from zonerelay.capture.store import Capture

EXPIRED = 600.0
_HOST = "capture"


@dataclass(eq=False, repr=False)
class CaptureCourier:
    """Delivers batches to the capture store. It opens the store with the first batch, or with `start`."""

    settings: Settings
    _: KW_ONLY
    read_body: ReadBody
    check_claim: CheckClaim
    clock: Clock
    on_error: Callable[[str, BaseException], None]

    def __post_init__(self) -> None:
        self._capture: Capture | None = None
        self._lock = asyncio.Lock()
        self._expiring: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._expiring is None:
            self._expiring = asyncio.create_task(self._expire())

    async def close(self) -> None:
        await cancel_all(self._expiring)
        if self._capture is not None:
            await CAPTURE.run(self._capture.close)

    async def deliver(self, batch: Batch) -> Sequence[Outcome]:
        """Deliver a batch to captured mail. Only CancelledError and ClaimLostError are raised."""
        async with self._lock:
            self.start()
            try:
                pieces = [piece async for piece in self.read_body(batch.message.id)]
                self.check_claim(batch.message.id)
                outcome = await CAPTURE.run(self._keep, batch, b"".join(pieces))
            except ClaimLostError:
                raise
            except StoreError as error:
                outcome = _outcome(Verdict.DEFERRED, unreadable(error))
            except Exception as error:  # noqa: BLE001 - an unknown error is temporary
                self.on_error("capture", error)
                outcome = _outcome(
                    Verdict.DEFERRED, Reply(451, "3.0", f"internal error: {type(error).__name__}")
                )
        return [outcome] * len(batch.deliveries)

    def _keep(self, batch: Batch, octets: bytes) -> Outcome:
        from zonerelay.capture import store  # noqa: PLC0415 - SQLite: most relays capture nothing

        recipients = [delivery.recipient for delivery in batch.deliveries]
        try:
            self._open().add(batch.message.id, batch.message.envelope.sender, recipients, octets)
        except store.CaptureTooLargeError as error:
            return _outcome(Verdict.BOUNCED, Reply(552, "3.4", str(error)))
        except store.CaptureFullError as error:
            return _outcome(Verdict.DEFERRED, Reply(452, "3.1", str(error)))
        except store.CaptureError as error:
            return _outcome(Verdict.DEFERRED, Reply(451, "3.0", f"captured mail: {error}"))
        return _outcome(Verdict.DELIVERED, Reply(250, "0.0", "captured"))

    def _open(self) -> Capture:
        if self._capture is None:
            from zonerelay.capture.store import open_capture  # noqa: PLC0415 - as above

            self._capture = open_capture(self.settings, self.clock.now)
        return self._capture

    async def _expire(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # the next message reports it
                await CAPTURE.run(lambda: self._open().expire())
            await asyncio.sleep(EXPIRED)


def _outcome(verdict: Verdict, reply: Reply) -> Outcome:
    scope = Scope.MESSAGE if verdict is Verdict.BOUNCED else Scope.LOCAL
    return Outcome(verdict, reply, scope=scope, host=_HOST, local=True)
