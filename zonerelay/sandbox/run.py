"""`zonerelay sandbox`: runs a relay and a mail receiver, and prints the trace of every message.

No mail leaves the machine: the only zone's next hop is the sink, whatever the recipient's domain. The spool
is a temporary directory that is removed when the sandbox ends. Retries come within seconds, so that a
deferral, a delay warning and an expiry can be watched. STARTTLS uses a certificate that is issued at the
start, and every login is accepted.

The sandbox is for this machine: other machines reach it only with `--open`. Then all of them may send, read
and delete mail, and the page requires no token.
"""

import asyncio
import ipaddress
import random
import signal
import smtplib
import socket
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from email.message import EmailMessage
from pathlib import Path

import uvloop
from cryptography import x509
from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.table import Table

from zonerelay.config import settings as config
from zonerelay.config.credentials.identities import add, identities_file, make_token, token_of
from zonerelay.config.endpoints import parse_listen
from zonerelay.config.settings import Settings
from zonerelay.model.clock import SystemClock
from zonerelay.process.certificate import issue
from zonerelay.process.setup import StartError
from zonerelay.process.threads import OPERATORS
from zonerelay.sandbox import DIRECTORY
from zonerelay.sandbox.behaviours import ADDRESSES
from zonerelay.sandbox.captured import ANY_LOGIN, CHAOS, CapturingSink, build
from zonerelay.telemetry.events.events import LogSink
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.worker.build import build as build_worker
from zonerelay.worker.worker import Worker

_LOOPBACK = "127.0.0.1"
_SMTP_PORT = 2525
_HTTP_PORT = 8025
_FIRST_MAIL = ("someone@example.com", "reject-550@example.com", "greylist@example.com")

ATTEMPTS = 3
"""Starts, where another process takes a port between the look for it and its use."""


def main(arguments: Namespace, log_to: Callable[[Console], LogSink]) -> int:
    """Run the sandbox until it is stopped. `log_to` returns the log that is shown on a console. Of the
    `arguments`, `listen`, `page` and `release_to` are addresses or None; with `open`, everyone who can
    connect may send and read.
    """
    console = Console(highlight=False)
    for attempt in range(1, ATTEMPTS + 1):
        with tempfile.TemporaryDirectory(prefix=DIRECTORY) as directory:
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    return runner.run(_play(console, log_to(console), Path(directory), arguments))
            except StartError as error:
                # Another sandbox that starts at the same moment may have found the same port free.
                if attempt == ATTEMPTS or arguments.listen or arguments.page:
                    print(f"zonerelay sandbox: {error}", file=sys.stderr)
                    return 1
    return 1


async def _play(console: Console, log: LogSink, directory: Path, arguments: Namespace) -> int:
    clock = SystemClock()
    settings = _settings(directory, arguments)
    token = _token(directory, clock.now())
    sandbox, sink = build(settings, clock, token=token if arguments.open else "")
    await sink.start()
    settings = replace(settings, zone=(config.ZoneSettings(next_hop=f"{_LOOPBACK}:{sink.port}"),))
    try:
        worker = await build_worker(
            settings,
            hostname="sandbox.zonerelay.test",
            log=log,
            redactor=Redactor(b"", enabled=False),
            clock=clock,
            randomness=random.Random(),
            sandbox=sandbox,
        )
        if worker.http_port is None:
            problems = worker.all_problems()
            await worker.stop()
            raise StartError("; ".join(problems))
        page = f"http://{_shown(settings.admin.address)}:{worker.http_port}/"
        if not arguments.open:
            page += f"#{token}"
        _introduce(console, worker, page)
        with _pinned(console, worker, sink, page):
            await OPERATORS.run(_send_first_mail, _own_address(worker))
            await _interrupted()
        console.print("\nStopping.", style="dim")
        await worker.stop()
    finally:
        await sink.close()
        sandbox.capture.close()
    return 0


def _settings(directory: Path, arguments: Namespace) -> Settings:
    certificate, key = _make_certificate(directory)
    listener = config.ListenerSettings(
        address=arguments.listen or f"{_LOOPBACK}:{_free(_SMTP_PORT)}",
        policy=CHAOS,
        tls=config.ListenerTls.STARTTLS,
        certificate=(certificate,),
        key=(key,),
        auth=config.ListenerAuth.OPTIONAL,
        authenticator=ANY_LOGIN,
        unsafe=tuple(config.UnsafeListener) if arguments.open else (config.UnsafeListener.CLEARTEXT_AUTH,),
    )
    return Settings(
        spool=config.SpoolSettings(path=directory / "spool", min_free_space=0),
        listener=(listener,),
        capture=config.CaptureSettings(release_to=arguments.release_to or ""),
        retry=config.RetrySettings(
            schedule=(3.0, 10.0, 20.0), max_age=120.0, suspend_min=3.0, suspend_max=15.0
        ),
        bounce=config.BounceSettings(delay_warning=30.0),
        admin=config.AdminSettings(address=arguments.page or f"{_LOOPBACK}:{_free(_HTTP_PORT)}", page=True),
    )


def _make_certificate(directory: Path) -> tuple[Path, Path]:
    """Write a certificate for this machine that is valid while the sandbox runs."""
    names = [x509.DNSName(name) for name in dict.fromkeys(("localhost", socket.gethostname()))]
    issued = issue([*names, x509.IPAddress(ipaddress.ip_address(_LOOPBACK))], datetime.now(UTC), days=365)
    certificate, key = directory / "sandbox.crt", directory / "sandbox.key"
    certificate.write_bytes(issued.certificate_pem)
    key.touch(0o600)
    key.write_bytes(issued.key_pem)
    return certificate, key


def _shown(address: str) -> str:
    """Return the host name or address with which other machines can connect to a listener on `address`."""
    host = parse_listen(address).host
    return socket.gethostname() if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host


def _own_address(worker: Worker) -> str:
    """Return the address at which this process can reach its listener, which may listen on all addresses."""
    host, _, port = worker.addresses()[0].rpartition(":")
    return f"{_LOOPBACK if host in ('0.0.0.0', '[::]') else host}:{port}"


def _token(directory: Path, now: float) -> str:
    """Create a token that the sandbox's page requires, so that other users of this machine cannot use it."""
    text = make_token()
    add(identities_file(directory), token_of(text, "sandbox", "operate", created=now, expires=0.0, user=""))
    return text


def _free(port: int) -> int:
    """Return this port if it is free, or any free port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError:
            probe.bind((_LOOPBACK, 0))
        number: int = probe.getsockname()[1]
        return number


def _introduce(console: Console, worker: Worker, page: str) -> None:
    console.print(f"[bold]A relay listens on {worker.addresses()[0]}[/]. A test receiver gets all its mail,")
    console.print("for every domain, and every login is accepted. Open the page:\n")
    console.print(f"{page}\n", soft_wrap=True)  # one line, to be copied
    title = "Simulated replies, selected by the recipient's local part"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("recipient", style="cyan")
    table.add_column("then")
    for address, meaning in ADDRESSES:
        table.add_row(f"{address}@…", meaning)
    console.print(table)
    console.print("\nThree example messages:\n")


def _pinned(console: Console, worker: Worker, sink: CapturingSink, page: str) -> Live:
    """Return hints for the user, which are shown below the trace."""
    smtp = _own_address(worker)
    lines = (
        f"swaks --server {smtp} --from you@example.org --to someone@example.com",
        f"relay {smtp}: zonerelay status, zonerelay queue list; Ctrl-C stops it",
        f"Mailpit's API and /metrics on port {worker.http_port}; test receiver {_LOOPBACK}:{sink.port}",
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
