"""Damages a LevelDB spool in every way, each in a process of its own, and says what came of it.

    LD_PRELOAD=failing_disk.so python -m tests.store.damage_worker OBJECT DIRECTORY

One JSON object a line for each fault and moment: `Outcome`. What was acknowledged before is known, and so is
which of it the damage may take.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import pickle
import random
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from tests.store.builders import NOW, body_of, message_id, store_message, table_parts
from tests.store.spools import Spool
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import MessageId
from zonerelay.store import records
from zonerelay.store.check import Findings, SalvagedMessage
from zonerelay.store.contract import Finish, StoreError, StoreOpenError
from zonerelay.store.leveldb import keeper as keeper_module
from zonerelay.store.leveldb.damage import directory as damage_of
from zonerelay.store.leveldb.damage import format
from zonerelay.store.leveldb.damage.directory import MARK_NAME, SyncMark, newest_log, write_mark
from zonerelay.store.leveldb.damage.format import data_blocks, identities_in, read_log, write_log
from zonerelay.store.leveldb.damage.losses import DIRECTORY
from zonerelay.store.leveldb.offline import check_leveldb, repair_leveldb
from zonerelay.store.leveldb.spool import LevelDb

TABLES, LOGS = ("table 1", "table 2", "table 3"), ("older log", "newer log")
KEYS = {
    "key format": records.META_FORMAT,
    "key last-id": records.META_LAST_ID,
    "key open": records.open_count_key(message_id(2)),
}
OBJECTS = ("CURRENT", "MANIFEST", *TABLES, *LOGS, "LOCK", "ballast", MARK_NAME, *KEYS)
FLIPS = ("header", "data", "index", "footer")
FAULTS = ("missing", "empty", "cut", *FLIPS, "EIO", "read-only")
MOMENTS = ("start", "running")

MIN_FREE_SPACE = 64 * 1024
UNTOLD = {"LOG", "LOG.old", "LOCK", "ballast"}
"""Files that a start which refuses may change."""


class Mended(msgspec.Struct):
    """What a repair of the damaged spool came to. `lost` and `repeated` as in `Outcome`; `hit` are messages
    that the damaged octets name in the spool as it was, `gone` those that all their octets name, and `bodies`
    those of whose bodies they hold a part.
    `salvaged` are the messages in the salvage; of `unsaved` it has no body, and the spool has none.
    """

    said: list[str] = []
    repeats: list[str] = []
    lost: list[str] = []
    repeated: list[str] = []
    hit: list[str] = []
    gone: list[str] = []
    bodies: list[str] = []
    salvaged: list[str] = []
    unsaved: list[str] = []
    findings: list[str] = []
    kept_differs: list[str] = []
    before: int = 0
    after: int = 0

    @property
    def letter(self) -> str:
        found = ("L" if self.lost else "") + ("A" if self.repeated else "")
        return found or ("S" if self.salvaged else "–")


class Outcome(msgspec.Struct):
    """`refused`: the text of a start that did not open, `changed` and `added` what it did to files.
    `lost` are acknowledged deliveries that are no longer there or cannot be read, `may_lose` are those
    that the damage could take, `named` are named by the notes.
    """

    object: str
    fault: str
    moment: str
    refused: str = ""
    changed: list[str] = []
    added: list[str] = []
    lost: list[str] = []
    may_lose: list[str] = []
    named: list[str] = []
    repeated: list[str] = []
    told: list[str] = []
    ended_by: int = 0
    accepts: bool = True
    error: str = ""
    mended: Mended = msgspec.field(default_factory=Mended)

    @property
    def letter(self) -> str:
        """For the table in damage_matrix.md."""
        found = "E" if self.ended_by else ""
        if self.lost:
            found += "W" if self.object in TABLES else "L"
        elif self.told:
            found += "T"
        return found + ("R" if self.refused else "") or "–"


@dataclass
class Truth:
    """What was acknowledged: bodies, open deliveries, those that left."""

    bodies: dict[MessageId, bytes] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    def copy(self) -> "Truth":
        return Truth(dict(self.bodies), set(self.open), set(self.left))

    async def take(
        self, spool: Spool, number: int, *recipients: str, size: int = 3000, **state: Any
    ) -> list[Delivery]:
        body = random.Random(number).randbytes(size // 2).hex().encode()
        deliveries = await store_message(spool.store, number, *recipients, body=body, **state)
        self.bodies[message_id(number)] = body
        self.open |= {name_of(each) for each in deliveries}
        return deliveries

    async def finish(self, spool: Spool, delivery: Delivery) -> None:
        await spool.store.settle([Finish(delivery)])
        self.open.discard(name_of(delivery))
        self.left.add(name_of(delivery))


def name_of(delivery: Delivery) -> str:
    return f"{delivery.message_id} {delivery.recipient}"


@dataclass
class Prepared:
    """A spool at rest, with three tables and two logs."""

    path: Path
    truth: Truth
    tables: list[Path]
    logs: list[Path]
    in_tables: list[set[str]]

    def file(self, name: str, directory: Path) -> Path:
        if name in TABLES:
            return directory / self.tables[TABLES.index(name)].name
        if name in LOGS:
            return directory / self.logs[LOGS.index(name)].name
        if name == "MANIFEST":
            return next(iter(sorted(directory.glob("MANIFEST-*"), reverse=True)))
        return directory / name


def spool_at(path: Path) -> Spool:
    return Spool(path, min_free_space=MIN_FREE_SPACE, write_buffer=256 * 1024)


async def prepare(path: Path) -> Prepared:
    spool = spool_at(path)
    await spool.open()
    truth = Truth()
    db: LevelDb = spool.store._keeper._db  # type: ignore[attr-defined]  # white box, on purpose
    await truth.take(spool, 1, size=200_000)
    first, *_ = await truth.take(spool, 2, "a@example.net", "b@example.net", "c@example.net")
    for number in range(3, 12):
        await truth.take(spool, number)
    await truth.finish(spool, first)
    (gone,) = await truth.take(spool, 12)
    await truth.finish(spool, gone)
    db.compact(b"", b"\xff")
    for number in range(13, 20):
        await truth.take(spool, number, next_attempt=NOW + number)
    db.compact(b"\xfe", b"\xff")
    for number in range(20, 28):
        await truth.take(spool, number, held=number % 2 == 0)
    db.compact(b"\xfe", b"\xff")
    for number in range(28, 46):
        deliveries = await truth.take(spool, number)
        if number % 4 == 0:
            await truth.finish(spool, deliveries[0])
    await spool.store.close()
    (log,) = [each for each in path.glob("*.log") if each.stat().st_size]
    for empty in (each for each in path.glob("*.log") if each != log):
        empty.unlink()
    whole = read_log(log.read_bytes()).records
    newer = path / f"{max(int(each.stem) for each in path.glob('0*')) + 10:06d}.log"
    log.write_bytes(write_log(whole[:12]))
    newer.write_bytes(write_log(whole[12:]))
    write_mark(path, SyncMark("1", *newest_log(path)))
    manifest = format.read_manifest(next(iter(path.glob("MANIFEST-*"))).read_bytes())
    tables = [path / f"{table.number:06d}.ldb" for table in manifest.tables.values()]
    assert len(tables) == 3, tables
    assert (path / "ballast").exists()
    numbers = [range(1, 13), range(13, 20), range(20, 28)]
    in_tables: list[set[str]] = [{*map(message_id, part)} for part in numbers]
    return Prepared(path, truth, sorted(tables), [log, newer], in_tables)


# --- faults


def damage(path: Path, fault: str) -> tuple[int, int] | None:
    """Damage a file in place, and return the octets that it concerns."""
    if fault == "missing":
        path.unlink()
        return None
    content = path.read_bytes()
    index = table_parts(content)[0] + 20 if path.suffix == ".ldb" else len(content) * 3 // 4
    spoilt, where = spoil(content, fault, index)
    with path.open("r+b") as file:
        file.write(spoilt)
        file.truncate()
    return where


def spoil(content: bytes, fault: str, index: int) -> tuple[bytes, tuple[int, int]]:
    """Return the content with a fault, and where that is."""
    size = len(content)
    if fault in ("empty", "cut"):
        keep = 0 if fault == "empty" else size // 3
        return content[:keep], (keep, size)
    at = {"header": 0, "data": size // 2, "index": index, "footer": max(size - 4, 0)}[fault]
    flipped = bytes(octet ^ 0xFF for octet in content[at : at + 4])
    return content[:at] + (flipped or b"\xff" * 4) + content[at + 4 :], (at, at + 4)


def spoil_key(db: LevelDb, name: str, fault: str) -> None:
    value = db.get(KEYS[name])
    assert value is not None
    spoilt = None if fault == "missing" else spoil(value, fault, len(value) * 3 // 4)[0]
    db.write([[(KEYS[name], spoilt)]])


def fail(name: str, fault: str, directory: Path, prepared: Prepared) -> None:
    """From now on the disk does."""
    pattern = prepared.file(name, directory).name if fault == "EIO" else _KINDS.get(name, name)
    if name in KEYS:
        pattern = "*.ldb" if fault == "EIO" else "*.log"
    ctypes.CDLL(None).failing_disk(
        {"EIO": 1, "read-only": 2}[fault], str(directory).encode(), pattern.encode()
    )


_KINDS = {"MANIFEST": "MANIFEST-*", **dict.fromkeys(TABLES, "*.ldb"), **dict.fromkeys(LOGS, "*.log")}


def repair_disk() -> None:
    ctypes.CDLL(None).failing_disk(0, b"", b"")


def may_lose(name: str, prepared: Prepared, where: tuple[int, int] | None, truth: Truth) -> set[str]:
    """Deliveries that damage to these octets of a file may take, or whose outcome."""
    ids: set[str] = set()
    if name in LOGS and where is not None:
        ids = set(identities_in(b"\n".join(hit_by(name, "", where, prepared))))
    elif name in TABLES:
        # What is in older tables may have been changed in this one: until it is repaired it waits too.
        ids = set[str]().union(*prepared.in_tables[: TABLES.index(name) + 1])
    return {each for each in truth.open | truth.left if each.partition(" ")[0] in ids}


# --- judging


def contents(path: Path) -> dict[str, bytes]:
    with healthy_disk():
        files = (each for each in path.rglob("*") if each.is_file() and each.name not in UNTOLD)
        return {str(each.relative_to(path)): each.read_bytes() for each in files}


@contextlib.contextmanager
def healthy_disk() -> Iterator[None]:
    library = ctypes.CDLL(None)
    library.failing_disk_pause(1)
    yield
    library.failing_disk_pause(0)


async def judge(outcome: Outcome, path: Path, truth: Truth) -> None:
    """Open the spool as an operator would, and compare what is in it with what must be."""
    before = contents(path)
    spool = spool_at(path)
    try:
        await spool.open()
    except StoreOpenError as error:
        after = contents(path)
        outcome.refused = str(error)
        outcome.changed = sorted(key for key in before if before[key] != after.get(key))
        outcome.added = sorted(after.keys() - before.keys())
        return
    try:
        await compare(outcome, spool, truth)
    finally:
        await asyncio.wait_for(spool.store.close(), 10)
    for note in (path / DIRECTORY).glob("*.json"):
        outcome.named += json.loads(note.read_bytes()).get("messages", [])


async def compare(outcome: Outcome, spool: Spool, truth: Truth) -> None:
    found: set[str] = set()
    try:
        async for delivery in spool.store.scan():
            with contextlib.suppress(StoreError):
                body = truth.bodies.get(delivery.message_id)
                if body is None or await body_of(spool.store, delivery.message_id) == body:
                    found.add(name_of(delivery))
    except StoreError as error:
        outcome.told.append(f"scan: {error}")
    await until_counted(spool)
    outcome.lost = sorted({*outcome.lost, *(truth.open - found)})
    outcome.repeated = sorted({*outcome.repeated, *(found & truth.left)})
    outcome.told += tell(spool)
    outcome.accepts = spool.store.unhealthy() is None


async def until_counted(spool: Spool) -> None:
    for _ in range(50):
        if spool.store.is_counted():
            break
        await asyncio.sleep(0.01)


def tell(spool: Spool) -> list[str]:
    unhealthy = spool.store.unhealthy()
    return [*spool.store.problems(), *([unhealthy] if unhealthy else [])]


async def at_start(outcome: Outcome, prepared: Prepared, path: Path) -> None:
    name, fault, truth = outcome.object, outcome.fault, prepared.truth
    shutil.copytree(prepared.path, path)
    where = None
    if fault in ("EIO", "read-only"):
        fail(name, fault, path, prepared)
    elif name in KEYS:
        db = LevelDb(path, write_buffer=256 * 1024)
        db.open()
        spoil_key(db, name, fault)
        db.close()
    else:
        where = damage(prepared.file(name, path), fault)
    outcome.may_lose = sorted(may_lose(name, prepared, where, truth))
    damaged = path.with_name(f"{path.name}-repaired") / "spool"
    with healthy_disk():
        shutil.copytree(path, damaged)
    if fault == "EIO":
        repair_disk()
        fail(name, fault, damaged, prepared)
    if fault != "read-only":
        outcome.mended = await mended(damaged, prepared, hit_by(name, fault, where, prepared))
    if fault == "EIO":
        fail(name, fault, path, prepared)
    await judge(outcome, path, truth)
    if fault in ("EIO", "read-only"):
        repair_disk()
        outcome.lost = []
        healed = Outcome(name, fault, "healed")
        await judge(healed, path, truth)
        outcome.lost, outcome.repeated = healed.lost, healed.repeated
        outcome.error = healed.refused and f"refused when the disk was whole again: {healed.refused}"


def hit_by(name: str, fault: str, where: tuple[int, int] | None, prepared: Prepared) -> list[bytes]:
    """The records, as keys, in the octets that the damage has taken from the files as they were."""
    if name in KEYS and fault == "EIO":  # it is in one of the tables, and all of them fail
        return [key for table in TABLES for key in hit_by(table, fault, None, prepared)]
    if name not in (*TABLES, *LOGS):
        return []
    path = prepared.file(name, prepared.path)
    if where is None or fault == "EIO":
        where = (0, path.stat().st_size)
    return [
        key for start, end, keys in records_in(path) if start < where[1] and where[0] < end for key in keys
    ]


def records_in(path: Path) -> Iterator[tuple[int, int, list[bytes]]]:
    """Where the records of a log or the blocks of a table begin and end, with their keys."""
    at, content = 0, path.read_bytes()
    if path.suffix == ".log":
        whole = read_log(content).records
        ends = [(len(write_log(whole[: number + 1])), [record]) for number, record in enumerate(whole)]
    else:
        ends = [(block.end, block.batches) for block in data_blocks(content)]
    for end, batches in ends:
        yield at, end, [key for batch in batches for key, _ in format.operations_of(batch)]
        at = end


async def mended(path: Path, prepared: Prepared, hit: list[bytes]) -> Mended:
    """Repair a damaged spool and look at what there is then."""
    found = Mended(hit=identities_in(b"\n".join(hit)))
    whole = [key for name in (*TABLES, *LOGS) for key in hit_by(name, "missing", None, prepared)]
    found.gone = sorted(set(found.hit) - set(identities_in(b"\n".join({*whole} - {*hit}))))
    found.bodies = identities_in(b"\n".join(key for key in hit if key.rpartition(b" ")[2].isdigit()))
    with healthy_disk():
        before = database_of(path)
    bodies: dict[str, bytes] = {}

    def salvage(salvaged: SalvagedMessage) -> None:
        bodies[salvaged.message_id] = b"".join(salvaged.body())

    try:
        done = repair_leveldb(path, path.parent, salvage, lambda done, total: None, carry_out=True)
    except OSError:  # a disk that cannot read a file fails to remove it, too
        repair_disk()
        done = repair_leveldb(path, path.parent, salvage, lambda done, total: None, carry_out=True)
    repair_disk()
    found.said, found.repeats = [*done.lost], [*done.repeats]
    found.before, found.after, found.salvaged = done.before, done.after, sorted(bodies)
    kept = database_of(Path(*done.kept))
    found.kept_differs = sorted(name for name in before.keys() | kept if before.get(name) != kept.get(name))
    findings = Findings()
    check_leveldb(path, path.parent, findings, lambda done, total: None)
    found.findings = [str(each) for each in findings.kept]
    spool = spool_at(path)
    await spool.open()
    try:
        there = {name_of(each) async for each in spool.store.scan()}
        for message in {MessageId(each[:16]) for each in there}:
            bodies[message] = await body_of(spool.store, message)
    finally:
        await asyncio.wait_for(spool.store.close(), 10)
    truth = prepared.truth
    found.lost, found.repeated = sorted(truth.open - there), sorted(there & truth.left)
    waiting = {each[:16] for each in truth.open}
    found.unsaved = sorted(each for each in waiting if bodies.get(each) != truth.bodies[MessageId(each)])
    return found


def database_of(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir() if damage_of.is_database_file(each.name)}


async def while_running(outcome: Outcome, prepared: Prepared, path: Path) -> None:
    name, fault, truth = outcome.object, outcome.fault, prepared.truth.copy()
    shutil.copytree(prepared.path, path)
    spool = spool_at(path)
    await spool.open()
    await until_counted(spool)
    for number in range(60, 64):
        await truth.take(spool, number)
    where = None
    live = prepared.file(name, path)
    if name in LOGS:
        live = path / f"{newest_log(path)[0]:06d}.log"
    if fault in ("EIO", "read-only"):
        fail(name if name not in LOGS or fault != "EIO" else live.name, fault, path, prepared)
    elif name in KEYS:
        spoil_key(spool.store._keeper._db, name, fault)  # type: ignore[attr-defined]  # white box, on purpose
    else:
        where = damage(live, fault)
    outcome.may_lose = sorted(may_lose(name, prepared, where, truth) if name in TABLES else ())
    if name in LOGS:
        outcome.may_lose = sorted(each for each in truth.open if int(each[:16], 16) >= 60)
    await look(spool)
    await compare(outcome, spool, truth)
    outcome.lost = []
    await use(spool, truth, many=name == "newer log")
    if name == "newer log" and fault in FLIPS:
        while live.exists():  # what is in it is moved into a table in the background
            await asyncio.sleep(0.01)
    await look(spool)
    outcome.told += tell(spool)
    truth_file(path).write_bytes(pickle.dumps(truth))  # and now the process is killed


async def look(spool: Spool) -> None:
    """As the keeper does every second."""
    with contextlib.suppress(StoreError):
        await asyncio.wait_for(spool.store._keeper._read_space(), 5)  # type: ignore[attr-defined]  # white box
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def truth_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.truth")


async def use(spool: Spool, truth: Truth, *, many: bool) -> None:
    """Take mail, and deliver some."""
    for number in range(70, 170 if many else 73):
        with contextlib.suppress(StoreError):
            spool.store.check_writable()  # type: ignore[attr-defined]  # what a client's MAIL asks
            await asyncio.wait_for(truth.take(spool, number), 5)
    with contextlib.suppress(StoreError):
        for delivery in await asyncio.wait_for(spool.store.claim(queue_of("default"), 2, now=NOW), 5):
            with contextlib.suppress(StoreError):
                truth.left.add(name_of(delivery))  # a failed write may have happened
                truth.open.discard(name_of(delivery))
                await asyncio.wait_for(truth.finish(spool, delivery), 5)


# --- processes


def run_apart(work: Callable[[], Outcome], outcome: Outcome) -> Outcome:
    """In a child: what kills it kills nothing else."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        try:
            result = work()
        except BaseException:
            outcome.error = traceback.format_exc()
            result = outcome
        with os.fdopen(sending, "wb") as file:
            file.write(msgspec.json.encode(result))
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    if said:
        return msgspec.json.decode(said, type=Outcome)
    outcome.ended_by = os.waitstatus_to_exitcode(status)
    return outcome


