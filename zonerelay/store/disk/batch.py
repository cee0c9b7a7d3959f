"""Makes many changes of the disk queue durable together. All of this blocks: the writer thread calls it.

The steps of a batch, each finished before the next begins:

1. every new file is staged in scratch and synced, several at a time;
2. when changes of several messages belong together (a bounce and the delivery that it reports), what is
   about to be done is written down, durably, as an *intent*: after a crash it is done again to its end;
3. states are renamed into place, then messages; then the messages that are finished are removed;
4. the directories are synced, once for all sessions that wait: now everything is durable;
5. states of finished messages and the intent are removed. A crash before this costs nothing.

After an error, and at a start, `stock.settle_down` ends what was begun.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from zonerelay.model.message_id import MessageId, is_message_id
from zonerelay.store.contract import StoreCorruptError
from zonerelay.store.disk import files
from zonerelay.store.disk import format as disk_format
from zonerelay.store.disk.directories import Directories, Directory, translated

IO_THREADS = 4
"""Files staged at the same time. More were not faster on the machines that it was measured on."""
MAX_SHARE = 64
"""Files that one thread stages, and has open, before it syncs them."""
INTENT_SUFFIX = ".intent"
LAST_SUFFIX = ".last"
"""`<id>.last`, an empty file in the directory of states: the highest id of what is gone."""
_PROBE = "zonerelay.probe"


class Put(NamedTuple):
    """A new message. `chunks` None: it is staged already."""

    new: files.EncodedMessage
    chunks: Sequence[bytes] | None


class Rewrite(NamedTuple):
    """The state of a message's open deliveries."""

    id: MessageId
    records: tuple[bytes, ...]


class Remove(NamedTuple):
    """Its last delivery left."""

    id: MessageId


class Keep(NamedTuple):
    """An idempotency key, by the name of its file. It comes with its message in one submission."""

    name: str


class Probe(NamedTuple):
    """A file that is staged, synced and removed again."""


Op = Put | Rewrite | Remove | Keep | Probe


class BatchIntent(msgspec.Struct, frozen=True):
    """The steps of a batch: staged states and messages to be renamed, messages to be removed."""

    number: int
    states: list[str]
    messages: list[str]
    removed: list[str]
    keys: list[str] = []


@dataclass(slots=True)
class FileBatch:
    """The files of each message, where only the last of several changes counts."""

    number: int
    last_id: MessageId | None
    puts: dict[MessageId, Put] = field(default_factory=dict)
    states: dict[MessageId, tuple[bytes, ...]] = field(default_factory=dict)
    removed: dict[MessageId, None] = field(default_factory=dict)
    joined: set[MessageId] = field(default_factory=set)
    keys: list[str] = field(default_factory=list)
    unstaged: list[MessageId] = field(default_factory=list)
    probe: bool = False

    def add(self, ops: Iterable[Op]) -> None:
        """One submission: all of it, or nothing, will be there after a crash."""
        touched: set[MessageId] = set()
        keys = len(self.keys)
        for op in ops:
            if isinstance(op, Probe):
                self.probe = True
            elif isinstance(op, Keep):
                self.keys.append(op.name)
            elif isinstance(op, Put):
                touched.add(op.new.id)
                self.puts[op.new.id] = op
                self.states[op.new.id] = op.new.records
                if self.removed.pop(op.new.id, op) is None:
                    # It takes the place of the one that leaves: state and message in one step.
                    self.joined.add(op.new.id)
            else:
                touched.add(op.id)
                if isinstance(op, Rewrite):
                    self.states[op.id] = op.records
                else:
                    self.states.pop(op.id, None)
                    if self.puts.pop(op.id, None) is not None:
                        self.unstaged.append(op.id)
                    self.removed[op.id] = None
        if len(touched) > 1 or len(self.keys) > keys:
            self.joined |= touched

    def intent(self) -> BatchIntent | None:
        """None when nothing belongs together."""
        joined = sorted(self.joined)
        if not joined:
            return None
        return BatchIntent(
            self.number,
            [message_id for message_id in joined if message_id in self.states],
            [message_id for message_id in joined if message_id in self.puts],
            [message_id for message_id in joined if message_id in self.removed],
            self.keys,
        )


_encode_intent = msgspec.json.Encoder().encode
_decode_intent = msgspec.json.Decoder(BatchIntent).decode


