"""HTTP handlers for submitting, querying and cancelling messages, and the ZoneMTA-compatible ones.

Promises: the response 202 is sent after the synced commit of a worker. A refused request leaves nothing
behind. `body` limits the memory of a request body. `MAX_AT_ONCE` bodies are read at the same time,
`MAX_OF_ONE` of them for one user.
"""

import asyncio
import contextlib
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec.structs import replace

from zonerelay.admin import problems
from zonerelay.admin.api.verbs import Answer, ApiCall, Verb
from zonerelay.admin.problems import ApiError, Code, too_large, wrong
from zonerelay.admin.requests import VISIT, media_type
from zonerelay.admin.submission import drafts, zonemta
from zonerelay.admin.submission.body import LONG, WRITE, JsonBody
from zonerelay.admin.submission.drafts import Submission, SubmissionOrigin
from zonerelay.admin.submission.states import (
    MessageList,
    MessageSearch,
    MessageState,
    RecipientState,
    detail_of,
    list_of,
    state_of,
)
from zonerelay.inbound.cleanup.intake import is_key, key_in
from zonerelay.inbound.cleanup.submit import Pieces, Principal, Rejection, SubmitCall, SubmitOptions
from zonerelay.inbound.refusal import Reason
from zonerelay.message.compose import AttachedFile, Base64Error, Draft, compose_pieces
from zonerelay.message.header import HeaderScanner, HeaderTooLargeError, all_fields
from zonerelay.model.address_list import read_addresses, recipient_fields
from zonerelay.model.envelope import NULL_SENDER, BodyType, Mailbox, recipient_key
from zonerelay.operations.answers import ChangeResult
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import Drop, Filter
from zonerelay.outbox.drafts import MAX_FILES, BadRowError, mailbox
from zonerelay.process.threads import BODIES
from zonerelay.smtp.server.params import MailCommand

MAX_AT_ONCE, MAX_OF_ONE = 32, 24
SILENCE = 30.0
"""Seconds without data after which a client is too slow."""
MAX_BATCH = 500
SIDE_BY_SIDE = 64
"""Messages of a batch that are submitted at the same time."""
SLACK = 1024 * 1024
SMALL = 8 * 1024
"""Bytes of JSON or of a header that the event loop parses, in a few milliseconds. Larger ones are parsed in a
thread.
"""

_JSON, _MESSAGE, _FORM = "application/json", "message/rfc822", "multipart/form-data"
T = TypeVar("T")
_BARE_LF = re.compile(rb"(?<!\r)\n")


class RawQuery(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"from_": "from"}
):
    """The envelope parameters of a message submitted as raw bytes. `to` may occur several times."""

    from_: str | None = None
    to: str = ""
    partial: bool = False
    require_tls: bool = False


FORM = Annotated[
    dict[str, Any],
    msgspec.Meta(
        description="The part `message` is the message as JSON; `attachment` and `inline` are files. "
        "HTML shows an inline file by its name, as `cid:NAME`."
    ),
]
"""The type of a form in the description. openapi-generator imports a named one and does not make it."""


class AcceptedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The response to the submission of a message that was accepted. `id` is the relay's id, and `message_id`
    is the header field of the message.
    """

    id: str
    message_id: str
    recipients: tuple[RecipientState, ...]


class Cancellation(msgspec.Struct, frozen=True, kw_only=True):
    """The number of deliveries that were cancelled, and of those that were already in progress."""

    withdrawn: int
    in_flight: int


class MessageBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to submit several messages. Each message has the fields of a submission, which override those
    of `template`, and `substitutions`: texts and numbers for the {{names}} in subject, text, html and
    headers.
    """

    messages: Annotated[tuple[dict[str, Any], ...], msgspec.Meta(min_length=1, max_length=MAX_BATCH)]
    template: dict[str, Any] = {}


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The response for one message of a batch: the HTTP status, and the accepted message or the problem."""

    status: int
    accepted: AcceptedMessage | None = None
    problem: problems.ProblemBody | None = None


class BatchAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """The responses for the messages of a batch, in their order."""

    messages: tuple[BatchAnswer, ...]


_reading = Counter[str]()
"""The number of bodies being read for each user, in this process."""


@contextlib.contextmanager
def _counted(call: ApiCall) -> Iterator[SubmissionOrigin]:
    """Count the request as one whose body is being received, unless its body is small and already complete.
    Raise ApiError if too many are being read.
    """
    content, origin = call.request.content, _origin(call)
    user = origin.user
    if content.is_eof() and content.total_bytes <= LONG:
        yield origin
        return
    if _reading.total() >= MAX_AT_ONCE or _reading[user] >= MAX_OF_ONE:
        text = "too many messages are being received; try again"
        raise ApiError(503, "busy", text, fields={"Retry-After": "1"})
    _reading[user] += 1
    try:
        yield origin
    finally:
        _reading[user] -= 1
        if not _reading[user]:
            del _reading[user]


def _origin(call: ApiCall) -> SubmissionOrigin:
    if not call.token.user:
        text = (
            f"the token {call.token.name} has no user; create one that has: zonerelay token add NAME "
            "--scope submit --user USER"
        )
        raise ApiError(403, "forbidden", text)
    key = call.request.headers.get("Idempotency-Key")
    if key is not None and not is_key(key):
        raise ApiError(400, "malformed", drafts.BAD_KEY)
    return SubmissionOrigin(
        user=call.token.user,
        client=VISIT.get().client,
        key=key or "",
        settings=call.operators.settings(),
        listener=call.operators.rules(),
    )


async def _pieces(call: ApiCall, origin: SubmissionOrigin) -> AsyncIterator[bytes]:
    read = BodyRead(origin)
    while piece := await read(call.request.content.readany()):
        yield piece


class BodyRead:
    """Reads from a request body, and limits the time that the client may take to send it. Raises ApiError if
    the client is too slow.
    """

    def __init__(self, origin: SubmissionOrigin) -> None:
        self._time = asyncio.get_running_loop().time
        self._end = self._time() + origin.listener.transaction_timeout

    async def __call__(self, coming: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(min(self._end, self._time() + SILENCE)):
                return await coming
        except TimeoutError:
            raise ApiError(408, "too_slow", "timed out waiting for the request body") from None


def _body_of(call: ApiCall, origin: SubmissionOrigin) -> contextlib.closing[JsonBody]:
    """Return a context manager that provides a parser for the request body, and closes it at the end. Raise
    ApiError if the body is too large.
    """
    limit = origin.listener.max_message_size * 4 // 3 * 78 // 76 + SLACK
    if (call.request.content_length or 0) > limit:
        raise too_large(f"the body exceeds {limit} bytes")
    return contextlib.closing(JsonBody(limit, origin.settings.spool.path))


def _unsupported(kind: str) -> ApiError:
    return ApiError(415, "unsupported_media_type", f"the media type {kind} is not supported")


@contextlib.contextmanager
def _problems_for(call: ApiCall) -> Iterator[None]:
    """Convert an error in receiving a body to an error response. Raise ApiError on failure."""
    try:
        yield
    except OSError as error:
        call.operators.events.error("submission", error)
        again = {"Retry-After": "60"}
        raise ApiError(503, "unavailable", "not enough free space to store the body", fields=again) from None


def _is_short(call: ApiCall) -> bool:
    """Return whether the body has at most `LONG` bytes and is not compressed."""
    length = call.request.content_length
    return length is not None and length <= LONG and "Content-Encoding" not in call.request.headers


async def _json(call: ApiCall, origin: SubmissionOrigin, body: JsonBody) -> bytes:
    """Read the whole body, and return its JSON document. Raise ApiError if it is too large or not JSON."""
    if (kind := media_type(call.request)) != _JSON:
        raise _unsupported(kind)
    if _is_short(call):  # no string in it is long
        if call.request.content.is_eof():
            return call.request.content.read_nowait()
        return b"".join([piece async for piece in _pieces(call, origin)])
    with _problems_for(call):
        async for piece in _pieces(call, origin):
            await _run(len(piece), body.feed, piece)
            if body.full:
                await BODIES.run(body.flush)
        if body.spills:
            await BODIES.run(body.flush)
    return body.finish()


async def _form(call: ApiCall, origin: SubmissionOrigin, body: JsonBody) -> tuple[bytes, list[AttachedFile]]:
    """Read a form with the part `message`, which is JSON, and files in parts `attachment` and `inline`."""
    read, uploads, found = BodyRead(origin), list[AttachedFile](), b""
    with _problems_for(call):
        async for name, file_name, part in _parts(call, read):
            if name == "message" and found:
                raise ApiError(422, "invalid", "the form has more than one part named message")
            if len(uploads) == MAX_FILES and name != "message":  # a chunked form has no other limit
                raise ApiError(422, "invalid", f"the form has more than {MAX_FILES} files")
            if name != "message":
                body.begin_file()
            async for piece in _octets(part, read):
                if name == "message":
                    await _run(len(piece), body.feed, piece)
                else:
                    body.add(piece)
                if body.full:
                    await BODIES.run(body.flush)
            if body.spills:
                await BODIES.run(body.flush)
            if name == "message":
                found = body.finish()
                continue
            kind = part.headers.get("Content-Type", "application/octet-stream")
            content_id = file_name if name == "inline" else ""  # HTML shows it as `cid:NAME`
            uploads.append(AttachedFile(file_name, kind, body.end_file(), content_id))
    if not found:
        raise wrong("/message", "the form has no part named message that contains the JSON of the message")
    return found, uploads


@contextlib.contextmanager
def _well_formed() -> Iterator[None]:
    """Convert errors of aiohttp's form parser to an error response. Raise ApiError on failure."""
    try:
        yield
    except (ValueError, LookupError, RuntimeError, AssertionError, HttpProcessingError) as error:
        raise ApiError(400, "malformed", f"the body is not valid multipart/form-data: {error}") from None


