"""Finds the running relay for a command by its configuration file or its control socket."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay.cli.terminal.exits import USAGE, CliError, complain, refused
from zonerelay.operations.errors import ControlError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator, Sequence

    from zonerelay.config.load import PartialSettings
    from zonerelay.config.problems import ConfigProblem
    from zonerelay.config.settings import Settings
    from zonerelay.control.client import ControlClient

ENVIRONMENT = "ZONERELAY_CONFIG"
SYSTEM_CONFIG = Path("/etc/zonerelay/zonerelay.toml")
LOCAL_CONFIG = Path("config/zonerelay.toml")
DEFAULT_SPOOL = "/var/lib/zonerelay/spool"
"""The default of `[spool] path`."""
_NAMED = ("spool", "admin")
TIMEOUT = 2.0
_LISTENS = "00010000"
"""The flag __SO_ACCEPTCON in /proc/net/unix."""


def config_path(option: Path | None) -> Path:
    """Return the path of the configuration file: `--config`, $ZONERELAY_CONFIG, or a default path.

    The system's file takes precedence over the working directory: where a relay is installed, a command
    refers to that relay, whatever directory it is run in.
    """
    if option is not None:
        return option
    if named := os.environ.get(ENVIRONMENT):
        return Path(named)
    for path in (SYSTEM_CONFIG, LOCAL_CONFIG):
        if path.exists():
            return path
    raise CliError(
        f"no configuration found: neither {SYSTEM_CONFIG} nor ./{LOCAL_CONFIG} exists; specify one with "
        "--config",
        USAGE,
    )


def load_settings(option: Path | None) -> Settings:
    """Load the configuration. Raise CliError with all problems of the file."""
    from zonerelay.config.load import ConfigError, load

    path = config_path(option)
    with refused(ConfigError, status=USAGE):
        return load(path)


def load_for_reading(option: Path | None, *, quietly: bool = False) -> Settings:
    """Return the valid part of the configuration for commands that change nothing, and warn about its
    problems.
    """
    if sandbox := _usual_sandbox(option):
        from zonerelay.config.settings import Settings, SpoolSettings

        return Settings(spool=SpoolSettings(path=sandbox.with_name("spool")))
    return _load_partly(option, lambda found: found.is_sure, quietly=quietly)


def load_needed(option: Path | None, table: str) -> Settings:
    """Return the settings for a command that requires one table of the configuration to be valid. Raise
    CliError if that table may have errors.
    """
    from zonerelay.config.settings import TABLES

    # a table with an unknown name may be this one, mistyped
    others = TABLES.keys() - {table}
    return _load_partly(option, lambda found: found.wrong is not None and found.wrong <= others)


def _load_partly(
    option: Path | None, suffices: Callable[[PartialSettings], bool], *, quietly: bool = False
) -> Settings:
    from zonerelay.config.load import load_partial

    path = config_path(option)
    found = load_partial(path)
    if not suffices(found):
        return load_settings(option)
    if not quietly:
        _warn(path, found.problems)
    return found.settings


def client_of(settings: Settings) -> ControlClient:
    from zonerelay.control.client import ControlClient
    from zonerelay.control.socket import control_socket_path

    return ControlClient(control_socket_path(settings))


def connect(arguments: Namespace) -> ControlClient:
    """Return a client of the running relay. Raise CliError if its control socket cannot be determined."""
    return find_relay(arguments)[0]


def find_relay(arguments: Namespace) -> tuple[ControlClient, Path | None]:
    """Return a client of the running relay, and the relay's configuration file.

    The socket is that of `--socket`. Otherwise it is the one that the file names, whatever other errors the
    file has. Otherwise it is the one of a running process that was started with this file, if the file has
    changed since. If no file is named and the relay of the default file does not run, the socket is that of
    this user's sandbox, if one runs; a message is printed then.
    """
    from zonerelay.control.client import ControlClient
    from zonerelay.process.sockets import answers

    if arguments.socket is not None:
        return ControlClient(arguments.socket), None
    if sandbox := _usual_sandbox(arguments.config):
        return ControlClient(sandbox), None
    try:
        config = config_path(arguments.config)
    except CliError:
        for gone in (SYSTEM_CONFIG, LOCAL_CONFIG):
            if running := control_socket_of(gone):
                complain(f"{gone} no longer exists; using its running relay at {running}")
                return ControlClient(running), None
        raise
    if (path := _socket_since(config)) and answers(path):
        return ControlClient(path), config
    from zonerelay.config.load import load_partial  # half of the run time of a command

    found = load_partial(config)
    path = _socket_of(found)
    if path is None or not answers(path):
        if running := control_socket_of(config):
            complain(f"{config} was changed or removed; using its running relay at {running}")
            path = running
        elif path is None or found.problems:
            wrong = "\n".join(map(str, found.problems))
            raise CliError(f"{wrong}\nno running relay was started with {config}", USAGE)
    _warn(config, found.problems)
    return ControlClient(path), config


def _socket_since(config: Path) -> Path | None:
    """Return the control socket that the file names, if a relay has started since the file last changed."""
    import tomllib

    from zonerelay.config.files import files_of
    from zonerelay.control.socket import SOCKET_NAME

    try:
        files = files_of(config)
        found = [tomllib.loads(each.read_bytes().decode("utf-8-sig")) for each in files]
        spool, admin = ({k: v for each in found for k, v in each.get(name, {}).items()} for name in _NAMED)
        home = Path(spool.get("path", DEFAULT_SPOOL)).parent
        path = Path(admin.get("socket") or home / SOCKET_NAME).absolute()
        changed = max(
            time
            for each in (*files, *{each.parent for each in files[1:]})
            for time in (each.stat().st_mtime, each.stat().st_ctime, each.lstat().st_ctime)
        )
        return path if path.lstat().st_mtime > changed else None
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return None  # the complete check reports the error


def _socket_of(found: PartialSettings) -> Path | None:
    """Return the control socket that a configuration names, or None if it names none or an invalid path."""
    from zonerelay.control.socket import control_socket_path

    try:
        return control_socket_path(found.settings) if found.is_sure else None
    except ControlError:
        return None


def _warn(config: Path, problems: Sequence[ConfigProblem]) -> None:
    """Print a warning about the problems of a configuration file that is used in spite of them."""
    if not problems:
        return
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    check = f"zonerelay check-config --config {config}"
    complain(f"warning: {problems[0]}{more}. The relay would not start with {config}; see {check}")


def _usual_sandbox(option: Path | None) -> Path | None:
    """Return the control socket of the sandbox, unless a configuration is named or the default relay runs."""
    if option is not None or os.environ.get(ENVIRONMENT) or not (sandbox := _sandbox()):
        return None
    from zonerelay.config.load import load_partial
    from zonerelay.process.sockets import answers

    for path in (SYSTEM_CONFIG, LOCAL_CONFIG):
        if path.exists():
            usual = _socket_since(path) or _socket_of(load_partial(path))
            if (usual is not None and answers(usual)) or control_socket_of(path):
                return None
            break
    complain("no other relay is running; using the sandbox")
    return sandbox


def _sandbox() -> Path | None:
    """Return the control socket of this user's sandbox, if exactly one runs."""
    from zonerelay.process.sockets import answers
    from zonerelay.sandbox import DIRECTORY

    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{DIRECTORY}*"):
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            # Other users may also write to the directory of temporary files, and keep a client waiting.
            if folder.lstat().st_uid == os.getuid() and answers(folder / "control.sock"):
                found.append(folder / "control.sock")
    return found[0] if len(found) == 1 else None


