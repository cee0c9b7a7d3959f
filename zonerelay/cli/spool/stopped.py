"""Opens the spool of a stopped relay for one command.

`stopped` refuses with status 2 while a relay answers at the control socket or holds the lock, and names its
process. It holds the lock, so that a supervisor waits; a relay with one worker waits for the lock of its
spool. `alongside` is for commands that may run next to a running relay. If they run as root, both functions
give every file that the command has created in the relay's directories to the directories' owner.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay.cli.spool import home_files
from zonerelay.cli.terminal.exits import USAGE, CliError, refused
from zonerelay.config.settings import Backend
from zonerelay.control.socket import control_socket_path
from zonerelay.model.clock import SystemClock
from zonerelay.operations.errors import ControlError
from zonerelay.process.setup import StartError, prepare_home
from zonerelay.process.sockets import ANSWER_TIMEOUT
from zonerelay.queue.orders.orders import OrdersError
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import StoreError
from zonerelay.store.open import open_store
from zonerelay.store.spool_paths import directories_of, spools_of
from zonerelay.supervisor import lock
from zonerelay.transfer.files import TransferError

if TYPE_CHECKING:
    from zonerelay.config.settings import Settings, SpoolSettings
    from zonerelay.store.contract import Store

KEPT = "Everything done so far is kept; run the command again to continue"


class RelayRunningError(CliError):
    """The command requires a stopped relay, but the relay is running as `process`."""

    def __init__(self, text: str, process: int) -> None:
        super().__init__(text, USAGE)
        self.process = process


@contextlib.contextmanager
def stopped(settings: Settings) -> Iterator[Path]:
    """Lock the spool of a stopped relay for the block, and yield the directory that contains the spool. Raise
    RelayRunningError while the relay runs, and CliError if the directory cannot be used.
    """
    if settings.spool.backend is Backend.MEMORY and settings.spool.shelve is None:
        raise CliError('backend = "memory" without shelve stores nothing while the relay is stopped', USAGE)
    with _private():
        held = _lock(settings)
        try:
            yield settings.spool.path.parent
        finally:
            _give_back(settings.spool)
            os.close(held)


@contextlib.contextmanager
def alongside(settings: Settings) -> Iterator[Path]:
    """Create the directory that contains the spool if necessary, and yield it; a relay may be running. Raise
    CliError if that fails.
    """
    with _private():
        with refused(StartError, status=USAGE):
            home = prepare_home(settings)
        try:
            yield home
        finally:
            _give_back(settings.spool)


@contextlib.contextmanager
def translated(consequence: str = KEPT) -> Iterator[None]:
    """Convert errors of the store, of transfers, of suspensions and of the control socket to CliError."""
    with (
        refused(StoreError, OSError, after=f". {consequence}"),
        refused(TransferError, OrdersError, ControlError, status=USAGE),
    ):
        yield


@contextlib.contextmanager
def _private() -> Iterator[None]:
    umask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(umask)


def _lock(settings: Settings) -> int:
    """Take the lock that a running relay holds, and return its file descriptor."""
    try:
        _refuse_running(settings)
        return lock.take(settings)
    except (StartError, ControlError) as error:
        raise CliError(f"{error}. This command requires the relay to be stopped", USAGE) from error
    except OSError as error:
        raise CliError(f"the spool in {settings.spool.path} cannot be used: {error}", USAGE) from error


def _refuse_running(settings: Settings) -> None:
    path = control_socket_path(settings)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(ANSWER_TIMEOUT)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:
            raise CliError(f"{path}: {error.strerror}; check whether the relay is running", USAGE) from error
        process, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    raise RelayRunningError(
        f"the relay is running as process {process} (it answers at {path}); stop it first, because it has "
        "exclusive use of the spool",
        process,
    )


def spools(spool: SpoolSettings) -> list[int]:
    """Return the numbers of the workers that have a spool. Raise CliError if there is none."""
    with refused(OSError, before=f"{spool.path}: ", status=USAGE):
        if directories_of(spool) and not spool.path.is_dir():
            raise CliError(f"there is no spool in {spool.path}")
        return spools_of(spool)


@contextlib.asynccontextmanager
async def opened(settings: Settings, worker: int = 0) -> AsyncIterator[Store]:
    """Open the store of one worker for the block. Raise CliError, with status 2 if it cannot be opened."""
    with refused(StoreError, status=USAGE):
        store = await open_store(settings, StoreContext(clock=SystemClock(), environment=os.environ), worker)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def all_opened(settings: Settings, workers: Iterable[int]) -> AsyncIterator[list[Store]]:
    """Open the stores of these workers for the block. Raise CliError as `opened` does."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(opened(settings, each)) for each in workers]


def _give_back(spool: SpoolSettings) -> None:
    home = spool.path.parent
    places = [spool.path, *directories_of(spool), *(home / name for name in home_files.DIRECTORIES)]
    places += (path for path in home.iterdir() if path.is_file() and not path.is_symlink())
    give_to_owner(spool, places)


def give_to_owner(spool: SpoolSettings, places: Iterable[Path]) -> None:
    """Change the owner of new files to the owner of the spool, because root may have created them. Raise
    OSError if that fails.
    """
    if os.geteuid() != 0:
        return
    found = [each.stat() for each in (spool.path, spool.path.parent) if each.exists()]
    owner = next((each for each in found if each.st_uid), None)
    if owner is None:
        return
    given = False
    for place in {each for each in places if each.exists()}:
        for path in (place, *place.rglob("*")):
            if path.lstat().st_uid == 0:
                os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
                given = True
    if given:
        os.sync()  # an owner is lost in a power failure unless it is synced, like a name
