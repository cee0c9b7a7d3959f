"""The store of captured mail: its bounds, its search, and messages that are not what they seem."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zonerelay.capture.parts import take_apart
from zonerelay.capture.search import SearchError
from zonerelay.capture.store import (
    LATEST,
    OVERHEAD,
    Capture,
    CaptureError,
    CaptureFullError,
    CaptureTooLargeError,
)
from zonerelay.model.clock import ManualClock

DAY = 86_400.0


_OPENED: list[Capture] = []


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    yield
    while _OPENED:
        _OPENED.pop().close()


def opened(
    path: Path, clock: ManualClock | None = None, *, max_size: int = 1_000_000, guard: int = 0
) -> Capture:
    file = path / "captured" / "captured.db"
    _OPENED.append(Capture(file, keep=DAY, max_size=max_size, guard=guard, now=(clock or ManualClock()).now))
    return _OPENED[-1]


def mail(subject: str, text: str = "text", more: str = "") -> bytes:
    head = f"From: Ann <ann@example.org>\r\nTo: bob@example.com\r\nSubject: {subject}\r\n{more}"
    return f"{head}\r\n{text}\r\n".encode()


def subjects(capture: Capture, query: str = "") -> list[str]:
    return [each.subject for each in capture.find(query)[0]]


def test_the_oldest_goes_when_there_is_too_much_or_it_is_too_old(tmp_path: Path) -> None:
    clock = ManualClock(1_800_000_000.0)
    capture = opened(tmp_path, clock, max_size=10 * OVERHEAD)
    big = "x" * (OVERHEAD * 2)
    for number in range(6):
        clock.advance(1)
        capture.add(f"id{number}", "ann@example.org", ["bob@example.com"], mail(f"n{number}", big))
    assert subjects(capture) == ["n5", "n4", "n3"]
    assert capture.totals().octets <= 10 * OVERHEAD
    with pytest.raises(CaptureTooLargeError, match="max_size"):
        capture.add("large", "", ["b@example.com"], b"x" * 10 * OVERHEAD)
    assert len(subjects(capture)) == 3
    clock.advance(DAY - 1.5)
    assert subjects(capture) == ["n5", "n4"]
    assert capture.read("id3") is None
    clock.advance(DAY)
    capture.expire()
    assert capture.totals().messages == 0
    capture.close()
    file = tmp_path / "captured" / "captured.db"
    assert file.stat().st_size < 20 * OVERHEAD  # what was deleted goes back to the file system


def test_one_id_is_one_message(tmp_path: Path) -> None:
    capture = opened(tmp_path)
    capture.add("id", "ann@example.org", ["bob@example.com"], mail("s"))
    capture.add("id", "ann@example.org", ["bob@example.com", "eve@example.com"], mail("s"))
    found, matched, unread = capture.find()
    assert (matched, unread) == (1, 1)
    assert found[0].recipients == ["bob@example.com", "eve@example.com"]
    assert found[0].bcc == [("", "eve@example.com")]
    assert capture.read(LATEST) is not None
    assert capture.totals().unread == 0


def test_what_cannot_be_kept_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(CaptureFullError, match="min_free_space"):
        opened(tmp_path, guard=1 << 60).add("id", "", ["b@example.com"], mail("s"))
    broken = tmp_path / "broken" / "captured"
    broken.mkdir(parents=True)
    (broken / "captured.db").write_bytes(b"this is no database, and long enough to be looked at" * 100)
    with pytest.raises(CaptureError, match="it is damaged"):
        opened(tmp_path / "broken").add("id", "", ["b@example.com"], mail("s"))


def test_several_processes_make_and_write_one_file(tmp_path: Path) -> None:
    """SQLite does not wait while it sets the journal mode of a new file: one of 20 rounds shows it."""
    clock = ManualClock(1_800_000_000.0)
    for number in range(10):
        home = tmp_path / str(number)
        home.mkdir()
        start = threading.Barrier(6)

        def write(name: str, home: Path = home, start: threading.Barrier = start) -> None:
            capture = opened(home, clock)
            start.wait(60)
            capture.add(name, "", ["b@example.com"], mail(name))
            capture.close()

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(write, "abcdef"))
        assert opened(home, clock).totals().messages == 6


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", ["three", "two words", "one"]),
        ("subject:ONE", ["one"]),
        ('subject:"two words"', ["two words"]),
        ("to:bob@example.com -subject:one", ["three", "two words"]),
        ("from:ann needle", ["two words"]),
        ("!needle", ["three", "one"]),
        ("bcc:hidden", ["three"]),
        ("addressed:hidden", ["three"]),
        ("has:attachment", ["three"]),
        ("is:unread", ["three", "two words"]),
        ("is:read", ["one"]),
        ("tag:blue", ["one"]),
        ("message-id:m1@", ["one"]),
        ("larger:1k", ["three"]),
        ("smaller:1k after:2020-01-01 before:2100-01-01", ["two words", "one"]),
        ("100%", []),
        ("'; DROP TABLE mail; --", []),
        ("unknown:word", []),
    ],
)
def test_search(tmp_path: Path, query: str, found: list[str]) -> None:
    capture = opened(tmp_path)
    more = "Message-ID: <m1@example.org>\r\nX-Tags: blue, red\r\n"
    capture.add("1", "ann@example.org", ["bob@example.com"], mail("one", more=more))
    capture.add("2", "ann@example.org", ["bob@example.com"], mail("two words", "a Needle here"))
    parts = 'MIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary="x"\r\n'
    text = f"--x\r\n\r\ntext\r\n--x\r\nContent-Disposition: attachment\r\n\r\n{'y' * 2000}\r\n--x--"
    capture.add("3", "ann@example.org", ["bob@example.com", "hidden@example.com"], mail("three", text, parts))
    capture.read("1")
    assert subjects(capture, query) == found
    with pytest.raises(SearchError, match="not a date"):
        capture.find("after:nonsense")


def test_names_in_any_writing_are_read() -> None:
    octets = (
        "From: Grüße <g@example.org>\r\nSubject: =?iso-8859-1?q?gr=FC?= und grün\r\n"
        "Content-Type: text/plain; charset=iso-8859-1; name*=utf-8''%C3%BC.txt\r\n\r\n"
    ).encode() + "ü".encode("latin-1")
    parts = take_apart(octets)
    assert parts.people("from") == [("Grüße", "g@example.org")]
    assert parts.header("subject") == "grü und grün"
    assert [each.file_name for each in parts.attachments] == ["ü.txt"]


@pytest.mark.parametrize(
    "octets",
    [
        b"",
        b"\r\n",
        b"\xff\xfe\x00 no header",
        b"Subject: =?nonsense?b?//8=?=\r\nFrom: \xff@\xfe\r\n\r\nx",
        b"Subject: =?utf-8?b?w?=\r\nDate: Thu, 99 Foo 99999 99:99:99\r\n\r\nx",
        b"Content-Type: text/html; charset=nonsense\r\n\r\n<p>\xff</p>",
        b"Content-Type: multipart/mixed\r\n\r\nno boundary",
        b'Content-Type: multipart/mixed; boundary="' + b"b" * 5000 + b'"\r\n\r\n--b',
        b"Content-Type: message/rfc822\r\n\r\nSubject: inner\r\n\r\nx",
        b"Content-Transfer-Encoding: base64\r\n\r\n!!!!",
        b"Content-Transfer-Encoding: x-uuencode\r\n\r\nbegin nonsense",
        b"Content-Type: text/plain; name*0*=utf-8''%; name*1*=x\r\n\r\nx",
        b"From: " + b"a@b," * 20_000 + b"\r\n\r\nx",
    ],
    ids=range(13),
)
def test_any_octets_are_a_message(tmp_path: Path, octets: bytes) -> None:
    capture = opened(tmp_path)
    capture.add("id", "ann@example.org", ["b@example.com"], octets)
    found = capture.read("id")
    assert found is not None
    assert found[1] == octets
    parts = take_apart(octets)
    _ = parts.links(), parts.words(), parts.html_to_show(), parts.date, parts.plain()


def test_nested_and_numerous_parts_take_no_time() -> None:
    nested = b"".join(
        b'Content-Type: multipart/mixed; boundary="b%d"\r\n\r\n--b%d\r\n' % (n, n) for n in range(2000)
    )
    numerous = b"Content-Type: multipart/mixed; boundary=b\r\n\r\n" + b"--b\r\n\r\nx\r\n" * 50_000
    # A pattern that backtracks would take minutes for each of these.
    tags = b"Content-Type: text/html\r\n\r\n" + b"<" * 200_000 + b"<script " * 20_000 + b"<!--" * 20_000
    began = time.process_time()
    lines = b'Content-Type: multipart/mixed; boundary="b"\r\n\r\n--b\r\n\r\n' + b"\r\n" * 4_000_000
    for octets in (nested, numerous, tags, lines):
        parts = take_apart(octets)
        _ = parts.links(), parts.words(), parts.html_to_show()
    assert time.process_time() - began < 5


def test_people_are_read_before_their_names_are_decoded() -> None:
    octets = (
        b"From: =?utf-8?q?Foo=2C_Inc?= <a@b.example>\r\n"
        b'To: Shop [Sales] <s@b.example>; x@b.example <x@b.example>,\r\n "J\xfc" <j@b.example>\r\n'
        b"\r\nhello\r\n"
    )
    parts = take_apart(octets)
    assert parts.people("from") == [("Foo, Inc", "a@b.example")]
    assert [address for _, address in parts.people("to")] == ["s@b.example", "x@b.example", "j@b.example"]


def test_a_search_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = opened(tmp_path)
    for number in range(400):
        capture.add(
            f"{number:016x}", "a@example.org", ["b@example.com"], mail(f"order {number}", "text " * 50)
        )
    with monkeypatch.context() as patch:
        patch.setattr("zonerelay.capture.store.LONGEST", 0.0)
        with pytest.raises(CaptureError, match="aborted after"):
            capture.find("text -nothing -more")
    assert capture.find("text")[1] > 0
    capture.close()
