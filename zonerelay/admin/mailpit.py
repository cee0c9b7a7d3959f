"""Access to captured mail for the page, and an API compatible with Mailpit's for existing test suites. It is
read in a thread, and released over SMTP.

Paths, names and formats are those of Mailpit 1.x: messages, search, send, read status, tags, release, chaos.
The sandbox requires no token. Elsewhere a token with scope `operate` is required, as a Bearer token or as the
password of Basic authentication. Pages of other origins cannot read a response, and in the sandbox they may
not even send a request. The content of a message is never served as a page of this relay: its HTML has a
policy that forbids scripts, and a file that is not an image is served as binary data.

Reading a message is logged with the name of the token. The sandbox does not log it: its mail is not secret.
"""

import base64
import binascii
import hashlib
import re
import smtplib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import parse_qs

import msgspec
from aiohttp import web
from msgspec.structs import replace

from zonerelay import __version__
from zonerelay.admin.operators import Operators, require_private
from zonerelay.admin.problems import ApiError, not_allowed
from zonerelay.admin.requests import VISIT, media_type, plain, read_body
from zonerelay.admin.submission.body import JsonBody
from zonerelay.admin.submission.drafts import Submission, SubmissionOrigin, sending_of
from zonerelay.capture.faults import ChaosTriggers, FaultError, InjectedFaults
from zonerelay.capture.parts import MimePart, MimeParts, take_apart
from zonerelay.capture.store import Capture, CaptureError, CaptureRow, SearchError, open_capture
from zonerelay.config.endpoints import parse_listen
from zonerelay.message.compose import Base64Error, compose
from zonerelay.model.envelope import MessageIdSource
from zonerelay.operations.errors import NotFoundError
from zonerelay.outbox.drafts import BadRowError, addresses
from zonerelay.process.threads import CAPTURED, OPERATORS, PoolBusyError

T = TypeVar("T")

