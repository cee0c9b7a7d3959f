"""TLS around a session: who leaves in it, what waits in it, and what its end means."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.dialogs.staging import listening_with_tls
from tests.support.inbound import House, Talk
from tests.support.tls_client import TlsWire, trusting
from tests.support.waiting import until
from zonerelay.config.settings import ListenerTls


async def greeted(house: House) -> Talk:
    talk = await house.connect_raw()
    await talk.start_tls(trusting())
    assert (await talk.line()).startswith(b"220 ")
    return talk


async def test_the_end_of_tls_is_no_end_of_data(tmp_path: Path) -> None:
    async with listening_with_tls(tmp_path, tls=ListenerTls.IMPLICIT) as house:
        async with await house.connect_raw() as talk:
            wire = RawTls(talk)
            await wire.begin()
            talk.send(wire.encrypt(b"Subject: x\r\n") + wire.close())
            await house.gone()
        assert house.store.stored == []
        assert house.log.reasons() == ["client-left"]


async def test_the_end_of_tls_still_gets_the_answers(tmp_path: Path) -> None:
    """close_notify says that the client has said all; it may still be listening."""
    async with listening_with_tls(tmp_path, tls=ListenerTls.IMPLICIT) as house:
        house.store.before_commit = lambda: asyncio.sleep(0.02)
        async with await house.connect_raw() as talk:
            wire = RawTls(talk)
            await wire.begin()
            talk.send(wire.encrypt(b"Subject: x\r\n.\r\nNOOP\r\n") + wire.close())
            assert b"queued as" in await wire.heard()
            await house.gone()
        assert len(house.store.stored) == 1


async def test_clear_text_in_the_middle_of_tls_ends_the_session(tmp_path: Path) -> None:
    async with listening_with_tls(tmp_path, tls=ListenerTls.IMPLICIT) as house:
        async with await house.connect_raw() as talk:
            await RawTls(talk).begin()
            talk.send(b"NOOP\r\n")
            await house.gone()
        assert house.log.reasons() == ["tls"]


async def test_many_sessions_in_tls_are_all_forgotten(tmp_path: Path) -> None:
    async with listening_with_tls(
        tmp_path, tls=ListenerTls.IMPLICIT, max_connections_per_client=100
    ) as house:
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


class RawTls(TlsWire):
    """A client that can end TLS and go on listening, which asyncio's cannot."""

    def __init__(self, talk: Talk) -> None:
        super().__init__()
        self.talk = talk

    async def begin(self) -> None:
        """From the handshake to 354."""
        self.talk.send(self.hello())
        while not (answer := self.answer(await self._read())):
            pass
        self.talk.send(answer)
        await self.heard()
        for said in (b"EHLO x", b"MAIL FROM:<a@example.org>\r\nRCPT TO:<b@example.com>", b"DATA"):
            self.talk.send(self.encrypt(said + b"\r\n"))
            await self.heard()

    async def heard(self) -> bytes:
        """The next reply there is."""
        while not (reply := self.decrypt(await self._read())):
            pass
        return reply

    async def _read(self) -> bytes:
        async with asyncio.timeout(5):
            return await self.talk.reader.read(1 << 16)
