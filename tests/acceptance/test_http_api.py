"""`/v1/` of real relays: what an operator's program may ask, page by page, and what it cannot take away from
monitoring.
"""

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.credentials import token
from tests.support.crew import relay_of, run
from tests.support.ports import LOOPBACK, free_port, wait_until
from tests.support.process import RelayProcess
from zonerelay.admin.http_server import MAX_OPERATORS
from zonerelay.admin.operators import MAX_FAILURES, MAX_OF_TOKEN, MAX_STREAMS
from zonerelay.config.credentials.identities import identities_file

RECIPIENTS = 1000


class Reply:
    def __init__(self, found: http.client.HTTPResponse) -> None:
        self.status = found.status
        self.fields = found.headers
        self.body = found.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> tuple[int, str]:
        assert self.fields["Content-Type"] == "application/problem+json"
        assert self.json["status"] == self.status
        return self.status, self.json["code"]


class Api:
    def __init__(self, relay: RelayProcess, token: str) -> None:
        self.relay = relay
        self.fields = {"Authorization": f"Bearer {token}"} if token else {}

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.relay.host, self.relay.admin_port, timeout=20)

    def __call__(self, method: str, path: str, body: object = None, **fields: str) -> Reply:
        connection = self.connect()
        try:
            given = {**self.fields, **{name.replace("_", "-"): text for name, text in fields.items()}}
            octets = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            if octets is not None:
                given.setdefault("Content-Type", "application/json")
            connection.request(method, path, octets, given)
            return Reply(connection.getresponse())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        reply = self("GET", path)
        assert reply.status == 200, reply.body
        return reply.json

    def post(self, path: str, **body: object) -> Any:
        reply = self("POST", path, body)
        assert reply.status == 200, reply.body
        return reply.json

    @contextlib.contextmanager
    def tail(self, path: str = "/v1/tail") -> Iterator[http.client.HTTPResponse]:
        connection = self.connect()
        try:
            connection.request("GET", path, headers=self.fields)
            yield connection.getresponse()
        finally:
            connection.close()


def add_token(relay: RelayProcess, name: str, scope: str, *more: str) -> str:
    made = run(relay, "token", "add", name, "--scope", scope, *more)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def token_without_user(relay: RelayProcess, name: str, user: str = "") -> str:
    """Return a token of scope submit whose user has gone, or that an older release made without one."""
    return token(identities_file(relay.directory), name, "submit", of=user)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """Its next hop does not answer, so that mail stays. X-Forwarded-For is believed."""
    directory = tmp_path_factory.mktemp("api")
    port = free_port()
    token_file = directory / "token"
    token_file.write_text("an-old-token-of-32-characters-or-so\n")
    admin = {"proxy_networks": ["127.0.0.1/32"], "token_file": str(token_file)}
    made = RelayProcess(directory, next_hop=f"{LOOPBACK}:{port}")
    text = made.config.read_text()
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in admin.items())
    made.config.write_text(text.replace("[admin]\n", f"[admin]\n{lines}"))
    with made:
        yield made


@pytest.fixture(scope="module")
def operator(relay: RelayProcess) -> Api:
    return Api(relay, add_token(relay, "oscar", "operate"))


@pytest.fixture(scope="module")
def reader(relay: RelayProcess) -> Api:
    return Api(relay, add_token(relay, "rita", "read", "--for", "90d"))


@pytest.fixture(scope="module")
def full(relay: RelayProcess) -> int:
    for number in range(5):
        relay.send(*(f"r{at}@d{number}.example.net" for at in range(RECIPIENTS)))
    return 5 * RECIPIENTS


def test_without_a_token_there_is_the_description_and_nothing_else(relay: RelayProcess) -> None:
    nobody = Api(relay, "")
    described = nobody("GET", "/v1/openapi.json")
    assert (described.status, described.json["openapi"]) == (200, "3.1.0")
    for path in ("/v1/status", "/v1/nothing", "/v1/", "/v1/queue/messages/0000000000000000/body"):
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            reply = nobody(method, path)
            assert reply.code == (401, "unauthorized")
            assert reply.fields["WWW-Authenticate"].startswith("Bearer")
    wrong = Api(relay, "zrt_" + "0" * 49)("GET", "/v1/status", X_Forwarded_For="198.51.100.7")
    assert wrong.code == (401, "unauthorized")


