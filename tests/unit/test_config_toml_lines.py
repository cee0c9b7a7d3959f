"""The line scanner agrees with tomllib about what is in a document, and says where it is."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zonerelay.config.toml_lines import line_numbers

SHIPPED = Path(__file__).parents[2] / "config"


def paths_in(value: object, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    """Every path in what tomllib read: the scanner must find exactly these."""
    found = {path} if path else set()
    if isinstance(value, dict):
        for key, inner in value.items():
            found |= paths_in(inner, (*path, key))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            found |= paths_in(inner, (*path, position))
    return found


ODD_DOCUMENTS = [
    ("nothing at all", ""),
    ("only a comment, no final newline", "# a = 1"),
    ("no final newline", "a = 1"),
    ("CRLF line ends", "a = 1\r\n[b]\r\nc = 2\r\n"),
    ("comment that looks like a table", "# [b]\na = 1 # [c]\n"),
    ("string that looks like a table", "a = \"[b]\"\nb = '[c] # x'\n"),
    ("hash in a string", 'a = "# no comment"\nb = 1\n'),
    ("escaped quote in a string", 'a = "\\"]\\\\"\nb = 1\n'),
    ("multi-line string holding tables and keys", 'a = """\n[b]\nc = 1\n"""\nd = 1\n'),
    ("multi-line literal string", "a = '''\n[b]\n\\'''\nd = 1\n"),
    ("quotes before the closing quotes", 'a = """x""\\""""""\nb = """"""\nc = """y"""""\nd = 1\n'),
    ("literal quotes before the closing quotes", "a = '''x'''''\nb = ''''''\nc = ''''y'''\nd = 1\n"),
    ("two quotes inside a multi-line string", 'a = """ ""x"" """\nb = 1\n'),
    ("escaped line end in a multi-line string", 'a = """x \\\n   y"""\nb = 1\n'),
    ("array over lines, comments and a trailing comma", "a = [ # one ]\n 1,\n # two\n 2 , # , ]\n]\nb = 1\n"),
    ("empty arrays and tables", "a = []\nb = [ ]\nc = {}\nd = [[], [[]], {}]\n"),
    ("strings with brackets in arrays", "a = ['],', \"}\", '''\n]''']\nb = 1\n"),
    ("nested arrays", "a = [[1, [2, 3]],\n[4]]\nb = 1\n"),
    ("inline table", "a = { b = 1, c.d = [1, { e = 2 }], 'f.g' = \"}\" }\nh = 1\n"),
    ("array of inline tables over lines", "a = [\n { b = 1 },\n { b = 2, c = 'x' },\n]\n"),
    ("dotted keys", "a.b.c = 1\na.b.d = 2\na . e = 3\n"),
    ("quoted keys", '"a b" = 1\n\'c.d\' = 2\n"e".\'f\' = 3\n"" = 4\n"\\u00e9\\n\\"" = 5\n'),
    ("keys that look like numbers", "1 = 2\n3.4 = 5\n-6 = 7\n"),
    ("table with spaces in its header", "[ a . b ]\nc = 1\n[ 'd' . \"e\" ] # f\ng = 1\n"),
    ("child before parent", "[a.b]\nc = 1\n[a]\nd = 1\n"),
    ("array of tables", "[[a]]\nb = 1\n[[a]]\nb = 2\n[[a]]\n"),
    (
        "tables inside an array of tables",
        "[[a]]\n[a.b]\nc = 1\n[[a.d]]\ne = 1\n[[a.d]]\n[[a]]\n[[a.d]]\ne = 2\n[a.d.f]\n",
    ),
    ("array of tables under a table", "[a]\nx = 1\n[[a.b]]\nc = 1\n[[a.b]]\n[d]\n"),
    ("dotted key under an array of tables", "[[a]]\nb.c = 1\n[[a]]\nb.c = 2\n"),
    ("indented", "  [a]\n\t b = 1\n   [[c]]\n\td = 1\n"),
    (
        "dates, floats, signs",
        "a = 1979-05-27 07:32:00\nb = -1.5e3\nc = inf\nd = 1979-05-27T07:32:00Z # x\ne = 0x1_0\n",
    ),
    ("value right after the key", "a=1\nb=[1,2]\nc={d=1}\n[e]\nf='x'#y\n"),
    ("letters beyond ASCII", "a = 'é中😀' # ü\n\"ü\" = 1\n"),
]


