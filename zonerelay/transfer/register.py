"""The import log: records which deliveries of other spools and systems this relay has imported.

A second import of the same mail therefore adds nothing, even if the mail has been delivered in between. The
file is next to the spool, with one line of 32 hexadecimal digits per delivery and without addresses. It may
be removed: mail that is still in the spool is recognized without it.

Failure: lines are appended and synced after their messages are durable. An import that was killed between the
two, and is run again before the relay starts, finds those messages in the spool. An incomplete last line is
cut off.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from zonerelay import durable
from zonerelay.transfer.stored import TransferError

FILE = "imported"
_LENGTH = 33  # length of a line


class ImportRegister:
    """The log of imported deliveries, opened for one import. Opening it raises TransferError if it is not
    valid. All methods raise OSError if the file cannot be used.
    """

    def __init__(self, home: Path) -> None:
        self.path = home / FILE
        durable.append(self.path, b"")  # the file's name is durable before anything is imported
        self._file = self.path.open("a+b")
        self._file.seek(0)
        content = self._file.read()
        whole = len(content) - len(content) % _LENGTH
        try:
            lines = [content[start : start + _LENGTH - 1] for start in range(0, whole, _LENGTH)]
            self._known = {bytes.fromhex(line.decode("ascii")) for line in lines}
        except ValueError as error:
            self._file.close()
            raise TransferError(
                f"{self.path}, the log of imported mail, is damaged: {error}. Without it, mail that has "
                "been delivered since would be imported again; move it away to accept that"
            ) from error
        self._file.truncate(whole)

    def knows(self, key: str, recipient: str) -> bool:
        return _digest(key, recipient) in self._known

    def add(self, deliveries: Iterable[tuple[str, str]]) -> None:
        """Add deliveries, each by the key of its message and its recipient. They are durable when it
        returns.
        """
        fresh = {_digest(*each) for each in deliveries} - self._known
        if fresh:
            self._file.write(b"".join(digest.hex().encode("ascii") + b"\n" for digest in fresh))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._known |= fresh

    def close(self) -> None:
        self._file.close()


def merge_registers(path: Path, target: Path) -> bool:
    """Add the lines of another log that the log `target` does not have. Return whether there were any."""
    known = set(target.read_bytes().split()) if target.exists() else set()
    fresh = [line for line in path.read_bytes().split() if line not in known] if path.exists() else []
    if fresh:
        durable.append(target, b"".join(line + b"\n" for line in fresh))
    return bool(fresh)


def _digest(key: str, recipient: str) -> bytes:
    return hashlib.sha256(f"{key}\n{recipient}".encode("utf-8", "surrogateescape")).digest()[:16]
