"""The JSON body of a submission, in whatever pieces it comes, and the templates of a batch."""

from __future__ import annotations

import base64
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from zonerelay.admin.problems import ApiError
from zonerelay.admin.submission import body as module
from zonerelay.admin.submission.batch import MAX_OUTPUT, MAX_TAGS, substituted
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


# Batches


FIELDS = ("subject", "text", "html")
FILLER = "{{a}}" * (65_000 // 5)


def filled(fields: dict[str, Any], directory: Path = Path("/nonexistent")) -> dict[str, Any]:
    return substituted(fields, JsonBody(10**6, directory))


COSTLY: dict[str, dict[str, Any]] = {
    "seven fields": {
        **dict.fromkeys(FIELDS, FILLER),
        "headers": {f"X-{each}": FILLER for each in range(4)},
        "substitutions": {"a": "x"},
    },
    "one field": {"text": FILLER, "substitutions": {"a": ""}},
    "many headers": {
        "headers": {f"X-{each}": "{{a}}" * 10 for each in range(MAX_TAGS // 10 + 1)},
        "substitutions": {"a": "x"},
    },
    "sections": {"text": "{{#a}}x{{/a}}" * MAX_TAGS, "substitutions": {"a": True}},
    "unbalanced": {"text": "{{" * (MAX_TAGS + 1), "substitutions": {"a": 1}},
    "long values": {
        "text": "{{a}}" * 900,
        "html": "{{a}}" * 90,
        "substitutions": {"a": "<" * (MAX_OUTPUT // 5000)},
    },
    "unsupported delimiters": {"text": "{{=<% %>=}}" + "<%a%>" * 100, "substitutions": {"a": "x"}},
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_template_is_refused_before_it_is_filled_in(name: str) -> None:
    """65 KB of {{a}} in seven fields, in 150 messages, held the event loop for 35 s."""
    began = time.process_time()
    for _ in range(150):
        with pytest.raises(ApiError) as caught:
            filled(COSTLY[name])
        assert caught.value.body.status == 422
    assert time.process_time() - began < 2


def test_templates_within_the_bound_are_filled_in() -> None:
    given = {"text": "{{a}}" * (MAX_TAGS - 1), "html": "{{a}}", "substitutions": {"a": "<&"}}
    found = filled(given)
    assert found == {"text": "<&" * (MAX_TAGS - 1), "html": "&lt;&amp;"}
