"""Reading a configuration: defaults, values, and every way in which a single value can be wrong."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets.configuration import toml
from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load, load_text
from zonerelay.config.options.options import option_of
from zonerelay.config.settings import REPEATED, TABLES, Settings, resolve_hostname

RENDERED = re.compile(r"[^:\s]+: .+ \(line \d+\)")


def problems(text: str) -> list[str]:
    """What check-config would print, line by line."""
    with pytest.raises(ConfigError) as caught:
        load_text(text, "test.toml")
    lines = str(caught.value).split("\n")
    assert all(RENDERED.fullmatch(line) for line in lines), lines
    return lines


def test_an_empty_file_is_all_defaults() -> None:
    assert load_text("") == Settings()


def test_every_table_of_the_model_is_read() -> None:
    tables = [field.name for field in dataclasses.fields(Settings) if option_of(field) is None]
    assert tables == list(TABLES)
    defaults = Settings()
    for name, table in TABLES.items():
        default = getattr(defaults, name)
        assert isinstance(default, tuple) is (name in REPEATED)
        assert default in (table(), (table(),), ())


@pytest.mark.parametrize(
    ("text", "fqdn", "name"),
    [
        ('hostname = "relay.example.org"', "other.example.org", "relay.example.org"),
        ("", "Mail.Example.org.", "mail.example.org"),
        ("", "localhost", "[127.0.0.1]"),
        ("", "localhost.localdomain", "[127.0.0.1]"),
        ("", "1f0c2d", "[127.0.0.1]"),
        ("", "my_host.example.org", "[127.0.0.1]"),
        ('[[listener]]\naddress = "[::]:25"\n[[listener]]\naddress = "192.0.2.5:26"', "x", "[192.0.2.5]"),
        ('[[listener]]\naddress = "[2001:db8::5]:25"', "x", "[IPv6:2001:db8::5]"),
    ],
)
def test_the_relay_always_has_a_valid_name(text: str, fqdn: str, name: str) -> None:
    assert resolve_hostname(load_text(text), lambda: fqdn) == name


def test_of_many_routes_only_those_that_take_everything_are_looked_at() -> None:
    many = "".join(f'[[route]]\nrecipient_domain = ["d{n}.example"]\n' for n in range(1000))
    assert advice(load_text(many + many), "relay.example.org") == ()
    assert len(advice(load_text('[[route]]\nrecipient_domain = ["*"]\n' + many), "relay.example.org")) == 1000


def test_a_key_with_a_line_end_stays_on_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text('[log]\n"a\\nb" = 1\n')
    assert str(caught.value).startswith('log."a\\nb": ')


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "port = " + "1" * 5000], ids=["nested", "long"])
def test_text_that_is_too_much_for_the_parser_is_a_problem(text: str) -> None:
    (line,) = problems(text)
    assert line.startswith("test.toml: ")


def test_a_file_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_bytes(b"\xef\xbb\xbfhostname = 'relay.example.org'\r\n")
    assert load(path).hostname == "relay.example.org"


def test_a_file_that_is_not_utf8_is_a_problem_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_bytes(b"# fine\nhostname = 'r\xe9'\n")
    with pytest.raises(ConfigError, match="is not UTF-8, as TOML requires"):
        load(path)


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)


# Whatever a file says, it is either loaded or refused with problems: nothing else escapes the loader.
WORDS = st.sampled_from(
    [
        *TABLES,
        *(
            "hostname", "name", "path", "address", "schedule", "jitter", "max_connections", "tls",
            "default", "x",
        ),
        *(
            "= 1", "= 'x'", "= []", "= ['', 1]", "= {}", "= nan", "= 1e400", "= true", "= 00:00:00",
            "[", "]", "[[", "]]",
        ),
        *("\n", "#", '"', "'", ".", " ", '"""', "\x00", "é", "\r\n"),
    ]
)  # fmt: skip
STATEMENTS = st.sampled_from(
    [
        "[{}]\n", "[[{}]]\n", "{} = 1\n", "{} = 'x'\n", "{} = []\n", "{} = {{}}\n", "{} = [{{}}]\n",
        "{} = inf\n", "{} = ''\n",
    ]
)  # fmt: skip


@given(
    st.lists(WORDS, max_size=12).map("".join)
    | st.lists(st.tuples(STATEMENTS, WORDS).map(lambda t: t[0].format(t[1])), max_size=8).map("".join)
)
def test_any_text_is_loaded_or_refused(text: str) -> None:
    toml(text.encode())
