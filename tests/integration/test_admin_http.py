"""The monitoring pages over real sockets, asked with raw HTTP so that every byte is ours."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support.certificates import make
from zonerelay.admin import http_server as http_module
from zonerelay.admin.http import AdminError, AdminServer
from zonerelay.admin.http_server import is_our_name
from zonerelay.config.settings import AdminSettings
from zonerelay.inbound.tls import certificates


class Page:
    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        status, *fields = head.decode().split("\r\n")
        self.status = int(status.split()[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in fields)}


class Site:
    def __init__(self, address: str = "127.0.0.1:0", **more: Any) -> None:
        self.reasons: tuple[str, ...] = ()
        self.broken = False
        self.refreshed = 0
        self.faults: list[str] = []
        self.server = AdminServer(
            AdminSettings(address=address, **more),
            metrics=self._metrics,
            readiness=self._readiness,
            on_error=lambda where, error: self.faults.append(f"{where}: {error}"),
            before_metrics=self._refresh,
        )

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.server.close()

    def _metrics(self) -> bytes:
        if self.broken:
            raise RuntimeError("a secret")
        return b"zonerelay_messages_accepted_total 7.0\n"

    async def _refresh(self) -> None:
        self.refreshed += 1

    async def _readiness(self) -> tuple[str, ...]:
        return self.reasons

    async def raw(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), 5)
        finally:
            writer.close()
            await writer.wait_closed()

    async def get(self, path: str, *, method: str = "GET", host: str = "localhost:8025") -> Page:
        return Page(await self.raw(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()))


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site() as site:
        yield site


async def test_metrics_are_prometheus_text(site: Site) -> None:
    page = await site.get("/metrics")
    assert page.status == 200
    assert page.body == b"zonerelay_messages_accepted_total 7.0\n"
    assert page.headers["content-type"].startswith("text/plain; version=")
    assert site.refreshed == 1


async def test_health_is_ok_while_the_loop_turns(site: Site) -> None:
    page = await site.get("/healthz")
    assert (page.status, page.body) == (200, b"ok\n")


async def test_ready_is_json(site: Site) -> None:
    page = await site.get("/readyz")
    assert (page.status, page.body) == (200, b'{"ready":true,"reasons":[]}\n')
    assert page.headers["content-type"] == "application/json"


async def test_not_ready_is_503_with_every_reason(site: Site) -> None:
    site.reasons = ("the disk is full", "no listener accepts connections")
    page = await site.get("/readyz")
    assert page.status == 503
    assert page.body == b'{"ready":false,"reasons":["the disk is full","no listener accepts connections"]}\n'


async def test_head_has_no_body(site: Site) -> None:
    page = await site.get("/healthz", method="HEAD")
    assert (page.status, page.body) == (200, b"")


async def test_an_unknown_page_is_404_in_plain_text(site: Site) -> None:
    page = await site.get("/../../etc/passwd")
    assert (page.status, page.body) == (404, b"not found\n")
    assert page.headers["content-type"].startswith("text/plain")


async def test_a_write_is_405_and_names_what_is_allowed(site: Site) -> None:
    page = await site.get("/metrics", method="POST")
    assert (page.status, page.body) == (405, b"method not allowed\n")
    assert page.headers["allow"] == "GET,HEAD"


async def test_no_page_names_its_software(site: Site) -> None:
    for path in ("/metrics", "/healthz", "/nothing"):
        assert "server" not in (await site.get(path)).headers


async def test_a_page_that_fails_says_nothing_and_reports_everything(site: Site) -> None:
    site.broken = True
    page = await site.get("/metrics")
    assert page.status == 500
    assert b"secret" not in page.body
    assert site.faults == ["admin-http: a secret"]


async def test_a_rebound_name_is_refused(site: Site) -> None:
    page = await site.get("/metrics", host="evil.example:8025")
    assert page.status == 421
    assert b"zonerelay_" not in page.body


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8025", True),
        ("127.0.0.1:8025", True),
        ("[::1]:8025", True),
        ("[::1]", True),
        ("", True),  # HTTP/1.0
        ("mail:8025", True),  # of Docker Compose; no stranger can register it
        ("evil.example", False),
        ("localhost.evil.example:8025", False),
        ("127.0.0.1.evil.example", False),
        ("[evil]:8025", False),
    ],
)
def test_local_names_are_told_from_others(host: str, allowed: bool) -> None:
    assert is_our_name(host, frozenset()) is allowed


async def test_in_a_container_a_rebound_name_gets_what_monitoring_asks_for_and_nothing_else() -> None:
    async with Site("0.0.0.0:0", hosts=("relay.example",)) as site:
        pages = {
            path: await site.get(path, host="evil.example:8025") for path in ("/metrics", "/healthz", "/")
        }
        assert [page.status for page in pages.values()] == [200, 200, 421]
        for host in ("Relay.Example:8025", "relay.example.", "192.0.2.1:8025", "localhost"):
            assert (await site.get("/", host=host)).status == 404


async def test_a_name_of_the_configuration_is_ours_on_loopback_too() -> None:
    async with Site(hosts=("relay.example", "*.example.org")) as site:
        for host, status in {"relay.example": 200, "a.example.org": 200, "example.org": 421}.items():
            assert (await site.get("/metrics", host=host)).status == status


async def test_one_request_per_connection(site: Site) -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = await site.raw(request * 3)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answer.lower()


async def test_a_head_that_does_not_end_is_refused(site: Site) -> None:
    answer = await site.raw(b"GET /" + b"x" * 100_000)
    assert answer.startswith(b"HTTP/1.0 400")


async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "LIFETIME", 0.02)
    async with Site() as site:
        assert await site.raw(b"GET /healthz HTTP/1.1\r\n") == b""


async def test_of_more_connections_than_the_limit_the_oldest_is_closed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
    assert (await site.get("/healthz")).status == 200  # the server has the first one, too
    monkeypatch.setattr(http_module, "MAX_CONNECTIONS", 1)
    assert (await site.get("/healthz")).status == 200
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    await writer.wait_closed()


async def test_an_address_in_use_is_named(site: Site) -> None:
    second = AdminServer(
        AdminSettings(address=f"127.0.0.1:{site.server.port}"),
        metrics=site._metrics,
        readiness=site._readiness,
        on_error=lambda where, error: None,
    )
    with pytest.raises(AdminError, match=r"127\.0\.0\.1:\d+ for HTTP: the address is in use by [^(]*$"):
        await second.start()
    await second.close()


async def test_tls_takes_a_renewed_certificate_and_keeps_one_that_a_wrong_one_would_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "LOOK_EVERY", 0.0)
    first, second = make("relay.example", serial=1), make("relay.example", serial=2)
    certificate, key = first.write(tmp_path, "admin")
    async with Site(certificate=certificate, key=key) as site:
        assert await shown(site) == first.der
        certificate.write_bytes(second.pem)  # its key has yet to come
        assert await shown(site) == first.der
        assert [trouble.partition(":")[0] for trouble in site.faults] == ["admin-tls"]
        second.write(tmp_path, "admin")
        assert await shown(site) == second.der
    key.write_text("no key")
    broken = Site(certificate=certificate, key=key)
    with pytest.raises(AdminError, match="contains no private key"):
        await broken.server.start()
    await broken.server.close()


async def shown(site: Site) -> bytes | None:
    """The certificate that a client sees, after an answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port, ssl=context)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 200")
    found: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


async def test_many_short_connections_are_no_many_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "MAX_CONNECTIONS", 2)
    for _ in range(10):
        assert (await site.get("/healthz")).status == 200
