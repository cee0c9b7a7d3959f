"""A real `zonerelay serve` as a child process on free loopback ports.

Owns the process, its configuration file, spool and log below one directory. Nothing is hidden: a
relay that does not come up or does not stop in time raises RelayFailed with the end of its log.
Killing it leaves the spool as it is, so that `restart()` continues with the same mail. The class
is synchronous; asynchronous tests call the waiting methods through `asyncio.to_thread`.
"""

import json
import os
import signal
import smtplib
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from tests.support.meters import Memory, cpu_of, read_memory, sizes
from tests.support.ports import LOOPBACK, free_ports, greets, wait_until
from tests.support.servers import STOP_TIMEOUT, ServerProcess
from tests.support.stories import call_as_witness
from tests.support.toml import Table, toml_document

PROGRAM = Path(sys.executable).with_name("zonerelay")
START_TIMEOUT = 60.0
LOG_TAIL = 4000

# A log line is whatever JSON object the relay wrote.
Event = dict[str, Any]


class RelayFailed(AssertionError):
    """The relay did not start, or did not stop, as asked; the text ends with its log."""


class RelayProcess(ServerProcess):
    """One relay. `tables` go into the TOML over these defaults: a private spool, one listener, one zone.

    `launcher` is put before the command line (a tracer, a control group); with `program` another
    executable than the environment's `zonerelay` is run. `host` is where it listens.
    """

    def __init__(
        self,
        directory: Path,
        *,
        next_hop: str = "",
        top: Table | None = None,
        spool: Table | None = None,
        listener: Table | None = None,
        more_listeners: Sequence[Table] = (),
        zone: Table | None = None,
        tables: Mapping[str, Table | Sequence[Table]] | None = None,
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        program: Path = PROGRAM,
        host: str = LOOPBACK,
    ) -> None:
        self.directory = directory
        self.host = host
        self.smtp_port, self.admin_port = free_ports(2)
        self.config = directory / "zonerelay.toml"
        self.log = directory / "zonerelay.log"
        self.spool = directory / "spool"
        self._command = [*launcher, str(program), "serve", "--config", str(self.config)]
        self._environment = {**os.environ, **(environment or {})}
        call_as_witness(self)
        directory.mkdir(parents=True, exist_ok=True)
        hop: Table = {"next_hop": next_hop} if next_hop else {}
        self.config.write_text(
            toml_document(
                {"hostname": "relay.test", **(top or {})},
                {
                    "spool": {
                        "backend": "leveldb",
                        "path": str(self.spool),
                        "min_free_space": 0,  # or every test would leave its ballast behind
                        **(spool or {}),
                    },
                    "listener": [
                        {"address": f"{host}:{self.smtp_port}", **(listener or {})},
                        *more_listeners,
                    ],
                    "zone": [{"name": "default", "tls": "none", **hop, **(zone or {})}],
                    "admin": {"address": f"{host}:{self.admin_port}"},
                    **(tables or {}),
                },
            )
        )

    def start(self, *, timeout: float = START_TIMEOUT, statuses: Sequence[int] = (200, 404)) -> Self:
        """Returns when the relay greets on its port and, if it serves HTTP, says that it is ready
        (or answers /readyz with another of the `statuses`).
        """
        self.spawn(self._command, self.log, environment=self._environment)
        if not wait_until(lambda: not self.running or self._ready(statuses), timeout=timeout):
            self.kill()
            raise RelayFailed(f"not ready after {timeout} s\n{self.log_tail()}")
        if not self.running:
            raise RelayFailed(f"exited with {self.returncode} while starting\n{self.log_tail()}")
        return self

    def _ready(self, statuses: Sequence[int]) -> bool:
        return greets(self.smtp_port, host=self.host) and self.http("/readyz")[0] in statuses

    @property
    def returncode(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def terminate(self, *, timeout: float = STOP_TIMEOUT) -> int:
        """SIGTERM; the exit code once it has drained and gone."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout=timeout)

    def wait(self, *, timeout: float = STOP_TIMEOUT) -> int:
        if self.process is None:
            raise RelayFailed("not started")
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise RelayFailed(f"still running after {timeout} s\n{self.log_tail()}") from error

    def restart(self, *, timeout: float = START_TIMEOUT) -> Self:
        """Starts again on the same spool and ports, killing it first if it still runs."""
        self.kill()
        return self.start(timeout=timeout)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def name(self) -> str:
        return f"log of the relay in {self.directory}"

    def testimony(self) -> str:
        return self.log_text()

    def log_tail(self) -> str:
        return self.log_text()[-LOG_TAIL:]

    def events(self, name: str = "") -> list[Event]:
        """Log lines that are JSON objects, in order; only those with this `event` when named."""
        found = (parse_event(line) for line in self.log_text().splitlines())
        return [event for event in found if event and (not name or event.get("event") == name)]

    def http(self, path: str, *, timeout: float = 10.0) -> tuple[int, str]:
        """Status and body of a GET on the admin port; 0 when nobody answers."""
        try:
            with urllib.request.urlopen(
                f"http://{self.host}:{self.admin_port}{path}", timeout=timeout
            ) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(errors="replace")
        except OSError:
            return 0, ""

    def send(
        self,
        *recipients: str,
        message: bytes = b"From: app@example.org\r\nSubject: hello\r\n\r\nhello\r\n",
        sender: str = "app@example.org",
        log_in: tuple[str, str] | None = None,
        mail: Sequence[str] = (),
        wishes: Sequence[str] = (),
    ) -> None:
        """Submit a message for all of them; `mail` and `wishes` are parameters of MAIL and RCPT."""
        with smtplib.SMTP(self.host, self.smtp_port, timeout=30) as client:
            if log_in is not None:
                client.login(*log_in)
            client.sendmail(sender, recipients, message, mail, wishes)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and sorted labels: `name{a="b"}` or just `name`."""
        return parse_metrics(self.http("/metrics")[1])

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name which carry all these labels; 0 when there are none."""
        total = 0.0
        for family in text_string_to_metric_families(self.http("/metrics")[1]):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
        return total

    def wait_for(self, condition: Callable[[], bool], *, what: str, timeout: float = 30.0) -> None:
        if not wait_until(condition, timeout=timeout, interval=0.05):
            raise RelayFailed(f"{what}: not within {timeout} s\n{self.log_tail()}")

    def wait_until_empty(self, *, timeout: float = 60.0) -> None:
        """Until the relay says that no delivery is queued in any state; silence says nothing."""

        def empty() -> bool:
            found = self.metrics().items()
            counts = [count for name, count in found if name.startswith("zonerelay_queue_")]
            return len(counts) > 1 and not any(counts)  # also none that is still counting

        self.wait_for(empty, what="queue empty", timeout=timeout)

    def cpu_seconds(self) -> float:
        """User and system time of the process, in ticks of 10 ms."""
        return cpu_of([self.pid])

    def memory(self) -> Memory:
        return read_memory([self.pid])

    def peak_rss(self) -> int:
        """The kernel's own high-water mark in octets; `reset_peak` starts it anew."""
        return sizes(self.pid)["VmHWM"]

    def reset_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


def parse_event(line: str) -> Event | None:
    """A log line as an object; None for anything else (a traceback, a line cut short by a kill)."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def parse_metrics(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
