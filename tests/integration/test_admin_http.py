"""The monitoring pages over real sockets, asked with raw HTTP so that every byte is ours."""

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from ipaddress import ip_network
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest.mock import AsyncMock, Mock
from urllib.parse import quote

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from tests.support.certificates import make
from tests.support.event_log import EventLog, events_into
from tests.support.waiting import until
from zonerelay.admin import http_server as http_module
from zonerelay.admin import mailpit
from zonerelay.admin.http import AdminError, AdminServer
from zonerelay.admin.http_server import MAX_CONNECTIONS, MAX_OPERATORS, is_our_name
from zonerelay.admin.operators import MAX_OF_TOKEN, Operators
from zonerelay.admin.page import page
from zonerelay.admin.requests import visit_of
from zonerelay.capture.parts import take_apart
from zonerelay.config.credentials.file import replace_file
from zonerelay.config.credentials.identities import Scope, add, identities_file, make_token, remove, token_of
from zonerelay.config.settings import AdminSettings, Settings, SpoolSettings
from zonerelay.control.runner import ResponseStream
from zonerelay.inbound.cleanup.submit import Rejection
from zonerelay.inbound.tls import certificates
from zonerelay.model.clock import SystemClock
from zonerelay.operations.answers import EndFrame
from zonerelay.operations.errors import ControlError, InvalidError, UnavailableError
from zonerelay.operations.requests import Request, Tail, Transcript
from zonerelay.routing.addresses import Networks
from zonerelay.telemetry.events.records import MailEvent


class Page(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes


def page_of(raw: bytes) -> Page:
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    named = {name.lower(): value for name, _, value in (line.partition(": ") for line in fields)}
    return Page(int(status.split()[1]), named, body)


class Events:
    """The handler of a relay that has events alone: none, or one after the other."""

    def __init__(self) -> None:
        self.pause = 3600.0
        self.error: ControlError = UnavailableError("no answer")

    async def handle(self, request: Request, answer: ResponseStream) -> EndFrame:
        if not isinstance(request, Tail | Transcript):
            raise self.error
        while True:
            await answer.send(MailEvent(at=0.0, event="accepted", fields={"id": "x" * 1000}))
            await asyncio.sleep(self.pause)


async def _no_mail(*_: object) -> Rejection:
    raise AssertionError("no mail is submitted here")


class Site:
    """The HTTP server of a relay whose files are in `directory`."""

    def __init__(self, address: str = "127.0.0.1:0", directory: Path = Path("/nowhere"), **more: Any) -> None:
        self.reasons: tuple[str, ...] = ()
        self.broken = False
        self.refreshed = 0
        self.log, clock = EventLog(), SystemClock()
        told = events_into(self.log, clock)
        self.settings = AdminSettings(address=address, **more)
        settings = Settings(spool=SpoolSettings(path=directory / "spool"), admin=self.settings)
        self.identities = identities_file(directory)
        self.events = Events()
        self.operators = Operators(self.events, lambda: settings, events=told, clock=clock, submit=_no_mail)
        self.server = AdminServer(self.settings, self, lambda: self.operators, events=told, clock=clock)

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.server.close()

    @property
    def faults(self) -> list[str]:
        return [f"{each['where']}: {each['error']}" for each in self.log.named("trouble")]

    def exposition(self) -> bytes:
        if self.broken:
            raise RuntimeError("a secret")
        return b"zonerelay_messages_accepted_total 7.0\n"

    async def refresh(self) -> None:
        self.refreshed += 1

    async def readiness(self) -> tuple[str, ...]:
        return self.reasons

    async def raw(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), 30)
        finally:
            writer.close()
            await writer.wait_closed()

    async def ask(self, head: str, body: bytes = b"", **fields: str) -> Page:
        length = {"Content_Length": str(len(body))} if body else {}
        given = {"Host": "localhost", "Connection": "close", **length, **fields}
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items())
        return page_of(await self.raw(f"{head} HTTP/1.1\r\n{lines}\r\n".encode() + body))

    async def get(self, path: str, host: str = "localhost") -> Page:
        return await self.ask(f"GET {path}", Host=host)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site() as site:
        yield site