class FileBatchWriter:
    """Belongs to the writer thread while it works."""

    def __init__(self, directories: Directories, pool: Executor, noted_id: MessageId | None) -> None:
        """`noted_id` is the last id that an earlier run noted."""
        self._directories = directories
        self._pool = pool
        self._last_id = noted_id

    def write(self, batch: FileBatch) -> None:
        with translated():
            self._write(batch)

    def _write(self, batch: FileBatch) -> None:
        self._stage(batch)
        intent = batch.intent()
        if intent is not None:
            self._write_intent(intent)
        publish(
            self._directories,
            batch.number,
            states=batch.states,
            messages=batch.puts,
            removed=batch.removed,
            keys=batch.keys,
        )
        if batch.removed:
            self._note_last_id(batch.last_id)
        sync(self._directories)
        forget(self._directories, batch.removed)
        for message_id in batch.unstaged:
            self._directories.scratch.remove(files.env_name(message_id))
        if intent is not None:
            self._directories.meta.remove(intent_name(intent.number))

    def _stage(self, batch: FileBatch) -> None:
        """Step 1. Each thread writes its share; the syncs of all threads meet in the file system."""
        staged = [files.state_file(key, batch.number, records) for key, records in batch.states.items()]
        for put in batch.puts.values():
            if put.chunks is not None:
                staged.append(files.message_file(put.new, put.chunks))
        staged += [files.Staged(name, lambda: b"") for name in batch.keys]
        if batch.probe:
            probe(self._directories.scratch)
        for start in range(0, len(staged), IO_THREADS * MAX_SHARE):
            self._stage_part(staged[start : start + IO_THREADS * MAX_SHARE])

    def _stage_part(self, staged: Sequence[files.Staged]) -> None:
        scratch = self._directories.scratch
        if len(staged) <= 2:
            files.stage(scratch, staged)
            return
        shares = [staged[start::IO_THREADS] for start in range(min(IO_THREADS, len(staged)))]
        waiting = [self._pool.submit(files.stage, scratch, share) for share in shares[1:]]
        try:
            files.stage(scratch, shares[0])
        finally:
            errors = [future.exception() for future in waiting]
        for error in errors:
            if error is not None:
                raise error

    def _write_intent(self, intent: BatchIntent) -> None:
        """Step 2."""
        directories, name = self._directories, intent_name(intent.number)
        files.stage(directories.scratch, [files.Staged(name, lambda: _encode_intent(intent))])
        _rename(directories.scratch, name, directories.meta, name)
        directories.meta.sync()

    def _note_last_id(self, last_id: MessageId | None) -> None:
        """Notes the last id. As long as the youngest message is there, its file name tells the id."""
        if last_id is None or last_id == self._last_id:
            return
        meta = self._directories.meta
        with translated():
            try:
                _rename(meta, f"{self._last_id}{LAST_SUFFIX}", meta, last_id + LAST_SUFFIX)
            except FileNotFoundError:  # it is the first one, or an operator removed it
                os.close(os.open(last_id + LAST_SUFFIX, os.O_CREAT, 0o600, dir_fd=meta.descriptor))
        self._last_id = last_id


def probe(scratch: Directory) -> None:
    files.stage(scratch, [files.Staged(_PROBE, lambda: b"probe\n")])
    scratch.remove(_PROBE)


def publish(
    directories: Directories,
    number: int,
    *,
    states: Iterable[MessageId],
    messages: Iterable[MessageId],
    removed: Iterable[MessageId],
    keys: Iterable[str] = (),
    again: bool = False,
) -> None:
    """Step 3. `again`: what is not in scratch any more has been renamed already."""
    env, meta, scratch = directories.env, directories.meta, directories.scratch
    allowed = contextlib.suppress(FileNotFoundError) if again else contextlib.nullcontext()
    with translated():
        for message_id in states:
            with allowed:
                _rename(scratch, files.staged_meta(message_id, number), meta, files.meta_name(message_id))
        for name in keys:
            with allowed:
                _rename(scratch, name, meta, name)
        for message_id in messages:
            with allowed:
                _rename(scratch, files.env_name(message_id), env, files.env_name(message_id))
    for message_id in removed:
        env.remove(files.env_name(message_id))


def _rename(source: Directory, name: str, target: Directory, new_name: str) -> None:
    os.rename(name, new_name, src_dir_fd=source.descriptor, dst_dir_fd=target.descriptor)


def sync(directories: Directories) -> None:
    """Step 4."""
    directories.env.sync()
    if not directories.is_shared:
        directories.meta.sync()


def forget(directories: Directories, removed: Iterable[MessageId]) -> None:
    """Step 5, the states of removed messages. No caller waits until this is durable."""
    for message_id in removed:
        directories.meta.remove(files.meta_name(message_id))


# --- after a crash or an error


def publish_state(directories: Directories, message_id: MessageId) -> None:
    """A state that was recovered; it is staged under its own name."""
    name = files.meta_name(message_id)
    with translated():
        _rename(directories.scratch, name, directories.meta, name)


def intent_name(number: int) -> str:
    return f"{number}{INTENT_SUFFIX}"


def read_intent(directories: Directories, name: str) -> BatchIntent:
    """Raises StoreCorruptError: it was synced before it got its name, so the disk or a stranger spoilt it."""
    with translated():
        raw = files.read_file(directories.meta, name)
    try:
        return _decode_intent(raw)
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreCorruptError(f"{directories.meta.path / name} is unreadable: {error}") from error


def ids_of_intent(path: Path) -> set[str]:
    """The messages that it is about. Raises StoreCorruptError, OSError."""
    try:
        intent = _decode_intent(path.read_bytes())
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreCorruptError(f"it is unreadable: {error}") from error
    return {*intent.states, *intent.messages, *intent.removed}


def finish_intent(directories: Directories, intent: BatchIntent) -> None:
    """Do what is left to do of it, up to the states of what it removes."""
    publish(
        directories,
        intent.number,
        states=_ids(intent.states),
        messages=_ids(intent.messages),
        removed=_ids(intent.removed),
        keys=[name for name in intent.keys if disk_format.parse_key_name(name)],
        again=True,
    )


def _ids(names: Iterable[str]) -> list[MessageId]:
    return [MessageId(name) for name in names if is_message_id(name)]


def noted_last_ids(names: Iterable[str]) -> list[MessageId]:
    """The ids of `<id>.last` files, of which a crash may have left two."""
    stems = (name.removesuffix(LAST_SUFFIX) for name in names if name.endswith(LAST_SUFFIX))
    return sorted(_ids(stems))
