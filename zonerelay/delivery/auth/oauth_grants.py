"""Requests to a token server and its answers (RFC 6749) as values. No I/O.

A refusal is an error that only an operator can mend (a revoked grant, a wrong client secret). Every other
answer without a token is trouble that may pass. The text of neither contains a secret.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from zonerelay.config.settings import CredentialSettings, OauthGrant

MAX_ANSWER = 64 * 1024
MAX_TOKEN = 8 * 1024  # octets that fit into one line of AUTH, in base64

DEFAULT_LIFE = 600.0
"""Seconds that a token is used when the server does not say how long it is valid (RFC 6749 5.1)."""

SHORTEST_LIFE = 5.0
LONGEST_LIFE = 24 * 3600.0

_SHOWN = 300
_TOKEN = re.compile(r"[!-~]+", re.ASCII)
# RFC 6749 5.2, and what Microsoft and Google add: nothing of it passes by waiting.
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
    """There is no token; the text says why. `refused`: waiting does not help, an operator has to act."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Grant:
    """An access token. `refresh_token` replaces the one that was used; `""` keeps it."""

    access_token: str = field(repr=False)
    life: float
    refresh_token: str = field(default="", repr=False)


def request_form(settings: CredentialSettings, *, client_secret: str, refresh_token: str) -> dict[str, str]:
    """Returns the form of a token request. Empty values are left out, because servers refuse them."""
    form = {
        "grant_type": settings.grant.value,
        "client_id": settings.client_id,
        "client_secret": client_secret,
        "scope": settings.scope,
    }
    if settings.grant is OauthGrant.REFRESH_TOKEN:
        form["refresh_token"] = refresh_token
    return {name: value for name, value in form.items() if value}


def read_answer(status: int, body: bytes, *, secrets: Sequence[str] = ()) -> Grant:
    """Returns the token. Raises TokenError, whose text leaves out the `secrets` that a server may repeat."""
    document = _document(body)
    if status == 200:
        return _granted(document)
    error = document.get("error")
    if not isinstance(error, str):
        # RFC 6749 5.2: a server that says 401 does not know the client.
        text = f"it answered {status}" + ("" if document else " without an error code")
        raise TokenError(text, refused=status == 401)
    described = document.get("error_description")
    words = f"{error}: {described}" if isinstance(described, str) and described else error
    for secret in filter(None, secrets):  # before the text is cut: a part of a secret is a secret, too
        words = words.replace(secret, "[secret]")
    text = f"it answered {status} {_printable(words)}"
    raise TokenError(text, refused=error in _REFUSALS or status == 401)


def _document(body: bytes) -> dict[str, object]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _granted(document: dict[str, object]) -> Grant:
    token = document.get("access_token")
    if not isinstance(token, str) or len(token) > MAX_TOKEN or not _TOKEN.fullmatch(token):
        raise TokenError("its answer has no access token that can be used")
    kind = document.get("token_type", "bearer")
    if not isinstance(kind, str) or kind.lower() != "bearer":
        raise TokenError("its token is not of the type Bearer")
    refresh = document.get("refresh_token")
    if not isinstance(refresh, str) or len(refresh) > MAX_ANSWER or not _TOKEN.fullmatch(refresh):
        refresh = ""
    return Grant(token, _life(document.get("expires_in")), refresh)


def _life(expires_in: object) -> float:
    """Returns the life of a token in seconds. Some servers write the number as text."""
    if isinstance(expires_in, bool) or not isinstance(expires_in, int | float | str):
        return DEFAULT_LIFE
    try:
        seconds = float(expires_in)
    except (ValueError, OverflowError):
        return DEFAULT_LIFE
    if math.isnan(seconds) or seconds <= 0:
        return DEFAULT_LIFE
    return min(max(seconds, SHORTEST_LIFE), LONGEST_LIFE)


def _printable(text: str) -> str:
    flat = " ".join(text[: 2 * _SHOWN].split())
    return "".join(c if c.isprintable() else "?" for c in flat)[:_SHOWN]
