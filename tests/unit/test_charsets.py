"""Character sets that strangers name: which are decoded, that they take linear time, and that no other place
lets a name choose a codec.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator

import pytest

from tests.support.source import PACKAGE, modules, tree_of
from zonerelay.capture.parts import MimeParts, take_apart
from zonerelay.model.charsets import CODECS, codec_of, text_of

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
