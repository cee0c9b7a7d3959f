"""Transcripts as tests: every file in `transcripts/` is one conversation with a listener.

    # what it shows                        any number of comment lines
    set max_recipients = 2                 a listener setting, as Python literal
    store full                             full | broken | bug | sick: what the store does next
    C: EHLO client                         the client sends a line; consecutive ones go out in one packet
    R: a\\nb\\r\\n                            the client sends exactly these octets
    S: 250 2.0.0 *                         the server's next line; `*` stands for any text
    E:                                     the server's answer to EHLO, whatever it offers
    X:                                     the server closes
    M: Subject: x\\r\\n\\r\\nbody\\r\\n          the last stored message ends with exactly this
    N: 1                                   how many messages are stored by now
    F: a@example.org > b@example.com       envelope of the last stored message
    L: size                                the reason of the latest refusal in the log

Every line of the server is checked for form (RFC 5321 4.2, RFC 2034) in passing.
"""

from __future__ import annotations

import ast
import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.support.inbound import House, RememberingStore, Talk, listening
from zonerelay.config.models import BareLineEnds, ListenerSettings
from zonerelay.store.base import StoreError, StoreFullError

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
STORE_ERRORS = {
    "full": StoreFullError("No space left on device"),
    "broken": StoreError("/var/lib/zonerelay/spool: Input/output error"),
    "bug": ZeroDivisionError("/secret/path"),
}
Step = tuple[int, str, str]


def load(path: Path) -> list[Step]:
    steps = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            kind, _, rest = line.partition(" ")
            steps.append((number, kind.rstrip(":"), rest))
    return steps


def configured(steps: list[Step]) -> ListenerSettings:
    # Any: the literal's type is whatever the setting's is.
    values: dict[str, Any] = {"address": "127.0.0.1:0"}
    for _, kind, rest in steps:
        if kind == "set":
            name, _, literal = rest.partition(" = ")
            values[name] = ast.literal_eval(literal)
    if "bare_line_ends" in values:
        values["bare_line_ends"] = BareLineEnds(values["bare_line_ends"])
    return ListenerSettings(**values)


def unescaped(text: str) -> bytes:
    return bytes(ast.literal_eval(f"b'{text}'")) if text.isascii() else text.encode()


def break_store(store: RememberingStore, how: str) -> None:
    async def fail() -> None:
        raise STORE_ERRORS[how]

    if how == "sick":
        store.sick = "less than 100 MB free at /var/lib/zonerelay"
    else:
        store.before_commit = fail


async def play(steps: list[Step], house: House, talk: Talk) -> None:
    pending = b""
    for number, kind, rest in steps:
        if kind not in ("C", "R") and pending:
            talk.send(pending)
            pending = b""
        where = f"line {number}: {kind}: {rest}"
        match kind:
            case "C":
                pending += rest.encode() + b"\r\n"
            case "R":
                pending += unescaped(rest)
            case "S":
                line = (await talk.line()).decode()
                assert line == rest or ("*" in rest and fnmatch.fnmatchcase(line, rest)), (
                    f"{where}: got {line!r}"
                )
            case "E":
                assert (await talk.reply()).startswith(b"250-relay.example.org\n250-PIPELINING\n"), where
            case "X":
                assert await talk.closed() == b"", where
            case "store":
                break_store(house.store, rest)
            case "set":
                continue
            case _:
                check(kind, rest, house, where)


def check(kind: str, rest: str, house: House, where: str) -> None:
    stored = house.store.stored
    match kind:
        case "M":
            assert stored[-1].body.endswith(b"\r\n" + unescaped(rest)), (where, stored[-1].body)
        case "N":
            assert len(stored) == int(rest), where
        case "F":
            envelope = stored[-1].message.envelope
            recipients = ",".join(recipient.address for recipient in envelope.recipients)
            assert f"{envelope.sender} > {recipients}" == rest, where
        case "L":
            assert house.log.reasons()[-1] == rest, (where, house.log.entries)
        case _:
            pytest.fail(f"{where}: not a step")


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=[path.stem for path in TRANSCRIPTS])
async def test_transcript(path: Path) -> None:
    steps = load(path)
    async with listening(configured(steps)) as house, await house.connect_raw() as talk:
        await play(steps, house, talk)
        bugs = [step for step in steps if step[1:] == ("store", "bug")]
        assert len(house.log.named("trouble")) == len(bugs), house.log.entries


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 40
