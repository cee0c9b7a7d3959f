"""A relay and next hops whose replies are missing, doubled or hidden among other lines."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tests.support.peer import Handler, Peer
from tests.support.relay import LOOPBACK, QUICK, Running, relay_with, settings
from zonerelay.cli.main import main
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.operations.answers import AddressPlan, Explanation, HostPlan
from zonerelay.operations.catalogue import BY_REQUEST
from zonerelay.operations.requests import Explain
from zonerelay.smtp.client.transaction import BdatFailure
from zonerelay.supervisor.merge.merging import combined

MESSAGE = b"Subject: hello\r\n\r\nhello\r\n"


@asynccontextmanager
async def sending_to(
    handler: Handler, directory: Path, retry: RetrySettings = QUICK
) -> AsyncIterator[Running]:
    """A relay whose next hop does what the coroutine does."""
    async with Peer(handler) as peer:
        zone = ZoneSettings(next_hop=f"{LOOPBACK}:{peer.port}")
        async with relay_with(settings(directory, zone=zone, retry=retry)) as running:
            yield running


async def test_a_host_that_swallows_bdat_gets_data_at_the_next_attempt_and_explain_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 x\r\n")
        while line := await reader.readline():
            verb = line[:4].decode()
            commands.append(verb)
            if verb == "EHLO":
                writer.write(b"250-x\r\n250-CHUNKING\r\n250 PIPELINING\r\n")
            elif verb == "BDAT":
                return
            elif verb == "DATA":
                writer.write(b"354 go\r\n")
                await reader.readuntil(b"\r\n.\r\n")
                writer.write(b"250 ok\r\n")
            else:
                writer.write(b"250 ok\r\n")

    async with sending_to(serve, tmp_path) as running:
        for _ in range(2):
            await running.send("app@example.org", ["b@example.com"], MESSAGE)
            await running.until_empty()
        assert len(running.log.named("deferred")) == 1
        assert not running.log.named("deferred")[0].get("in_doubt")
        found = await running.explain()
        config = tmp_path / "relay.toml"
        config.write_text(f'[admin]\nsocket = "{tmp_path}/control.sock"\n')
        assert await asyncio.to_thread(main, ["explain", "b@example.com", "--config", str(config)]) == 0
    words = f"127.0.0.1: DATA is used instead of BDAT for a day: {BdatFailure.UNANSWERED}"
    assert words in " ".join(capsys.readouterr().out.split())
    assert commands.count("BDAT") == 1
    assert any(BdatFailure.UNANSWERED in line for line in found.hosts[0].addresses[0].learned)


EXPLAINED = Explanation(
    address="b@example.com", sender="", domain="example.com", zone="default", rule=0, reason="", next_hop="",
    route="example.com", hosts=(), unroutable="", verdict="", tls="opportunistic", ehlo_name="x", limits={},
)  # fmt: skip


def test_what_one_worker_has_met_is_in_the_explanation_of_all() -> None:
    def host(name: str, *faults: str) -> HostPlan:
        plans = (AddressPlan(address=f"192.0.2.{n}", learned=tuple(each)) for n, each in enumerate(faults))
        return HostPlan(name=name, port=25, preference=0, addresses=tuple(plans))

    whole = msgspec.structs.replace(
        EXPLAINED, suspended_until=5.0, hosts=(host("a", "", "xy"), host("b", ""))
    )
    other = msgspec.structs.replace(EXPLAINED, hosts=(host("a", "y", "yz"), host("b", "")))
    [found] = combined(
        [other, whole], BY_REQUEST[Explain].merge, Explain(address="b@example.com"), shared=False
    )
    assert found.hosts == (host("a", "y", "yzx"), host("b", ""))
    assert found.suspended_until == 5.0


JUNK = [b"\r\n", b"hello\r\n", b"\n\0\r\n* spam filter *\r\n", b"\r\n" * 20, b"x" * 9000 + b"\r\n"]


def chatty(junk: bytes, taken: list[bytes], *, behind: bool = False, offers: bytes = b"") -> Handler:
    """A server with `junk` in front of each line of each reply, or behind it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(*lines: bytes) -> None:
            writer.write(
                b"".join(line + b"\r\n" + junk if behind else junk + line + b"\r\n" for line in lines)
            )

        say(b"220-x", b"220 y")
        while line := await reader.readline():
            verb = line[:4]
            if verb == b"EHLO":
                say(b"250-x", *(b"250-" + each for each in offers.split()), b"250 SIZE 100000")
            elif verb == b"DATA":
                say(b"354 go")
                taken.append(await reader.readuntil(b"\r\n.\r\n"))
                say(b"250-taken", b"250 really")
            elif verb == b"BDAT":
                taken.append(await reader.readexactly(int(line.split()[1])))
                say(b"250-taken", b"250 really")
            else:
                say(b"250 ok")

    return serve


