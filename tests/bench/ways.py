"""`python -m tests.bench.ways`: the cost of handing in the same mail over SMTP, over HTTP, and at Postfix.

Mail of `--size` octets over `--connections`; nothing is delivered meanwhile. CPU is that of all processes of
the relay, for each message; the ratio is to the way that is named first. Each way has a round in turn, and
the median of `--rounds` is printed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.meters import ProcessGroup, open_group, settle
from tests.support.ports import LOOPBACK, free_port, free_ports
from tests.support.postfix import PostfixInstance, PostfixSettings, PostfixTools
from tests.support.process import PROGRAM, RelayProcess

SENDER, RECIPIENT, USER, PASSWORD = "shop@example.org", "zoe@example.net", "app", "a-long-password"
WARM_UP = 200

Hand = Callable[[socket.socket], None]
"""Hands one message in."""


class Client:
    """A way to hand mail in. `begin` is said on a new connection, `end` before it is closed."""

    def __init__(self, port: int, begin: Hand, hand: Hand, *, keeps: bool, at_once: int = 1) -> None:
        """`at_once` messages are handed in together."""
        self.port, self.begin, self.hand, self.keeps, self.at_once = port, begin, hand, keeps, at_once

    def send(self, messages: int) -> None:
        connection: socket.socket | None = None
        for _ in range(messages // self.at_once):
            if connection is None:
                connection = socket.create_connection((LOOPBACK, self.port), timeout=60)
                self.begin(connection)
            self.hand(connection)
            if not self.keeps:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()


def ask(connection: socket.socket, data: bytes, code: bytes) -> None:
    """Says something in SMTP and reads the reply to its end."""
    connection.sendall(data)
    text = b""
    while not text.endswith(b"\r\n") or text.splitlines()[-1][3:4] != b" ":
        text += connection.recv(65536)
    assert text.startswith(code), text


def smtp(port: int, message: bytes, *, keeps: bool, login: bool = False, quits: bool = True) -> Client:
    def begin(connection: socket.socket) -> None:
        ask(connection, b"", b"220")
        ask(connection, b"EHLO client.test\r\n", b"250")
        if login:
            secret = base64.b64encode(f"\0{USER}\0{PASSWORD}".encode())
            ask(connection, b"AUTH PLAIN " + secret + b"\r\n", b"235")

    def hand(connection: socket.socket) -> None:
        ask(connection, f"MAIL FROM:<{SENDER}>\r\n".encode(), b"250")
        ask(connection, f"RCPT TO:<{RECIPIENT}>\r\n".encode(), b"250")
        ask(connection, b"DATA\r\n", b"354")
        ask(connection, message + b"\r\n.\r\n", b"250")
        if quits and not keeps:
            ask(connection, b"QUIT\r\n", b"221")

    return Client(port, begin, hand, keeps=keeps)


def http(port: int, token: str, body: bytes, kind: str, *, keeps: bool) -> Client:
    query = "" if kind.endswith("json") else f"?from={SENDER}&to={RECIPIENT}"
    head = (
        f"POST /v1/messages{query} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    request = head.encode() + body

    def hand(connection: socket.socket) -> None:
        connection.sendall(request)
        text = b""
        while not text.endswith(b"}\n"):
            text += connection.recv(65536)
        assert text.startswith(b"HTTP/1.1 202"), text

    return Client(port, lambda _: None, hand, keeps=keeps)


def batch(port: int, token: str, document: dict[str, str], at_once: int) -> Client:
    body = json.dumps({"template": document, "messages": [{}] * at_once}).encode()
    head = (
        f"POST /v1/messages/batch HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )

    def hand(connection: socket.socket) -> None:
        connection.sendall(head.encode() + body)
        text = b""
        while not text.endswith(b"}\n"):
            text += connection.recv(65536)
        assert text.count(b'"status":202') == at_once, text

    return Client(port, lambda _: None, hand, keeps=True, at_once=at_once)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ways", description=__doc__)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--messages", type=int, default=4000, help="in a round")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    text = ("x" * 70 + "\r\n") * (options.size // 72)
    message = f"From: {SENDER}\r\nTo: {RECIPIENT}\r\nSubject: order\r\n\r\n{text}".encode()
    fields = {"from": SENDER, "to": RECIPIENT, "subject": "order", "text": text}
    document = json.dumps(fields).encode()
    with tempfile.TemporaryDirectory(prefix="zonerelay-ways-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        directory.chmod(0o755)
        group, postfix_group = open_group(), open_group()
        ports, token = stack.enter_context(zonerelay(directory / "zonerelay", group))
        postfix_port = stack.enter_context(postfix(directory / "postfix", PostfixTools(), postfix_group))
        raw = "message/rfc822"
        ways: dict[str, tuple[Client, ProcessGroup]] = {
            "SMTP, a session for each": (smtp(ports[0], message, keeps=False), group),
            "SMTP, kept sessions": (smtp(ports[0], message, keeps=True), group),
            "SMTP, log-in, a session for each": (smtp(ports[1], message, keeps=False, login=True), group),
            "SMTP, log-in, kept sessions": (smtp(ports[1], message, keeps=True, login=True), group),
            "HTTP, JSON, kept connections": (
                http(ports[2], token, document, "application/json", keeps=True),
                group,
            ),
            "HTTP, JSON, a connection for each": (
                http(ports[2], token, document, "application/json", keeps=False),
                group,
            ),
            "HTTP, JSON, batches of 50": (batch(ports[2], token, fields, 50), group),
            "HTTP, rfc822, kept connections": (http(ports[2], token, message, raw, keeps=True), group),
            "Postfix, a session for each": (smtp(postfix_port, message, keeps=False), postfix_group),
            "Postfix, kept sessions": (smtp(postfix_port, message, keeps=True), postfix_group),
        }
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for number in range(options.rounds + 1):
            for way, (client, of) in ways.items():
                amount = options.messages if number else WARM_UP
                figures = measured(client, of, amount, options.connections)
                if number:
                    found[way].append(figures)
        first = statistics.median(cpu for cpu, _ in found[next(iter(ways))])
        print(f"{'':34}{'ms of CPU':>10}{'ratio':>7}{'messages/s':>12}")
        for way, rounds in found.items():
            cpu = statistics.median(cpu for cpu, _ in rounds)
            rate = statistics.median(rate for _, rate in rounds)
            print(f"{way:34}{cpu * 1000:10.2f}{cpu / first:7.2f}{rate:12.0f}")
    return 0


def measured(client: Client, group: ProcessGroup, messages: int, connections: int) -> tuple[float, float]:
    """Seconds of CPU for each message, and messages a second."""
    settle(group.cpu_seconds)
    cpu, began = group.cpu_seconds(), time.monotonic()
    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(client.send, [messages // connections] * connections))
    seconds = time.monotonic() - began
    settle(group.cpu_seconds)
    return (group.cpu_seconds() - cpu) / messages, messages / seconds


@contextlib.contextmanager
def zonerelay(directory: Path, group: ProcessGroup) -> Iterator[tuple[list[int], str]]:
    """The ports of SMTP, of SMTP with a log-in and of HTTP, and a token."""
    login, over_http = free_ports(2)
    wide = {"max_connections_per_client": 1000}
    relay = RelayProcess(
        directory,
        next_hop=f"{LOOPBACK}:{free_port()}",
        listener=wide,
        more_listeners=[
            {"address": f"{LOOPBACK}:{login}", "auth": "required", "unsafe": ["cleartext-auth"], **wide},
            {"address": f"{LOOPBACK}:{over_http}", "protocol": "http", "auth": "required", **wide},
        ],
        tables={"auth": {"credentials": str(directory / "users")}},
        launcher=group.launcher(),
    )

    def run(*words: str, given: str = "") -> str:
        command = [str(PROGRAM), *words, "--config", str(relay.config)]
        return subprocess.run(command, input=given, text=True, check=True, stdout=subprocess.PIPE).stdout

    (directory / "users").touch(mode=0o600)
    run("user", "add", USER, "--password-stdin", given=PASSWORD)
    token = run("token", "add", "bench", "--scope", "submit", "--user", USER).strip()
    with relay:
        group.adopt(relay.pid)
        run("suspend", "--zone", "default", "--reason", "bench")
        yield [relay.smtp_port, login, over_http], token


@contextlib.contextmanager
def postfix(directory: Path, tools: PostfixTools, group: ProcessGroup) -> Iterator[int]:
    instance = PostfixInstance(
        tools, directory, PostfixSettings(next_hop=f"[{LOOPBACK}]:1"), launcher=group.launcher()
    )
    with (directory / "config/main.cf").open("a") as settings:
        settings.write("defer_transports = smtp relay\n")
    with instance:
        group.adopt(instance.pid)
        yield instance.smtp_port


if __name__ == "__main__":
    sys.exit(main())
