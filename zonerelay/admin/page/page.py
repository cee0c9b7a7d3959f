"""The operators' page: its URLs, and the permissions for each.

A page requires a session, and a session begins with a token (`zonerelay token add`). Scope `read` shows
pages; scope `operate` makes changes and reads message bodies. A form is accepted only from a page of ours:
the server refuses requests from other origins, other sites cannot send the cookie, and each form contains a
value of the session. Everything except the live tail works without scripts. Jinja is loaded for the first
page, in a thread.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from aiohttp import web

from zonerelay.admin.mailpit import ReleaseError
from zonerelay.admin.operators import Operators
from zonerelay.admin.page import acts, views
from zonerelay.admin.page.captured import CapturedPages
from zonerelay.admin.page.visitor import (
    FIELDS,
    LONGEST,
    PageError,
    PageRequest,
    PageSession,
    Sessions,
    own_path,
    see_other,
)
from zonerelay.admin.problems import ApiError
from zonerelay.admin.requests import VISIT, media_type, read_body
from zonerelay.capture.store import CaptureError, SearchError
from zonerelay.config.credentials.identities import Scope
from zonerelay.operations.errors import ControlError, InvalidError, NotFoundError
from zonerelay.process.threads import OPERATORS

if TYPE_CHECKING:
    from zonerelay.admin.page.rendering import PageRenderer

View = Callable[[PageRequest], Awaitable[web.StreamResponse]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

FOR_GOOD = "public, max-age=31536000, immutable"
FORM = "application/x-www-form-urlencoded"
MAX_LOGIN = 4 * 1024
"""Bytes of the login form of an unauthenticated client: a token, and the page to show after the login."""
MAX_FORM = 16 * 1024
MAX_FIELDS = 50
PATIENCE = 5.0
"""Seconds in which a form must arrive."""
_UTF_8 = re.compile(r'\s*(?:charset="?utf-8"?)?\s*', re.IGNORECASE)
"""The allowed parameters of its Content-Type."""

_FAILURES: dict[type[Exception], tuple[int, str]] = {
    NotFoundError: (404, "Not found"),
    InvalidError: (400, "Invalid request"),
    SearchError: (400, "Invalid search"),
    ReleaseError: (502, "Not released"),
}


class PageRoutes:
    """The routes of the operators' page, and their request handlers."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._sessions = Sessions(operators.clock.monotonic, operators.is_valid)
        self._captured = CapturedPages(operators)
        self._renderer: PageRenderer | None = None
        self._loading = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the operators' page."""
        see, act = partial(self._for, "read"), partial(self._for, "operate")
        return [
            web.get("/static/{name}", self._static),
            web.get("/login", self._log_in),
            web.post("/login", self._log_in),
            web.post("/logout", see(self._log_out)),
            web.get("/sessions", see(self._list_sessions)),
            web.post("/sessions", see(self._end_sessions)),
            web.get("/", see(views.overview)),
            web.get("/destinations", see(views.destinations)),
            web.get("/queue", see(views.queue)),
            web.get("/message/{id}", see(views.message)),
            web.get("/history", see(views.history)),
            web.get("/configuration", see(views.configuration)),
            web.get("/tail", see(views.tail)),
            web.get("/tail/events", see(views.tail_events)),
            web.get("/suspensions", see(acts.suspensions)),
            web.get("/act", act(acts.preview)),
            web.post("/act", act(acts.change)),
            web.post("/undo", act(acts.undo)),
            web.post("/suspend", act(acts.suspend)),
            web.post("/resume", act(acts.resume)),
            web.post("/message/{id}/body", act(views.body)),
            web.get("/captured", act(self._captured.list)),
            web.post("/captured", act(self._captured.delete)),
            web.get("/captured/{id}", act(self._captured.message)),
            web.get("/captured/{id}/html", act(self._captured.html)),
            web.get("/captured/{id}/part/{part}", act(self._captured.part)),
            web.post("/captured/{id}/release", act(self._captured.release)),
        ]

    def _for(self, scope: Scope, view: View) -> Handler:
        """Return a request handler that calls the view if the login session has this scope."""

        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            if session is None:
                return self._to_log_in(request)
            given = await _given(request)
            visitor = await self._visitor(request, session, given)
            try:
                if request.method == "POST" and not hmac.compare_digest(
                    given.get("check", "").encode(), session.check.encode()
                ):
                    raise PageError(403, "Not taken", "the form belongs to another session; reload the page")
                visitor.need(scope)
                return await view(visitor)
            except PageError as error:
                return await _failed(visitor, error.status, error.heading, str(error))
            except (ControlError, CaptureError, SearchError, ReleaseError) as error:
                known = (each for kind, each in _FAILURES.items() if isinstance(error, kind))
                status, heading = next(known, (503, "The relay cannot process this request"))
                failed = await _failed(visitor, status, heading, str(error))
                if status == 503:
                    failed.headers["Retry-After"] = "5"
                return failed

        return handle

    async def _visitor(
        self, request: web.Request, session: PageSession | None, given: Mapping[str, str]
    ) -> PageRequest:
        return PageRequest(
            request,
            self._operators,
            renderer=await self._load(),
            session=session,
            fields=given,
            sessions=self._sessions,
        )

    # --- sessions ---------------------------------------------------------------------------------------

    def _session(self, request: web.Request) -> PageSession | None:
        secret = request.cookies.get(_cookie(request), "")
        by_itself = "X-By-Itself" in request.headers or request.path == "/tail/events"
        session = self._sessions.find(secret, by_itself=by_itself) if secret else None
        if session is not None:
            VISIT.get().who = session.token.name
        return session

    def _to_log_in(self, request: web.Request) -> web.Response:
        if request.method != "GET" or request.path == "/tail/events":
            response = see_other("/login")
        else:
            response = see_other(f"/login?{urlencode({'to': request.path_qs})}")
        if "HX-Request" in request.headers:
            # A redirect would be followed, and the login page would be inserted into a part of this page.
            response = web.Response(status=401, headers={**FIELDS, "HX-Refresh": "true"})
        return response

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        given = await _given(request, MAX_LOGIN)
        visitor = await self._visitor(request, None, given)
        to = own_path(given.get("to", "/"))
        sandbox = self._operators.sandbox
        if sandbox is not None and sandbox.token:
            return await self._identified(request, visitor, sandbox.token, to)
        if not VISIT.get().private:
            problem = "the token would be sent in clear text; use https, or connect from this machine"
            return await visitor.page("login.html", 403, to=to, problem=problem)
        if request.method == "GET":
            return await visitor.page("login.html", to=to, problem="")
        return await self._identified(request, visitor, given.get("token", "").strip(), to)

    async def _identified(
        self, request: web.Request, visitor: PageRequest, text: str, to: str
    ) -> web.StreamResponse:
        visit = VISIT.get()
        try:
            token = self._operators.access.admit(text, visit, "read")
        except ApiError as error:
            return await visitor.page("login.html", error.status, to=to, problem=error)
        secret = self._sessions.begin(token, visit.client)
        login = f"login to the page from {visit.client}"
        self._operators.events.requested({"by": f"token {token.name}", "request": login})
        response = see_other(to)
        response.set_cookie(
            _cookie(request),
            secret,
            max_age=int(LONGEST),
            path="/",
            secure=visit.secure,
            httponly=True,
            samesite="Strict",
        )
        return response

    async def _log_out(self, visitor: PageRequest) -> web.StreamResponse:
        assert visitor.session is not None
        self._sessions.end(visitor.session.number)
        response = see_other("/login")
        response.del_cookie(_cookie(visitor.request), path="/", secure=VISIT.get().secure, samesite="Strict")
        return response

    async def _list_sessions(self, visitor: PageRequest) -> web.StreamResponse:
        moment = self._operators.clock.monotonic()
        return await visitor.page("sessions.html", sessions=self._sessions.open(), moment=moment)

    async def _end_sessions(self, visitor: PageRequest) -> web.StreamResponse:
        """End the login session that the operator has selected, or all sessions. Ending the session of
        another operator requires the scope `operate`.
        """
        which, mine = visitor.given("end"), visitor.session
        assert mine is not None
        if which != str(mine.number):
            visitor.need("operate")
        self._sessions.end(
            *(each.number for each in self._sessions.open() if which in ("all", str(each.number)))
        )
        return see_other("/sessions")

    # --- files ------------------------------------------------------------------------------------------

    async def _static(self, request: web.Request) -> web.StreamResponse:
        asset = (await self._load()).assets.get(request.match_info["name"])
        if asset is None:
            raise web.HTTPNotFound
        fields = {**FIELDS, "Cache-Control": FOR_GOOD}
        return web.Response(body=asset[0], content_type=asset[1], charset="utf-8", headers=fields)

    async def _load(self) -> PageRenderer:
        async with self._loading:
            if self._renderer is None:
                self._renderer = await OPERATORS.run(_renderer)
        return self._renderer