@pytest.mark.parametrize("offers", [b"", b"PIPELINING", b"PIPELINING CHUNKING"], ids=["", "pipe", "bdat"])
@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
async def test_lines_without_a_code_are_skipped_and_the_message_is_sent_once(
    tmp_path: Path, junk: bytes, behind: bool, offers: bytes
) -> None:
    taken: list[bytes] = []
    async with sending_to(chatty(junk, taken, behind=behind, offers=offers), tmp_path) as running:
        for _ in range(2):
            await running.send("app@example.org", ["b@example.com"], MESSAGE)
            await running.until_empty()
        assert [each["reply"] for each in running.log.named("delivered")] == ["250 taken really"] * 2
        assert not running.log.named("deferred")
        [odd] = running.log.named("reply-without-code")
        assert odd["host"] == LOOPBACK
    assert b"".join(taken).count(b"Subject: hello") == 2


async def test_junk_in_place_of_the_reply_to_rcpt_bounces_nothing(tmp_path: Path) -> None:
    """The reply to DATA is not the one to RCPT that it seems to be."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 x\r\n")
        while line := await reader.readline():
            if line.startswith(b"EHLO"):
                writer.write(b"250-x\r\n250 PIPELINING\r\n")
            elif line.startswith(b"RCPT"):
                writer.write(b"what\r\n")
            elif line == b"DATA\r\n":
                writer.write(b"554 no valid recipients\r\n")
                writer.close()
            else:
                writer.write(b"250 ok\r\n")

    async with sending_to(serve, tmp_path) as running:
        await running.send("app@example.org", ["b@example.com"], MESSAGE)
        [deferred] = await running.until_logged("deferred")
        assert "connection lost" in str(deferred["reply"])
        assert not running.log.named("bounced")


async def test_too_much_junk_after_the_final_dot_is_in_doubt_and_waits_its_turn(tmp_path: Path) -> None:
    taken: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 x\r\n")
        while line := await reader.readline():
            if line == b"DATA\r\n":
                writer.write(b"354 go\r\n")
                taken.append(await reader.readuntil(b"\r\n.\r\n"))
                writer.write(b"what\r\n" * 200)
            else:
                writer.write(b"250 ok\r\n")

    retry = RetrySettings(schedule=(600.0,), jitter=0.0)
    async with sending_to(serve, tmp_path, retry) as running:
        began = time.time()
        await running.send("app@example.org", ["b@example.com"], MESSAGE)
        [deferred] = await running.until_logged("deferred")
        # Another message is no reason to try the first one again.
        await running.send("app@example.org", ["b@example.com"], MESSAGE)
        await running.until_logged("deferred", 2)
    assert len(taken) == 2
    assert deferred["in_doubt"]
    assert float(str(deferred["next_attempt"])) >= began + 590
    assert deferred["reply"] == (
        "451 4.5.0 more than 100 lines are not replies; the first is: "
        "what (during the reply to the final dot)"
    )


@pytest.mark.parametrize("at", ["greeting", "EHLO"])
async def test_a_report_says_in_words_what_a_host_sent_instead_of_a_reply(tmp_path: Path, at: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"(\\'junk\\')\r\n" * 200 if at == "greeting" else b"220 x\r\n")
        await reader.readline()
        writer.write(b"(\\'junk\\')\r\n" * 200)
        await reader.read()

    async with sending_to(serve, tmp_path) as running:
        await running.send("app@example.org", ["b@example.com"], MESSAGE)
        deferred = (await running.until_logged("deferred"))[0]
    where = "the greeting" if at == "greeting" else "EHLO"
    assert deferred["reply"] == (
        f"451 4.4.2 {running.worker.settings.zone[0].next_hop} failed at {where}: "
        "more than 100 lines are not replies; the first is: (\\'junk\\')"
    )
