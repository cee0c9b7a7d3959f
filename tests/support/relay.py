"""A whole worker in this process, with a scripted DNS and sinks: what most integration tests stand on.

async with relay(tmp_path, zone=ZoneSettings(next_hop=...)) as running:
    await running.send("app@example.org", ["someone@example.com"], b"Subject: x\r\n\r\nbody\r\n")
    await running.until_empty()
    assert running.log.named("delivered")
"""

import asyncio
import random
import smtplib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.support.event_log import EventLog
from tests.support.stories import call_as_witness
from zonerelay.config import settings as options
from zonerelay.config.settings import ListenerSettings, RetrySettings, Settings, SpoolSettings, ZoneSettings
from zonerelay.control.client import ControlClient
from zonerelay.control.socket import control_socket_path
from zonerelay.model.clock import SystemClock
from zonerelay.operations.answers import Explanation, Frame, RelayStatus
from zonerelay.operations.requests import Explain, Request, Status
from zonerelay.process.setup import Identity
from zonerelay.routing.mta_sts import HTTPS_PORT
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.worker.build import ALONE, build
from zonerelay.worker.worker import Worker

HOSTNAME = "relay.test"
LOOPBACK = "127.0.0.1"
QUICK = RetrySettings(schedule=(0.05, 0.1), jitter=0.0, max_age=60.0, suspend_min=0.1, suspend_max=0.4)

Answer = TypeVar("Answer", bound=Frame)


class MemoryLog(EventLog):
    name = "log of the relay in this process"

    def __init__(self) -> None:
        super().__init__()
        call_as_witness(self)

    def testimony(self) -> str:
        return "\n".join(f"{name} {fields}" for name, fields in self.events)

    def emit(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        super().emit(level, event, {**fields, "level": level})


@dataclass(slots=True)
class Running:
    worker: Worker
    log: MemoryLog

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.worker.addresses()[0].rpartition(":")
        return host, int(port)

    async def send(self, sender: str, recipients: Sequence[str], message: bytes) -> None:
        """Submit with Python's smtplib; raises its exceptions."""

        def submit() -> None:
            with smtplib.SMTP(*self.address, timeout=20) as client:
                client.sendmail(sender, list(recipients), message)

        await asyncio.to_thread(submit)

    async def ask(self, request: Request, kind: type[Answer]) -> Answer:
        """On the operators' channel."""
        client = ControlClient(control_socket_path(self.worker.settings))
        return await asyncio.to_thread(client.ask, request, kind)

    async def rows(self, request: Request, kind: type[Answer]) -> list[Answer]:
        client = ControlClient(control_socket_path(self.worker.settings))
        return (await asyncio.to_thread(client.all, request, kind))[0]

    async def status(self) -> RelayStatus:
        return await self.ask(Status(), RelayStatus)

    async def explain(self, address: str = "b@example.com", **about: Any) -> Explanation:
        return await self.ask(Explain(address=address, **about), Explanation)

    def metrics(self) -> str:
        return self.worker.metrics.exposition().decode()

    def queued(self) -> int:
        return sum(counts.total for counts in self.worker.store.counts().values())

    async def until(self, condition: Callable[[], bool], *, what: str, timeout: float = 10.0) -> None:
        """Wait for something that happens soon; the log is part of the failure."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not condition():
            if loop.time() > deadline:
                raise AssertionError(f"{what}: not within {timeout} s\n{self.log.events}")
            await asyncio.sleep(0.005)

    async def until_empty(self, timeout: float = 10.0) -> None:
        await self.until(lambda: self.queued() == 0, what="empty queue", timeout=timeout)

    async def until_logged(self, event: str, count: int = 1, timeout: float = 10.0) -> list[dict[str, Any]]:
        await self.until(lambda: len(self.log.named(event)) >= count, what=event, timeout=timeout)
        return self.log.named(event)


def settings(
    directory: Path,
    *,
    zone: ZoneSettings | Sequence[ZoneSettings],
    route: Sequence[options.RouteSettings] = (),
    dns: str = "",
    listener: ListenerSettings | None = None,
    retry: RetrySettings = QUICK,
    spool: SpoolSettings | None = None,
    **more: Any,
) -> Settings:  # Any: other tables, as they are
    return Settings(
        hostname=HOSTNAME,
        shutdown_timeout=5.0,
        spool=spool or SpoolSettings(path=directory / "spool", min_free_space=0),
        listener=(listener or ListenerSettings(address=f"{LOOPBACK}:0"),),
        zone=(zone,) if isinstance(zone, ZoneSettings) else tuple(zone),
        route=tuple(route),
        retry=retry,
        dns=options.DnsSettings(servers=(dns,) if dns else ("127.0.0.1:1",), timeout=1.0),
        admin=options.AdminSettings(address=f"{LOOPBACK}:0", socket=directory / "control.sock"),
        **more,
    )


@asynccontextmanager
async def relay_with(
    chosen: Settings,
    *,
    policy_port: int = HTTPS_PORT,
    identity: Identity = ALONE,
    trouble_expected: bool = False,
) -> AsyncIterator[Running]:
    log = MemoryLog()
    worker = await build(
        chosen,
        hostname=HOSTNAME,
        log=log,
        redactor=Redactor(b"", enabled=False),
        clock=SystemClock(),
        randomness=random.Random(1),
        policy_port=policy_port,
        identity=identity,
    )
    try:
        yield Running(worker, log)
    finally:
        await worker.stop()
    faults = log.named("trouble")
    assert trouble_expected or not faults, faults
