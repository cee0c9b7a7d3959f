"""The operations of the HTTP API: those in `operations.catalogue` that have an HTTP path.

The fields of a request become parameters (GET, with nested structs flattened) or a JSON body (POST), which
are validated before the relay is called. The answer is one JSON document, or lines of JSON if the client
accepts those. The body of a message is returned as the message itself, and events are sent as server-sent
events. Only operations that the HTTP process answers without the relay have their own function here.
`openapi` describes the verbs; `routes` serves them.
"""

import re
import tomllib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from zonerelay.admin.operators import Operators
from zonerelay.admin.requests import BEAT, EVENT_STREAM, events, stream
from zonerelay.config import toml_text
from zonerelay.config.credentials.identities import Scope, Token
from zonerelay.config.problems import Report
from zonerelay.control import history
from zonerelay.operations import answers, catalogue, requests
from zonerelay.operations.errors import ControlError, InvalidError, NotFoundError
from zonerelay.operations.operation import Operation, ResponseKind, option_of
from zonerelay.process.threads import OPERATORS
from zonerelay.telemetry.logs.redact import UnsearchableError

JSON = "application/json"
LINES = "application/x-ndjson"
MESSAGE = "message/rfc822"
HEARTBEAT = 1.0
"""Seconds after which a quiet stream of lines sends a sign of life."""

F = TypeVar("F")


class NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query parameters of an HTTP operation that has none."""


class ApiCall(msgspec.Struct, frozen=True):
    """A validated request to the HTTP API. `parameters` and `body` are instances of the verb's structs;
    `path` has the path segments. `caller` is the name of the client in logs. With `lines`, the client accepts
    newline-delimited JSON.
    """

    operators: Operators
    token: Token
    caller: str
    request: web.Request
    path: Mapping[str, str]
    parameters: Any
    body: Any
    lines: bool = False

    async def one(self, request: requests.Request, answer: type[F]) -> F:
        """Send a request to the relay, and return its response, which is a single frame. Raise ControlError
        on failure.
        """
        return await self.operators.asking.one(request, answer, self.caller)

    def asked(self, request: requests.Request) -> catalogue.OperationCall:
        clear = self.token.scope == "operate"
        return catalogue.OperationCall(request=request, caller=self.caller, clear=clear)

    def admitted(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that cancels its block when the caller's token becomes invalid. Peers of
        the control socket have no token.
        """
        if not self.token.sha256:
            return nullcontext()
        return self.operators.one_more(self.token, lambda: self.operators.is_valid(self.token))


Answer = msgspec.Struct | dict[str, object] | web.StreamResponse
Run = Callable[[ApiCall], Awaitable[Answer]]


class Verb(msgspec.Struct, frozen=True, kw_only=True):
    """A method and path of the HTTP API, and the function that handles them. `operation` is the operation
    that it is built from, if there is one.
    """

    method: str
    path: str
    scope: Scope
    summary: str
    run: Run
    answer: object
    parameters: type[msgspec.Struct] = NoParameters
    body: type[msgspec.Struct] | None = None
    media: str = JSON
    also: Scope | None = None
    """Another scope that is sufficient."""
    streams: Mapping[str, object] | None = None
    """The media types of a body that `run` reads itself as a stream, with their types for the description."""
    success: int = 200
    audited: bool = False
    """Whether the access is logged here. Changes, suspensions and message bodies have their own events."""
    operation: Operation | None = None
    name: str = ""
    """Its name in the description, if that of method and path is one that generators make of another's."""


# --- requests -------------------------------------------------------------------------------------------


