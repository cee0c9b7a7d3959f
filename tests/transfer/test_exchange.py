"""Export and import of our own format, through the contract, on every engine."""

import tarfile
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.store.builders import NOW, attempt, body_of, delivery_for, envelope_for, message_id
from tests.store.conftest import VARIANTS
from tests.store.spools import Spool
from tests.transfer.queues import rows
from zonerelay.model.delivery import Delivery, DeliveryState, queue_of
from zonerelay.model.envelope import BodyType, Envelope, Message, MessageId, Notify, Priority, Ret, first_at
from zonerelay.queue.operator.filters import ALL, QueueFilter
from zonerelay.routing.zones.zones import Zones
from zonerelay.store.contract import Finish, MessageWriter, Store, StoreFullError
from zonerelay.store.leveldb.engine import plyvel
from zonerelay.transfer import files
from zonerelay.transfer.files import Source, StoredMessage, TransferError, UnusableMessage
from zonerelay.transfer.loader import FILE, ImportRegister, ImportResult, Loader, merge_registers
from zonerelay.transfer.others.foreign import ForeignMessage, OpenRecipient, adopted

LARGE = b"Subject: large\r\n\r\n" + b"0123456789abcde\r\n" * 20_000


async def fill(store: Store) -> None:
    """A message in every state, one to three zones, a large one, and one that has been delivered in part."""
    plain = envelope_for(message_id(1), "a@example.net", "b@example.net", "c@example.org")
    plain = structs.replace(
        plain, ret=Ret.HDRS, envid="QQ+2B1", body=BodyType.EIGHT_BIT, priority=Priority.BULK
    )
    a, b, c = (delivery_for(plain, each.address) for each in plain.recipients)
    b = structs.replace(
        b, queue=queue_of("other;high"), held=True, warned=True, attempts=3, last=attempt(NOW - 9.25)
    )
    c = structs.replace(
        c, next_attempt=NOW + 60.125, attempts=1, last=attempt(), notify=Notify.SUCCESS | Notify.DELAY
    )
    c = structs.replace(c, orcpt="rfc822;c+40example.org", queue=queue_of("third"))
    await commit(store, plain, [a, b, c], b"Subject: one\r\n\r\n.dotted \xff\r\n")
    await store.settle([Finish(a)])
    large = envelope_for(message_id(2), "d@example.net", sender="")
    await commit(store, large, [delivery_for(large, "d@example.net")], LARGE)


async def commit(store: Store, envelope: Envelope, deliveries: list[Delivery], body: bytes) -> Message:
    async with store.begin(envelope) as writer:
        await writer.write(body)
        return await writer.commit(
            deliveries,
            headers=(("Subject", "é"),),
            eight_bit=not body.isascii(),
            plain_lines=body is LARGE,
            body_hash="aGFzaA==",
            trace=("listener=127.0.0.1:25",),
        )


async def export_to(path: Path, store: Store, wanted: QueueFilter = ALL) -> list[UnusableMessage]:
    faults: list[UnusableMessage] = []
    with files.writing(path) as target:
        meant = await files.survey(store, wanted, NOW)
        await files.export(
            store,
            meant,
            wanted,
            NOW,
            target,
            saw=lambda _, trouble: faults.extend([trouble] if trouble else []),
        )
    return faults


async def import_from(path: Path, store: Store, home: Path) -> tuple[ImportResult, list[UnusableMessage]]:
    faults: list[UnusableMessage] = []
    register = ImportRegister(home)
    loader = Loader(
        store, register, Zones(()), now=NOW, saw=lambda trouble: faults.extend([trouble] if trouble else [])
    )
    with files.reading(path) as source:
        await loader.load(source)
    return loader.loaded, faults


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    async with Spool(tmp_path / "spool") as opened:
        yield opened


@pytest.mark.parametrize("variant", VARIANTS)
async def test_mail_goes_out_and_comes_in_exactly_as_it_was(tmp_path: Path, variant: str) -> None:
    backend, places = VARIANTS[variant]
    name = "mail.tar" if variant == "disk" else "mail"  # each form once is enough with any engine
    async with Spool(
        tmp_path / "a", backend=backend, places={one: tmp_path / one for one in places}
    ) as first:
        await fill(first.store)
        before = await rows(first.store)
        assert await export_to(tmp_path / name, first.store) == []
    others = {one: tmp_path / f"second-{one}" for one in places}
    async with Spool(tmp_path / "b", backend=backend, places=others) as second:
        loaded, faults = await import_from(tmp_path / name, second.store, tmp_path)
        assert (loaded.messages, loaded.deliveries, faults) == (2, 3, [])
        assert await rows(second.store) == before
        again, _ = await import_from(tmp_path / name, second.store, tmp_path)
        assert (again.messages, again.already) == (0, 3)
        for each in [each async for each in second.store.scan()]:
            await second.store.settle([Finish(each)])
        again, _ = await import_from(tmp_path / name, second.store, tmp_path)
        assert (again.messages, again.already) == (0, 3)
        assert await rows(second.store) == []


