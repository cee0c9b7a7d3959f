"""The courier against a real server on loopback: what is sent, and what becomes of each recipient."""

import asyncio
import contextlib
import hashlib
import tracemalloc
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.delivery.conftest import Bed, talk
from tests.support.mail import TEXT, ZONE, Bodies, make_batch, make_message, route_to
from tests.support.sink_conversation import Manners
from zonerelay.capture.store import open_capture
from zonerelay.config.endpoints import CAPTURE
from zonerelay.config.settings import DeliverySettings, Settings, SpoolSettings
from zonerelay.delivery.batch.capturing import CaptureCourier
from zonerelay.delivery.connection.session import WRITE_LIMIT
from zonerelay.model.clock import SystemClock
from zonerelay.model.envelope import MessageId
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.sandbox.behaviours import ADDRESSES
from zonerelay.store.contract import CHUNK_SIZE, ClaimLostError

D, F, B = Verdict.DELIVERED, Verdict.DEFERRED, Verdict.BOUNCED


async def deliver(
    bed: Bed, port: int, *locals_: str, bodies: Bodies | None = None, settings: DeliverySettings | None = None
) -> list[Outcome]:
    bodies = bodies or Bodies()
    message = make_message(bodies.body, recipients=[f"{local}@example.com" for local in locals_])
    courier = bed.courier(bodies, settings=settings)
    outcomes = await courier.deliver(make_batch(message, route_to(port)))
    assert bodies.open_now == 0
    return list(outcomes)


async def test_message_arrives_as_it_is_stored(bed: Bed) -> None:
    sink = await bed.sink()
    [outcome] = await deliver(bed, sink.port, "anybody")
    assert outcome == Outcome(
        D, Reply(250, "0.0", "message accepted"), host="127.0.0.1", peer=f"127.0.0.1:{sink.port}"
    )
    [received] = sink.messages
    assert received.body == TEXT
    assert received.mail_from == "sender@example.org"
    assert received.recipients == ("anybody@example.com",)


@pytest.mark.parametrize(
    "manners",
    [
        Manners(),
        Manners(pipelining=False),
        Manners(esmtp=False),
        Manners(multi_line=True),
        Manners(enhanced=False),
        Manners(byte_by_byte=True),
        Manners(pipelining=False, multi_line=True, byte_by_byte=True, enhanced=False),
    ],
)
async def test_every_kind_of_server_is_understood(bed: Bed, manners: Manners) -> None:
    sink = await bed.sink(manners)
    courier = bed.courier()
    names = ["a", "reject-550", "b", "defer-450", "reject-553"]
    message = make_message(recipients=[f"{name}@example.com" for name in names])
    for _ in range(2):
        outcomes = await courier.deliver(make_batch(message, route_to(sink.port)))
        assert [outcome.verdict for outcome in outcomes] == [D, B, D, F, B]
        assert [outcome.reply.code for outcome in outcomes] == [250, 550, 250, 450, 553]
    assert [received.recipients for received in sink.messages] == [("a@example.com", "b@example.com")] * 2
    assert sink.connections == 1


# (local parts, outcome, scope, code, in doubt, is the connection kept)
BEHAVIOURS = [
    ("reply-452-4.2.2", F, Scope.RECIPIENT, 452, False, True),
    ("reply-552-5.2.2", B, Scope.RECIPIENT, 552, False, True),
    ("reply-552", B, Scope.RECIPIENT, 552, False, True),
    ("permerror", B, Scope.RECIPIENT, 550, False, True),
    ("temperror", F, Scope.RECIPIENT, 451, False, True),
    ("greylist", F, Scope.RECIPIENT, 451, False, True),
    ("datacmd-451", F, Scope.MESSAGE, 451, False, True),
    ("datacmd-554", B, Scope.MESSAGE, 554, False, True),
    ("data-554", B, Scope.MESSAGE, 554, False, True),
    ("data-451", F, Scope.MESSAGE, 451, False, True),
    ("early-552", B, Scope.MESSAGE, 552, False, False),
    ("reply-421", F, Scope.MESSAGE, 421, False, False),
    ("close", F, Scope.MESSAGE, 451, False, False),
    # A short message is in the kernel, final dot and all, before its sender can know.
    ("close-before-dot", F, Scope.MESSAGE, 451, True, False),
    ("close-after-dot", F, Scope.MESSAGE, 451, True, False),
]


