"""Sources in a running relay: rotation on the retry, what the operator is told, a reload."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.dns import FakeDns
from tests.support.guard import BLOCKED, Guard
from tests.support.relay import LOOPBACK, relay_with, settings
from tests.support.sink import Sink
from zonerelay.cli.operate.offline import explanation
from zonerelay.config.settings import RouteSettings, Settings, SourceSettings, SourceUnit, ZoneSettings
from zonerelay.operations.requests import Explain

MESSAGE = b"From: app@example.org\r\nSubject: x\r\n\r\nhello\r\n"
TWO = SourceSettings(name="two", address=("127.0.0.2",), ehlo_name="two.example.org", weight=2)
THREE = SourceSettings(name="three", address=("127.0.0.3", "::1"))
LOST = SourceSettings(name="lost", address=("198.51.100.1",))


def with_sources(directory: Path, port: int, *sources: SourceSettings, **zone: object) -> Settings:
    names = tuple(each.name for each in sources)
    chosen = ZoneSettings(next_hop=f"{LOOPBACK}:{port}", sources=names, **zone)  # type: ignore[arg-type]  # options
    return settings(directory, zone=chosen, source=sources)


@pytest.fixture
async def guard() -> AsyncIterator[Guard]:
    async with Guard(["127.0.0.2"], f"554 5.7.1 {BLOCKED}", "RCPT") as guard:
        yield guard


async def test_refusals_are_in_explain_and_status(tmp_path: Path, guard: Guard) -> None:
    chosen = with_sources(tmp_path, guard.port, TWO, THREE)
    async with relay_with(chosen) as running:
        before = await running.explain()
        assert [(each.name, each.share, each.chosen, each.refused_until) for each in before.sources] == [
            ("two", 0.6667, None, None),
            ("three", 0.3333, None, None),
        ]
        assert before.ehlo_name == "two.example.org, relay.test"
        assert before.hosts[0].addresses[0].source == "127.0.0.2, 127.0.0.3"
        for number in range(8):
            await running.send("app@example.org", [f"user{number}@example.com"], MESSAGE)
        await running.until_logged("source-refused")
        until = running.log.named("source-refused")[0]["until"]
        after = await running.explain()
        assert after.sources[0].refused_until == pytest.approx(until, abs=0.1)
        assert after.sources[0].refused_reply == f"554 5.7.1 {BLOCKED}"
        assert after.sources[1].refused_until is None
        [penalty] = (await running.status()).source_penalties
        assert (penalty.source, penalty.destination) == ("two", f"{LOOPBACK}:{guard.port}")
        await running.until_empty()


async def test_explain_knows_a_senders_source(tmp_path: Path, sink: Sink) -> None:
    by_sender = with_sources(tmp_path, sink.port, TWO, THREE, source_by=SourceUnit.SENDER)
    async with relay_with(by_sender) as running:
        for sender in ("ann@example.org", "bob@example.org", "eve@example.org", "joe@example.org"):
            found = await running.explain(sender=sender)
            [chosen] = [each for each in found.sources if each.chosen]
            assert found.ehlo_name == chosen.ehlo_name
            await running.send(sender, ["x@example.com"], MESSAGE)
            await running.until_empty()
            assert sink.messages[-1].mail_from == sender
            assert sink.messages[-1].peer.startswith(f"{found.hosts[0].addresses[0].source}:")
        unknown = await running.explain()
        assert {each.chosen for each in unknown.sources} == {None}


async def test_explain_without_a_relay_says_the_same(tmp_path: Path) -> None:
    chosen = with_sources(tmp_path, 25, TWO, THREE, LOST, source_by=SourceUnit.SENDER)
    async with FakeDns({}) as dns:
        found = await explanation(
            replace(chosen, dns=replace(chosen.dns, servers=(dns.address,))),
            Explain(address="ann@example.com", sender="ann@example.org"),
        )
    assert sum(bool(each.chosen) for each in found.sources) == 1
    assert [each.absent for each in found.sources] == [(), (), LOST.address]
    assert [each.share for each in found.sources] == [0.5, 0.25, 0.25]


async def test_sources_change_live(tmp_path: Path, sink: Sink) -> None:
    first = with_sources(tmp_path, sink.port, TWO)
    async with relay_with(first) as running:
        await running.send("app@example.org", ["ann@example.com"], MESSAGE)
        await running.until_logged("delivered", 1)
        second = with_sources(tmp_path, sink.port, replace(TWO, ehlo_name="new.example.org"), THREE)
        await running.worker.reload(second)
        for number in range(20):
            await running.send("app@example.org", [f"user{number}@example.com"], MESSAGE)
        await running.until_logged("delivered", 21)
        assert {each.peer.partition(":")[0] for each in sink.messages} == {"127.0.0.2", "127.0.0.3"}
        said = [command.partition(" ")[2] for command in sink.commands if command.startswith("EHLO")]
        assert said[0] == "two.example.org"
        assert set(said[1:]) == {"new.example.org", "relay.test"}
        await running.worker.reload(with_sources(tmp_path, sink.port))
        await running.send("app@example.org", ["ann@example.com"], MESSAGE)
        await running.until_logged("delivered", 22)
        assert sink.messages[-1].peer.startswith(f"{LOOPBACK}:")


async def test_a_reload_with_an_unusable_route_leaves_the_sources_as_well(tmp_path: Path, sink: Sink) -> None:
    """Half of it would leave a zone with sources that nobody knows any more, and its mail would wait."""
    first = with_sources(tmp_path, sink.port, TWO)
    async with relay_with(first) as running:
        bad = RouteSettings(zone="default", recipient=("-.example",))
        await running.worker.reload(replace(with_sources(tmp_path, sink.port, THREE), route=(bad,)))
        assert len(running.log.named("reload-refused")) == 1
        await running.send("app@example.org", ["ann@example.com"], MESSAGE)
        await running.until_empty()
    assert [message.peer.partition(":")[0] for message in sink.messages] == ["127.0.0.2"]
