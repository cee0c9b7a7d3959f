"""Whatever sends a message asks first whether another relay may be sending it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.integration.delivery.conftest import Bed
from tests.support.mail import TEXT, ZONE, Bodies, make_batch, make_message, route_to
from tests.support.memory_store import MemoryStore
from tests.support.queueing import Sink, make_events
from tests.support.webhooks import Receiver
from zonerelay.capture.store import open_capture
from zonerelay.config.endpoints import CAPTURE
from zonerelay.config.settings import Settings, SpoolSettings, WebhookSettings
from zonerelay.delivery.batch.capturing import CaptureCourier
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.model.outcome import Verdict
from zonerelay.model.queue_name import webhook_queue
from zonerelay.store.contract import ClaimLostError, OwnMessage
from zonerelay.webhook.courier import EventPosition, WebhookCourier

LARGE = TEXT + b"a line of a larger text\r\n" * 20_000


@pytest.mark.parametrize("body", [TEXT, TEXT + b"more\r\n" * 5000, LARGE])
@pytest.mark.parametrize("chunking", [False, True])
@pytest.mark.parametrize("at", [b"MAIL", b"RCPT", b"DATA"])
async def test_a_claim_that_is_lost_while_the_peer_lets_wait_is_noticed_before_the_body_leaves(
    bed: Bed, body: bytes, chunking: bool, at: bytes
) -> None:
    bodies = Bodies(body)
    received = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        writer.write(b"220 peer.test\r\n")
        while line := await reader.readline():
            verb = line[:4].upper()
            received += b"" if verb in {b"EHLO", b"MAIL", b"RCPT", b"DATA", b"QUIT"} else line
            bodies.lost = bodies.lost or verb.replace(b"BDAT", b"DATA") == at
            if verb == b"BDAT":
                received += await reader.readexactly(int(line.split()[1]))
            offers = b"250-CHUNKING\r\n" if chunking else b""
            reply = {b"EHLO": b"250-peer.test\r\n" + offers + b"250 8BITMIME\r\n", b"DATA": b"354 Go on\r\n"}
            writer.write(reply.get(verb, b"250 Ok\r\n"))

    courier = bed.courier(bodies)
    port = await bed.peer(serve)
    with pytest.raises(ClaimLostError):
        await bed.send(port, courier=courier, zone=ZONE, body=body)
    assert received in {b"", b"BDAT 1\r\n" + body[:1]}


async def test_what_a_peer_has_answered_before_the_claim_was_lost_is_told(bed: Bed) -> None:
    bodies = Bodies()
    taken = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        writer.write(b"220 peer.test\r\n")
        while line := await reader.readline():
            writer.write(b"250-peer.test\r\n250 LIMITS RCPTMAX=1\r\n" if line.startswith(b"EHLO") else b"")
            if line.startswith(b"DATA"):
                writer.write(b"354 Go on\r\n")
                await reader.readuntil(b"\r\n.\r\n")
                taken += 1
                bodies.lost = True
            if not line.startswith(b"EHLO"):
                writer.write(b"250 Ok\r\n")

    message = make_message(recipients=["one@example.com", "two@example.com"])
    courier = bed.courier(bodies)
    outcomes = await courier.deliver(make_batch(message, route_to(await bed.peer(serve)), ZONE))
    assert [each.verdict for each in outcomes] == [Verdict.DELIVERED, Verdict.DEFERRED]
    assert not outcomes[1].counts
    assert taken == 1


async def test_captured_mail_asks_too(tmp_path: Path) -> None:
    settings = Settings(spool=SpoolSettings(path=tmp_path / "spool", min_free_space=0))
    bodies = Bodies(lost=True)
    clock = SystemClock()
    capturing = CaptureCourier(
        settings,
        read_body=bodies.read,
        check_claim=bodies.check_claim,
        clock=clock,
        on_error=lambda where, error: pytest.fail(f"{where}: {error}"),
    )
    batch = make_batch(make_message(), route_to(25), replace(ZONE, next_hop=CAPTURE))
    with pytest.raises(ClaimLostError):
        await capturing.deliver(batch)
    with contextlib.closing(open_capture(settings, clock.now)) as capture:
        assert capture.find("")[0] == []
        bodies.lost = False
        await capturing.deliver(batch)
        assert len(capture.find("")[0]) == 1
    await capturing.close()


class Shared(MemoryStore):
    """A store whose claims another relay has taken over until `lost` is false."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = True
        self.released = asyncio.Event()

    def check_claim(self, message_id: MessageId) -> None:
        if self.lost:
            raise ClaimLostError(message_id)

    def release(self, keys: Collection[DeliveryKey]) -> None:
        super().release(keys)
        self.released.set()


async def test_webhooks_ask_too() -> None:
    clock, store, written = SystemClock(), Shared(), asyncio.Event()
    body = b'msg_1\t{"type": "message.delivered"}\r\n'
    message = make_message(body)
    recipient = EventPosition("source", 1, 1).recipient("hook")
    queue = webhook_queue("hook")
    event = Delivery(queue=queue, message_id=message.id, recipient=recipient, created=clock.now())
    await store.settle([OwnMessage(message, body, (event,))])
    with Receiver() as receiver:
        courier = WebhookCourier(
            WebhookSettings(name="hook", url=receiver.url(), private=True),
            ["whsec_" + "A" * 32],
            read_keys=tuple,
            store=store,
            write=lambda changes, _: written.set(),
            make_gap=lambda *_: pytest.fail("no event is lost"),
            events=make_events(Sink(), clock),
            clock=clock,
            random=Random(1),
        )
        courier.start()
        async with asyncio.timeout(10):
            await store.released.wait()
            assert receiver.posts == []
            store.lost = False
            courier.notify()
            await written.wait()
        await courier.stop()
    assert len(receiver.taken()) == 1
