"""Reads the forms of the page: small, in time, in UTF-8, and in no other encoding.

aiohttp's `post` decodes by whichever codec a request names, and takes the parts of a multipart body apart:
a stranger's megabyte of `charset=punycode` held the event loop for 38 seconds.
"""

from __future__ import annotations

import asyncio
import re
from urllib.parse import parse_qsl

from aiohttp import web

from zonerelay.admin.requests import media_type

FORM = "application/x-www-form-urlencoded"
MAX_LOGIN = 4 * 1024
"""Bytes of a form that a stranger sends: a token, and where the log-in leads."""
MAX_FORM = 16 * 1024
MAX_FIELDS = 50
PATIENCE = 5.0
"""Seconds that a form may take."""
_UTF_8 = re.compile(r'\s*(?:charset="?utf-8"?)?\s*', re.IGNORECASE)
"""The parameters of its Content-Type."""


async def read_form(request: web.Request, most: int = MAX_FORM) -> dict[str, str]:
    """Return the fields. Raises HTTPException, with a status that says what is wrong."""
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
    except ValueError:  # no UTF-8, or too many fields
        raise web.HTTPBadRequest from None
    return dict(fields)
