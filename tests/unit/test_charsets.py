"""Character sets that strangers name: which are decoded, that they take linear time, and that no other place
lets a name choose a codec.
"""

import ast
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.source import PACKAGE, modules, tree_of
from zonerelay.capture import store
from zonerelay.capture.parts import MimeParts, take_apart
from zonerelay.capture.store import OVERHEAD, Capture
from zonerelay.model.charsets import CODECS, codec_of, text_of
from zonerelay.model.clock import ManualClock

HOME = PACKAGE / "model/charsets.py"
HOSTILE = ("punycode", "idna", "unicode_escape", "raw_unicode_escape", "undefined", "uu", "zlib", "x" * 200)


def test_names_as_mail_writes_them() -> None:
    found = [
        codec_of(each)
        for each in ("UTF-8", "us-ascii", "ISO-8859-1", " windows-1252 ", "GB2312", "Shift_JIS")
    ]
    assert found == ["utf_8", "ascii", "latin_1", "cp1252", "gb2312", "shift_jis"]
    assert text_of("日本".encode("iso-2022-jp"), "ISO-2022-JP") == "日本"
    for codec in CODECS:
        assert "a b".encode(codec).decode(codec) == "a b"


@pytest.mark.parametrize("charset", HOSTILE, ids=range(len(HOSTILE)))
def test_another_name_is_read_as_utf_8(charset: str) -> None:
    assert codec_of(charset) is None
    assert text_of("ü".encode(), charset) == "ü"


def _mail(*fields: str, text: str = "a-") -> bytes:
    return ("Subject: s\r\n" + "".join(f"{each}\r\n" for each in fields) + f"\r\n{text}").encode()


TEXT, MIXED = "Content-Type: text/plain", "Content-Type: multipart/mixed"
# What repeats between two texts, for 400 KB in all.
MAIL = {
    "body": (f"{TEXT}; charset=punycode\r\n\r\n", "a-", ""),
    "rfc2231 charset": (f"{TEXT}; charset*=punycode''", "a-", ""),
    "rfc2231 name": (f"{TEXT}; name*=punycode''", "a-", ""),
    "rfc2231 filename": ("Content-Disposition: attachment; filename*=punycode''", "a-", ""),
    "rfc2231 boundary": (f"{MIXED}; boundary*=punycode''", "a-", ""),
    "encoded word": ("X-Field: =?punycode?q?", "a-", "?="),
    "parameters": (f'{TEXT}; a="', ";", '"'),
    "parameters of multipart": (f'{MIXED}; a="', ";", '"'),
    "parameters folded": (f"{MIXED};\r\n ", ";\r\n ", ""),
    "disposition": ("Content-Disposition: ", ";", ""),
    "date": ("Date: ", "1 ", ""),
    "character reference": ("Content-Type: text/html\r\n\r\n&#", "9", ""),
    "delivery report": ("Content-Type: message/delivery-status\r\n\r\n", "\r\n", ""),
    "bare CR": (f"X: y\r{TEXT}", ";a=b", ""),
    "delimiters": (f"{MIXED}; boundary=b\r\n\r\n", "--b", ""),
    "uu": ("Content-Transfer-Encoding: uuencode\r\n\r\nbegin 644 a\n", "M\n", ""),
}


