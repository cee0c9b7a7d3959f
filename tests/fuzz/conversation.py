"""A whole session in memory: packets in, what was written out. No socket, no disk, no thread.

`converse` checks what must hold of every conversation, whatever was said: nothing is written after
closing, nothing of the session is left when it is over, what waits is bounded, and the account of memory is
even again.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.event_log import EventLog
from tests.support.inbound import RememberingStore, house_of
from zonerelay.config.credentials.file import User
from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.access.auth import LoginKind, LoginResult
from zonerelay.inbound.limits.memory import SessionMemory
from zonerelay.inbound.session.session import Session
from zonerelay.inbound.state.context import AskedPolicy, SharedContext
from zonerelay.inbound.tls.certificates import Certificates
from zonerelay.smtp.server.commands import MAX_LINE
from zonerelay.smtp.server.sasl import Credentials

CLIENT = "192.0.2.1"


@dataclass(eq=False)
class Wire:
    """Keeps what is written, and whether it would be read from; after closing nothing may be said.

    `gone`: the client has left, and the session has not heard of it yet.
    """

    address: str = CLIENT
    out: bytearray = field(default_factory=bytearray)
    closed: bool = False
    gone: bool = False
    reading: bool = True

    def get_extra_info(self, name: str) -> object:
        return (self.address, 4711)

    def write(self, data: bytes) -> None:
        assert not self.closed, "nothing is said after closing"
        if not self.gone:
            self.out += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed or self.gone

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


MEMORY = 1 << 30
PASSWORD = "secret"
# Turns of the loop until nothing moves: a question, a body's task and its commit need a few each.
TURNS_PER_PACKET = 12


class AnyUser:
    """Everybody exists and has the same password."""

    async def check(self, credentials: Credentials, client_address: str, *_: object) -> LoginResult:
        await asyncio.sleep(0)
        if credentials.password == PASSWORD:
            return LoginResult(LoginKind.OK, User(credentials.user, ""))
        return LoginResult(LoginKind.WRONG)


@dataclass(frozen=True)
class Conversation:
    out: bytes
    closed: bool
    log: EventLog
    store: RememberingStore


async def converse(
    packets: Sequence[bytes],
    *,
    settings: ListenerSettings,
    certificates: Certificates | None = None,
    policy: AskedPolicy | None = None,
    turns: int = TURNS_PER_PACKET,
) -> Conversation:
    """`turns` of the loop go by between two packets: with few, packets come while somebody is asked."""
    house = house_of(
        settings,
        shared=SharedContext(users=AnyUser(), memory=SessionMemory(MEMORY)),
        certificates=certificates,
        policy=policy,
    )
    wire, context, admission = Wire(), house.listener.context, house.listener._admission
    session = Session(context, admission, asyncio.get_running_loop())
    session.connection_made(wire)  # type: ignore[arg-type]  # the methods that the session uses
    await _settle(session)
    for packet in packets:
        if wire.closed:
            break
        if packet:
            session.data_received(packet)
        for _ in range(turns):
            await asyncio.sleep(0)
        # More is there only as long as something before it has to be answered first.
        assert turns < TURNS_PER_PACKET or session.lines.waiting <= MAX_LINE
    await _settle(session)
    assert session.lines.waiting <= MAX_LINE
    out, closed = bytes(wire.out), wire.closed
    session.connection_lost(None)
    await _settle(session)
    assert bytes(wire.out) == out, "nobody is there to be told"
    assert not admission.sessions, "nothing of a session is left when it is over"
    assert context.memory.used == 0
    return Conversation(out, closed, house.log, house.store)


async def _settle(session: Session) -> None:
    """Wait until everything has been answered that can be."""
    for _ in range(TURNS_PER_PACKET):
        await asyncio.sleep(0)
    while session._asking or session.waits_for_store:
        await asyncio.sleep(0)
