"""The drop directory of sendmail(1): no file delays the mail of others; what is not taken is named once."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.event_log import EventLog, events_into
from zonerelay.inbound.cleanup.submit import SubmittedEnvelope
from zonerelay.inbound.drop_directory import FIRST_PAUSE, LONGEST_PAUSE, SHARE, DropDirectory, NoListenerError
from zonerelay.model.clock import ManualClock
from zonerelay.sendmail import MAX_ENVELOPE

GOOD = b"zonerelay-drop-1\nMAIL FROM:<a@b.example>\nRCPT TO:<ann@d.example>\n\nSubject: x\n\nhello\n"
MOST = 1000


class Listener:
    """Satisfies `OwnMessage`. `says` is asked about each message: "" takes it, other text refuses it."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.says: Callable[[bytes], str] = lambda message: ""

    def __call__(self, envelope: SubmittedEnvelope, message: bytes) -> str:
        self.asked.append(message)
        return self.says(message)


class Scene:
    def __init__(self, place: Path) -> None:
        self.new = place / "new"
        self.new.mkdir()
        self.listener = Listener()
        self.drop = DropDirectory(
            place,
            self.listener,
            max_size=MOST,
            hostname="relay.test",
            events=events_into(EventLog(), ManualClock()),
        )
        self.now = 1000.0

    def put(self, name: str, content: bytes = GOOD) -> Path:
        path = self.new / name
        path.write_bytes(content)
        return path

    def fail(self, error: Exception, part: bytes = b"", *, after: float = 0.0) -> None:
        """The listener raises this for a message with this part, after so many seconds."""

        def says(message: bytes) -> str:
            if part in message:
                self.now += after
                raise error
            return ""

        self.listener.says = says

    def left(self) -> list[str]:
        return sorted(each.name for each in self.new.iterdir())


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene(tmp_path)
    monkeypatch.setattr("zonerelay.inbound.drop_directory.monotonic", lambda: made.now)
    return made


def test_whatever_is_no_message_is_set_aside_once_and_the_others_go_on(scene: Scene, tmp_path: Path) -> None:
    scene.put("empty", b"")
    scene.put("huge", GOOD + b"x" * (MOST + MAX_ENVELOPE))
    scene.put("no-format", b"Subject: x\n\nhello\n")
    scene.put("no-end", b"zonerelay-drop-1\nMAIL FROM:<a@b.example>\nRCPT TO:<ann@d.example>\n")
    scene.put("no-recipient", b"zonerelay-drop-1\nMAIL FROM:<a@b.example>\n\nx\n")
    scene.put("nul", GOOD.replace(b"ann", b"an\0n"))
    scene.put("latin-1", GOOD.replace(b"ann", b"\xe4nn"))
    scene.put("unknown-line", GOOD.replace(b"MAIL FROM", b"QUIT FROM"))
    scene.put("b" * 250, b"")
    scene.put(os.fsdecode(b"\xff\xfe\n"), b"")
    (scene.new / "directory").mkdir()
    (scene.new / "directory" / "inside").write_text("x")
    (scene.new / "pointing").symlink_to(scene.put("pointed at"))
    os.mkfifo(scene.new / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(scene.new / "socket"))
    (tmp_path / "outside").write_bytes(GOOD)
    os.link(tmp_path / "outside", scene.new / "linked")
    scene.put("good")
    found = scene.drop._pass()
    assert len(scene.listener.asked) == 2
    assert len(found.refused) == 15
    assert found.delayed == []
    assert found.is_whole
    assert all(each.endswith(".refused") for each in scene.left())
    assert all(name.isprintable() for name, _, _ in found.refused)
    assert scene.drop._pass().refused == []
    (problem,) = scene.drop.problems()
    assert "15 messages of sendmail(1) were rejected" in problem


