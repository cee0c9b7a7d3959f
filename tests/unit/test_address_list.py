"""Lists of addresses as they are written, read the same by every Python of this machine, in linear time."""

import json
import shutil
import subprocess
import sys
import time
from email.headerregistry import HeaderRegistry
from email.utils import getaddresses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets.messages import addresses
from zonerelay.message.header import MAX_ADDRESSES, MAX_LINE, MAX_OCTETS, change_addresses, change_field
from zonerelay.model import address_list
from zonerelay.model.address_list import MAX_ADDRESS, read_addresses

NONE = ""
"""An element that cannot be read."""

LISTS: list[tuple[str, list[tuple[str, str]]]] = [
    ("a@x.example", [("", "a@x.example")]),
    ("Ann <a@x.example>, Bob <b@x.example>", [("Ann", "a@x.example"), ("Bob", "b@x.example")]),
    ("a@x.example; b@x.example", [("", "a@x.example"), ("", "b@x.example")]),
    (",; a@x.example ;,", [("", "a@x.example")]),
    ("a@x.example b@x.example", [("", "a@x.example"), ("", "b@x.example")]),
    ("Ann <a@x.example> Bob <b@x.example>", [("Ann", "a@x.example"), ("Bob", "b@x.example")]),
    ("Shop [Sales] <s@x.example>", [("Shop [Sales]", "s@x.example")]),
    ("[Shop, Inc] <s@x.example>", [("[Shop, Inc]", "s@x.example")]),
    ("[Shop <s@x.example>, Bob] <b@x.example>", [("[Shop", "s@x.example"), ("Bob]", "b@x.example")]),
    ("john@x.example <john@x.example>", [("john@x.example", "john@x.example")]),
    ("A (Foo, Inc) <a@x.example>", [("A (Foo, Inc)", "a@x.example")]),
    ("John Q. Public <j@x.example>", [("John Q. Public", "j@x.example")]),
    ('"Smith, \\"J\\"" <j@x.example>', [('Smith, "J"', "j@x.example")]),
    ("a@x.example (Ann (B))", [("Ann (B)", "a@x.example")]),
    ("root (Cron Daemon)", [("Cron Daemon", "root")]),
    ('"(Cron Daemon)" <root>', [("(Cron Daemon)", "root")]),
    ("root, Ann <a@x.example>", [("", "root"), ("Ann", "a@x.example")]),
    ("Us: a@x.example, B <b@x.example>;, c@x.example", [
        ("", "a@x.example"), ("B", "b@x.example"), ("", "c@x.example"),
    ]),
    ("undisclosed-recipients:;", []),
    ("undisclosed-recipients:", []),
    ("mailto:a@x.example", [("", "a@x.example")]),
    ("<@r.example,@s.example:a@x.example>", [("", "a@x.example")]),
    ("a . b @ x . example", [("", "a.b@x.example")]),
    ("a(his)@(my)x.example(home)", [("his)(my)(home", "a@x.example")]),
    ("\r\n\ta\r\n @\r\n x.example", [("", "a@x.example")]),
    ('"a b, c"@x.example', [("", '"a b, c"@x.example')]),
    ('"a\r\n b"@x.example', [("", '"a b"@x.example')]),
    ("a@[192.0.2.1], <b@[IPv6:2001:db8::1]>", [("", "a@[192.0.2.1]"), ("", "b@[IPv6:2001:db8::1]")]),
    ("Jürgen <jü@bücher.example>", [("Jürgen", "jü@bücher.example")]),
    ("=?utf-8?q?J=C3=BCrgen?= <j@x.example>", [("=?utf-8?q?J=C3=BCrgen?=", "j@x.example")]),
    ("=?utf-8?q?Foo,_Inc?= <a@x.example>", [("=?utf-8?q?Foo,_Inc?=", "a@x.example")]),
    ('"Ann <a@x.example>, Bob <b@x.example>', [('"Ann', "a@x.example"), ("Bob", "b@x.example")]),
    ("A (Foo <a@x.example>, b@x.example", [("A (Foo", "a@x.example"), ("", "b@x.example")]),
    ("Ann <a@x.example, Bob <b@x.example>", [("", NONE), ("Bob", "b@x.example")]),
    ("Caf\\e <a@x.example>", [("Caf\\e", "a@x.example")]),
    ('"\ufffd\\" <a@x.example>, "\ufffd\\" <b@x.example>', [
        ("\ufffd\\", "a@x.example"), ("\ufffd\\", "b@x.example"),
    ]),
    ("\udc81@ <a@x.example>", [("\udc81@", "a@x.example")]),
    ('\x1b$B"@<(\x1b(B <a@x.example>', [('\x1b$B"@<(\x1b(B', "a@x.example")]),
    # What cannot be read, and what is beside it.
    ("garbage@@, a@x.example", [("", NONE), ("", "a@x.example")]),
    ("Sales Team, a@x.example", [("", NONE), ("", "a@x.example")]),
    ("john smith@x.example, a@x.example", [("", NONE), ("", "a@x.example")]),
    ("Ann <a@x.example> bob, c@x.example", [("Ann", "a@x.example"), ("", NONE), ("", "c@x.example")]),
    ("d@, @e.example, ., ..@x.example, f@x..example", [("", NONE)] * 5),
    (
        "a..b@x.example, .c@x.example; Dee. <d.@x.example>",
        [("", "a..b@x.example"), ("", ".c@x.example"), ("Dee.", "d.@x.example")],
    ),
    ("<<a@x.example>>, b@x.example", [("", NONE), ("", "b@x.example")]),
    ("jos\ufffd@x.example, jos\udce9@x.example", [("", NONE)] * 2),
    ('"a\x00b"@x.example', [("", NONE)]),
    (f"{'a' * 320}@x.example", [("", NONE)]),
    ("<>", [("", NONE)]),
    ("", []),
    (" \r\n ", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), LISTS, ids=[text[:40] for text, _ in LISTS])
