"""Handing out deliveries from the disk queue: the index says which, their files say in what state.

A claim whose file says something else than the index is given up, and the index is put right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from zonerelay.model.message_id import MessageId
from zonerelay.store.common.claims.index import Index
from zonerelay.store.common.claims.index_claims import IndexClaims
from zonerelay.store.disk.keeper import DiskKeeper
from zonerelay.store.disk.states import MessageState, States


class DiskClaims(IndexClaims[MessageState]):
    """The claims of all zones."""

    def __init__(self, keeper: DiskKeeper, index: Index, states: States) -> None:
        super().__init__(lambda: index, keeper.check_usable)
        self._states = states

    async def _hold(self, ids: Collection[MessageId]) -> dict[MessageId, MessageState]:
        return await self._states.hold(ids)

    def _drop(self, held: Iterable[MessageState]) -> None:
        self._states.drop(held)
