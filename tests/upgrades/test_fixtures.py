"""What older releases have stored is read by this one, octet by octet, and leaves the queue."""

import asyncio
import contextlib
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from tests.store.spools import Spool
from tests.support.outbox import KEY, LOOPBACK, OutboxBed, to_sink
from tests.support.process import PROGRAM, RelayProcess
from tests.support.sink import Sink
from tests.upgrades import fixtures, mail, outbox, passing
from tests.upgrades.configuration import every_option
from tests.upgrades.engines import ENGINES, REFUSED, Records, read_schema
from zonerelay.config.load import load_text
from zonerelay.config.settings import Settings
from zonerelay.model.delivery import Delivery, parse_queue
from zonerelay.model.envelope import Envelope, Message, Origin, Recipient
from zonerelay.model.reply import Attempt, Reply
from zonerelay.outbox.database.passwords import unseal
from zonerelay.store import records
from zonerelay.store.check import Findings
from zonerelay.store.contract import Finish, KeptKeys, Store, StoreOpenError
from zonerelay.store.leveldb.engine import plyvel
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
    settings = Settings(spool=spool.settings)
    await check_spool(settings, 0, findings, lambda *_: None, environment={}, place=tmp_path)
    assert findings.kept == []


# ---- what is stored changes only together with a fixture -----------------------------------------


CHANGED = """the stored format has changed ({what}). If that is meant, write a fixture with
    python -m tests.upgrades.write RELEASE      (the release that will have it)
and say in docs/operate/upgrading.md, "Which release reads which", what older releases do with it.
"""


def compare(what: str, before: Records, now: Records) -> None:
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    shown = [
        f"{name}:\n  was {before.get(name, 'missing')[:600]}\n  is  {now.get(name, 'missing')[:600]}"
        for name in names[:5]
    ]
    assert not names, CHANGED.format(what=f"{what}, {len(names)} records") + "\n".join(shown)


@pytest.mark.parametrize("name", ENGINES)
def test_a_queue_is_stored_as_in_the_newest_fixture(name: str, tmp_path: Path) -> None:
    engine = ENGINES[name]
    spool = engine.spool(tmp_path / "now")
    expected = asyncio.run(engine.write(spool))
    assert mail.lacking(fixtures.expected(fixtures.newest().name), expected) == []
    raw = (fixtures.newest() / engine.file).read_bytes()
    before = engine.unpack(raw, tmp_path / "before")
    compare(name, engine.records(before), engine.records(spool))


@pytest.mark.parametrize("kind", [Message, Envelope, Origin, Recipient, Delivery, Attempt, Reply])
def test_every_member_is_in_the_fixtures_with_more_than_one_value(kind: type) -> None:
    """A member that always has its default could be stored in any way, or not at all."""
    values = dict[str, set[str]]()
    for each in _all(kind):
        for name in _members(each):
            values.setdefault(name, set()).add(repr(getattr(each, name)))
    # What a release does not know has no value in one that it writes.
    assert [name for name, found in values.items() if len(found) < 2 and name != "unknown"] == []


def _members(value: object) -> list[str]:
    if isinstance(value, msgspec.Struct):
        return list(value.__struct_fields__)
    return [one.name for one in fields(value)] if is_dataclass(value) else []


def _all(kind: type) -> list[Any]:
    found: list[Any] = []

    def visit(value: object) -> None:
        if isinstance(value, kind):
            found.append(value)
        if isinstance(value, (list, tuple)):
            for one in value:
                visit(one)
        elif isinstance(value, dict):
            visit(list(value.values()))
        else:
            visit([getattr(value, name) for name in _members(value)])

    for each in fixtures.expected(fixtures.newest().name).values():
        visit(msgspec.convert(each["message"], Message))
        for delivery in each["deliveries"]:
            visit(msgspec.convert(delivery | {"queue": parse_queue(delivery["queue"])}, Delivery))
    return found


@pytest.mark.parametrize("path", sorted(fixtures.DIRECTORY.glob(f"*/{passing.FILE}")))
def test_what_is_stored_in_passing_is_read(path: Path) -> None:
    stored = json.loads(path.read_text())
    again = passing.read_again(stored)
    assert passing.read_again(again) == again
    assert again[passing.BOOK] == stored[passing.BOOK]


def test_what_is_stored_in_passing_is_as_in_the_newest_fixture() -> None:
    compare("records", json.loads((fixtures.newest() / passing.FILE).read_text()), passing.written())


# ---- a queue that this release does not read is refused in words ---------------------------------


def _leveldb(spool: Spool) -> None:
    with contextlib.closing(plyvel.DB(str(spool.settings.path))) as database:
        database.put(records.META_FORMAT, b"2")
    # A newer release writes the version there too.
    (spool.settings.path / "synced").unlink()


def _disk(spool: Spool) -> None:
    for lock in spool.settings.path.rglob("zonerelay.lock"):
        lock.write_bytes(lock.read_bytes().replace(b"queue 2", b"queue 3"))


