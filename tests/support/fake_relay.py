"""A relay as the command line sees it: a real control server over a handful of made-up deliveries."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.support.control import control_socket, raise_trouble
from zonerelay.control.client import ControlClient
from zonerelay.control.runner import ResponseStream
from zonerelay.operations import answers
from zonerelay.operations.answers import DeliveryRow, DestinationStatus, EndFrame, MessageDetail, RelayStatus
from zonerelay.operations.errors import NotFoundError
from zonerelay.operations.requests import (
    Explain,
    Filter,
    Ping,
    QueueChange,
    QueueCount,
    QueueList,
    QueueShow,
    QueueSummary,
    QueueTrace,
    Request,
    Resolve,
    Resume,
    Status,
    Suspend,
)
from zonerelay.telemetry.events.records import TraceStep


def delivery(number: int, **changes: object) -> DeliveryRow:
    row = DeliveryRow(
        message_id=f"{number:016x}",
        zone="default",
        sender="app@example.org",
        recipient=f"user{number}@example.com",
        domain="example.com",
        state="ready",
        created=1_700_000_000.0,
        attempts=0,
        next_attempt=0.0,
    )
    return replace(row, **changes)


@dataclass
class FakeRelay:
    """Serves `rows`; records the changes it was asked for."""

    directory: Path
    rows: list[DeliveryRow] = field(default_factory=list)
    busy: int = 0
    requests: list[Request] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """A suspension or its end has begun, and waits for `go_on`."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def config(self) -> Path:
        return self.directory / "zonerelay.toml"

    async def start(self) -> None:
        socket = self.directory / "control.sock"
        self.config.write_text(
            f'[spool]\npath = "{self.directory}/spool"\n[admin]\naddress = ""\nsocket = "{socket}"\n'
        )
        self.server = control_socket(socket, self, raise_trouble)
        self.client = ControlClient(socket)
        await self.server.start()

    @property
    def changes(self) -> list[QueueChange]:
        return [request for request in self.requests if isinstance(request, QueueChange)]

    def _matching(self, wanted: Filter, ids: Sequence[str] = ()) -> list[DeliveryRow]:
        return [
            row
            for row in self.rows
            if wanted.message_id in (None, row.message_id)
            and (not ids or row.message_id in ids)
            and wanted.domain in (None, row.domain)
            and wanted.state in (None, row.state)
        ]

    async def handle(self, request: Request, answer: ResponseStream) -> EndFrame:
        self.requests.append(request)
        match request:
            case Suspend() | Resume():
                self.asked.set()
                await self.go_on.wait()
                self.done.set()
            case Ping():
                await answer.send(answers.Pong(software="1.0", pid=7))
            case QueueList():
                found = self._matching(request.filter)
                shown = found[: request.limit] if request.limit else found
                for row in shown:
                    await answer.send(row)
                return EndFrame(count=len(shown), more=len(shown) < len(found))
            case QueueCount():
                found = self._matching(request.filter, request.message_ids)
                await answer.send(answers.Count(matched=len(found), sample=tuple(found[: request.sample])))
            case QueueChange():
                found = self._matching(request.filter, request.message_ids)
                busy = min(self.busy, len(found))
                await answer.send(
                    answers.ChangeResult(
                        action=request.action, matched=len(found), changed=len(found) - busy, busy=busy
                    )
                )
            case QueueShow():
                await answer.send(self._detail(request.message_id))
            case QueueTrace():
                await answer.send(TraceStep(at=1_700_000_000.0, event="accepted", text="from 192.0.2.1"))
            case QueueSummary():
                rows = tuple(
                    answers.SummaryRow(key=f"{n}{'x' * 60}.example", total=10**n, ages=(0,) * 9 + (10**n,))
                    for n in range(6, 0, -1)
                )
                other = answers.SummaryRow(key="other", total=5, ages=(5,) + (0,) * 9)
                minutes = (5, 10, 20, 40, 80, 160, 320, 640, 1280)
                await answer.send(
                    answers.Summary(by=request.by, minutes=minutes, rows=rows, other=other, every=50)
                )
            case Status():
                await answer.send(_status())
            case Explain():
                await answer.send(_explanation(request))
            case Resolve():
                if request.pseudonym.startswith("u-a"):
                    await answer.send(
                        answers.ResolvedAddress(
                            address="alice@example.com", role="recipient", message_id=f"{1:016x}"
                        )
                    )
        return EndFrame()

    def _detail(self, message_id: str) -> MessageDetail:
        rows = tuple(row for row in self.rows if row.message_id == message_id)
        if not rows:
            raise NotFoundError(f"message {message_id} is not in the queue")
        return detail_of(*rows, sender="", recipients_accepted=2, headers=(("Subject", "hello \x1b[31mred"),))


