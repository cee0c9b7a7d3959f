"""A second disk queue with the messages of the first as they were, made while a relay may write to it.

Its files are links, for no file of a queue changes once it has its name; on another file system they are
copied. Each message is as it was at one moment. What was acknowledged before `take_snapshot` was called is in
it, or has left and its report is in it: states are taken first, and then what was begun or came meanwhile.
A message that came meanwhile is taken without its state, as it was at the beginning.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from zonerelay.config.settings import SpoolSettings
from zonerelay.store.contract import StoreFullError
from zonerelay.store.disk import files
from zonerelay.store.disk.batch import INTENT_SUFFIX
from zonerelay.store.disk.check import Places, list_names
from zonerelay.store.spool_paths import disk_directories

_STAGED = re.compile(r"[0-9a-f]{16}\.(env|\d+\.meta)|[-\w]+\.once")


def take_snapshot(spool: SpoolSettings, into: Path) -> SpoolSettings:
    """The settings of the copy, in the directory `into`, which does not exist yet. Blocks.

    Raises StoreFullError, or OSError, and leaves nothing then.
    """
    source = Places(*disk_directories(spool))
    copy = replace(spool, path=into, env_directory=None, meta_directory=None, scratch_directory=None)
    try:
        _take(source, Places(*disk_directories(copy)))
    except BaseException:
        shutil.rmtree(into, ignore_errors=True)
        raise
    return copy


def _take(source: Places, into: Places) -> None:
    into.env.mkdir(mode=0o700)
    into.scratch.mkdir(mode=0o700)
    names = list_names(source)
    before = names.messages
    put = _Putting(into.env, sum(before.values()))
    for message_id in sorted(before):
        put.put(source.meta, into.meta, [files.meta_name(message_id)])
        put.put(source.env, into.env, [files.env_name(message_id)])
    # The report of a delivery that has just left may still be in scratch, by an intent.
    intents = [name for name in os.listdir(source.meta) if name.endswith(INTENT_SUFFIX)]  # noqa: PTH208 - names alone
    put.put(source.meta, into.meta, intents)
    if intents:
        staged = filter(_STAGED.fullmatch, os.listdir(source.scratch))  # noqa: PTH208 - names alone
        put.put(source.scratch, into.scratch, staged)
    later = list_names(source).messages.keys() - before.keys()
    put.put(source.env, into.env, map(files.env_name, sorted(later)))
    # Those that were there at the beginning, so that none is there without its message.
    put.put(source.meta, into.meta, names.keys)


class _Putting:
    """Links files, or copies them where links do not reach."""

    def __init__(self, into: Path, octets: int) -> None:
        self._into = into
        self._octets = octets
        self._copies = False

    def put(self, source: Path, into: Path, names: Iterable[str]) -> None:
        """Those that are still there. Raises OSError, StoreFullError."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._put(source / name, into / name)

    def _put(self, path: Path, target: Path) -> None:
        if not self._copies:
            try:
                os.link(path, target)
                return
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                    raise
            self._copies = True
            self._look_for_room()
        shutil.copyfile(path, target)

    def _look_for_room(self) -> None:
        free = shutil.disk_usage(self._into).free
        if self._octets > free:
            raise StoreFullError(
                f"{self._into.parent} needs {self._octets / 1e9:.2f} GB for a copy of the queue,"
                f" {free / 1e9:.2f} GB are free; name a directory on the queue's own file system, where links"
                " are enough"
            )