MARKS: dict[str, tuple[Callable[[Spool], None], str]] = {
    "leveldb": (_leveldb, "format version 2, but this zonerelay supports version 1"),
    "disk": (_disk, r"zonerelay\.lock does not belong to a queue that this zonerelay can read"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_newer_queue_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    engine = ENGINES[name]
    spool = engine.unpack((fixtures.newest() / engine.file).read_bytes(), tmp_path)
    mark, words = MARKS[name]
    mark(spool)
    before = engine.records(spool)
    with pytest.raises(StoreOpenError, match=words):
        asyncio.run(spool.open())
    assert engine.records(spool) == before


OLD = {
    "shelf": r"it was written by Python's shelve\. Nothing was changed\. Start the release that wrote it",
    **dict.fromkeys(
        ("disk", "redis", "postgres", "s3"),
        r"contains the queue of zonerelay 0\.1\.0, .* Nothing was changed",
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_a_queue_of_the_first_release_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    engine = REFUSED[name]
    spool = engine.unpack((fixtures.DIRECTORY / "0.1.0" / engine.file).read_bytes(), tmp_path)
    before = engine.records(spool)
    with pytest.raises(StoreOpenError, match=OLD[name]):
        asyncio.run(spool.open())
    assert engine.records(spool) == before


# ---- the program itself: the mail goes out as it came in -----------------------------------------


def stays(each: dict[str, Any]) -> bool:
    """A message that requires TLS (its report does, too), and an event for a webhook that there is not."""
    is_event = not all(parse_queue(delivery["queue"]).is_mail for delivery in each["deliveries"])
    return is_event or each["message"]["envelope"].get("require_tls", False)


@pytest.mark.parametrize("name", [name for name, engine in fixtures.stored() if engine == "leveldb"])
def test_mail_of_an_older_release_is_delivered(name: str, tmp_path: Path) -> None:
    sent = {
        ((each["message"]["envelope"]["sender"], delivery["recipient"]), each["body"])
        for each in fixtures.expected(name).values()
        for delivery in each["deliveries"]
        if not stays(each)
    }
    raw = (fixtures.DIRECTORY / name / ENGINES["leveldb"].file).read_bytes()
    ENGINES["leveldb"].unpack(raw, tmp_path)
    with Sink() as sink:
        hop = {"next_hop": f"127.0.0.1:{sink.port}", "tls": "none"}
        zones = [{"name": "default", **hop}, {"name": "other", **hop}]
        with RelayProcess(tmp_path, tables={"zone": zones}) as relay:
            release = [str(PROGRAM), "queue", "release", "--sender", "held@example.org", "--yes"]
            subprocess.run([*release, "--config", str(relay.config)], check=True, capture_output=True)
            # Nothing else is sent but the report of success that a client has asked for.
            relay.wait_for(lambda: len(relay.events("delivered")) > len(sent), what="the mail leaves")
    arrived = {
        (message.mail_from, recipient): message.sha256
        for message in sink.messages
        for recipient in message.recipients
    }
    assert arrived.items() >= sent
    assert len(arrived) == len(sent) + 1


# ---- tables of an outbox, with their rows --------------------------------------------------------


FILES = sorted(fixtures.DIRECTORY.glob(f"*/{outbox.FILE}"))


@pytest.fixture(params=FILES, ids=lambda path: path.parent.name)
def restored(request: pytest.FixtureRequest, bed: OutboxBed) -> OutboxBed:
    outbox.restore(request.param.read_bytes(), bed)
    return bed


async def test_rows_are_sent_to_those_who_have_not_got_them(restored: OutboxBed, sink: Sink) -> None:
    restored.psql("UPDATE outbound_messages SET next_retry_at = NULL")
    async with restored.relay(to_sink(sink.port)) as running:
        await restored.until(running, 3, "sent")
        await restored.until(running, 4, "sent")
    assert [restored.row(row)["status"] for row in range(1, 6)] == [
        "sent",
        "failed",
        "sent",
        "sent",
        "failed",
    ]
    sent = sink.recipients()
    assert sent == ["blind@example.com", "copy@example.com", "later@example.com", "someone@example.com"]
    whole = next(message.body for message in sink.messages if b"X-Campaign: spring" in message.body)
    assert b"aGVsbG8=" in whole
    assert b"<p>hello</p>" in whole
    sealed = restored.psql("SELECT smtp_password_encrypted FROM mailboxes")
    assert unseal(sealed, (KEY,), host=LOOPBACK, port=outbox.PORT, user="relay") == "right"


def test_rows_are_stored_as_in_the_newest_fixture(bed: OutboxBed) -> None:
    async def written() -> None:
        async with Sink() as sink:
            await outbox.fill(bed, sink)

    asyncio.run(written())
    now = read_schema(bed.server.url, bed.schema)
    before = OutboxBed(bed.directory)
    try:
        outbox.restore((fixtures.newest() / outbox.FILE).read_bytes(), before)
        compare("outbox", *(map(_still, (read_schema(before.server.url, before.schema), now))))
    finally:
        before.drop()


def _still(records: Records) -> Records:
    """Times differ, and so do an initialisation vector and what it makes of a password."""
    moving = r'"(at|next|sent_at|next_retry_at|smtp_password_encrypted)": ("[^"]*"|[0-9.]+)'
    return {name: re.sub(moving, r'"\1": …', text) for name, text in records.items()}


# ---- configurations load, and a key that is gone has words of its own ----------------------------


@pytest.mark.parametrize("path", fixtures.configurations(), ids=lambda path: path.parent.name)
def test_a_configuration_of_an_older_release_loads(path: Path) -> None:
    load_text(path.read_text())


def test_the_newest_fixture_gives_every_option() -> None:
    given, now = (fixtures.newest() / fixtures.CONFIGURATION).read_text(), every_option()
    assert given == now, (
        "an option has changed: python -m tests.upgrades.write RELEASE, for the release that will have it;"
        " if a key or a value is gone, files that have it must be told in words what to write instead"
    )