def test_a_list(text: str, wanted: list[tuple[str, str]]) -> None:
    found = read_addresses(text).entries
    assert [(each.name if each.address else "", each.address) for each in found] == wanted
    for each in found:
        assert each.text in text
        assert text[: each.end].endswith(each.address[-1:])


def pythons() -> set[str]:
    """Those of this machine, the system's own among them."""
    names = (sys.executable, "/usr/bin/python3", "python3", *(f"python3.{minor}" for minor in range(11, 15)))
    probe = ["-I", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    found = {path for name in names if (path := shutil.which(name))}
    return {
        path
        for path in found
        if not subprocess.run([path, *probe], capture_output=True, timeout=60, check=False).returncode
    }


@pytest.mark.proof
def test_every_python_of_this_machine_reads_the_same() -> None:
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import address_list as of; "
        "print(json.dumps([of.read_addresses(text) for text in json.load(sys.stdin)]))"
    )
    line = ["-I", "-c", code, str(Path(address_list.__file__).parent)]
    texts = [text for text, _ in LISTS]
    wanted = json.loads(json.dumps([read_addresses(text) for text in texts]))
    for python in pythons():
        done = subprocess.run(
            [python, *line], input=json.dumps(texts), capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.stderr, json.loads(done.stdout or "0")) == ("", wanted), python


CLEAR = [
    "Ann <a@x.example>",
    "A (b) <a@x.example>",
    "Shop [Sales] <a@x.example>",
    "a@[192.0.2.1]",
    '"a, b" <a@x>',
]
UNCLEAR = [
    '"Ann <a@x.example>', "(Ann <a@x.example>", "Ann) <a@x>", "a\\b <a@x>", "=?utf-8?q?a,b?= <a@x>",
    "a\x01 <a@x>",
]  # fmt: skip


@pytest.mark.parametrize("text", [*CLEAR, *UNCLEAR])
def test_what_readers_may_read_in_another_way_is_not_clear(text: str) -> None:
    assert read_addresses(text).clear is (text in CLEAR)


LONG = [
    *("(", '"', "\\", "a,", "<", "@", ": ", "()", "<@", "<@,", '"(', '("\\', "=?a?q?", "=?a?q?x,"),
    *("a.", "a .", "a@b ", "a@b . c . "),
    *("[a", "\ufffd\\", '"\ufffd\\', "\x1b$B", '"\\"', "x <a@b>,", "a@b.c <", "((", "(\\", "\udc80@"),
]  # fmt: skip


@pytest.mark.parametrize("piece", LONG)
def test_the_time_is_linear_and_nothing_recurs(piece: str) -> None:
    def took(count: int) -> float:
        began = time.process_time()
        read_addresses(piece * count)
        read_addresses(piece * count + ")" * count)
        return time.process_time() - began

    assert took(8_000) < 32 * max(took(1_000), 0.005)  # quadratic time would be 64