def test_what_a_token_may_follows_its_scope(relay: RelayProcess, reader: Api, operator: Api) -> None:
    submitter = Api(relay, token_without_user(relay, "sue"))
    for path in ("/v1/status", "/v1/queue", "/v1/config"):
        assert operator("GET", path).status == reader("GET", path).status == 200
        assert submitter("GET", path).code == (403, "forbidden")
    for method, path in (("POST", "/v1/queue/hold"), ("GET", "/v1/resolve?pseudonym=x")):
        assert reader(method, path).code == (403, "forbidden")
    listed = run(relay, "token", "list", "--json").stdout.splitlines()
    assert {(row["name"], row["scope"]) for row in map(json.loads, listed)} >= {
        ("oscar", "operate"),
        ("rita", "read"),
        ("sue", "submit"),
    }
    old = Api(relay, "an-old-token-of-32-characters-or-so")
    assert old("GET", "/v1/resolve?pseudonym=x").status == 200


def test_a_token_ends_when_it_is_removed_and_when_it_expires(relay: RelayProcess) -> None:
    brief = Api(relay, add_token(relay, "brief", "read", "--for", "1s"))
    removed = Api(relay, add_token(relay, "removed", "read"))
    assert removed("GET", "/v1/status").status == 200
    assert run(relay, "token", "add", "removed", "--scope", "read").returncode == 1
    with removed.tail() as stream:
        assert stream.status == 200
        assert run(relay, "token", "remove", "removed").returncode == 0
        assert removed("GET", "/v1/status").code == (401, "unauthorized")
    assert wait_until(lambda: brief("GET", "/v1/status").status == 401, timeout=10)
    assert run(relay, "token", "remove", "removed").returncode == 1
    identities = relay.directory / "identities.json"
    identities.chmod(0o666)
    try:
        assert removed("GET", "/v1/status").code == (503, "unavailable")
    finally:
        identities.chmod(0o640)
    assert "zrt_" not in relay.log_text()
    assert "zrt_" not in identities.read_text()


def test_failures_count_by_client_and_shut_no_valid_token_out(relay: RelayProcess, reader: Api) -> None:
    wrong = Api(relay, "zrt_wrong")
    client = "192.0.2.9"
    for _ in range(MAX_FAILURES):
        assert wrong("GET", "/v1/status", X_Forwarded_For=client).status == 401
    many = wrong("GET", "/v1/status", X_Forwarded_For=client)
    assert many.code == (429, "too_many_failures")
    assert 0 < int(many.fields["Retry-After"]) <= 61
    assert wrong("GET", "/v1/status", X_Forwarded_For="192.0.2.10").status == 401
    assert reader("GET", "/v1/status", X_Forwarded_For=client).status == 200


def test_clear_text_foreign_origins_and_foreign_names_are_refused(operator: Api) -> None:
    far = {"X_Forwarded_For": "192.0.2.1"}
    assert operator("GET", "/v1/status", **far, X_Forwarded_Proto="http").code == (403, "clear_text")
    assert operator("GET", "/v1/status", **far, X_Forwarded_Proto="https").status == 200
    for fields in ({"Origin": "https://evil.example"}, {"Sec_Fetch_Site": "cross-site"}, {"Origin": "null"}):
        assert operator("POST", "/v1/queue/hold", {}, **fields).status == 403
    assert operator("GET", "/v1/status", Host="evil.example").status == 421


def test_what_http_asks_of_a_server(operator: Api) -> None:
    head = operator("HEAD", "/v1/status")
    assert (head.status, head.body, head.fields["Cache-Control"]) == (200, b"", "no-store")
    assert operator("OPTIONS", "/v1/queue/hold").fields["Allow"] == "POST, OPTIONS"
    refused = operator("DELETE", "/v1/status")
    assert refused.code == (405, "method_not_allowed")
    assert refused.fields["Allow"] == "GET, HEAD, OPTIONS"
    assert operator("GET", "/v1/nothing").code == (404, "not_found")
    assert operator("GET", "/v1/status", Accept="text/html").code == (406, "not_acceptable")
    assert operator("GET", "/v1/status", Accept="text/html, application/*;q=0.1").status == 200
    hold = "/v1/queue/hold"
    assert operator("POST", hold, b"{}", Content_Type="text/plain").code == (415, "unsupported_media_type")
    assert operator("POST", hold, b"x" * 2_000_000).code == (413, "too_large")
    assert operator("POST", hold, b"{").code == (400, "malformed")
    wrong = operator("POST", hold, {"filter": {"state": "asleep"}})
    assert wrong.code == (422, "invalid")
    assert [each["pointer"] for each in wrong.json["errors"]] == ["/filter/state"]
    assert operator("POST", hold, {}).code == (422, "invalid")
    for query in ("limit=0", "limit=1&limit=2", "sideways=1", "cursor=AAAA", "message_id=x"):
        assert operator("GET", f"/v1/queue?{query}").code == (422, "invalid")


