"""`zonerelay spool`: the spool itself, of a running relay and of one that is stopped."""

from __future__ import annotations

from argparse import Namespace

from zonerelay.cli.relay import client_of, load_settings
from zonerelay.cli.terminal import output
from zonerelay.cli.terminal.exits import OK, CliError
from zonerelay.config.settings import SpoolSettings
from zonerelay.control.messages.answers import Acknowledged
from zonerelay.control.messages.requests import SpoolAcknowledge
from zonerelay.control.socket.errors import NotRunningError
from zonerelay.store.contract import StoreError
from zonerelay.store.leveldb.directory import lock_directory
from zonerelay.store.leveldb.losses import Losses
from zonerelay.store.spool_paths import is_shared, spool_of, spools_beyond


def acknowledge(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    try:
        done = client_of(settings).ask(SpoolAcknowledge(loss=arguments.loss), Acknowledged)
    except NotRunningError:
        _acknowledge_in(settings.spool, arguments.loss)
        done = Acknowledged(loss=arguments.loss)
    if arguments.json:
        output.print_line(done)
    else:
        print(f"{done.loss}: acknowledged")
    return OK


def _acknowledge_in(spool: SpoolSettings, loss: str) -> None:
    """Without a relay that keeps the spool. Raises CliError."""
    try:
        for worker in (0, *(() if is_shared(spool) else spools_beyond(spool, 1))):
            path = spool_of(spool, worker).path
            if not path.is_dir():
                continue
            lock = lock_directory(path)
            try:
                losses = Losses(path)
                losses.refresh()
                if losses.acknowledge(loss):
                    return
            finally:
                lock.close()
    except (StoreError, OSError) as error:
        raise CliError(str(error)) from error
    raise CliError(f"no loss {loss} of the spool in {spool.path} waits to be acknowledged")