async def test_parts_of_a_message_are_imported_one_by_one(tmp_path: Path, spool: Spool) -> None:
    await fill(spool.store)
    await export_to(tmp_path / "held", spool.store, QueueFilter(state=DeliveryState.HELD))
    await export_to(tmp_path / "third", spool.store, QueueFilter(zone="third"))
    await export_to(tmp_path / "all", spool.store)
    async with Spool(tmp_path / "other") as other:
        for name, fresh in (("held", 1), ("third", 1), ("all", 1), ("held", 0)):
            loaded, _ = await import_from(tmp_path / name, other.store, tmp_path)
            assert loaded.deliveries == fresh, name
        found = [each.recipient async for each in other.store.scan()]
        assert sorted(found) == ["b@example.net", "c@example.org", "d@example.net"]


async def test_what_is_in_the_spool_is_not_imported_without_register(tmp_path: Path, spool: Spool) -> None:
    await fill(spool.store)
    await export_to(tmp_path / "mail", spool.store)
    loaded, _ = await import_from(tmp_path / "mail", spool.store, tmp_path)
    assert (loaded.messages, loaded.already) == (0, 3)


async def test_another_message_under_the_same_id_stays(tmp_path: Path, spool: Spool) -> None:
    await fill(spool.store)
    await export_to(tmp_path / "mail", spool.store)
    async with Spool(tmp_path / "other") as other:
        mine = envelope_for(message_id(2), "e@example.net")
        await commit(other.store, mine, [delivery_for(mine, "e@example.net")], b"Subject: mine\r\n\r\n")
        loaded, _ = await import_from(tmp_path / "mail", other.store, tmp_path)
        assert loaded.messages == 2
        assert await body_of(other.store, message_id(2)) == b"Subject: mine\r\n\r\n"
        assert LARGE in [body for _, _, body in (await rows(other.store))]


