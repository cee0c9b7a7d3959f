"""The receiver of the sandbox does what each address asks for, and captures everything else."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.smtp_client import connected
from zonerelay.capture.store import Capture
from zonerelay.config.settings import CaptureSettings, Settings, SpoolSettings
from zonerelay.model.clock import SystemClock
from zonerelay.sandbox import captured
from zonerelay.sandbox.captured import CapturingSink, build


@pytest.fixture
async def receiver(tmp_path: Path) -> AsyncIterator[tuple[CapturingSink, Capture]]:
    settings = Settings(spool=SpoolSettings(path=tmp_path / "spool"), capture=CaptureSettings())
    sandbox, sink = build(settings, SystemClock())
    await sink.start()
    yield sink, sandbox.capture
    await sink.close()
    sandbox.capture.close()


async def talk(port: int, *commands: str) -> list[str]:
    """The replies, each without its other lines; it ends with "" when the connection does."""
    replies = [""]
    async with connected(port) as client, asyncio.timeout(10):
        with contextlib.suppress(EOFError):
            for command in commands:
                replies[-1] = (await client.say(command.encode())).decode()
                replies.append("")
            replies.pop()
    return replies[1:]


def mail(recipient: str, sender: str = "a@b.example") -> tuple[str, ...]:
    return (
        "EHLO x",
        f"MAIL FROM:<{sender}> BODY=8BITMIME",
        f"RCPT TO:<{recipient}>",
        "DATA",
        "x: y\r\n\r\nz\r\n.",
    )


@pytest.mark.parametrize(
    ("local", "replies"),
    [
        ("reject-550", ["250", "550 5.0.0"]),
        ("defer-451", ["250", "451 4.0.0"]),
        ("reply-452-4.2.2", ["250", "452 4.2.2"]),
        ("permerror", ["250", "550 5.1.1"]),
        ("greylist", ["250", "451 4.7.1"]),
        ("slow-1s", ["250", "250", "354", "250 2.0.0"]),
        ("datacmd-451", ["250", "250", "451 4.0.0"]),
        ("data-554", ["250", "250", "354", "554 5.0.0"]),
        ("early-552", ["250", "250", "354", "552 5.0.0"]),
        ("close", ["250", ""]),
        ("close-before-dot", ["250", "250", "354", ""]),
        ("close-after-dot", ["250", "250", "354", ""]),
        ("anything+else", ["250", "250", "354", "250 2.0.0"]),
    ],
)
async def test_an_address_asks_for_a_failure(
    receiver: tuple[CapturingSink, Capture], local: str, replies: list[str]
) -> None:
    sink, capture = receiver
    found = await talk(sink.port, *mail(f"{local}@d.example"))
    assert [reply[: len(wanted) or 9] for reply, wanted in zip(found, replies, strict=False)] == replies
    assert capture.totals().messages == (replies[-1] == "250 2.0.0")


async def test_a_greylisted_recipient_is_accepted_later(
    receiver: tuple[CapturingSink, Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, _ = receiver
    monkeypatch.setattr(captured, "GREYLISTING", 0.2)
    assert (await talk(sink.port, *mail("greylist@d.example")[:3]))[-1].startswith("451 4.7.1")
    await asyncio.sleep(0.3)
    assert (await talk(sink.port, *mail("greylist@d.example")))[-1].startswith("250 2.0.0")


@pytest.mark.parametrize(
    ("sender", "recipient"),
    [("", "who@d.example"), ("a@b.example", '"a b"@d.example'), ("ü@b.example", "ä@d.example")],
)
async def test_what_the_relay_may_send_is_captured(
    receiver: tuple[CapturingSink, Capture], sender: str, recipient: str
) -> None:
    sink, capture = receiver
    replies = await talk(
        sink.port,
        "EHLO x",
        f"MAIL FROM:<{sender}> SMTPUTF8",
        f"RCPT TO:<{recipient}>",
        "DATA",
        f"x: y\r\n\r\n..dot\r\n{'long' * 3000}\r\n.",
    )
    assert replies[-1].startswith("250 2.0.0")
    (found,) = capture.find()[0]
    assert (found.sender, found.recipients) == (sender, [recipient])
    read = capture.read(found.id)
    assert read is not None
    assert read[1] == f"x: y\r\n\r\n.dot\r\n{'long' * 3000}\r\n".encode()
