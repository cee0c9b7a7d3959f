"""Checks and repairs the queue of any engine for operators' commands, without joining it as a node.

An engine takes part by implementing `Engine`. A check only reads and works while relays are running. A repair
becomes the writer of each partition in turn, and is refused while a relay uses the queue.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from zonerelay.model.clock import Clock
from zonerelay.store.check import Findings, RepairResult, Salvage, SpoolContents, Tell
from zonerelay.store.contract import StoreCorruptError, StoreError
from zonerelay.store.keys.check import compare, mend
from zonerelay.store.keys.partition import open_partition
from zonerelay.store.keys.port import Engine, NodeTakenError
from zonerelay.store.keys.repair import RecordRepair

_LOOKS = 10
_WRITER = "spool repair"
"""The writer name of every repair. So a repair does not wait for the lease of an earlier one that was
killed.
"""


async def nodes_of(engine: Engine) -> list[int]:
    return [each.node for each in await engine.peers()] or [0]


async def check_engine(engine: Engine, findings: Findings, tell: Tell) -> SpoolContents:
    """Check every partition. Raises StoreError."""
    found = [SpoolContents()]
    for node in await nodes_of(engine):
        keeper = engine.keeper(node)
        try:
            if await keeper.look() is not None:
                found.append(await compare(keeper, findings, tell))
        finally:
            await keeper.close()
    return SpoolContents(*map(sum, zip(*found, strict=True)))


async def repair_engine(
    engine: Engine,
    salvage: Salvage,
    tell: Tell,
    *,
    kept: Path,
    carry_out: bool,
    clock: Clock,
    patience: float = 0.0,
) -> RepairResult:
    """Repair every partition. Without `carry_out`, return what a repair would do. `kept` is the file of old
    records, and `patience` is that of `living`.

    Raises StoreError with a message, also while relays use the queue, and OSError.
    """
    if alive := await living(engine, patience, besides=_WRITER):
        raise StoreError(
            f"the queue is in use by relays (node {', '.join(map(str, alive))}); stop them on all "
            "machines. Nothing was changed"
        )
    repair = RecordRepair(salvage, kept, carry_out=carry_out)
    deliveries = 0
    try:
        for node in await nodes_of(engine):
            keeper = engine.keeper(node)
            try:
                if await keeper.look() is None:
                    continue  # no relay has been started here yet
                if not carry_out:
                    deliveries += (await mend(keeper, repair, tell, None)).deliveries
                    continue
            finally:
                await keeper.close()
            try:
                partition = await open_partition(engine, node, token=_WRITER, clock=clock)
            except NodeTakenError as error:
                raise StoreError(f"the queue is in use by relays: {error}. Nothing was changed") from error
            try:
                deliveries += (await mend(partition, repair, tell, partition.write)).deliveries
            finally:
                await partition.close()
    except StoreCorruptError as error:
        raise StoreError(
            f"{error}: the damage is in the storage below the queue, whose administrator must repair it "
            "first. Everything repaired or salvaged so far is kept"
        ) from error
    finally:
        repair.close()
    return repair.repaired(deliveries)


async def living(engine: Engine, patience: float = 0.0, *, besides: str = "") -> list[int]:
    """Return the nodes whose writers have a valid lease. A node that was killed counts until its lease ends.
    `patience` is the time, in seconds, that an engine without a clock needs to see that a lease is not
    renewed. A writer with the name `besides` does not count.
    """
    alive: list[int] = []
    for _ in range(_LOOKS):
        held = [each for each in await engine.peers() if not each.is_left and not each.is_over]
        alive = [each.node for each in held if not besides or each.writer != besides]
        if not alive or not patience:
            break
        await asyncio.sleep(patience / _LOOKS)
    return alive