async def _parts(call: ApiCall, read: BodyRead) -> AsyncIterator[tuple[str, str, BodyPartReader]]:
    """Yield each part of a multipart form, with its field name and its file name."""
    with _well_formed():
        reader = await call.request.multipart()
    while True:
        with _well_formed():
            part = await read(reader.next())
        if part is None:
            return
        with _well_formed():  # names may be in any encoding (RFC 8187), even in an unknown one
            found = (part.name, part.filename or "") if isinstance(part, BodyPartReader) else (None, "")
            name, file_name = found
        if not isinstance(part, BodyPartReader) or name not in ("message", "attachment", "inline"):
            text = f"unknown part {name!r}; use message, attachment or inline"
            raise ApiError(422, "invalid", text)
        if "Content-Transfer-Encoding" in part.headers:
            raise ApiError(422, "invalid", f"the part {name} must not have a Content-Transfer-Encoding")
        yield name, file_name, part


async def _octets(part: BodyPartReader, read: BodyRead) -> AsyncIterator[bytes]:
    while True:
        with _well_formed():
            piece = await read(part.read_chunk(WRITE))
        if not piece:
            return
        yield piece


async def _run(size: int, work: Callable[..., T], /, *args: Any, **more: Any) -> T:
    """Call a function that processes `size` bytes, in a thread unless they are few. A megabyte of short
    strings takes a second.
    """
    return await BODIES.run(work, *args, **more) if size > SMALL else work(*args, **more)


async def _decoded(data: bytes, of: type[Any]) -> Any:
    """Decode the JSON body as a value of this type. Raise ApiError if it is invalid."""
    return await _run(len(data), problems.decoded, data, of, "the body")


