"""[spool]: which store keeps the queue, where, and how much space it leaves free."""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.credentials.secrets import is_public
from zonerelay.config.options.options import DAY, MB, choice, duration, optional_path, path, size
from zonerelay.config.problems import Report
from zonerelay.config.units import format_size

LOSS_WORDS = "I understand that acknowledged mail may be lost"


class Backend(enum.StrEnum):
    MEMORY = "memory"
    LEVELDB = "leveldb"
    DISK = "disk"
    REDIS = "redis"
    POSTGRES = "postgres"
    S3 = "s3"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolSettings:
    """[spool]"""

    backend: Backend = choice(Backend.LEVELDB)
    """leveldb keeps every acknowledged message through a crash or a power cut. disk does too, in files that
    people and tools can read, for more work per message (docs/disk-queue.md). redis and postgres keep it on a
    server that several relays can share (docs/redis.md, docs/postgres.md), s3 in a bucket (docs/s3.md);
    [redis], [postgres] and [s3] say where. memory loses everything when the relay stops: for tests and
    throw-away use.
    """
    path: Path = path(Path("/var/lib/zonerelay/spool"))
    """The spool's directory, for one relay alone (redis: only what lies beside it); the default is the
    systemd unit's state directory. A relative path starts at the directory the relay is started in.
    """
    env_directory: Path | None = optional_path()
    """With disk: where the messages lie (<id>.env). Absent: in path."""
    meta_directory: Path | None = optional_path()
    """With disk: where the states of their deliveries lie (<id>.meta); it may be the same directory. Absent:
    in path.
    """
    scratch_directory: Path | None = optional_path()
    """With disk: where files are written before they are renamed into those two, so it has to be on the same
    file system, and a directory of its own. Absent: "scratch" in path.
    """
    shelve: Path | None = optional_path()
    """With memory: a file of Python's shelve that the queue is also written to, so that it survives an
    orderly restart. It is not durable: a crash loses what was written last, and can damage all of it.
    """
    min_free_space: int = size(100 * MB, least=MB, optional=True)
    """With less free space than this on the spool's file system new mail is answered 452 4.3.1 and /readyz
    says no, so that what is queued can still be delivered. Half of it is kept back in a file (ballast) and
    given up when others fill the disk all the same. 0 turns both off. With leveldb less than four times
    write_buffer and 4 MB counts as that, for so much it needs to move its tables, and while there is more to
    move at once, as after a burst, that is kept free too. With redis it is the memory below the server's
    maxmemory, if that is set, and there is no ballast.
    """
    write_buffer: int = size(8 * MB, least=MB, most=256 * MB)
    """What LevelDB gathers in memory before it writes a table file. Larger buffers were not faster here and
    cost about four times their size in memory.
    """
    idempotency_window: float = duration(DAY, least=60.0, most=7 * DAY)
    """How long an idempotency key is remembered: so long the same key gets the first answer, and its message
    is not sent again. Only messages that have a key take space for it, some 200 octets.
    """


ONLY_WITH = {
    "env_directory": Backend.DISK,
    "meta_directory": Backend.DISK,
    "scratch_directory": Backend.DISK,
    "shelve": Backend.MEMORY,
}
LEVELDB_TABLES = 4
LEVELDB_BATCH = 4 * 1024 * 1024
"""A table of level 0 holds the write buffer and, at most, one batch more. Four of them, or more where much
comes at once, are written again before their space is free.
"""


def leveldb_room(spool: SpoolSettings) -> int:
    """Octets that LevelDB may need besides what it holds."""
    return LEVELDB_TABLES * (spool.write_buffer + LEVELDB_BATCH)


def space_guard(spool: SpoolSettings) -> int:
    """Octets below which no new mail is taken: with LevelDB never fewer than it needs. 0: no guard."""
    if spool.backend is not Backend.LEVELDB or not spool.min_free_space:
        return spool.min_free_space
    return max(spool.min_free_space, leveldb_room(spool))


def raised_guard(spool: SpoolSettings) -> str:
    """Returns a sentence about a bound above `min_free_space` at which new mail is refused, or ""."""
    guard = space_guard(spool)
    if guard == spool.min_free_space:
        return ""
    return (
        f"new mail is refused below {format_size(guard)} free: LevelDB needs that for a moment when it moves"
        f" tables (write_buffer), and min_free_space is {format_size(spool.min_free_space)}"
    )


def check_spool(spool: SpoolSettings, report: Report) -> None:
    if not report.sound("spool"):
        return
    for key, backend in ONLY_WITH.items():
        if getattr(spool, key) is not None and spool.backend is not backend:
            report.refuse(
                ("spool", key), f'goes with backend = "{backend}" alone: write that, or leave this out'
            )
    if spool.scratch_directory in _kept(spool):
        report.refuse(
            ("spool", "scratch_directory"), "needs a directory of its own: it is emptied at every start"
        )


def _kept(spool: SpoolSettings) -> tuple[object, object]:
    return (spool.env_directory or spool.path, spool.meta_directory or spool.path)


def spool_advice(spool: SpoolSettings) -> list[str]:
    found = []
    path = spool.path
    with contextlib.suppress(OSError):  # it is not there yet, and is made private
        if is_public(path):
            found.append(
                f"spool.path: every user of this machine can look into {path}: no file in it is readable for "
                "them, but chmod o-rwx it"
            )
    if spool.backend is Backend.MEMORY:
        if spool.shelve is None:
            found.append("spool.backend: memory: every queued message is lost when the relay stops")
        else:
            found.append(
                "spool.shelve: a shelf is not durable: a crash loses the queued messages written last, and "
                "can damage all of them"
            )
    if spool.min_free_space == 0:
        found.append("spool.min_free_space: 0: nothing is refused before the disk is full")
    if raised := raised_guard(spool):
        found.append(f"spool.min_free_space: {raised}")
    return found
