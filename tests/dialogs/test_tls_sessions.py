"""TLS around a session: who leaves in it, what waits in it, and what its end means."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dialogs.staging import listening_with_tls
from tests.support.inbound import Hold, House, RememberingStore, Talk
from tests.support.tls_client import trusting
from tests.support.waiting import until
from zonerelay.config.settings import ListenerSettings, ListenerTls

IMPLICIT = ListenerSettings(address="127.0.0.1:0", tls=ListenerTls.IMPLICIT)


async def greeted(house: House) -> Talk:
    talk = await house.connect_raw()
    await talk.start_tls(trusting())
    assert (await talk.line()).startswith(b"220 ")
    return talk


async def test_the_end_of_tls_is_no_end_of_data(tmp_path: Path) -> None:
    async with listening_with_tls(IMPLICIT, tmp_path) as house:
        wire = await RawTls.connect(house)
        await wire.say(b"EHLO x\r\n")
        await wire.say(b"MAIL FROM:<a@example.org>\r\nRCPT TO:<b@example.com>\r\n")
        await wire.say(b"DATA\r\n")
        wire.send(b"Subject: x\r\n")
        wire.end()
        await house.gone()
        assert house.store.stored == []
        assert house.log.reasons() == ["client-left"]
        await wire.close()


async def test_the_end_of_tls_still_gets_the_answers(tmp_path: Path) -> None:
    """close_notify says that the client has said all; it may still be listening."""
    store = RememberingStore()
    store.before_commit = lambda: asyncio.sleep(0.02)
    async with listening_with_tls(IMPLICIT, tmp_path, store) as house:
        wire = await RawTls.connect(house)
        await wire.say(b"EHLO x\r\n")
        await wire.say(b"MAIL FROM:<a@example.org>\r\nRCPT TO:<b@example.com>\r\n")
        await wire.say(b"DATA\r\n")
        wire.send(b"Subject: x\r\n.\r\nNOOP\r\n")
        wire.end()
        assert b"queued as" in await wire.heard()
        await house.gone()
        assert len(store.stored) == 1
        await wire.close()


async def test_clear_text_in_the_middle_of_tls_ends_the_session(tmp_path: Path) -> None:
    async with listening_with_tls(IMPLICIT, tmp_path) as house:
        wire = await RawTls.connect(house)
        wire.writer.write(b"NOOP\r\n")
        await house.gone()
        assert house.log.reasons() == ["tls"]
        await wire.close()


async def test_reading_stops_in_tls_too_while_the_store_is_behind(tmp_path: Path) -> None:
    store = RememberingStore()
    hold = store.before_write = Hold()
    async with listening_with_tls(IMPLICIT, tmp_path, store) as house:
        talk = await greeted(house)
        await talk.begin()
        body = b"Subject: x\r\n\r\n" + b"y" * 8_000_000 + b"\r\n"
        talk.send(body + b".\r\n")
        session = house.session
        await until(lambda: session.transport.is_paused)
        assert session.held < 1_500_000
        hold.go.set()
        assert b"queued" in await talk.line()
        assert store.stored[0].body.endswith(body)
        await talk.close()


async def test_many_sessions_in_tls_are_all_forgotten(tmp_path: Path) -> None:
    settings = replace(IMPLICIT, max_connections_per_client=100)
    async with listening_with_tls(settings, tmp_path) as house:
        talks = [await greeted(house) for _ in range(20)]
        assert house.listener.connections == 20
        for at, talk in enumerate(talks):
            if at % 2:
                talk.reset()
            else:
                assert await talk.ask(b"QUIT") == b"221 2.0.0 Bye"
                assert await talk.closed() == b""
                await talk.close()
        await house.gone()
        await until(lambda: not house.listener._admission.sessions)


class RawTls:
    """A client that can end TLS and go on listening, which asyncio's cannot."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trusting().wrap_bio(self._in, self._out)

    @classmethod
    async def connect(cls, house: House) -> RawTls:
        talk = await house.connect_raw()
        wire = cls(talk.reader, talk.writer)
        while True:
            try:
                wire._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await wire._exchange()
        wire.writer.write(wire._out.read())
        assert (await wire.say(b"")).startswith(b"220 ")
        return wire

    def send(self, data: bytes) -> None:
        if data:
            self._tls.write(data)
        self.writer.write(self._out.read())

    def end(self) -> None:
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.unwrap()
        self.writer.write(self._out.read())

    async def say(self, data: bytes) -> bytes:
        """Send; the next reply there is."""
        self.send(data)
        while True:
            try:
                return self._tls.read(1 << 16)
            except ssl.SSLWantReadError:
                await self._exchange()

    async def heard(self) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(5):
            self._in.write(await self.reader.read(1 << 16))
        return self._tls.read(1 << 16)

    async def close(self) -> None:
        await Talk(self.reader, self.writer).close()

    async def _exchange(self) -> None:
        self.writer.write(self._out.read())
        async with asyncio.timeout(5):
            self._in.write(await self.reader.read(1 << 16))
