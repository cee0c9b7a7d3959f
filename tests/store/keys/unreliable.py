"""An engine whose answers are lost."""

from collections.abc import Callable

from zonerelay.store.contract import StoreError
from zonerelay.store.keys.port import Engine, Keeper, PartitionState, PeerPartition, WriteBatch


class Unreliable:
    """`lose` is asked about each batch: "before" (it is not carried out), "after" (it is, without an answer),
    "late" (it is kept in `held`, as a proxy would), or "".

    `is_away`: nothing is answered at all.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.lose: Callable[[WriteBatch], str] = lambda batch: ""
        self.held: list[WriteBatch] = []
        self.applied: list[WriteBatch] = []
        self.is_away = False

    @property
    def lease(self) -> float:
        return self._engine.lease

    def keeper(self, node: int) -> Keeper:
        return UnreliableKeeper(self, self._engine.keeper(node))

    async def peers(self) -> list[PeerPartition]:
        return await self._engine.peers()

    async def close(self) -> None:
        await self._engine.close()


class UnreliableKeeper:
    def __init__(self, owner: Unreliable, keeper: Keeper) -> None:
        self._owner = owner
        self._keeper = keeper
        self.get, self.page, self.last_key = keeper.get, keeper.page, keeper.last_key
        self.leave, self.close, self.room, self.renew = keeper.leave, keeper.close, keeper.room, keeper.renew

    async def look(self) -> PartitionState | None:
        self._check()
        return await self._keeper.look()

    async def enter(self, writer: str, *, mark: str) -> PartitionState:
        self._check()
        return await self._keeper.enter(writer, mark=mark)

    async def apply(self, batch: WriteBatch) -> None:
        owner = self._owner
        self._check()
        what = owner.lose(batch)
        if what in ("", "after"):
            await self._keeper.apply(batch)
            owner.applied.append(batch)
        if what == "late":
            owner.held.append(batch)
        if what:
            raise StoreError(f"lost {what}")

    async def land(self) -> None:
        """What was held arrives now."""
        for batch in self._owner.held:
            await self._keeper.apply(batch)

    def _check(self) -> None:
        if self._owner.is_away:
            raise StoreError("away")
