"""The HTTP server of a [[listener]] with protocol = "http": mail of one's own, and nothing else of the API.

Its connections come without PROXY header and TLS (`inbound/listen/http_connection`), and say whether another
machine can read along. A token is needed for every request, so no web page reaches it through DNS rebinding,
and it answers to every name. A client that was not let in gets one answer. A connection that is idle for
`idle_timeout` ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from zonerelay.admin.api.routes import Api
from zonerelay.admin.operators import Operators
from zonerelay.admin.requests import OPTIONS, answered, dress, visit_of
from zonerelay.admin.submission.verbs import SUBMISSION
from zonerelay.admin.visit import VISIT
from zonerelay.config.settings import ListenerSettings, UnsafeListener
from zonerelay.inbound.listen.http_connection import PRIVATE
from zonerelay.routing.addresses import Networks


class SubmissionServer:
    """A submission server. `rules` gives the settings of the listener as they are now."""

    def __init__(self, operators: Operators, rules: Callable[[], ListenerSettings]) -> None:
        self._operators = operators
        self._rules = rules
        self._api = Api(operators, SUBMISSION, is_open=False)
        self._proxies = (rules().xclient_networks, Networks(rules().xclient_networks))
        self._server = web.Server(
            self._handle,  # type: ignore[arg-type]  # the verbs need no more than a BaseRequest
            **OPTIONS,
            keepalive_timeout=rules().idle_timeout,
        )

    def connection(self) -> asyncio.Protocol:
        return self._server()

    async def close(self, timeout: float) -> None:
        """End idle connections, and the others after the request at hand, or after `timeout` seconds."""
        self._server.pre_shutdown()
        await self._server.shutdown(timeout)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        transport, rules = request.transport, self._rules()
        secure = transport is not None and bool(transport.get_extra_info(PRIVATE))
        visit = visit_of(request, self._trusted(rules), secure=secure)
        if UnsafeListener.CLEARTEXT_AUTH in rules.unsafe or rules.address.startswith("unix:"):
            visit.private = True
        VISIT.set(visit)
        if request.headers.get("Expect", "").lower() == "100-continue":  # curl waits a second for it
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer has not begun
        response = await answered(request, self._api.serve, self._operators.trouble)
        await dress(request, response)
        response.headers["Server"] = "relay"  # or aiohttp names itself and Python, with their versions
        if not visit.who or not request.content.at_eof():
            response.force_close()  # what is left of a body is not read for the sake of a connection
        return response

    def _trusted(self, rules: ListenerSettings) -> Networks:
        if self._proxies[0] is not rules.xclient_networks:
            self._proxies = (rules.xclient_networks, Networks(rules.xclient_networks))
        return self._proxies[1]
