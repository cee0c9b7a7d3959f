"""An HTTPS server on loopback, scripted page by page, with certificates of an authority of its own.

    async with HttpsServer(trustme.CA(), "mta-sts.example.com") as server:
        server.pages["/.well-known/mta-sts.txt"] = Page("version: STSv1\\n…")
        ...
        assert server.asked == [("mta-sts.example.com", "GET", "/.well-known/mta-sts.txt")]

`Page.delay` seconds pass before the answer; `server.names` says which names were asked for in the handshake.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import trustme
from aiohttp import web

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Page:
    body: str | bytes = ""
    status: int = 200
    content_type: str = "text/plain"
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0


class HttpsServer:
    def __init__(self, authority: trustme.CA, *names: str) -> None:
        self.authority = authority
        self.pages: dict[str, Page] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.forms: list[dict[str, str]] = []
        self.names: list[str | None] = []
        self.port = 0
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.show_certificate_for(*names)
        self._context.sni_callback = self._hear_name
        self._runner: web.ServerRunner | None = None

    def show_certificate_for(self, *names: str, authority: trustme.CA | None = None) -> None:
        (authority or self.authority).issue_cert(*names).configure_cert(self._context)

    def trust(self, directory: Path) -> Path:
        """A file with the authority's certificate, for SSL_CERT_FILE."""
        path = directory / "authority.pem"
        self.authority.cert_pem.write_to_path(str(path))
        return path

    def client_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        """On the same port as before, after a `stop`."""
        self._runner = web.ServerRunner(web.Server(self._serve), shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, LOOPBACK, port or self.port, ssl_context=self._context)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append((request.host.partition(":")[0], request.method, request.path_qs))
        self.forms.append({name: str(value) for name, value in (await request.post()).items()})
        page = self.pages.get(request.path, Page("not here", status=404))
        if page.delay:
            await asyncio.sleep(page.delay)
        body = page.body.encode() if isinstance(page.body, str) else page.body
        return web.Response(
            body=body, status=page.status, headers={**page.headers, "Content-Type": page.content_type}
        )

    def _hear_name(self, connection: object, name: str | None, context: ssl.SSLContext) -> None:
        self.names.append(name)


@asynccontextmanager
async def served(application: web.Application) -> AsyncIterator[str]:
    """Serve an application over HTTP on loopback, and yield its URL."""
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, LOOPBACK, 0).start()
    yield f"http://{LOOPBACK}:{runner.addresses[0][1]}"
    await runner.cleanup()
