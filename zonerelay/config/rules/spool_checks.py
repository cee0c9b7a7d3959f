"""[spool]: what belongs to which backend."""

from __future__ import annotations

from zonerelay.config.options.problems import Report
from zonerelay.config.options.units import format_size
from zonerelay.config.settings import Backend, Settings, SpoolSettings

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
    """What `min_free_space` does not say of when new mail is refused, or ""."""
    guard = space_guard(spool)
    if guard == spool.min_free_space:
        return ""
    return (
        f"new mail is refused below {format_size(guard)} free: LevelDB needs that for a moment when it moves"
        f" tables (write_buffer), and min_free_space is {format_size(spool.min_free_space)}"
    )


def check_spool(settings: Settings, report: Report) -> None:
    spool = settings.spool
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
