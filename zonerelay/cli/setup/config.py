"""`zonerelay config show`: the options of the file and their defaults as TOML, for people and for scripts."""

from __future__ import annotations

import tomllib
from argparse import Namespace

from zonerelay.cli.relay import config_path
from zonerelay.cli.terminal import output
from zonerelay.cli.terminal.exits import OK, USAGE, refused
from zonerelay.cli.terminal.text import clean_lines
from zonerelay.config import toml_text
from zonerelay.config.load import ConfigError, read


def show(arguments: Namespace) -> int:
    """Print the configuration. Raise CliError with all problems of the file."""
    if arguments.defaults:
        document = toml_text.defaults()
    else:
        path = config_path(arguments.config)
        with refused(ConfigError, status=USAGE):
            settings, report = read(path)
        shown = toml_text.changed if arguments.changed else toml_text.effective
        document = f"# {clean_lines(str(path))}\n{shown(settings, report)}"
    if arguments.json:
        output.print_document(tomllib.loads(document))
    else:
        print(document, end="")
    return OK
