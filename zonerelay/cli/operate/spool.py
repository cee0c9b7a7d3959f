"""`zonerelay spool`: what an operator says of the store itself, with and without a running relay.

`acknowledge` ends the warning about lost mail. `accept-empty` makes the relay believe a store that has lost
the queue that was known; a relay that refuses the store looks at that decision every few seconds.
"""

from __future__ import annotations

from argparse import Namespace

from zonerelay.cli.relay import connect, load_settings
from zonerelay.cli.terminal import output
from zonerelay.cli.terminal.exits import OK, USAGE, CliError
from zonerelay.control.messages.answers import Acknowledged
from zonerelay.control.messages.requests import SpoolAcknowledge
from zonerelay.control.socket.errors import NotRunningError
from zonerelay.store.contract import StoreError
from zonerelay.store.offline import acknowledge_loss, forget_queue, place_of_queue


def acknowledge(arguments: Namespace) -> int:
    try:
        done = connect(arguments).ask(SpoolAcknowledge(loss=arguments.loss), Acknowledged)
    except NotRunningError:
        settings = load_settings(arguments.config)
        try:
            if not acknowledge_loss(settings.spool, arguments.loss):
                raise CliError(
                    f"no loss {arguments.loss} of the spool in {settings.spool.path} waits to be acknowledged"
                ) from None
        except (StoreError, OSError) as error:
            raise CliError(str(error)) from error
        done = Acknowledged(loss=arguments.loss)
    output.print_answer(done, f"{done.loss}: acknowledged", as_json=arguments.json)
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