@given(st.text(alphabet='ab@.<>,;:"\\() []=?qB\x1b$\r\n\ufffd\udc81é', max_size=60))
def test_whatever_is_written_is_read(text: str) -> None:
    for each in read_addresses(text).entries:
        assert each.address.count("@") <= 1 or '"' in each.address or "\x1b" in each.address
    addresses(text.encode("utf-8", "surrogateescape"))


# Addresses in header fields are found where readers find them, and nothing else changes


def moved(address: str) -> str:
    """Who was at old.example is at new.example.org."""
    local, _, domain = address.rpartition("@")
    return f"{local}@new.example.org" if domain.lower() == "old.example" else address


def back(address: str) -> str:
    return address.replace("@new.example.org", "@old.example")


NEW = b"new.example.org"

CHANGED = [
    (b"ann@old.example", b"ann@" + NEW, "alone"),
    (b"<ann@old.example>", b"<ann@" + NEW + b">", "in brackets"),
    (b"Ann <ann@Old.Example>", b"Ann <ann@" + NEW + b">", "behind a name, in any case"),
    (
        b'"B, Ann <x@old.example>" <ann@old.example>',
        b'"B, Ann <x@old.example>" <ann@' + NEW + b">",
        "in quotes",
    ),
    (b"ann@old.example <ann@old.example>", b"ann@old.example <ann@" + NEW + b">", "an address for a name"),
    (
        b"=?utf-8?q?J=C3=BCrgen?= <j@old.example>",
        b"=?utf-8?q?J=C3=BCrgen?= <j@" + NEW + b">",
        "an encoded word",
    ),
    ("Jürgen <jü@old.example>".encode(), "Jürgen <jü@new.example.org>".encode(), "UTF-8 (RFC 6532)"),
    (b"John Q. Public <j@old.example>", b"John Q. Public <j@" + NEW + b">", "a dot in a name (RFC 5322 4.1)"),
    (b"a@x.example, b@old.example,c@y.example", b"a@x.example, b@" + NEW + b",c@y.example", "one of several"),
    (b",, a@old.example ,,", b",, a@" + NEW + b" ,,", "empty elements (RFC 5322 4.4)"),
    (b"Us: a@old.example, B <b@old.example>;", b"Us: a@" + NEW + b", B <b@" + NEW + b">;", "a group"),
    (b"nobody:;, a@old.example", b"nobody:;, a@" + NEW, "behind an empty group"),
    (b"a(his)@(my)old.example(home)", b"a(his)@(my)" + NEW + b"(home)", "between comments (RFC 5322 A.5)"),
    (b"(x@old.example, (y)) a@old.example", b"(x@old.example, (y)) a@" + NEW, "not in comments"),
    (b"(\\)(\\(\\)) x) a@old.example", b"(\\)(\\(\\)) x) a@" + NEW, "comments with quoted parentheses"),
    (b'"a@b"@old.example', b'"a@b"@' + NEW, "a quoted local part"),
    (b'"a\\"b, c" @ old.example', b'"a\\"b, c" @ ' + NEW, "and blanks around the @"),
    (b"\r\n\ta\r\n @\r\n old.example", b"\r\n\ta\r\n @\r\n " + NEW, "folded"),
    (b"a@old . example", b"a@" + NEW, "blanks in the domain (RFC 5322 4.4)"),
    (b"a . b@old.example", b"a . b@" + NEW, "blanks in the local part"),
    (b"<@r.example,@s.example:a@old.example>", b"<@r.example,@s.example:a@" + NEW + b">", "behind a route"),
    (b"A <a@old.example> (new)", b"A <a@" + NEW + b"> (new)", "a comment behind the brackets"),
    (b"J\xfcrgen <j@old.example>", b"J\xfcrgen <j@" + NEW + b">", "a name in Latin-1"),
    (b'"\x95\x5c" <a@old.example>', b'"\x95\x5c" <a@' + NEW + b">", "in Shift JIS, with a backslash"),
    (b"\x81\x40 <a@old.example>", b"\x81\x40 <a@" + NEW + b">", "in GBK, with an octet like @"),
    (b'\x1b$B"(\x1b(B <a@old.example>', b'\x1b$B"(\x1b(B <a@' + NEW + b">", "in ISO-2022-JP"),
    (b"Shop [Sales] <a@old.example>", b"Shop [Sales] <a@" + NEW + b">", "brackets in a name"),
    (b"=?utf-8?q?a,_b?= <a@old.example>", b"=?utf-8?q?a,_b?= <a@" + NEW + b">", "a comma in an encoded word"),
]

