"""Listeners for HTTP: the workers serve them, with the TLS, the proxies and the limits of each."""

import http.client
import json
import signal
import smtplib
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.submission import NAME, Papers
from tests.acceptance.test_http_api import Api, Reply, add_token
from tests.acceptance.test_http_submission import user_of, with_users
from tests.support.crew import relay_of
from tests.support.ports import LOOPBACK, free_port, free_ports, wait_until
from tests.support.process import RelayProcess

MESSAGE = {"from": "shop@example.org", "to": "zoe@example.net", "subject": "x", "text": "hello"}
HTTP = {"protocol": "http", "auth": "required"}


class Door(Api):
    """One listener."""

    def __init__(self, app: Api, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.relay, self.fields, self.port, self.tls = app.relay, app.fields, port, tls

    def connect(self) -> http.client.HTTPConnection:
        if self.tls is None:
            return http.client.HTTPConnection(LOOPBACK, self.port, timeout=20)
        return http.client.HTTPSConnection(LOOPBACK, self.port, timeout=20, context=self.tls)


def over(connection: http.client.HTTPConnection, app: Api, **more: object) -> Reply:
    fields = {**app.fields, "Content-Type": "application/json"}
    connection.request("POST", "/v1/messages", json.dumps({**MESSAGE, **more}), fields)
    return Reply(connection.getresponse())


def reload(relay: RelayProcess) -> None:
    before = len(relay.events("reloaded"))
    relay.signal(signal.SIGHUP)
    relay.wait_for(lambda: len(relay.events("reloaded")) > before, what="the reload")


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return free_ports(4)


@pytest.fixture(scope="module")
def relay(
    tmp_path_factory: pytest.TempPathFactory, papers: Papers, ports: list[int]
) -> Iterator[RelayProcess]:
    """Its next hop does not answer, so that mail stays."""
    plain, tls, proxied, named = (f"{LOOPBACK}:{port}" for port in ports)
    here = ["127.0.0.0/8"]
    made = RelayProcess(
        tmp_path_factory.mktemp("http"),
        next_hop=f"{LOOPBACK}:{free_port()}",
        more_listeners=[
            {"address": plain, **HTTP, "max_connections_per_client": 2, "max_message_size": "1 MB"},
            {"address": tls, **HTTP, "tls": "implicit", "certificate": str(papers.server)},
            {
                "address": proxied,
                **HTTP,
                "tls": "implicit",
                "certificate": str(papers.server),
                "proxy_networks": here,
            },
            {"address": named, **HTTP, "xclient_networks": here},
        ],
    )
    with with_users(made):
        yield made


@pytest.fixture(scope="module")
def app(relay: RelayProcess) -> Api:
    return user_of(relay, "app")


@pytest.fixture(scope="module")
def operator(relay: RelayProcess) -> Api:
    return Api(relay, add_token(relay, "oscar", "operate"))


def test_mail_and_nothing_else(app: Api, operator: Api, ports: list[int]) -> None:
    door = Door(app, ports[0])
    reply = door("POST", "/v1/messages", MESSAGE)
    assert reply.status == 202, reply.body
    assert (reply.fields["Server"], reply.fields["Cache-Control"]) == ("relay", "no-store")
    message_id = reply.json["id"]
    told = operator.get(f"/v1/queue/messages/{message_id}")
    assert (told["user"], told["protocol"], told["listener"]) == ("app", "HTTP", f"{LOOPBACK}:{ports[0]}")
    assert told["client"] == LOOPBACK
    assert door.get(f"/v1/messages/{message_id}")["recipients"][0]["state"] in ("ready", "active", "deferred")
    assert door("DELETE", f"/v1/messages/{message_id}").status in (200, 409)
    stranger = Door(Api(app.relay, ""), ports[0])
    assert stranger("POST", "/v1/messages", MESSAGE).code == (401, "unauthorized")
    assert stranger("GET", "/v1/openapi.json").code == (401, "unauthorized")
    for path in ("/v1/status", "/metrics", "/", "/api/v1/messages"):
        assert Door(operator, ports[0])("GET", path).status == 404
    expecting = door.connect()
    expecting.request(
        "POST", "/v1/messages", b"", {**app.fields, "Expect": "100-continue", "Content-Length": "9"}
    )
    expecting.sock.settimeout(5)
    assert expecting.sock.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    expecting.close()
    assert "/v1/messages" in door.get("/v1/openapi.json")["paths"]
    assert "/v1/status" not in door.get("/v1/openapi.json")["paths"]


def test_limits_are_those_of_the_listener(app: Api, relay: RelayProcess, ports: list[int]) -> None:
    large = {"text": "x" * 1_200_000}
    assert app("POST", "/v1/messages", {**MESSAGE, **large}).status == 202  # the first listener's
    assert Door(app, ports[0])("POST", "/v1/messages", {**MESSAGE, **large}).code == (413, "too_large")
    kept = [Door(app, ports[0]).connect() for _ in range(3)]
    try:
        for connection in kept[:2]:
            for _ in range(2):  # a connection serves many requests
                assert over(connection, app).status == 202
        kept[2].request("GET", "/v1/openapi.json")
        refused = kept[2].getresponse()
        assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
    finally:
        for connection in kept:
            connection.close()
    wait_until(lambda: Door(app, ports[0])("POST", "/v1/messages", MESSAGE).status == 202, timeout=20)
    assert any(each["reason"] == "client-connections" for each in relay.events("refused"))


def test_tls_is_that_of_the_listener(app: Api, papers: Papers, ports: list[int]) -> None:
    trusting = ssl.create_default_context(cafile=papers.ca)
    trusting.check_hostname = False
    large = "x" * 3_000_000
    with_tls = Door(app, ports[1], trusting).connect()
    assert over(with_tls, app).status == 202
    assert over(with_tls, app, text=large).status == 202
    assert isinstance(with_tls.sock, ssl.SSLSocket)
    with_tls.close()
    with pytest.raises((http.client.HTTPException, OSError)):
        Door(app, ports[1])("GET", "/v1/openapi.json")


def test_a_trusted_server_names_the_client(app: Api, operator: Api, papers: Papers, ports: list[int]) -> None:
    def client_of(reply: Reply) -> Any:
        assert reply.status == 202, reply.body
        return operator.get(f"/v1/queue/messages/{reply.json['id']}")["client"]

    trusting = ssl.create_default_context(cafile=papers.ca)
    with socket.create_connection((LOOPBACK, ports[2]), timeout=20) as raw:
        raw.sendall(b"PROXY TCP4 192.0.2.7 192.0.2.1 4711 443\r\n")
        behind = Door(app, ports[2]).connect()
        behind.sock = trusting.wrap_socket(raw, server_hostname=NAME)
        assert client_of(over(behind, app)) == "192.0.2.7"
        assert client_of(over(behind, app)) == "192.0.2.7"
        behind.close()
    forwarded = {"X_Forwarded_For": "192.0.2.9", "X_Forwarded_Proto": "https"}
    assert client_of(Door(app, ports[3])("POST", "/v1/messages", MESSAGE, **forwarded)) == "192.0.2.9"
    assert client_of(Door(app, ports[0])("POST", "/v1/messages", MESSAGE, **forwarded)) == LOOPBACK
    in_clear = {**forwarded, "X_Forwarded_Proto": "http"}
    reply = Door(app, ports[3])("POST", "/v1/messages", MESSAGE, **in_clear)
    assert reply.code == (403, "clear_text")


def test_several_workers_answer_for_each_other_and_a_stop_loses_nothing(tmp_path: Path) -> None:
    port = free_port()
    address = {"address": f"{LOOPBACK}:{port}", **HTTP}
    with with_users(relay_of(tmp_path, free_port(), more_listeners=[address])) as relay:
        app = user_of(relay, "app")

        def send(number: int) -> str:
            connection = Door(app, port).connect()
            found = over(connection, app, subject=str(number))
            assert found.status == 202, found.body
            again = over(connection, app, subject=f"{number} again")
            connection.close()
            return f"{found.json['id']} {again.json['id']}"

        with ThreadPoolExecutor(8) as pool:
            ids = " ".join(pool.map(send, range(32))).split()
        assert len(set(ids)) == 64
        assert {each[-2:] for each in ids} == {"00", "01"}  # an id ends with its worker's number
        for message_id in ids[::8]:  # a new connection, at either worker
            assert Door(app, port).get(f"/v1/messages/{message_id}")["id"] == message_id
        cancelled = f"/v1/messages/{ids[-1]}"
        assert wait_until(lambda: Door(app, port)("DELETE", cancelled).status == 200, timeout=20)
        assert {each["by"] for each in relay.events("operated")} == {"token app-token"}, "it came over HTTP"
        kept = Door(app, port).connect()
        assert over(kept, app).status == 202
        assert relay.terminate() == 0
        assert kept.sock.recv(1) == b""  # it was idle
        kept.close()
        relay.start()
        assert Door(app, port).get(f"/v1/messages/{ids[0]}")["id"] == ids[0]


def test_a_reload_changes_a_listener_and_its_protocol(tmp_path: Path) -> None:
    port = free_port()
    relay = RelayProcess(
        tmp_path,
        next_hop=f"{LOOPBACK}:{free_port()}",
        more_listeners=[{"address": f"{LOOPBACK}:{port}", **HTTP}],
    )
    with with_users(relay):
        app = user_of(relay, "app")
        kept = Door(app, port).connect()
        three = [f"{name}@example.org" for name in "abc"]
        assert over(kept, app, text="x" * 70_000).status == over(kept, app, to=three).status == 202
        text = relay.config.read_text()
        http = 'protocol = "http"'
        relay.config.write_text(text.replace(http, f'{http}\nmax_message_size = "64 KB"\nmax_recipients = 2'))
        reload(relay)
        assert over(kept, app, text="x" * 70_000).status == 413
        assert (over(kept, app, to=three).status, over(kept, app, to=three[1:]).status) == (422, 202)
        relay.config.write_text(text.replace('protocol = "http"\nauth = "required"', ""))
        reload(relay)
        kept.close()
        with smtplib.SMTP(LOOPBACK, port, timeout=20) as client:
            assert client.noop()[0] == 250
