"""A token server on loopback (RFC 6749), which answers as it is told to."""

import asyncio
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class TokenServer:
    """Gives tokens `{prefix}1`, `{prefix}2`, …; `answer` replaces that. `forms`: what it was asked.

    `rotates`: with each token there is a new refresh token, and only that is taken the next time.
    """

    refresh_token: str = "refresh-token-0"
    client_secret: str = "client-secret"
    prefix: str = "access-token-"
    expires_in: object = 3600
    rotates: bool = False
    delay: float = 0.0
    answer: web.Response | None = None
    forms: list[dict[str, str]] = field(default_factory=list)
    given: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/tenant/oauth2/v2.0/token"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/tenant/oauth2/v2.0/token", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.Response:
        form = {name: str(value) for name, value in (await request.post()).items()}
        self.forms.append(form)
        if self.delay:
            await asyncio.sleep(self.delay)
        if self.answer is not None:
            text = self.answer.text
            return web.Response(status=self.answer.status, text=text, content_type=self.answer.content_type)
        if form.get("client_secret") != self.client_secret:
            return web.json_response({"error": "invalid_client", "error_description": "who?"}, status=401)
        if form["grant_type"] == "refresh_token" and form.get("refresh_token") != self.refresh_token:
            return web.json_response({"error": "invalid_grant", "error_description": "expired"}, status=400)
        self.given += 1
        document: dict[str, object] = {"token_type": "Bearer", "access_token": f"{self.prefix}{self.given}"}
        if self.expires_in is not None:
            document["expires_in"] = self.expires_in
        if self.rotates:
            document["refresh_token"] = self.refresh_token = f"refresh-token-{self.given}"
        return web.json_response(document)