def cell(name: str, fault: str, moment: str, prepared: Prepared, directory: Path) -> Outcome:
    path = directory / f"{moment}-{fault}"
    outcome = Outcome(name, fault, moment)
    function = at_start if moment == "start" else while_running

    def work() -> Outcome:
        asyncio.run(asyncio.wait_for(function(outcome, prepared, path), 30))
        return outcome

    outcome = run_apart(work, outcome)
    if moment == "start" or outcome.error:
        return outcome
    killed = outcome
    truth = pickle.loads(truth_file(path).read_bytes()) if truth_file(path).exists() else prepared.truth

    def after() -> Outcome:
        told, killed.told = killed.told, []
        asyncio.run(judge(killed, path, truth))
        killed.told += told
        return killed

    return run_apart(after, killed)


def prepared_in(directory: Path) -> Prepared:
    """LevelDB's thread does not survive a fork, so this process must never have had one."""
    child = os.fork()
    if child == 0:
        try:
            found = asyncio.run(prepare(directory / "prepared"))
            (directory / "prepared.pickle").write_bytes(pickle.dumps(found))
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(child, 0)
    return cast("Prepared", pickle.loads((directory / "prepared.pickle").read_bytes()))


def main(name: str, directory: Path) -> None:
    keeper_module.MARK_INTERVAL = 0.0
    keeper_module.FIRST_PAUSE = 0.01
    prepared = prepared_in(directory)
    for moment in MOMENTS:
        for fault in FAULTS:
            print(msgspec.json.encode(cell(name, fault, moment, prepared, directory)).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
