"""The HTTP server of a [[listener]] with protocol = "http". It serves the submission requests and no other
API.

PROXY header and TLS are handled before it (`inbound/listen/http_listener`), which also reports whether the
connection is private. Every request needs a token, so a web page cannot reach it by DNS rebinding, and it
responds to every host name. An unauthenticated client gets one response. A connection is closed after
`idle_timeout`.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web

from zonerelay.admin.api.routes import Api
from zonerelay.admin.operators import Operators
from zonerelay.admin.requests import OPTIONS, VISIT, answered, dress, visit_of
from zonerelay.admin.submission.verbs import SUBMISSION
from zonerelay.config.settings import ListenerSettings, UnsafeListener
from zonerelay.inbound.listen.http_listener import PRIVATE
from zonerelay.routing.addresses import networks_of


class SubmissionServer:
    """The HTTP server of a [[listener]] for submissions. `rules` returns the current settings of the
    listener.
    """

    def __init__(self, operators: Operators, rules: Callable[[], ListenerSettings]) -> None:
        self._operators = operators
        self._rules = rules
        self._api = Api(operators, SUBMISSION, is_open=False)
        self._server = web.Server(
            self._handle,  # type: ignore[arg-type]  # the verbs need no more than a BaseRequest
            **OPTIONS,
            keepalive_timeout=rules().idle_timeout,
        )

    def connection(self) -> asyncio.Protocol:
        return self._server()

    async def close(self, timeout: float) -> None:
        """Close idle connections now, and the others after their current request or after `timeout`
        seconds.
        """
        self._server.pre_shutdown()
        await self._server.shutdown(timeout)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        transport, rules = request.transport, self._rules()
        secure = transport is not None and bool(transport.get_extra_info(PRIVATE))
        visit = visit_of(request, networks_of(rules.xclient_networks), secure=secure)
        if UnsafeListener.CLEARTEXT_AUTH in rules.unsafe or rules.address.startswith("unix:"):
            visit.private = True
        VISIT.set(visit)
        if request.headers.get("Expect", "").lower() == "100-continue":  # curl waits a second for it
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the response has not begun
        response = await answered(request, self._api.serve, self._operators.events.error)
        await dress(request, response)
        response.headers["Server"] = "relay"  # otherwise aiohttp names itself and Python, with their versions
        if not visit.who or not request.content.at_eof():
            response.force_close()  # the rest of a body is not read to keep a connection open
        return response
