"""The JSON body of a submission, in whatever pieces it comes."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest

from zonerelay.admin.submission import body as module
from zonerelay.admin.submission.body import JsonBody, StoredBase64, TooLargeError
from zonerelay.message.compose.mime import Base64Error

TEXTS = ("", "short", 'quote " and \\ and \n', "ü€😀" * 30, "x" * 300, '\\"' * 200, "\u2028" * 90)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("escaped", [True, False])
def test_strings_come_back_whole(
    seed: int, escaped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONG", 100)
    monkeypatch.setattr(module, "WRITE", 64)
    chance = random.Random(seed)
    octets = chance.randbytes(1000)
    given = {f"{at}{text[:2]}": text for at, text in enumerate(chance.sample(TEXTS, len(TEXTS)))}
    document = json.dumps({**given, "file": base64.b64encode(octets).decode()}, ensure_ascii=escaped)
    if escaped:  # as PHP and .NET write base64
        document = document.replace("/", "\\/").replace("+", "\\u002B").replace("A", "A\\r\\n")
    data = document.encode()
    body = JsonBody(len(data), tmp_path)
    at = 0
    while at < len(data):
        size = chance.choice((1, 2, 3, 7, 50, 500))
        body.feed(data[at : at + size])
        at += size
        if body.full:
            body.flush()
    body.flush()
    found = json.loads(body.finish())
    for name, text in given.items():
        long = body.long(found[name.replace("A", "A\r\n") if escaped else name])
        assert (long.text() if long else found[name]) == text
        assert (long is not None) == (len(json.dumps(text, ensure_ascii=escaped).encode()) - 2 > 100)
    file = body.long(found["file"])
    assert file is not None
    assert b"".join(StoredBase64(file, "file").pieces()) == octets
    body.close()


def test_limits_and_broken_bodies(tmp_path: Path) -> None:
    body = JsonBody(10, tmp_path)
    with pytest.raises(TooLargeError):
        body.feed(b"x" * 11)
    many = JsonBody(100_000_000, tmp_path)
    with pytest.raises(TooLargeError):
        many.feed(b"[" * 10_000_000)
    for data in (b'{"a": "x', b'{"a": "x\\', b'"' + b"x" * 100_000):
        open_ended = JsonBody(1_000_000, tmp_path)
        open_ended.feed(data)
        open_ended.flush()
        with pytest.raises(json.JSONDecodeError):
            json.loads(open_ended.finish())
        open_ended.close()
    wrong = JsonBody(1_000_000, tmp_path)
    wrong.feed(b'"' + b"?" * 70_000 + b'"')
    wrong.flush()
    long = wrong.long(json.loads(wrong.finish()))
    assert long is not None
    with pytest.raises(Base64Error):
        list(StoredBase64(long, "file").pieces())
    wrong.close()
