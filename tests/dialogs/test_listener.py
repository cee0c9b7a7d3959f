"""Starting, stopping, and what a message looks like when it is in the store."""

import asyncio
import socket
from pathlib import Path

import pytest
import uvloop

from tests.dialogs.staging import listening_with_tls
from tests.support.inbound import House, Talk, listening, talking
from tests.support.tls_client import TlsWire, trusting
from tests.support.waiting import until
from zonerelay.config.settings import ListenerSettings, ListenerTls
from zonerelay.inbound.cleanup.intake import OVERDUE
from zonerelay.inbound.limits.clients import MANY
from zonerelay.inbound.listen.listening_socket import ListenError
from zonerelay.message.header import Fields
from zonerelay.model.envelope import BodyType, Envelope, Message
from zonerelay.routing.zones.zones import ZoneChoice, ZoneOf
from zonerelay.telemetry.events.events import Events


async def test_the_ipv6_wildcard_is_every_address_of_the_machine() -> None:
    async with listening(ListenerSettings(address="[::]:0")) as house:
        port = house.listener.addresses[0].rpartition(":")[2]
        for host in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(host, int(port))
            async with Talk(reader, writer) as talk:
                assert (await talk.line()).startswith(b"220 ")
                assert (await talk.ask(b"EHLO client")).startswith(b"250")
                await talk.ask(b"MAIL FROM:<a@example.org>")
                assert (await talk.ask(b"RCPT TO:<b@example.com>")).startswith(b"250"), host


async def test_unix_socket_takes_mail_from_local_processes(tmp_path: Path) -> None:
    path = tmp_path / "smtp.sock"
    settings = ListenerSettings(address=f"unix:{path}", allow_networks=())
    async with listening(settings) as house:
        assert house.listener.addresses == [f"unix:{path}"]
        async with await house.connect() as talk:
            await talk.begin()
            talk.send(b"Subject: x\r\n.\r\n")
            assert (await talk.line()).startswith(b"250 ")
        assert b"(local)" in house.store.stored[0].body
    assert not path.exists()


async def test_stale_unix_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "smtp.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    settings = ListenerSettings(address=f"unix:{path}")
    async with listening(settings) as house:
        with pytest.raises(ListenError, match="in use"):
            async with listening(settings):
                pass
        async with await house.connect() as talk:
            assert await talk.ask(b"NOOP") == b"250 2.0.0 OK"


