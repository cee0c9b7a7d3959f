"""Clients of a listener in memory: TLS of their own, packets that wait while nobody reads, every end.

The listener is the real one, without its socket; users, policy and store take their time and say no as a
die tells them. `Crowd.check` holds at every moment, `Crowd.over` when everybody is gone.
"""

import asyncio
import contextlib
import random
import re
import ssl
from dataclasses import replace

from tests.fuzz.conversation import Wire
from tests.fuzz.targets.sessions import OneCertificate
from tests.support.inbound import house_of
from tests.support.tls_client import TlsWire
from zonerelay.config.credentials.file import User
from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.access.auth import LoginKind, LoginResult
from zonerelay.inbound.limits.memory import SessionMemory
from zonerelay.inbound.listen.listener import Listener
from zonerelay.inbound.policy import ACCEPT, EVENTS, Decision, EndOfData, Event, accept, refuse
from zonerelay.inbound.session.session import Session
from zonerelay.inbound.state.context import SharedContext
from zonerelay.smtp.server.sasl import Credentials
from zonerelay.store.contract import StoreError, StoreFullError

MOST_TURNS = 30  # of the loop, for what the dice delay

_QUEUED = re.compile(rb"^250 2\.0\.0 OK queued as (\S+)\r$", re.MULTILINE)


class Dice:
    def __init__(self, dice: random.Random) -> None:
        self.random = dice

    async def wait(self) -> None:
        for _ in range(self.random.choice((0, 0, 1, 2, 7))):
            await asyncio.sleep(0)

    def falls(self, one_in: int) -> bool:
        return self.random.randrange(one_in) == 0


class Users:
    def __init__(self, dice: Dice) -> None:
        self._dice = dice

    async def check(self, credentials: Credentials, client_address: str, *_: object) -> LoginResult:
        await self._dice.wait()
        kind = self._dice.random.choice([LoginKind.OK, *LoginKind])
        return LoginResult(kind, User(credentials.user, "") if kind is LoginKind.OK else None)


class Moods:
    """A policy that is asked about everything."""

    asked = frozenset(EVENTS)

    def __init__(self, dice: Dice) -> None:
        self._dice = dice

    async def ask(self, event: Event) -> Decision:
        await self._dice.wait()
        if self._dice.falls(40):
            return refuse(self._dice.random.choice((421, 450, 550)), "7.1", "Not now")
        if self._dice.falls(4) and not isinstance(event, EndOfData):
            zone = "" if event.step in ("connect", "helo", "auth") else "default"
            return accept(zone=zone, add=[("X-Step", event.step)], remove=["X-Old"])
        return ACCEPT


class Client:
    """One connection. `said` is what the server has said, without its TLS."""

    def __init__(self, listener: Listener, address: str) -> None:
        self.session = Session(listener.context, listener._admission, asyncio.get_running_loop())
        self.wire = Wire(address)
        self.said = b""
        self.lost = False
        self._tls: TlsWire | None = None
        self.session.connection_made(self.wire)  # type: ignore[arg-type]  # the methods that the session uses

    @property
    def wants_tls(self) -> bool:
        if self.over or not self.wire.reading:
            return False
        return self.session.transport.has_tls and self.session.transport.secured is None

    async def send(self, data: bytes) -> None:
        if self._tls is not None:
            with contextlib.suppress(ssl.SSLError):  # the handshake is not through, or has failed
                data = self._tls.encrypt(data)
        await self.send_raw(data)

    async def send_raw(self, data: bytes) -> None:
        for _ in range(MOST_TURNS):
            if self.wire.reading:
                break
            await asyncio.sleep(0)
        if data and self.wire.reading and not self.over:
            self.session.data_received(data)
        self.listen()

    async def shake(self) -> None:
        """As much of the handshake as the server takes part in."""
        self._tls = self._tls or TlsWire()
        for _ in range(4):
            await self.send_raw(self._tls.hello())
            await asyncio.sleep(0)
            self.listen()

    def end_tls(self) -> bytes:
        return b"" if self._tls is None else self._tls.close()

    def listen(self) -> None:
        out, self.wire.out = bytes(self.wire.out), bytearray()
        self.said += out if self._tls is None else self._tls.decrypt(out)

    @property
    def over(self) -> bool:
        return self.lost or self.wire.is_closing()

    def half_close(self) -> None:
        if not self.over and self.wire.reading and not self.session.eof_received():
            self.wire.gone = True

    def lose(self) -> None:
        """The loop says that the connection is gone."""
        if not self.lost:
            self.listen()
            self.lost = self.wire.gone = True
            self.session.connection_lost(None)

    def run_out_of_time(self) -> None:
        if not self.over and self.session._timer is not None:
            self.session.deadlines.heard -= 1e6
            self.session._look_at_time()


class Crowd:
    def __init__(self, settings: ListenerSettings, dice: random.Random, *, memory: int, asks: bool) -> None:
        self.dice = Dice(dice)
        self.memory = SessionMemory(memory)
        shared = SharedContext(memory=self.memory, users=Users(self.dice))
        house = house_of(
            settings, shared=shared, certificates=OneCertificate(), policy=self._policy(asks=asks)
        )
        self.listener, self.log, self.store = house.listener, house.log, house.store
        self.store.before_write = self.store.before_commit = self._store_something
        self.clients: list[Client] = []

    def _policy(self, *, asks: bool) -> Moods | None:
        return Moods(self.dice) if asks else None

    def reload(self, settings: ListenerSettings, *, asks: bool) -> None:
        policy = self._policy(asks=asks)
        self.listener.configure(replace(self.listener.context, settings=settings, policy=policy))

    async def _store_something(self) -> None:
        await self.dice.wait()
        if self.dice.falls(8):
            raise self.dice.random.choice((StoreError, StoreFullError))("as the dice fell")

    def come(self, address: str) -> Client:
        client = Client(self.listener, address)
        self.clients.append(client)
        return client

    def check(self) -> None:
        assert self.memory.used == sum(session.held for session in self.listener._admission.sessions)
        assert self.log.named("trouble") == []

    async def over(self) -> None:
        """Everybody leaves, or is told to, and what was begun comes to its end."""
        if self.dice.falls(2):
            await self._drain()
        for client in self.clients:
            client.lose()
        for _ in range(MOST_TURNS):
            await asyncio.sleep(0)
        self.check()
        limits = self.listener._admission
        assert (self.memory.used, self.memory.holders) == (0, set())
        assert (limits.count, limits._open) == (0, {})
        assert not self.listener._admission.sessions, "nothing of a session is left when it is over"
        assert self.store.begun == self.store.aborted + len(self.store.stored)
        self._check_mail()

    async def _drain(self) -> None:
        draining = asyncio.ensure_future(self.listener.drain(self.dice.random.choice((0.0, 0.001))))
        while not draining.done():
            await asyncio.sleep(0)
            for client in self.clients:
                client.listen()
                if client.wire.closed:
                    client.lose()
        await draining

    def _check_mail(self) -> None:
        stored = sorted(each.message.id for each in self.store.stored)
        promised = [each.decode() for client in self.clients for each in _QUEUED.findall(client.said)]
        unheard = [str(each["id"]) for each in self.log.named("reply-lost")]
        assert stored == sorted(promised + unheard), "each 250 is one message, and each message one 250"