def _converted(fields: dict[str, Any]) -> Submission:
    try:
        return msgspec.convert(fields, Submission)
    except msgspec.ValidationError as error:
        raise problems.invalid(error, "the message", fields, Submission) from error


async def _submit(call: ApiCall) -> Answer:
    kind = media_type(call.request)
    with _counted(call) as origin:
        if kind == _MESSAGE:
            return _accepted(await _take_raw(call, origin))
        with _body_of(call, origin) as body:
            uploads: Sequence[AttachedFile] = ()
            if kind == _FORM:
                data, uploads = await _form(call, origin, body)
            else:
                data = await _json(call, origin, body)
            given = await _decoded(data, Submission)
            return _accepted(await _take(call, origin, given, body, uploads, size=len(data)))


def _accepted(accepted: AcceptedMessage) -> web.Response:
    data = msgspec.json.encode(accepted) + b"\n"
    fields = {"Location": f"/v1/messages/{accepted.id}", "Content-Type": _JSON}
    return web.Response(status=202, body=data, headers=fields)


async def _take(
    call: ApiCall,
    origin: SubmissionOrigin,
    given: Submission,
    body: JsonBody,
    uploads: Sequence[AttachedFile] = (),
    *,
    size: int,
) -> AcceptedMessage:
    """Validate, compose and submit a message. `size` is the size of the JSON: large messages are checked and
    composed in a thread.
    """
    now = call.operators.clock.now()
    large = size > SMALL or body.spills or bool(uploads)
    sending = await _run(SMALL + 1 if large else 0, drafts.sending_of, given, body, origin, now, uploads)
    assert sending.draft is not None
    pieces = _composed_in_thread(sending.draft) if large else tuple(_composed(sending.draft))
    return await _submitted_as(call, origin, sending, pieces)


def _composed(draft: Draft) -> Iterator[bytes]:
    """Yield the composed message in chunks. Raise ApiError if an attachment is invalid."""
    try:
        yield from compose_pieces(draft)
    except msgspec.DecodeError as error:
        raise problems.malformed(error) from None
    except Base64Error as error:
        pointer = re.sub(r"attachments\[(\d+)\].*", r"/attachments/\1/content", str(error))
        raise wrong(pointer, str(error)) from None


async def _composed_in_thread(draft: Draft) -> AsyncIterator[bytes]:
    """Yield a large message in chunks, each of which is composed in a thread."""
    pieces = _composed(draft)
    while (piece := await BODIES.run(next, pieces, None)) is not None:
        yield piece


async def _submitted_as(
    call: ApiCall, origin: SubmissionOrigin, sending: drafts.ValidatedMessage, pieces: Pieces
) -> AcceptedMessage:
    """Submit the message, and return the response for the client. Raise ApiError if it is refused."""
    principal = Principal(
        protocol="HTTP",
        address=origin.client,
        helo=f"[IPv6:{origin.client}]" if ":" in origin.client else f"[{origin.client}]",
        user=origin.user,
        may_relay=True,
    )
    result = await call.operators.submit(SubmitCall(principal, sending.envelope, sending.options), pieces)
    if isinstance(result, Rejection):
        raise problem_of(result, sending.pointers)
    states = (
        RecipientState(
            address=each,
            index=index,
            state="refused" if each in result.refused else "queued",
            reply=result.refused.get(each, ""),
        )
        # Refused ones come last: the message does not have them, and its later states count without them.
        for index, each in enumerate(sorted(sending.pointers, key=result.refused.__contains__))
    )
    message_id = result.message_id or sending.message_id
    return AcceptedMessage(id=result.id, message_id=message_id, recipients=tuple(states))


# A rejection becomes an HTTP problem by its reason, its enhanced status code, or its reply class.

