"""Large messages that are arriving in the disk queue: each is a file in scratch that grows.

Groups of chunks are appended in the threads for files while the next group fills. What is given up is
removed in the background, and by the next start at the latest. A failed append fails only its own message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from zonerelay.model.message_id import MessageId
from zonerelay.store.common.body.cache import BodyCache
from zonerelay.store.contract import CHUNK_SIZE, StoreError, StoreFullError
from zonerelay.store.disk.files import EncodedMessage, Upload
from zonerelay.store.disk.keeper import DiskKeeper


class ScratchUploads:
    """Belongs to the event loop. `count` is the writers' own count of those among them that are large."""

    def __init__(self, keeper: DiskKeeper, bodies: BodyCache) -> None:
        self.count = 0
        self._keeper = keeper
        self._bodies = bodies
        self._open: dict[MessageId, Upload] = {}

    def __contains__(self, message_id: MessageId) -> bool:
        return message_id in self._open

    def append(self, message_id: MessageId, first: int, chunks: Sequence[bytes]) -> asyncio.Future[None]:
        upload = self._open.get(message_id)
        if upload is None:
            upload = self._open[message_id] = Upload(self._keeper.directories.scratch, message_id)
        self._keeper.note_written(len(chunks) * CHUNK_SIZE)
        self._bodies.extend(message_id, first, chunks)
        written = self._keeper.work(upload.append, chunks)
        written.add_done_callback(self._heard)
        return written

    def finish(
        self,
        new: EncodedMessage,
        first: int,
        chunks: Sequence[bytes],
        submit: Callable[[], asyncio.Future[None]],
    ) -> asyncio.Future[None]:
        """Complete and sync the file, then `submit`; done when what that returns is. It goes on by itself,
        also when the caller no longer waits.
        """
        upload = self._open.pop(new.id)
        self._bodies.extend(new.id, first, chunks)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_heard)

        def finished(written: asyncio.Future[None]) -> None:
            try:
                written.result()
                submit().add_done_callback(lambda submitted: _pass_on(submitted, done))
            except StoreError as error:
                if isinstance(error, StoreFullError):
                    self._keeper.note_full()
                self._give_up(new.id, upload)
                _pass_on(error, done)

        self._keeper.work(upload.finish, new, chunks).add_done_callback(finished)
        return done

    def _heard(self, written: asyncio.Future[None]) -> None:
        _heard(written)
        if not written.cancelled() and isinstance(written.exception(), StoreFullError):
            self._keeper.note_full()

    def discard(self, message_id: MessageId) -> None:
        upload = self._open.pop(message_id, None)
        if upload is not None:
            self._give_up(message_id, upload)

    def _give_up(self, message_id: MessageId, upload: Upload) -> None:
        self._bodies.drop(message_id)
        try:
            self._keeper.work(upload.discard).add_done_callback(_heard)
        except StoreError:
            return  # closed meanwhile: the next start empties scratch

    async def close(self) -> None:
        """Give up what is still arriving."""
        uploads, self._open = self._open, {}
        if uploads:
            work = [self._keeper.work(upload.discard) for upload in uploads.values()]
            await asyncio.gather(*work, return_exceptions=True)


def _heard(future: asyncio.Future[None]) -> None:
    """Marks an error as retrieved: a cancelled session no longer waits for it."""
    if not future.cancelled():
        future.exception()


def _pass_on(outcome: asyncio.Future[None] | StoreError, done: asyncio.Future[None]) -> None:
    error = outcome if isinstance(outcome, StoreError) else outcome.exception()
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
