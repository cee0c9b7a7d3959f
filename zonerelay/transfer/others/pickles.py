"""Reads pickles of python-slimta without instantiating the classes that they contain.

A pickle is a program. The names in python-slimta's pickles are mapped to `InertObject`, an object that only
stores what it is given; any other name ends the reading before anything is called. The Python implementation
of pickle is used, because the C implementation allocates as much memory as a hostile number requests.
"""

from __future__ import annotations

import io
import pickle
import re

_NAMES = {
    "slimta.envelope": ("Envelope",),
    "slimta.bounce": ("Bounce",),
    "email.message": ("Message", "EmailMessage"),
    "email.policy": ("EmailPolicy",),
    "email._policybase": ("Compat32",),
    "email.charset": ("Charset",),
    "email.header": ("Header",),
}
_WHOLE_MODULES = ("email.headerregistry", "email._header_value_parser", "email.errors")
"""Of these, any name: a header that was set by a program is stored with its parse tree."""
_SETS = (("builtins", "set"), ("__builtin__", "set"))
_FOLD = re.compile(r"\r?\n(?![ \t])")
_FIELD_NAME = re.compile(r"[!-9;-~]+")


class PickleError(ValueError):
    """The pickle was not written by python-slimta; contains the reason."""


class InertObject:
    """A placeholder for an object in a pickle. `state` has its attributes."""

    def __new__(cls, *arguments: object) -> InertObject:
        made = object.__new__(cls)
        made.arguments = arguments
        made.state = {}
        return made

    arguments: tuple[object, ...]
    state: dict[str, object]

    def __init__(self, *arguments: object) -> None:
        """Ignore the arguments, which `__new__` has stored."""

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}

    def append(self, item: object) -> None:
        """Ignore an item: the nodes of a parse tree are lists, and the message's text has the same
        content.
        """

    def extend(self, items: object) -> None:
        """Ignore items; see `append`."""


class _Reader(pickle._Unpickler):
    """An unpickler that creates placeholders instead of objects."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) in _SETS:
            return set
        if name in _NAMES.get(module, ()) or (module in _WHOLE_MODULES and name.isidentifier()):
            return InertObject
        raise PickleError(f"it contains {module}.{name}, which no python-slimta queue uses")


def load(raw: bytes) -> object:
    """Load numbers, texts, containers and `InertObject` objects. Raise PickleError if there is anything else.

    Texts of Python 2 are decoded as UTF-8, with surrogates for invalid bytes.
    """
    try:
        return _Reader(io.BytesIO(raw), encoding="utf-8", errors="surrogateescape").load()
    except PickleError:
        raise
    except Exception as error:  # a broken pickle may raise any exception
        raise PickleError(f"the pickle is truncated or invalid: {type(error).__name__}") from error


def octets(text: object) -> bytes:
    """Return a text as bytes. Raise PickleError if it is not a text."""
    if isinstance(text, bytes):
        return text
    if isinstance(text, str):
        return text.encode("utf-8", "surrogateescape")
    raise PickleError("it contains another type where a text is expected")


def header(message: object) -> bytes:
    """Return the header of an `email.message.Message`, followed by an empty line. Raise PickleError if it is
    not valid.
    """
    fields = message.state.get("_headers") if isinstance(message, InertObject) else None
    if not isinstance(fields, list):
        raise PickleError("it has no header")
    lines = []
    for field in fields:
        if not (isinstance(field, tuple) and len(field) == 2):
            raise PickleError("it contains an invalid header field")
        name, value = field
        if isinstance(value, InertObject) and len(value.arguments) > 2:
            value = value.arguments[2]  # the form in which email pickles a field that a program has set
        shown = octets(name).decode("ascii", "replace")
        if not _FIELD_NAME.fullmatch(shown):
            raise PickleError(f"it has a header field named {shown!r}")
        text = octets(value).decode("utf-8", "surrogateescape").rstrip("\r\n")
        lines.append(f"{shown}: {_FOLD.sub(chr(10) + ' ', text)}\n".encode("utf-8", "surrogateescape"))
    return b"".join(lines) + b"\n"
