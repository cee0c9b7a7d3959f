"""Prepares every process of the relay: system limits, memory, the log, and the key for pseudonyms in the
log.
"""

import ctypes
import json
import os
import resource
import secrets
import signal
import socket
import stat
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from zonerelay import durable
from zonerelay.config.settings import HistoryAddresses, LogFormat, Settings
from zonerelay.model.clock import Clock
from zonerelay.process.sockets import InheritedSockets
from zonerelay.telemetry.logs.logs import LogWriter, configure
from zonerelay.telemetry.logs.redact import KEY_SIZE, RedactKeyError, Redactor, load_or_create_key

# The identity of a worker in its relay: its number, and the sockets that its starter hands over to it.
#
# A relay with one worker serves HTTP itself and has the control socket that commands know. With several
# workers the supervisor does both for all of them, and hears over `channel` (inherited, one packet for each
# message of `systemd.Notifier`) that the worker is alive.

CHANNEL = "ZONERELAY_CHANNEL"
SOCKETS = "ZONERELAY_SOCKETS"
LIMITS = "ZONERELAY_LIMITS"
STARTED_WITH = "ZONERELAY_STARTED_WITH"
"""Names in the environment: the channel's descriptor, listening sockets by address (JSON), the limits'
socket, the configuration that the supervisor was started with.
"""


class Identity(msgspec.Struct, frozen=True):
    """The index of a worker process, and what it has received from its supervisor or from systemd. With
    `drains_spool`, the worker listens nowhere, empties its spool and finally removes it. `channel` leads to
    the supervisor. `limits` is the socket of the supervisor's limits, or `None` if this process has its
    limits to itself.
    """

    index: int = 0
    supervised: bool = False
    drains_spool: bool = False
    inherited: InheritedSockets = msgspec.field(default_factory=InheritedSockets)
    limits: Path | None = None
    channel: socket.socket | None = None


def identity_of(index: int, *, drains_spool: bool, environment: Mapping[str, str]) -> Identity:
    """Return the identity of a worker as described by its environment variables. Raise ValueError if it is
    not valid.
    """
    number = environment.get(CHANNEL)
    if number is None:
        inherited = InheritedSockets.of_systemd(environment, os.getpid())
        return Identity(index, drains_spool=drains_spool, inherited=inherited)
    given: dict[str, list[list[int]]] = json.loads(environment.get(SOCKETS, "{}"))
    limits = environment.get(LIMITS)
    channel = socket.socket(fileno=int(number))
    channel.setblocking(False)
    os.set_inheritable(channel.fileno(), False)
    return Identity(
        index,
        supervised=True,
        drains_spool=drains_spool,
        inherited=InheritedSockets.of_supervisor(given),
        limits=None if limits is None else Path(limits),
        channel=channel,
    )


REDACT_KEY = "redact.key"

# A thread that waits for the interpreter asks for it after this long. The default of 5 ms lets the event
# loop keep the store's writer waiting between two system calls, which shows in every commit.
SWITCH_INTERVAL = 0.0005

# glibc mallopt(3): by default an allocation of 128 KiB or more, as a full read from a socket is, comes from
# mmap, and each use of it begins with page faults: twice the CPU per byte of a large message. Two arenas:
# only the event loop allocates much, and an arena per thread of the store is unused memory.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGE = 4 * 1024 * 1024


class StartError(Exception):
    """The relay cannot start. The message tells the operator what to do."""


def prepare_home(settings: Settings) -> Path:
    """Create the parent directory of the spool, which also contains the control socket and the pseudonym key,
    and return it. Raise StartError if that fails.
    """
    home = settings.spool.path.parent
    try:
        durable.make_directory(home)
    except OSError as error:
        raise StartError(
            f"cannot create {home}, the parent directory of [spool] path: {error.strerror}; create it for "
            "this user, or set [spool] path to another directory"
        ) from error
    return home


def prepare_process(settings: Settings) -> None:
    """Prepare a process that runs the relay: its signals, permissions, limits and memory. The home directory
    is prepared as in `prepare_home`.
    """
    # A SIGHUP would terminate a process that is still starting. Workers inherit this.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    # Other users cannot read files that this process creates, whatever mode LevelDB sets. The permissions of
    # the group follow the umask with which the process was started.
    os.umask(os.umask(0o077) | stat.S_IRWXO)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each connection uses a descriptor, and so does every open table file of the spool.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    prepare_home(settings)


def allow_reload() -> None:
    """Allow SIGHUP, which `prepare_process` has blocked, and handle a pending one."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def tune_for_mail() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # not glibc: there is nothing to tune
    mallopt(M_MMAP_THRESHOLD, LARGE)
    mallopt(M_TRIM_THRESHOLD, 2 * LARGE)
    mallopt(M_ARENA_MAX, 2)


def open_log(settings: Settings, clock: Clock, worker: int | None = None) -> tuple[LogWriter, Redactor]:
    """Return the log and its redactor. At a terminal, the log is text with plain addresses."""
    is_terminal = sys.stderr.isatty()
    hides = settings.log.redact and not is_terminal
    redactor = _with_key(settings) if hides else Redactor(b"", enabled=False)
    form = LogFormat.TEXT if is_terminal else settings.log.format
    return configure(form, clock=clock, redact=redactor.text, worker=worker), redactor


@cache
def _spare_key() -> bytes:
    return secrets.token_bytes(KEY_SIZE)


def _with_key(settings: Settings) -> Redactor:
    """Return a redactor that makes pseudonyms with the relay's key. If that key cannot be used, a key of this
    process is used instead: mail does not wait for the log, and addresses stay hidden. Its `problem`
    describes this.
    """
    try:
        durable.make_directory(settings.spool.path.parent)
        return Redactor(load_or_create_key(redact_key_of(settings)), enabled=True)
    except RedactKeyError as error:
        redactor = Redactor(_spare_key(), enabled=True)
        redactor.problem = (
            f"{error}. Until the relay is restarted with a usable key, pseudonyms are made with another key"
        )
        return redactor


def redact_key_of(settings: Settings) -> Path:
    return settings.log.redact_key_file or settings.spool.path.parent / REDACT_KEY


def history_redactor(settings: Settings, of_log: Redactor) -> Redactor:
    """Return the redactor for the message history: that of the log if both show addresses in the same
    form.
    """
    hashed = settings.history.addresses is HistoryAddresses.HASHED
    if hashed == of_log.enabled:
        return of_log
    return hashing_redactor(settings, of_log) if hashed else Redactor(b"", enabled=False)


def hashing_redactor(settings: Settings, of_log: Redactor) -> Redactor:
    """Return a redactor that replaces addresses by pseudonyms, whether or not the log does."""
    return of_log if of_log.enabled else _with_key(settings)
