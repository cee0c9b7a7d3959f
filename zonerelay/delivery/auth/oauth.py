"""Fetches and caches access tokens for XOAUTH2, using a refresh token or the application's own secret.

For each credential one request runs at a time, and all callers wait for the same token. A token is used until
shortly before it expires, and is replaced before that in the background, so that no mail waits. How long the
token server is not queried after a failure is decided as for a refused login (`accounts.py`).

TokenError (see its `refused`) and SecretError are raised. No token appears in a text, log or repr.

Requests to a token server and its answers (RFC 6749) are values without I/O. A refusal is an error that only
an operator can correct (a revoked grant, a wrong client secret). Every other answer without a token is a
temporary failure. Neither message contains a secret.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from urllib.parse import urlsplit

from zonerelay.config.credentials.secrets import SecretError
from zonerelay.config.settings import CredentialSettings, OauthGrant
from zonerelay.delivery.auth.accounts import RefreshTokenFiles, Secrets
from zonerelay.model.clock import Clock
from zonerelay.process.tasks import cancel_all
from zonerelay.process.threads import FILES
from zonerelay.process.webclient import Response, WebError, fetch

MAX_ANSWER = 64 * 1024
MAX_TOKEN = 8 * 1024  # bytes that fit into one line of AUTH, in base64

DEFAULT_LIFE = 600.0
"""Seconds for which a token is used if the server does not report its lifetime (RFC 6749 5.1)."""

SHORTEST_LIFE = 5.0
LONGEST_LIFE = 24 * 3600.0

_SHOWN = 300
_TOKEN = re.compile(r"[!-~]+", re.ASCII)
# RFC 6749 5.2, and the additions of Microsoft and Google. None of these errors is temporary.
_REFUSALS = frozenset(
    (
        "invalid_grant",
        "invalid_client",
        "invalid_request",
        "invalid_scope",
        "unauthorized_client",
        "unsupported_grant_type",
        "access_denied",
        "interaction_required",
        "consent_required",
        "admin_policy_enforced",
        "org_internal",
        "disabled_client",
        "deleted_client",
    )
)


class TokenError(Exception):
    """A token could not be fetched. The message is the reason. If `refused` is true, only an operator can
    solve the problem.
    """

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class AccessToken:
    """An access token with its lifetime in seconds. `refresh_token` replaces the one that was used, unless it
    is `""`.
    """

    access_token: str = field(repr=False)
    life: float
    refresh_token: str = field(default="", repr=False)


def request_form(settings: CredentialSettings, *, client_secret: str, refresh_token: str) -> dict[str, str]:
    """Return the form fields of a token request. Empty values are omitted, because servers refuse them."""
    form = {
        "grant_type": settings.grant.value,
        "client_id": settings.client_id,
        "client_secret": client_secret,
        "scope": settings.scope,
    }
    if settings.grant is OauthGrant.REFRESH_TOKEN:
        form["refresh_token"] = refresh_token
    return {name: value for name, value in form.items() if value}


def read_answer(status: int, body: bytes, *, secrets: Sequence[str] = ()) -> AccessToken:
    """Return the access token from a token server's response. Raise TokenError, whose message omits the
    `secrets` that a server may repeat.
    """
    document = _document(body)
    if status == 200:
        return _granted(document)
    error = document.get("error")
    if not isinstance(error, str):
        # RFC 6749 5.2: a server that replies 401 does not know the client.
        text = f"the server responded with status {status}" + ("" if document else " without an error code")
        raise TokenError(text, refused=status == 401)
    described = document.get("error_description")
    words = f"{error}: {described}" if isinstance(described, str) and described else error
    for secret in filter(None, secrets):  # before the text is cut: a part of a secret is secret
        words = words.replace(secret, "[secret]")
    text = f"the server responded with status {status} {_printable(words)}"
    raise TokenError(text, refused=error in _REFUSALS or status == 401)


def _document(body: bytes) -> dict[str, object]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _granted(document: dict[str, object]) -> AccessToken:
    token = document.get("access_token")
    if not isinstance(token, str) or len(token) > MAX_TOKEN or not _TOKEN.fullmatch(token):
        raise TokenError("the response contains no usable access token")
    kind = document.get("token_type", "bearer")
    if not isinstance(kind, str) or kind.lower() != "bearer":
        raise TokenError("the token type is not Bearer")
    refresh = document.get("refresh_token")
    if not isinstance(refresh, str) or len(refresh) > MAX_ANSWER or not _TOKEN.fullmatch(refresh):
        refresh = ""
    return AccessToken(token, _life(document.get("expires_in")), refresh)


def _life(expires_in: object) -> float:
    """Return the lifetime of a token in seconds, from a response field that may be a number or a string."""
    try:
        seconds = float(expires_in) if isinstance(expires_in, int | float | str) else 0.0
    except (ValueError, OverflowError):
        seconds = 0.0
    return min(max(seconds, SHORTEST_LIFE), LONGEST_LIFE) if seconds > 0 else DEFAULT_LIFE  # nan is not


def _printable(text: str) -> str:
    flat = " ".join(text[: 2 * _SHOWN].split())
    return "".join(c if c.isprintable() else "?" for c in flat)[:_SHOWN]


TIMEOUT = 30.0

SPARE = 30.0
"""Seconds before its end from which a token is no longer used, because clocks differ and logins take time."""

AHEAD = 0.8
"""The part of its life after which a token is replaced in the background."""

RENEW_AGAIN = 60.0
"""Seconds from a renewal in the background to the next one, if it fails."""


Post = Callable[[str, Mapping[str, str]], Awaitable[Response]]
"""Posts a form. Raises WebError."""


async def post(url: str, form: Mapping[str, str]) -> Response:
    return await fetch(url, form=form, timeout=TIMEOUT, max_size=MAX_ANSWER)


@dataclass(eq=False, repr=False)
class TokenSource:
    """Fetches and caches the access tokens of one credential. Calls `warn` with problems of background
    requests.
    """

    settings: CredentialSettings
    _: KW_ONLY
    secrets: Secrets
    kept: RefreshTokenFiles
    clock: Clock
    warn: Callable[[str], None]
    post: Post = post

    def __post_init__(self) -> None:
        self._token = ""
        self._good_until = 0.0
        self._renew_at = 0.0
        self._unkept: tuple[str, str] | None = None
        self._fetching: asyncio.Task[str] | None = None

    async def material(self) -> tuple[str, str]:
        """Return the current client secret and refresh token. Raise SecretError."""
        secret, _, token = await self._read()
        return secret, token

    async def _read(self) -> tuple[str, str, str]:
        """Return the client secret, the operator's refresh token, and the refresh token that has
        replaced it.
        """
        settings = self.settings
        secret = await self.secrets.get(settings.client_secret) if settings.client_secret else ""
        if not settings.refresh_token:
            return secret, "", ""
        original = await self.secrets.get(settings.refresh_token)
        if self._unkept is not None and self._unkept[0] == original:
            return secret, original, self._unkept[1]
        return secret, original, await FILES.run(self.kept.current, settings.name, original)

    async def token(self) -> tuple[str, bool]:
        """Return a valid access token, and whether it was fetched just now. Raise TokenError and
        SecretError.
        """
        now = self.clock.monotonic()
        if self._token and now < self._good_until:
            if now >= self._renew_at and self._fetching is None:
                self._renew_at = now + RENEW_AGAIN
                self._begin().add_done_callback(self._renewed)
            return self._token, False
        return await self._fresh(), True

    async def another_than(self, refused: str) -> str:
        """Return an access token other than `refused`, which a server has rejected. Raise the same errors as
        `token`.
        """
        if self._token != refused and self.clock.monotonic() < self._good_until:
            return self._token
        return await self._fresh()

    async def _fresh(self) -> str:
        # A cancelled caller must not cancel the request, for which others wait.
        return await asyncio.shield(self._fetching or self._begin())

    def forget(self) -> None:
        """Discard the current access token, because a smarthost has refused it."""
        self._good_until = 0.0

    @property
    def is_fetching(self) -> bool:
        return self._fetching is not None

    async def close(self) -> None:
        await cancel_all(self._fetching)

    def _begin(self) -> asyncio.Task[str]:
        task = self._fetching = asyncio.get_running_loop().create_task(self._fetch())
        task.add_done_callback(self._fetched)
        return task

    def _fetched(self, task: asyncio.Task[str]) -> None:
        self._fetching = None
        if not task.cancelled():
            task.exception()  # the callers receive the error; if they were cancelled it is not needed

    def _renewed(self, task: asyncio.Task[str]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.warn(str(error))

    async def _fetch(self) -> str:
        grant = await self._ask()
        now = self.clock.monotonic()
        self._token = grant.access_token
        self._good_until = now + max(grant.life - SPARE, grant.life / 2)
        self._renew_at = now + grant.life * AHEAD
        return grant.access_token

    async def _ask(self) -> AccessToken:
        settings = self.settings
        client_secret, original, refresh_token = await self._read()
        form = request_form(settings, client_secret=client_secret, refresh_token=refresh_token)
        host = urlsplit(settings.token_url).hostname or ""
        try:
            answer = await self.post(settings.token_url, form)
            grant = read_answer(answer.status, answer.body, secrets=(client_secret, refresh_token))
        except WebError as error:
            raise TokenError(f"no token from {host}: {error}") from error
        except TokenError as error:
            raise TokenError(f"no token from {host}: {error}", refused=error.refused) from None
        if refresh_token and grant.refresh_token not in ("", refresh_token):
            await self._keep(original, grant.refresh_token)
        return grant

    async def _keep(self, original: str, token: str) -> None:
        """Store a new refresh token before the access token is used, so that a crash cannot lose it. It
        replaces only `original`, and not a token that the operator has stored since.
        """
        settings = self.settings
        try:
            if await self.secrets.get(settings.refresh_token) != original:
                return
            self._unkept = (original, token)
            await FILES.run(self.kept.replace, settings.name, settings.refresh_token, original, token)
        except SecretError as error:
            self.warn(str(error))  # the token works until the next start, and the operator is notified
        else:
            self._unkept = None