async def test_what_takes_long_in_mailpits_api_is_done_in_a_thread(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums of an attachment, and a form with very many fields, stopped the event loop for seconds."""
    threads: set[int] = set()

    def noted(_: object) -> dict[str, list[str]]:
        threads.add(threading.get_ident())
        return {}

    for name in ("parse_qs", "_attachment"):
        monkeypatch.setattr(mailpit, name, noted)
    octets = b"Content-Disposition: attachment\r\nX: y\r\n\r\nx"
    row = Mock(sender="", at=0.0, from_=(), to_=(), cc=(), bcc=(), reply_to=())
    served = mailpit.Mailpit(site.operators)
    monkeypatch.setattr(served, "_taken_apart", AsyncMock(return_value=(row, take_apart(octets))))
    form = make_mocked_request("PUT", "/", {"Content-Type": "application/x-www-form-urlencoded"})
    call = mailpit._MailpitCall(form, "", {"id": "1"})
    monkeypatch.setattr(mailpit, "read_body", AsyncMock(return_value=b"ids=a"))
    await mailpit._which(call)
    await served._one(call)
    assert threads
    assert threading.get_ident() not in threads
    assert await served._headers(call) == {"Content-Disposition": ["attachment"], "X": ["y"]}


METRICS = b"zonerelay_messages_accepted_total 7.0\n"
REASONS = ("the disk is full", "no listener accepts connections")
UNREADY = b'{"ready":false,"reasons":["the disk is full","no listener accepts connections"]}\n'


@pytest.mark.parametrize(
    ("asked", "reasons", "answer", "field"),
    [
        ("GET /metrics", (), (200, METRICS), ("content-type", "text/plain; version=")),
        ("GET /healthz", (), (200, b"ok\n"), ("content-type", "text/plain")),
        ("GET /readyz", (), (200, b'{"ready":true,"reasons":[]}\n'), ("content-type", "application/json")),
        ("GET /readyz", REASONS, (503, UNREADY), ("content-type", "application/json")),
        ("HEAD /healthz", (), (200, b""), ("content-type", "text/plain")),
        ("GET /../../etc/passwd", (), (404, b"not found\n"), ("content-type", "text/plain")),
        ("POST /metrics", (), (405, b"method not allowed\n"), ("allow", "GET,HEAD")),
    ],
)
async def test_what_monitoring_asks_for(
    site: Site, asked: str, reasons: tuple[str, ...], answer: tuple[int, bytes], field: tuple[str, str]
) -> None:
    site.reasons = reasons
    page = await site.ask(asked)
    assert (page.status, page.body) == answer
    assert page.headers[field[0]].startswith(field[1])
    assert "server" not in page.headers, "which names our software"
    assert site.refreshed == (asked == "GET /metrics")


async def test_a_page_that_fails_says_nothing_and_reports_everything(site: Site) -> None:
    site.broken = True
    page = await site.get("/metrics")
    assert page.status == 500
    assert b"secret" not in page.body
    assert site.faults == ["admin-http: RuntimeError: a secret"]


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


async def test_beyond_the_limit_the_oldest_is_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
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
        site,
        lambda: site.operators,
        events=events_into(EventLog(), SystemClock()),
        clock=SystemClock(),
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
        assert await shown(site) == first.der
        [refused] = site.log.named("certificate-refused")
        assert refused["problem"] in site.server.problems()
        second.write(tmp_path, "admin")
        assert await shown(site) == second.der
        assert refused["problem"] not in site.server.problems()
    key.write_text("no key")
    broken = Site(certificate=certificate, key=key)
    with pytest.raises(AdminError, match="contains no private key"):
        await broken.server.start()
    await broken.server.close()


async def test_silent_clients_lock_nobody_out_of_tls(tmp_path: Path) -> None:
    certificate, key = make("relay.example", serial=1).write(tmp_path, "admin")
    async with Site(certificate=certificate, key=key) as site:
        assert await shown(site)
        silent = [
            await asyncio.open_connection("127.0.0.1", site.server.port) for _ in range(MAX_CONNECTIONS + 1)
        ]
        assert await shown(site)
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize("tls", [False, True])
async def test_many_silent_clients_at_once_are_not_more_than_the_limit(tls: bool, tmp_path: Path) -> None:
    """Each new client ended the oldest one, which had been told to end by the one before."""
    certificate, key = make("relay.example", serial=1).write(tmp_path, "admin")
    files: dict[str, Any] = {"certificate": certificate, "key": key} if tls else {}
    async with Site(**files) as site:
        assert await shown(site) if tls else (await site.get("/healthz")).status == 200  # it is loaded
        with ExitStack() as stack:
            clients = [
                stack.enter_context(socket.create_connection(("127.0.0.1", site.server.port)))
                for _ in range(MAX_CONNECTIONS)
            ]
            await asyncio.sleep(0.5)  # the kernel's queue has room again
            clients += [
                stack.enter_context(socket.create_connection(("127.0.0.1", site.server.port)))
                for _ in range(MAX_CONNECTIONS)
            ]

            def held() -> int:
                return sum(is_open(each) for each in clients)

            await until(lambda: held() <= MAX_CONNECTIONS, seconds=5)
            await asyncio.sleep(0.2)
            assert held() > MAX_CONNECTIONS // 2


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


async def test_attempts_at_an_address_in_use_do_not_log_the_certificate(site: Site, tmp_path: Path) -> None:
    certificate, key = make("relay.example", serial=1).write(tmp_path, "admin")
    second = Site(address=f"127.0.0.1:{site.server.port}", certificate=certificate, key=key)
    for _ in range(3):
        with pytest.raises(AdminError, match="in use"):
            await second.server.start()
    assert len(second.log.named("certificate-loaded")) == 1
    await second.server.close()


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


async def test_many_short_connections_are_not_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "MAX_CONNECTIONS", 2)
    for _ in range(10):
        assert (await site.get("/healthz")).status == 200


# ---- what clients without a token can take from operators: nothing for longer than a moment ---------


FORM = "application/x-www-form-urlencoded"


class GuardedSite(Site):
    """A page on loopback, which believes the proxies of 127.0.0.0/8."""

    def __init__(self, directory: Path, **more: Any) -> None:
        super().__init__(directory=directory, page=True, **more)

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

    async def log_in(self, body: bytes, kind: str = FORM) -> Page:
        return await self.ask("POST /login", body, Content_Type=kind)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[GuardedSite]:
    async with GuardedSite(tmp_path) as site:
        yield site


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
async def test_a_log_in_is_a_small_form_in_utf_8(guarded: GuardedSite, kind: str, status: int) -> None:
    """1 MB with charset=punycode held the event loop for 38 s."""
    began = time.process_time()
    found, _, _ = await guarded.log_in(b"token=" + b"a-" * 500_000, kind)
    assert time.process_time() - began < 2
    assert (found, guarded.faults) == (status, [])


@pytest.mark.parametrize(
    "body",
    [b"token=\xff", b"token=%ff", b"a=1&" * 500, b"\x00", b"&" * 4000, b"--b\r\n", b"token=" + b"%" * 4000],
    ids=range(7),
)
async def test_any_small_body_is_answered_and_nothing_is_logged(guarded: GuardedSite, body: bytes) -> None:
    for kind in (FORM, "multipart/form-data; boundary=b", "multipart/form-data", "x", ""):
        assert (await guarded.log_in(body, kind))[0] in (400, 401, 415, 429)
    assert guarded.faults == []


async def test_slow_bodies_of_log_ins_end(guarded: GuardedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PATIENCE", 0.05)
    assert (await guarded.ask("POST /login", b"", Content_Type=FORM, Content_Length="10"))[0] == 408
    assert (await guarded.ask("POST /login", b"", Content_Type=FORM, Transfer_Encoding="chunked"))[0] == 408


SLOW: dict[str, str] = {
    "body of a log-in": "POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    f"Content-Type: {FORM}\r\n\r\n",
    "body of a submission": "POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
    "files": "GET /static/htmx.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20,
}


@pytest.mark.parametrize("what", SLOW)
async def test_strangers_that_are_slow_keep_no_operator_out(guarded: GuardedSite, what: str) -> None:
    """64 slow bodies took all connections of operators: 503 for everybody else."""
    token = guarded.token()
    with ExitStack() as stack:
        for _ in range(MAX_OPERATORS + 8):
            stack.enter_context(await guarded.connected()).send(SLOW[what].encode())
        await asyncio.sleep(0.2)  # until they are read; the next line is true at any time
        status, _, _ = await guarded.ask("GET /v1/status", Authorization=f"Bearer {token}")
        assert status == 503  # the handler has no answer
        status, fields, _ = await guarded.log_in(f"token={token}".encode())
        assert (status, fields["location"]) == (303, "/")


async def test_connections_that_say_nothing_keep_nobody_out(guarded: GuardedSite) -> None:
    """They held all connections for half a minute, those of monitoring and the way to those of operators."""
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS + 8):
            stack.enter_context(await guarded.connected())
        assert (await guarded.ask("GET /healthz"))[0] == 200
        assert (await guarded.log_in(f"token={guarded.token()}".encode()))[0] == 303


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
async def test_a_log_in_leads_nowhere_else(guarded: GuardedSite, to: str) -> None:
    """`/<TAB>/evil.example` is `//evil.example` for a browser."""
    token = guarded.token()
    status, fields, _ = await guarded.log_in(f"token={token}&to={quote(to)}".encode())
    assert (status, fields["location"]) == (303, "/")
    status, _, page = await guarded.ask(f"GET /login?to={quote(to)}")
    assert status == 200
    assert b"evil" not in page
    assert b"alert" not in page


async def test_a_log_in_leads_back(guarded: GuardedSite) -> None:
    token = guarded.token()
    for to in ("/", "/queue?q=to%3A%40example.net&after=%5B1%5D", "/message/0123456789abcdef", "/%2f/x"):
        _, fields, _ = await guarded.log_in(f"token={token}&to={quote(to)}".encode())
        assert fields["location"] == to


async def test_a_mistake_in_a_request_is_not_the_relay_s(guarded: GuardedSite) -> None:
    _, found, _ = await guarded.log_in(f"token={guarded.token()}".encode())
    cookie = found["set-cookie"].partition(";")[0]
    assert (await guarded.ask("GET /queue?after=x", Cookie=cookie))[0] == 503
    guarded.events.error = InvalidError("invalid cursor")
    status, fields, _ = await guarded.ask("GET /queue?after=x", Cookie=cookie)
    assert (status, "retry-after" in fields) == (400, False)


def removed(guarded: GuardedSite) -> None:
    remove(guarded.identities, "alice")


def made_again(guarded: GuardedSite) -> None:
    """A token of the same name is another one."""
    remove(guarded.identities, "alice")
    guarded.token()


def made_weaker(guarded: GuardedSite) -> None:
    content = json.loads(guarded.identities.read_text())
    content["tokens"][0]["scope"] = "submit"
    replace_file(guarded.identities, json.dumps(content))


def spoilt(guarded: GuardedSite) -> None:
    replace_file(guarded.identities, "no JSON")


def gone(guarded: GuardedSite) -> None:
    guarded.identities.unlink()


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
    guarded: GuardedSite, change: Callable[[GuardedSite], None], path: str, pause: float
) -> None:
    """A removed token read 897 events more in 45 s."""
    guarded.events.pause = pause
    text = guarded.token()
    fields = {"Authorization": f"Bearer {text}"}
    if path == "/tail/events":
        _, found, _ = await guarded.log_in(f"token={text}".encode())
        fields = {"Cookie": found["set-cookie"].partition(";")[0]}
    reader, writer = await guarded.stream(path, **fields)
    await reader.readuntil(b"\n\n")
    change(guarded)
    began = time.monotonic()
    async with asyncio.timeout(30):
        while await reader.read(65536):
            pass
    assert time.monotonic() - began < 5  # it looks every half second; the rest is for a busy machine
    writer.close()
    await writer.wait_closed()


async def test_lines_that_end_with_their_token_are_followed_by_nothing(guarded: GuardedSite) -> None:
    fields = {"Authorization": f"Bearer {guarded.token()}", "Accept": "application/x-ndjson"}
    reader, writer = await guarded.stream("/v1/tail", **fields)
    removed(guarded)
    async with asyncio.timeout(30):
        rest = await reader.readuntil(b"0\r\n\r\n")
    assert b"HTTP/1.1" not in rest
    writer.close()
    await writer.wait_closed()


async def test_a_stream_ends_when_its_token_expires_and_when_it_is_unread(guarded: GuardedSite) -> None:
    guarded.events.pause = 0.0
    text = guarded.token(expires=time.time() + 2)
    _, writer = await guarded.stream("/v1/tail", Authorization=f"Bearer {text}")  # and nothing is read
    await until(lambda: not guarded.operators.streams.total())
    writer.transport.abort()


async def test_a_stream_of_the_token_file_ends_when_the_file_has_another(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("an-old-token-of-32-characters-or-so\n")
    async with GuardedSite(tmp_path, token_file=path) as site:
        reader, writer = await site.stream("/v1/tail", Authorization=f"Bearer {path.read_text().strip()}")
        path.write_text("another-token-of-32-characters-or-so\n")
        async with asyncio.timeout(20):
            while await reader.read(65536):
                pass
        writer.close()


async def test_one_token_leaves_streams_and_connections_to_others(guarded: GuardedSite) -> None:
    """One token of scope read took all 16 streams, and all 64 connections."""
    greedy, other = (guarded.token("read", name) for name in ("greedy", "other"))
    opened = [await guarded.stream("/v1/tail", Authorization=f"Bearer {greedy}") for _ in range(MAX_OF_TOKEN)]
    status, _, page = await guarded.ask("GET /v1/tail", Authorization=f"Bearer {greedy}")
    assert (status, b"has reached its limit" in page) == (503, True)
    opened.append(await guarded.stream("/v1/tail", Authorization=f"Bearer {other}"))
    for _ in range(MAX_OPERATORS):
        opened.append(await asyncio.open_connection("127.0.0.1", guarded.server.port))
        reader, writer = opened[-1]
        writer.write(f"GET /v1/orders HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {greedy}\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    for _ in range(3):
        assert (await guarded.log_in(f"token={other}".encode()))[0] == 303
    assert guarded.operators.streams.total() == MAX_OF_TOKEN + 1
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


async def test_every_look_at_what_is_behind_a_pseudonym_is_logged(guarded: GuardedSite) -> None:
    """One with `recent` was not, although it shows addresses too."""
    bearer = f"Bearer {guarded.token()}"
    for path in ("/v1/resolve?pseudonym=u-1", "/v1/resolve?pseudonym=u-1&recent=true"):
        await guarded.ask(f"GET {path}", Authorization=bearer)
    assert [each["request"] for each in guarded.log.named("http-request")] == ["GET /v1/resolve"] * 2


CONTROLS = ("\x00", "\x01", "\x1b[31m", "\r\nX: y", "\x7f", "\x85")
ASKED = {
    "/v1/queue/hold": '{"filter": {"domain": "aC"}, "reason": "x"}',
    "/v1/queue/drop": '{"filter": {"header": ["aC"]}}',
    "/v1/suspend": '{"about": {"sender": "aC"}}',
    "/v1/explain": '{"address": "aC@example.org"}',
    "/v1/spool/acknowledge": '{"loss": "aC"}',
}


@pytest.mark.parametrize("text", CONTROLS, ids=ascii)
async def test_a_control_character_in_a_request_is_refused(guarded: GuardedSite, text: str) -> None:
    token = guarded.token()
    bearer, kind = f"Bearer {token}", "application/json"
    for path, body in ASKED.items():
        octets = body.replace("C", json.dumps(text)[1:-1]).encode()
        status, _, answer = await guarded.ask(f"POST {path}", octets, Authorization=bearer, Content_Type=kind)
        assert (status, json.loads(answer)["code"]) == (422, "invalid"), path
    for path in (
        "/v1/queue?domain=a",
        "/v1/history?about=a",
        "/v1/tail?address=a",
        "/v1/resolve?pseudonym=u-",
    ):
        status, _, answer = await guarded.ask(f"GET {path}{quote(text)}", Authorization=bearer)
        assert (status, json.loads(answer)["code"]) == (422, "invalid"), path
    status, found, _ = await guarded.log_in(f"token={token}".encode())
    cookie = found["set-cookie"].partition(";")[0]
    for path in ("/queue?q=a", "/history?value=a", "/captured?q=a"):
        assert (await guarded.ask(f"GET {path}{quote(text)}b", Cookie=cookie))[0] in (400, 404), path
    assert guarded.faults == []
