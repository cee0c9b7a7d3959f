"""One request of the operators' page: its session, the queries to the relay, and the resulting page.

Sessions are in memory, and limited in number and in time. A session begins with a token and has its name and
scope. It ends `IDLE` seconds after the operator's last request for a page, `LONGEST` seconds after the login,
when the operator ends it, when its token becomes invalid, and with the process. The cookie contains a secret,
of which only the hash is in memory.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import web

from zonerelay.admin.operators import Operators
from zonerelay.config.credentials.identities import Scope, Token
from zonerelay.operations.answers import EndFrame, Frame
from zonerelay.operations.catalogue import OperationCall
from zonerelay.operations.requests import Request
from zonerelay.process.threads import OPERATORS

if TYPE_CHECKING:
    from zonerelay.admin.page.rendering import PageRenderer
    from zonerelay.control.history import AskRelay

F = TypeVar("F")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "frame-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
FIELDS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "same-origin",  # with "no-referrer", our own forms would have the origin "null"
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
MAX_VALUE = 1000
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
IDLE = 3600.0
LONGEST = 12 * 3600.0
MAX_SESSIONS = 100
"""The maximum number of sessions. Beyond it, the longest idle session of the token with the most sessions is
ended.
"""


class PageSession(msgspec.Struct):
    """A login session of the operators' page. `number` identifies it in the list of sessions; `check` is
    included in every form.
    """

    number: int
    token: Token
    address: str
    began: float
    used: float
    check: str = msgspec.field(default_factory=lambda: secrets.token_urlsafe(18))


class Sessions:
    """The open login sessions of the operators' page. `now` is a monotonic clock; `is_valid` returns whether
    a token is still valid.
    """

    def __init__(self, now: Callable[[], float], is_valid: Callable[[Token], bool]) -> None:
        self._now = now
        self._is_valid = is_valid
        self._sessions: dict[bytes, PageSession] = {}
        self._begun = 0

    def begin(self, token: Token, address: str) -> str:
        """Begin a login session, and return the secret for its cookie."""
        self._expire()
        if len(self._sessions) >= MAX_SESSIONS:
            counts = Counter(each.token.name for each in self._sessions.values())
            ranks = {key: (-counts[each.token.name], each.used) for key, each in self._sessions.items()}
            del self._sessions[min(ranks, key=ranks.__getitem__)]
        secret, now = secrets.token_urlsafe(32), self._now()
        self._begun += 1
        self._sessions[_hashed(secret)] = PageSession(self._begun, token, address, now, now)
        return secret

    def find(self, secret: str, *, by_itself: bool) -> PageSession | None:
        """Return the open login session that the secret in a cookie identifies, or None. With `by_itself`,
        the page sent the request without the operator; this does not extend the session.
        """
        self._expire()
        session = self._sessions.get(_hashed(secret))
        if session is not None and not by_itself:
            session.used = self._now()
        return session

    def open(self) -> list[PageSession]:
        """Return the open sessions of all operators, the most recently used first."""
        self._expire()
        return sorted(self._sessions.values(), key=lambda each: -each.used)

    def end(self, *numbers: int) -> None:
        self._sessions = {key: each for key, each in self._sessions.items() if each.number not in numbers}

    def _expire(self) -> None:
        now = self._now()
        self._sessions = {
            key: each
            for key, each in self._sessions.items()
            if now - each.used < IDLE and now - each.began < LONGEST and self._is_valid(each.token)
        }


def _hashed(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


class PageError(Exception):
    """A request to the page cannot be answered, so an error page is shown. The text is for the operator."""

    def __init__(self, status: int, heading: str, text: str) -> None:
        super().__init__(text)
        self.status, self.heading = status, heading


@dataclass(eq=False, repr=False)
class PageRequest:
    """One request to the operators' page, with its login session. `fields` are those of the form, or the
    query parameters.
    """

    request: web.Request
    operators: Operators
    _: KW_ONLY
    renderer: PageRenderer
    session: PageSession | None
    fields: Mapping[str, str]
    sessions: Sessions

    def __post_init__(self) -> None:
        self.now = self.operators.clock.now()

    def given(self, name: str) -> str:
        """Return the value of a submitted field without surrounding white space, or "" if it is missing.
        Raise PageError if its value is too long or has control characters.
        """
        value = self.fields.get(name, "").strip()
        if len(value) > MAX_VALUE:
            raise PageError(400, "Too long", f"{name} may have at most {MAX_VALUE} characters")
        if _CONTROL.search(value):
            raise PageError(400, "Not taken", f"{name} contains a control character")
        return value

    @property
    def caller(self) -> str:
        return "" if self.session is None else f"token {self.session.token.name}"

    @property
    def operates(self) -> bool:
        return self.session is not None and self.session.token.scope == "operate"

    @property
    def addresses(self) -> AskRelay | None:
        """The function that asks the relay for the addresses behind pseudonyms, or None if the session does
        not have the scope `operate`.
        """
        return self.operators.addresses if self.operates else None

    def need(self, scope: Scope) -> None:
        """Raise PageError if the session does not have this scope."""
        if scope == "operate" and not self.operates:
            raise PageError(403, "Not allowed", "your token has the scope read and does not allow changes")

    async def one(self, request: Request, answer: type[F]) -> F:
        """Send a request to the relay, and return the single frame of its response. Raise ControlError on
        failure.
        """
        return await self.operators.asking.one(request, answer, self.caller)

    async def all(self, request: Request, answer: type[F]) -> tuple[tuple[F, ...], EndFrame]:
        """Send a request to the relay, and return the frames of its response and the final `EndFrame`. Raise
        ControlError on failure.
        """
        return await self.operators.asking.all(request, answer, self.caller)

    def asked(self, request: Request) -> OperationCall:
        return OperationCall(request=request, caller=self.caller, clear=self.operates)

    def frames(self, request: Request, *, beat: float | None = None) -> AsyncGenerator[Frame, None]:
        return self.operators.asking.frames(self.asked(request), beat=beat)

    async def page(self, template: str, code: int = 200, /, **values: object) -> web.Response:
        """Render a template in a thread, so that a large page does not delay mail."""
        common = {
            "session": self.session,
            "operates": self.operates,
            "here": self.request.path,
            "now": self.now,
            "captures": self.operators.captures,
        }
        text = await OPERATORS.run(self.renderer.render, template, {**common, **values})
        body = text.encode("utf-8", "replace")
        return web.Response(body=body, status=code, content_type="text/html", charset="utf-8", headers=FIELDS)

    async def done(
        self, *lines: str, back: str, command: str = "", act: str = "", **more: object
    ) -> web.Response:
        """Render a page that reports the result of a change. `act` is the id of a change that can be
        undone.
        """
        values = {"missing": (), "lines": lines, "back": back, "command": command, "act": act}
        return await self.page("done.html", **{**values, **more})


_OWN_PATH = re.compile(r"/(?![/\\])[!-\[\]-~]*")


def own_path(path: str) -> str:
    """Return the path if a redirect to it keeps the browser on this host, or "/" otherwise. Browsers leave
    out tabs and line ends and read a backslash as a slash, so `/<TAB>/host` leads to that host.
    """
    return path if _OWN_PATH.fullmatch(path) else "/"


def see_other(path: str) -> web.Response:
    return web.Response(status=303, headers={**FIELDS, "Location": own_path(path)})
