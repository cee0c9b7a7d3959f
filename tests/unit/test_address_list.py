"""Lists of addresses as they are written, read the same by every Python of this machine, in linear time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets.messages import addresses
from zonerelay.model import address_list
from zonerelay.model.address_list import read_addresses

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
    *("a.", "a .", "a@b "),
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
