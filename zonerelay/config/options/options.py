"""Declares one option: its form, its range and the reason for its default.

An `Option` rides in a dataclass field's metadata; the modules of `tables` declare each setting with one of
the makers below. The loader, the error messages and the check of `config/zonerelay.toml` are
derived from it, so there is no second list of options anywhere.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from zonerelay.config.options.units import Rate

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Choice = TypeVar("Choice", bound=enum.StrEnum)

KEY = "option"

AUTO = 0
"""`workers = "auto"`: how many it is depends on the machine, not on the file."""
MAX_WORKERS = 128
"""A message id has room for 256; half of them are for relays that share a store."""

KB = 1024
MB = 1024 * KB
GB = 1024 * MB
MINUTE = 60.0
HOUR = 60 * MINUTE
DAY = 24 * HOUR
YEAR = 365 * DAY


class Form(enum.Enum):
    """What is written in the file. Each form has one reader in `convert.py`."""

    SWITCH = enum.auto()
    SWITCH_OR_AUTO = enum.auto()
    COUNT = enum.auto()
    WORKERS = enum.auto()
    RATIO = enum.auto()
    SIZE = enum.auto()
    DURATION = enum.auto()
    DURATIONS = enum.auto()
    CHOICE = enum.auto()
    TEXT = enum.auto()
    TEXTS = enum.auto()
    PATH = enum.auto()
    PATHS = enum.auto()
    ZONE_NAME = enum.auto()
    EHLO_NAME = enum.auto()
    LISTEN = enum.auto()
    LISTENS = enum.auto()
    NAME_SERVER = enum.auto()
    NAME_SERVERS = enum.auto()
    NETWORK = enum.auto()
    NETWORKS = enum.auto()
    DOMAIN = enum.auto()
    DOMAINS = enum.auto()
    HEADER = enum.auto()
    HEADERS = enum.auto()
    FIELD_NAME = enum.auto()
    FUNCTION = enum.auto()
    FINGERPRINT = enum.auto()
    FINGERPRINTS = enum.auto()
    ADDRESS_PATTERN = enum.auto()
    ADDRESS_PATTERNS = enum.auto()
    REPLY = enum.auto()
    NEXT_HOPS = enum.auto()
    RATE = enum.auto()
    DATE = enum.auto()
    SOURCE_NAME = enum.auto()
    IP_ADDRESS = enum.auto()
    IP_ADDRESSES = enum.auto()
    SECRET = enum.auto()
    SECRETS = enum.auto()
    URL = enum.auto()
    SELECTOR = enum.auto()
    REPLACEMENT = enum.auto()
    NEW_FIELD = enum.auto()
    NEW_FIELDS = enum.auto()
    REMOVED_FIELD = enum.auto()
    REMOVED_FIELDS = enum.auto()
    PRIORITIES = enum.auto()
    PRIORITY = enum.auto()


@dataclass(frozen=True, slots=True)
class Option:
    """`least` and `most` bound numbers; `optional` also takes 0 or "", meaning none."""

    form: Form
    doc: str
    least: float = 0
    most: float = 0
    optional: bool = False
    choices: tuple[str, ...] = ()


def switch(default: bool, doc: str) -> bool:
    return _field(default, Option(Form.SWITCH, doc))


def switch_or_auto(doc: str) -> bool | None:
    """`None` for "auto"."""
    return _field(None, Option(Form.SWITCH_OR_AUTO, doc))


def count(default: int, doc: str, *, least: int = 1, most: int = 1_000_000, optional: bool = False) -> int:
    return _field(default, Option(Form.COUNT, doc, least, most, optional))


def workers(default: int, doc: str) -> int:
    """`AUTO` for "auto"."""
    return _field(default, Option(Form.WORKERS, doc, 1, MAX_WORKERS))


def ratio(default: float, doc: str, *, most: float = 1.0) -> float:
    return _field(default, Option(Form.RATIO, doc, 0, most))


def size(default: int, doc: str, *, least: int = KB, most: int = 1024 * GB, optional: bool = False) -> int:
    return _field(default, Option(Form.SIZE, doc, least, most, optional))


def duration(
    default: float, doc: str, *, least: float = 0.1, most: float = DAY, optional: bool = False
) -> float:
    return _field(default, Option(Form.DURATION, doc, least, most, optional))


def durations(
    default: tuple[float, ...], doc: str, *, least: float = 0.1, most: float = 30 * DAY
) -> tuple[float, ...]:
    return _field(default, Option(Form.DURATIONS, doc, least, most))


def choice(default: Choice, doc: str) -> Choice:
    words = tuple(word.value for word in type(default))
    return _field(default, Option(Form.CHOICE, doc, choices=words))


def text(default: str, doc: str, *, form: Form = Form.TEXT, optional: bool = False) -> str:
    return _field(default, Option(form, doc, optional=optional or not default))


def texts(default: tuple[str, ...], doc: str, *, form: Form = Form.TEXTS) -> tuple[str, ...]:
    return _field(default, Option(form, doc))


def path(default: Path, doc: str) -> Path:
    return _field(default, Option(Form.PATH, doc))


def optional_path(doc: str) -> Path | None:
    return _field(None, Option(Form.PATH, doc, optional=True))


def paths(doc: str) -> tuple[Path, ...]:
    """None, one (written without brackets, if one likes) or several."""
    return _field((), Option(Form.PATHS, doc))


def rate(doc: str) -> Rate | None:
    return _field(None, Option(Form.RATE, doc, optional=True))


def date(doc: str) -> float:
    """Unix time; 0.0 when none is given."""
    return _field(0.0, Option(Form.DATE, doc, optional=True))


def networks(default: tuple[T, ...], doc: str) -> tuple[T, ...]:
    return _field(default, Option(Form.NETWORKS, doc))


def _field(default: T, option: Option) -> T:
    # typeshed declares field() the same way: the class body sees the default's type.
    return dataclasses.field(default=default, metadata={KEY: option})


def option_of(field: dataclasses.Field[object]) -> Option | None:
    """`None` for a field that is a table of its own."""
    # Metadata is an untyped mapping; only _field() puts this key there.
    return cast("Option | None", field.metadata.get(KEY))


def options_of(table: type[DataclassInstance]) -> dict[str, Option]:
    """The options of one table in the order in which it declares them."""
    found = {field.name: option_of(field) for field in dataclasses.fields(table)}
    return {name: option for name, option in found.items() if option is not None}
