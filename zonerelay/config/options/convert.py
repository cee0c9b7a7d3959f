"""Converts TOML values to the values of options.

Each reader receives the value from tomllib, and the option with its bounds. It raises ValueError with a text
that names what it expected, with an example. Readers see one value; `tables` and `checks.py` compare several
values.
"""

import datetime
import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config import units
from zonerelay.config.options import forms
from zonerelay.config.problems import did_you_mean, in_words, quoted

AUTO = 0
"""The value of `workers = "auto"`. The real number depends on the machine, not on the file."""
MAX_TEXT = 1000

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Form = Callable[[str], object]
"""Parses one line of text, which is not empty. It is one of the functions in `forms`."""


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of an option: its type, its limits and its choices. `read` is one of the readers below.
    `least` and `most` are the bounds of numbers, `form` is the parser of a text, and `choices` are the valid
    words. `optional` also permits 0 or "", meaning none. With `several`, the option is a list of such values.
    `word` is written in the file for the special value `meaning`. With `required`, every entry must have the
    option. `needs` is another option of the table without which this one has no effect, or the value that the
    other must have: `tls = "verify"`.
    """

    read: "Callable[[object, Option], object]"
    least: float = 0
    most: float = 0
    optional: bool = False
    form: Form = forms.line
    choices: type[enum.StrEnum] | None = None
    several: bool = False
    word: str = ""
    meaning: object = None
    required: bool = False
    needs: str = ""

    def value_of(self, value: object) -> object:
        """Convert a TOML value to the value of this option. Raise ValueError if it is invalid."""
        return self.meaning if self.word and value == self.word else self.read(value, self)


def switch(value: object, option: Option) -> bool:
    if not isinstance(value, bool):
        words = f'true, false (no quotes) or "{option.word}"' if option.word else "true or false (no quotes)"
        raise expected(words, value)
    return value


def count(value: object, option: Option) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        example = f'4, or "{option.word}"' if option.word else str(max(100, int(option.least)))
        raise expected(f"a whole number such as {example}", value)
    return int(_bounded(value, option, str))


def ratio(value: object, option: Option) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise expected("a number such as 0.1", value)
    return _bounded(float(value), option, lambda number: f"{number:g}")


def size(value: object, option: Option) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise expected(f"a size such as {units.SIZE_EXAMPLE}", value)
    return int(_bounded(units.parse_size(value), option, lambda octets: units.format_size(int(octets))))


def duration(value: object, option: Option) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise expected(f"a duration such as {units.DURATION_EXAMPLE}", value)
    return _bounded(units.parse_duration(value), option, units.format_duration)


def _bounded(number: float, option: Option, show: Callable[[float], str]) -> float:
    if number == 0 and option.optional:
        return number
    # Written so that nan, which TOML permits, is refused too.
    if not option.least <= number <= option.most:
        zero = " (or 0 for none)" if option.optional and option.least else ""
        bounds = f"{show(option.least)} to {show(option.most)}{zero}"
        raise ValueError(f"must be from {bounds}, not {show(number)}")
    return number


def choice(value: object, option: Option) -> enum.StrEnum | None:
    """Convert a text to a member of the option's enumeration. An empty text, if it is permitted, becomes
    None.
    """
    assert option.choices is not None, "declared by `options.choice`"
    word, words = _line(value, option), [*filter(None, (option.word,)), *option.choices]
    if not word:
        return None
    if word not in words:
        raise ValueError(f"must be {in_words(words, 'or')}, not {quoted(word)}{did_you_mean(word, words)}")
    return option.choices(word)


def text(value: object, option: Option) -> object:
    line = _line(value, option)
    return option.form(line) if line else line


def _line(value: object, option: Option) -> str:
    if not isinstance(value, str):
        raise expected("text in quotes", value)
    if not value and not option.optional:
        raise ValueError("must not be empty; remove the key to use its default")
    if len(value) > MAX_TEXT or _CONTROL.search(value):
        raise ValueError(f"expected a line of at most {MAX_TEXT} characters without control characters")
    return value


def path(value: object, option: Option) -> Path | None:
    text = _line(value, option)
    if text.startswith("~"):
        raise ValueError(f"{quoted(text)}: ~ depends on the user; use an absolute path")
    return Path(text) if text else None


def rate(value: object, option: Option) -> units.Rate | None:
    return units.parse_rate(value) if value != "" else None


def date(value: object, option: Option) -> float:
    """Convert a TOML date, or a date with time and offset, to Unix time. An empty string is 0."""
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone; use {value.isoformat()}Z for UTC")
        return value.timestamp()
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC).timestamp()
    if value == "":
        return 0.0
    raise ValueError("expected a date without quotes, such as 2026-03-01 or 2026-03-01T12:00:00Z")


_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a number",
    float: "a decimal number",
    str: "text",
    list: "a list",
    dict: "a table",
    datetime.datetime: "a date",
    datetime.date: "a date",
    datetime.time: "a time",
}


def kind_of(value: object) -> str:
    """Return the TOML name of a value's type, for an error message."""
    return _KINDS[type(value)]


def expected(what: str, value: object, hint: str = "") -> ValueError:
    return ValueError(f"expected {what}, not {kind_of(value)}{hint}")
