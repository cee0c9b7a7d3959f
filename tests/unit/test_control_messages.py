"""The control protocol's lines, and where its socket is."""

from __future__ import annotations

from pathlib import Path

import pytest

from zonerelay.config.settings import AdminSettings, Settings, SpoolSettings
from zonerelay.control.socket import control_socket_path
from zonerelay.model.delivery import DeliveryState
from zonerelay.operations import answers as messages
from zonerelay.operations.answers import BodyPiece, DeliveryRow, EndFrame, ErrorFrame, Frame, Progress
from zonerelay.operations.catalogue import decode_call
from zonerelay.operations.errors import ControlError, ErrorKind, InvalidError
from zonerelay.operations.requests import Filter

ROW = DeliveryRow(
    message_id="0" * 16,
    zone="default",
    sender=None,
    recipient="a@example.com",
    domain="example.com",
    state="deferred",
    created=1.5,
    attempts=2,
    next_attempt=9.0,
    reply="451 4.3.0 two\nlines",
)
FRAMES: list[Frame] = [
    ROW,
    EndFrame(count=1, more=True),
    ErrorFrame(code=ErrorKind.NOT_FOUND, detail="no"),
    Progress(done=3),
    BodyPiece(octets=b"\r\n\xff"),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_survives_the_wire_on_one_line(frame: Frame) -> None:
    line = messages.encode(frame)
    assert line.count(b"\n") == 1
    assert messages.decode_frame(line) == frame


def test_a_newer_relays_extra_field_does_not_hurt_an_older_command() -> None:
    line = messages.encode(ROW).replace(b'{"kind"', b'{"flavour":"new","kind"')
    assert messages.decode_frame(line) == ROW


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"[]\n",
        b"null\n",
        b'{"request":{}}\n',
        b'{"request":{"operation":"queue-burn"}}\n',
        # A filter that is ignored is a queue emptied.
        b'{"request":{"operation":"queue-list","filter":{"colour":"red"}}}\n',
        b'{"request":{"operation":"queue-list","limit":"many"}}\n',
        b'{"request":{"operation":"ping"}} trailing\n',
        b"\xff\xfe\n",
    ],
)
def test_what_is_no_request_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidError):
        decode_call(line)


def test_only_an_empty_filter_is_everything() -> None:
    assert Filter().is_everything
    for some in (
        Filter(sender=""),
        Filter(domain="a"),
        Filter(min_age=0.0),
        Filter(state=DeliveryState.HELD),
    ):
        assert not some.is_everything


def _settings(spool: str, socket: str | None = None) -> Settings:
    return Settings(
        spool=SpoolSettings(path=Path(spool)), admin=AdminSettings(socket=Path(socket) if socket else None)
    )


@pytest.mark.parametrize(
    ("spool", "socket", "path"),
    [
        ("/var/lib/zonerelay/spool", None, Path("/var/lib/zonerelay/control.sock")),
        ("/spool", "/run/z/c.sock", Path("/run/z/c.sock")),
        ("var/spool", None, Path.cwd() / "var" / "control.sock"),
    ],
    ids=["beside the spool", "named", "beside the working directory"],
)
def test_where_the_socket_is(spool: str, socket: str | None, path: Path) -> None:
    assert control_socket_path(_settings(spool, socket)) == path


@pytest.mark.parametrize(("length", "fits"), [(107, True), (108, False)])
def test_a_path_that_the_system_cannot_hold_is_refused_in_words(length: int, fits: bool) -> None:
    settings = _settings("/spool", "/" + "s" * (length - 1))
    if fits:
        assert len(str(control_socket_path(settings))) == length
        return
    with pytest.raises(ControlError, match=r"has 108 bytes, .* set \[admin\] socket"):
        control_socket_path(settings)
