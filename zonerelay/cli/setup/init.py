"""`zonerelay init DIR`: writes an initial configuration and systemd units for a relay in that directory.

A relay below /etc is that of the machine: its spool is in /var/lib/zonerelay, and its user is zonerelay. Any
other DIR holds all the relay's files, so that an ordinary user can start it at once; its user is the one who
runs the command (zonerelay instead of root). Existing files are never overwritten: the command names them and
writes none. The files are those of config/ and systemd/, which the package contains.
"""

import json
import os
import pwd
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from zonerelay import durable
from zonerelay.cli.relay import DEFAULT_SPOOL
from zonerelay.cli.terminal.exits import OK, USAGE, CliError

SHIPPED = Path(__file__).parent / "shipped"
PROGRAM = "/usr/bin/zonerelay"
CONFIG = "/etc/zonerelay/zonerelay.toml"
"""What the shipped units name."""
SERVICE_USER = "zonerelay"
"""The user that the systemd unit runs the relay as."""

_TRIAL_SPOOL = re.compile(r"^# Below .*\npath = .*\n", re.MULTILINE)
_PLAIN = re.compile(r"[\w/.+@-]+")
"""What needs no quotes in a unit and in a shell."""


def init(arguments: Namespace) -> int:
    """Write the configuration and the systemd units of a new relay. Raise CliError if a file exists, cannot
    be written, or has a path that a unit would have to quote.
    """
    directory, program = arguments.directory.absolute(), Path(sys.argv[0]).absolute()
    for path in (directory, program):
        if not _PLAIN.fullmatch(str(path)):
            raise CliError(f"{path}: the path may contain only letters, digits and . _ + @ -", USAGE)
    machine = directory.is_relative_to("/etc")
    user = SERVICE_USER if machine or os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    config = directory / "zonerelay.toml"
    files = {config: configuration(None if machine else directory / "spool")}
    for name in ("zonerelay.service", "zonerelay.socket"):
        unit = _shipped(name).replace(PROGRAM, str(program)).replace(CONFIG, str(config))
        files[directory / name] = unit if machine else _moved(unit, directory, user)
    refuse_existing(*files, hint="remove it, or specify another directory")
    for path, text in files.items():
        write_new(path, text.encode(), 0o644)
    print(_instructions(files, program, config, user, None if machine else directory))
    return OK


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a file atomically: a reader sees the old file or the new one. Create missing directories.

    Raise CliError if the file cannot be written.
    """
    try:
        durable.make_directory(path.parent, mode=0o755)
        durable.write(path, content, mode=mode)
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}") from error


def refuse_existing(*paths: Path, hint: str) -> None:
    for path in paths:
        if path.is_symlink() or path.exists():
            raise CliError(f"{path} already exists; {hint}")


def configuration(spool: Path | None) -> str:
    """Return the text of the shipped configuration file with this spool path, or with the default one."""
    line = f'#path = "{DEFAULT_SPOOL}"\n' if spool is None else f"path = {json.dumps(str(spool))}\n"
    text, count = _TRIAL_SPOOL.subn(line, _shipped("zonerelay.toml"))
    assert count == 1
    return text


def _shipped(name: str) -> str:
    return (SHIPPED / name).read_text(encoding="utf-8")


def _moved(unit: str, directory: Path, user: str) -> str:
    """Return the shipped systemd unit, changed for a relay that keeps all its files in `directory`."""
    group = SERVICE_USER if user == SERVICE_USER else ""
    for directive, value in (
        ("User", user),
        ("Group", group),
        ("WorkingDirectory", str(directory)),
        ("StateDirectory", None),
        ("StateDirectoryMode", None),
        ("ConfigurationDirectory", None),
        ("ProtectHome", f"read-only\nReadWritePaths={directory}"),
    ):
        line = "" if value is None else f"{directive}={value}\n"
        unit = re.sub(rf"^{directive}=.*\n", line, unit, flags=re.MULTILINE)
    return unit


def _instructions(
    files: Mapping[Path, str], program: Path, config: Path, user: str, directory: Path | None
) -> str:
    spool = directory / "spool" if directory else DEFAULT_SPOOL
    home = directory or Path("/var/lib/zonerelay")
    make_user = f"useradd --system --user-group --home-dir {home} --shell /usr/sbin/nologin {user}"
    new_user = f"    {make_user}\n" if user == SERVICE_USER else ""
    own = f"    chown -R {user}: {directory}\n" if user == SERVICE_USER and directory else ""
    units = " ".join(str(path) for path in files if path != config)
    run = f"\nStart the relay (Ctrl-C stops it):\n\n    {program} serve --config {config}\n"
    written = "\n".join(f"    {path}" for path in files)
    return f"""\
These files were written:

{written}

By default only this machine can submit mail, at 127.0.0.1:2525. Mail is stored in {spool}.
List every option with its default and reason: zonerelay config show --defaults
{run if directory else ""}
Or run it with systemd, as root:

{new_user}{own}    cp {units} /etc/systemd/system/
    systemctl daemon-reload
    systemctl enable --now zonerelay"""