def test_a_file_that_is_set_aside_takes_no_others_name(scene: Scene) -> None:
    scene.put("same", b"first")
    scene.drop._pass()
    scene.put("same", b"second")
    scene.drop._pass()
    assert sorted(each.read_bytes() for each in scene.new.iterdir()) == [b"first", b"second"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        TimeoutError("timed out"),
        UnicodeEncodeError("ascii", "é", 0, 1, "x"),
        RecursionError(),
        RuntimeError("?"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_taken_is_named_once_and_tried_ever_less(scene: Scene, error: Exception) -> None:
    scene.fail(error, b"bad")
    scene.put("0-bad", GOOD + b"bad\n")
    scene.put("good")
    found = scene.drop._pass()
    assert [name for name, _, _ in found.delayed] == ["0-bad"]
    assert scene.left() == ["0-bad"]
    assert "1 messages of sendmail(1) cannot be accepted" in scene.drop.problems()[0]
    assert "0-bad" in scene.drop.problems()[0]
    tries = []
    for _ in range(3600):
        scene.now += 1.0
        scene.listener.asked.clear()
        found = scene.drop._pass()
        assert found.delayed == []
        if scene.listener.asked:
            tries.append(scene.now - 1000.0)
    assert tries[0] == FIRST_PAUSE
    assert len(tries) < 12
    assert tries[-1] - tries[-2] == LONGEST_PAUSE
    scene.listener.says = lambda message: ""
    scene.now += LONGEST_PAUSE
    assert scene.drop._pass().is_whole
    assert scene.left() == []
    assert scene.drop.problems() == ()


def test_files_that_fail_count_in_the_share(scene: Scene) -> None:
    scene.fail(OSError("not now"))
    for number in range(SHARE + 50):
        scene.put(f"{number:03}")
    assert not scene.drop._pass().is_whole
    assert len(scene.listener.asked) == SHARE
    scene.drop._pass()
    assert len(scene.listener.asked) == SHARE + 50
    scene.drop._pass()
    assert len(scene.listener.asked) == SHARE + 50


def test_new_mail_comes_before_what_failed(scene: Scene) -> None:
    scene.fail(TimeoutError("timed out"), b"bad", after=60.0)  # the listener said nothing
    for number in range(20):
        scene.put(f"bad-{number:02}", GOOD + b"bad\n")
    scene.drop._pass()
    assert len(scene.listener.asked) == 1  # the owner's time in this pass is over
    for _ in range(20):
        scene.drop._pass()
    scene.now += LONGEST_PAUSE
    scene.put("zz-good")
    scene.listener.asked.clear()
    scene.drop._pass()
    assert b"bad" not in scene.listener.asked[0]


def test_what_waits_is_told_while_files_are_tried_again(scene: Scene) -> None:
    scene.put("stuck")
    scene.fail(OSError(errno.EIO, "Input/output error"))
    scene.drop._pass()
    told: list[str] = []

    def says(message: bytes) -> str:
        told.extend(scene.drop.problems())
        return ""

    scene.listener.says = says
    scene.now += FIRST_PAUSE
    scene.put("new")
    scene.drop._pass()
    assert [each.partition(" accepted ")[0] for each in told] == ["1 messages of sendmail(1) cannot be"] * 2
    assert scene.drop.problems() == ()


def test_what_cannot_be_removed_is_taken_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.put("stuck")

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        for _ in range(5):
            scene.drop._pass()
            scene.now += LONGEST_PAUSE
    assert len(scene.listener.asked) == 1
    scene.drop._pass()
    assert len(scene.listener.asked) == 1
    assert scene.left() == []


def test_while_no_listener_takes_mail_no_file_is_to_blame(scene: Scene) -> None:
    scene.fail(NoListenerError("the relay at 127.0.0.1:25 does not answer"))
    scene.put("one")
    scene.put("two")
    found = scene.drop._pass()
    assert len(scene.listener.asked) == 1
    assert (found.delayed, found.is_whole) == ([], False)
    assert "does not answer" in scene.drop.problems()[0]
    scene.listener.says = lambda message: ""
    assert scene.drop._pass().is_whole
    assert scene.left() == []


def test_a_directory_that_is_none_is_a_problem(scene: Scene) -> None:
    scene.new.rmdir()
    scene.new.write_text("x")
    assert not scene.drop._pass().is_whole
    assert "is not a directory" in scene.drop.problems()[0]
