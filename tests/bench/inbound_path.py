"""What taking a message costs without sockets, store and delivery.

`python tests/bench/inbound_path.py [TREE]`: one session per message, in this process: connection, HELO, MAIL,
RCPT, DATA, 4 KiB, QUIT. TREE is another source tree of zonerelay, this one by default. For each step:

- microseconds: the third decile of many, so that what interrupts does not count. Believe ratios of runs
  side by side.
- opcodes of Python: exact, the same in every run on every machine. This is what to compare versions by.

And the objects per session that only the garbage collector frees: above zero a session is part of a
reference cycle, and costs the collector's time and fresh memory for the next.

Then a whole worker, with a queue in memory and a server that takes everything: opcodes of a message from its
client to the next hop, by package, in an SMTP session of its own and by the call `submit` that HTTP makes.
"""

import asyncio
import gc
import importlib
import importlib.util
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import uvloop

TIMED = 6000
COUNTED = 200
WARM = 20
SETTLED = 0.06
"""Until outcomes are written."""
TURNS = 4  # of the loop, until the message is stored
HERE = Path(__file__).resolve().parents[2]
BODY = (
    b"Subject: x\r\nFrom: a@example.org\r\nTo: b@example.com\r\n\r\n" + (b"x" * 70 + b"\r\n") * 56 + b".\r\n"
)
COMMANDS = (
    ("HELO", b"HELO client.example.org\r\n"),
    ("MAIL", b"MAIL FROM:<a@example.org>\r\n"),
    ("RCPT", b"RCPT TO:<b@example.com>\r\n"),
    ("DATA", b"DATA\r\n"),
    ("body", BODY),
)

# Any: two versions of zonerelay are measured, and their types are not the same.
Step = tuple[str, Callable[[], Any]]


class Transport:
    """Takes everything."""

    def __init__(self) -> None:
        self._closed = False

    def write(self, data: bytes) -> None:
        pass

    def get_extra_info(self, name: str) -> object:
        return ("127.0.0.1", 4242)

    def close(self) -> None:
        self._closed = True

    def is_closing(self) -> bool:
        return self._closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Writer:
    def __init__(self, envelope: Any) -> None:
        self._envelope = envelope
        self._size = 0

    async def __aenter__(self) -> "Writer":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def write(self, chunk: bytes) -> None:
        self._size += len(chunk)

    async def commit(self, deliveries: object, **told: Any) -> Any:
        from zonerelay.model.envelope import Message

        told.pop("once", None)
        told.pop("beside", None)
        return Message(envelope=self._envelope, size=self._size, chunks=1, **told)


class Store:
    """Forgets at once."""

    def unhealthy(self) -> None:
        return None

    def begin(self, envelope: Any) -> Writer:
        return Writer(envelope)


class Log:
    def emit(self, *_: object) -> None:
        pass


def make_listener() -> Any:
    from zonerelay.config.settings import ListenerSettings
    from zonerelay.inbound.listen.listener import Listener
    from zonerelay.inbound.state.context import ListenerContext
    from zonerelay.model.clock import SystemClock
    from zonerelay.model.envelope import MessageIdSource
    from zonerelay.routing.zones.zones import ZoneChoice
    from zonerelay.telemetry.events.events import Events
    from zonerelay.telemetry.logs.redact import Redactor
    from zonerelay.telemetry.metrics.metrics import Metrics

    clock = SystemClock()
    store: Any = Store()
    context = ListenerContext(
        settings=ListenerSettings(address="127.0.0.1:0"),
        hostname="relay.example.org",
        store=store,
        ids=MessageIdSource(clock),
        choose_zone=lambda *_, **__: lambda _: ZoneChoice("default", ""),
        events=Events(Log(), Metrics(), Redactor(bytes(32), enabled=False), clock),
        clock=clock,
    )
    return Listener(context)


