"""Stages single files of the disk queue in scratch, and reads messages, states and bodies back.

What is staged is synced before it is renamed into place (`batch`). All of this blocks and runs in
the store's threads. A message exists when its `.env` does: that file is renamed last and removed first,
so an `.meta` alone is what a crash left of a message that was never acknowledged or was finished, and an
`.env` alone is a whole message whose state is as it was at the beginning, and stands at its end.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageId, is_message_id
from zonerelay.store.contract import CHUNK_SIZE, MessageNotFoundError, StoreCorruptError, StoreError
from zonerelay.store.disk import format as disk_format
from zonerelay.store.disk.directories import Directories, Directory, translated
from zonerelay.store.disk.format import FOOT_SIZE, HEAD, StoredMessage

SYNC_OCTETS = 8 * 1024 * 1024
"""A large upload is synced each time so much has arrived, so that its end has little left to wait for."""
TAIL_GUESS = 8 * 1024
"""Octets read from a message's end at first: enough for most headers."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC


State = list[Delivery] | StoreCorruptError
"""What reading a message's state brought."""


class EncodedMessage(NamedTuple):
    """The encoded message and records that are written behind a new message's body."""

    id: MessageId
    message: bytes
    records: tuple[bytes, ...]


def env_name(message_id: MessageId) -> str:
    return message_id + ".env"


def meta_name(message_id: MessageId) -> str:
    return message_id + ".meta"


def staged_meta(message_id: MessageId, number: int) -> str:
    """Numbered by batch: a batch that is done again after a crash must not meet a later one's file."""
    return f"{message_id}.{number}.meta"


# --- staging


class Staged(NamedTuple):
    """A file to be staged; what is in it is put together where it is written."""

    name: str
    content: Callable[[], bytes]


def stage(scratch: Directory, staged: Iterable[Staged]) -> None:
    """Write files to scratch and sync them all."""
    with translated(), contextlib.ExitStack() as opened:
        descriptors: list[int] = []
        for name, content in staged:
            descriptor = os.open(name, _CREATE, 0o600, dir_fd=scratch.descriptor)
            opened.callback(os.close, descriptor)
            write_all(descriptor, content())
            # This begins to write it to the disk: the first sync then does most of the work of the others.
            with contextlib.suppress(OSError):  # a hint: not every file system takes it
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            descriptors.append(descriptor)
        for descriptor in descriptors:
            os.fdatasync(descriptor)


def message_file(new: EncodedMessage, chunks: Sequence[bytes]) -> Staged:
    """A message that arrived in one piece."""

    def content() -> bytes:
        tail = disk_format.join_tail(new.message, new.records, [zlib.crc32(chunk) for chunk in chunks])
        return b"".join((HEAD, *chunks, tail))

    return Staged(env_name(new.id), content)


def state_file(message_id: MessageId, number: int, records: Iterable[bytes]) -> Staged:
    return Staged(staged_meta(message_id, number), lambda: disk_format.join_meta(records))


def write_all(descriptor: int, data: bytes) -> None:
    written = os.write(descriptor, data)
    while written < len(data):
        written += os.write(descriptor, data[written:])


class Upload:
    """A large message that is arriving, in scratch. One job at a time, whatever thread it runs in."""

    def __init__(self, scratch: Directory, message_id: MessageId) -> None:
        self._scratch = scratch
        self._name = env_name(message_id)
        self._checksums: list[int] = []
        self._descriptor = -1
        self._unsynced = 0
        self._ended = False
        self._lock = threading.Lock()

    def append(self, chunks: Sequence[bytes]) -> None:
        with self._lock, translated():
            self._append(chunks)
            if self._unsynced >= SYNC_OCTETS:
                os.fdatasync(self._descriptor)
                self._unsynced = 0

    def _append(self, chunks: Sequence[bytes]) -> None:
        if self._ended:
            raise StoreError("the upload was given up")
        if self._descriptor < 0:
            self._descriptor = os.open(self._name, _CREATE, 0o600, dir_fd=self._scratch.descriptor)
            write_all(self._descriptor, HEAD)
        for chunk in chunks:
            write_all(self._descriptor, chunk)
            self._checksums.append(zlib.crc32(chunk))
            self._unsynced += len(chunk)

    def finish(self, new: EncodedMessage, chunks: Sequence[bytes]) -> None:
        """The last chunks and what stands behind the body; then it is synced."""
        with self._lock, translated():
            self._append(chunks)
            write_all(self._descriptor, disk_format.join_tail(new.message, new.records, self._checksums))
            os.fdatasync(self._descriptor)
            self._end()

    def discard(self) -> None:
        with self._lock:
            self._end()
            self._scratch.remove(self._name)

    def _end(self) -> None:
        self._ended = True
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


