"""Heads of messages in a bucket: what a newer version has added to them stays when they are written again."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.store.builders import delivery_for, envelope_for, message_id, own_message
from zonerelay.model.envelope import Message
from zonerelay.store.common import records
from zonerelay.store.contract import StoreCorruptError
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.records import Head, HeadIntent, Report


def head(**other: Any) -> Head:  # Any: members by their names
    envelope = envelope_for(message_id(1), "a@example.net")
    message = Message(envelope=envelope, size=4, chunks=1, headers=(("Subject", "hi"),))
    rows = spelled.rows([delivery_for(envelope, "a@example.net")])
    return Head(format=1, owner="00a", rev=1, message=message, deliveries=rows, **other)


def newer(line: bytes) -> bytes:
    """What a version of tomorrow would have written."""
    members = json.loads(line)
    members["message"]["envelope"]["origin"]["asn"] = 64500
    members["message"]["language"] = "pl"
    return json.dumps({"tenant": "blue", **members, "shard": {"of": [1, 2]}}).encode() + b"\n"


def rewritten(line: bytes, **changes: Any) -> dict[str, Any]:  # Any: JSON
    found = msgspec.structs.replace(spelled.decode_head("x", line), **changes)
    members: dict[str, Any] = json.loads(spelled.encode_head(found))
    return members


def test_head_without_anything_unknown_is_written_as_it_was() -> None:
    line = spelled.encode_head(head())
    found = spelled.decode_head("x", line)
    assert found == head()
    assert found.kept == b""
    assert spelled.encode_head(found) == line


def test_members_of_a_newer_version_are_kept_when_a_head_is_written_again() -> None:
    line = newer(spelled.encode_head(head()))
    assert spelled.decode_head("x", line).message == head().message
    assert rewritten(line, rev=2, owner="01b") == json.loads(line) | {"rev": 2, "owner": "01b"}


def test_members_are_kept_over_many_writes_and_once_each() -> None:
    line = newer(spelled.encode_head(head()))
    for rev in (2, 3, 4):
        line = spelled.encode_head(msgspec.structs.replace(spelled.decode_head("x", line), rev=rev))
    assert json.loads(line) == json.loads(newer(spelled.encode_head(head()))) | {"rev": 4}
    assert line.count(b'"message"') == line.count(b'"tenant"') == 1


def test_message_that_an_intent_makes_keeps_what_a_newer_version_has_said_of_it() -> None:
    message, delivery = own_message(message_id(9), b"y", "from@example.org")
    raw = json.loads(records.encode_message(message)) | {"language": "pl"}
    report = Report(message=msgspec.Raw(json.dumps(raw).encode()), deliveries=spelled.rows([delivery]))
    (found,) = spelled.decode_head(
        "x", spelled.encode_head(head(intent=HeadIntent((report,))))
    ).intent.reports  # type: ignore[union-attr]  # it is there
    made = found.head("01b")
    assert (made.owner, made.message, found.message_id) == ("01b", message, message.id)
    assert json.loads(spelled.encode_head(made))["message"] == raw


@pytest.mark.parametrize("raw", [b"{}", b'{"envelope":{"id":"x"}}', b"3"])
def test_intent_with_an_unreadable_message_is_said_to_be_corrupt(raw: bytes) -> None:
    report = Report(message=msgspec.Raw(raw), deliveries=())
    line = spelled.encode_head(head(intent=HeadIntent((report,))))
    with pytest.raises(StoreCorruptError):
        spelled.decode_head("x", line)