async def test_errors_are_in_words(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address, words in [
            (f"127.0.0.1:{port}", "the address is in use"),
            ("192.0.2.1:2525", "the address is not configured on this machine"),
            (f"unix:{tmp_path}/no/such/dir/x", "directory does not exist"),
            ("nonsense", "cannot listen on nonsense"),
        ]:
            with pytest.raises(ListenError, match=words):
                async with listening(ListenerSettings(address=address)):
                    pass


async def test_no_new_connection_after_stop_accepting() -> None:
    async with listening() as house:
        port = int(house.listener.addresses[0].rpartition(":")[2])
        house.listener.stop_accepting()
        assert house.listener.addresses == []
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_stored_message_knows_all_about_itself() -> None:
    def by_subject(envelope: Envelope, /, *, headers: Fields, size: int, named: str = "") -> ZoneOf:
        assert dict(headers)["Subject"] == "x y"
        assert (size, named) == (len(b"Subject: x\r\n y\r\nDate: now\r\n\r\n\xff\r\n.\r\n"), "")
        bulk, default = ZoneChoice("bulk", "route=1 because"), ZoneChoice("default", "no route")
        return lambda recipient: bulk if recipient.startswith("c@") else default

    async with talking(choose_zone=by_subject) as (house, talk):
        await talk.ask(b"EHLO client.example.org")
        await talk.ask(b"MAIL FROM:<a@example.org> BODY=8BITMIME")
        for recipient in (b"b@example.com", b"c@example.com", b"d@example.com"):
            await talk.ask(b"RCPT TO:<" + recipient + b">")
        await talk.ask(b"DATA")
        talk.send(b"Subject: x\r\n y\r\nDate: now\r\n\r\n\xff\n.\r\n.\r\n")
        reply = await talk.line()
        stored = house.store.stored[0]
        message, envelope = stored.message, stored.message.envelope
        assert reply.decode().endswith(message.id)
        assert message.eight_bit
        assert envelope.body is BodyType.EIGHT_BIT
        assert envelope.created == house.clock.now()
        assert envelope.origin.client_address == "127.0.0.1"
        assert envelope.origin.helo == "client.example.org"
        own_id = ("Message-ID", f"<{message.id}@relay.example.org>")
        author = ("From", "<a@example.org>")
        assert message.headers == (("Subject", "x y"), ("Date", "now"), author, own_id)
        assert message.trace == (
            "listener=127.0.0.1:0",
            "zone=default no route: b@example.com, d@example.com",
            "zone=bulk route=1 because: c@example.com",
            "bare_lf=1 bare_cr=0",
        )
        assert [(d.recipient, d.zone) for d in stored.deliveries] == [
            ("b@example.com", "default"),
            ("c@example.com", "bulk"),
            ("d@example.com", "default"),
        ]
        names = [line.split(b":")[0] for line in stored.body.split(b"\r\n") if line[:1].isalpha()]
        assert names == [b"Received", b"From", b"Message-ID", b"Subject", b"Date"]
        assert stored.body.endswith(b"\r\n\r\n\xff\r\n.\r\n")
        assert message.size == len(stored.body)


async def test_accepted_is_said_before_the_client_hears_250() -> None:
    async with talking() as (house, talk):
        await talk.begin()
        talk.send(b"Subject: x\n.\r\n.\r\n")
        await talk.line()
        assert house.log.named("accepted")[0]["bare_lf"] == 1


async def test_trouble_after_the_commit_is_still_a_250(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 451 here would make the client send a message again that is already queued."""

    def fail(events: Events, message: Message, **facts: int) -> None:
        raise RuntimeError(message.id)

    monkeypatch.setattr(Events, "accepted", fail)
    async with talking() as (house, talk):
        await talk.begin()
        talk.send(b"Subject: x\r\n.\r\n")
        assert b"250 2.0.0 OK queued" in await talk.line()
        assert len(house.log.named("trouble")) == 1


@pytest.mark.parametrize(("recipients", "is_due"), [(1, False), (MANY + 1, True)])
async def test_what_many_recipients_get_is_stored_as_due(recipients: int, is_due: bool) -> None:
    async with talking() as (house, talk):
        await talk.begin(*(b"u%d@example.com" % number for number in range(recipients)))
        talk.send(b"Subject: x\r\n.\r\n")
        assert b"250 2.0.0 OK queued" in await talk.line()
        due = {each.next_attempt for each in house.store.stored[0].deliveries}
        assert due == {house.clock.now() - OVERDUE if is_due else 0.0}


async def test_zone_that_cannot_be_chosen_is_temporary() -> None:
    def fail(envelope: Envelope, /, *, headers: Fields, size: int, named: str = "") -> ZoneOf:
        raise KeyError(size)

    async with talking(choose_zone=fail) as (house, talk):
        await talk.begin()
        talk.send(b"Subject: x\r\n.\r\n")
        assert await talk.line() == b"451 4.3.0 Local error, try again later"
        assert house.store.stored == []
        assert house.store.aborted == 1


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_small_replies_are_not_delayed_by_nagle(run: object) -> None:
    async def look() -> int:
        async with listening() as house, await house.connect():
            transport = house.session.transport._transport
            assert transport is not None
            wire: socket.socket = transport.get_extra_info("socket")
            option: int = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            return option

    assert callable(run)
    assert run(look()) != 0


async def test_trouble_in_a_command_is_temporary_and_resets_the_transaction() -> None:
    async with talking() as (house, talk):
        await talk.ask(b"EHLO client.example.org")
        house.store.unhealthy = None  # type: ignore[assignment,method-assign]  # the bug
        assert await talk.ask(b"MAIL FROM:<a@example.org>") == b"451 4.3.0 Local error, try again later"
        assert await talk.ask(b"RCPT TO:<b@example.com>") == b"503 5.5.1 Send MAIL first"
        assert len(house.log.named("trouble")) == 1


# TLS around a session: who leaves in it, what waits in it, and what its end means


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
