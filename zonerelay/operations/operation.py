"""Defines the types that describe an operation: its options, its responses, and how responses are merged.

The worker's handler, the supervisor's merge, HTTP with its OpenAPI document, the forms of the page and the
command line are derived from these values (see `catalogue`). The module does no I/O and imports nothing
heavy.
"""

import enum
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

Scope = Literal["read", "operate", "submit"]


class Unit(enum.Enum):
    """The notation of an option's value on the command line, if it differs from that of the request field."""

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


class OperationOption(msgspec.Struct, frozen=True):
    """How a request field is set on the command line.

    `flag` is its option on the command line, or "" if it has none; a `positional` field is an argument
    without a flag. `word` is its name in the text form of a filter, as in `from:@example.com`.
    """

    flag: str
    metavar: str
    positional: bool
    unit: Unit | None
    word: str


def option(
    text: str, usage: str = "", unit: Unit | None = None, *, word: str = "", **constraints: Any
) -> msgspec.Meta:
    """Return the annotation of a request field that users can set: its help, its notation, and the
    constraints that msgspec checks. The help is also the description in OpenAPI.

    `usage` is what help shows for it, such as "--zone ZONE", "--exact" or "ADDRESS"; "" means that it is not
    on the command line. `word` is the name of the flag unless it is given. A constraint belongs to a plain
    type; if the field may also be `None`, annotate the type inside the union.
    """
    first, _, metavar = usage.partition(" ")
    is_flag = first.startswith("--")
    of = OperationOption(
        first if is_flag else "",
        metavar if is_flag else first,
        bool(usage) and not is_flag,
        unit,
        word or first.removeprefix("--"),
    )
    return msgspec.Meta(description=text, extra={"option": of}, **constraints)


class FieldDescription(msgspec.Struct, frozen=True):
    """The description of a request field that users can set. A `required` field has no default. `choices` are
    the only values allowed.

    `within` is the field of the request whose struct contains this one, such as `filter` in `QueueList`; ""
    is the request itself.
    """

    name: str
    help: str
    option: OperationOption
    type: Any
    default: Any
    required: bool
    choices: tuple[str, ...]
    within: str


@cache
def fields_of(request: type[msgspec.Struct], within: str = "") -> tuple[FieldDescription, ...]:
    """Return the fields of a request that users can set, including those of nested structs."""
    found: list[FieldDescription] = []
    for each in msgspec.structs.fields(request):
        hint = each.type
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            found += fields_of(hint, each.name)
            continue
        meta = option_of(hint)
        if meta is None:
            continue
        default = None if each.default is msgspec.NODEFAULT else each.default
        found.append(
            FieldDescription(
                each.name,
                meta.description or "",
                (meta.extra or {})["option"],
                get_args(hint)[0],
                default,
                each.required,
                _choices(hint),
                within,
            )
        )
    return tuple(found)


def option_of(hint: Any) -> msgspec.Meta | None:
    """Return the `option` annotation of a field, or None if users cannot set the field."""
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


class ResponseKind(enum.Enum):
    """The kind of frames in a response before its `EndFrame`."""

    ONE = "one"
    """One frame."""
    ROWS = "rows"
    """Any number of frames of one kind, perhaps a page of them."""
    STREAM = "stream"
    """Frames as things happen, until the client leaves."""
    BODY = "body"
    """One frame about a message, and then its bytes."""


class MergeRule(enum.Enum):
    """Which workers answer a request, and how their responses are merged."""

    ALONE = "alone"
    """The process that the client has reached answers by itself."""
    FIRST_FOUND = "first-found"
    """The one worker that has what is asked for; the one that the message id names is asked first."""
    IN_ORDER = "in-order"
    """All, row by row in their `order`."""
    SUM = "sum"
    """All; frames with the same `key` become one, whose fields are added up or chosen, or which a function of
    `supervisor/merge` makes.
    """
    LIVE = "live"
    """All, as it happens; each frame has the number of its worker."""
    WORKER = "worker"
    """Only one worker is asked, and by its supervisor."""


class Merge(msgspec.Struct, frozen=True, kw_only=True):
    """The rule by which a supervisor merges the responses of its workers.

    `key` names the fields by which frames belong together. Their fields in `add`, `most` and `least` are
    added up or chosen, `first` takes the first value that is not empty, and `join` joins different texts or
    tuples. All other fields are those of the first frame, or of the one with the greatest value of `worst`;
    the worst member of an enum is its last one. `rows` has the rules of fields that are rows themselves.
    `order` returns the sort key of a row, and `limit` names the field of the request that limits the rows.

    With `of_queue`, only one worker is queried if the queue is shared, because each worker sees all of it.
    With `in_turn`, one worker is queried after the other, `shared`: if the queue is.
    """

    how: MergeRule = MergeRule.SUM
    key: str = ""
    order: Callable[[Any, Any], Any] | None = None
    add: str = ""
    most: str = ""
    least: str = ""
    first: str = ""
    join: str = ""
    worst: str = ""
    rows: "Mapping[str, Merge]" = msgspec.field(default_factory=dict)
    limit: str = "limit"
    of_queue: bool = False
    in_turn: Literal["never", "shared", "always"] = "never"


FIRST_FOUND = Merge(how=MergeRule.FIRST_FOUND)
ALONE = Merge(how=MergeRule.ALONE)
LIVE = Merge(how=MergeRule.LIVE)


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of an operation that operators can request.

    `path` is its HTTP path, with the names of fields in braces. `called` is its command, if it differs from
    its name; "" means that it has none, as for `path`. `reply` is the frame that answers, or `None` if the
    process answers by itself from its own state. `wrapped` is the member of the JSON document that contains
    the frame or the rows; "" is the document itself. `completes` means that the operation runs to its end
    even if the client disconnects. `preview` means that `dry_run` counts and changes nothing. `audited` means
    that each request is logged by name; changes, suspensions and reads of bodies have events of their own.
    `flags` maps names of fields to flags that only this command uses. Exactly one of the fields in `one_of`
    must be given.
    """

    request: type[msgspec.Struct]
    reply: type[msgspec.Struct] | None = None
    shape: ResponseKind = ResponseKind.ONE
    merge: Merge
    scope: Scope = "read"
    method: str = "GET"
    path: str = ""
    called: str | None = None
    wrapped: str = ""
    completes: bool = False
    preview: bool = False
    audited: bool = False
    flags: Mapping[str, str] | None = None
    one_of: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.request.__struct_config__.tag)

    @property
    def help(self) -> str:
        return " ".join((self.request.__doc__ or "").split()).partition(". ")[0].removesuffix(".")

    @property
    def command(self) -> str:
        return self.name.replace("-", " ", 1) if self.called is None else self.called
