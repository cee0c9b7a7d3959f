"""A partition on a server whose address may lead to a former primary."""

import pytest

from zonerelay.store.keys.port import OlderStateError, PartitionState, Position
from zonerelay.store.keys.server import KeptConnection, ServerKeys


class FakeConnection:
    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.is_over = False

    async def close(self) -> None:
        self.is_over = True


class FakeKeys(ServerKeys[FakeConnection]):
    async def _look(self, connection: FakeConnection) -> PartitionState:
        return PartitionState("writer", epoch=1, last=Position(1, connection.batch))

    async def _check(self, connection: FakeConnection) -> None:
        """Every server is suitable."""

    async def _set_lease(self, connection: FakeConnection, *, renews: bool) -> None:
        self.renewed_on = connection


async def test_a_connection_with_an_older_state_is_replaced() -> None:
    former, primary = FakeConnection(4), FakeConnection(5)
    servers = [former, primary]

    async def connect() -> FakeConnection:
        return servers.pop(0)

    keys = FakeKeys(0, KeptConnection(connect), KeptConnection(connect))
    keys._entered(PartitionState("writer", epoch=1, last=Position(1, 5)))
    with pytest.raises(OlderStateError):
        await keys.renew()
    assert former.is_over
    await keys.renew()
    assert keys.renewed_on is primary