@pytest.mark.parametrize("pipelining", [True, False])
@pytest.mark.parametrize(("local", "verdict", "scope", "code", "in_doubt", "kept"), BEHAVIOURS)
async def test_failure_asked_for_by_address(
    bed: Bed,
    local: str,
    verdict: Verdict,
    scope: Scope,
    code: int,
    in_doubt: bool,
    kept: bool,
    pipelining: bool,
) -> None:
    sink = await bed.sink(Manners(pipelining=pipelining))
    bodies = Bodies(b"x" * 70 + b"\r\n")
    courier = bed.courier(bodies)
    message = make_message(bodies.body, recipients=[f"{local}@example.com"])
    [outcome] = await courier.deliver(make_batch(message, route_to(sink.port)))
    assert (outcome.verdict, outcome.scope, outcome.reply.code) == (verdict, scope, code)
    assert outcome.in_doubt is in_doubt
    assert outcome.counts
    assert sink.messages == []
    await asyncio.sleep(0.01)
    assert courier.pool.open_connections("default") == (1 if kept else 0)


async def test_body_cut_by_a_lost_connection_is_not_in_doubt(bed: Bed) -> None:
    sink = await bed.sink()
    bodies = Bodies(b"x" * 998 + b"\r\n" * 4_000_000)
    [outcome] = await deliver(bed, sink.port, "close-before-dot", bodies=bodies)
    assert (outcome.verdict, outcome.in_doubt) == (F, False)
    assert "the message body" in outcome.reply.text


async def test_refusal_in_the_middle_of_a_long_body_is_heard(bed: Bed) -> None:
    async def refuse_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer)
        await reader.readexactly(1000)
        writer.write(b"552 5.3.4 too big\r\n")
        while await reader.read(1 << 20):
            pass

    sink = await bed.sink()
    bodies = Bodies(b"x" * 998 + b"\r\n" * 8_000_000)
    courier = bed.courier(bodies)
    port = await bed.peer(refuse_early)
    [outcome] = await bed.send(port, sink.port, courier=courier, body=bodies.body)
    assert outcome.reply == Reply(552, "3.4", "too big")
    assert outcome.verdict is B
    await asyncio.sleep(0.05)
    assert courier.pool.open_connections("default") == 0
    assert sink.connections == 0


async def test_silent_peer_is_given_up_by_its_phase(bed: Bed) -> None:
    sink = await bed.sink()
    settings = DeliverySettings(rcpt_timeout=0.1)
    [outcome] = await deliver(bed, sink.port, "timeout", settings=settings)
    assert (outcome.verdict, outcome.reply.detail, outcome.in_doubt) == (F, "4.2", False)
    assert "RCPT" in outcome.reply.text


async def test_silence_after_the_final_dot_is_in_doubt(bed: Bed) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer)
        await reader.read()

    port = await bed.peer(swallow)
    settings = DeliverySettings(final_dot_timeout=0.1)
    [outcome] = await deliver(bed, port, "a", settings=settings)
    assert (outcome.verdict, outcome.in_doubt, outcome.counts) == (F, True, True)


@pytest.mark.parametrize("too_many", ["452 4.5.3 too many", "552 too many", "452 too many"])
async def test_too_many_recipients_go_on_in_a_next_transaction_at_once(bed: Bed, too_many: str) -> None:
    sink = await bed.sink(Manners(max_recipients=2, too_many=too_many))
    outcomes = await deliver(bed, sink.port, "a", "b", "reject-550", "c", "d", "e")
    assert [outcome.verdict for outcome in outcomes] == [D, D, B, D, D, D]
    assert [len(received.recipients) for received in sink.messages] == [2, 2, 1]
    assert sink.connections == 1


