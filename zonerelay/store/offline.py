"""What operators' commands do to a store beside the relay: with no relay running, or without asking it.

Every function works on the files of the spool and reads and writes nothing else. All of it blocks.
"""

from __future__ import annotations

import os

from zonerelay.config.settings import Settings, SpoolSettings
from zonerelay.store.common.queue_mark import QueueMark, place_of
from zonerelay.store.leveldb.damage.directory import lock_directory
from zonerelay.store.leveldb.damage.losses import Losses
from zonerelay.store.spool_paths import is_shared, spool_of, spools_beyond


def acknowledge_loss(spool: SpoolSettings, loss: str) -> bool:
    """Ends the warning about a loss of mail, in the spool of any worker. False when no spool has such a loss.

    Raises StoreError when a relay has the spool open or the note cannot be written, and OSError.
    """
    for worker in (0, *(() if is_shared(spool) else spools_beyond(spool, 1))):
        path = spool_of(spool, worker).path
        if not path.is_dir():
            continue
        lock = lock_directory(path)
        try:
            losses = Losses(path)
            losses.refresh()
            if losses.acknowledge(loss):
                return True
        finally:
            os.close(lock)
    return False


def place_of_queue(settings: Settings) -> str:
    """The place of a shared queue, without secrets; "" for a spool of this machine's own."""
    return place_of(settings.spool.backend, redis=settings.redis, postgres=settings.postgres, s3=settings.s3)


def forget_queue(settings: Settings) -> str:
    """Makes this machine believe the shared store as it is. A relay that refuses it looks again in seconds.

    Returns the mark of the queue that was known, "" when none was. Raises StoreError, OSError.
    """
    return QueueMark(settings.spool.path, place_of_queue(settings)).forget()
