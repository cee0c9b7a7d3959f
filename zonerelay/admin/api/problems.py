"""Failures as `application/problem+json` (RFC 9457). Their `code` is an outside contract."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Literal

import msgspec
from aiohttp import web

from zonerelay.operations.errors import ControlError, Kind

TYPE = "application/problem+json"

Code = Literal[
    "unauthorized",
    "forbidden",
    "clear_text",
    "too_many_failures",
    "not_found",
    "method_not_allowed",
    "not_acceptable",
    "unsupported_media_type",
    "too_large",
    "too_slow",
    "malformed",
    "invalid",
    "not_possible",
    "unavailable",
    "busy",
    "refused",
    "too_many",
    "unexpected",
]


class FieldError(msgspec.Struct, frozen=True, kw_only=True):
    """`pointer` is a JSON pointer into the body, or the name of a parameter behind a slash."""

    pointer: str
    detail: str


class ProblemBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RFC 9457; `code` is stable, `detail` is for people."""

    title: str
    status: int
    code: Code
    detail: str
    type: str = "about:blank"
    errors: Sequence[FieldError] = ()
    smtp_reply: str = ""
    """What an SMTP client would have been told."""


class Problem(Exception):
    """An answer that is no success."""

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
        self._fields = dict(fields or {})

    def response(self) -> web.Response:
        body = msgspec.json.encode(self.body) + b"\n"
        headers = {"Content-Type": TYPE, **self._fields}
        return web.Response(status=self.body.status, body=body, headers=headers)


def invalid(error: msgspec.ValidationError, what: str) -> Problem:
    """Of a body or of parameters, `what`, that are not as the description says."""
    text, at, path = str(error).partition(" - at `$")
    pointer = re.sub(r"[.\[]+", "/", path.rstrip("`").replace("]", "")) if at else ""
    return Problem(422, "invalid", f"{what}: {text}", errors=[FieldError(pointer=pointer, detail=text)])


def wrong(pointer: str, detail: str) -> Problem:
    return Problem(422, "invalid", detail, errors=[FieldError(pointer=pointer, detail=detail)])


_STATUSES = {
    Kind.NOT_FOUND: 404,
    Kind.NOT_POSSIBLE: 409,
    Kind.INVALID: 422,
    Kind.BUSY: 503,
    Kind.UNAVAILABLE: 503,
    Kind.FORBIDDEN: 403,
    Kind.UNEXPECTED: 500,
}


def problem_of(error: ControlError) -> Problem:
    errors = [FieldError(pointer=error.pointer, detail=str(error))] if error.pointer else []
    fields = {"Retry-After": "5"} if error.kind is Kind.BUSY else {}
    return Problem(_STATUSES[error.kind], error.kind.value, str(error), errors=errors, fields=fields)
