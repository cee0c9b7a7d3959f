"""What is stored changes only together with a fixture.

The queue of `mail` is written anew by this tree and compared with the newest fixture. When they differ the
stored format has changed: older releases will meet it, and a release that has it must read what is there.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.upgrades import fixtures, mail, passing
from tests.upgrades.engines import ENGINES, Records
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Envelope, Message, Origin, Recipient
from zonerelay.model.outcome import Attempt
from zonerelay.model.queue_name import parse_queue
from zonerelay.model.reply import Reply

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
