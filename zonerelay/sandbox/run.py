"""`zonerelay sandbox`: a relay and a sink on loopback, and every message's journey in the terminal.

Nothing leaves the machine: the only zone's next hop is the sink, whatever the recipient's domain. The
spool is a temporary directory that goes when the sandbox ends. Retries come within seconds, so that
a deferral, a delay warning and an expiry can be watched.
"""

from __future__ import annotations

import asyncio
import random
import signal
import smtplib
import socket
import sys
import tempfile
from dataclasses import replace
from email.message import EmailMessage
from pathlib import Path

import uvloop
from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.table import Table

from zonerelay.config.credentials.identities import add, identities_file, make_token, token_of
from zonerelay.config.settings import (
    AdminSettings,
    BounceSettings,
    CaptureSettings,
    ListenerSettings,
    RetrySettings,
    Settings,
    SpoolSettings,
    ZoneSettings,
)
from zonerelay.model.clock import SystemClock
from zonerelay.process.setup import StartError
from zonerelay.process.threads import OPERATORS
from zonerelay.sandbox import DIRECTORY
from zonerelay.sandbox.behaviours import ADDRESSES
from zonerelay.sandbox.captured import CHAOS, CapturingSink, build
from zonerelay.sandbox.journey import Journey
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.worker.build import build as build_worker
from zonerelay.worker.worker import Worker

_LOOPBACK = "127.0.0.1"
_SMTP_PORT = 2525
_HTTP_PORT = 8025
_FIRST_MAIL = ("someone@example.com", "reject-550@example.com", "greylist@example.com")

ATTEMPTS = 3
"""Starts, where another process takes a port between the look for it and its use."""


def main(release_to: str) -> int:
    """`release_to` is the address that captured mail may be released to, "" for none."""
    console = Console(highlight=False)
    for attempt in range(1, ATTEMPTS + 1):
        with tempfile.TemporaryDirectory(prefix=DIRECTORY) as directory:
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    return runner.run(_play(console, Path(directory), release_to))
            except StartError as error:
                # Another sandbox that starts at the same moment may have found the same port free.
                if attempt == ATTEMPTS:
                    print(f"zonerelay sandbox: {error}", file=sys.stderr)
                    return 1
    return 1


async def _play(console: Console, directory: Path, release_to: str) -> int:
    clock = SystemClock()
    settings = _settings(directory, release_to)
    sandbox, sink = build(settings, clock)
    await sink.start()
    settings = replace(settings, zone=(ZoneSettings(next_hop=f"{_LOOPBACK}:{sink.port}"),))
    try:
        worker = await build_worker(
            settings,
            hostname="sandbox.zonerelay.test",
            log=Journey(console, clock.now),
            redactor=Redactor(b"", enabled=False),
            clock=clock,
            randomness=random.Random(),
            sandbox=sandbox,
        )
        if worker.http_port is None:
            problems = worker.surface().problems
            await worker.stop()
            raise StartError("; ".join(problems))
        page = f"http://{_LOOPBACK}:{worker.http_port}/#{_token(directory, clock.now())}"
        _introduce(console, worker, page)
        with _pinned(console, worker, sink, page):
            await OPERATORS.run(_send_first_mail, worker.addresses()[0])
            await _interrupted()
        console.print("\nStopping.", style="dim")
        await worker.stop()
    finally:
        await sink.close()
        sandbox.capture.close()
    return 0


def _settings(directory: Path, release_to: str) -> Settings:
    return Settings(
        spool=SpoolSettings(path=directory / "spool", min_free_space=0),
        listener=(ListenerSettings(address=f"{_LOOPBACK}:{_free(_SMTP_PORT)}", policy=CHAOS),),
        capture=CaptureSettings(release_to=release_to),
        retry=RetrySettings(schedule=(3.0, 10.0, 20.0), max_age=120.0, suspend_min=3.0, suspend_max=15.0),
        bounce=replace(BounceSettings(), delay_warning=30.0),
        admin=AdminSettings(address=f"{_LOOPBACK}:{_free(_HTTP_PORT)}", page=True),
    )


def _token(directory: Path, now: float) -> str:
    """For the page, as long as the sandbox runs: loopback is other users' of this machine, too."""
    text = make_token()
    add(identities_file(directory), token_of(text, "sandbox", "operate", created=now, expires=0.0, user=""))
    return text


def _free(port: int) -> int:
    """The usual port, or any when another relay has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError:
            probe.bind((_LOOPBACK, 0))
        number: int = probe.getsockname()[1]
        return number


def _introduce(console: Console, worker: Worker, page: str) -> None:
    console.print(f"[bold]A relay listens on {worker.addresses()[0]}[/], a sink behind it takes all mail,")
    console.print("whatever the domain. The page, logged in:\n")
    console.print(f"{page}\n", soft_wrap=True)  # one line, to be copied
    table = Table(title="What the recipient's local part makes the sink do", title_justify="left", box=None)
    table.add_column("recipient", style="cyan")
    table.add_column("then")
    for address, meaning in ADDRESSES:
        table.add_row(f"{address}@…", meaning)
    console.print(table)
    console.print("\nThree messages to begin with:\n")


def _pinned(console: Console, worker: Worker, sink: CapturingSink, page: str) -> Live:
    """What a person needs while mail flows stays below it; in a file it comes at the end."""
    smtp = worker.addresses()[0]
    lines = (
        f"swaks --server {smtp} --from you@example.org --to someone@example.com",
        f"relay {smtp}: zonerelay status, zonerelay queue list; Ctrl-C ends it",
        f"Mailpit's API and /metrics at http://{_LOOPBACK}:{worker.http_port}; sink {_LOOPBACK}:{sink.port}",
        page,
    )
    return Live(Group(Rule(style="dim"), *lines), console=console, auto_refresh=False)


def _send_first_mail(relay: str) -> None:
    host, _, port = relay.rpartition(":")
    with smtplib.SMTP(host, int(port), timeout=10) as client:
        for recipient in _FIRST_MAIL:
            message = EmailMessage()
            message["From"] = "you@example.org"
            message["To"] = recipient
            message["Subject"] = "A first message"
            message.set_content("It flows.\n")
            client.send_message(message)


async def _interrupted() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
