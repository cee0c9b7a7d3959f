"""Lists of several workers made one: nobody's queue is in the supervisor's memory."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from tests.support.control import Workers, control_socket, raise_trouble, sent
from tests.support.fake_relay import detail_of, status_of
from zonerelay.config.settings import ListenerSettings
from zonerelay.control import socket as worker_socket
from zonerelay.control.runner import Handler, ResponseStream
from zonerelay.control.socket import CallSocket, frames
from zonerelay.operations import answers, requests
from zonerelay.operations import answers as messages
from zonerelay.operations.answers import (
    BodyPiece,
    ChangeResult,
    Count,
    DeliveryRow,
    EndFrame,
    LossDismissal,
    StreamGap,
)
from zonerelay.operations.catalogue import OPERATIONS, OperationCall, decode_call
from zonerelay.operations.errors import BusyError, ControlError, NotFoundError, UnavailableError
from zonerelay.operations.operation import MergeRule, Operation, ResponseKind, fields_of
from zonerelay.supervisor.merge import fan_out
from zonerelay.supervisor.merge.fan_out import FanOut
from zonerelay.telemetry.events.records import MailEvent

F = TypeVar("F")

ROWS = 2000
LARGE = "x" * 4000
READ_AHEAD = 500
"""Rows: what is in the buffers of four sockets and their streams."""


async def rows(path: Path, request: requests.Request, answer: type[F], caller: str = "") -> list[F]:
    call = OperationCall(request=request, caller=caller)
    return [each async for each in frames(path, call) if isinstance(each, answer)]


async def ask(path: Path, request: requests.Request, answer: type[F]) -> F:
    (found,) = await rows(path, request, answer)
    return found


class Spool:
    """A worker with much in its queue. `sent` counts by the listing it was for."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent: list[int] = []

    async def handle(self, request: requests.Request, answer: ResponseStream) -> EndFrame:
        listing = len(self.sent)
        self.sent.append(0)
        for number in range(ROWS):
            # The last one is longer than what is read at a time, as a message with many recipients is.
            reply = LARGE * (100 if number == ROWS - 1 else 1)
            await answer.send(row(f"{number:014x}{self.number:02x}", reply))
            self.sent[listing] += 1
        return EndFrame(count=ROWS)


def row(message_id: str, reply: str) -> DeliveryRow:
    return DeliveryRow(
        message_id=message_id,
        zone="default",
        sender="a@example.org",
        recipient="b@example.com",
        domain="example.com",
        state="deferred",
        created=1.0,
        attempts=1,
        next_attempt=2.0,
        reply=reply,
    )


class Slow:
    """It looks for long before it finds something: until all others look as well."""

    def __init__(self, together: asyncio.Barrier) -> None:
        self._together = together

    async def handle(self, request: requests.Request, answer: ResponseStream) -> EndFrame:
        await self._together.wait()
        if isinstance(request, requests.QueueCount):
            await answer.send(Count(matched=1))
        else:
            await answer.send(row("0000000000000000", ""))
        return EndFrame(count=1)


@asynccontextmanager
async def relay_of(directory: Path, spools: Sequence[Handler]) -> AsyncIterator[Path]:
    """Where a supervisor of these workers answers."""
    places = {number: directory / f"{number}.sock" for number in range(len(spools))}
    servers = [CallSocket(places[number], each, on_error=raise_trouble) for number, each in enumerate(spools)]
    path = directory / "control.sock"
    servers.append(CallSocket(path, FanOut(Workers(places, status_of())), on_error=raise_trouble))
    for server in servers:
        await server.start()
    try:
        yield path
    finally:
        for server in reversed(servers):
            await server.close()


def test_a_message_for_as_many_as_may_be_is_one_frame() -> None:
    """`queue show` failed from 27,000 recipients on."""
    fields = {each.name: each.metadata["option"] for each in dataclasses.fields(ListenerSettings)}
    assert (
        fields["max_recipients"].most * len(answers.encode(row("0" * 16, "451 4.4.1 " + "x" * 200)))
        < answers.MAX_FRAME
    )


