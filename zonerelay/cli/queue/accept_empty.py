"""`spool accept-empty`: believe the configured store as it is, although it lost the queue that was known.

Works with and without a running relay: while that refuses the store, it looks at the file every few seconds.
"""

from __future__ import annotations

from argparse import Namespace

from zonerelay.cli.relay import load_settings
from zonerelay.cli.terminal.exits import OK, USAGE, CliError
from zonerelay.store.common.queue_mark import QueueMark, place_of
from zonerelay.store.contract import StoreError


def accept_empty(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    spool = settings.spool
    place = place_of(spool.backend, redis=settings.redis, postgres=settings.postgres, s3=settings.s3)
    if not place:
        raise CliError(
            f'backend = "{spool.backend.value}" keeps its queue in {spool.path}, which is believed as it is:'
            " there is nothing to accept",
            USAGE,
        )
    try:
        forgotten = QueueMark(spool.path, place).forget()
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