_BY_REASON: dict[Reason, tuple[int, Code]] = {
    Reason.AUTH: (403, "forbidden"),
    Reason.BEING_STORED: (409, "not_possible"),
    Reason.IDEMPOTENCY_KEY: (400, "malformed"),
    Reason.RECIPIENTS: (422, "refused"),
}
_BY_STATUS: dict[str, tuple[int, Code]] = {
    "5.3.4": (413, "too_large"),  # RFC 3463 3.4: message too big for system
    "5.7.13": (403, "forbidden"),  # RFC 5248: user account disabled
}
_RETRY_AFTER = {429: 60.0, 503: 10.0}


def problem_of(refused: Rejection, pointers: Mapping[Mailbox, str]) -> ApiError:
    """Return the error response for a rejected submission, with the fields that caused it. `pointers` has the
    fields of the recipients.
    """
    reply = refused.reply
    status, code = _status_of(refused)
    errors = [
        problems.FieldError(pointer=pointers[each], detail=str(one.reply))
        for each, one in refused.recipients.items()
    ]
    # A temporary refusal is not caused by a field.
    if refused.reason is Reason.SENDER or (refused.of_sender and reply.is_permanent):
        errors = [problems.FieldError(pointer="/from", detail=str(reply))]
    fields = {}
    if status in _RETRY_AFTER:
        fields["Retry-After"] = str(math.ceil(refused.retry_after or _RETRY_AFTER[status]))
    detail = f"{reply.status} {reply.text}" if reply.detail else reply.text
    return ApiError(status, code, detail, errors=errors, fields=fields, smtp_reply=str(reply))


def _status_of(refused: Rejection) -> tuple[int, Code]:
    reply = refused.reply
    if refused.reason is Reason.QUOTA and reply.is_transient:
        return 429, "too_many"
    by_class: tuple[int, Code] = (503, "unavailable") if reply.is_transient else (422, "refused")
    return _BY_REASON.get(refused.reason) or _BY_STATUS.get(reply.status, by_class)


async def _take_raw(call: ApiCall, origin: SubmissionOrigin) -> AcceptedMessage:
    limit = origin.listener.max_message_size
    if (call.request.content_length or 0) > limit:
        raise too_large(f"the message exceeds {limit} bytes")
    pieces = _strict_lines(_pieces(call, origin))
    scanner = HeaderScanner(origin.listener.max_header_size)
    try:
        while scanner.header is None and (piece := await anext(pieces, None)) is not None:
            scanner.feed(piece)
    except HeaderTooLargeError:
        raise too_large("the header of the message is too large") from None
    header = scanner.finish()
    given: RawQuery = call.parameters
    block, most = bytes(scanner.held[: scanner.size]), origin.listener.max_recipients
    sender, recipients = await _run(len(block), _raw_envelope, block, given, most)
    if key := key_in(header.fields):
        origin = replace(origin, key=key)
    message_id = next((value.strip() for name, value in header.fields if name.lower() == "message-id"), "")
    front = b""
    if not message_id:
        message_id = drafts.new_message_id(sender)
        front = f"Message-ID: {message_id}\r\n".encode()
    held = bytes(scanner.held)
    shown = _BCC.sub(b"", held[: scanner.size])
    mail = MailCommand(
        sender,
        body=BodyType.EIGHT_BIT,
        smtputf8=not "".join((sender, *recipients)).isascii(),
        require_tls=given.require_tls,
    )
    sending = drafts.ValidatedMessage(
        envelope=drafts.envelope_of(mail, recipients),
        pointers=recipients,
        message_id=message_id,
        options=SubmitOptions(idempotency_key=origin.key, partial=given.partial),
    )

    begin = front + header.lead + shown + held[scanner.size :]
    if _is_short(call):
        return await _submitted_as(call, origin, sending, [begin, *[piece async for piece in pieces]])

    async def message() -> AsyncIterator[bytes]:
        yield begin
        async for piece in pieces:
            yield piece

    return await _submitted_as(call, origin, sending, message())