async def test_a_list_that_nobody_reads_on_stays_with_the_workers(tmp_path: Path) -> None:
    spools = [Spool(number) for number in range(2)]
    async with relay_of(tmp_path, spools) as path:
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(messages.encode(OperationCall(request=requests.QueueList(limit=0))))
        await reader.readline()
        listed = await rows(path, requests.QueueList(limit=0), DeliveryRow)
        writer.close()
    assert [len(each.reply) for each in listed[-3:]] == [len(LARGE), 100 * len(LARGE), 100 * len(LARGE)]
    assert [each.message_id for each in listed] == sorted(
        f"{number:014x}{spool:02x}" for number in range(ROWS) for spool in range(2)
    )
    for spool in spools:
        first, second = spool.sent
        assert second == ROWS
        assert first < READ_AHEAD


async def test_workers_look_through_their_queues_at_the_same_time(tmp_path: Path) -> None:
    together = asyncio.Barrier(3)
    async with relay_of(tmp_path, [Slow(together) for _ in range(3)]) as path, asyncio.timeout(20):
        listed = await rows(path, requests.QueueList(limit=0), DeliveryRow)
        assert len(listed) == 3
        assert (await ask(path, requests.QueueCount(), Count)).matched == 3


class Chatting:
    """A worker that always has something to tell. It is restarted so many times."""

    def __init__(self, restarts: int) -> None:
        self._left = restarts

    async def handle(self, request: requests.Request, answer: ResponseStream) -> EndFrame:
        self._left -= 1
        if self._left >= 0:
            return EndFrame()
        while True:
            await answer.send(MailEvent(at=1.0, level="info", event="accepted", fields={}))
            await asyncio.sleep(0.005)


