"""How long a client may take: for its PROXY header, its TLS handshake, a body, a chunk, between chunks."""

import asyncio
import ipaddress
import time
from pathlib import Path

import pytest

from tests.dialogs.staging import listening_with_tls
from tests.support.inbound import listening, talking
from tests.support.tls_client import trusting
from tests.support.waiting import until
from zonerelay.config.settings import ListenerSettings, ListenerTls
from zonerelay.inbound.session import transport
from zonerelay.inbound.session import transport as timeouts
from zonerelay.inbound.state import context, replies

pytestmark = pytest.mark.alone  # tenths of a second are to be told from each other

BALANCED = ListenerSettings(address="127.0.0.1:0", proxy_networks=(ipaddress.ip_network("127.0.0.0/8"),))
TIMEOUT = b"421 4.4.2 Timeout waiting for the client"


@pytest.fixture
def short_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (context, timeouts):
        monkeypatch.setattr(module, "HANDSHAKE", 0.15)


# Before the greeting, and STARTTLS.


@pytest.mark.usefixtures("short_handshake")
@pytest.mark.parametrize("said", [b"", b"PROXY TCP4 192", b"\r\n\r\n\0\r\nQUIT\n\x21\x11"])
async def test_a_proxy_header_has_its_own_time(said: bytes) -> None:
    async with listening(BALANCED) as house, await house.connect_raw() as talk:
        talk.send(said)
        assert await talk.closed() in (b"", TIMEOUT + b"\r\n")
        assert house.log.reasons() == ["idle-timeout"]


@pytest.mark.usefixtures("short_handshake")
async def test_after_its_header_a_client_has_the_idle_time() -> None:
    async with listening(BALANCED, idle_timeout=1.0) as house, await house.connect_raw() as talk:
        talk.send(b"PROXY TCP4 127.0.0.9 192.0.2.1 4711 25\r\n")
        assert (await talk.line()).startswith(b"220 ")
        await asyncio.sleep(0.3)
        assert await talk.ask(b"NOOP") == b"250 2.0.0 OK"


@pytest.mark.usefixtures("short_handshake")
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"])
async def test_a_handshake_has_its_own_time_and_ends_without_clear_text(said: bytes, tmp_path: Path) -> None:
    async with (
        listening_with_tls(tmp_path, tls=ListenerTls.IMPLICIT) as house,
        await house.connect_raw() as talk,
    ):
        talk.send(said)
        assert await talk.closed() == b""
        assert house.log.reasons() == ["idle-timeout"]


@pytest.mark.usefixtures("short_handshake")
async def test_a_handshake_behind_starttls_too(tmp_path: Path) -> None:
    async with listening_with_tls(tmp_path, tls=ListenerTls.STARTTLS) as house, await house.connect() as talk:
        assert await talk.ask(b"STARTTLS") == b"220 2.0.0 Ready to start TLS"
        began = time.monotonic()
        for octet in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60):
            talk.send(bytes([octet]))
            await asyncio.sleep(0.01)
            if house.log.reasons():
                break
        assert await talk.closed() == b""
        assert time.monotonic() - began < 0.5
        assert house.log.reasons() == ["idle-timeout"]


@pytest.mark.usefixtures("short_handshake")
async def test_in_tls_a_client_has_the_idle_time_and_is_told(tmp_path: Path) -> None:
    async with (
        listening_with_tls(tmp_path, tls=ListenerTls.IMPLICIT, idle_timeout=0.3) as house,
        await house.connect_raw() as talk,
    ):
        await talk.start_tls(trusting())
        assert (await talk.line()).startswith(b"220 ")
        await asyncio.sleep(0.2)
        assert await talk.ask(b"NOOP") == b"250 2.0.0 OK"
        assert await talk.line() == TIMEOUT
        assert await talk.closed() == b""


# Bodies.


@pytest.mark.parametrize("opening", [b"DATA", b"BDAT 100000 LAST"])
async def test_a_body_that_comes_too_slowly_is_cut_off(opening: bytes) -> None:
    async with talking(idle_timeout=0.15, min_data_rate=1000) as (house, talk):
        await talk.begin(opening=opening)
        for _ in range(100):
            talk.send(b"0123456789")  # about 500 octets a second
            await asyncio.sleep(0.02)
            if house.log.reasons():
                break
        # What crosses the last words makes the kernel reset the connection: then they cannot be read.
        assert await talk.closed() in (b"", b"421 4.4.2 Data comes too slowly\r\n")
        assert house.log.reasons() == ["data-rate"]
        assert house.store.stored == []


@pytest.mark.parametrize("opening", [b"DATA", b"BDAT 100000 LAST"])
async def test_a_body_that_comes_fast_enough_may_take_long(opening: bytes) -> None:
    async with talking(idle_timeout=0.15, min_data_rate=1000) as (house, talk):
        await talk.begin(opening=opening)
        for _ in range(20):
            talk.send(b"Subject: " + b"x" * 989 + b"\r\n")
            await asyncio.sleep(0.02)
        assert house.log.reasons() == []


async def test_chunks_have_the_transaction_time_together() -> None:
    async with talking(transaction_timeout=0.2) as (house, talk):
        await talk.begin(opening=b"BDAT 0")
        assert await talk.line() == b"250 2.0.0 0 octets received"
        for _ in range(50):
            talk.send(b"BDAT 1\r\nx")
            await asyncio.sleep(0.01)
            if house.log.reasons():
                break
        assert (await talk.closed()).endswith(b"421 4.4.2 Transaction took too long\r\n")
        assert house.log.reasons() == ["transaction-timeout"]


async def test_a_client_that_does_not_take_our_last_words_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LINGER", 0.1)
    async with talking(max_commands=10_000_000) as (house, talk):
        # The stream's own reader stops at its limit, and then the kernel's buffers fill.
        session = house.session
        for _ in range(400):
            talk.send(b"VRFY x\r\n" * 5_000)
            if session.transport.is_blocked:
                break
            await asyncio.sleep(0.001)
        await until(lambda: session.transport.is_blocked)
        house.listener.stop_accepting()
        session.say_goodbye(replies.IDLE)
        await house.gone()
