"""Handles requests to `/v1/`: authenticates and validates them, and reports failures as RFC 9457 problems.

The description needs no token. Without a token, a path that does not exist is answered with 401 like all
others, so that nothing is revealed about paths. Then scope, method, media types, parameters and body are
checked. A body is read only after its client was authenticated, has at most `MAX_BODY` bytes and may take at
most `BODY_TIMEOUT` seconds.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import msgspec
from aiohttp import web

from zonerelay.admin.api.openapi import document
from zonerelay.admin.api.verbs import JSON, LINES, ApiCall, Verb
from zonerelay.admin.operators import Operators, require, require_private
from zonerelay.admin.problems import ApiError, decoded, invalid, not_allowed, problem_of, texts_in, wrong
from zonerelay.admin.requests import VISIT, media_type, read_body
from zonerelay.config.credentials.identities import Token
from zonerelay.operations.errors import ControlError
from zonerelay.telemetry.logs.redact import RedactKeyError

MAX_BODY = 1024 * 1024
BODY_TIMEOUT = 30.0
DESCRIPTION = "/v1/openapi.json"

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_ZERO = re.compile(r"q\s*=\s*0(\.0*)?")
_SEGMENT = {"message_id": "[0-9a-f]{16}"}


class Api:
    """Handles requests to the HTTP API below `/v1/`, whose operations are defined in `verbs`. With `is_open`,
    the OpenAPI description, which names the release, needs no token.
    """

    def __init__(self, operators: Operators, verbs: Sequence[Verb], *, is_open: bool = True) -> None:
        self._is_open = is_open
        self._operators = operators
        self._verbs = verbs
        paths: dict[str, dict[str, Verb]] = defaultdict(dict)
        for verb in verbs:
            paths[verb.path][verb.method] = verb
        self._paths = {path: verbs for path, verbs in paths.items() if "{" not in path}
        self._patterns = [(_pattern(path), verbs) for path, verbs in paths.items() if "{" in path]

    @cache  # noqa: B019 - an Api lives as long as its process
    def _description(self) -> bytes:
        return document(self._verbs)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Check the token and the parameters of an API request, and respond to it. Raise ApiError for a
        failure.
        """
        if request.path == DESCRIPTION:
            if request.method not in ("GET", "HEAD"):
                raise not_allowed(("GET", "HEAD"))
            if not self._is_open:
                self._admit(request)
            return web.Response(body=self._description(), content_type=JSON)
        token = self._admit(request)
        caller = VISIT.get().peer or f"token {token.name}"
        path, verbs = self._find(request.path)
        allowed = _allowed(verbs)
        if request.method == "OPTIONS":
            return web.Response(status=204, headers={"Allow": ", ".join(allowed)})
        verb = verbs.get("GET" if request.method == "HEAD" else request.method)
        if verb is None:
            raise not_allowed(allowed)
        require(token, verb.scope, *([verb.also] if verb.also else []))
        lines = _accepts_lines(request, verb)
        parameters = _parameters(request, verb)
        body = None if verb.body is None else await _body(request, verb.body)
        if verb.audited:
            self._operators.events.requested({"by": caller, "request": f"{request.method} {request.path}"})
        call = ApiCall(self._operators, token, caller, request, path, parameters, body, lines)
        try:
            answer = await verb.run(call)
        except RedactKeyError as error:
            raise ApiError(503, "unavailable", str(error)) from error
        except ControlError as error:
            raise problem_of(error) from error
        if isinstance(answer, web.StreamResponse):
            return answer
        data = msgspec.json.encode(answer, enc_hook=str) + b"\n"
        return web.Response(status=verb.success, body=data, content_type=JSON)

    def _admit(self, request: web.Request) -> Token:
        visit = VISIT.get()
        if visit.peer:
            return Token(name=visit.peer, scope="operate", sha256="", created=0.0)
        require_private(visit)
        scheme, _, text = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            challenge = {"WWW-Authenticate": 'Bearer realm="zonerelay"'}
            words = "send a token: Authorization: Bearer zrt_…"
            raise ApiError(401, "unauthorized", words, fields=challenge)
        return self._operators.access.admit(text.strip(), visit)

    def _find(self, path: str) -> tuple[dict[str, str], dict[str, Verb]]:
        if path in self._paths:
            return {}, self._paths[path]
        for pattern, verbs in self._patterns:
            if match := pattern.fullmatch(path):
                return match.groupdict(), verbs
        raise ApiError(404, "not_found", f"{path} does not exist; {DESCRIPTION} lists all paths")


def _pattern(path: str) -> re.Pattern[str]:
    def group(match: re.Match[str]) -> str:
        return f"(?P<{match[1]}>{_SEGMENT.get(match[1], '[0-9A-Za-z_-]{1,64}')})"

    return re.compile(re.sub(r"{(\w+)}", group, path))


def _allowed(verbs: dict[str, Verb]) -> Sequence[str]:
    found = [*verbs, "OPTIONS"]
    return ["GET", "HEAD", *found[1:]] if found[0] == "GET" else found


def _accepts_lines(request: web.Request, verb: Verb) -> bool:
    """Return whether the client requests newline-delimited JSON. Raise ApiError if it accepts neither those
    nor the media type of the verb (RFC 9110 12.5.1, as far as two media types need it).
    """
    accepted = request.headers.getall("Accept", ())
    if not accepted:
        return False
    kind = verb.media.partition("/")[0]
    for each in ",".join(accepted).split(","):
        media, *parameters = (part.strip().lower() for part in each.split(";"))
        if media == LINES and verb.operation is not None and verb.operation.reply is not None:
            return True
        if media in ("", "*/*", f"{kind}/*", verb.media) and not any(map(_ZERO.fullmatch, parameters)):
            return False
    raise ApiError(406, "not_acceptable", f"the response is available only as {verb.media}")


def _parameters(request: web.Request, verb: Verb) -> msgspec.Struct:
    given: dict[str, str] = {}
    for name, value in request.query.items():
        if name in given and name != "to":
            raise ApiError(422, "invalid", f"the parameter {name} is given more than once")
        given[name] = f"{given[name]},{value}" if name in given else value
    _no_controls(given)
    try:
        return msgspec.convert(given, verb.parameters, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(error, "parameters", given, verb.parameters, strict=False) from error


async def _body(request: web.Request, of: type[msgspec.Struct]) -> msgspec.Struct:
    if media_type(request) != JSON:
        raise ApiError(415, "unsupported_media_type", f"send the body as Content-Type: {JSON}")
    octets = await read_body(request, MAX_BODY, BODY_TIMEOUT)
    body: msgspec.Struct = decoded(octets, of, "the body")
    _no_controls(msgspec.to_builtins(body))
    return body


def _no_controls(value: object) -> None:
    """Raise ApiError if a string in a request has a control character. These have no meaning in an operator's
    request, and stores and databases do not accept a NUL.
    """
    for pointer, text in texts_in(value):
        if _CONTROL.search(text):
            raise wrong(pointer, "must not contain a control character")