@pytest.mark.parametrize(("reason", "document"), ODD_DOCUMENTS, ids=[reason for reason, _ in ODD_DOCUMENTS])
def test_every_path_is_found_and_none_is_invented(reason: str, document: str) -> None:
    assert set(line_numbers(document)) == paths_in(tomllib.loads(document)), reason


def test_lines_are_those_an_editor_shows() -> None:
    document = (
        "# first\n"
        "hostname = 'h'\n"
        "[spool]\n"
        'path = """\n'
        '/x"""\n'
        "[[zone]]\n"
        "name = 'a'\n"
        "\n"
        "[[zone]] # second\n"
        "name.x = { y = [\n"
        "  1,\n"
        "  # comment\n"
        "  2 ] }\n"
        "tls = 'none'\n"
    )
    lines = line_numbers(document)
    assert lines["hostname",] == 2
    assert lines["spool",] == 3
    assert lines["spool", "path"] == 4
    assert lines["zone",] == 6, "an array of tables begins at its first header"
    assert lines["zone", 0] == 6
    assert lines["zone", 1] == 9
    assert lines["zone", 1, "name", "x", "y"] == 10
    assert lines["zone", 1, "name", "x", "y", 0] == 11
    assert lines["zone", 1, "name", "x", "y", 1] == 13
    assert lines["zone", 1, "tls"] == 14


def test_crlf_documents_have_the_same_lines() -> None:
    document = "a = 1\n\n[[b]]\nc = '''\nx'''\nd = [\n1]\n"
    assert line_numbers(document.replace("\n", "\r\n")) == line_numbers(document)


@pytest.mark.parametrize("name", ["zonerelay.toml"])
def test_the_shipped_file_is_read_the_same_way(name: str) -> None:
    document = (SHIPPED / name).read_text(encoding="utf-8")
    assert set(line_numbers(document)) == paths_in(tomllib.loads(document))


# Generated documents: pieces that are odd on their own, put together at random. Whatever tomllib
# accepts, the scanner must read the same way; what it refuses is not the scanner's business.
KEYS = st.sampled_from(["a", "b", "a.b", '"a"', "'a.b'", 'a."b]"', "1", " b . c ", '"\\t"'])
BLANKS = st.sampled_from(["", " ", "\t"])
SCALARS = st.sampled_from(
    [
        "1", "true", '"x"', "'#'", '"]"', '"\\\\"', '"""\n[a]\n"""', "'''\n'''", '""""""',
        '"""a"""""', "1.5", "1979-05-27",
    ]
)  # fmt: skip
NEWLINES = st.sampled_from(["", "\n", " # ] } ,\n", "\n\n"])


def _arrays(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    items = st.tuples(NEWLINES, inner, NEWLINES).map("".join)
    return st.lists(items, max_size=3).map(lambda parts: f"[{','.join(parts)}]")


def _inline_tables(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(KEYS, BLANKS, inner, BLANKS).map(lambda t: f"{t[0]}={t[1]}{t[2]}{t[3]}")
    return st.lists(pairs, max_size=3).map(lambda parts: f"{{{','.join(parts)}}}")


VALUES = st.recursive(SCALARS, lambda inner: _arrays(inner) | _inline_tables(inner), max_leaves=5)
STATEMENTS = (
    st.tuples(BLANKS, KEYS, VALUES).map(lambda t: f"{t[0]}{t[1]} = {t[2]}")
    | KEYS.map(lambda key: f"[{key}]")
    | KEYS.map(lambda key: f"[[{key}]]")
    | st.sampled_from(["", "# [a]", "  "])
)


@settings(max_examples=100, deadline=None)
@given(st.lists(STATEMENTS, max_size=8).map("\n".join))
def test_generated_documents_are_read_as_tomllib_reads_them(document: str) -> None:
    try:
        expected = paths_in(tomllib.loads(document))
    except tomllib.TOMLDecodeError:
        return
    assert set(line_numbers(document)) == expected