@pytest.mark.parametrize("where", MAIL)
def test_a_captured_message_takes_linear_time(where: str) -> None:
    """400 KB with charset=punycode took 17 s."""
    before, piece, behind = MAIL[where]
    octets = _mail(before + piece * (400_000 // len(piece)) + behind)
    began = time.process_time()
    _read(take_apart(octets))
    assert time.process_time() - began < 1.5


def _read(parts: MimeParts) -> None:
    """All that the store and the pages read of it."""
    _ = (
        parts.date, parts.people("from"), parts.people("to"), parts.words(), parts.links(),
        parts.html_to_show(),
    )  # fmt: skip


def test_the_name_of_a_file_in_the_words_of_rfc_2231() -> None:
    fields = ("Content-Disposition: attachment; filename*0*=iso-8859-1''%FCber; filename*1=.txt",)
    (part,) = take_apart(_mail(*fields)).attachments
    assert part.file_name == "über.txt"
    parts = take_apart(_mail("Content-Type: text/plain; charset*=us-ascii'en'iso-8859-1", text="x"))
    assert parts.text == "x"


# --- the tree ---------------------------------------------------------------------------------------------

_CODERS = {
    "msgspec.json", "msgspec.msgpack", "decoder", "self._decoder", "_request", "_frame", "_preamble",
    "_DELIVERIES", "_MEMBERS", "ZoneLimits", "rows", "line_ends", "self._line_ends", "",
}  # fmt: skip
"""Receivers whose `decode` takes bytes, or text, and no name of a codec. A bare function is one of ours."""
_LIBRARY = {
    "get_content_charset", "get_charset", "get_filename", "get_boundary", "collapse_rfc2231_value",
    "make_header", "get_content", "post", "text", "json",
}  # fmt: skip
"""Functions of the standard library and of aiohttp that decode by a name in what they were given."""
_LOOK_UPS = {"lookup", "getincrementaldecoder", "getdecoder", "getreader"}
_DECODERS = {*_LOOK_UPS, "str", "decode", "encode"}


@pytest.mark.proof
def test_no_other_place_lets_a_stranger_choose_a_codec() -> None:
    for known in (
        "x.decode(charset)", "x.decode('punycode')", "x.encode('idna')", "str(x, charset)",
        "codecs.lookup(name)", "await request.post()", "part.get_filename()", "call.request.content_type",
    ):  # fmt: skip
        assert list(_choices(ast.parse(known))), known
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in modules()
        if path != HOME
        for line, text in _choices(tree_of(path.read_text()))
    ]
    assert not found, "decode by zonerelay.model.charsets, or by a name that is written in the code"


def _choices(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr):
            continue
        is_choice = isinstance(node, ast.Call) and _chooses(node)
        if is_choice or (isinstance(node, ast.Attribute) and _parses(node)):
            yield node.lineno, ast.unparse(node)[:100]


def _parses(attribute: ast.Attribute) -> bool:
    """aiohttp reads the parameters of Content-Type by `email`."""
    return attribute.attr in ("content_type", "charset") and ast.unparse(attribute.value).endswith("request")


def _chooses(call: ast.Call) -> bool:
    name = _name(call.func)
    given = [each.value for each in call.keywords if each.arg in ("encoding", "charset")]
    if name not in _LIBRARY | _DECODERS:
        return not all(map(_is_plain, given))
    receiver = ast.unparse(call.func).rpartition(".")[0]
    if name in _LIBRARY:
        return receiver.endswith(("request", "part", "message")) or ("_" in name and not receiver)
    if name in _LOOK_UPS and receiver in ("codecs", ""):
        given += call.args[:1]
    elif name == "str":
        given += call.args[1:2]
    elif name in ("decode", "encode"):
        if receiver in _CODERS:
            return False
        given += (
            call.args[:1] if name == "decode" else [e for e in call.args[:1] if isinstance(e, ast.Constant)]
        )
    return not all(map(_is_plain, given))


def _is_plain(argument: ast.expr) -> bool:
    if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
        return False
    return codec_of(argument.value) is not None or argument.value in ("utf-8-sig", "raw-unicode-escape")


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


# The store of captured mail: its bounds, its search, and messages that are not what they seem


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
    with pytest.raises(store.CaptureTooLargeError, match="max_size"):
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
    assert capture.read(store.LATEST) is not None
    assert capture.totals().unread == 0


def test_what_cannot_be_kept_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(store.CaptureFullError, match="min_free_space"):
        opened(tmp_path, guard=1 << 60).add("id", "", ["b@example.com"], mail("s"))
    broken = tmp_path / "broken" / "captured"
    broken.mkdir(parents=True)
    (broken / "captured.db").write_bytes(b"this is no database, and long enough to be looked at" * 100)
    with pytest.raises(store.CaptureError, match="it is damaged"):
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
        (f"larger:{'9' * 20}", []),
        (f"larger:{'9' * 400}", []),
        ("from:\0", []),
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
    with pytest.raises(store.SearchError, match="not a date"):
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
        with pytest.raises(store.CaptureError, match="aborted after"):
            capture.find("text -nothing -more")
    assert capture.find("text")[1] > 0
    capture.close()
