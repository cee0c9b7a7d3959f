"""What clients without a token can take from operators over HTTP: nothing for longer than a moment."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from ipaddress import ip_network
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from tests.support.waiting import until
from zonerelay.admin.http import AdminServer
from zonerelay.admin.http_server import MAX_CONNECTIONS, MAX_OPERATORS
from zonerelay.admin.operators import MAX_OF_TOKEN, Operators
from zonerelay.admin.page import page
from zonerelay.admin.requests import visit_of
from zonerelay.config.credentials.file import replace_file
from zonerelay.config.credentials.identities import (
    Scope,
    add,
    identities_file,
    make_token,
    remove,
    token_of,
)
from zonerelay.config.settings import AdminSettings, Settings, SpoolSettings
from zonerelay.control.runner import ResponseStream
from zonerelay.inbound.cleanup.submit import Rejection
from zonerelay.model.clock import SystemClock
from zonerelay.operations.answers import EndFrame
from zonerelay.operations.errors import UnavailableError
from zonerelay.operations.requests import Request, Tail, Transcript
from zonerelay.routing.addresses import Networks
from zonerelay.telemetry.events.records import MailEvent

FORM = "application/x-www-form-urlencoded"


class Events:
    """The handler of a relay that has events alone: none, or one after the other."""

    def __init__(self) -> None:
        self.pause = 3600.0

    async def handle(self, request: Request, answer: ResponseStream) -> EndFrame:
        if not isinstance(request, Tail | Transcript):
            raise UnavailableError("no answer")
        while True:
            await answer.send(MailEvent(at=0.0, event="accepted", fields={"id": "x" * 1000}))
            await asyncio.sleep(self.pause)


async def _no_mail(*_: object) -> Rejection:
    raise AssertionError("no mail is submitted here")


class Site:
    """A page on loopback, which believes the proxies of 127.0.0.0/8."""

    def __init__(self, directory: Path, **more: Any) -> None:
        self.faults: list[str] = []
        self.audited: list[Mapping[str, str]] = []
        admin = AdminSettings(address="127.0.0.1:0", page=True, **more)
        settings = Settings(spool=SpoolSettings(path=directory / "spool"), admin=admin)
        self.identities = identities_file(directory)
        self.events = Events()
        self.operators = Operators(
            self.events,
            lambda: settings,
            on_error=self._trouble,
            audit=self.audited.append,
            clock=SystemClock(),
            submit=_no_mail,
        )
        self.server = AdminServer(
            admin,
            metrics=lambda: b"",
            readiness=_ready,
            on_error=self._trouble,
            operators=lambda: self.operators,
        )

    def _trouble(self, where: str, error: BaseException) -> None:
        self.faults.append(f"{where}: {error!r}")

    def token(self, scope: Scope = "operate", name: str = "alice", expires: float = 0.0) -> str:
        text = make_token()
        add(self.identities, token_of(text, name, scope, created=time.time(), expires=expires, user=""))
        return text

    async def stream(self, path: str, **fields: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a stream of events whose answer has begun."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        lines = "".join(f"{name}: {value}\r\n" for name, value in {"Host": "localhost", **fields}.items())
        writer.write(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        return reader, writer

    async def connected(self) -> socket.socket:
        found = socket.socket()
        found.setblocking(False)
        await asyncio.get_running_loop().sock_connect(found, ("127.0.0.1", self.server.port))
        return found

    async def ask(self, head: str, body: bytes = b"", **fields: str) -> tuple[int, dict[str, str], bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        given = {
            "Host": "localhost",
            "Connection": "close",
            **{k.replace("_", "-"): v for k, v in fields.items()},
        }
        if body:
            given.setdefault("Content-Length", str(len(body)))
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        writer.write(f"{head} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        try:
            raw = await asyncio.wait_for(reader.read(), 30)
        finally:
            writer.close()
        top, _, rest = raw.partition(b"\r\n\r\n")
        status, *found = top.decode().split("\r\n")
        named = {name.lower(): value for name, _, value in (each.partition(": ") for each in found)}
        return int(status.split()[1]), named, rest

    async def log_in(self, body: bytes, kind: str = FORM) -> tuple[int, dict[str, str], bytes]:
        return await self.ask("POST /login", body, Content_Type=kind)


async def _ready() -> tuple[str, ...]:
    return ()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    await site.server.start()
    yield site
    await site.server.close()


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (f"{FORM}; charset=punycode", 415),
        (f"{FORM}; charset=idna", 415),
        (f"{FORM}; charset*=punycode''x", 415),
        ("multipart/form-data; boundary=b", 415),
        ("text/plain", 415),
        (f"{FORM}; charset=UTF-8", 413),
        (FORM, 413),
    ],
)
async def test_a_log_in_is_a_small_form_in_utf_8(site: Site, kind: str, status: int) -> None:
    """1 MB with charset=punycode held the event loop for 38 s."""
    began = time.process_time()
    found, _, _ = await site.log_in(b"token=" + b"a-" * 500_000, kind)
    assert time.process_time() - began < 2
    assert (found, site.faults) == (status, [])


@pytest.mark.parametrize(
    "body",
    [b"token=\xff", b"token=%ff", b"a=1&" * 500, b"\x00", b"&" * 4000, b"--b\r\n", b"token=" + b"%" * 4000],
    ids=range(7),
)
async def test_any_small_body_is_answered_and_nothing_is_logged(site: Site, body: bytes) -> None:
    for kind in (FORM, "multipart/form-data; boundary=b", "multipart/form-data", "x", ""):
        assert (await site.log_in(body, kind))[0] in (400, 401, 415, 429)
    assert site.faults == []


async def test_slow_bodies_at_the_log_in_end_soon(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PATIENCE", 0.05)
    assert (await site.ask("POST /login", b"", Content_Type=FORM, Content_Length="10"))[0] == 408
    assert (await site.ask("POST /login", b"", Content_Type=FORM, Transfer_Encoding="chunked"))[0] == 408


SLOW: dict[str, str] = {
    "body of a log-in": "POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    f"Content-Type: {FORM}\r\n\r\n",
    "body of a submission": "POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
    "files": "GET /static/htmx.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20,
}


@pytest.mark.parametrize("what", SLOW)
async def test_strangers_that_are_slow_keep_no_operator_out(site: Site, what: str) -> None:
    """64 slow bodies took all connections of operators: 503 for everybody else."""
    token = site.token()
    with ExitStack() as stack:
        for _ in range(MAX_OPERATORS + 8):
            stack.enter_context(await site.connected()).send(SLOW[what].encode())
        await asyncio.sleep(0.2)  # until they are read; the next line is true at any time
        status, _, _ = await site.ask("GET /v1/status", Authorization=f"Bearer {token}")
        assert status == 503  # the handler has no answer
        status, fields, _ = await site.log_in(f"token={token}".encode())
        assert (status, fields["location"]) == (303, "/")


async def test_connections_that_say_nothing_keep_nobody_out(site: Site) -> None:
    """They held all connections for half a minute, those of monitoring and the way to those of operators."""
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS + 8):
            stack.enter_context(await site.connected())
        assert (await site.ask("GET /healthz"))[0] == 200
        assert (await site.log_in(f"token={site.token()}".encode()))[0] == 303


@pytest.mark.parametrize(
    "to",
    [
        "//evil.example", "/\\evil.example", "/\t/evil.example", "/\n/evil.example", "/\r/evil.example",
        "\t//evil.example", " //evil.example", "/\x00/evil.example", "/\x0b/evil.example", "https://evil.example",
        "\\\\evil.example", "/\t\\evil.example", "javascript:alert(1)", "/\u2028/evil.example", "/ü", "",
        "/queue?q=\r\nSet-Cookie: a=b", "/\u3000/evil.example",
    ],
    ids=range(18),
)  # fmt: skip
async def test_a_log_in_leads_nowhere_else(site: Site, to: str) -> None:
    """`/<TAB>/evil.example` is `//evil.example` for a browser."""
    token = site.token()
    status, fields, _ = await site.log_in(f"token={token}&to={quote(to)}".encode())
    assert (status, fields["location"]) == (303, "/")
    status, _, page = await site.ask(f"GET /login?to={quote(to)}")
    assert status == 200
    assert b"evil" not in page
    assert b"alert" not in page


async def test_a_log_in_leads_back(site: Site) -> None:
    token = site.token()
    for to in ("/", "/queue?q=to%3A%40example.net&after=%5B1%5D", "/message/0123456789abcdef", "/%2f/x"):
        _, fields, _ = await site.log_in(f"token={token}&to={quote(to)}".encode())
        assert fields["location"] == to


def removed(site: Site) -> None:
    remove(site.identities, "alice")


def made_again(site: Site) -> None:
    """A token of the same name is another one."""
    remove(site.identities, "alice")
    site.token()


def made_weaker(site: Site) -> None:
    content = json.loads(site.identities.read_text())
    content["tokens"][0]["scope"] = "submit"
    replace_file(site.identities, json.dumps(content))


def spoilt(site: Site) -> None:
    replace_file(site.identities, "no JSON")


def gone(site: Site) -> None:
    site.identities.unlink()


CHANGES = (removed, made_again, made_weaker, spoilt, gone)


PATHS = ("/v1/tail", "/v1/transcript?seconds=60&client=127.0.0.1", "/tail/events")


@pytest.mark.parametrize("pause", [3600.0, 0.0], ids=["quiet", "busy"])
@pytest.mark.parametrize(
    ("change", "path"),
    [
        *((each, PATHS[0]) for each in CHANGES),
        *((removed, each) for each in PATHS[1:]),
        (made_again, PATHS[2]),
    ],
)
async def test_a_stream_ends_with_its_token(
    site: Site, change: Callable[[Site], None], path: str, pause: float
) -> None:
    """A removed token read 897 events more in 45 s."""
    site.events.pause = pause
    text = site.token()
    fields = {"Authorization": f"Bearer {text}"}
    if path == "/tail/events":
        _, found, _ = await site.log_in(f"token={text}".encode())
        fields = {"Cookie": found["set-cookie"].partition(";")[0]}
    reader, writer = await site.stream(path, **fields)
    await reader.readuntil(b"\n\n")
    change(site)
    began = time.monotonic()
    async with asyncio.timeout(30):
        while await reader.read(65536):
            pass
    assert time.monotonic() - began < 5  # it looks every half second; the rest is for a busy machine
    writer.close()
    await writer.wait_closed()


async def test_a_stream_ends_when_its_token_expires_and_when_nothing_of_it_is_read(
    site: Site,
) -> None:
    site.events.pause = 0.0
    text = site.token(expires=time.time() + 2)
    _, writer = await site.stream("/v1/tail", Authorization=f"Bearer {text}")  # and nothing is read
    await until(lambda: not site.operators.streams.open)
    writer.transport.abort()


async def test_a_stream_of_the_token_file_ends_when_the_file_has_another(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("an-old-token-of-32-characters-or-so\n")
    site = Site(tmp_path, token_file=path)
    await site.server.start()
    reader, writer = await site.stream("/v1/tail", Authorization=f"Bearer {path.read_text().strip()}")
    path.write_text("another-token-of-32-characters-or-so\n")
    async with asyncio.timeout(20):
        while await reader.read(65536):
            pass
    writer.close()
    await site.server.close()


async def test_one_token_leaves_streams_and_connections_to_others(site: Site) -> None:
    """One token of scope read took all 16 streams, and all 64 connections."""
    greedy, other = (site.token("read", name) for name in ("greedy", "other"))
    opened = [await site.stream("/v1/tail", Authorization=f"Bearer {greedy}") for _ in range(MAX_OF_TOKEN)]
    status, _, page = await site.ask("GET /v1/tail", Authorization=f"Bearer {greedy}")
    assert (status, b"has reached its limit" in page) == (503, True)
    opened.append(await site.stream("/v1/tail", Authorization=f"Bearer {other}"))
    for _ in range(MAX_OPERATORS):
        opened.append(await asyncio.open_connection("127.0.0.1", site.server.port))
        reader, writer = opened[-1]
        writer.write(f"GET /v1/orders HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {greedy}\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    for _ in range(3):
        assert (await site.log_in(f"token={other}".encode()))[0] == 303
    assert site.operators.streams.open == MAX_OF_TOKEN + 1
    for _, writer in opened:
        writer.close()


PROXIES: dict[str, tuple[list[str], str, bool, bool]] = {
    # the lines, and what follows: client, over TLS, private
    "one field": (["X-Forwarded-For: 192.0.2.1", "X-Forwarded-Proto: https"], "192.0.2.1", True, True),
    "nothing": ([], "127.0.0.1", False, True),
    "appended as a field": (
        ["X-Forwarded-For: 127.0.0.1", "X-Forwarded-For: 192.0.2.1",
         "X-Forwarded-Proto: https", "X-Forwarded-Proto: http"],
        "192.0.2.1", False, False,
    ),
    "appended as an entry": (
        ["X-Forwarded-For: 127.0.0.1, 192.0.2.1", "X-Forwarded-Proto: https, http"],
        "192.0.2.1", False, False,
    ),
    "three fields": (
        ["X-Forwarded-For: 9.9.9.9", "X-Forwarded-For: 8.8.8.8, 192.0.2.1", "x-forwarded-for: 127.0.0.9",
         "X-Forwarded-Proto: https", "X-Forwarded-Proto: http", "X-Forwarded-Proto: http"],
        "192.0.2.1", False, False,
    ),
    "two proxies, one of which says the scheme": (
        ["X-Forwarded-For: 192.0.2.1", "X-Forwarded-For: 127.0.0.9", "X-Forwarded-Proto: https"],
        "192.0.2.1", True, True,
    ),
    "a forged scheme before that of the first of two proxies": (
        ["X-Forwarded-For: 192.0.2.1, 127.0.0.9", "X-Forwarded-Proto: https", "X-Forwarded-Proto: http"],
        "192.0.2.1", False, False,
    ),
    "no address": (["X-Forwarded-For: 127.0.0.1", "X-Forwarded-For: unknown"], "", False, True),
    "an empty field at the end": (
        ["X-Forwarded-For: 192.0.2.1", "X-Forwarded-For:", "X-Forwarded-Proto: http", "X-Forwarded-Proto:"],
        "192.0.2.1", False, False,
    ),
    "IPv4 in IPv6": (["X-Forwarded-For: ::ffff:192.0.2.1"], "192.0.2.1", False, True),
}  # fmt: skip


@pytest.mark.parametrize("name", PROXIES)
async def test_all_fields_of_a_proxy_are_read_from_the_right(name: str) -> None:
    """The first field alone was read: behind a proxy that appends one a client chose its address and TLS."""
    lines, client, secure, private = PROXIES[name]
    headers = CIMultiDict(line.partition(":")[::2] for line in lines)
    transport = FromHere()
    request = make_mocked_request("GET", "/", headers=headers, transport=transport)
    found = visit_of(request, Networks([ip_network("127.0.0.0/8")]), secure=False)
    assert (found.client, found.secure, found.private) == (client, secure, private)


class FromHere(asyncio.Transport):
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default


async def test_every_look_at_what_is_behind_a_pseudonym_is_logged(site: Site) -> None:
    """One with `recent` was not, although it shows addresses too."""
    bearer = f"Bearer {site.token()}"
    for path in ("/v1/resolve?pseudonym=u-1", "/v1/resolve?pseudonym=u-1&recent=true"):
        await site.ask(f"GET {path}", Authorization=bearer)
    assert [each["request"] for each in site.audited] == ["GET /v1/resolve"] * 2


CONTROLS = ("\x00", "\x01", "\x1b[31m", "\r\nX: y", "\x7f", "\x85")
ASKED = {
    "/v1/queue/hold": '{"filter": {"domain": "aC"}, "reason": "x"}',
    "/v1/queue/drop": '{"filter": {"header": ["aC"]}}',
    "/v1/suspend": '{"about": {"sender": "aC"}}',
    "/v1/explain": '{"address": "aC@example.org"}',
    "/v1/spool/acknowledge": '{"loss": "aC"}',
}


@pytest.mark.parametrize("text", CONTROLS, ids=ascii)
async def test_a_control_character_in_a_request_is_refused(site: Site, text: str) -> None:
    token = site.token()
    bearer, kind = f"Bearer {token}", "application/json"
    for path, body in ASKED.items():
        octets = body.replace("C", json.dumps(text)[1:-1]).encode()
        status, _, answer = await site.ask(f"POST {path}", octets, Authorization=bearer, Content_Type=kind)
        assert (status, json.loads(answer)["code"]) == (422, "invalid"), path
    for path in (
        "/v1/queue?domain=a",
        "/v1/history?about=a",
        "/v1/tail?address=a",
        "/v1/resolve?pseudonym=u-",
    ):
        status, _, answer = await site.ask(f"GET {path}{quote(text)}", Authorization=bearer)
        assert (status, json.loads(answer)["code"]) == (422, "invalid"), path
    status, found, _ = await site.log_in(f"token={token}".encode())
    cookie = found["set-cookie"].partition(";")[0]
    for path in ("/queue?q=a", "/history?value=a", "/captured?q=a"):
        assert (await site.ask(f"GET {path}{quote(text)}b", Cookie=cookie))[0] in (400, 404), path
    assert site.faults == []
