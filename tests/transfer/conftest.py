"""What tests of other systems' queues share."""

from collections.abc import Iterator

import pytest

from tests.support.ports import free_port
from tests.support.redis_server import RedisServer


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as started:
        yield started
