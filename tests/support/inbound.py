"""A listener with a store that only remembers, and a client that speaks raw bytes."""

import asyncio
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from tests.support.event_log import EventLog, events_into
from tests.support.memory_store import MemoryStore
from tests.support.waiting import until
from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.listen.listener import Listener
from zonerelay.inbound.session.session import Session
from zonerelay.inbound.state.context import AskedPolicy, ListenerContext, SharedContext
from zonerelay.inbound.tls.certificates import Certificates
from zonerelay.message.header import Fields
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Envelope, Message, MessageIdSource
from zonerelay.routing.zones.zones import ChooseZone, ZoneChoice, ZoneOf
from zonerelay.store.contract import Unhealthy
from zonerelay.store.queue.body import BodyWriter, NewMessage

HOSTNAME = "relay.example.org"
PATIENCE = 5.0  # seconds a test waits for something that should happen at once

# RFC 2034: an enhanced status whose class agrees with the code; the greeting, EHLO's lines and 354 have none.
_PLAIN = re.compile(
    rb"220 relay\.example\.org ESMTP|354 [^\r\n]+|"
    rb"250[ -](?:relay\.example\.org|PIPELINING|SIZE \d+|8BITMIME|SMTPUTF8|ENHANCEDSTATUSCODES|CHUNKING|DSN|"
    rb"LIMITS RCPTMAX=\d+|STARTTLS|AUTH PLAIN LOGIN|FUTURERELEASE \d+ [-0-9T:Z]+|XCLIENT [A-Z ]+)|"
    rb"334 [^\r\n]*"
)
_ENHANCED = re.compile(rb"([245])\d\d[ -]\1\.\d{1,3}\.\d{1,3} [^\r\n]+")


def is_well_formed(line: bytes) -> bool:
    """One reply line without its CRLF."""
    return bool(_ENHANCED.fullmatch(line) or _PLAIN.fullmatch(line)) and line.isascii()


@dataclass
class Stored:
    message: Message
    deliveries: tuple[Delivery, ...]
    body: bytes


class RememberingStore(MemoryStore):
    """`before_write` and `before_commit` are awaited there: a slow disk, a full one, a bug."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.stored: list[Stored] = []
        self.begun = 0
        self.aborted = 0
        self.sick: Unhealthy | None = None
        self.keep_bodies = True
        self.before_write: Callable[[], Awaitable[None]] = _at_once
        self.before_commit: Callable[[], Awaitable[None]] = _at_once

    def unhealthy(self) -> Unhealthy | None:
        return self.sick

    def begin(self, envelope: Envelope) -> BodyWriter:
        self.begun += 1
        return _Writer(self, envelope)

    def submit_message(self, given: NewMessage) -> asyncio.Future[None]:
        body = b"".join([*self._arriving.get(given.message.id, ()), *given.chunks])
        self.stored.append(Stored(given.message, tuple(given.deliveries), body))
        return super().submit_message(given)


async def _at_once() -> None:
    return


class Hold:
    """A place where the store waits until it may go on, and then fails if there is an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self._error = error

    async def __call__(self) -> None:
        self.reached.set()
        await self.go.wait()
        if self._error is not None:
            raise self._error


class _Writer(BodyWriter):
    _spool: RememberingStore

    async def write(self, chunk: bytes) -> None:
        await self._spool.before_write()
        if self._spool.keep_bodies:
            await super().write(chunk)
        else:
            self._size += len(chunk)

    async def commit(self, deliveries: Sequence[Delivery], **how: Any) -> Message:  # Any: as the store's own
        await self._spool.before_commit()
        return await super().commit(deliveries, **how)

    async def abort(self) -> None:
        self._spool.aborted += not self._done
        await super().abort()


@dataclass
class House:
    """A running listener and everything a test wants to look at."""

    listener: Listener
    store: RememberingStore
    log: EventLog
    clock: ManualClock

    @property
    def session(self) -> Session:
        """One of the sessions, where there is one only."""
        return next(iter(self.listener._admission.sessions))

    async def gone(self) -> None:
        """Wait until no client is connected."""
        await until(lambda: self.listener.connections == 0)

    async def connect(self) -> "Talk":
        """A client that has read the greeting."""
        talk = await self.connect_raw()
        assert (await talk.line()).startswith(b"220 ")
        return talk

    async def connect_raw(self) -> "Talk":
        address = self.listener.addresses[0]
        if address.startswith("unix:"):
            reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        return Talk(reader, writer)


