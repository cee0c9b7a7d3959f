"""A service that gets a condition wrong, in either direction, is refused at the start of a shared queue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.store.spools import Spool, s3_settings
from tests.support.ports import LOOPBACK
from tests.support.s3_server import shared_moto
from zonerelay.config.settings import Backend
from zonerelay.model.clock import SystemClock
from zonerelay.store.contract import StoreOpenError

CONFLICT = (
    "<Error><Code>PreconditionFailed</Code><Message>At least one condition did not hold</Message></Error>"
)
DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
UNKNOWN = "<Error><Code>NotImplemented</Code><Message>A header is not implemented</Message></Error>"

Headers = dict[str, str]
Fault = Callable[["Service", str, str, Headers], web.Response | None]
"""Changes the headers of a request, or answers it."""


@dataclass
class Service:
    """moto's server, behind a fault. `versions` counts what was written of each object."""

    fault: Fault
    versions: dict[str, int] = field(default_factory=dict)

    async def answer(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = self.fault(self, request.method, str(request.rel_url), headers)
        if asked is not None:
            return asked
        body = await request.read()
        for name in ("host", "content-length", "transfer-encoding"):
            headers.pop(name, None)
        url = f"{shared_moto().url}{request.rel_url}"
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(request.method, url, data=body, headers=headers) as reply,
        ):
            if request.method == "PUT" and reply.status == 200:
                self.versions[request.path] = self.versions.get(request.path, 0) + 1
            kept = {name: reply.headers[name] for name in ("ETag", "Content-Range") if name in reply.headers}
            return web.Response(status=reply.status, body=await reply.read(), headers=kept)


def conflict() -> web.Response:
    return web.Response(status=412, text=CONFLICT)


def refuses_right_matches(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return conflict() if method == "PUT" and "if-match" in headers else None


def refuses_matches_of_rewritten_objects(
    service: Service, method: str, path: str, headers: Headers
) -> web.Response | None:
    written = service.versions.get(path.partition("?")[0], 0)
    return conflict() if method == "PUT" and "if-match" in headers and written > 1 else None


def ignores_matches(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    headers.pop("if-match", None)
    return None


def ignores_none_match(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    headers.pop("if-none-match", None)
    return None


def refuses_new_objects(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return conflict() if "if-none-match" in headers else None


def knows_no_match(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return web.Response(status=501, text=UNKNOWN) if "if-match" in headers else None


def writes_where_nothing_is(
    service: Service, method: str, path: str, headers: Headers
) -> web.Response | None:
    name = path.partition("?")[0]
    if method == "DELETE":
        service.versions[name] = 0
    elif not service.versions.get(name):
        headers.pop("if-match", None)
    return None


def denies_deleting(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return web.Response(status=403, text=DENIED) if method == "DELETE" else None


def denies_listing(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return web.Response(status=403, text=DENIED) if method == "GET" and "list-type" in path else None


def denies_uploads(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return web.Response(status=403, text=DENIED) if method == "POST" else None


def misjudges_deletes(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return conflict() if method == "DELETE" and "if-match" in headers else None


def has_no_fault(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return None


@pytest.fixture
async def spool(request: pytest.FixtureRequest, home: None) -> AsyncIterator[Spool]:
    application = web.Application(client_max_size=10_000_000)
    application.router.add_route("*", "/{path:.*}", Service(request.param).answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, LOOPBACK, 0)
    await site.start()
    port = runner.addresses[0][1]
    settings = s3_settings(f"http://{LOOPBACK}:{port}", lease=60.0)
    yield Spool(Path("spool"), backend=Backend.S3, s3=settings, clock=SystemClock())
    await runner.cleanup()


@pytest.mark.parametrize(
    ("spool", "text"),
    [
        (refuses_right_matches, "refuses a PUT with an If-Match that is right"),
        (refuses_matches_of_rewritten_objects, "refuses a PUT with an If-Match that is right"),
        (ignores_matches, "carries out a PUT with an If-Match that is wrong"),
        (writes_where_nothing_is, "carries out a PUT with If-Match where no object is"),
        (ignores_none_match, "carries out a PUT with If-None-Match: \\* where an object is"),
        (refuses_new_objects, "refuses a PUT with If-None-Match: \\* where no object is"),
        (knows_no_match, "does not know a PUT with an If-Match that is wrong"),
        (denies_deleting, "403 AccessDenied to DeleteObject"),
        (denies_listing, "403 AccessDenied to ListObjectsV2"),
        (denies_uploads, "403 AccessDenied to CreateMultipartUpload"),
    ],
    indirect=["spool"],
)
async def test_a_service_that_would_keep_or_double_mail_is_refused(spool: Spool, text: str) -> None:
    with pytest.raises(StoreOpenError, match=text):
        await spool.open()


@pytest.mark.parametrize(
    ("spool", "conditional"), [(has_no_fault, True), (misjudges_deletes, False)], indirect=["spool"]
)
async def test_a_delete_that_gets_conditions_wrong_is_done_without(spool: Spool, conditional: bool) -> None:
    async with spool:
        assert spool.store._objects.abilities.conditional_delete is conditional  # type: ignore[attr-defined]
