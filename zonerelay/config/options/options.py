"""Declares options with their type, limits and default.

The modules of `tables` declare each setting with one of the functions below, which put an `Option` into the
metadata of the dataclass field. The loader and the error messages are derived from it, so there is no second
list of options. The docstring below the field explains the option to an operator; `config/toml_text.py`
reads it for the reference.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from zonerelay.config.options import convert, forms
from zonerelay.config.options.convert import Form, Option
from zonerelay.config.units import Rate

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Choice = TypeVar("Choice", bound=enum.StrEnum)

KEY = "option"
TABLE = "table"

MAX_WORKERS = 128
"""A message id has room for 256; half of them are reserved for relays that share a store."""

KB = 1024
MB = 1024 * KB
GB = 1024 * MB
MINUTE = 60.0
HOUR = 60 * MINUTE
DAY = 24 * HOUR
YEAR = 365 * DAY


def switch(default: bool) -> bool:
    return _field(default, Option(convert.switch))


def switch_or_auto() -> bool | None:
    """Declare an option that is true, false or "auto", which becomes `None`."""
    return _field(None, Option(convert.switch, word="auto"))


def count(default: int, *, least: int = 1, most: int = 1_000_000, optional: bool = False) -> int:
    return _field(default, Option(convert.count, least, most, optional))


def workers(default: int) -> int:
    """Declare the option for the number of workers. The value of "auto" is `AUTO`."""
    return _field(default, Option(convert.count, 1, MAX_WORKERS, word="auto", meaning=convert.AUTO))


def ratio(default: float, *, most: float = 1.0) -> float:
    return _field(default, Option(convert.ratio, 0, most))


def size(default: int, *, least: int = KB, most: int = 1024 * GB, optional: bool = False) -> int:
    return _field(default, Option(convert.size, least, most, optional))


def duration(default: float, *, least: float = 0.1, most: float = DAY, optional: bool = False) -> float:
    return _field(default, Option(convert.duration, least, most, optional))


def durations(default: tuple[float, ...], *, least: float = 0.1, most: float = 30 * DAY) -> tuple[float, ...]:
    return _field(default, Option(convert.duration, least, most, several=True))


def choice(default: Choice) -> Choice:
    return _field(default, Option(convert.choice, choices=type(default)))


def choice_or(word: str, of: type[Choice]) -> Choice | None:
    """Declare an option with fixed choices, or `word`, which is the default and is converted to `None`."""
    return _field(None, Option(convert.choice, choices=of, word=word))


def optional_choice(of: type[Choice]) -> Choice | None:
    return _field(None, Option(convert.choice, choices=of, optional=True))


def choices(of: type[Choice]) -> tuple[Choice, ...]:
    """Declare a list of fixed choices, which is empty by default."""
    return _field((), Option(convert.choice, choices=of, several=True))


def text(
    default: str, *, form: Form = forms.line, optional: bool = False, required: bool = False, needs: str = ""
) -> str:
    optional = optional or not default
    return _field(default, Option(convert.text, optional=optional, form=form, required=required, needs=needs))


def texts(
    default: tuple[str, ...], *, form: Form = forms.line, required: bool = False, needs: str = ""
) -> tuple[str, ...]:
    return _field(default, Option(convert.text, form=form, several=True, required=required, needs=needs))


def path(default: Path) -> Path:
    return _field(default, Option(convert.path, required=default == Path()))


def optional_path(needs: str = "") -> Path | None:
    return _field(None, Option(convert.path, optional=True, needs=needs))


def paths() -> tuple[Path, ...]:
    """Declare an option that is a list of paths. A single path needs no brackets."""
    return _field((), Option(convert.path, several=True))


def rate() -> Rate | None:
    return _field(None, Option(convert.rate, optional=True))


def date() -> float:
    """Declare an option that is a date. Its value is Unix time, or 0.0 if none is given."""
    return _field(0.0, Option(convert.date, optional=True))


def networks(default: tuple[T, ...], needs: str = "") -> tuple[T, ...]:
    return _field(default, Option(convert.text, form=forms.network, several=True, needs=needs))


def table(of: type[T]) -> T:
    """Declare a table, [name], whose options have their defaults if the file does not contain it."""
    return dataclasses.field(default_factory=of, metadata={TABLE: (of, False)})


def tables(of: type[T], *default: T) -> tuple[T, ...]:
    """Declare a repeated table, [[name]]. `default` is used if the file has none."""
    return dataclasses.field(default=default, metadata={TABLE: (of, True)})


def _field(default: T, option: Option) -> T:
    # typeshed declares field() in the same way, so that the class body sees the default's type.
    return dataclasses.field(default=default, metadata={KEY: option})


@lru_cache
def options_of(table: type[DataclassInstance]) -> Mapping[str, Option]:
    """Return the options of one table in the order of their declaration."""
    return {each.name: each.metadata[KEY] for each in dataclasses.fields(table) if KEY in each.metadata}


def tables_of(file: type[DataclassInstance]) -> dict[str, tuple[type[DataclassInstance], bool]]:
    """Return the class of each table in the configuration file, and whether the table may be repeated."""
    return {
        field.name: field.metadata[TABLE] for field in dataclasses.fields(file) if TABLE in field.metadata
    }
