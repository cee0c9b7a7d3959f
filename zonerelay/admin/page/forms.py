"""Reads the forms of the page: small, within a time limit, and in UTF-8 only.

aiohttp's `post` decodes with any codec that a request names, and parses multipart bodies. One megabyte of
`charset=punycode` from an unauthenticated client blocked the event loop for 38 seconds.
"""

from __future__ import annotations

import asyncio
import re
from urllib.parse import parse_qsl

from aiohttp import web

from zonerelay.admin.requests import media_type

FORM = "application/x-www-form-urlencoded"
MAX_LOGIN = 4 * 1024
"""Bytes of the login form of an unauthenticated client: a token, and the page to show after the login."""
MAX_FORM = 16 * 1024
MAX_FIELDS = 50
PATIENCE = 5.0
"""Seconds in which a form must arrive."""
_UTF_8 = re.compile(r'\s*(?:charset="?utf-8"?)?\s*', re.IGNORECASE)
"""The allowed parameters of its Content-Type."""


async def read_form(request: web.Request, most: int = MAX_FORM) -> dict[str, str]:
    """Return the fields. Raise HTTPException with a status for the error."""
    parameters = request.headers.get("Content-Type", "").partition(";")[2]
    if media_type(request) != FORM or not _UTF_8.fullmatch(parameters):
        raise web.HTTPUnsupportedMediaType
    body = bytearray()
    try:
        async with asyncio.timeout(PATIENCE):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > most:
                    raise web.HTTPRequestEntityTooLarge(most, len(body))
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    try:
        fields = parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError:  # not UTF-8, or too many fields
        raise web.HTTPBadRequest from None
    return dict(fields)
