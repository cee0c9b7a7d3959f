"""Where each engine keeps its keys in a test, and what a test does to them from outside."""

from __future__ import annotations

import abc
import copy
import shutil
from pathlib import Path

from zonerelay.model.clock import SystemClock
from zonerelay.store.keys.leveldb import LevelDbEngine
from zonerelay.store.keys.memory import MemoryEngine
from zonerelay.store.keys.port import Engine

LEASE = 1.0


class Place(abc.ABC):
    """One store. Each `engine` is another process's."""

    name = ""
    is_shared = True
    """Several nodes have a partition each."""
    is_durable = True
    """A process of its own finds it: `words` are its arguments."""
    words: tuple[str, ...] = ()
    reserve = 0
    """Bytes that are kept back for a full disk, where an engine can."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @abc.abstractmethod
    def engine(self) -> Engine: ...

    @abc.abstractmethod
    def save(self) -> object:
        """A copy of everything, while no partition is open."""

    @abc.abstractmethod
    def restore(self, saved: object) -> None:
        """Bring the copy back; None empties the store."""

    def close(self) -> None:  # noqa: B027 - most have nothing to remove
        """Remove it."""


class MemoryPlace(Place):
    name = "memory"
    is_durable = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._engine = MemoryEngine(SystemClock(), lease=LEASE)

    def engine(self) -> Engine:
        return self._engine

    def save(self) -> object:
        return self._engine.mark, copy.deepcopy(self._engine.partitions)

    def restore(self, saved: object) -> None:
        self._engine.mark, self._engine.partitions = copy.deepcopy(saved) if saved else ("", {})  # type: ignore[misc]


class LevelDbPlace(Place):
    name = "leveldb"
    is_shared = False

    def engine(self) -> Engine:
        return LevelDbEngine(self.directory / "spool", write_buffer=256 * 1024, reserve=self.reserve)

    def save(self) -> object:
        return copy_of(self.directory / "spool")

    def restore(self, saved: object) -> None:
        bring_back(self.directory / "spool", saved)


def copy_of(directory: Path) -> Path:
    saved = directory.with_name("saved")
    shutil.rmtree(saved, ignore_errors=True)
    return shutil.copytree(directory, saved)


def bring_back(directory: Path, saved: object) -> None:
    shutil.rmtree(directory)
    if saved:
        assert isinstance(saved, Path)
        shutil.copytree(saved, directory)


PLACES: dict[str, type[Place]] = {place.name: place for place in (MemoryPlace, LevelDbPlace)}
