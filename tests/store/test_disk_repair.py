"""What a check of a disk queue finds, what a repair makes of it, and what a snapshot of a busy one holds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.store.builders import NOW, body_of, message_id, own_message, store_message
from tests.store.spools import Spool
from tests.store.test_spool_check import checked, mixed, state_of
from zonerelay.config.settings import Backend, Settings
from zonerelay.model.queue_name import queue_of
from zonerelay.store.check import Fault, Repaired, Salvaged
from zonerelay.store.contract import CHUNK_SIZE, Finish, StoreOpenError, Submit
from zonerelay.store.disk.snapshot import take_snapshot
from zonerelay.store.offline import repair_spool, snapshot_spool

REPORT = b"Subject: report\r\n\r\n"

APART = {
    "one directory": (),
    "apart": ("env_directory", "meta_directory", "scratch_directory"),
}


@pytest.fixture(params=APART)
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Spool:
    places = {name: tmp_path / name for name in APART[request.param]}
    return Spool(tmp_path / "spool", backend=Backend.DISK, places=places)


def env(queue: Spool, number: int) -> Path:
    return (queue.settings.env_directory or queue.settings.path) / f"{message_id(number)}.env"


def meta(queue: Spool, number: int) -> Path:
    return (queue.settings.meta_directory or queue.settings.path) / f"{message_id(number)}.meta"


def flip(path: Path, at: int) -> None:
    octets = bytearray(path.read_bytes())
    octets[at] ^= 0xFF
    path.write_bytes(octets)


def make_old(path: Path) -> None:
    os.utime(path, (NOW, NOW))


def alone(queue: Spool) -> None:
    env(queue, 3).unlink()
    make_old(meta(queue, 3))


Damage = Callable[[Spool], object]

CASES: dict[str, tuple[Damage, dict[Fault, int], set[int], set[int]]] = {
    # What is found, which messages are in the salvage, and which are sent to more recipients than before.
    "a body": (lambda q: flip(env(q, 1), CHUNK_SIZE), {Fault.UNREADABLE: 1}, {1}, set()),
    "a beginning": (lambda q: flip(env(q, 1), 3), {Fault.UNREADABLE: 1}, {1}, set()),
    "an end": (lambda q: flip(env(q, 1), -5), {Fault.UNREADABLE: 1}, {1}, set()),
    "a message cut off": (lambda q: os.truncate(env(q, 1), 70_000), {Fault.UNREADABLE: 1}, {1}, set()),
    "an empty message": (lambda q: os.truncate(env(q, 3), 0), {Fault.UNREADABLE: 1}, {3}, set()),
    "an empty state": (lambda q: os.truncate(meta(q, 4), 0), {Fault.UNREADABLE: 1}, set(), {4}),
    "a state cut off": (lambda q: os.truncate(meta(q, 4), 500), {Fault.UNREADABLE: 1}, set(), {4}),
    "no state": (lambda q: meta(q, 4).unlink(), {Fault.MESSAGE_ALONE: 1}, set(), {4}),
    "a state of nothing": (
        lambda q: meta(q, 4).write_text('{"deliveries":[]}'),
        {Fault.MESSAGE_ALONE: 1},
        set(),
        {4},
    ),
    "a state alone": (alone, {Fault.STRAY_FILE: 1}, {3}, set()),
    "a strange file": (lambda q: env(q, 1).with_name("core").touch(), {Fault.STRAY_FILE: 1}, set(), set()),
}


async def deliveries_in(spool: Spool) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    async for each in spool.store.scan():
        found.setdefault(int(each.message_id, 16), set()).add(each.recipient)
    return found


async def repaired(
    queue: Spool, *, carry_out: bool = True
) -> tuple[Repaired, dict[int, Salvaged], dict[int, bytes]]:
    aside: dict[int, Salvaged] = {}
    bodies: dict[int, bytes] = {}

    def salvage(salvaged: Salvaged) -> None:
        number = int(salvaged.message_id, 16)
        aside[number], bodies[number] = salvaged, b"".join(salvaged.body())

    done = await repair_spool(
        Settings(spool=queue.settings),
        0,
        salvage,
        lambda done, total: None,
        carry_out=carry_out,
        environment={},
    )
    return done, aside, bodies


@pytest.mark.parametrize("name", CASES)
async def test_each_damage_is_found_and_mended(queue: Spool, tmp_path: Path, name: str) -> None:
    async with queue:
        await mixed(queue.store)
        stored = await deliveries_in(queue)
        bodies = {number: await body_of(queue.store, message_id(number)) for number in stored}
    damage, found, aside, again = CASES[name]
    damage(queue)
    before = state_of(tmp_path)
    _, findings = await checked(queue, tmp_path)
    assert findings.counts == found
    looked, would_be_aside, _ = await repaired(queue, carry_out=False)
    assert looked.kept == ""
    assert would_be_aside.keys() == aside
    assert state_of(tmp_path) == before
    done, salvaged, octets = await repaired(queue)
    assert msgspec.structs.replace(done, kept="") == looked
    assert salvaged.keys() == aside
    assert len(done.lost) == len(aside)
    assert len(done.repeats) == len(again)
    for number in aside:
        assert message_id(number) in done.lost[0]
        assert not salvaged[number].is_whole or octets[number] == bodies[number]
    if done.kept:
        kept = {path.name: path.read_bytes() for path in Path(done.kept).iterdir()}
        assert kept.items() <= {path.name: content for path, (_, _, content) in before.items()}.items()
    _, findings = await checked(queue, tmp_path)
    assert not findings.is_damaged
    async with queue:
        there = await deliveries_in(queue)
        assert done.after == sum(map(len, there.values()))
        assert there.keys() == stored.keys() - aside
        for number, recipients in there.items():
            assert recipients >= stored[number]
            assert recipients == stored[number] or number in again
            assert await body_of(queue.store, message_id(number)) == bodies[number]


async def test_what_is_left_of_a_state_is_believed(tmp_path: Path) -> None:
    """Of the recipients whose records are cut off it is not known whether they have the message."""
    queue = Spool(tmp_path / "spool", backend=Backend.DISK)
    async with queue:
        await mixed(queue.store)
    os.truncate(meta(queue, 4), 500)
    await repaired(queue)
    async with queue:
        found = [each async for each in queue.store.scan() if each.message_id == message_id(4)]
    # The first four had left; the next ones can be read in the state as they were.
    assert {each.recipient for each in found} == {f"e{number}@late.example" for number in range(10)}
    (five,) = [each for each in found if each.recipient.startswith("e5")]
    assert five.next_attempt == NOW + 60


async def test_a_body_that_is_whole_behind_a_damaged_beginning_is_whole_in_the_salvage(
    tmp_path: Path,
) -> None:
    queue = Spool(tmp_path / "spool", backend=Backend.DISK)
    async with queue:
        await store_message(queue.store, 1, "a@example.net", "b@example.net")
    flip(env(queue, 1), 3)
    _, aside, _ = await repaired(queue)
    assert aside[1].is_whole
    assert aside[1].message is not None
    assert {each.recipient for each in aside[1].deliveries} == {"a@example.net", "b@example.net"}


async def test_an_intent_that_cannot_be_read_gives_up_what_is_in_scratch(tmp_path: Path) -> None:
    queue = Spool(tmp_path / "spool", backend=Backend.DISK)
    async with queue:
        await store_message(queue.store, 1)
        await store_message(queue.store, 2)
    env(queue, 2).rename(tmp_path / "spool" / "scratch" / env(queue, 2).name)
    meta(queue, 2).unlink()
    intent = tmp_path / "spool" / "7.intent"
    intent.write_text("{")
    _, findings = await checked(queue, tmp_path)
    assert findings.counts == {Fault.UNREADABLE: 1}
    done, aside, octets = await repaired(queue)
    assert aside[2].is_whole
    assert octets[2] == b"Subject: x\r\n\r\nhello\r\n"
    assert sorted(path.name for path in Path(done.kept).iterdir()) == [
        "7.intent",
        f"scratch-{message_id(2)}.env",
    ]
    assert not (await checked(queue, tmp_path))[1].counts


async def test_a_queue_in_use_is_not_repaired_and_other_queues_are_told(queue: Spool, tmp_path: Path) -> None:
    async with queue:
        with pytest.raises(StoreOpenError, match="another zonerelay has"):
            await repaired(queue)
    if queue.settings.meta_directory is not None:
        (queue.settings.meta_directory / "zonerelay.lock").write_text("zonerelay queue 1 other\n")
        _, findings = await checked(queue, tmp_path)
        assert findings.counts == {Fault.BAD_RECORD: 1}


async def test_a_snapshot_of_a_busy_queue_has_all_that_was_taken_or_its_report(
    queue: Spool, tmp_path: Path
) -> None:
    async with queue:
        for number in range(1, 61):
            await store_message(queue.store, number)
        done = False

        async def settle() -> int:
            """Each delivery leaves with a report, in one step."""
            left = 0
            while not done and (claimed := await queue.store.claim(queue_of("default"), 1, now=NOW)):
                number = int(claimed[0].message_id, 16)
                if number < 1000:
                    message, report = own_message(message_id(1000 + number), REPORT, "sender@example.org")
                    await queue.store.settle([Finish(claimed[0]), Submit(message, REPORT, (report,))])
                    left += 1
            return left

        settling = asyncio.create_task(settle())
        await asyncio.sleep(0)
        copies = []
        for number in range(6):
            place = tmp_path / f"copy{number}"
            copies.append(await snapshot_spool(Settings(spool=queue.settings), 0, place))
        done = True
        assert await settling
    seen = []
    for copy in copies:
        async with Spool(copy.path, backend=Backend.DISK) as opened:
            there = await deliveries_in(opened)
        for number in range(1, 61):
            assert number in there or 1000 + number in there, number
        seen.append(sum(number > 1000 for number in there))
    assert seen == sorted(seen)


async def test_a_snapshot_changes_nothing_and_a_failed_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Spool(tmp_path / "spool", backend=Backend.DISK)
    async with queue:
        await mixed(queue.store)
    before = state_of(tmp_path / "spool")
    copy = take_snapshot(queue.settings, tmp_path / "copy")
    async with Spool(copy.path, backend=Backend.DISK) as opened:
        await opened.store.settle([Finish(each) async for each in opened.store.scan()])
    assert state_of(tmp_path / "spool") == before

    def fails(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "link", fails)
    with pytest.raises(PermissionError):
        take_snapshot(queue.settings, tmp_path / "other")
    assert not (tmp_path / "other").exists()
