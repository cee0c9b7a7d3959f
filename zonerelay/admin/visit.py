"""What the server knows of a request beside its fields, for the parts that answer it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from aiohttp import web

VISIT: ContextVar[Visit] = ContextVar("visit")
"""Of the request that this task answers."""


@dataclass(slots=True)
class Visit:
    """A visit. `client` is an address, behind a proxy the one that the proxy names. `secure`: over TLS, here
    or at the proxy. `private`: no token and no session is in clear text on a network, because of TLS, a
    proxy, or a client on this machine. A part sets `who`, a token's name, when it lets an identity in: the
    connection may then serve other requests. `answered`: the answer is written. `peer` is the user of this
    machine who has connected to the control socket.
    """

    client: str
    secure: bool
    private: bool
    who: str = ""
    answered: bool = False
    peer: str = ""


def plain(status: int, text: str, fields: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=f"{text}\n", headers=fields)
