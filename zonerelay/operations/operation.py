"""The description of an operation: what all sides read of one thing that an operator can ask or do.

The worker's handler, the supervisor's merge, HTTP with its OpenAPI document, the page's forms and the command
line are made from these values (`catalogue`). The module has no I/O and imports nothing heavy.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

Scope = Literal["read", "operate", "submit"]


class Unit(enum.Enum):
    """How a person writes the value of an option, where the field of the request has another form."""

    DURATION = "duration"
    """ "2h" is 7200.0 seconds."""
    AGO = "ago"
    """ "2h" is the Unix time two hours ago."""
    TIME = "time"
    """ "+2h", "23:30" or an ISO 8601 time is a Unix time to come."""
    SIZE = "size"
    """ "10 MB" is a number of bytes."""
    MESSAGE_ID = "message id"
    """16 hexadecimal digits."""
    IP = "ip"
    """An IPv4 or IPv6 address."""
    FINGERPRINT = "fingerprint"
    """SHA-256, with or without colons, in any case."""
    HEADER = "header"
    """ "Name: value" is a name and a value; may be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A field of a request as people give it.

    `flag` is its option on the command line, "" for none; a `positional` field is an argument without a flag.
    `word` is its word in the text form of a filter, as in `from:@example.com`.
    """

    flag: str = ""
    metavar: str = ""
    unit: Unit | None = None
    word: str = ""
    positional: bool = False


def option(
    text: str,
    flag: str = "",
    *,
    metavar: str = "",
    unit: Unit | None = None,
    word: str = "",
    positional: bool = False,
    **constraints: Any,
) -> msgspec.Meta:
    """Return the annotation of a field: its help, how people give it, and what msgspec checks.

    The help is also the description in OpenAPI. A constraint belongs to a plain type; where the field may
    also be `None`, annotate the type inside the union for it.
    """
    of = Option(flag=flag, metavar=metavar, unit=unit, word=word, positional=positional)
    return msgspec.Meta(description=text, extra={"option": of}, **constraints)


@dataclass(frozen=True, slots=True)
class Described:
    """A field of a request that people give. `required` fields have no default. `choices` are its only
    values.

    `within` is the field of the request whose struct has it, as `filter` of `QueueList`; "" is the request
    itself.
    """

    name: str
    help: str
    option: Option
    type: Any
    default: Any
    required: bool
    choices: tuple[str, ...]
    within: str


@cache
def fields_of(request: type[msgspec.Struct], within: str = "") -> tuple[Described, ...]:
    """Return the fields of a request that people give, those of structs inside it in their place."""
    found: list[Described] = []
    hints = get_type_hints(request, include_extras=True)
    for field in msgspec.structs.fields(request):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            found += fields_of(hint, field.name)
            continue
        meta = _option_meta(hint)
        if meta is None:
            continue
        default = None if field.default is msgspec.NODEFAULT else field.default
        found.append(
            Described(
                field.name,
                meta.description or "",
                (meta.extra or {})["option"],
                get_args(hint)[0],
                default,
                field.required,
                _choices(hint),
                within,
            )
        )
    return tuple(found)


def _option_meta(hint: Any) -> msgspec.Meta | None:
    metas = hint.__metadata__ if get_origin(hint) is Annotated else ()
    return next((each for each in metas if "option" in (each.extra or {})), None)


def _choices(hint: Any) -> tuple[str, ...]:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return tuple(str(each.value) for each in hint)
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    if get_origin(hint) is Annotated:
        return _choices(get_args(hint)[0])
    return tuple(choice for part in get_args(hint) for choice in _choices(part))


class Shape(enum.Enum):
    """What an answer consists of, before its `End`."""

    ONE = "one"
    """One frame."""
    ROWS = "rows"
    """Any number of frames of one kind, perhaps a page of them."""
    STREAM = "stream"
    """Frames as things happen, until the client leaves."""
    BODY = "body"
    """One frame about a message, and then its bytes."""


class How(enum.Enum):
    """Who answers where the relay has several workers, and how one answer is made of theirs."""

    ALONE = "alone"
    """The process that the client has reached answers by itself."""
    FIRST_FOUND = "first-found"
    """The one worker that has what is asked for; the one that the message id names is asked first."""
    IN_ORDER = "in-order"
    """All, row by row in the order of `key`."""
    SUM = "sum"
    """All; frames with the same `key` become one, whose fields are added up or chosen."""
    LIVE = "live"
    """All, as it happens; each frame has the number of its worker."""
    CUSTOM = "custom"
    """A function of `supervisor/merge`."""
    WORKER = "worker"
    """Only one worker is asked, and by its supervisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """`add`, `most`, `least` and `worst` name the fields of frames to add up or to choose; the worst member
    of an enum is its last one. `key` names the fields that frames have in common. `order` is the place of a
    row in the answer to a request. `of_queue`: of a shared queue one worker is asked, because each sees all
    of it.
    """

    how: How
    key: str = ""
    order: Callable[[Any, Any], Any] | None = None
    add: str = ""
    most: str = ""
    least: str = ""
    worst: str = ""
    of_queue: bool = False


FIRST_FOUND = Merge(how=How.FIRST_FOUND)
CUSTOM = Merge(how=How.CUSTOM)
ALONE = Merge(how=How.ALONE)
LIVE = Merge(how=How.LIVE)
WORKER = Merge(how=How.WORKER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing that operators can ask or do.

    `path` has the names of fields in braces. `http_absent` and `command_absent` are the reasons for having
    none. `reply` is the frame that answers, `None` where the process answers by itself from what only it
    knows. `wrapped` is the member of the JSON document that has the frame or the rows; "" is the document
    itself. `completes`: it runs to its end although the client has left. `preview`: `dry_run` counts and
    changes nothing. `audited`: the log reports each request by name; changes, suspensions and bodies have
    events of their own. `flags` are other flags for this command, by the name of the field.
    Just one of the fields `one_of` is given.
    """

    request: type[msgspec.Struct]
    reply: type[msgspec.Struct] | None
    shape: Shape
    help: str
    merge: Merge
    scope: Scope = "read"
    method: str = ""
    path: str = ""
    http_absent: str = ""
    command: str = ""
    command_absent: str = ""
    wrapped: str = ""
    completes: bool = False
    preview: bool = False
    undoable: bool = False
    audited: bool = False
    flags: Mapping[str, str] | None = None
    one_of: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.request.__struct_config__.tag)