def test_pages_show_every_delivery_once_while_others_change_the_queue(full: int, operator: Api) -> None:
    seen: list[tuple[str, str]] = []
    page = operator.get("/v1/queue?limit=700")
    while page["next"] is not None:
        seen += [(row["message_id"], row["recipient"]) for row in page["deliveries"]]
        last = page["deliveries"][-1]
        if len(seen) == 1400:  # what the cursor names is gone
            only = {"message_id": last["message_id"], "recipient": last["recipient"]}
            assert operator.post("/v1/queue/drop", filter=only, reason="test")["changed"]["changed"] == 1
        page = operator.get(f"/v1/queue?limit=700&cursor={quote(page['next'])}")
    seen += [(row["message_id"], row["recipient"]) for row in page["deliveries"]]
    assert len(seen) == len(set(seen)) == full
    assert operator.get("/v1/queue/count?domain=d3.example.net")["matched"] == RECIPIENTS
    rows = operator.get("/v1/queue?domain=d3.example.net&limit=1000")
    assert (len(rows["deliveries"]), rows["next"]) == (RECIPIENTS, None)


def test_an_act_is_previewed_carried_out_and_undone(full: int, operator: Api, reader: Api) -> None:
    which = {"filter": {"domain": "d2.example.net"}, "reason": "the customer asked"}
    preview = operator.post("/v1/queue/hold", **which, dry_run=True, sample=2)
    assert (preview["kind"], preview["matched"], len(preview["sample"])) == ("count", RECIPIENTS, 2)
    assert reader.get("/v1/queue/count?state=held")["matched"] == 0
    changed = operator.post("/v1/queue/hold", **which)["changed"]
    assert changed["changed"] == reader.get("/v1/queue/count?state=held")["matched"] == RECIPIENTS
    act = reader.get(f"/v1/acts/{changed['act']}")
    assert (act["who"], act["reason"]) == ("token oscar", "the customer asked")
    assert operator.post(f"/v1/acts/{changed['act']}/undo")["changed"]["changed"] == RECIPIENTS
    assert reader.get("/v1/queue/count?state=held")["matched"] == 0
    given = operator.post("/v1/suspend", about={"domain": "d1.example.net"}, reason="test", seconds=60)
    assert [each["id"] for each in reader.get("/v1/orders")["orders"]] == [given["order"]["id"]]
    assert len(operator.post("/v1/resume", id=given["order"]["id"])["orders"]) == 1


def test_one_message_its_body_and_its_history(full: int, operator: Api, reader: Api) -> None:
    message_id = reader.get("/v1/queue?limit=1")["deliveries"][0]["message_id"]
    assert reader.get(f"/v1/queue/messages/{message_id}")["sender"] == "app@example.org"
    assert reader("GET", f"/v1/queue/messages/{message_id}/body").status == 403
    body = operator("GET", f"/v1/queue/messages/{message_id}/body")
    assert (body.status, body.fields["Content-Type"]) == (200, "message/rfc822")
    assert body.body.endswith(b"hello\r\n")
    (read,) = operator.relay.events("body-read")
    assert (read["id"], read["by"]) == (message_id, "token oscar")
    assert wait_until(lambda: reader.get(f"/v1/history/{message_id}")["steps"], timeout=10)
    seen = operator.get(f"/v1/history?about={message_id}")["found"]
    assert all(each["recipient"].endswith(".example.net") for each in seen)
    hidden = reader.get(f"/v1/history?about={message_id}")["found"]
    assert all(each["recipient"].startswith("u-") for each in hidden)
    found = reader.get("/v1/history?about=r0@d0.example.net")
    assert [each["message_id"] for each in found["found"]] == [message_id]
    assert reader("GET", "/v1/history?recipient=r*@d0.example.net").code == (422, "invalid")
    assert reader.get("/v1/config")["hostname"] == "relay.test"
    assert operator.post("/v1/explain", address="x@example.net")["zone"] == "default"


def test_a_tail_has_addresses_for_the_scope_operate(relay: RelayProcess) -> None:
    for scope, shown in (("operate", True), ("read", False)):
        api = Api(relay, add_token(relay, f"tail-{scope}", scope))
        with api.tail("/v1/tail?event=accepted") as stream:
            relay.send(f"{scope}@example.net")
            data = next(line for line in stream if line.startswith(b"data: "))
            assert (b"@example.net" in data) is shown


def test_streams_end_with_their_clients_and_leave_room(relay: RelayProcess, reader: Api) -> None:
    readers = [
        Api(relay, add_token(relay, f"reader-{each}", "read")) for each in range(MAX_STREAMS // MAX_OF_TOKEN)
    ]
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(each.tail()) for each in readers for _ in range(MAX_OF_TOKEN)]
        assert {each.status for each in streams} == {200}
        busy = reader("GET", "/v1/tail")
        assert busy.code == (503, "busy")
        assert reader.get("/v1/status")["state"] == "running"
        relay.send("tail@example.net")
        first = streams[0]
        lines = iter(first.readline, b"")
        data = (json.loads(line[6:]) for line in lines if line.startswith(b"data: "))
        assert next(each for each in data if each["event"] == "accepted")["kind"] == "event"
    assert wait_until(lambda: _opens(reader), timeout=20)