async def test_a_busy_relay_tells_the_events_of_a_worker_that_was_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked again only when the others had nothing to tell for a second."""
    monkeypatch.setattr(fan_out, "LOOK_AGAIN", 0.05)
    call = OperationCall(request=requests.Tail())
    async with (
        relay_of(tmp_path, [Chatting(0), Chatting(2)]) as path,
        aclosing(frames(path, call)) as stream,
        asyncio.timeout(10),
    ):
        while getattr(await anext(stream), "worker", None) != 1:
            pass


class Holder:
    """A worker that has one message, which it hands out to one who is named."""

    def __init__(self, message_id: str) -> None:
        self.message_id = message_id
        self.readers: list[str] = []

    async def handle(self, request: requests.Request, answer: ResponseStream) -> EndFrame:
        assert isinstance(request, requests.QueueCat)
        self.readers.append(answer.caller)
        if request.message_id != self.message_id:
            raise NotFoundError(f"no message {request.message_id}")
        for piece in (b"x" * 65536, b"y"):
            await answer.send(BodyPiece(octets=piece))
        return EndFrame()


async def test_a_body_comes_from_the_worker_that_has_it_and_knows_who_asks(tmp_path: Path) -> None:
    """The id names the first worker: the spool has changed its worker since."""
    workers = [Holder("0" * 16), Holder("a" * 14 + "00")]
    async with relay_of(tmp_path, workers) as path, asyncio.timeout(20):
        found = await rows(path, requests.QueueCat(message_id="a" * 14 + "00"), BodyPiece, caller="ann")
    assert b"".join(each.octets for each in found) == b"x" * 65536 + b"y"
    assert [each.readers for each in workers] == [["ann"], ["ann"]]


class Refusing:
    """A worker that answers every request with an error."""

    def __init__(self, error: ControlError) -> None:
        self.error = error

    async def handle(self, request: requests.Request, answer: ResponseStream) -> EndFrame:
        raise self.error


SICK = UnavailableError("the spool: it cannot be read")


async def test_an_error_of_one_worker_does_not_hide_what_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_out, "LOOK_AGAIN", 0.01)
    cat = requests.QueueCat(message_id="0" * 16)
    sick = Refusing(SICK)
    async with relay_of(tmp_path, [sick, Holder("0" * 16)]) as path, asyncio.timeout(20):
        assert len(await rows(path, cat, BodyPiece)) == 2
        with pytest.raises(UnavailableError, match="it cannot be read"):
            await rows(path, requests.QueueCat(message_id="1" * 16), BodyPiece)
    async with relay_of(tmp_path, [sick, Slow(asyncio.Barrier(1))]) as path, asyncio.timeout(20):
        call = OperationCall(request=requests.QueueList(limit=0))
        listed = [each async for each in frames(path, call)]
        assert listed[-1] == EndFrame(count=1, missing=("worker 0: the spool: it cannot be read",))
    async with relay_of(tmp_path, [sick, Chatting(0)]) as path, asyncio.timeout(20):
        async with aclosing(frames(path, OperationCall(request=requests.Tail()))) as stream:
            told = [await anext(stream) for _ in range(20)]
        assert sum(isinstance(each, StreamGap) for each in told) == 1
    async with relay_of(tmp_path, [sick, Refusing(BusyError("too many"))]) as path, asyncio.timeout(20):
        with pytest.raises(ControlError):
            await rows(path, requests.Tail(), MailEvent)


class Lossy:
    """A worker whose spool tells of one loss."""

    def __init__(self, loss: str) -> None:
        self.losses = {loss}

    async def handle(self, request: requests.Request, answer: ResponseStream) -> EndFrame:
        assert isinstance(request, requests.SpoolAcknowledge)
        if request.loss not in self.losses:
            raise NotFoundError(f"no loss {request.loss}")
        self.losses.remove(request.loss)
        await answer.send(LossDismissal(loss=request.loss))
        return EndFrame()


class Whole:
    """It has the whole message."""

    async def handle(self, request: requests.Request, answer: ResponseStream) -> EndFrame:
        await answer.send(messages.MessageBody(message_id="0" * 16, sender="", size=5))
        await answer.send(BodyPiece(octets=b"whole"))
        return EndFrame()


async def test_a_body_of_which_a_worker_has_sent_a_part_comes_from_no_other(tmp_path: Path) -> None:
    """Workers of a shared queue have the same mail: its beginning would come twice."""

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answers.encode(messages.MessageBody(message_id="0" * 16, sender="", size=5)))
        writer.write(answers.encode(BodyPiece(octets=b"who")))
        writer.close()

    places = {number: tmp_path / f"{number}.sock" for number in range(2)}
    server = await asyncio.start_unix_server(die, places[0])
    path, found = tmp_path / "relay.sock", list[bytes]()
    others = (
        CallSocket(places[1], Whole(), on_error=raise_trouble),
        CallSocket(path, FanOut(Workers(places, status_of())), on_error=raise_trouble),
    )
    for each in others:
        await each.start()

    async def read() -> None:
        async for frame in frames(path, OperationCall(request=requests.QueueCat(message_id="0" * 16))):
            found.extend([frame.octets] if isinstance(frame, BodyPiece) else [])

    with pytest.raises(ControlError, match="worker 0"):
        await read()
    assert found == [b"who"]
    for each in others:
        await each.close()
    server.close()


async def test_a_loss_is_acknowledged_by_the_worker_that_has_it(tmp_path: Path) -> None:
    workers = [Lossy("aaaa"), Lossy("bbbb")]
    async with relay_of(tmp_path, workers) as path, asyncio.timeout(20):
        wanted = requests.SpoolAcknowledge(loss="bbbb")
        assert (await ask(path, wanted, LossDismissal)).loss == "bbbb"
        with pytest.raises(NotFoundError, match="no loss bbbb"):
            await ask(path, wanted, LossDismissal)
    assert [each.losses for each in workers] == [{"aaaa"}, set()]


class Changing:
    """A worker that makes or undoes a change, or refuses to."""

    def __init__(self, outcome: int | ControlError) -> None:
        self.outcome = outcome

    async def handle(self, request: requests.Request, answer: ResponseStream) -> EndFrame:
        if isinstance(self.outcome, ControlError):
            raise self.outcome
        done = self.outcome
        undoes = request.undoes if isinstance(request, requests.Undo) else ""
        result = ChangeResult(action="do", matched=done, changed=done, busy=0, act="b2", undoes=undoes)
        await answer.send(result)
        return EndFrame()


REFUSED, UNKNOWN = ControlError("it is still running"), NotFoundError("no change a1")


@pytest.mark.parametrize(
    ("outcomes", "changed", "missing"),
    [
        ([2, 3], 5, ()),
        ([2, UNKNOWN], 2, ()),
        ([REFUSED, 3], 3, ("worker 0: it is still running",)),
        ([UNKNOWN, REFUSED], REFUSED, ()),
        ([UNKNOWN, UNKNOWN], UNKNOWN, ()),
    ],
    ids=["all", "one did not run then", "one refuses", "none can", "none has it"],
)
@pytest.mark.parametrize(
    "request_", [requests.Undo(undoes="a1"), requests.Hold(filter=requests.Filter(domain="a.example"))]
)
async def test_a_change_is_made_and_undone_by_each_worker_that_can(
    tmp_path: Path,
    request_: requests.Request,
    outcomes: list[int | ControlError],
    changed: int | ControlError,
    missing: tuple[str, ...],
) -> None:
    async with relay_of(tmp_path, list(map(Changing, outcomes))) as path, asyncio.timeout(20):
        if isinstance(changed, ControlError):
            with pytest.raises(type(changed), match=str(changed)):
                await ask(path, request_, ChangeResult)
            return
        *_, result, end = [each async for each in frames(path, OperationCall(request=request_))]
        assert isinstance(result, ChangeResult)
        assert isinstance(end, EndFrame)
        assert (result.changed, end.missing) == (changed, missing)


class Paced:
    """A worker whose mail waits for a rate of one transaction a second, which all workers share."""

    def __init__(self, number: int, ready: int, next_turn: float | None) -> None:
        self.destination = answers.DestinationStatus(
            zone="default",
            destination=f"{number}.example",
            hosts="mx.example.com:25",
            active=0,
            waiting=20,
            ready=ready,
            next_turn=next_turn,
            turns_seconds=None if next_turn is None else float(ready),
            per_minute=30,
            max_rate="60/1m",
        )
        waiting = msgspec.structs.replace(row(f"{'a' * 14}{number:02x}", ""), state="ready", next_attempt=0.0)
        self.row = waiting if next_turn is None else waiting.waits_for(self.destination)

    async def handle(self, request: requests.Request, answer: ResponseStream) -> EndFrame:
        match request:
            case requests.Status():
                await answer.send(status_of(self.destination))
            case requests.QueueList():
                await answer.send(self.row)
            case requests.QueueCount():
                await answer.send(Count(matched=1, sample=(self.row,)))
            case requests.QueueShow():
                await answer.send(detail_of(self.row))
        return EndFrame()


async def test_mail_that_waits_for_a_rate_waits_for_that_of_all_workers(tmp_path: Path) -> None:
    workers = [Paced(0, 1000, 107.0), Paced(1, 800, 105.0), Paced(2, 100, None)]
    expected = (105.0, 1900, 1900.0)

    def turn(of: DeliveryRow) -> tuple[float | None, int, float]:
        return of.next_turn, of.waiting, of.turns_seconds

    async with relay_of(tmp_path, workers) as path, asyncio.timeout(20):
        (whole,) = (await ask(path, requests.Status(), answers.RelayStatus)).destinations
        assert (whole.next_turn, whole.ready, whole.turns_seconds, whole.per_minute) == (*expected, 90)
        shown = await ask(path, requests.QueueShow(message_id="a" * 14 + "01"), answers.MessageDetail)
        assert turn(shown.deliveries[0]) == expected
        counted = await ask(path, requests.QueueCount(sample=3), Count)
        assert [turn(each) for each in counted.sample] == [expected, expected, (None, 0, 0.0)]
        listed = await rows(path, requests.QueueList(), DeliveryRow)
        assert [turn(each) for each in listed] == [expected, expected, (None, 0, 0.0)]


# ---- every operation of the catalogue, over one worker and over two ------------------------------


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

    async def handle(self, request: requests.Request, answer: ResponseStream) -> EndFrame:
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
            server = CallSocket(place, each, on_error=raise_trouble)
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
