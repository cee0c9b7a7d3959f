"""`zonerelay spool is-empty`: proves that the spool of a stopped relay may be removed.

It prints the directories that may go, and exits 0 then. Otherwise it exits 1 and says what is left, or 2 when
that cannot be known. Empty spools of further workers are removed, as by a relay with fewer workers.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace

from zonerelay.cli.relay import load_settings
from zonerelay.cli.spool.stopped import opened, spools, stopped
from zonerelay.cli.terminal.exits import OK, CliError
from zonerelay.config.settings import Backend, Settings
from zonerelay.store.contract import StoreError
from zonerelay.store.spool_paths import directories_of, remove_spool, spool_of
from zonerelay.worker.drain_spool import until_empty

PROOF_TIMEOUT = 10.0
"""Seconds in which what a crash has left half done is swept."""


def is_empty(arguments: Namespace) -> int:
    """Raises CliError with what is left."""
    settings = load_settings(arguments.config)
    spool = settings.spool
    if spool.backend not in (Backend.LEVELDB, Backend.DISK):
        raise CliError(
            f'backend = "{spool.backend.value}": only a spool of leveldb or disk can be proved empty'
        )
    found = [path for path in directories_of(spool) if path.is_dir()]
    if spool.path in found:
        with stopped(settings):
            for worker in reversed(spools(spool)):
                if left := asyncio.run(_left_in(settings, worker)):
                    raise CliError(f"not empty: {left}")
                if worker:
                    remove_spool(spool, worker)
    for path in found:
        print(path)
    return OK


async def _left_in(settings: Settings, worker: int) -> str:
    """In words; "" is a proof."""
    async with opened(settings, worker) as store:
        told = ["it could not be read in time"]
        try:
            if zones := await store.zones():
                path = spool_of(settings.spool, worker).path
                return f"mail waits in the zones {', '.join(sorted(zones))} of {path}"
            await asyncio.wait_for(until_empty(store, told.append), PROOF_TIMEOUT)
        except TimeoutError:
            return told[-1] or told[0]
        except StoreError as error:
            return str(error)
        return ""