RELEASE_TIMEOUT = 30.0
MAX_BODY = 32 * 1024 * 1024
"""Bytes of a message in /send, including base64."""
MAX_LIMIT = 1000
MAX_TAG = 100
_TAG = msgspec.Meta(min_length=1, max_length=MAX_TAG, pattern="^[^,]+$")
BODY_TIMEOUT = 60.0
SHOWN_POLICY = (
    "sandbox; default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
SHOWN_FIELDS = {
    "Content-Security-Policy": SHOWN_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-DNS-Prefetch-Control": "off",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp")


class ReleaseError(Exception):
    """The captured message could not be released. The text explains why."""


class CapturedMail:
    """Provides the captured mail to the operators' page and to the API that is compatible with Mailpit's. The
    store is opened at the first query.
    """

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self.sandbox = operators.sandbox
        self._capture: Capture | None = None

    @property
    def release_to(self) -> str:
        """The address of the server to which captured messages are released. If it is empty, no message can
        be released.
        """
        return self._operators.settings().capture.release_to

    async def ask(self, question: Callable[[Capture], T]) -> T:
        """Run a query on the capture store in a thread, and return its result. Raise NotFoundError if no mail
        is captured, CaptureError or SearchError on failure.
        """
        if not self._operators.captures:
            raise NotFoundError('no mail is captured: no [[zone]] has next_hop = "capture:"')
        try:
            return await CAPTURED.run(self._ask, question)
        except PoolBusyError:
            raise CaptureError("too many requests for captured mail are being processed; try again") from None

    def _ask(self, question: Callable[[Capture], T]) -> T:
        if self._capture is None:
            settings, now = self._operators.settings(), self._operators.clock.now
            self._capture = self.sandbox.capture if self.sandbox else open_capture(settings, now)
        return question(self._capture)

    async def read(
        self, message_id: str, by: str, *, mark: bool = True, query: str = "", tz: str = ""
    ) -> tuple[CaptureRow, bytes]:
        """Return a captured message, and log that `by` has read it unless `by` is empty. Raise NotFoundError
        if it does not exist, SearchError or CaptureError on failure.
        """
        found = await self.ask(lambda capture: capture.read(message_id, mark=mark, query=query, tz=tz))
        if found is None:
            raise NotFoundError("message not found: it was deleted or has expired")
        if by:
            self.note(by, f"captured message {found[0].id} read")
        return found

    def note(self, by: str, request: str) -> None:
        if self.sandbox is None:
            self._operators.events.requested({"by": by, "request": request})

    async def release(self, message_id: str, to: Sequence[str], by: str) -> int:
        """Send a captured message to the server in `[capture] release_to`, to the recipients `to` or else its
        own. It stays captured. Return the number of recipients. Raise ReleaseError or CaptureError on
        failure.
        """
        address = self.release_to
        if not address:
            raise ReleaseError(
                "captured mail cannot be released: set [capture] release_to, or --release-to of the sandbox"
            )
        summary, octets = await self.read(message_id, "", mark=False)
        try:
            recipients = [each.mailbox for text in to for each in addresses(text, "To")] or summary.recipients
        except BadRowError as error:
            raise ReleaseError(str(error)) from error
        self.note(by, f"captured message {summary.id} released for {len(recipients)} recipients")
        await OPERATORS.run(_submit, address, summary.sender, recipients, octets)
        return len(recipients)


def _submit(address: str, sender: str, recipients: Sequence[str], octets: bytes) -> None:
    target = parse_listen(address)
    try:
        with smtplib.SMTP(target.host, target.port, timeout=RELEASE_TIMEOUT) as client:
            client.ehlo_or_helo_if_needed()
            options = [
                option
                for option, is_needed in (
                    ("SMTPUTF8", not all(map(str.isascii, (sender, *recipients)))),
                    ("BODY=8BITMIME", not octets.isascii()),
                )
                if is_needed and client.has_extn(option.removeprefix("BODY="))
            ]
            refused = client.sendmail(sender, list(recipients), octets, mail_options=options)
    except smtplib.SMTPRecipientsRefused as error:
        refused = error.recipients
    except (OSError, smtplib.SMTPException, ValueError) as error:
        raise ReleaseError(f"{address} did not accept the message: {error}") from error
    if refused:
        replies = "; ".join(
            f"<{who}>: {code} {text.decode('utf-8', 'replace')}" for who, (code, text) in refused.items()
        )
        raise ReleaseError(f"{address} rejected {replies}")


_WRONG = (
    SearchError, FaultError, ReleaseError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError,
)  # fmt: skip

Handler = Callable[["_MailpitCall"], Awaitable[object]]
"""Returns a response, or what is answered as JSON; `None` is answered with "ok"."""


class _JsonAddress(msgspec.Struct, rename="pascal"):
    """An email address with a name, in Mailpit's JSON."""

    email: str = ""
    name: str = ""


class _JsonFile(msgspec.Struct, rename="pascal"):
    """An attached file, in Mailpit's JSON."""

    content: str
    filename: str = ""
    content_type: str = ""
    content_id: str = msgspec.field(default="", name="ContentID")


class _SendRequest(msgspec.Struct, rename="pascal"):
    """A request to Mailpit's send endpoint, which captures the message that it contains."""

    from_: _JsonAddress = msgspec.field(name="From")
    to: list[_JsonAddress] = []
    cc: list[_JsonAddress] = []
    bcc: list[str] = []
    reply_to: list[_JsonAddress] = []
    subject: str = ""
    text: str | None = None
    html: str | None = msgspec.field(default=None, name="HTML")
    headers: dict[str, str] = {}
    tags: list[str] = []
    attachments: list[_JsonFile] = []


class _Selector(msgspec.Struct, rename="pascal"):
    """A request that selects captured messages by their ids or by a search."""

    ids: list[str] | None = msgspec.field(default=None, name="IDs")
    search: str = ""
    read: bool = False


class _TagRequest(msgspec.Struct, rename="pascal"):
    """A request that sets the tags of captured messages, or renames a tag."""

    ids: list[str] = msgspec.field(default_factory=list, name="IDs")
    tags: list[Annotated[str, _TAG]] = []
    name: Annotated[str, msgspec.Meta(max_length=MAX_TAG)] = ""


class _ReleaseRequest(msgspec.Struct, rename="pascal"):
    """A request to release a captured message to these addresses."""

    to: list[str] = []


class _MailpitCall:
    """A request to Mailpit's API, with the name of the token that authenticated it."""

    def __init__(self, request: web.Request, by: str, found: Mapping[str, str]) -> None:
        self.request, self.by, self.found = request, by, found
        self.query, self.tz = request.query.get("query", ""), request.query.get("tz", "")

    def number(self, name: str, default: int, most: int) -> int:
        return min(number_of(self.request.query.get(name, ""), default), most)

    @property
    def search(self) -> str:
        if not self.query.strip():
            raise ApiError(400, "invalid", "the search query is missing")
        return self.query

    async def body(self) -> bytes:
        return await read_body(self.request, MAX_BODY, BODY_TIMEOUT)


class Mailpit:
    """Serves Mailpit's API for captured mail. `serve` answers every request below /api/v1/ and /view/."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._mail = CapturedMail(operators)
        self._ids = MessageIdSource(operators.clock, 255)  # no worker has this number
        self._began = operators.clock.monotonic()
        one = "/api/v1/message/(?P<id>[0-9A-Za-z-]{1,64})"
        self._routes: list[tuple[str, re.Pattern[str], Handler]] = [
            (method, re.compile(path), handler)
            for method, path, handler in (
                ("GET", "/api/v1/info", self._info),
                ("GET", "/api/v1/webui", self._web_ui),
                ("GET", "/api/v1/messages", self._list),
                ("PUT", "/api/v1/messages", self._mark),
                ("DELETE", "/api/v1/messages", self._delete),
                ("GET", "/api/v1/search", self._list),
                ("DELETE", "/api/v1/search", self._delete_found),
                ("GET", "/api/v1/tags", self._tags),
                ("PUT", "/api/v1/tags", self._set_tags),
                ("PUT", "/api/v1/tags/(?P<tag>[^/]{1,100})", self._rename_tag),
                ("DELETE", "/api/v1/tags/(?P<tag>[^/]{1,100})", self._rename_tag),
                ("POST", "/api/v1/send", self._send),
                ("GET", one, self._one),
                ("GET", f"{one}/raw", self._raw),
                ("GET", f"{one}/headers", self._headers),
                ("GET", f"{one}/part/(?P<part>[0-9.]{{1,64}})", self._part),
                ("POST", f"{one}/release", self._release),
                ("GET", "/view/(?P<id>[0-9A-Za-z-]{1,64})[.]html", self._html),
                ("GET", "/view/(?P<id>[0-9A-Za-z-]{1,64})[.]txt", self._text),
                ("GET", "/api/v1/chaos", self._chaos),
                ("PUT", "/api/v1/chaos", self._chaos),
                ("GET", "/api/v1/behaviours", self._behaviours),
                ("PUT", "/api/v1/behaviours", self._behaviours),
            )
        ]

    async def serve(self, request: web.Request) -> web.StreamResponse:
        try:
            by = self._admit(request)
            return await self._find(request, by)
        except ApiError as error:
            return plain(error.status, str(error), error.fields)
        except NotFoundError as error:
            return plain(404, str(error))
        except _WRONG as error:
            return plain(400, str(error))
        except CaptureError as error:
            return plain(503, str(error), {"Retry-After": "5"})

    def _admit(self, request: web.Request) -> str:
        """Check the token of the request, and return its name for the log."""
        visit = VISIT.get()
        if self._mail.sandbox is not None:
            # A page of another origin could include images and frames from here.
            if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
                raise ApiError(403, "forbidden", "the request was sent by a page of another origin")
            visit.who = "sandbox"
            return ""
        require_private(visit)
        scheme, _, text = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "basic":
            try:
                text = base64.b64decode(text.strip(), validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                text = ""
        try:
            if not text.strip():
                words = "send a token as Bearer, or as the password of Basic authentication"
                raise ApiError(401, "unauthorized", words)
            token = self._operators.access.admit(text.strip(), visit, "operate")
        except ApiError as error:
            error.fields["WWW-Authenticate"] = 'Basic realm="zonerelay"'
            raise
        return f"token {token.name}"

    async def _find(self, request: web.Request, by: str) -> web.StreamResponse:
        method = "GET" if request.method == "HEAD" else request.method
        allowed = list[str]()
        for wanted, pattern, handler in self._routes:
            if found := pattern.fullmatch(request.path):
                if wanted == method:
                    answer = await handler(_MailpitCall(request, by, found.groupdict()))
                    if isinstance(answer, web.StreamResponse):
                        return answer
                    return web.Response(text="ok") if answer is None else _json(answer)
                allowed.append(wanted)
        if allowed:
            raise not_allowed(allowed)
        text = "this part of Mailpit's API is not supported; supported are messages, search, send and chaos"
        raise ApiError(404, "not_found", text)

    # --- lists ------------------------------------------------------------------------------------------

    async def _info(self, call: _MailpitCall) -> object:
        totals, tags = await self._mail.ask(lambda capture: (capture.totals(), capture.tags()))
        return {
            "Version": f"zonerelay {__version__}",
            "LatestVersion": f"zonerelay {__version__}",
            "Database": "",
            "DatabaseSize": totals.octets,
            "Messages": totals.messages,
            "Unread": totals.unread,
            "Tags": tags,
            "RuntimeStats": {"Uptime": int(self._operators.clock.monotonic() - self._began)},
        }

    async def _web_ui(self, call: _MailpitCall) -> object:
        relays = {"Enabled": bool(self._mail.release_to), "SMTPServer": self._mail.release_to}
        chaos = self._mail.sandbox is not None
        return {"Label": "zonerelay", "MessageRelay": relays, "SpamAssassin": False, "ChaosEnabled": chaos}

    async def _list(self, call: _MailpitCall) -> object:
        """List the newest messages, or those that a search finds."""
        query = call.search if call.request.path.endswith("/search") else ""
        start, limit = call.number("start", 0, 10**9), call.number("limit", 50, MAX_LIMIT)
        (rows, matched, unread), totals, tags = await self._mail.ask(
            lambda capture: (
                capture.find(query, start=start, limit=limit, tz=call.tz), capture.totals(), capture.tags(),
            )
        )  # fmt: skip
        return {
            "total": totals.messages, "unread": totals.unread, "count": len(rows), "start": start,
            "messages_count": matched, "messages_unread": unread, "tags": list(tags),
            "messages": [_summary(each) for each in rows],
        }  # fmt: skip

    async def _tags(self, call: _MailpitCall) -> object:
        return list(await self._mail.ask(lambda capture: capture.tags()))

    async def _set_tags(self, call: _MailpitCall) -> None:
        given = msgspec.json.decode(await call.body(), type=_TagRequest)
        await self._mail.ask(lambda capture: capture.tag(given.tags, given.ids))

    async def _rename_tag(self, call: _MailpitCall) -> None:
        """Rename the tag (PUT), or remove it from all messages (DELETE)."""
        name = ""
        if call.request.method == "PUT":
            name = msgspec.json.decode(await call.body(), type=_TagRequest).name
            if not name:
                raise ApiError(400, "invalid", "Name is required: the new name of the tag")
        await self._mail.ask(lambda capture: capture.rename_tag(call.found["tag"], name))

    async def _mark(self, call: _MailpitCall) -> None:
        which = await _which(call)
        if which.ids and which.search:
            raise ApiError(400, "invalid", "specify IDs or Search, not both")
        await self._mail.ask(
            lambda capture: capture.mark(which.read, ids=which.ids or None, query=which.search, tz=call.tz)
        )

    async def _delete(self, call: _MailpitCall) -> None:
        """Delete these messages, or all of them if no ids are given, as Mailpit does."""
        which = await _which(call)
        self._mail.note(call.by, f"captured mail deleted: {len(which.ids) if which.ids else 'all'} messages")
        await self._mail.ask(lambda capture: capture.delete(ids=which.ids or None))

    async def _delete_found(self, call: _MailpitCall) -> None:
        query = call.search
        self._mail.note(call.by, "captured mail deleted: all results of a search")
        await self._mail.ask(lambda capture: capture.delete(query=query, tz=call.tz))

    # --- one message ------------------------------------------------------------------------------------

    async def _read(self, call: _MailpitCall, *, mark: bool = False) -> tuple[CaptureRow, bytes]:
        return await self._mail.read(call.found["id"], call.by, mark=mark, query=call.query, tz=call.tz)

    async def _taken_apart(self, call: _MailpitCall, *, mark: bool = False) -> tuple[CaptureRow, MimeParts]:
        summary, octets = await self._read(call, mark=mark)
        return summary, await OPERATORS.run(take_apart, octets)

    async def _one(self, call: _MailpitCall) -> object:
        summary, parts = await self._taken_apart(call, mark=True)
        return {
            **_summary(summary),
            "Read": True,
            "ReturnPath": summary.sender,
            "Date": parts.date or _time(summary.at),
            "Text": parts.text,
            "HTML": parts.html,
            "ListUnsubscribe": {
                "Header": parts.header("list-unsubscribe"),
                "Links": [],
                "Errors": "",
                "HeaderPost": "",
            },
            # In a thread, because of the checksums.
            "Inline": await OPERATORS.run(list, map(_attachment, parts.inline)),
            "Attachments": await OPERATORS.run(list, map(_attachment, parts.attachments)),
        }

    async def _raw(self, call: _MailpitCall) -> web.Response:
        _, octets = await self._read(call)
        return web.Response(body=octets, content_type="text/plain", charset="utf-8", headers=SHOWN_FIELDS)

    async def _headers(self, call: _MailpitCall) -> object:
        _, parts = await self._taken_apart(call)
        found: dict[str, list[str]] = {}
        for name, value in parts.headers:
            canonical = "-".join(each.capitalize() for each in name.split("-"))  # as Go's textproto
            found.setdefault(canonical, []).append(value)
        return found

    async def _part(self, call: _MailpitCall) -> web.Response:
        _, parts = await self._taken_apart(call)
        return file_response(parts, call.found["part"])

    async def _html(self, call: _MailpitCall) -> web.Response:
        _, parts = await self._taken_apart(call)
        if not parts.html:
            raise ApiError(404, "not_found", "this message has no HTML part")
        return html_response(await OPERATORS.run(parts.html_to_show))

    async def _text(self, call: _MailpitCall) -> web.Response:
        _, parts = await self._taken_apart(call)
        return web.Response(text=parts.text, content_type="text/plain", headers=SHOWN_FIELDS)

    async def _release(self, call: _MailpitCall) -> None:
        to = msgspec.json.decode(await call.body(), type=_ReleaseRequest).to
        if not to:
            raise ApiError(400, "invalid", "no valid addresses found")
        await self._mail.release(call.found["id"], to, call.by)

    async def _send(self, call: _MailpitCall) -> object:
        """Add the submitted message to the captured mail. It does not pass through the relay."""
        body = await call.body()
        try:
            given = msgspec.json.decode(body, type=_SendRequest)
            sender, recipients, octets = await OPERATORS.run(self._composed, given)
        except (ApiError, Base64Error, msgspec.MsgspecError) as error:
            return _json({"Error": str(error)}, 400)
        message_id = self._ids.next()
        self._mail.note(call.by, f"captured message {message_id} submitted with the API")
        await self._mail.ask(lambda capture: capture.add(message_id, sender, recipients, octets))
        return {"ID": message_id}

    def _composed(self, given: _SendRequest) -> tuple[str, Sequence[str], bytes]:
        """Compose the submitted message, and return its sender, its recipients and its bytes. Raise ApiError
        or Base64Error if a value is invalid.
        """
        files = [
            replace(
                each,
                content=each.content.rpartition(",")[2],  # browsers add "data:image/png;base64,"
                content_type=each.content_type or "application/octet-stream",
            )
            for each in given.attachments
        ]
        given = replace(
            given,
            text=given.text or (None if given.html else ""),
            html=given.html or None,
            headers={**given.headers, **({"X-Tags": ", ".join(given.tags)} if given.tags else {})},
            tags=[],
            attachments=files,
        )
        operators = self._operators
        origin = SubmissionOrigin(
            user="", client="", key="", settings=operators.settings(), listener=operators.rules()
        )
        wanted, body = msgspec.convert(given, Submission, from_attributes=True), JsonBody(MAX_BODY, Path())
        sending = sending_of(wanted, body, origin, operators.clock.now())
        assert sending.draft is not None
        return sending.envelope.mail.sender, list(sending.pointers), compose(sending.draft)

    # --- troubles ---------------------------------------------------------------------------------------

    @property
    def _faults(self) -> InjectedFaults:
        if self._mail.sandbox is None:
            raise ApiError(404, "not_found", "chaos and simulated replies are available in the sandbox only")
        return self._mail.sandbox.faults

    async def _chaos(self, call: _MailpitCall) -> object:
        faults = self._faults
        if call.request.method == "PUT":
            faults.chaos = msgspec.json.decode(await call.body() or b"{}", type=ChaosTriggers)
        return faults.chaos

    async def _behaviours(self, call: _MailpitCall) -> object:
        faults = self._faults
        if call.request.method == "PUT":
            faults.set_behaviours(msgspec.json.decode(await call.body(), type=dict[str, str]))
        return faults.behaviours


def number_of(text: str, default: int = 0) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default


def html_response(html: str) -> web.Response:
    """Return a response with the HTML of a message, for display in a frame. The frame runs no scripts and
    loads nothing from the network.
    """
    body = html.encode("utf-8", "replace")
    return web.Response(body=body, content_type="text/html", charset="utf-8", headers=SHOWN_FIELDS)


def file_response(parts: MimeParts, number: str) -> web.Response:
    """Return a file of a message as a download, so that no browser shows it as a page of this relay. Raise
    NotFoundError if the message has no such file.
    """
    part = parts.find(number)
    if part is None:
        raise NotFoundError("the message has no such part")
    kind = part.content_type if part.content_type in _IMAGES else "application/octet-stream"
    name = re.sub(r"[^A-Za-z0-9._ -]|^[. ]+", "_", part.file_name)[:100].strip() or f"part-{part.number}"
    disposition = f'attachment; filename="{name}"'
    return web.Response(
        body=part.content, content_type=kind, headers={**SHOWN_FIELDS, "Content-Disposition": disposition}
    )


async def _which(call: _MailpitCall) -> _Selector:
    """Parse the selection of messages in a request body, which is JSON or a form of Mailpit's client."""
    body = await call.body()
    if media_type(call.request) == "application/x-www-form-urlencoded":
        fields = await OPERATORS.run(parse_qs, body.decode())
        read = next((values[0] for name, values in fields.items() if name.lower() == "read"), "")
        return _Selector(ids=fields.get("ids"), read=read.lower() in ("true", "1"))
    return msgspec.json.decode(body if body.strip() else b"{}", type=_Selector)


def _summary(summary: CaptureRow) -> dict[str, object]:
    author = [{"Name": name, "Address": address} for name, address in summary.from_]
    return {
        "ID": summary.id,
        "MessageID": summary.message_id,
        "Read": summary.is_read,
        "From": author[0] if author else {"Name": "", "Address": summary.sender},
        "To": _people(summary.to_),
        "Cc": _people(summary.cc),
        "Bcc": _people(summary.bcc),
        "ReplyTo": _people(summary.reply_to),
        "Subject": summary.subject,
        "Created": _time(summary.at),
        "Username": "",
        "Tags": summary.tags,
        "Size": summary.size,
        "Attachments": summary.attachments,
        "Snippet": summary.snippet,
    }


def _people(some: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"Name": name, "Address": address} for name, address in some]


def _attachment(part: MimePart) -> dict[str, object]:
    sums = {
        "MD5": hashlib.md5(part.content, usedforsecurity=False).hexdigest(),
        "SHA1": hashlib.sha1(part.content, usedforsecurity=False).hexdigest(),
        "SHA256": hashlib.sha256(part.content).hexdigest(),
    }
    return {
        "PartID": part.number,
        "FileName": part.file_name,
        "ContentType": part.content_type,
        "ContentID": part.content_id,
        "Size": len(part.content),
        "Checksums": sums,
    }


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
