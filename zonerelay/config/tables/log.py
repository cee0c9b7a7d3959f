"""[log]: the form of the log on stderr, and the redaction of addresses in it."""

# ruff: noqa: RUF009  (the makers return dataclasses.field(), which is what that rule asks for)

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.options.options import (
    choice,
    optional_path,
    switch,
)


class LogFormat(enum.StrEnum):
    JSON = "json"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """[log]"""

    format: LogFormat = choice(
        LogFormat.JSON, "json: one object per line for collectors; text: key=value for people. On stderr."
    )
    redact: bool = switch(
        True,
        "Replace addresses in log text by stable pseudonyms (a keyed hash), so that logs hold no personal "
        "data and can still be searched.",
    )
    redact_key_file: Path | None = optional_path(
        "The key of those pseudonyms. Empty: a key of its own, made beside the spool. Share one file "
        "between machines whose logs are to be joined."
    )
