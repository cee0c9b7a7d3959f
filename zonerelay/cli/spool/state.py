"""`spool acknowledge`, `accept-empty` and `is-empty`: operators' decisions about a spool, and a check whether
it is empty.

`acknowledge` ends the warning about lost mail. `accept-empty` makes the relay accept a store that has lost
the known queue; a relay that refuses the store checks for this decision every few seconds. `is-empty` prints
the directories of a stopped relay that may be removed, and then exits with 0. Otherwise it prints the
remaining contents and exits with 1, or with 2 if they cannot be determined. Empty spools of surplus workers
are removed, as by a relay with fewer workers.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace

from zonerelay.cli.arguments import request_of
from zonerelay.cli.relay import connect, load_settings
from zonerelay.cli.spool.stopped import opened, spools, stopped
from zonerelay.cli.terminal import output
from zonerelay.cli.terminal.exits import OK, USAGE, CliError, refused
from zonerelay.config.settings import Backend, Settings
from zonerelay.model.queue_name import QueueKind
from zonerelay.operations.answers import LossDismissal
from zonerelay.operations.errors import NotRunningError
from zonerelay.operations.requests import SpoolAcknowledge
from zonerelay.store.contract import StoreError
from zonerelay.store.offline import acknowledge_loss, forget_queue
from zonerelay.store.open import place_of_queue
from zonerelay.store.spool_paths import directories_of, remove_spool, spool_of
from zonerelay.worker.worker import IN_BIN, until_empty

PROOF_TIMEOUT = 10.0
"""Seconds in which what a crash has left half done is swept."""


def acknowledge(arguments: Namespace) -> int:
    try:
        done = connect(arguments).ask(request_of(arguments, SpoolAcknowledge), LossDismissal)
    except NotRunningError:
        settings = load_settings(arguments.config)
        with refused(StoreError, OSError):
            if not acknowledge_loss(settings.spool, arguments.loss):
                raise CliError(
                    f"the spool in {settings.spool.path} has no unacknowledged loss {arguments.loss}"
                ) from None
        done = LossDismissal(loss=arguments.loss)
    output.print_answer(done, f"{done.loss}: acknowledged", as_json=arguments.json)
    return OK


def accept_empty(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    spool = settings.spool
    place = place_of_queue(settings)
    if not place:
        raise CliError(
            f'backend = "{spool.backend.value}" stores its queue in {spool.path} and does not compare it '
            "with an earlier state, so there is nothing to accept",
            USAGE,
        )
    with refused(StoreError, OSError):
        forgotten = forget_queue(settings)
    if not forgotten:
        raise CliError(
            f"this machine has no recorded state of the queue in {place}: the store is already accepted as "
            "it is"
        )
    print(
        f"The queue {forgotten!r} in {place} is forgotten here: the relay believes the store as it is, at its"
        " next start. Do the same on each machine that"
        " shares the store."
    )
    return OK


def is_empty(arguments: Namespace) -> int:
    """Print the directories of the spools if they are empty. Raise CliError with what is left in them."""
    settings = load_settings(arguments.config)
    spool = settings.spool
    if spool.backend not in (Backend.LEVELDB, Backend.DISK):
        raise CliError(
            f'backend = "{spool.backend.value}": only leveldb and disk spools can be checked for emptiness'
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
    """Return a description of the mail in a worker's spool, or "" if it is empty."""
    async with opened(settings, worker) as store:
        reasons = ["reading it timed out"]
        try:
            if queues := await store.queues():
                path = spool_of(settings.spool, worker).path
                if zones := sorted(str(each) for each in queues if each.kind is not QueueKind.BIN):
                    return f"mail is queued in the zones {', '.join(zones)} of {path}"
                return f"{path}: {IN_BIN} (`zonerelay queue drop --purge --state dropped` destroys it)"
            await asyncio.wait_for(until_empty(store, reasons.append), PROOF_TIMEOUT)
        except TimeoutError:
            return reasons[-1] or reasons[0]
        except StoreError as error:
            return str(error)
        return ""