class Full:
    """A store that has room for one message more."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._begun = 0

    def __getattr__(self, name: str) -> Any:  # Any: what the store has
        return getattr(self._store, name)

    def begin(self, envelope: Envelope) -> MessageWriter:
        self._begun += 1
        if self._begun > 1:
            raise StoreFullError("insufficient disk space")
        return self._store.begin(envelope)


async def test_mail_of_the_future_gets_an_id_of_today(tmp_path: Path, spool: Spool) -> None:
    """Of a relay whose clock was wrong: ids go on from the highest that there is."""
    later = structs.replace(envelope_for(MessageId("0aaaaaaaaaa00000"), "a@example.net"), created=NOW * 2)
    await commit(spool.store, later, [delivery_for(later, "a@example.net")], b"Subject: x\r\n\r\n")
    await export_to(tmp_path / "mail", spool.store)
    async with Spool(tmp_path / "other") as other:
        await import_from(tmp_path / "mail", other.store, tmp_path)
        ((message, _, _),) = await rows(other.store)
        assert message.id < first_at(NOW + 1)
        assert message.envelope.created == NOW * 2


async def test_an_import_that_broke_off_goes_on(tmp_path: Path, spool: Spool) -> None:
    await fill(spool.store)
    await export_to(tmp_path / "mail", spool.store)
    async with Spool(tmp_path / "other") as other:
        with pytest.raises(StoreFullError):
            await import_from(tmp_path / "mail", Full(other.store), tmp_path)
        assert len(await rows(other.store)) == 1
        loaded, _ = await import_from(tmp_path / "mail", other.store, tmp_path)
        assert loaded.messages == 1
        assert await rows(other.store) == await rows(spool.store)


async def test_foreign_mail_is_recognised_without_a_register(tmp_path: Path) -> None:
    """As after a kill between the message and the register."""

    async def body() -> AsyncIterator[bytes]:
        yield b"Subject: x\n\n.bare\n"

    recipients = (
        OpenRecipient(address="a@example.net"),
        OpenRecipient(address="no address"),
        OpenRecipient(address="b@example.net"),
    )
    mail = ForeignMessage(key="other 1", sender="", recipients=recipients, created=NOW, body=body)

    async def read() -> AsyncIterator[StoredMessage | UnusableMessage]:
        for each in adopted(mail, NOW + 9):
            yield each

    async with Spool(tmp_path / "spool") as spool:
        for messages in (1, 0):
            register = ImportRegister(tmp_path)
            loader = Loader(spool.store, register, Zones(()), now=NOW + 9, saw=lambda _: None)
            await loader.load(Source(messages=1, octets=1, read=read))
            assert (loader.loaded.messages, loader.loaded.unusable) == (messages, 1)
            register.path.unlink()
        ((message, deliveries, stored),) = await rows(spool.store)
    assert stored == b"Subject: x\r\n\r\n.bare\r\n"
    assert not message.plain_lines
    assert message.headers == (("Subject", "x"),)
    assert message.trace == ("imported=other 1",)
    assert [each.recipient for each in deliveries] == ["a@example.net", "b@example.net"]
    assert {each.created for each in deliveries} == {NOW}


async def test_a_torn_register_is_cut_and_a_damaged_one_refused(tmp_path: Path) -> None:
    ImportRegister(tmp_path).add([("key", "a@example.net")])
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole + b"0123")
    register = ImportRegister(tmp_path)
    assert register.knows("key", "a@example.net")
    assert not register.knows("key", "b@example.net")
    assert (tmp_path / FILE).read_bytes() == whole
    (tmp_path / FILE).write_bytes(b"x" * 33)
    with pytest.raises(TransferError, match="damaged"):
        ImportRegister(tmp_path)


EDITS = {
    "an address with a line end": (
        '"c@example.org"',
        '"c@example.org>\\r\\nRCPT TO:<x@example.org"',
        "address",
    ),
    "a wish with a line end": ("rfc822;c+40example.org", "rfc822;c\\r\\nDATA", "parameter"),
    "a zone that cannot be": ('"third"', '"thi rd"', "zone"),
    "a newer format": ('"format": 1', '"format": 2', "newer release"),
    "a stranger's recipient": ('"recipient": "c@', '"recipient": "z@', "not in its envelope"),
    "another id": (f'"id": "{message_id(1)}"', f'"id": "{message_id(3)}"', "differs from its file name"),
    "no JSON": ("{", "[", "not an exported"),
    "deep lists": ('"format": 1', f'"x": {"[" * 10_000}{"]" * 10_000}, "format": 1', "not an exported"),
}


@pytest.mark.parametrize("edit", EDITS)
async def test_a_sheet_that_was_edited_wrongly_is_refused(tmp_path: Path, spool: Spool, edit: str) -> None:
    before, after, why = EDITS[edit]
    await fill(spool.store)
    await export_to(tmp_path / "mail", spool.store)
    sheet = tmp_path / "mail" / f"{message_id(1)}.json"
    text = sheet.read_text()
    assert before in text
    sheet.write_text(text.replace(before, after))
    async with Spool(tmp_path / "other") as other:
        loaded, faults = await import_from(tmp_path / "mail", other.store, tmp_path)
        assert (loaded.messages, loaded.unusable) == (1, 1)
        assert why in faults[0].why


async def test_a_body_that_was_edited_is_refused(tmp_path: Path, spool: Spool) -> None:
    await fill(spool.store)
    await export_to(tmp_path / "mail", spool.store)
    one, two = (tmp_path / "mail" / f"{message_id(number)}.eml" for number in (1, 2))
    one.write_bytes(one.read_bytes() + b"more\r\n")
    two.write_bytes(two.read_bytes().replace(b"e\r\n", b"e\n.", 1))
    async with Spool(tmp_path / "other") as other:
        loaded, faults = await import_from(tmp_path / "mail", other.store, tmp_path)
        assert (loaded.messages, len(faults)) == (0, 2)
        assert await rows(other.store) == []


class Interrupted:
    """A store at whose second message the operator presses Ctrl-C."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read = 0

    def __getattr__(self, name: str) -> Any:  # Any: what the store has
        return getattr(self._store, name)

    def read_body(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
        self._read += 1
        if self._read == 2:
            raise KeyboardInterrupt
        return self._store.read_body(message_id)


async def test_an_export_that_breaks_off_leaves_nothing(tmp_path: Path, spool: Spool) -> None:
    await fill(spool.store)
    before = sorted(tmp_path.iterdir())
    for name in ("mail", "mail.tar"):
        with pytest.raises(KeyboardInterrupt):
            await export_to(tmp_path / name, Interrupted(spool.store))
        assert sorted(tmp_path.iterdir()) == before


async def test_a_body_that_cannot_be_read_leaves_no_half_of_it(tmp_path: Path, spool: Spool) -> None:
    await fill(spool.store)
    await spool.store.close()
    database = plyvel.DB(str(tmp_path / "spool"))
    database.delete(f"message {message_id(2)} 000003".encode())
    database.close()
    await spool.open()
    (trouble,) = await export_to(tmp_path / "mail", spool.store)
    assert trouble.name == message_id(2)
    assert sorted(each.name for each in (tmp_path / "mail").iterdir()) == [
        f"{message_id(1)}.eml",
        f"{message_id(1)}.json",
    ]


async def test_a_target_that_is_there_is_not_replaced(tmp_path: Path, spool: Spool) -> None:
    await fill(spool.store)
    for name in ("mail", "mail.tar"):
        await export_to(tmp_path / name, spool.store)
        with pytest.raises(TransferError):
            await export_to(tmp_path / name, spool.store)
    with tarfile.open(tmp_path / "mail.tar") as tar:
        assert len(tar.getnames()) == 4


async def test_a_torn_register_of_either_side_is_cut_before_they_are_merged(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for home, keys in ((here, ("one", "both")), (there, ("both", "two", "three"))):
        home.mkdir()
        ImportRegister(home).add((key, "a@example.net") for key in keys)
        with (home / FILE).open("ab") as file:
            file.write(b"0123")
    assert merge_registers(here / FILE, there / FILE)
    merged = ImportRegister(there)
    assert all(merged.knows(key, "a@example.net") for key in ("one", "both", "two", "three"))
    assert (there / FILE).stat().st_size == 4 * 33
    assert not merge_registers(here / FILE, there / FILE)
