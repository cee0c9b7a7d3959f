"""Clients that repeat a message until they have an answer, while processes are killed, connections cut.

As Jepsen's workloads do: each identity has one key and is submitted again and again, composed anew each time;
in the end every acknowledged identity has one queue id, in the answers and at the receiver. A copy that came
twice is one message of which an attempt was in doubt.
"""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import smtplib
import threading
import time
import tomllib
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from pathlib import Path
from typing import Any

import pytest

from tests.support.crew import QUICK, pid_of, relay_of, run
from tests.support.engines import ENVIRONMENT, shared_tables
from tests.support.ports import LOOPBACK, free_port
from tests.support.postgres import shared_postgres
from tests.support.process import RelayFailed, RelayProcess
from tests.support.sink import Sink
from zonerelay.config.settings import Backend
from zonerelay.operations.errors import ControlError

CLIENTS = 4
PAUSE = 0.8
"""Seconds between two kills."""
KILLS = int(os.environ.get("KILLS", "3"))
ENOUGH = 30

_QUEUED = re.compile(rb"OK queued as ([0-9a-f]{16})")
_ID = re.compile(rb"\bid ([0-9a-f]{16})")
_TOKEN = re.compile(rb"^Subject: (\S+)\r$", re.MULTILINE)


@dataclass(frozen=True)
class Door:
    """A relay as its clients know it."""

    relay: RelayProcess
    http_port: int
    token: str


