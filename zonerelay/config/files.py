"""Finds the files of a configuration: the main file, and conf.d/*.toml next to it in alphabetical order.

Together they are one document (`problems.Report.add`), which `written` writes as one file.
"""

import datetime
import json
from collections.abc import Mapping
from pathlib import Path

FOLDER = "conf.d"


def files_of(path: Path) -> list[Path]:
    """Return the paths of all configuration files: this main file, and those in conf.d next to it. Raise
    OSError if the folder cannot be read.
    """
    folder = path.parent / FOLDER
    try:
        return [path, *sorted(each for each in folder.iterdir() if each.suffix == ".toml")]
    except (FileNotFoundError, NotADirectoryError):
        return [path]


def written(document: Mapping[str, object]) -> str:
    """Format a document as TOML, one line per top-level key."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in document.items())


def _value(value: object) -> str:
    if isinstance(value, dict):
        members = (f"{key} = {_value(each)}" for key, each in value.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False)