def _renderer() -> PageRenderer:
    from zonerelay.admin.page.rendering import PageRenderer  # noqa: PLC0415 - Jinja: see the module's header

    return PageRenderer()


async def _given(request: web.Request, most: int = MAX_FORM) -> dict[str, str]:
    """Return the query parameters of a GET request, or the fields of a form, which must be small and in
    UTF-8. Raise ApiError or HTTPException with a status for the error.

    aiohttp's `post` decodes with any codec that a request names, and parses multipart bodies. One megabyte of
    `charset=punycode` from an unauthenticated client blocked the event loop for 38 seconds.
    """
    if request.method != "POST":
        return dict(request.query)
    parameters = request.headers.get("Content-Type", "").partition(";")[2]
    if media_type(request) != FORM or not _UTF_8.fullmatch(parameters):
        raise web.HTTPUnsupportedMediaType
    body = await read_body(request, most, PATIENCE)
    try:
        fields = parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError:  # not UTF-8, or too many fields
        raise web.HTTPBadRequest from None
    return dict(fields)


async def _failed(visitor: PageRequest, status: int, heading: str, text: str) -> web.Response:
    return await visitor.page("error.html", status, heading=heading, text=text)


def _cookie(request: web.Request) -> str:
    """Return the name of the session cookie. It contains the port, because relays at different ports of one
    host share cookies.
    """
    prefix = "__Host-" if VISIT.get().secure else ""
    return f"{prefix}zonerelay-{request.url.port}"
