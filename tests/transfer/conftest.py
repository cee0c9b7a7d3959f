"""A receiver of mail for the tests of transfers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.sink import Sink


@pytest.fixture
async def sink() -> AsyncIterator[Sink]:
    sink = Sink()
    await sink.start()
    yield sink
    await sink.close()