# --- reading


def read_file(directory: Directory, name: str) -> bytes:
    """Raises FileNotFoundError."""
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory.descriptor)
    try:
        return b"".join(iter(lambda: os.read(descriptor, 1 << 20), b""))
    finally:
        os.close(descriptor)


def read_states(directories: Directories, ids: Sequence[MessageId]) -> dict[MessageId, State]:
    """The open deliveries of these messages; those that do not exist are absent."""
    found: dict[MessageId, State] = {}
    for message_id in ids:
        try:
            deliveries = read_state(directories, message_id)
        except StoreCorruptError as error:
            found[message_id] = error
        else:
            if deliveries is not None:
                found[message_id] = deliveries
    return found


def read_state(directories: Directories, message_id: MessageId) -> list[Delivery] | None:
    """A message's open deliveries, `None` when there is no such message."""
    if not is_message_id(message_id):
        return None
    with translated():
        if not _exists(directories.env, env_name(message_id)):
            return None
        try:
            raw = read_file(directories.meta, meta_name(message_id))
        except FileNotFoundError:
            try:
                return read_message(directories, message_id).deliveries
            except MessageNotFoundError:
                return None
    return disk_format.decode_meta(message_id, raw)


def _exists(directory: Directory, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory.descriptor)
    except FileNotFoundError:
        return False
    return True


def open_body(directories: Directories, message_id: MessageId) -> int:
    """A descriptor to read from; a message that is removed meanwhile stays whole behind it."""
    if not is_message_id(message_id):
        raise MessageNotFoundError(f"no message {message_id}")
    with translated():
        try:
            return os.open(
                env_name(message_id), os.O_RDONLY | os.O_CLOEXEC, dir_fd=directories.env.descriptor
            )
        except FileNotFoundError:
            raise MessageNotFoundError(f"no message {message_id}") from None


def read_message(directories: Directories, message_id: MessageId) -> StoredMessage:
    descriptor = open_body(directories, message_id)
    try:
        return read_tail(descriptor, message_id)
    finally:
        os.close(descriptor)


def read_message_and_body(
    directories: Directories, message_id: MessageId
) -> tuple[StoredMessage, bytes | None]:
    """A message and, when it is one chunk, its body, which a delivery reads next."""
    descriptor = open_body(directories, message_id)
    try:
        stored = read_tail(descriptor, message_id)
        if stored.message.chunks != 1:
            return stored, None
        return stored, read_chunks(descriptor, stored, 0, 1)[0]
    finally:
        os.close(descriptor)


def read_tail(descriptor: int, message_id: MessageId) -> StoredMessage:
    with translated():
        size = os.fstat(descriptor).st_size
        start = max(size - TAIL_GUESS, 0)
        end = os.pread(descriptor, TAIL_GUESS, start)
        foot = disk_format.parse_foot(message_id, end, size)
        if foot.offset >= start:
            raw = end[foot.offset - start : -FOOT_SIZE]
        else:
            raw = os.pread(descriptor, foot.length, foot.offset)
        if os.pread(descriptor, len(HEAD), 0) != HEAD:
            raise StoreCorruptError(f"{message_id}.env does not begin as it should")
    return disk_format.decode_tail(message_id, foot, raw)


def read_chunks(descriptor: int, stored: StoredMessage, first: int, count: int) -> list[bytes]:
    """`count` chunks from number `first`, counted from 0; fewer at the end."""
    message, checksums = stored.message, stored.checksums
    found: list[bytes] = []
    for number in range(first, min(first + count, message.chunks)):
        offset = number * CHUNK_SIZE
        with translated():
            chunk = os.pread(descriptor, min(CHUNK_SIZE, message.size - offset), len(HEAD) + offset)
        if zlib.crc32(chunk) != checksums[number]:
            raise StoreCorruptError(
                f"message {message.id}: chunk {number + 1} of {message.chunks} is damaged"
            )
        found.append(chunk)
    return found