LEFT_ALONE = [
    (b"ann@sub.old.example", "another domain"),
    (b"ann@old.example.", "a final dot is no address"),
    (b"a@b@old.example", "two @"),
    (b"ann@old.example bob", "words behind it"),
    (b"A <a@old.example> b", "words behind the brackets"),
    (b"<a@old.example", "brackets without an end"),
    (b"a@old.example>", "nor a beginning"),
    (b"<<a@old.example>>", "brackets in brackets"),
    (b'"a@old.example', "a quoted string without an end"),
    (b'a@old.example, "', "and the whole field with it"),
    (b"(a@old.example", "a comment without an end"),
    (b"a@old.example (x", "and the whole field with it"),
    (b"a@old.example\x00", "a control character"),
    (b"@old.example", "no local part"),
    (b"ann@", "no domain"),
    (b"\xff@old.example", "not UTF-8"),
    (b"a@[192.0.2.1]", "an address literal"),
    (b"x" * MAX_ADDRESS + b"@old.example", "longer than any address"),
    (b"", "nothing"),
]


@pytest.mark.parametrize(("value", "wanted", "why"), CHANGED, ids=[why for _, _, why in CHANGED])
def test_an_address_is_changed(value: bytes, wanted: bytes, why: str) -> None:
    assert change_field(b"To: " + value + b"\r\n", moved) == b"To: " + wanted + b"\r\n"


@pytest.mark.parametrize(("value", "why"), LEFT_ALONE, ids=[why for _, why in LEFT_ALONE])
def test_everything_else_is_left_alone(value: bytes, why: str) -> None:
    field = b"To: " + value + b"\r\n"
    assert change_field(field, moved) is field


def test_a_whole_other_address_takes_the_place_of_all_but_the_comments() -> None:
    field = b'Cc: Ann <"a n"(x) @ old.example>, b@x.example\r\n'
    changed = change_field(field, lambda address: "c@d.example" if address.startswith('"') else address)
    assert changed == b"Cc: Ann <c(x) @ d.example>, b@x.example\r\n"


def test_only_fields_that_hold_addresses_are_looked_at_and_none_behind_the_header() -> None:
    fields = (
        b"From: a@old.example\r\nsender : b@old.example\r\nReply-To:\r\n c@old.example\r\n"
        b"TO: d@old.example\r\nCc: e@old.example\r\nResent-To: f@old.example\r\n"
    )
    others = b"Subject: From: a@old.example\r\nX-From: a@old.example\r\nstray\r\nFrom: x@old.example\r\n"
    assert change_addresses(fields + others, moved) == fields.replace(b"old.example", NEW) + others
    assert change_addresses(others, moved) == others


def test_a_line_that_would_become_too_long_is_folded_behind_a_comma() -> None:
    names = [b"n%d <%d@old.example>" % (n, n) for n in range(200)]
    field = b"To: " + b",\r\n ".join(b", ".join(names[at : at + 40]) for at in range(0, 200, 40)) + b"\r\n"
    changed = change_field(field, lambda address: address.replace("old", "a-much-longer-name-than"))
    assert max(map(len, field.split(b"\r\n"))) <= MAX_LINE
    lengths = [len(line) for line in changed.split(b"\r\n")]
    assert max(lengths) <= MAX_LINE
    assert len(lengths) == 11  # two for each of the five, and what is behind the last line end
    again = changed.replace(b"a-much-longer-name-than", b"old")
    assert again.split() == field.split()


def test_a_message_may_hold_so_many_addresses_and_no_more() -> None:
    line = b"To: " + b"a@old.example,\r\n " * 1000 + b"a@old.example\r\n"
    header = line * 5
    changed = change_addresses(header, moved)
    whole = MAX_OCTETS // len(line)
    assert changed == line.replace(b"old.example", NEW) * whole + line * (5 - whole)