class Path4KiB:
    """The steps of a session, one after the other."""

    def __init__(self) -> None:
        self._listener = make_listener()
        self._loop = asyncio.get_running_loop()

    async def run(self, around: Callable[[str, Callable[[], Any]], None]) -> None:
        """`around` calls each step, by its name."""
        from zonerelay.inbound.session.session import Session

        made: list[Any] = []
        listener = self._listener
        around("init", lambda: made.append(Session(listener.context, listener._admission, self._loop)))
        (session,) = made
        transport = Transport()
        around("connect", lambda: session.connection_made(transport))
        for name, octets in COMMANDS:
            around(name, lambda octets=octets: session.data_received(octets))  # type: ignore[misc]
        await self._store(around)
        around("QUIT", lambda: session.data_received(b"QUIT\r\n"))
        around("lost", lambda: session.connection_lost(None))
        made.clear()

    async def _store(self, around: Callable[[str, Callable[[], Any]], None]) -> None:
        """The task that the body has begun runs in turns of the loop, which cannot be called."""
        around("store", lambda: None)
        for _ in range(TURNS):
            await asyncio.sleep(0)


class Times:
    """Seconds by step. The store's are those until the next step begins."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}
        self._store_at = 0.0

    def around(self, name: str, step: Callable[[], Any]) -> None:
        began = time.perf_counter()
        if self._store_at:
            self.found.setdefault("store", []).append(began - self._store_at)
            self._store_at = 0.0
        if name == "store":
            self._store_at = time.perf_counter()
            return
        step()
        self.found.setdefault(name, []).append(time.perf_counter() - began)

    def decile(self, name: str) -> float:
        return statistics.quantiles(self.found[name], n=10)[2] * 1e6


class Opcodes:
    """Instructions by step, in zonerelay's own code and what it calls."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._step = ""

    def around(self, name: str, step: Callable[[], Any]) -> None:
        self._step = name
        if name != "store":
            step()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename in (__file__, asyncio.tasks.__file__):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.found[self._step] += event == "opcode"
        return self.trace


async def garbage(path: Path4KiB) -> float:
    """Objects per session that only the collector frees."""
    gc.collect()
    gc.disable()
    for _ in range(COUNTED):
        await path.run(lambda _, step: step())
    await asyncio.sleep(0)
    found = gc.collect()
    gc.enable()
    return found / COUNTED


async def count(path: Path4KiB) -> Counter[str]:
    opcodes = Opcodes()
    # A trace function is taken up by frames that begin: this one has.
    sys.settrace(opcodes.trace)
    try:
        for _ in range(COUNTED):
            await path.run(opcodes.around)
    finally:
        sys.settrace(None)
    return opcodes.found


class Way:
    """Instructions in zonerelay's own code, by package."""

    def __init__(self, tree: Path) -> None:
        self._root = f"{tree}/zonerelay/"
        self.found: Counter[str] = Counter()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self._root):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.found[name[len(self._root) :].partition("/")[0]] += 1
        return self.trace


class Server(asyncio.Protocol):
    """The next hop: it takes everything. `taken` counts."""

    taken = 0

    def connection_made(self, transport: Any) -> None:
        self._transport, self._rest, self._in_body = transport, b"", False
        transport.write(b"220 next\r\n")

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while True:
            end = b"\r\n.\r\n" if self._in_body else b"\r\n"
            line, found, rest = self._rest.partition(end)
            if not found:
                return
            self._rest = rest
            if self._in_body:
                Server.taken += 1
                self._in_body, reply = False, b"250 2.0.0 taken"
            elif line.startswith(b"EHLO"):
                reply = b"250-next\r\n250-PIPELINING\r\n250 SIZE 100000000"
            elif line == b"DATA":
                self._in_body, reply = True, b"354 go on"
            else:
                reply = b"250 2.0.0 ok"
            self._transport.write(reply + b"\r\n")