class Talk:
    """The client's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def line(self) -> bytes:
        """One reply line without its CRLF; `b""` when the server has closed."""
        async with asyncio.timeout(PATIENCE):
            line = await self.reader.readline()
        if line:
            assert line.endswith(b"\r\n"), line
            assert is_well_formed(line[:-2]), line
        return line[:-2]

    async def reply(self) -> bytes:
        """One whole reply, lines joined by LF."""
        lines = [await self.line()]
        while lines[-1][3:4] == b"-":
            lines.append(await self.line())
        return b"\n".join(lines)

    async def ask(self, data: bytes) -> bytes:
        """Send a command line and return its reply."""
        self.send(data + b"\r\n")
        return await self.reply()

    async def begin(self, *recipients: bytes, opening: bytes = b"DATA") -> None:
        """EHLO to 354, or to an opening of another kind, whose answer is not awaited."""
        await self.ask(b"EHLO client.example.org")
        await self.address(*recipients)
        self.send(opening + b"\r\n")
        assert opening != b"DATA" or (await self.line()).startswith(b"354")

    async def address(self, *recipients: bytes) -> None:
        """MAIL and RCPT."""
        assert (await self.ask(b"MAIL FROM:<a@example.org>")).startswith(b"250")
        for recipient in recipients or (b"b@example.com",):
            assert (await self.ask(b"RCPT TO:<" + recipient + b">")).startswith(b"250")

    async def closed(self) -> bytes:
        """What the server still sends until it closes."""
        async with asyncio.timeout(PATIENCE):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def start_tls(self, context: ssl.SSLContext) -> None:
        """The client's handshake, now."""
        async with asyncio.timeout(PATIENCE):
            await self.writer.start_tls(context)

    def reset(self) -> None:
        """Leave with a TCP reset."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def leave(self, *, abruptly: bool) -> None:
        """Leave with a TCP reset, or by the book."""
        if abruptly:
            self.reset()
        else:
            await self.close()

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionError, ssl.SSLError):
            return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def one_zone(envelope: Envelope, /, *, headers: Fields, size: int, named: str = "") -> ZoneOf:
    return lambda recipient: ZoneChoice("default", "")


def house_of(
    settings: ListenerSettings | None = None,
    *,
    choose_zone: ChooseZone = one_zone,
    shared: SharedContext | None = None,
    certificates: Certificates | None = None,
    policy: AskedPolicy | None = None,
    log: EventLog | None = None,
    clock: ManualClock | None = None,
    **options: Any,
) -> House:  # Any: options of the listener, by name, in place of those of its settings
    """Return a listener that has no socket yet."""
    clock = clock or ManualClock()
    log = log or EventLog()
    store = RememberingStore(clock)
    context = ListenerContext(
        **(shared or SharedContext()).fields(),
        settings=replace(settings or ListenerSettings(address="127.0.0.1:0"), **options),
        hostname=HOSTNAME,
        store=store,
        ids=MessageIdSource(clock),
        choose_zone=choose_zone,
        events=events_into(log, clock),
        clock=clock,
        certificates=certificates,
        policy=policy,
    )
    return House(Listener(context), store, log, clock)


@asynccontextmanager
async def listening(settings: ListenerSettings | None = None, **more: Any) -> AsyncIterator[House]:
    """Listen with what `house_of` takes."""
    house = house_of(settings, **more)
    await house.listener.start()
    try:
        yield house
    finally:
        house.listener.stop_accepting()
        async with asyncio.timeout(PATIENCE):
            await house.listener.drain(0.0)
        assert house.listener.connections == 0


@asynccontextmanager
async def talking(
    settings: ListenerSettings | None = None, **options: Any
) -> AsyncIterator[tuple[House, Talk]]:
    """Listen to one client, who has read the greeting."""
    async with listening(settings, **options) as house, await house.connect() as talk:
        yield house, talk
