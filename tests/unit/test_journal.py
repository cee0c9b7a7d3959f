"""The journal of acts: what was noted comes back, what cannot be noted is said."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from zonerelay.model.address import Mailbox
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import queue_of
from zonerelay.queue.operator import journal as module
from zonerelay.queue.operator.journal import KEPT, Act, DeliverySnapshot, Journal, JournalEntry, JournalError

ACT = Act(id="0a1b2c3d", at=0.0, verb="hold")


def entry(number: int) -> JournalEntry:
    before = DeliverySnapshot(queue_of("default;bulk"), False, 1_700_000_000.123456, 3, "")
    key = DeliveryKey(queue_of("default;bulk"), MessageId(f"{number:016x}"), Mailbox("żółw@example.com"))
    return JournalEntry(key, before, before._replace(held=True, act=ACT.id))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def journal(tmp_path: Path, clock: ManualClock) -> Journal:
    return Journal(tmp_path / "acts", clock)


async def begun(journal: Journal, clock: ManualClock, act_id: str = ACT.id) -> Act:
    act = msgspec.structs.replace(ACT, id=act_id, at=clock.now())
    await journal.begin(act)
    return act


async def noted(journal: Journal, act_id: str = ACT.id) -> list[JournalEntry]:
    return [each async for piece in journal.entries(act_id) for each in piece]


async def test_what_was_noted_is_there_after_a_restart_and_a_torn_end_is_not(
    journal: Journal, clock: ManualClock, tmp_path: Path
) -> None:
    act = await begun(journal, clock)
    wanted = [entry(number) for number in range(2500)]
    for start in range(0, len(wanted), 1000):
        assert await journal.note(act.id, wanted[start : start + 1000])
    log = tmp_path / "acts" / f"{act.id}.log"
    assert log.stat().st_size < 30 * len(wanted)
    assert log.stat().st_mode & 0o077 == 0
    again = Journal(tmp_path / "acts", clock)
    assert await noted(again) == wanted
    assert (await again.find(act.id)).finished is False
    with log.open("rb+") as file:
        file.truncate(log.stat().st_size - 1)
    assert await noted(again) == wanted[:2000]
    with pytest.raises(JournalError, match="already exists"):
        await begun(again, clock)


async def test_acts_that_begin_at_the_same_moment_are_all_written(
    journal: Journal, clock: ManualClock
) -> None:
    """Each looks at all files of the journal while the drafts of others get their names."""
    ids = [f"{number:08x}" for number in range(200)]
    await asyncio.gather(*(begun(journal, clock, each) for each in ids))
    assert {each.id for each in await journal.acts()} == set(ids)


async def test_an_id_is_used_once(journal: Journal, clock: ManualClock) -> None:
    act = await begun(journal, clock)
    with pytest.raises(JournalError, match="is still running"):
        await begun(journal, clock)
    await journal.finish(msgspec.structs.replace(act, changed=3))
    with pytest.raises(JournalError, match="already exists"):
        await begun(journal, clock)
    (found,) = await journal.acts()
    assert (found.changed, found.finished) == (3, True)


@pytest.mark.parametrize("act_id", ["", "0a1b2c3", "../../etc/x", "0A1B2C3D", "0a1b2c3d\n"])
async def test_an_id_is_never_a_path(journal: Journal, clock: ManualClock, act_id: str) -> None:
    with pytest.raises(JournalError, match="is not the id of a change"):
        await begun(journal, clock, act_id)
    with pytest.raises(JournalError, match="no change"):
        await journal.find(act_id)


async def test_acts_are_kept_for_a_day(journal: Journal, clock: ManualClock, tmp_path: Path) -> None:
    act = await begun(journal, clock)
    await journal.note(act.id, [entry(1)])
    for file in (tmp_path / "acts").iterdir():
        os.utime(file, (clock.now(), clock.now()))
    clock.advance(KEPT + 1)
    with pytest.raises(JournalError, match="last 24 hours"):
        await journal.find(act.id)
    assert await journal.acts() == []
    await begun(journal, clock, "11111111")
    assert {file.stem for file in (tmp_path / "acts").iterdir()} == {"11111111"}


async def test_an_act_without_room_goes_on_and_cannot_be_undone(
    journal: Journal, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    act = await begun(journal, clock)
    assert await journal.note(act.id, [entry(1)])
    monkeypatch.setattr(module, "MAX_SIZE", 400)
    assert not await journal.note(act.id, [entry(number) for number in range(1000)])
    assert not await journal.note(act.id, [entry(2)])
    finished = await journal.finish(act)
    assert "limit" in finished.problem
    assert await noted(journal) == []
    monkeypatch.setattr(module, "MAX_ACTS", 1)
    second = await begun(journal, clock, "22222222")
    assert "1 changes" in (await journal.finish(second)).problem
    (tmp_path / "file").touch()
    nowhere = Journal(tmp_path / "file", clock)
    third = await begun(nowhere, clock)
    assert not await nowhere.note(third.id, [entry(1)])
    assert "cannot be written: " in (await nowhere.finish(third)).problem
    assert nowhere.problems()
    assert await nowhere.acts() == []