async def start_worker(directory: Path, port: int) -> Any:
    from zonerelay.config.settings import Backend, ListenerSettings, Settings, SpoolSettings, ZoneSettings
    from zonerelay.model.clock import SystemClock
    from zonerelay.telemetry.logs.redact import Redactor

    settings = Settings(
        hostname="relay.example.org",
        spool=SpoolSettings(backend=Backend.MEMORY, path=directory / "spool", min_free_space=0),
        listener=(ListenerSettings(address="127.0.0.1:0"),),
        zone=(ZoneSettings(next_hop=f"127.0.0.1:{port}"),),
    )
    settings = replace(settings, admin=replace(settings.admin, address="", socket=directory / "socket"))
    given: dict[str, Any] = {
        "hostname": "relay.example.org",
        "log": Log(),
        "redactor": Redactor(bytes(32), enabled=False),
        "clock": SystemClock(),
        "randomness": Random(1),
    }
    if importlib.util.find_spec("zonerelay.worker.build"):
        return await importlib.import_module("zonerelay.worker.build").build(settings, **given)
    worker = importlib.import_module("zonerelay.worker.worker").Worker(settings, **given)
    await worker.start()
    return worker


async def by_smtp(worker: Any) -> None:
    host, _, port = worker.addresses()[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for _, octets in COMMANDS:
        await reader.readline()
        writer.write(octets)
    await reader.readline()
    writer.write(b"QUIT\r\n")
    await reader.read()
    writer.close()


async def by_submit(worker: Any) -> None:
    from zonerelay.inbound.cleanup.submit import Acceptance, Principal, SubmitCall, SubmittedEnvelope
    from zonerelay.model.envelope import Mailbox, Recipient
    from zonerelay.smtp.server.params import MailCommand

    envelope = SubmittedEnvelope(
        MailCommand(sender=Mailbox("a@example.org")), [Recipient(address=Mailbox("b@example.com"))]
    )
    principal = Principal(protocol="HTTP", address="127.0.0.1", may_relay=True)
    pieces = [BODY.removesuffix(b".\r\n")]
    listeners = (getattr(worker, "parts", None) or worker).listeners
    assert isinstance(await listeners.submit(SubmitCall(principal, envelope), pieces), Acceptance)


async def count_way(tree: Path, send: Callable[[Any], Awaitable[None]]) -> Counter[str]:
    loop, way, sent = asyncio.get_running_loop(), Way(tree), 0
    server = await loop.create_server(Server, "127.0.0.1", 0)
    with tempfile.TemporaryDirectory() as directory:
        worker = await start_worker(Path(directory), server.sockets[0].getsockname()[1])
        Server.taken = 0
        for number in range(WARM + COUNTED):
            if number == WARM:
                sys.settrace(way.trace)
            await send(worker)
            sent += 1
            while Server.taken < sent:
                await asyncio.sleep(0.001)
            await asyncio.sleep(SETTLED)
        sys.settrace(None)
        await worker.stop()
    server.close()
    return way.found


async def main(tree: Path) -> None:
    path, times = Path4KiB(), Times()
    for _ in range(TIMED):
        await path.run(times.around)
    left = await garbage(path)
    opcodes = await count(path)
    print(f"{'step':8} {'µs':>7} {'opcodes':>8}")
    for name in opcodes:
        print(f"{name:8} {times.decile(name):7.1f} {opcodes[name] / COUNTED:8.0f}")
    total = sum(map(times.decile, opcodes))
    print(f"{'all':8} {total:7.1f} {opcodes.total() / COUNTED:8.0f}")
    print(f"objects left to the garbage collector: {left:.1f} per session")
    ways = {"SMTP": await count_way(tree, by_smtp)}
    if importlib.util.find_spec("zonerelay.inbound.cleanup.submit"):
        ways["submit"] = await count_way(tree, by_submit)
    print("\nopcodes from the client to the next hop\n" + " ".join(f"{name:>10}" for name in ("", *ways)))
    for package, _ in ways["SMTP"].most_common():
        print(f"{package:>10}", *(f"{found[package] / COUNTED:10.0f}" for found in ways.values()))
    print(f"{'all':>10}", *(f"{found.total() / COUNTED:10.0f}" for found in ways.values()))


if __name__ == "__main__":
    tree = Path(sys.argv[1] if len(sys.argv) > 1 else HERE).resolve()
    sys.path.insert(0, str(tree))
    gc.set_threshold(5_000, 10, 1_000_000)  # as the relay does
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(tree))