@pytest.mark.parametrize(
    "part",
    [
        b"a@b,",
        b"(",
        b"(a",
        b'"\\',
        b"<",
        b"@",
        b"a.b ",
        b"a<a@",
        b"<@a,",
        b"[\\",
        b",:;",
        b". ",
        b"w@w<",
        b"a:",
        b"\r\n ",
    ],
    ids=repr,
)
def test_hostile_fields_take_linear_time(part: bytes) -> None:
    """A step back for every octet would take minutes."""
    field = b"To: x@y " + part * (MAX_OCTETS // len(part)) + b"\r\n"
    began = time.process_time()
    change_field(field, moved)
    assert time.process_time() - began < 1.5


def test_addresses_beyond_a_number_are_left_as_they_are_however_short() -> None:
    """Each costs as much as a long one: 16,000 in 64 KB would stop everybody for a third of a second."""
    line = b"To: " + b"a@b," * (MAX_ADDRESSES // 2 - 1) + b"a@b\r\n"
    asked: list[str] = []

    def longer(address: str) -> str:
        asked.append(address)
        return "aa@b"

    assert change_addresses(line * 3, longer).endswith(line)
    assert len(asked) == MAX_ADDRESSES


# Against the standard library's two parsers: what addresses there are.

ATOMS = st.text(alphabet="abcXYZ019!#$%&'*+/=?^_`{|}~-", min_size=1, max_size=8)
DOT_ATOMS = st.lists(ATOMS, min_size=1, max_size=3).map(".".join)
QUOTED = st.text(alphabet='ab ,;:<>@().\\"', max_size=8).map(
    lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
)
SPACE = st.sampled_from(["", " ", "\r\n ", "  ", "\t"])
COMMENTS = st.recursive(
    st.text(alphabet="ab @<,:;", max_size=5).map(lambda text: f"({text})"),
    lambda inner: st.tuples(inner, inner).map(lambda two: f"({two[0]}x{two[1]})"),
    max_leaves=3,
)
CFWS = st.one_of(SPACE, st.tuples(SPACE, COMMENTS, SPACE).map("".join))
DOMAINS = st.sampled_from(["old.example", "OLD.example", "sub.old.example", "x.example", "a-b.example"])
ADDRESSES = st.tuples(st.one_of(DOT_ATOMS, QUOTED), DOMAINS).map("@".join)
PHRASES = st.lists(st.one_of(ATOMS, QUOTED), min_size=1, max_size=3).map(" ".join)
NAMED = st.tuples(PHRASES, CFWS, ADDRESSES).map(lambda parts: f"{parts[0]} {parts[1]}<{parts[2]}>")
MAILBOXES = st.one_of(ADDRESSES, NAMED, st.tuples(CFWS, ADDRESSES, CFWS).map("".join))
FIELD_LISTS = st.lists(MAILBOXES, min_size=1, max_size=4).map(", ".join)
GROUPS = st.tuples(PHRASES, FIELD_LISTS).map(lambda parts: f"{parts[0]}: {parts[1]};")
FIELDS = st.lists(st.one_of(MAILBOXES, GROUPS), min_size=1, max_size=4).map(
    lambda parts: f"To: {', '.join(parts)}\r\n"
)


def changed_text(field: str) -> str:
    return change_field(field.encode(), moved).decode()


def by_headerregistry(field: str) -> list[tuple[str, str]]:
    value = field.removeprefix("To: ").replace("\r\n", "")
    header = HeaderRegistry()("To", value)
    # Any: the class of a header is made when its name is known.
    addresses: Any = getattr(header, "addresses")  # noqa: B009
    return [(each.display_name, each.addr_spec) for each in addresses]


@given(FIELDS)
def test_headerregistry_finds_what_was_changed_and_nothing_else(field: str) -> None:
    before, after = by_headerregistry(field), by_headerregistry(changed_text(field))
    assert after == [(name, moved(address)) for name, address in before]


@given(FIELDS)
def test_email_utils_finds_what_was_changed_and_nothing_else(field: str) -> None:
    def found(text: str) -> list[tuple[str, str]]:
        return getaddresses([text.removeprefix("To: ").replace("\r\n", "")])

    assert found(changed_text(field)) == [(name, moved(address)) for name, address in found(field)]


PIECES = st.lists(
    st.sampled_from(
        [
            b"a@old.example", b"<", b">", b",", b";", b":", b"(", b")", b'"', b"\\", b"[", b"]",
            b".", b"@", b" ", b"\r\n ", b"a",
        ]
    )
).map(b"".join)  # fmt: skip


@given(st.one_of(PIECES, st.binary()))
def test_whatever_comes_there_and_back_again_is_the_same(octets: bytes) -> None:
    field = b"To: " + octets + b"\r\n"
    assert change_field(field, lambda address: address) is field
    assert change_field(change_field(field, moved), back) == field
