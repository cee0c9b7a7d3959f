"""Records the losses that were found when the spool was opened, and reports them until an operator dismisses
them.

Each loss is a file `lost/ID.json` in the spool's directory, with a hard link `lost/ID-000123.log` to the
original log. At most `MAX_KEPT` logs are kept: the oldest dismissed one is removed first, and if none is
dismissed, no further log is kept. A failure to record a loss never prevents a start. Every function blocks.
"""

import hashlib
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from zonerelay import durable
from zonerelay.store.contract import StoreError

DIRECTORY = "lost"
MAX_KEPT = 16
MAX_NAMED = 10_000
"""The largest number of messages in a record."""
MAX_SHOWN = 5

_log = logging.getLogger("zonerelay.store")


class Loss(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A loss of data in the spool. `messages` occur in the damaged bytes, and `missing` are those that are
    not in the spool, or None before that is known. `kept` is the name of the copy in `lost`.
    """

    id: str
    what: str
    octets: int = 0
    messages: tuple[str, ...] = ()
    missing: tuple[str, ...] | None = None
    kept: str = ""
    acknowledged: bool = False

    def text(self, directory: Path) -> str:
        """Describe the loss for operators, with the paths of the files that are kept in `directory`."""
        text = self.what
        if self.messages:
            text += f"; they refer to {len(self.messages):,} message{'' if len(self.messages) == 1 else 's'}"
            if self.missing:
                are = "is" if len(self.missing) == 1 else "are"
                text += f", of which {_few(self.missing)} {are} not in the spool (already delivered, or lost)"
            elif self.missing is not None:
                text += ", all of them still in the spool"
            text += f"; all ids are in {directory / self.id}.json"
        if self.kept:
            text += f"; a copy of the previous state is {directory / self.kept}"
        return f"{text}; to dismiss this report: zonerelay spool acknowledge {self.id}"


class Losses:
    """The recorded losses of one spool. `open` has those that were not dismissed as of the last `refresh`."""

    def __init__(self, spool: Path) -> None:
        self.directory = spool / DIRECTORY
        self.open: tuple[Loss, ...] = ()

    def refresh(self) -> None:
        self.open = tuple(loss for loss in self._all() if not loss.acknowledged)

    def problems(self) -> list[tuple[str, str]]:
        """Return the id and the description of each loss that was not dismissed."""
        return [(loss.id, f"the spool lost data: {loss.text(self.directory)}") for loss in self.open]

    def keep(self, log: Path, raw: bytes) -> tuple[str, str]:
        """Keep a copy of a damaged log in the directory of loss reports. Return an id for the loss and the
        copy's name, or "" if the copy failed.
        """
        identity = identity_of(raw)
        name = f"{identity}-{log.name}"
        try:
            durable.make_directory(self.directory)
            if not self._make_room():
                _log.error("no copy of %s is kept, because %d copies already exist", log, MAX_KEPT)
                return identity, ""
            (self.directory / name).unlink(missing_ok=True)
            os.link(log, self.directory / name)
            durable.sync_directory(self.directory)
        except OSError as error:
            _log.error("%s cannot be copied: %s", log, error)
            return identity, ""
        return identity, name

    def tell(self, loss: Loss) -> None:
        """Record a loss, and log it with every missing message."""
        _log.error("the spool lost data: %s", loss.text(self.directory))
        for each in loss.missing or ():
            _log.error("message %s is mentioned in damaged bytes and is missing from the spool", each)
        self.note(loss)

    def note(self, loss: Loss) -> None:
        """Record a loss durably. If that fails, log it."""
        self.open = (*(each for each in self.open if each.id != loss.id), loss)
        try:
            self._write(loss)
        except OSError as error:
            _log.error("the loss report cannot be stored and will be forgotten at the next stop: %s", error)

    def forget(self, loss: Loss) -> None:
        """Remove the record of a loss and the copy of the log, because the start that found the loss was
        undone.
        """
        self.open = tuple(each for each in self.open if each.id != loss.id)
        for name in (f"{loss.id}.json", loss.kept or f"{loss.id}.json"):
            (self.directory / name).unlink(missing_ok=True)
        if self.directory.is_dir() and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def acknowledge(self, identity: str) -> bool:
        """Dismiss a loss, and return false if it does not exist. Raises StoreError if that cannot be
        stored.
        """
        for loss in self.open:
            if loss.id == identity:
                try:
                    self._write(msgspec.structs.replace(loss, acknowledged=True))
                except OSError as error:
                    raise StoreError(f"the dismissal of {identity} cannot be stored: {error}") from error
                self.open = tuple(each for each in self.open if each.id != identity)
                return True
        return False

    def _write(self, loss: Loss) -> None:
        durable.make_directory(self.directory)
        path = self.directory / f"{loss.id}.json"
        durable.write(path, msgspec.json.format(msgspec.json.encode(loss), indent=1) + b"\n")

    def _all(self) -> Iterator[Loss]:
        for path in sorted(self.directory.glob("*.json")):
            try:
                yield msgspec.json.decode(path.read_bytes(), type=Loss)
            except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
                yield Loss(id=path.stem, what=f"the loss report {path} cannot be read: {error}")

    def _make_room(self) -> bool:
        kept = list(self.directory.glob("*-*.log"))
        while len(kept) >= MAX_KEPT:
            unread: Collection[str] = {loss.kept for loss in self._all() if not loss.acknowledged}
            done = [path for path in kept if path.name not in unread]
            if not done:
                return False
            oldest = min(done, key=lambda path: path.stat().st_mtime)
            oldest.unlink()
            kept.remove(oldest)
        return True


def identity_of(raw: bytes) -> str:
    """Derive a loss id from the damaged bytes, so that an interrupted start does not report the same damage
    twice.
    """
    return hashlib.sha256(raw).hexdigest()[:8]


def _few(ids: Collection[str]) -> str:
    shown = ", ".join(list(ids)[:MAX_SHOWN])
    return shown if len(ids) <= MAX_SHOWN else f"{shown} and {len(ids) - MAX_SHOWN:,} more"
