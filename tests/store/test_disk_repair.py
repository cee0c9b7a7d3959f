"""What a check of a disk queue finds, what a repair makes of it, and what a view of one has."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.store.builders import body_of, flip, message_id
from tests.store.spools import Spool
from tests.store.test_spool_check import checked, mixed, repaired, state_of
from zonerelay.config.settings import Backend
from zonerelay.store.check import DamageKind
from zonerelay.store.contract import CHUNK_SIZE, QueueView, StoreError, StoreOpenError
from zonerelay.store.objects.engine import ObjectEngine
from zonerelay.store.offline import opened_engine, view_spool
from zonerelay.store.spool_paths import disk_directories

APART = {"one directory": (), "apart": ("env_directory", "meta_directory", "scratch_directory")}


@pytest.fixture(params=APART)
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Spool:
    places = {name: tmp_path / name for name in APART[request.param]}
    return Spool(tmp_path / "spool", backend=Backend.DISK, places=places)


def body(queue: Spool, number: int) -> Path:
    (found,) = disk_directories(queue.settings)[0].glob(f"message-{message_id(number)}-*")
    return found


def entry(queue: Spool, slot: int) -> Path:
    return disk_directories(queue.settings)[1] / "nodes/0/log" / f"{slot:016d}"


def state(queue: Spool) -> list[object]:
    return [state_of(path) for path in disk_directories(queue.settings)]


def lose_entry(queue: Spool, slot: int) -> None:
    """Nothing else on this machine knows what it said."""
    entry(queue, slot).unlink()
    shutil.rmtree(disk_directories(queue.settings)[2])


def damage_entry(queue: Spool, slot: int) -> None:
    flip(entry(queue, slot), 30)
    shutil.rmtree(disk_directories(queue.settings)[2])


Damage = Callable[[Spool], object]

CASES: dict[str, tuple[Damage, dict[DamageKind, int], set[int], set[int]]] = {
    # What is found, which messages are in the salvage, and which are lost.
    "a body": (lambda q: flip(body(q, 1), CHUNK_SIZE), {DamageKind.UNREADABLE: 1}, {1}, set()),
    "no body": (lambda q: body(q, 3).unlink(), {DamageKind.UNREADABLE: 1}, {3}, set()),
    "a strange file": (
        lambda q: body(q, 1).with_name("core").touch(),
        {DamageKind.STRAY_FILE: 1},
        set(),
        set(),
    ),
    "an entry of the log": (lambda q: damage_entry(q, 3), {DamageKind.UNREADABLE: 1}, set(), {1}),
    "a gap in the log": (lambda q: lose_entry(q, 3), {DamageKind.UNREADABLE: 1}, set(), {1}),
}


async def deliveries_in(store: QueueView) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    async for each in store.scan():
        found.setdefault(int(each.message_id, 16), set()).add(each.recipient)
    return found


async def judge(queue: Spool, tmp_path: Path, stored: dict[int, set[str]]) -> None:
    """A new index finds no damage, and exactly these deliveries."""
    shutil.rmtree(disk_directories(queue.settings)[2])
    _, findings = await checked(queue, tmp_path)
    assert not findings.is_damaged
    async with queue:
        assert await deliveries_in(queue.store) == stored


@pytest.mark.parametrize("name", CASES)
async def test_each_damage_is_found_and_mended(queue: Spool, tmp_path: Path, name: str) -> None:
    async with queue:
        await mixed(queue.store)
        stored = await deliveries_in(queue.store)
        bodies = {number: await body_of(queue.store, message_id(number)) for number in stored}
    damage, found, aside, lost = CASES[name]
    damage(queue)
    (disk_directories(queue.settings)[2]).mkdir(exist_ok=True)
    (disk_directories(queue.settings)[2] / "zonerelay.lock").touch()
    before = state(queue)
    _, findings = await checked(queue, tmp_path)
    assert findings.counts == found
    looked, _ = await repaired(queue, carry_out=False)
    assert (looked.kept, looked.salvaged) == ([], len(aside))
    assert state(queue) == before
    done, found_aside = await repaired(queue)
    salvaged = {int(each, 16): found for each, found in found_aside.items()}
    assert msgspec.structs.replace(done, kept=[]) == looked
    assert salvaged.keys() == aside
    assert len(done.lost) == len(aside) + len(lost)
    for number in aside:
        assert message_id(number) in done.lost[0]
        message, octets = salvaged[number]
        assert not message.is_whole or octets == bodies[number]
    left = {number: stored[number] for number in stored.keys() - aside - lost}
    await judge(queue, tmp_path, left)
    assert done.after == sum(map(len, left.values()))
    async with queue:
        for number in left:
            assert await body_of(queue.store, message_id(number)) == bodies[number]


async def test_a_mark_that_is_no_text_is_found(queue: Spool, tmp_path: Path) -> None:
    async with queue:
        await mixed(queue.store)
    mark = disk_directories(queue.settings)[1] / "mark"
    mark.write_bytes(b"\xb1" + mark.read_bytes()[1:])
    _, findings = await checked(queue, tmp_path)
    assert findings.counts == {DamageKind.UNREADABLE: 1}
    with pytest.raises(StoreError):
        await repaired(queue)


async def test_a_directory_that_names_another_queue_is_found(queue: Spool, tmp_path: Path) -> None:
    async with queue:
        await mixed(queue.store)
    env, meta, _ = disk_directories(queue.settings)
    mark = env / "zonerelay.lock"
    mark.write_bytes(mark.read_bytes()[:-3] + b"xx\n")
    _, findings = await checked(queue, tmp_path)
    assert findings.counts == ({DamageKind.UNREADABLE: 1} if env != meta else {})
    if env != meta:
        with pytest.raises(StoreOpenError, match="belong to different queues"):
            await repaired(queue)


async def test_an_entry_of_the_log_that_only_the_index_still_has_is_written_again(
    queue: Spool, tmp_path: Path
) -> None:
    async with queue:
        await mixed(queue.store)
        stored = await deliveries_in(queue.store)
    flip(entry(queue, 3), 30)
    done, _ = await repaired(queue)
    assert (done.lost, len(done.noted)) == ([], 1)
    assert "nodes/0/log/0000000000000003" in done.noted[0]
    await judge(queue, tmp_path, stored)


async def test_a_snapshot_is_written_again_while_the_index_still_has_it(queue: Spool, tmp_path: Path) -> None:
    meta = disk_directories(queue.settings)[1]
    async with queue:
        await mixed(queue.store)
        stored = await deliveries_in(queue.store)
    async with opened_engine(queue.all_settings, {}, writes=True) as engine:
        assert isinstance(engine, ObjectEngine)
        keeper = engine.keeper(0)
        await keeper.enter("writer", mark="")
        await keeper.compact()
        await keeper.leave()
        await keeper.close()
    (piece,) = (meta / "nodes/0/snapshot").glob("*/000001")
    flip(piece, 30)
    _, findings = await checked(queue, tmp_path)
    assert findings.counts == {DamageKind.UNREADABLE: 1}
    done, _ = await repaired(queue)
    assert (done.lost, len(done.noted)) == ([], 1)
    await judge(queue, tmp_path, stored)


async def test_a_view_has_what_waits_and_changes_nothing(tmp_path: Path) -> None:
    queue = Spool(tmp_path / "spool", backend=Backend.DISK)
    async with queue:
        await mixed(queue.store)
        stored = await deliveries_in(queue.store)
    before = state_of(tmp_path / "spool")
    async with view_spool(queue.all_settings, 0, {}, tmp_path) as view:
        found = await deliveries_in(view)
    assert state_of(tmp_path / "spool") == before
    assert found == stored
