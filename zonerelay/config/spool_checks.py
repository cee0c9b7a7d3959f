"""[spool]: what belongs to which backend."""

from __future__ import annotations

from zonerelay.config.models import Backend, Settings, SpoolSettings
from zonerelay.config.problems import Report

ONLY_WITH = {
    "env_directory": Backend.DISK,
    "meta_directory": Backend.DISK,
    "scratch_directory": Backend.DISK,
    "shelve": Backend.MEMORY,
}


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