async def test_long_body_is_read_again_for_a_next_transaction(bed: Bed) -> None:
    sink = await bed.sink(Manners(max_recipients=1))
    bodies = Bodies(b".line\r\n" * 30_000)
    outcomes = await deliver(bed, sink.port, "a", "b", bodies=bodies)
    assert [outcome.verdict for outcome in outcomes] == [D, D]
    assert [received.body == bodies.body for received in sink.messages] == [True, True]
    assert bodies.reads == 2


async def test_message_beyond_the_announced_size_is_not_sent(bed: Bed) -> None:
    sink = await bed.sink(Manners(size=10))
    [outcome] = await deliver(bed, sink.port, "a")
    assert (outcome.verdict, outcome.reply.code, outcome.reply.status) == (B, 552, "5.3.4")
    assert outcome.local
    assert not any(command.startswith("MAIL") for command in sink.commands)


@pytest.mark.parametrize(
    ("garbage", "detail"),
    [
        (b"hello\r\n" * 200, "5.0"),
        (b"250-" + b"x" * 70_000, "5.0"),
        (b"999 what\r\n" * 200, "5.0"),
        (b"\xff\xfe\r\n", "4.2"),  # and then nothing
    ],
    ids=["lines", "long", "codes", "silent"],
)
async def test_peer_that_talks_nonsense_is_a_deferral(bed: Bed, garbage: bytes, detail: str) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer, b"250 x\r\n", b"250 ok\r\n" + garbage)
        await reader.read()

    port = await bed.peer(babble)
    settings = DeliverySettings(rcpt_timeout=1.0, quit_timeout=0.2) if detail == "4.2" else None
    [outcome] = await deliver(bed, port, "a", settings=settings)
    assert (outcome.verdict, outcome.scope, outcome.reply.detail) == (F, Scope.MESSAGE, detail)


