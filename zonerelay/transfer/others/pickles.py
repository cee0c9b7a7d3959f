"""Reads pickles of python-slimta without building anything that they name.

A pickle is a program. Names that python-slimta's pickles have stand for `Inert`, an object that keeps what it
is given; any other name ends the reading, before anything is called. The reader is pickle's in Python: the
one in C takes the memory that a hostile number asks for.
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
    """The pickle is not one of python-slimta's; the text says why."""


class Inert:
    """Stands for an object. `state` are its attributes."""

    def __new__(cls, *arguments: object) -> Inert:
        made = object.__new__(cls)
        made.arguments = arguments
        made.state = {}
        return made

    arguments: tuple[object, ...]
    state: dict[str, object]

    def __init__(self, *arguments: object) -> None:
        """Takes what `__new__` has kept."""

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}

    def append(self, item: object) -> None:
        """Ignore an item: the nodes of a parse tree are lists, and the text says the same."""

    def extend(self, items: object) -> None:
        """See `append`."""


class _Reader(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) in _SETS:
            return set
        if name in _NAMES.get(module, ()) or (module in _WHOLE_MODULES and name.isidentifier()):
            return Inert
        raise PickleError(f"it names {module}.{name}, which no queue of python-slimta has")


def load(raw: bytes) -> object:
    """Load numbers, texts, containers and `Inert` objects. Raises PickleError.

    Texts of Python 2 are UTF-8, with the bytes that are not as surrogates.
    """
    try:
        return _Reader(io.BytesIO(raw), encoding="utf-8", errors="surrogateescape").load()
    except PickleError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise PickleError(f"it is no whole pickle: {type(error).__name__}") from error


def octets(text: object) -> bytes:
    """Raises PickleError when it is no text."""
    if isinstance(text, bytes):
        return text
    if isinstance(text, str):
        return text.encode("utf-8", "surrogateescape")
    raise PickleError("it has something else where a text belongs")


def header(message: object) -> bytes:
    """Return the header of an `email.message.Message`, with an empty line behind it. Raises PickleError."""
    fields = message.state.get("_headers") if isinstance(message, Inert) else None
    if not isinstance(fields, list):
        raise PickleError("it has no header")
    lines = []
    for field in fields:
        if not (isinstance(field, tuple) and len(field) == 2):
            raise PickleError("it has a header field that is none")
        name, value = field
        if isinstance(value, Inert) and len(value.arguments) > 2:
            value = value.arguments[2]  # how email pickles a field that a program has set
        shown = octets(name).decode("ascii", "replace")
        if not _FIELD_NAME.fullmatch(shown):
            raise PickleError(f"it has a header field named {shown!r}")
        text = octets(value).decode("utf-8", "surrogateescape").rstrip("\r\n")
        lines.append(f"{shown}: {_FOLD.sub(chr(10) + ' ', text)}\n".encode("utf-8", "surrogateescape"))
    return b"".join(lines) + b"\n"
