"""Records in a file the last state of a partition that this machine has seen: mark, writer, epoch and
position.

The file answers two questions at a start. Does the store have an older state than this machine has seen? Was
the last writer a process of this machine that has died? The file is locked while a process uses it, so the
answer to the second question is certain.

A record is written after each batch, without a sync, which costs a few microseconds. It survives a kill.
After a power cut it may be outdated. That weakens the comparison, but never causes a false alarm, because the
record is written after its batch is durable. A failure to write the file is logged and does not stop mail.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from zonerelay import durable
from zonerelay.store.contract import StoreOpenError
from zonerelay.store.keys.port import NOTHING, NodeTakenError, PartitionState, Position

_WIDTH = 512

_log = logging.getLogger("zonerelay.store")


class SeenState(NamedTuple):
    """The last state of a partition that this machine has seen. `writer` identifies this process, and the
    next one on this machine, to the engine. An empty `mark` means that it has seen no store yet.
    """

    writer: str
    mark: str = ""
    epoch: int = 0
    last: Position = NOTHING

    def after(self, state: PartitionState) -> SeenState:
        return SeenState(self.writer, state.mark, state.epoch, state.last)


class SeenFile:
    """The file with the last seen state of one partition. `seen` is its content. All methods block for a
    moment.
    """

    def __init__(self, path: Path, token: str) -> None:
        """Create the file with `token` as the writer of this machine if it does not exist. Raises
        StoreOpenError, and NodeTakenError while another process has the file.
        """
        self._path = path
        try:
            durable.make_directory(path.parent)
            durable.create(path, _packed(SeenState(token)))
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StoreOpenError(f"{path} cannot be used: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.seen = msgspec.json.decode(os.pread(self._file, _WIDTH, 0), type=SeenState)
        except BlockingIOError as error:
            os.close(self._file)
            raise NodeTakenError(f"{path} is in use by another process of this machine") from error
        except (OSError, msgspec.MsgspecError) as error:
            os.close(self._file)
            raise StoreOpenError(
                f"{path} cannot be read: {error}. It contains the last known state of the queue; remove it "
                "to accept the store as it is"
            ) from error

    def note(self, seen: SeenState) -> None:
        """Record a state. A new mark is written durably."""
        is_new = seen.mark != self.seen.mark
        self.seen = seen
        try:
            os.pwrite(self._file, _packed(seen), 0)
            if is_new:
                os.fsync(self._file)
        except OSError as error:
            _log.warning("%s cannot be written, so an older state may go unnoticed: %s", self._path, error)

    def forget(self) -> None:
        """Accept the store in any state at the next opening."""
        self.note(SeenState(self.seen.writer))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)


def _packed(seen: SeenState) -> bytes:
    return msgspec.json.encode(seen).ljust(_WIDTH - 1) + b"\n"