SIZES = [0, 1, 2, 65534, 65535, 65536, 65537, 131072, 200_001]
BODIES = [(b".\r\n..a\r\n\r\n.b." * (size // 13 + 1))[:size].rstrip(b"\r") + b"\r\n" for size in SIZES]


@pytest.mark.parametrize("body", [b"", *BODIES], ids=len)
async def test_body_of_any_length_is_byte_exact(bed: Bed, body: bytes) -> None:
    sink = await bed.sink()
    [outcome] = await deliver(bed, sink.port, "a", bodies=Bodies(body))
    assert outcome.verdict is D
    assert sink.messages[0].body == body


@pytest.mark.parametrize("fails_after", [0, 1, 3])
async def test_message_that_cannot_be_read_to_its_end_is_not_completed(bed: Bed, fails_after: int) -> None:
    sink = await bed.sink()
    bodies = Bodies(b"x" * 78 + b"\r\n" * 300_000, fails_after=fails_after)
    [outcome] = await deliver(bed, sink.port, "a", bodies=bodies)
    assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.LOCAL, False)
    assert outcome.in_doubt is False
    await asyncio.sleep(0.05)
    assert sink.messages == []
    assert sink.connections == (1 if fails_after else 0)


@pytest.mark.parametrize("difference", [-1, 1, 70_000])
async def test_body_that_is_not_as_long_as_the_message_is_not_completed(bed: Bed, difference: int) -> None:
    sink = await bed.sink()
    bodies = Bodies(b"x\r\n" * 50_000)
    message = make_message(bodies.body, size=len(bodies.body) + difference)
    [outcome] = await bed.courier(bodies).deliver(make_batch(message, route_to(sink.port)))
    assert (outcome.verdict, outcome.scope) == (F, Scope.LOCAL)
    await asyncio.sleep(0.05)
    assert sink.messages == []


async def test_unknown_trouble_is_a_deferral_and_is_reported(bed: Bed) -> None:
    sink = await bed.sink()
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
    message = make_message(recipients=["a\r\n@example.com"])
    courier = bed.courier()
    [outcome] = await courier.deliver(make_batch(message, route_to(sink.port)))
    assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.LOCAL, False)
    assert isinstance(faults[0], ValueError)
    await asyncio.sleep(0.02)
    assert courier.pool.open_connections("default") == 0


async def test_ehlo_name_is_the_zones_or_the_relays(bed: Bed) -> None:
    sink = await bed.sink()
    zone = replace(ZONE, ehlo_name="out.example.org")
    await bed.send(sink.port)
    await bed.send(sink.port, zone=zone)
    greetings = [command for command in sink.commands if command.startswith("EHLO")]
    assert greetings == ["EHLO relay.example.org", "EHLO out.example.org"]


def test_addresses_shown_to_people_are_all_tested() -> None:
    tested = {local for local, *_ in BEHAVIOURS} | {"slow-2s", "timeout", "anything-else"}
    tested |= {"reject-550", "defer-451"}
    assert {local for local, _ in ADDRESSES} <= tested


# ---- bodies larger than memory should be ---------------------------------------------------------


MIB = 1024 * 1024


class Endless(Bodies):
    """The same piece again and again, so that the test itself holds nothing."""

    def __init__(self, pieces: int) -> None:
        super().__init__(b".line of text!\r\n" * (CHUNK_SIZE // 16))
        self.pieces = pieces
        self.read_so_far = 0

    @property
    def size(self) -> int:
        return self.pieces * CHUNK_SIZE

    async def read(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
        for _ in range(self.pieces):
            self.read_so_far += CHUNK_SIZE
            yield self.body

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for _ in range(self.pieces):
            digest.update(self.body)
        return digest.hexdigest()


async def test_hundred_megabytes_pass_through_a_few(bed: Bed) -> None:
    sink = await bed.sink(keep_bodies=False)
    bodies = Endless(1600)
    courier = bed.courier(bodies)
    tracemalloc.start()
    try:
        [outcome] = await bed.send(sink.port, courier=courier, size=bodies.size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert outcome.verdict is Verdict.DELIVERED
    assert (sink.messages[0].size, sink.messages[0].sha256) == (bodies.size, bodies.sha256())
    assert peak < 8 * MIB  # sender and sink together


async def test_body_is_read_no_faster_than_the_peer_takes_it(bed: Bed) -> None:
    stop = asyncio.Event()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer)
        await stop.wait()

    bodies = Endless(1600)
    courier = bed.courier(bodies, settings=DeliverySettings(block_timeout=0.5, quit_timeout=0.2))
    port = await bed.peer(stall)
    tracemalloc.start()
    try:
        [outcome] = await bed.send(port, courier=courier, size=bodies.size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        stop.set()
    assert (outcome.verdict, outcome.in_doubt) == (Verdict.DEFERRED, False)
    assert "timed out" in outcome.reply.text
    assert peak < WRITE_LIMIT + 4 * MIB
    assert bodies.read_so_far < bodies.size / 2  # the kernels' buffers took some


async def test_peer_that_reads_slowly_but_steadily_is_not_given_up(bed: Bed) -> None:
    async def sip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer)
        tail = b""
        while not tail.endswith(b"\r\n.\r\n"):
            piece = await reader.read(MIB)
            if not piece:
                return
            tail = (tail + piece)[-5:]
            await asyncio.sleep(0.002)
        writer.write(b"250 taken\r\n")
        await reader.read()

    bodies = Endless(300)
    settings = DeliverySettings(block_timeout=0.3, final_dot_timeout=5.0)
    courier = bed.courier(bodies, settings=settings)
    port = await bed.peer(sip)
    [outcome] = await bed.send(port, courier=courier, size=bodies.size)
    assert outcome.verdict is Verdict.DELIVERED


# ---- who sends a message asks first whether another relay may be sending it ----------------------


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
