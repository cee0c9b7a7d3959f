"""Repairs logs with gaps before LevelDB opens them. Only damaged records are lost, and the loss is reported.

LevelDB would drop the whole rest of a block. So a log with a gap is kept as a copy and replaced by one with
all intact records. Until LevelDB has opened the database, `undo` restores the original files. Every function
blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from zonerelay import durable
from zonerelay.store.leveldb.damage.directory import MARK_NAME, FoundLog, SyncMark, own_names
from zonerelay.store.leveldb.damage.format import identities_in, write_log
from zonerelay.store.leveldb.damage.losses import MAX_NAMED, Loss, Losses


class DatabaseRepair:
    """The changes made to open a damaged database, which `undo` reverts."""

    def __init__(self, directory: Path, losses: Losses, mark: SyncMark | None) -> None:
        self._directory = directory
        self._losses = losses
        self._mark = mark
        self._mended: list[tuple[FoundLog, Loss | None]] = []
        """The logs that were replaced, and what each has lost."""
        self._names = own_names(directory)
        self._current = _content(directory / "CURRENT")

    def mend(self, log: FoundLog) -> None:
        """Replace a log with its intact records. Raises OSError, in which case the log is unchanged."""
        loss = self._account_for(log) if log.contents.gaps else None
        whole = write_log(log.contents.records)
        try:
            if self._mark is not None and self._mark.log == int(log.path.stem):
                self._write_mark(replace(self._mark, size=min(self._mark.size, len(whole))))
            durable.write(log.path, whole)
        except OSError:
            if loss is not None:
                self._losses.forget(loss)
            raise
        self._mended.append((log, loss))

    def settle(self, is_there: Callable[[str], bool]) -> None:
        """Report the losses after LevelDB has opened the database. `is_there` returns whether a message
        exists.
        """
        for _, loss in self._mended:
            if loss is not None:
                missing = tuple(each for each in loss.messages if not is_there(each))
                self._losses.tell(msgspec.structs.replace(loss, missing=missing))
        self._mended.clear()

    def undo(self) -> None:
        """Restore the original files because LevelDB could not open the database. Raises OSError."""
        if _content(self._directory / "CURRENT") == self._current:
            for name in own_names(self._directory) - self._names:
                (self._directory / name).unlink()
        for log, loss in self._mended:
            kept = None if loss is None else self._losses.kept_at(loss)
            if kept is None:
                durable.write(log.path, log.raw)
            else:
                durable.rename(kept, log.path)
            if loss is not None:
                self._losses.forget(loss)
        if self._mended and self._mark is not None:
            self._write_mark(self._mark)
        self._mended.clear()

    def _account_for(self, log: FoundLog) -> Loss:
        identity, kept = self._losses.keep(log.path, log.raw)
        named: list[str] = []
        for gap in log.contents.gaps:
            named += identities_in(log.raw[gap.start : gap.end])
        loss = Loss(
            id=identity,
            what=_description(log),
            octets=sum(gap.end - gap.start for gap in log.contents.gaps),
            messages=tuple(dict.fromkeys(named))[:MAX_NAMED],
            kept=kept,
        )
        self._losses.note(loss)
        return loss

    def _write_mark(self, mark: SyncMark) -> None:
        durable.write(self._directory / MARK_NAME, mark.encode())


def _description(log: FoundLog) -> str:
    gaps = log.contents.gaps
    shown = ", ".join(f"{gap.start:,} to {gap.end:,}" for gap in gaps[:3])
    if gaps[-1].end >= len(log.raw) and len(gaps) <= 3:
        shown = f"{shown.rpartition(' to ')[0]} to the end"
    more = f" and {len(gaps) - 3} more ranges" if len(gaps) > 3 else ""
    text = f"bytes {shown}{more} of {log.path.name} were damaged or missing when the spool was opened"
    if writes := log.contents.writes_missing:
        text += f", with at least {writes:,} record{'' if writes == 1 else 's'}"
    return text


def _content(path: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return None
