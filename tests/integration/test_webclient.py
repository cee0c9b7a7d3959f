"""What the relay asks of web servers, against a real one: who it believes, and where it stops."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import trustme
import uvloop

from tests.support.https import LOOPBACK, HttpsServer, Page
from tests.support.ports import free_port
from zonerelay.process.webclient import Poster, Response, WebError, fetch

NAME = "www.example.com"


@pytest.fixture
async def server() -> AsyncIterator[HttpsServer]:
    async with HttpsServer(trustme.CA(), NAME) as running:
        running.pages["/"] = Page("hello", content_type="Text/Plain; charset=utf-8")
        yield running


async def loopback(host: str) -> Sequence[str]:
    return (LOOPBACK,)


async def ask(server: HttpsServer, path: str = "/", *, timeout: float = 5.0) -> Response:
    return await fetch(
        f"https://{NAME}:{server.port}{path}",
        timeout=timeout,
        max_size=1000,
        ssl_context=server.client_context(),
        resolve=loopback,
    )


async def test_a_page_comes_from_the_address_we_resolved_by_its_name_in_tls(server: HttpsServer) -> None:
    response = await ask(server)
    assert (response.status, response.body, response.content_type) == (200, b"hello", "text/plain")
    assert server.names == [NAME]
    assert server.asked == [(NAME, "GET", "/")]


async def test_the_systems_authorities_are_asked_where_openssl_looks_for_them(
    server: HttpsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = f"https://{NAME}:{server.port}/"
    with pytest.raises(
        WebError, match=f"the certificate of {NAME} is not trusted: unable to get local issuer"
    ):
        await fetch(url, timeout=5, max_size=1000, resolve=loopback)
    monkeypatch.setenv("SSL_CERT_FILE", str(server.trust(tmp_path)))
    assert (await fetch(url, timeout=5, max_size=1000, resolve=loopback)).body == b"hello"


async def test_a_poster_goes_by_the_authorities_of_today(
    server: HttpsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It lives as long as the relay; a package replaces the file of the authorities meanwhile."""
    trusted, another = server.trust(tmp_path).read_bytes(), trustme.CA().cert_pem.bytes()
    bundle, draft = tmp_path / "bundle.pem", tmp_path / "draft"
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    poster = Poster(f"https://{NAME}:{server.port}/", timeout=5, resolve=loopback)
    for authorities, is_trusted in ((trusted, True), (another, False), (trusted + another, True)):
        draft.write_bytes(authorities)
        draft.replace(bundle)
        if is_trusted:
            assert (await poster.post(b"", {})).status in (200, 405)
        else:
            with pytest.raises(WebError, match="is not trusted"):
                await poster.post(b"", {})
    await poster.close()


async def test_a_certificate_for_another_name_is_not_believed(server: HttpsServer) -> None:
    server.show_certificate_for("www.example.net")
    with pytest.raises(WebError, match=f"the certificate of {NAME} is not trusted: Hostname mismatch"):
        await ask(server)
    assert server.asked == []


async def test_a_redirect_is_the_answer_and_is_not_followed(server: HttpsServer) -> None:
    server.pages["/old"] = Page(status=301, headers={"Location": "/"})
    response = await ask(server, "/old")
    assert (response.status, response.headers["location"]) == (301, "/")
    assert len(server.asked) == 1


async def test_a_page_that_is_too_long_is_not_read_to_its_end(server: HttpsServer) -> None:
    server.pages["/"] = Page("x" * 1001)
    with pytest.raises(WebError, match="the response exceeds 1000 bytes"):
        await ask(server)


async def test_a_compressed_page_stays_compressed(server: HttpsServer) -> None:
    server.pages["/"] = Page(b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert (await ask(server)).body == b"\x1f\x8b"


async def test_a_server_that_takes_its_time_is_left(server: HttpsServer) -> None:
    server.pages["/"] = Page("late", delay=5)
    before = time.monotonic()
    with pytest.raises(WebError, match=f"{NAME} did not respond within 0.2 s"):
        await ask(server, timeout=0.2)
    assert time.monotonic() - before < 2


async def test_a_form_is_posted_and_shows_up_in_no_text(server: HttpsServer) -> None:
    server.pages["/token"] = Page('{"access_token": "hidden"}', content_type="application/json")
    response = await fetch(
        f"https://{NAME}:{server.port}/token",
        form={"client_secret": "s&cret", "grant_type": "refresh_token"},
        timeout=5,
        max_size=1000,
        ssl_context=server.client_context(),
        resolve=loopback,
    )
    assert server.forms == [{"client_secret": "s&cret", "grant_type": "refresh_token"}]
    assert b"hidden" in response.body
    assert "hidden" not in repr(response)
    server.show_certificate_for("elsewhere.example")
    with pytest.raises(WebError) as caught:
        await ask(server, "/token?key=s%26cret")
    assert "cret" not in str(caught.value)


async def test_who_cannot_be_reached_or_does_not_speak_http_is_named() -> None:
    url = f"https://{NAME}:{free_port()}/"
    with pytest.raises(WebError, match=rf"^{NAME} is unreachable: Connection refused$"):
        await fetch(url, timeout=5, max_size=1000, resolve=loopback)

    async def refuse(host: str) -> Sequence[str]:
        raise WebError(f"{host} has a private address")

    with pytest.raises(WebError, match=f"^{NAME} has a private address$"):
        await fetch(url, timeout=5, max_size=1000, resolve=refuse)

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.close()

    silent = await asyncio.start_server(hang_up, LOOPBACK, 0, family=socket.AF_INET)
    async with silent:
        port = silent.sockets[0].getsockname()[1]
        with pytest.raises(WebError, match=NAME):
            await fetch(f"https://{NAME}:{port}/", timeout=5, max_size=1000, resolve=loopback)


def test_it_works_on_the_loop_that_the_relay_runs_on() -> None:
    async def once() -> None:
        async with HttpsServer(trustme.CA(), NAME) as server:
            server.pages["/"] = Page("hello")
            assert (await ask(server)).body == b"hello"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(once())


async def test_a_post_is_sent_once_when_a_kept_connection_ends_instead_of_an_answer() -> None:
    posts = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal posts
        for answered in (True, False):
            await reader.readuntil(b"\r\n\r\n")
            posts += 1
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n" if answered else b"")
        writer.close()

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    poster = Poster(f"http://{LOOPBACK}:{server.sockets[0].getsockname()[1]}/", timeout=5, resolve=loopback)
    assert (await poster.post(b"", {})).status == 204
    with pytest.raises(WebError):
        await poster.post(b"", {})
    assert posts == 2
    await poster.close()
    server.close()
