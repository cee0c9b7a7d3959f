"""`zonerelay spool`: what an operator says of the store itself, with and without a running relay.

`acknowledge` ends the warning about lost mail. `accept-empty` makes the relay believe a store that has lost
the queue that was known; a relay that refuses the store looks at that decision every few seconds. `is-empty`
proves that the spool of a stopped relay may be removed.
"""

from __future__ import annotations

import asyncio
import os
import pwd
from argparse import Namespace

from zonerelay.cli.relay import client_of, load_settings
from zonerelay.cli.terminal import output
from zonerelay.cli.terminal.exits import OK, USAGE, CliError
from zonerelay.config.settings import Backend, SpoolSettings
from zonerelay.control.messages.answers import Acknowledged
from zonerelay.control.messages.requests import SpoolAcknowledge
from zonerelay.control.socket.errors import NotRunningError
from zonerelay.model.clock import SystemClock
from zonerelay.store.contract import StoreError
from zonerelay.store.offline import acknowledge_loss, forget_queue, place_of_queue
from zonerelay.store.open import open_store
from zonerelay.store.spool_paths import directories_of, remove_spool, spool_of, spools_beyond
from zonerelay.store.surroundings import Surroundings
from zonerelay.worker.drain_spool import until_empty

PROOF_TIMEOUT = 10.0
"""Seconds in which what a crash has left half done is swept."""


def acknowledge(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    try:
        done = client_of(settings).ask(SpoolAcknowledge(loss=arguments.loss), Acknowledged)
    except NotRunningError:
        try:
            if not acknowledge_loss(settings.spool, arguments.loss):
                raise CliError(
                    f"no loss {arguments.loss} of the spool in {settings.spool.path} waits to be acknowledged"
                ) from None
        except (StoreError, OSError) as error:
            raise CliError(str(error)) from error
        done = Acknowledged(loss=arguments.loss)
    if arguments.json:
        output.print_line(done)
    else:
        print(f"{done.loss}: acknowledged")
    return OK


def accept_empty(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    spool = settings.spool
    place = place_of_queue(settings)
    if not place:
        raise CliError(
            f'backend = "{spool.backend.value}" keeps its queue in {spool.path}, which is believed as it is:'
            " there is nothing to accept",
            USAGE,
        )
    try:
        forgotten = forget_queue(settings)
    except (StoreError, OSError) as error:
        raise CliError(str(error)) from error
    if not forgotten:
        raise CliError(f"this machine knows no queue in {place}: the store is believed as it is already")
    print(
        f"The queue {forgotten!r} in {place} is forgotten here: the relay believes the store as it is, at its"
        " next start, or within seconds if it is running and refuses it. Do the same on each machine that"
        " shares the store."
    )
    return OK


def is_empty(arguments: Namespace) -> int:
    """Prints the directories of the spool when they hold nothing that a removal would lose. Empty spools of
    further workers are removed, as by a relay with fewer workers. Raises CliError with what is left.
    """
    spool = load_settings(arguments.config).spool
    if spool.backend not in (Backend.LEVELDB, Backend.DISK):
        raise CliError(
            f'backend = "{spool.backend.value}": only a spool of leveldb or disk can be proved empty'
        )
    found = [path for path in directories_of(spool) if path.is_dir()]
    for path in found:
        if os.geteuid() == 0 and (owner := path.stat().st_uid) != 0:
            user = pwd.getpwuid(owner).pw_name
            raise CliError(f"{path} is {user}'s: runuser -u {user} -- zonerelay spool is-empty", USAGE)
    try:
        for worker in (*reversed(spools_beyond(spool, 1)), 0) if found else ():
            if left := asyncio.run(_left_in(spool_of(spool, worker))):
                raise CliError(f"not empty: {left}")
            if worker:
                remove_spool(spool, worker)
    except (StoreError, OSError) as error:
        raise CliError(str(error)) from error
    for path in found:
        print(path)
    return OK


async def _left_in(spool: SpoolSettings) -> str:
    """In words; "" is a proof. Raises StoreError, also while a relay has the spool."""
    around = Surroundings(SystemClock(), on_health=lambda _: None, observe_commit=lambda _: None)
    store = await open_store(spool, around)
    try:
        if zones := await store.zones():
            return f"mail waits in the zones {', '.join(sorted(zones))} of {spool.path}"
        told = ["it could not be read in time"]
        await asyncio.wait_for(until_empty(store, told.append), PROOF_TIMEOUT)
    except TimeoutError:
        return told[-1] or told[0]
    else:
        return ""
    finally:
        await store.close()
