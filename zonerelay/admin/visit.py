"""The facts about a request other than its header fields, such as its client."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from aiohttp import web

VISIT: ContextVar[RequestIdentity] = ContextVar("visit")
"""The visit of the request that the current task answers."""


@dataclass(slots=True)
class RequestIdentity:
    """The client and the identity of one HTTP request.

    `client` is the client's address, behind a proxy the one that the proxy names.
    `secure`: TLS is used, here or at the proxy. `private`: tokens and sessions do not cross a network
    unencrypted, because of TLS, a proxy, or a client on this machine. A part sets `who` to a token's name
    after authentication; the connection may then serve other requests. `answered`: the response has been
    written. `peer` is the user of this machine who is connected to the control socket.
    """

    client: str
    secure: bool
    private: bool
    who: str = ""
    answered: bool = False
    peer: str = ""


def plain(status: int, text: str, fields: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=f"{text}\n", headers=fields)