_BCC = re.compile(
    rb"^(?:Resent-)?Bcc[ \t]*(?:\r\n[ \t]+)*:.*\r\n(?:[ \t].*\r\n)*", re.IGNORECASE | re.MULTILINE
)


async def _strict_lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the message with CRLF line ends, including one at its end. Files on Unix have LF only."""
    rest = piece = b""
    async for piece in pieces:
        data = rest + piece
        rest = b"\r" if data.endswith(b"\r") else b""
        data = data[:-1] if rest else data
        has_bare = data.count(b"\n") != data.count(b"\r\n")
        yield _BARE_LF.sub(b"\r\n", data) if has_bare else data
    if not piece.endswith(b"\n"):  # otherwise the last field of a message without a body is not seen as one
        yield rest + b"\r\n"


def _raw_envelope(block: bytes, given: RawQuery, most: int) -> tuple[Mailbox, dict[Mailbox, str]]:
    """Return the envelope from the query parameters, or else from the header section of the message. Raise
    ApiError if it is invalid.
    """
    faults = drafts.FieldErrors()
    fields = all_fields(block)
    with faults.at("/from"):
        sender = _raw_sender(fields) if given.from_ is None else NULL_SENDER
        if given.from_:
            sender = drafts.address(given.from_, "from").mailbox
    named = [("to", given.to)]
    if not given.to.strip(" ,"):
        named = [fields[at] for at in recipient_fields([name.lower() for name, _ in fields])]
    elements = [(name, each) for name, value in named for each in read_addresses(value).entries]
    if len(elements) > most:
        raise wrong("/to", f"the message has more than {most} recipients")
    found: dict[str, tuple[Mailbox, str]] = {}
    for at, (name, each) in enumerate(elements):
        with faults.at(f"/to/{at}"):
            if "@" not in each.address:
                raise BadRowError(f"{name} contains an invalid address: {each.text[:200]!r}")
            recipient = mailbox(each.address, name)
            found.setdefault(recipient_key(recipient), (recipient, f"/to/{at}"))
    if not elements:
        faults.add("/to", "To, Cc, Bcc and the parameter to contain no address")
    faults.end()
    return sender, dict(found.values())


def _raw_sender(fields: Sequence[tuple[str, str]]) -> Mailbox:
    """Return the address in the Sender field, or else in the From field, as the envelope sender. Raise
    BadRowError if there is none.
    """
    for wanted in ("sender", "from"):
        for name, value in fields:
            for each in read_addresses(value).entries if name.lower() == wanted else ():
                if each.address:
                    return mailbox(each.address, name)
    raise BadRowError("From, Sender and the parameter from contain no address")


def _filled(template: dict[str, Any], message: dict[str, Any], body: JsonBody) -> Submission:
    """Return a message of a batch, with the fields of the template and with its own substitutions. Raise
    ApiError if it is invalid.
    """
    from zonerelay.admin.submission.batch import substituted  # noqa: PLC0415 - the template library

    return _converted(substituted({**template, **message}, body))


async def _batch(call: ApiCall) -> Answer:
    """Submit the messages of a batch concurrently, so that they are committed together."""
    with _counted(call) as origin, _body_of(call, origin) as body:
        given: MessageBatch = await _decoded(await _json(call, origin, body), MessageBatch)
        template_size = len(msgspec.json.encode(given.template))
        room = asyncio.Semaphore(SIDE_BY_SIDE)

        async def one(at: int) -> BatchAnswer:
            async with room:
                return await taken(at)

        async def taken(at: int) -> BatchAnswer:
            message = given.messages[at]
            key = origin.key and f"{origin.key}.{at}"
            try:
                size = len(msgspec.json.encode(message)) + template_size
                filled = await _run(size, _filled, given.template, message, body)
                accepted = await _take(call, replace(origin, key=key), filled, body, size=size)
            except ApiError as error:
                problem = error.body
            except Exception as error:  # noqa: BLE001 - the answers for the other messages are still needed
                call.operators.events.error("submission", error)
                text = "an unexpected error occurred; see `trouble` in the relay's log"
                problem = ApiError(500, "unexpected", text).body
            else:
                return BatchAnswer(status=202, accepted=accepted)
            return BatchAnswer(status=problem.status, problem=problem)

        answers = await asyncio.gather(*map(one, range(len(given.messages))))
    return BatchAnswers(messages=tuple(answers))


async def _withdraw(call: ApiCall) -> Answer:
    if await detail_of(call) is None:
        await state_of(call)  # raises NotFoundError, unless the message is the caller's
        raise ControlError("no delivery of this message is queued any more")
    request = Drop(filter=Filter(message_id=call.path["message_id"]), reason="withdrawn")
    changed = await call.one(request, ChangeResult)
    if not changed.changed:
        raise ControlError("all remaining deliveries of this message are being attempted now")
    return Cancellation(withdrawn=changed.changed, in_flight=changed.busy)


async def _zonemta_send(call: ApiCall) -> Answer:
    with _counted(call) as origin, _body_of(call, origin) as body:
        data = await _json(call, origin, body)
        document = await _decoded(data, dict[str, Any])
        message = await _run(len(data), lambda: _converted(zonemta.submission_of(document, body)))
        return zonemta.answer_of(await _take(call, origin, message, body, size=len(data)), message)


async def _zonemta_send_raw(call: ApiCall) -> Answer:
    if (kind := media_type(call.request)) != _MESSAGE:
        raise _unsupported(kind)
    with _counted(call) as origin:
        accepted = await _take_raw(call, origin)
    return zonemta.ZoneMtaResponse(id=accepted.id, to=[each.address for each in accepted.recipients])


def _mail(
    path: str, summary: str, run: Callable[[ApiCall], Awaitable[Answer]], answer: object, **more: Any
) -> Verb:
    return Verb(method="POST", path=path, scope="submit", summary=summary, run=run, answer=answer, **more)


SUBMISSION: tuple[Verb, ...] = (
    Verb(
        method="GET",
        path="/v1/messages",
        scope="submit",
        also="read",
        summary="Find messages: your own, or any as an operator.",
        run=list_of,
        answer=MessageList,
        parameters=MessageSearch,
    ),
    _mail(
        "/v1/messages",
        "Submit a message. The response 202 means that it is accepted and stored.",
        _submit,
        AcceptedMessage,
        parameters=RawQuery,
        streams={_JSON: Submission, _MESSAGE: None, _FORM: FORM},
        success=202,
    ),
    _mail(
        "/v1/messages/batch",
        "Submit up to 500 messages; each gets its own response.",
        _batch,
        BatchAnswers,
        streams={_JSON: MessageBatch},
        success=207,
    ),
    Verb(
        method="GET",
        path="/v1/messages/{message_id}",
        scope="submit",
        also="read",
        summary="Show what happened to a message: your own, or any as an operator.",
        run=state_of,
        answer=MessageState,
    ),
    Verb(
        method="DELETE",
        path="/v1/messages/{message_id}",
        scope="submit",
        also="operate",
        summary="Cancel the queued deliveries of a message without sending a DSN.",
        run=_withdraw,
        answer=Cancellation,
    ),
    _mail(
        "/send",
        "ZoneMTA-compatible: submit a message in the fields of Nodemailer.",
        _zonemta_send,
        zonemta.ZoneMtaResponse,
        streams={_JSON: dict[str, Any]},
    ),
    _mail(
        "/send-raw",
        "ZoneMTA-compatible: submit a raw message.",
        _zonemta_send_raw,
        zonemta.ZoneMtaResponse,
        parameters=RawQuery,
        streams={_MESSAGE: None},
        name="post_raw",
    ),
)
