"""Serves `/v1/` on the control socket to the users of this machine who may connect to it. Its peer
credentials authenticate them.

root, the relay's own user and users whose primary group is the relay's group get the scope `operate`. The log
has the name of the user, with the name of the login user if that is another one. A connection without a
request in `REQUEST_TIMEOUT` seconds is aborted.
"""

import asyncio
import contextlib
import os
import pwd
import socket
import struct
from pathlib import Path

from aiohttp import web

from zonerelay.admin.api.routes import Api
from zonerelay.admin.api.verbs import VERBS
from zonerelay.admin.operators import Operators
from zonerelay.admin.problems import ApiError
from zonerelay.admin.requests import OPTIONS, VISIT, RequestIdentity, answered, dress

REQUEST_TIMEOUT = 10.0
SHUTDOWN_TIMEOUT = 1.0
_NO_LOGIN = 2**32 - 1
"""The loginuid on Linux of a process that was not started in a login session."""


class PeerServer:
    """The HTTP server of the control socket."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._api = Api(operators, VERBS)
        self._server = web.Server(self._handle, **OPTIONS)  # type: ignore[arg-type]  # a BaseRequest is enough
        self._listening: asyncio.Server | None = None
        self._silent: set[web.RequestHandler] = set()
        """Connections that have not sent a request yet."""

    async def start(self, listener: socket.socket, backlog: int) -> None:
        """Start accepting connections at `listener`, which the server now owns."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_unix_server(self._connection, sock=listener, backlog=backlog)

    def _connection(self) -> asyncio.Protocol:
        protocol = self._server()
        self._silent.add(protocol)
        asyncio.get_running_loop().call_later(REQUEST_TIMEOUT, self._let_go, protocol)
        return protocol

    def _let_go(self, protocol: web.RequestHandler) -> None:
        if protocol in self._silent:
            self._silent.discard(protocol)
            if protocol.transport is not None:
                protocol.transport.abort()

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
        self._server.pre_shutdown()
        await self._server.shutdown(SHUTDOWN_TIMEOUT)
        await self._operators.asking.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.transport is None:
            raise ConnectionResetError
        uid, gid, name = caller(request.transport.get_extra_info("socket"))
        VISIT.set(RequestIdentity("", secure=True, private=True, peer=name))
        self._silent.discard(request.protocol)
        response: web.StreamResponse
        if uid not in (0, os.geteuid()) and gid != os.getegid():
            text = f"the user {name} is not allowed to operate this relay"
            response = ApiError(403, "forbidden", text).response()
        else:
            response = await answered(request, self._api.serve, self._operators.events.error)
        if not response.prepared:
            await dress(request, response)
        return response


def caller(connection: socket.socket) -> tuple[int, int, str]:
    """Return the user and group of a socket's client, and its name for the log, such as `root (alice)`."""
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    login = uid
    with contextlib.suppress(OSError, ValueError):
        login = int(Path(f"/proc/{pid}/loginuid").read_text())
    known = login not in (uid, _NO_LOGIN)
    return uid, gid, f"{_user(uid)} ({_user(login)})" if known else _user(uid)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
