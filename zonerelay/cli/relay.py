"""The way from command line options to a running relay: the configuration file and the control socket."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay.cli.terminal.exits import USAGE, CliError

if TYPE_CHECKING:
    from zonerelay.config.settings import Settings
    from zonerelay.control.socket.client import ControlClient

ENVIRONMENT = "ZONERELAY_CONFIG"
SYSTEM_CONFIG = Path("/etc/zonerelay/zonerelay.toml")
LOCAL_CONFIG = Path("config/zonerelay.toml")


def config_path(option: Path | None) -> Path:
    """`--config`, else $ZONERELAY_CONFIG, else the machine's file, else the one in the source tree.

    The machine's file comes before the working directory's: where a relay is installed, a command means
    that one, wherever it is typed.
    """
    if option is not None:
        return option
    if named := os.environ.get(ENVIRONMENT):
        return Path(named)
    for path in (SYSTEM_CONFIG, LOCAL_CONFIG):
        if path.exists():
            return path
    raise CliError(
        f"no configuration: there is neither {SYSTEM_CONFIG} nor ./{LOCAL_CONFIG}; name one with --config",
        USAGE,
    )


def load_settings(option: Path | None) -> Settings:
    """Raises CliError with everything that is wrong with the file."""
    from zonerelay.config.load import ConfigError, load

    path = config_path(option)
    try:
        return load(path)
    except ConfigError as error:
        raise CliError(str(error), USAGE) from error


def client_of(settings: Settings) -> ControlClient:
    from zonerelay.control.socket.client import ControlClient
    from zonerelay.control.socket.socket_file import control_socket_path

    return ControlClient(control_socket_path(settings))


def connect(option: Path | None) -> ControlClient:
    """Raises CliError only when the file does not say where the relay is."""
    return find_relay(option)[0]


def find_relay(option: Path | None) -> tuple[ControlClient, Path | None]:
    """Returns a client and the relay's configuration file. Where no file is named and the usual one's relay
    does not run, it is the sandbox of this user, if one runs; the person is told.
    """
    from zonerelay.config.load import ConfigError, load_whereabouts
    from zonerelay.control.socket.client import ControlClient
    from zonerelay.control.socket.socket_file import answers, control_socket_path

    is_named = option is not None or bool(os.environ.get(ENVIRONMENT))
    try:
        config = config_path(option)
        path = control_socket_path(load_whereabouts(config))
    except (CliError, ConfigError) as error:
        if isinstance(error, CliError) and (sandbox := _sandbox()):
            return ControlClient(sandbox), None
        raise CliError(str(error), USAGE) from error
    if not is_named and not answers(path) and (sandbox := _sandbox()):
        return ControlClient(sandbox), None
    return ControlClient(path), config


def _sandbox() -> Path | None:
    """Returns the control socket of this user's sandbox and tells the person, if just one runs."""
    from zonerelay.control.socket.socket_file import answers
    from zonerelay.sandbox import DIRECTORY

    # Others may write into the directory of temporary files, too.
    found = [
        folder / "control.sock"
        for folder in Path(tempfile.gettempdir()).glob(f"{DIRECTORY}*")
        if answers(folder / "control.sock") and folder.lstat().st_uid == os.getuid()
    ]
    if len(found) != 1:
        return None
    print("zonerelay: no other relay runs here, so this is the sandbox", file=sys.stderr)
    return found[0]
