"""A service that gets a condition wrong, in either direction, is refused at the start of a shared queue."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.store.builders import claim_ids, store_message
from tests.store.spools import Spool, s3_settings
from tests.support.https import served
from tests.support.s3_server import shared_moto
from zonerelay.config.settings import Backend
from zonerelay.model.clock import SystemClock
from zonerelay.store.contract import StoreOpenError

CONFLICT = (
    "<Error><Code>PreconditionFailed</Code><Message>At least one condition did not hold</Message></Error>"
)
DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
LOCKED = (
    "<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled><Rule><DefaultRetention>"
    "<Mode>GOVERNANCE</Mode><Days>1</Days></DefaultRetention></Rule></ObjectLockConfiguration>"
)
VERSIONED = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
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


def ignores_none_match(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    headers.pop("if-none-match", None)
    return None


def refuses_new_objects(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return conflict() if "if-none-match" in headers else None


def knows_no_conditions(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return web.Response(status=501, text=UNKNOWN) if "if-none-match" in headers else None


def denies_deleting(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return web.Response(status=403, text=DENIED) if method == "DELETE" else None


def denies_listing(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return web.Response(status=403, text=DENIED) if method == "GET" and "list-type" in path else None


def locks_objects(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return web.Response(text=LOCKED) if path.endswith("?object-lock") else None


def keeps_versions(service: Service, method: str, path: str, headers: Headers) -> web.Response | None:
    return web.Response(text=VERSIONED) if path.endswith("?versioning") else None


@pytest.fixture
async def spool(request: pytest.FixtureRequest, home: None) -> AsyncIterator[Spool]:
    application = web.Application(client_max_size=10_000_000)
    application.router.add_route("*", "/{path:.*}", Service(request.param).answer)
    async with served(application) as url:
        settings = s3_settings(url, lease=60.0)
        yield Spool(Path("spool"), backend=Backend.S3, s3=settings, clock=SystemClock())


@pytest.mark.parametrize(
    ("spool", "text"),
    [
        (
            ignores_none_match,
            "accepts a PUT with If-None-Match: \\* although the object exists.*shared = false",
        ),
        (refuses_new_objects, "rejects a PUT with If-None-Match: \\* for a new object.*shared = false"),
        (knows_no_conditions, "does not support a PUT with If-None-Match: .* 501 .*shared = false"),
        (denies_deleting, "403 AccessDenied to DeleteObject"),
        (denies_listing, "403 AccessDenied to ListObjectsV2"),
        (locks_objects, "object lock with a default retention.*use a bucket without"),
    ],
    indirect=["spool"],
)
async def test_a_service_that_would_keep_or_double_mail_is_refused(spool: Spool, text: str) -> None:
    with pytest.raises(StoreOpenError, match=text):
        await spool.open()


@pytest.mark.parametrize(
    "spool", [ignores_none_match, refuses_new_objects, knows_no_conditions], indirect=True
)
async def test_one_relay_alone_uses_no_conditions(spool: Spool) -> None:
    assert spool.s3 is not None
    spool.s3 = replace(spool.s3, shared=False)
    async with spool:
        await store_message(spool.store, 1)
        await spool.reopen()
        assert await claim_ids(spool.store) == [1]


@pytest.mark.parametrize("spool", [keeps_versions], indirect=True)
async def test_a_versioned_bucket_is_told_with_a_way(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    async with spool:
        assert "lifecycle rule that expires noncurrent versions" in caplog.text
