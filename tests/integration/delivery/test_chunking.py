"""BDAT against servers that offer CHUNKING, and some that should not: what is sent, what becomes of it."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.integration.delivery.conftest import Bed, send
from tests.support.mail import TEXT, ZONE, Bodies
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import DeliverySettings, ZoneSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.reply import Scope, Verdict
from zonerelay.smtp.client.transaction import BdatFailure
from zonerelay.store.contract import CHUNK_SIZE

D, F, B = Verdict.DELIVERED, Verdict.DEFERRED, Verdict.BOUNCED
CHUNKING = Manners(chunking=True)


def bdats(commands: list[str]) -> list[str]:
    return [each for each in commands if each.startswith(("BDAT", "DATA", "RSET"))]


async def test_first_message_of_a_connection_probes_and_the_next_is_one_chunk(bed: Bed) -> None:
    sink = await bed.sink(CHUNKING)
    courier = bed.courier()
    for _ in range(3):
        [outcome] = await send(courier, sink.port)
        assert outcome.verdict is D
    whole, rest = f"BDAT {len(TEXT)} LAST", f"BDAT {len(TEXT) - 1} LAST"
    assert bdats(sink.commands) == ["BDAT 1", rest, whole, whole]
    assert [each.body for each in sink.messages] == [TEXT] * 3
    assert [each.chunks for each in sink.messages] == [2, 1, 1]
    assert sink.connections == 1


@pytest.mark.parametrize(
    ("zone", "manners", "expected"),
    [
        (replace(ZONE, chunking=False), CHUNKING, ["DATA", "DATA"]),
        (ZONE, Manners(), ["DATA", "DATA"]),
        (ZONE, Manners(chunking=True, pipelining=False), ["BDAT 1", "LAST", "LAST"]),
    ],
)
async def test_bdat_if_offered(bed: Bed, zone: ZoneSettings, manners: Manners, expected: list[str]) -> None:
    sink = await bed.sink(manners)
    courier = bed.courier()
    for _ in range(2):
        [outcome] = await send(courier, sink.port, zone=zone)
        assert outcome.verdict is D
    said = ["LAST" if each.endswith("LAST") else each for each in bdats(sink.commands)]
    assert said == expected
    assert [each.body for each in sink.messages] == [TEXT] * 2


# (local part, outcome, scope, code, in doubt, connections in all with the next message, the same when one was
# delivered before). A refusal on a connection that has delivered is asked about once more on another one.
BEHAVIOURS = [
    ("permerror", B, Scope.RECIPIENT, 550, False, 1, 2),
    ("temperror", F, Scope.RECIPIENT, 451, False, 1, 2),
    ("datacmd-451", F, Scope.MESSAGE, 451, False, 1, 2),
    ("datacmd-554", B, Scope.MESSAGE, 554, False, 1, 2),
    ("data-554", B, Scope.MESSAGE, 554, False, 2, 2),
    ("data-451", F, Scope.MESSAGE, 451, False, 2, 2),
    ("reply-421", F, Scope.MESSAGE, 421, False, 2, 3),
    ("close", F, Scope.MESSAGE, 451, False, 2, 2),
    ("close-before-dot", F, Scope.MESSAGE, 451, None, 2, 2),
    ("close-after-dot", F, Scope.MESSAGE, 451, True, 2, 2),
]


@pytest.mark.parametrize("probed", [True, False])
@pytest.mark.parametrize(("local", "verdict", "scope", "code", "in_doubt", "first", "later"), BEHAVIOURS)
async def test_failure_asked_for_by_address(
    bed: Bed,
    local: str,
    verdict: Verdict,
    scope: Scope,
    code: int,
    in_doubt: bool | None,
    first: int,
    later: int,
    probed: bool,
) -> None:
    """`None`: in doubt when the connection has taken a BDAT before, because then the first is the last."""
    sink = await bed.sink(CHUNKING)
    courier = bed.courier()
    if probed:
        await send(courier, sink.port)
    [outcome] = await send(courier, sink.port, local)
    assert (outcome.verdict, outcome.scope, outcome.reply.code) == (verdict, scope, code)
    assert outcome.in_doubt is (probed if in_doubt is None else in_doubt)
    assert len(sink.messages) == probed
    [outcome] = await send(courier, sink.port, "next")
    assert outcome.verdict is D
    assert sink.messages[-1].recipients == ("next@example.com",)
    assert sink.connections == (later if probed else first)


@pytest.mark.parametrize("pipelining", [True, False])
async def test_each_recipient_has_its_own_answer(bed: Bed, pipelining: bool) -> None:
    sink = await bed.sink(replace(CHUNKING, pipelining=pipelining))
    courier = bed.courier()
    for _ in range(2):
        outcomes = await send(courier, sink.port, "a", "reject-550", "b", "defer-450")
        assert [each.reply.code for each in outcomes] == [250, 550, 250, 450]
        outcomes = await send(courier, sink.port, "reject-550", "defer-450")
        assert [each.reply.code for each in outcomes] == [550, 450]
    assert [each.recipients for each in sink.messages] == [("a@example.com", "b@example.com")] * 2
    assert sink.connections == 2  # when all were refused, they were asked once more


SMUGGLED = b"Subject: x\r\n\r\n.\r\nMAIL FROM:<evil@x>\r\nRCPT TO:<victim@x>\r\nDATA\r\n\r\n.\r\n"


async def dotted(reader: asyncio.StreamReader) -> bytes:
    """The body after DATA, without its stuffed dots."""
    lines: list[bytes] = []
    while (line := await reader.readline()) != b".\r\n":
        if not line:
            raise EOFError
        lines.append(line.removeprefix(b"."))
    return b"".join(lines)


class Careless:
    """A server that consumes a chunk only when it has accepted a recipient (emersion/go-smtp#315).

    `lines` is everything that it ran as a command, `messages` what it accepted. `refuses` answers BDAT for an
    accepted recipient, by the number of the chunk, and then the chunk is not consumed either. It may offer
    BDAT and not know it.
    """

    def __init__(
        self, refuses: Callable[[int], bytes] = lambda number: b"", *, knows_bdat: bool = True
    ) -> None:
        self._knows_bdat = knows_bdat
        self.lines: list[bytes] = []
        self.messages: list[bytes] = []
        self._refuses = refuses

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 x\r\n")
        accepted, chunks, body = False, 0, b""
        while line := await reader.readline():
            self.lines.append(line)
            if line.startswith(b"EHLO"):
                writer.write(b"250-x\r\n250-CHUNKING\r\n250 PIPELINING\r\n")
            elif line.startswith(b"MAIL"):
                accepted, body = False, b""
                writer.write(b"250 ok\r\n")
            elif line.startswith(b"RCPT"):
                accepted = accepted or b":<no" not in line
                writer.write(b"550 no\r\n" if b":<no" in line else b"250 ok\r\n")
            elif line.startswith(b"BDAT") and self._knows_bdat:
                refusal = self._refuses(chunks) if accepted else b"503 nobody\r\n"
                chunks += 1
                if not refusal:
                    body += await reader.readexactly(int(line.split()[1]))
                    if b"LAST" in line:
                        self.messages.append(body)
                writer.write(refusal or b"250 ok\r\n")
            elif line == b"DATA\r\n":
                writer.write(b"354 go\r\n")
                self.messages.append(await dotted(reader))
                writer.write(b"250 ok\r\n")
            elif line == b"QUIT\r\n":
                writer.write(b"221 bye\r\n")
                return
            else:
                writer.write(b"250 ok\r\n" if line == b"RSET\r\n" else b"500 what\r\n")

    @property
    def from_the_body(self) -> list[bytes]:
        ours = (
            b"EHLO ",
            b"MAIL FROM:<sender@",
            b"RCPT TO:<",
            b"BDAT ",
            b"RSET\r\n",
            b"DATA\r\n",
            b"QUIT\r\n",
        )
        return [line for line in self.lines if not line.startswith(ours) or b"victim" in line]


@pytest.mark.parametrize("recipients", [1, 2])
async def test_a_server_that_does_not_know_the_bdat_it_offers_runs_no_body(bed: Bed, recipients: int) -> None:
    """It reads the octets as commands, as an old proxy that passes EHLO on would."""
    proxy, clock = Careless(knows_bdat=False), ManualClock()
    port, courier = await bed.peer(proxy), bed.courier(Bodies(SMUGGLED), clock=clock)
    names = [f"r{number}" for number in range(recipients)]
    for _ in range(2):
        outcomes = await send(courier, port, *names, body=SMUGGLED)
        assert {each.verdict for each in outcomes} == {D}
    assert [line for line in proxy.lines if line.startswith(b"BDAT")] == [b"BDAT 1\r\n"]
    assert proxy.lines.count(b"SRSET\r\n") == proxy.lines.count(b"RSET\r\n") == 1
    assert proxy.from_the_body == [b"SRSET\r\n"]
    assert sum(line.startswith(b"EHLO") for line in proxy.lines) == 1
    assert proxy.messages == [SMUGGLED] * 2
    # Another connection to the same host goes to DATA at once, until the host is forgotten.
    for bdats, passed in ((1, 0), (2, 25 * 3600)):
        courier.pool.close_idle()
        clock.advance(passed)
        await send(courier, port, body=SMUGGLED)
        assert sum(line.startswith(b"BDAT") for line in proxy.lines) == bdats


@pytest.mark.parametrize("refused", [1, 3])
@pytest.mark.parametrize("size", [0, CHUNK_SIZE])
async def test_no_octet_of_a_body_follows_refused_recipients(bed: Bed, refused: int, size: int) -> None:
    server = Careless()
    port = await bed.peer(server)
    body = SMUGGLED + b"x\r\n" * size
    courier = bed.courier(Bodies(body))
    nobody = [f"no{number}" for number in range(refused)]
    verdicts = [
        {each.verdict for each in await send(courier, port, *names, body=body)}
        for names in (["yes"], ["yes"], nobody, ["yes"])
    ]
    assert verdicts == [{D}, {D}, {B}, {D}]
    assert server.from_the_body == []
    # A server that answers DATA with 354 for nobody gets a lone dot (RFC 2920 3.1).
    assert [each for each in server.messages if each] == [body] * 3
    # In step, the connection is kept, and the refusal was asked about once more on another one.
    assert sum(line.startswith(b"EHLO") for line in server.lines) == 2


@pytest.mark.parametrize("reply", [b"452 4.3.1 disk\r\n", b"554 5.7.1 no\r\n"], ids=["452", "554"])
@pytest.mark.parametrize("size", [0, CHUNK_SIZE])
async def test_after_a_refused_chunk_left_unread_it_gets_data(bed: Bed, reply: bytes, size: int) -> None:
    """The lines of that one chunk cannot be called back; no other one follows."""
    server = Careless(lambda number: reply if number == 2 else b"")
    port = await bed.peer(server)
    body = SMUGGLED + b"x\r\n" * size
    courier = bed.courier(Bodies(body))
    verdicts = [{each.verdict for each in await send(courier, port, body=body)} for _ in range(4)]
    assert verdicts == [{D}] * 4  # it was asked about once more, on another connection
    assert [line.split()[-1] for line in server.lines if line.startswith(b"BDAT")] == (
        [b"1", b"LAST", b"LAST"] if not size else []
    )
    if not size:
        line = courier.learned(f"127.0.0.1:{port}")[-1]
        assert line.endswith((BdatFailure.REFUSED, BdatFailure.SURPLUS))


def talker(
    replies: Callable[[str, int], list[str]], taken: list[bytes], offers: str = "CHUNKING"
) -> Callable[..., Awaitable[None]]:
    """A server that answers each command with `replies(verb, number of the transaction)`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 x\r\n")
        transactions = 0
        while line := await reader.readline():
            verb = line[:4].decode()
            transactions += verb == "MAIL"
            if verb == "EHLO":
                writer.write(f"250-x\r\n250-{offers}\r\n250 PIPELINING\r\n".encode())
                continue
            if verb == "BDAT":
                taken.append(await reader.readexactly(int(line.split()[1])))
                verb = "LAST" if b"LAST" in line else verb
            said = replies(verb, transactions)
            writer.write("".join(f"{each}\r\n" for each in said).encode())
            if any(each.startswith("354") for each in said):
                taken.append(await dotted(reader))
                writer.write("".join(f"{each}\r\n" for each in replies(".", transactions)).encode())

    return serve


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("silent", [True, False])
async def test_a_host_that_is_silent_at_bdat_gets_data_for_a_day(bed: Bed, number: int, silent: bool) -> None:
    """A firewall swallows the reply to a BDAT, or the connection (jstedfast/MailKit#921)."""
    seen: Counter[str] = Counter()

    def replies(verb: str, _: int) -> list[str]:
        seen["BDAT" if verb == "LAST" else verb] += 1
        if verb in ("BDAT", "LAST") and seen["BDAT"] > number:
            if not silent:
                raise EOFError  # the connection is closed
            return []
        return ["354 go"] if verb == "DATA" else ["250 ok"]

    patience = 1.0 if silent else 60.0
    settings = DeliverySettings(data_timeout=patience, final_dot_timeout=patience, quit_timeout=0.2)
    clock = ManualClock()
    courier, port = bed.courier(settings=settings, clock=clock), await bed.peer(talker(replies, []))
    verdicts = []
    for _ in range(3):
        [outcome] = await send(courier, port)
        verdicts.append((outcome.verdict, outcome.in_doubt))
    # The first octet alone is no message: without its answer nothing is in doubt.
    lost = (F, number > 0)
    assert verdicts == ([lost, (D, False), (D, False)] if number < 2 else [(D, False), lost, (D, False)])
    assert seen["BDAT"] == number + 1
    assert seen["."] == (2 if number < 2 else 1)
    address = f"127.0.0.1:{port}"
    assert courier.learned(address) == (f"DATA is used instead of BDAT for a day: {BdatFailure.UNANSWERED}",)
    clock.advance(24 * 3600 - 1)
    courier.pool.close_idle()
    await send(courier, port)
    assert seen["BDAT"] == number + 1
    clock.advance(2)
    assert courier.learned(address) == ()


@pytest.mark.parametrize("offers", ["CHUNKING", "X-NOTHING"])
@pytest.mark.parametrize("verb", ["MAIL", "RCPT", "BDAT", "DATA", "LAST", "."])
async def test_a_surplus_reply_ends_the_connection_and_is_nobodys(bed: Bed, verb: str, offers: str) -> None:
    """The server says 250 once too often, in the second transaction of a connection, and refuses the mail."""
    taken: list[bytes] = []
    sent: list[tuple[str, int]] = []

    def replies(asked: str, number: int) -> list[str]:
        sent.append((asked, number))
        usual = "354 go" if asked == "DATA" else "250 ok"
        if number == 2:
            usual = "554 no" if asked in ("LAST", ".") else usual
            return ["250 surplus", usual] if asked == verb else [usual]
        return [usual]

    port = await bed.peer(talker(replies, taken, offers))
    courier = bed.courier()
    [first] = await send(courier, port)
    [second] = await send(courier, port)
    [third] = await send(courier, port)
    assert (first.verdict, third.verdict) == (D, D)
    if (verb, 2) in sent and verb not in ("LAST", "."):  # there the surplus comes first, and is the reply
        assert second.verdict is not D


async def test_early_replies_do_not_make_a_body_follow(bed: Bed) -> None:
    """354 comes before RCPT is answered, or for nobody; of the body nothing is sent."""
    for rcpt, data in (
        (["354 go"], ["250 ok"]),
        (["550 no"], ["354 go"]),
        (["250 ok"], ["250 what"]),
        (["250 ok"], ["451 later"]),
        (["250 ok"], ["550 no"]),
        ([], ["354 go"]),
        (["250 ok", "550 no"], ["354 go"]),
    ):
        taken: list[bytes] = []

        said = {"RCPT": rcpt, "DATA": data}
        port = await bed.peer(
            talker(lambda verb, _, said=said: said.get(verb, ["250 ok"]), taken, "X-NOTHING")  # type: ignore[misc]
        )
        courier = bed.courier(settings=DeliverySettings(data_timeout=0.3, quit_timeout=0.2))
        [outcome] = await send(courier, port)
        assert outcome.verdict is not D, (rcpt, data)
        assert not any(b"Subject" in each for each in taken), (rcpt, data)


@pytest.mark.parametrize("size", [CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 5 * CHUNK_SIZE + 7])
@pytest.mark.parametrize("piece_size", [CHUNK_SIZE, 1000])
async def test_bodies_arrive_unchanged_and_small_ones_with_bdat(bed: Bed, size: int, piece_size: int) -> None:
    sink = await bed.sink(CHUNKING)
    body = (b".line\r\n..\r\n.\r\n\r\n" * size)[: size - 2] + b"\r\n"
    body = body.replace(b"\r\r\n", b"x\r\n")
    bodies = Bodies(body, piece_size=piece_size)
    courier = bed.courier(bodies)
    for _ in range(2):
        [outcome] = await send(courier, sink.port, body=body)
        assert outcome.verdict is D
    assert [each.sha256 for each in sink.messages] == [hashlib.sha256(body).hexdigest()] * 2
    assert [each.chunks for each in sink.messages] == ([2, 1] if size <= piece_size else [0, 0])
    assert sink.connections == 1


async def test_a_body_without_a_last_line_end_gets_one(bed: Bed) -> None:
    sink = await bed.sink(CHUNKING)
    for body, sent in ((b"a\r\nb", b"a\r\nb\r\n"), (b"x", b"x\r\n"), (b"a\nb\rc", b"a\r\nb c\r\n")):
        courier = bed.courier(Bodies(body))
        for _ in range(2):
            await send(courier, sink.port, body=body)
            assert sink.messages[-1].body == sent
            assert sink.messages[-1].chunks > 0


async def test_a_body_that_begins_with_a_line_end_goes_with_data(bed: Bed) -> None:
    sink = await bed.sink(CHUNKING)
    body = b"\r\nno header\r\n"
    await send(bed.courier(Bodies(body)), sink.port, body=body)
    assert sink.messages[0].body == body
    assert sink.messages[0].chunks == 0


@pytest.mark.parametrize("at", ["BDAT", "LAST"])
async def test_a_message_may_be_cancelled_at_any_time(bed: Bed, at: str) -> None:
    reached = asyncio.Event()

    def replies(verb: str, _: int) -> list[str]:
        if verb == at:
            reached.set()
            return []
        return ["250 ok"]

    bodies = Bodies()
    courier = bed.courier(bodies)
    task = asyncio.ensure_future(send(courier, await bed.peer(talker(replies, []))))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bodies.open_now == 0
    await asyncio.sleep(0.01)
    assert courier.pool.open_connections("default") == 0