def _opens(reader: Api) -> bool:
    with reader.tail() as stream:
        return stream.status == 200


def test_monitoring_answers_while_operators_have_every_connection(relay: RelayProcess, reader: Api) -> None:
    held = []
    try:
        others = [Api(relay, add_token(relay, f"other-{each}", "read")) for each in range(4)]
        for each in range(MAX_OPERATORS):
            connection = reader.connect()
            connection.request("GET", "/v1/orders", headers=others[each % len(others)].fields)
            reply = connection.getresponse()
            reply.read()
            held.append(connection)
        refused = reader("GET", "/v1/orders")
        assert (refused.status, refused.fields["Retry-After"]) == (503, "5")
        for path in ("/readyz", "/healthz", "/metrics"):
            assert relay.http(path)[0] == 200
    finally:
        for connection in held:
            connection.close()
    assert wait_until(lambda: reader("GET", "/v1/orders").status == 200, timeout=20)


def test_a_client_that_leaves_does_not_end_a_change(full: int, relay: RelayProcess, operator: Api) -> None:
    connection = operator.connect()
    body = json.dumps({"filter": {"domain": "d4.example.net"}, "reason": "test"})
    fields = {**operator.fields, "Content-Type": "application/json"}
    connection.request("POST", "/v1/queue/hold", body, fields)
    connection.close()
    assert wait_until(lambda: operator.get("/v1/queue/count?state=held")["matched"] == RECIPIENTS, timeout=20)


@pytest.mark.proof
def test_two_workers_answer_as_one_relay(tmp_path: Path) -> None:
    with relay_of(tmp_path, free_port(), tables={"retry": {"schedule": ["1h"]}}) as relay:
        operator = Api(relay, add_token(relay, "oscar", "operate"))
        for number in range(12):
            relay.send(f"a{number}@example.net", f"b{number}@example.net")
        assert len(operator.get("/v1/status")["workers"]) == 2
        seen: list[tuple[str, str]] = []
        cursor = ""
        while cursor is not None:
            page = operator.get(f"/v1/queue?limit=5&cursor={quote(cursor)}")
            seen += [(row["message_id"], row["recipient"]) for row in page["deliveries"]]
            cursor = page["next"]
        assert seen == sorted(seen)
        assert len(seen) == 24
        changed = operator.post("/v1/queue/hold", filter={"recipient": "a*"}, reason="test")["changed"]
        assert changed["changed"] == 12
        body = operator("GET", f"/v1/queue/messages/{seen[-1][0]}/body")
        assert body.body.endswith(b"hello\r\n")
        with operator.tail() as stream:
            operator.post("/v1/queue/release", everything=True, reason="test")
            lines = iter(stream.readline, b"")
            assert any(b'"event":"operated"' in line for line in lines)
        with operator.tail(f"/v1/transcript?client={LOOPBACK}&seconds=60") as stream:
            assert stream.readline() == b": zonerelay\n"
            relay.send("c@example.net")
            assert any(b"EHLO" in line.upper() for line in iter(stream.readline, b""))
        for path in ("/readyz", "/metrics"):
            assert relay.http(path)[0] == 200
        assert "trouble" not in {event["event"] for event in relay.events()}


@pytest.mark.proof
def test_the_api_is_as_it_describes_itself(tmp_path: Path) -> None:
    """Schemathesis asks whatever the description allows, and much that it does not."""
    with RelayProcess(tmp_path / "relay", next_hop=f"{LOOPBACK}:{free_port()}") as relay:
        relay.send("a@example.net", "b@example.net")
        # Those of mail are asked with a token for them, in test_http_submission.
        others = ("--exclude-path-regex", "^/(v1/messages|send)")
        ask_all(relay, add_token(relay, "tester", "operate"), tmp_path, *others)


def ask_all(relay: RelayProcess, token: str, directory: Path, *more: str) -> None:
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"http://{relay.host}:{relay.admin_port}/v1/openapi.json",
        *("--header", f"Authorization: Bearer {token}"),
        *("--exclude-path", "/v1/tail", "--exclude-path", "/v1/transcript"),  # they have no end
        *("--exclude-path", "/send-raw"),  # no JSON
        # What a filter has to have cannot be said in a schema.
        *("--exclude-checks", "positive_data_acceptance"),
        *("--max-examples", "1", "--generation-deterministic"),
        *("--request-timeout", "20", "--no-color"),
        *more,
    ]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout
    assert "trouble" not in {event["event"] for event in relay.events()}