def control_socket_of(config: Path) -> Path | None:
    """Find the process that was started with this configuration file, and return its control socket.

    A file that has changed since the start, or is no longer readable, may name a different socket from the
    one on which the relay listens. Only root and the relay's own user can inspect the process, and they are
    the users who may use the socket. Root can inspect those of all users, who must not answer its commands.
    """
    trusted = {0, os.getuid()}
    for place in (config, Path(DEFAULT_SPOOL).parent):
        with contextlib.suppress(OSError):
            trusted.add(place.stat().st_uid)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if _users_of(process) <= trusted and _serves_with(process, config):
                for path in _listening(process):
                    if _is_control(path):
                        return path
        except OSError:
            continue  # the process has ended, or belongs to another user
    return None


def _users_of(process: Path) -> set[int]:
    """Return the real, effective, saved and file system user ids of a process. The owner of its directory in
    /proc may be root although another user runs it.
    """
    lines = (process / "status").read_bytes().splitlines()
    return {int(each) for line in lines if line.startswith(b"Uid:") for each in line.split()[1:]}


def _serves_with(process: Path, config: Path) -> bool:
    words = (process / "cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    if "serve" not in words:
        return False
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--config":
            given = value if equals else words[at + 1]
            place = process / "cwd" / given
            if place.exists() and config.exists():
                return place.samefile(config)
            # the process or the file no longer exists
            return not place.exists() and place.resolve() == config.resolve()
    return False


def _listening(process: Path) -> Iterator[Path]:
    own = {str(each.readlink()) for each in (process / "fd").iterdir()}
    for line in (process / "net" / "unix").read_text(errors="surrogateescape").splitlines()[1:]:
        columns = line.split(maxsplit=7)
        if len(columns) == 8 and columns[3] == _LISTENS and f"socket:[{columns[6]}]" in own:
            yield Path(columns[7])


def _is_control(path: Path) -> bool:
    from zonerelay.control.client import ControlClient
    from zonerelay.operations.requests import Ping

    try:
        list(ControlClient(path, timeout=TIMEOUT).stream(Ping()))
    except ControlError:
        return False
    return True
