"""Error responses as `application/problem+json` (RFC 9457). Their `code` is part of the public interface."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from aiohttp import web

from zonerelay.operations.errors import ControlError, ErrorKind

TYPE = "application/problem+json"

Code = Literal[
    "clear_text",
    "unauthorized",
    "too_many_failures",
    "unavailable",
    "forbidden",
    "not_found",
    "method_not_allowed",
    "not_acceptable",
    "unsupported_media_type",
    "too_large",
    "too_slow",
    "malformed",
    "invalid",
    "not_possible",
    "busy",
    "refused",
    "too_many",
    "unexpected",
]


class FieldError(msgspec.Struct, frozen=True, kw_only=True):
    """An error in one field of a request. `pointer` is a JSON pointer into the body, or the name of a
    parameter after a slash.
    """

    pointer: str
    detail: str


class ProblemBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The JSON body of an error response (RFC 9457). `code` is stable, so programs can compare it; `detail`
    is a human-readable message.
    """

    title: str
    status: int
    code: Code
    detail: str
    type: str = "about:blank"
    errors: Sequence[FieldError] = ()
    smtp_reply: str = ""
    """The reply that an SMTP client would have received."""


class ApiError(Exception):
    """An exception that holds the error response to a request. `fields` are those of its header."""

    def __init__(
        self,
        status: int,
        code: Code,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        fields: Mapping[str, str] | None = None,
        smtp_reply: str = "",
    ) -> None:
        super().__init__(detail)
        self.body = ProblemBody(
            title=HTTPStatus(status).phrase,
            status=status,
            code=code,
            detail=detail,
            errors=tuple(errors),
            smtp_reply=smtp_reply,
        )
        self.status, self.fields = status, dict(fields or {})

    def response(self) -> web.Response:
        body = msgspec.json.encode(self.body) + b"\n"
        headers = {"Content-Type": TYPE, **self.fields}
        return web.Response(status=self.status, body=body, headers=headers)


def not_allowed(allowed: Sequence[str]) -> ApiError:
    fields = {"Allow": ", ".join(allowed)}
    return ApiError(405, "method_not_allowed", f"allowed methods: {', '.join(allowed)}", fields=fields)


_NAMES = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_SEGMENT = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_MEMBER = re.compile(r"field `(\w+)`\Z")


def pointer_to(*names: str) -> str:
    """Return the JSON pointer (RFC 6901) to a member of a document."""
    return "".join(f"/{each.replace('~', '~0').replace('/', '~1')}" for each in names)


def texts_in(value: object, pointer: str = "") -> Iterator[tuple[str, str]]:
    """Yield each string in a JSON document with its JSON pointer."""
    if isinstance(value, str):
        yield pointer, value
    elif isinstance(value, dict | list | tuple):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from texts_in(each, pointer + pointer_to(str(name)))


def decoded(data: bytes | bytearray, of: Any, what: str) -> Any:
    """Decode a JSON document as a value of this type. Raise ApiError if it is invalid, or if a member occurs
    twice, because readers would use different ones.
    """
    try:
        try:
            found = msgspec.json.decode(data, type=of)
        except msgspec.ValidationError as error:
            raise invalid(error, what, msgspec.json.decode(data), of) from error
        if pointer := _twice_in(_MEMBERS.decode(data.decode())):
            raise wrong(pointer, f"the member {pointer.rpartition('/')[2]} appears twice")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error) from error
    return found


_MEMBERS = json.JSONDecoder(object_pairs_hook=list, parse_int=len, parse_float=len)


def _twice_in(value: list[Any], *above: str) -> str:
    """Return the JSON pointer to a member that occurs twice in an object, or "" if there is none. Objects are
    lists of pairs here.
    """
    if not value:
        return ""
    is_object = isinstance(value[0], tuple)
    if is_object and len(dict(value)) < len(value):
        [(name, _)] = Counter(name for name, _ in value).most_common(1)
        return pointer_to(*above, name)
    for name, each in value if is_object else enumerate(value):
        if isinstance(each, list) and (found := _twice_in(each, *above, str(name))):
            return found
    return ""


def malformed(error: Exception) -> ApiError:
    return ApiError(400, "malformed", f"the body is not valid JSON: {error}")


def invalid(
    error: msgspec.ValidationError, what: str, data: Any, of: Any, *, strict: bool = True
) -> ApiError:
    """Return the error response for a request body or parameters (`what`) that do not match their schema. It
    names the member of `data`, and the JSON names of types.
    """
    text, _, path = str(error).partition(" - at `$")
    names: list[str] = []
    node = data
    for member, place in _SEGMENT.findall(path.rstrip("`")):
        name = member or place
        if place == "..." and isinstance(node, dict):
            name = _culprit(data, node, of, strict=strict)
        elif place == "...":
            break
        names.append(name)
        try:
            node = node[int(name)] if place and place != "..." else node[name]
        except (LookupError, TypeError):
            node = None
    if member := _MEMBER.search(text):
        names.append(member[1])
    text = re.sub(r"`([^`]*)`", lambda found: _in_words(found[1]), text)
    pointer = pointer_to(*names)
    return ApiError(
        422, "invalid", f"{pointer or what}: {text}", errors=[FieldError(pointer=pointer, detail=text)]
    )


def _in_words(types: str) -> str:
    return " or ".join(_NAMES.get(each, each) for each in types.split(" | "))


def _culprit(data: Any, node: dict[str, Any], of: Any, *, strict: bool) -> str:
    """Return the name of the first member with an invalid value in this object, which is a part of `data`."""
    whole = dict(node)
    names = list(node)
    while len(names) > 1:
        half = names[: len(names) // 2]
        node.clear()
        node.update({name: whole[name] for name in half})
        try:
            msgspec.convert(data, of, strict=strict)
        except msgspec.ValidationError:
            names = half
        else:
            names = names[len(half) :]
    node.clear()
    node.update(whole)
    return names[0]


def wrong(pointer: str, detail: str) -> ApiError:
    return ApiError(422, "invalid", detail, errors=[FieldError(pointer=pointer, detail=detail)])


def too_large(detail: str, pointer: str = "") -> ApiError:
    errors = [FieldError(pointer=pointer, detail=detail)] if pointer else []
    return ApiError(413, "too_large", detail, errors=errors)


_STATUSES = {
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.NOT_POSSIBLE: 409,
    ErrorKind.INVALID: 422,
    ErrorKind.BUSY: 503,
    ErrorKind.UNAVAILABLE: 503,
    ErrorKind.FORBIDDEN: 403,
    ErrorKind.UNEXPECTED: 500,
}


def problem_of(error: ControlError) -> ApiError:
    errors = [FieldError(pointer=error.pointer, detail=str(error))] if error.pointer else []
    fields = {"Retry-After": "5"} if error.kind is ErrorKind.BUSY else {}
    return ApiError(_STATUSES[error.kind], error.kind.value, str(error), errors=errors, fields=fields)