class Clients:
    """Every other one speaks HTTP. `answers` are the queue ids that each identity was told, `refused` is all
    else that was said for good.
    """

    def __init__(self, doors: Sequence[Door]) -> None:
        self._doors = doors
        self._stop = threading.Event()
        self.answers: dict[str, list[str]] = defaultdict(list)
        self.refused: list[str] = []
        self.tries = self.cuts = 0

    def start(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._work, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        return threads

    def stop(self) -> None:
        """No further identity; those that have begun are repeated until they have an answer."""
        self._stop.set()

    def _work(self, client: int) -> None:
        chance = random.Random(client)
        number = 0
        while not self._stop.is_set():
            token = f"c{client}n{number}"
            number += 1
            # An answer that was given is asked for again sometimes, as by a client that has forgotten it.
            time.sleep(0.01)
            for _ in range(chance.choice((1, 1, 2))):
                self._until_answered(client, token, chance)

    def _until_answered(self, client: int, token: str, chance: random.Random) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            self.tries += 1
            try:
                submit = self._post if client % 2 else self._submit
                told = submit(token, chance)
            except (OSError, smtplib.SMTPException, http.client.HTTPException):
                time.sleep(0.05)
                continue
            if told is None or told[0] // 100 == 4:
                time.sleep(0.02)
            elif (queued := _QUEUED.search(told[1])) is not None:
                self.answers[token].append(queued[1].decode())
                return
            else:
                self.refused.append(f"{token}: {told}")
                return
        self.refused.append(f"{token}: no answer")

    def _submit(self, token: str, chance: random.Random) -> tuple[int, bytes] | None:
        """None: the connection was cut behind the dot."""
        port = chance.choice(self._doors).relay.smtp_port
        client = smtplib.SMTP(LOOPBACK, port, local_hostname="client.test", timeout=20)
        try:
            client.ehlo()
            client.mail("app@example.org")
            if client.rcpt(f"{token}@example.com")[0] != 250:
                return 451, b"not now"
            if client.docmd("DATA")[0] != 354:
                return 451, b"not now"
            octets = message(token, chance).as_bytes().replace(b"\n", b"\r\n")
            client.send(octets + b"\r\n.\r\n")
            if chance.random() < 0.25:
                self.cuts += 1
                if chance.random() < 0.5:
                    time.sleep(chance.random() * 0.02)
                return None
            return client.getreply()
        finally:
            client.close()

    def _post(self, token: str, chance: random.Random) -> tuple[int, bytes] | None:
        """As `_submit`, in the codes of SMTP. The relay composes the message anew."""
        door = chance.choice(self._doors)
        connection = http.client.HTTPConnection(LOOPBACK, door.http_port, timeout=20)
        given = {"from": "app@example.org", "to": f"{token}@example.com", "subject": token, "text": "Hello\n"}
        fields = {"Authorization": f"Bearer {door.token}", "Idempotency-Key": f"key-{token}"}
        try:
            connection.request(
                "POST", "/v1/messages", json.dumps(given), {**fields, "Content-Type": "application/json"}
            )
            if chance.random() < 0.25:
                self.cuts += 1
                if chance.random() < 0.5:
                    time.sleep(chance.random() * 0.02)
                return None
            reply = connection.getresponse()
            text = reply.read()
            if reply.status == 202:
                return 250, b"OK queued as " + json.loads(text)["id"].encode()
            return 451 if reply.status in (409, 429, 503) else 550, text
        finally:
            connection.close()


def message(token: str, chance: random.Random) -> EmailMessage:
    """Composed anew: another date, Message-ID and boundary."""
    made = EmailMessage()
    made["Idempotency-Key"] = f"key-{token}"
    made["From"], made["To"], made["Subject"] = "app@example.org", f"{token}@example.com", token
    made["Date"], made["Message-ID"] = formatdate(chance.random() * 1e9), make_msgid()
    made.set_content(f"Hello {token}\n" * 20)
    made.add_alternative(f"<p>Hello {token}</p>", subtype="html")
    made.set_boundary(f"=_{chance.getrandbits(64):x}")
    return made


def http_of(directory: Path) -> dict[str, Any]:
    """What a relay needs beside SMTP; all of them have one file of users."""
    users = directory / "users"
    users.touch(mode=0o600)
    listener = {"address": f"{LOOPBACK}:{free_port()}", "protocol": "http", "auth": "required"}
    return {"more_listeners": [listener], "tables": {"auth": {"credentials": str(users)}}}


def door_of(relay: RelayProcess) -> Door:
    run(relay, "user", "add", "app", "--generate")  # unless another relay has added it
    made = run(relay, "token", "add", "app", "--scope", "submit", "--user", "app")
    assert made.returncode == 0, made.stderr
    port = tomllib.loads(relay.config.read_text())["listener"][1]["address"].rpartition(":")[2]
    return Door(relay, int(port), made.stdout.strip())


def workload(
    relays: Sequence[RelayProcess],
    sink: Sink,
    harm: Callable[[int], None],
    until_empty: Callable[[], None] | None = None,
) -> None:
    clients = Clients([door_of(relay) for relay in relays])
    threads = clients.start()
    try:
        for turn in range(KILLS):
            time.sleep(PAUSE)
            harm(turn)
    finally:
        clients.stop()
        for thread in threads:
            thread.join()
    (until_empty or relays[0].wait_until_empty)()
    arrived: dict[str, set[str]] = defaultdict(set)
    copies = 0
    for received in sink.messages:
        token, identity = _TOKEN.search(received.body), _ID.search(received.body)
        assert token is not None
        assert identity is not None
        assert b"idempotency-key" not in received.body.lower()
        arrived[token[1].decode()].add(identity[1].decode())
        copies += 1
    print(
        f"{len(clients.answers)} identities, {clients.tries} submissions, {clients.cuts} cut behind the dot,"
        f" {sum(map(len, clients.answers.values()))} answers, {copies} copies at the receiver,"
        f" {sum(len(relay.events('repeated')) for relay in relays)} answered again"
    )
    assert clients.refused == []
    assert len(clients.answers) >= ENOUGH
    assert clients.cuts >= ENOUGH / 5
    assert {token: set(ids) for token, ids in clients.answers.items()} == arrived
    assert {token: ids for token, ids in arrived.items() if len(ids) != 1} == {}


def test_four_workers_that_are_killed_and_their_supervisor(tmp_path: Path, sink: Sink) -> None:
    more = http_of(tmp_path)
    more["tables"] = {**QUICK, **more["tables"]}
    with relay_of(tmp_path, sink.port, workers=4, **more) as relay:

        def harm(turn: int) -> None:
            if turn == KILLS - 1:
                relay.restart()
                return
            with contextlib.suppress(ControlError, ValueError, ProcessLookupError):
                os.kill(pid_of(relay, turn % 4), signal.SIGKILL)

        workload([relay], sink, harm)
        workers = {event["id"][-2:] for event in relay.events("accepted")}
        assert workers == {"00", "01", "02", "03"}, "all took mail"


@pytest.mark.parametrize("backend", [Backend.POSTGRES, Backend.REDIS, Backend.S3])
def test_two_nodes_on_one_store(tmp_path: Path, sink: Sink, backend: Backend) -> None:
    name = f"nodes_{uuid.uuid4().hex[:12]}"

    def node(number: int) -> RelayProcess:
        more = http_of(tmp_path)
        return RelayProcess(
            tmp_path / f"node{number}",
            next_hop=f"{LOOPBACK}:{sink.port}",
            spool={"backend": backend.value},
            more_listeners=more["more_listeners"],
            tables={
                **shared_tables(backend, name, number, lease="3s"),
                "retry": {"schedule": ["1s"], "suspend_min": "1s"},
                **more["tables"],
            },
            environment=ENVIRONMENT,
        )

    with node(0) as first, node(1) as second:
        nodes = [first, second]

        def harm(turn: int) -> None:
            with contextlib.suppress(RelayFailed):
                nodes[turn % 2].restart()

        def until_empty() -> None:
            if backend is not Backend.POSTGRES:
                for each in nodes:
                    each.wait_until_empty()
                return
            # A node counts anew now and then.
            sql = f"SELECT count(*) FROM {name}.delivery"
            first.wait_for(lambda: shared_postgres().psql(sql).strip() == "0", what="empty", timeout=60)

        workload(nodes, sink, harm, until_empty)
