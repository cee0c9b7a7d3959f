"""A store per test, for every backend, and one that can be closed and opened again."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.store.spools import Spool
from zonerelay.config.settings import Backend
from zonerelay.store.contract import Store

VARIANTS: dict[str, tuple[Backend, tuple[str, ...]]] = {
    **{backend.value: (backend, ()) for backend in Backend},
    "memory-shelve": (Backend.MEMORY, ("shelve",)),
    "disk-apart": (Backend.DISK, ("env_directory", "meta_directory", "scratch_directory")),
}
"""Every backend, and what else changes the way it works."""


@pytest.fixture(params=VARIANTS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """The contract: what is tested with this fixture holds for every backend."""
    backend, paths = VARIANTS[request.param]
    places = {name: tmp_path / name for name in paths}
    async with Spool(tmp_path / "spool", backend=backend, places=places) as spool:
        yield spool.store


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths are the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    """A LevelDB spool."""
    async with Spool(tmp_path / "spool") as opened:
        yield opened
