"""Every operation of the catalogue: how it is reached, and what becomes of it when its client leaves, over
one worker and over two.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.control import Workers, control_socket, raise_trouble, sent
from zonerelay.control import socket as worker_socket
from zonerelay.control.runner import ResponseStream
from zonerelay.control.socket import WorkerSocket
from zonerelay.operations import answers
from zonerelay.operations.answers import EndFrame
from zonerelay.operations.catalogue import OPERATIONS, OperationCall, decode_call
from zonerelay.operations.operation import MergeRule, Operation, ResponseKind, fields_of
from zonerelay.operations.requests import Request
from zonerelay.supervisor.merge.fan_out import FanOut

GIVEN = {
    "message_id": "0" * 16,
    "about": {"everything": True},
    "everything": True,
    "address": "a@example.com",
    "pseudonym": "d-abc",
    "loss": "aaaa",
    "name": "shop",
    "act": "a1b2c3d4",
    "undoes": "a1b2c3d4",
}
BY_WORKERS = [each for each in OPERATIONS if each.path and each.merge.how is not MergeRule.ALONE]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.name)
def test_an_operation_is_described_whole(operation: Operation) -> None:
    assert 0 < len(operation.help) <= 60
    assert operation.help[0].isupper()
    assert not operation.help.endswith(".")
    assert all(0 < len(each.help) <= 60 for each in fields_of(operation.request))
    assert bool(operation.wrapped) or operation.shape is not ResponseKind.ROWS
    assert operation.reply is not None or operation.merge.how is MergeRule.ALONE
    assert not operation.completes or operation.scope == "operate"


def request_for(operation: Operation) -> Any:  # Any: the request that the operation names
    names = operation.request.__struct_fields__
    given = {name: value for name, value in GIVEN.items() if name in names}
    return msgspec.convert({**given, "operation": operation.name}, operation.request)


@pytest.mark.parametrize("operation", BY_WORKERS, ids=lambda each: each.name)
def test_a_request_survives_the_wire(operation: Operation) -> None:
    request = request_for(operation)
    line = answers.encode(OperationCall(request=request, caller="ann"))
    assert line.count(b"\n") == 1
    assert decode_call(line).request == request


def test_no_two_operations_are_reached_alike() -> None:
    assert len({each.name for each in OPERATIONS}) == len(OPERATIONS)
    reached = [(each.method, each.path) for each in OPERATIONS if each.path]
    assert len(set(reached)) == len(reached)


class Waiting:
    """A worker that is at work until `go` is set."""

    def __init__(self, go: asyncio.Event) -> None:
        self.go = go
        self.begun, self.finished, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(self, request: Request, answer: ResponseStream) -> EndFrame:
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self.finished.set()
        return EndFrame()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("operation", BY_WORKERS, ids=lambda each: each.name)
async def test_what_completes_goes_on_without_its_client(
    operation: Operation, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_socket, "HEARTBEAT", 0.02)
    go, path = asyncio.Event(), tmp_path / "control.sock"
    places = [tmp_path / f"{number}.sock" for number in range(workers)]
    waiting = [Waiting(go) for _ in places]
    request = request_for(operation)
    async with AsyncExitStack() as stack, asyncio.timeout(30):
        for place, each in zip(places, waiting, strict=True):
            server = WorkerSocket(place, each, on_error=raise_trouble)
            await server.start()
            stack.push_async_callback(server.close)
        handler = waiting[0] if workers == 1 else FanOut(Workers(dict(enumerate(places))))
        front = control_socket(path, handler, raise_trouble)
        await front.start()
        stack.push_async_callback(front.close)
        _, writer = await asyncio.open_unix_connection(str(path))
        writer.write(sent(request))
        await waiting[0].begun.wait()
        writer.close()
        if not operation.completes:
            await waiting[0].cancelled.wait()
            return
        await asyncio.sleep(0.1)  # for the relay to see that the client has gone
        go.set()
        await waiting[0].finished.wait()
        assert not any(each.cancelled.is_set() for each in waiting)