def _is_nested(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _struct(operation: Operation, end: str, *, flat: bool) -> type[msgspec.Struct]:
    """Create a struct type with the fields that clients can set in an operation's HTTP request. With `flat`,
    those of nested structs replace the structs.
    """
    in_path, fields_of = re.findall(r"{(\w+)}", operation.path), msgspec.structs.fields
    fields = [
        (each.name, each.type, msgspec.field(default=each.default))
        for outer in fields_of(operation.request)
        for each in (fields_of(outer.type) if flat and _is_nested(outer.type) else [outer])
        if each.name not in in_path and (_is_nested(each.type) or option_of(each.type))
    ]
    name = f"{operation.request.__name__}{end}"
    return msgspec.defstruct(
        name, fields, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
    )


def _request_of(operation: Operation, call: ApiCall) -> requests.Request:
    source = call.parameters if call.body is None else call.body
    given: dict[str, Any] = {**call.path, **msgspec.structs.asdict(source)}
    for field in msgspec.structs.fields(operation.request):
        if _is_nested(field.type) and field.name not in given:
            given[field.name] = field.type(**{each: given.pop(each) for each in field.type.__struct_fields__})
    found: requests.Request = operation.request(**given)  # type: ignore[assignment]
    return found


# --- answers --------------------------------------------------------------------------------------------


def _document(operation: Operation) -> Any:
    """Return the type of an operation's JSON response."""
    reply, wrapped = operation.reply, operation.wrapped
    if not wrapped:
        return reply
    if operation.shape is ResponseKind.ROWS:
        fields: list[Any] = [(wrapped, tuple[reply, ...]), ("more", bool, False)]  # type: ignore[valid-type]
        if "cursor" in operation.request.__struct_fields__:
            fields.append(("next", str | None, None))
    else:
        fields = [(wrapped, reply)]
    fields.append(("missing", tuple[str, ...], ()))
    return msgspec.defstruct(
        f"{operation.request.__name__}Answer",
        fields,
        frozen=True,
        kw_only=True,
        tag_field="kind" if operation.preview else None,
        tag="done" if operation.preview else None,
    )


def _run(operation: Operation, document: Any) -> Run:
    """Return the function that handles the HTTP requests for an operation."""
    by_itself = _ALONE.get(operation.request)

    async def run(call: ApiCall) -> Answer:
        request = _request_of(operation, call)
        if by_itself is not None:
            return await by_itself[0](call, request)
        is_live, fields = operation.shape is ResponseKind.STREAM, {"Content-Type": EVENT_STREAM}
        if is_live and not call.lines and call.request.method == "HEAD":
            return web.Response(headers=fields)
        if is_live or call.lines:
            beat, written = BEAT, events(_event)
            if call.lines:
                beat, written, fields = HEARTBEAT, answers.encode, {"Content-Type": LINES}
            batches = call.operators.asking.batches(call.asked(request), beat=beat)
            admitted = call.admitted() if is_live else nullcontext()
            return await stream(call.request, batches, written, admitted, fields)
        if operation.shape is ResponseKind.BODY:
            return await _body(call, request)
        try:
            return await _whole(operation, document, call, request)
        except NotFoundError:
            if isinstance(request, requests.QueueShow):
                await _tell_history(call, request.message_id)
            raise

    return run


async def _whole(operation: Operation, document: Any, call: ApiCall, request: requests.Request) -> Answer:
    limit = getattr(request, "limit", 1)
    if not 0 < limit <= requests.MAX_PAGE:
        raise InvalidError(f"a page must have 1 to {requests.MAX_PAGE} rows", pointer="/limit")
    reply: Any = answers.Count if getattr(request, "dry_run", False) else operation.reply
    rows, end = await call.operators.asking.all(request, reply, call.caller)
    if operation.shape is ResponseKind.ROWS:
        more = {"next": end.next or None} if "next" in document.__struct_fields__ else {}
        return document(**{operation.wrapped: rows}, more=end.more, missing=end.missing, **more)  # type: ignore[no-any-return]
    if isinstance(rows[-1], answers.Count):
        return msgspec.structs.replace(rows[-1], missing=end.missing)
    if operation.wrapped:
        return document(**{operation.wrapped: rows[-1]}, missing=end.missing)  # type: ignore[no-any-return]
    row: msgspec.Struct = rows[-1]
    return row


async def _body(call: ApiCall, request: requests.Request) -> Answer:
    message_id = call.path["message_id"]
    fields = {
        "Content-Type": MESSAGE,
        "Content-Disposition": f'attachment; filename="{message_id}.eml"',
        "Content-Security-Policy": "sandbox",
    }
    if call.request.method == "HEAD":  # reads no body, so there is nothing to audit
        await call.one(requests.QueueShow(message_id=message_id), answers.MessageDetail)
        return web.Response(headers=fields)
    response = web.StreamResponse(headers=fields)
    try:
        async with aclosing(call.operators.asking.frames(call.asked(request))) as frames:
            async for frame in frames:
                if isinstance(frame, answers.MessageBody):
                    await response.prepare(call.request)
                elif isinstance(frame, answers.BodyPiece):
                    await response.write(frame.octets)
    except ControlError:
        if not response.prepared:
            raise
        if call.request.transport is not None:  # only a connection that breaks shows that the rest is missing
            call.request.transport.abort()
    return response


def _event(frame: answers.Frame) -> bytes:
    kind = str(frame.__struct_config__.tag).encode("ascii")
    return b"event: %b\ndata: %b\n\n" % (kind, msgspec.json.encode(frame))


# --- operations that the HTTP process answers without the relay ------------------------------------------


async def _tell_history(call: ApiCall, message_id: str) -> None:
    """Raise NotFoundError with the outcome of a message, if the history contains one."""
    if outcome := await history.ask(call.operators.history().became, message_id):
        raise NotFoundError(f"{outcome}; GET /v1/history/{message_id} returns its time line")


async def _find(call: ApiCall, request: requests.HistoryFind) -> history.SearchResult:
    relay = call.operators.addresses if call.token.may("operate") else None
    try:
        return await call.operators.history().found(request, relay=relay)
    except UnsearchableError as error:
        raise InvalidError(str(error)) from error


async def _time_line(call: ApiCall, request: requests.HistoryShow) -> history.Timeline:
    asked, message_id, relay = call.operators.history(), request.message_id, call.operators.addresses
    # The relay stores the last events before it reports that it has no such message.
    known = await relay([requests.QueueShow(message_id=message_id)])
    if call.token.may("operate"):
        return await asked.line(message_id, known, relay)
    return await asked.line(message_id)


async def _config(call: ApiCall, request: requests.ConfigShow) -> dict[str, object]:
    shown = {"effective": toml_text.effective, "changed": toml_text.changed}.get(request.which)
    settings = call.operators.settings()
    return tomllib.loads(
        await (OPERATORS.run(shown, settings, Report()) if shown else OPERATORS.run(toml_text.defaults))
    )


_ALONE: dict[type[msgspec.Struct], tuple[Callable[[ApiCall, Any], Awaitable[Answer]], Any]] = {
    requests.HistoryFind: (_find, history.SearchResult),
    requests.HistoryShow: (_time_line, history.Timeline),
    requests.ConfigShow: (_config, dict[str, Any]),
}
"""Functions, and the types that they return."""


def _verb(operation: Operation) -> Verb:
    is_get = operation.method == "GET"
    alone = _ALONE.get(operation.request)
    document = _document(operation)
    answer: Any = document if alone is None else alone[1]
    if operation.preview:
        answer = document | answers.Count
    media = {ResponseKind.STREAM: EVENT_STREAM, ResponseKind.BODY: MESSAGE}.get(operation.shape, JSON)
    return Verb(
        method=operation.method,
        path=operation.path,
        scope=operation.scope,
        summary=f"{operation.help}.",
        run=_run(operation, document),
        answer=None if operation.shape is ResponseKind.BODY else answer,
        parameters=_struct(operation, "Query", flat=True) if is_get else NoParameters,
        body=None if is_get else _struct(operation, "Body", flat=False),
        media=media,
        audited=operation.audited,
        operation=operation,
    )


VERBS = tuple(_verb(each) for each in catalogue.OPERATIONS if each.path)
