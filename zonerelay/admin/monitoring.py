"""Serves the monitoring endpoints `/metrics`, `/healthz` and `/readyz`. They change nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from zonerelay.telemetry.metrics.metrics import CONTENT_TYPE

PATHS = frozenset(("/metrics", "/healthz", "/livez", "/readyz"))


@dataclass(frozen=True, slots=True)
class Monitoring:
    """Serves the monitoring endpoints. `metrics` returns the exposition, and `before_metrics` is awaited
    before it to update slow gauges. `readiness` returns the reasons why the relay is not ready.
    """

    metrics: Callable[[], bytes]
    readiness: Callable[[], Awaitable[tuple[str, ...]]]
    before_metrics: Callable[[], Awaitable[None]] | None

    def routes(self) -> Sequence[web.RouteDef]:
        return [
            web.get("/metrics", self._get_metrics),
            web.get("/healthz", self._get_health),
            web.get("/livez", self._get_health),  # the name in Kubernetes and Mailpit
            web.get("/readyz", self._get_readiness),
        ]

    async def _get_metrics(self, request: web.Request) -> web.Response:
        if self.before_metrics is not None:
            await self.before_metrics()
        return web.Response(body=self.metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def _get_health(self, request: web.Request) -> web.Response:
        """Respond with `ok`. The response itself proves that the event loop is running."""
        return web.Response(text="ok\n")

    async def _get_readiness(self, request: web.Request) -> web.Response:
        reasons = await self.readiness()
        body = msgspec.json.encode({"ready": not reasons, "reasons": reasons}) + b"\n"
        return web.Response(body=body, status=503 if reasons else 200, content_type="application/json")
