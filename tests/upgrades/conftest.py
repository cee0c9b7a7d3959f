"""A sink that takes everything, and an outbox of a test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.outbox import OutboxBed
from tests.support.sink import Sink


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[OutboxBed]:
    bed = OutboxBed(tmp_path)
    yield bed
    bed.drop()


@pytest.fixture
async def sink() -> AsyncIterator[Sink]:
    sink = Sink()
    await sink.start()
    yield sink
    await sink.close()
