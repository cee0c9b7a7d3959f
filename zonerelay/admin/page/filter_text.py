"""Parses the text that an operator types as a filter on the page. No I/O.

    from:@example.org to:bob@example.com reply:"4.7.28" age:>1h zone:bulk state:held priority:high id:ID

All given conditions must match. The text is the complete state of the queue page, so it is part of its URL.
"""

import re

import msgspec

from zonerelay.config.units import parse_duration
from zonerelay.model.envelope import is_message_id
from zonerelay.operations.operation import fields_of
from zonerelay.operations.requests import Filter

MAX_TEXT = 1000

_TERM = re.compile(r'\s*(?:(\w+):)?("(?:[^"\\]|\\.)*"|\S+)')
_FIELDS = {each.option.word: each for each in fields_of(Filter)}
WORDS = tuple(_FIELDS)


class FilterTextError(ValueError):
    """The text that an operator typed is not a valid filter. The message explains what to write."""


def parse(text: str) -> Filter:
    """Parse the text of a filter, such as `zone:default to:@example.com`. Raise FilterTextError if it is
    invalid.
    """
    if len(text) > MAX_TEXT:
        raise FilterTextError(f"a filter may have at most {MAX_TEXT} characters")
    found: dict[str, str | float] = {}
    for name, value in _TERM.findall(text.strip()):
        field, given = _term(name.lower(), _unquoted(value))
        if field in found:
            raise FilterTextError(
                f"{name or field}: is given twice, but a filter may contain each keyword only once"
            )
        found[field] = given
    return msgspec.convert(found, Filter)


def _unquoted(value: str) -> str:
    if len(value) > 1 and value.startswith('"') and value.endswith('"'):
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value


def _term(name: str, value: str) -> tuple[str, str | float]:  # noqa: PLR0911 - a case for each word
    """Parse one condition, and return the name of the filter's field and its value."""
    match name:
        case "":
            if is_message_id(value):
                return "message_id", value
            raise FilterTextError(f"{value}: specify a field, for example to:{value} or from:{value}")
        case "id" if is_message_id(value):
            return "message_id", value
        case "id":
            raise FilterTextError(
                f"id:{value} is not a message id; message ids are shown in the log and in the queue"
            )
        case "age" if value[:1] in ("<", ">"):
            try:
                return ("min_age" if value[0] == ">" else "max_age"), parse_duration(value[1:])
            except ValueError as error:
                raise FilterTextError(f"age: {error}") from error
        case "age":
            raise FilterTextError(
                f"age:{value}: use age:>{value} for older messages, age:<{value} for newer ones"
            )
        case "to" if value.startswith("@"):
            return "domain", value[1:]
        case "to":
            return "recipient", value
        case "from" if value.startswith("@"):
            return "sender", f"*{value}"
        case "state" | "priority" if value not in _FIELDS[name].choices:
            raise FilterTextError(f"{name}:{value}: must be one of {', '.join(_FIELDS[name].choices)}")
        case _ if name in _FIELDS:
            return _FIELDS[name].name, value
    raise FilterTextError(f"{name}: is not a filter keyword; keywords are {', '.join(WORDS)}")


def term(name: str, value: str) -> str:
    """Format one condition of a filter, such as `reply:"4.7.28 try later"`, for a link."""
    plain = re.fullmatch(r'[^\s"\\]+', value) is not None
    return f"{name}:{value}" if plain else '{}:"{}"'.format(name, re.sub(r'(["\\])', r"\\\1", value))
