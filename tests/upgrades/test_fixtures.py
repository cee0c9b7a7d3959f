"""What older releases have stored is read by this one, octet by octet, and leaves the queue."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from tests.store.spools import Spool
from tests.upgrades import fixtures, mail
from tests.upgrades.engines import ENGINES, REFUSED
from zonerelay.config.settings import Settings
from zonerelay.store.check import CheckOptions, Findings
from zonerelay.store.contract import Finish, KeptKeys, Store
from zonerelay.store.offline import check_spool


@pytest.fixture(params=fixtures.stored(), ids="-".join)
def fixture(request: pytest.FixtureRequest) -> tuple[str, str]:
    named: tuple[str, str] = request.param
    return named


@pytest.fixture
def spool(fixture: tuple[str, str], tmp_path: Path) -> Spool:
    name, engine = fixture
    raw = (fixtures.DIRECTORY / name / ENGINES[engine].file).read_bytes()
    return ENGINES[engine].unpack(raw, tmp_path)


def test_every_engine_was_written_by_its_first_revision_and_by_the_newest_release() -> None:
    written = fixtures.stored()
    newest = fixtures.newest().name
    for engine in ENGINES:
        assert (newest, engine) in written
        if engine not in REFUSED:
            assert any(name != newest and engine == other for name, other in written), engine


async def test_every_message_is_as_it_was_written_and_leaves(fixture: tuple[str, str], spool: Spool) -> None:
    expected = fixtures.expected(fixture[0])
    async with spool:
        found = await mail.read_queue(spool.store)
        assert found.keys() == expected.keys()
        assert mail.lacking(expected, found) == []
        before = sum(len(each["deliveries"]) for each in expected.values())
        events = [
            each for each in found.values() if each["message"]["envelope"]["origin"]["protocol"] == "webhook"
        ]
        assert sum(counts.total for counts in spool.store.counts().values()) == before - len(events)
        assert (spool.store.last_message_id() or "") >= max(expected)
        if fixtures.age(fixture[0]) >= (0, 2, 0):
            kept = {identity: (each.message_id, each.digest) for identity, each in await _keys(spool.store)}
            assert kept == {identity: (each.message_id, each.digest) for identity, each in mail.KEYS}
    # What a crash right after the upgrade would find is the same.
    async with spool:
        assert await mail.read_queue(spool.store) == found
        assert await _sent(spool.store) == before
        assert await spool.store.queues() == set()
        assert await mail.read_queue(spool.store) == {}
    assert spool.damage == []


async def _keys(store: Store) -> KeptKeys:
    keys, cursor = await store.kept_keys()
    return keys if not cursor else [*keys, *(await store.kept_keys(cursor))[0]]


async def _sent(store: Store) -> int:
    """Hands out everything that may be sent, when it is due, and settles it. Counts deliveries."""
    held = [delivery.key async for delivery in store.scan() if delivery.held]
    await store.update(held, lambda delivery: structs.replace(delivery, held=False))
    sent = 0
    for zone in sorted(await store.queues()):
        while claimed := [
            *await store.claim(zone, 100, now=mail.NOW + 10 * 86400),
            *await store.claim(zone, 100, now=mail.NOW + 10 * 86400, domain=mail.FULL),
        ]:
            await store.settle([Finish(delivery) for delivery in claimed])
            sent += len(claimed)
    return sent


async def test_a_check_finds_nothing(fixture: tuple[str, str], spool: Spool, tmp_path: Path) -> None:
    findings = Findings()
    options = CheckOptions(tmp_path / "scratch", findings, lambda *_: None, {})
    await check_spool(Settings(spool=spool.settings), 0, options)
    assert findings.kept == []