def detail_of(*rows: DeliveryRow, **fields: Any) -> MessageDetail:  # Any: fields by name
    """The details of a message with these deliveries."""
    given: dict[str, Any] = {
        "message_id": rows[0].message_id,
        "created": 1_700_000_000.0,
        "sender": "a@example.org",
        "size": 4096,
        "chunks": 1,
        "body": "8BITMIME",
        "smtputf8": False,
        "envid": "",
        "client": "192.0.2.1",
        "helo": "app.example.org",
        "protocol": "ESMTP",
        "listener": "127.0.0.1:2525",
        "user": "",
        "tls": "",
        "recipients_accepted": len(rows),
        "headers": (),
    }
    return MessageDetail(**(given | fields), deliveries=rows)


def status_of(*destinations: DestinationStatus, **fields: Any) -> RelayStatus:  # Any: fields by name
    """The status of a relay with these destinations."""
    given: dict[str, Any] = {
        "software": "0.2.0",
        "pid": 1,
        "hostname": "relay.example.org",
        "backend": "leveldb",
        "uptime": 60.0,
        "state": "running",
        "listeners": ("127.0.0.1:2525",),
        "inbound_connections": 0,
        "zones": (),
        "destinations_total": len(destinations),
    }
    return RelayStatus(**(given | fields), destinations=destinations)


def _status() -> RelayStatus:
    return status_of(
        DestinationStatus(
            zone="default",
            destination="example.com",
            hosts="mx.example.com:25",
            active=0,
            waiting=0,
            suspended_until=4_000_000_000.0,
            reply="421 4.4.1 no answer",
        ),
        DestinationStatus(
            zone="default",
            destination="slow.example",
            hosts="mx.slow.example:25",
            active=0,
            waiting=3,
            next_turn=4_000_000_000.0,
            ready=3,
            deferred=21_000,
            oldest_seconds=7300.0,
        ),
        DestinationStatus(
            zone="bulk", destination="idle.example", hosts="mx.idle.example:25", active=0, waiting=0
        ),
        software="1.0",
        pid=7,
        uptime=3700.0,
        inbound_connections=1,
        zones=(
            answers.ZoneStatus(
                name="default", ready=12_345, active=2, deferred=3, held=1, oldest_seconds=90.0
            ),
        ),
        destinations_total=4,
        problems=("the disk is full",),
        every=50,
        free_space=3 * 1024**3,
        name_servers="127.0.0.53:53: reachable",
        taken_up=1_700_000_000.0,
        refused=1_700_000_100.0,
        source_penalties=tuple(
            answers.SourcePenalty(
                source=f"out{number}",
                destination="mx.example.com:25",
                until=4_000_000_000.0,
                reply="550 5.7.25 no PTR",
                ipv6_only=number == 1,
            )
            for number in range(1, 25)
        ),
    )


def _explanation(request: Explain) -> answers.Explanation:
    return answers.Explanation(
        address=request.address,
        sender=request.sender,
        domain="example.com",
        zone="default",
        rule=1,
        reason="recipient_domain matches example.com",
        next_hop="",
        route="example.com",
        hosts=(
            answers.HostPlan(
                name="mx.example.com",
                port=25,
                preference=10,
                addresses=(answers.AddressPlan(address="192.0.2.9", source="192.0.2.1"),),
            ),
        ),
        unroutable="",
        verdict="",
        tls="opportunistic",
        ehlo_name="relay.example.org",
        limits={"max_connections": 20},
        routes=(
            *(
                answers.RouteCheck(rule=n, zone="bulk", matches=False, unmatched=("user", "size"))
                for n in range(1, 31)
            ),
            answers.RouteCheck(rule=31, zone="default", matches=True),
        ),
        sources=(
            answers.SourcePlan(
                name="out1",
                addresses=("192.0.2.1", "2001:db8::1"),
                ehlo_name="out1.example.org",
                share=0.75,
                chosen=bool(request.sender) or None,
                refused_until=4_000_000_000.0,
                refused_reply="550 5.7.25 no PTR",
                refused_ipv6_only=True,
            ),
            answers.SourcePlan(
                name="out2",
                addresses=("192.0.2.2",),
                ehlo_name="out2.example.org",
                share=0.25,
                chosen=False if request.sender else None,
                absent=("192.0.2.2",),
            ),
        ),
    )
