"""A store per test, for every backend, and one that can be closed and opened again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.store.spools import Spool
from zonerelay.config.models import Backend
from zonerelay.store.base import Store


@pytest.fixture(params=list(Backend), ids=lambda backend: backend.value)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """The contract: what is tested with this fixture holds for every backend."""
    async with Spool(tmp_path / "spool", backend=request.param) as spool:
        yield spool.store


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    """A LevelDB spool."""
    async with Spool(tmp_path / "spool") as opened:
        yield opened
