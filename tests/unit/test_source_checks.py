"""[[source]] and the zones that name them: what is refused, what is noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from zonerelay.cli.setup import check_config
from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load_text

ONE = '[[source]]\nname = "out1"\naddress = ["127.0.0.2"]\n'
SIX = '[[source]]\nname = "six"\naddress = ["::1"]\n'

REFUSED = [
    ('[[source]]\naddress = ["127.0.0.2"]', "source[0].name", "is required"),
    ('[[source]]\nname = "a"', "source[0].address", "is missing"),
    (ONE + '[[source]]\nname = "out1"\naddress = ["127.0.0.3"]', "source[1].name", "source[0] already"),
    (
        '[[source]]\nname = "a"\naddress = ["127.0.0.2", "::1", "127.0.0.3"]',
        "source[0].address[2]",
        "only one IPv4 address",
    ),
    ('[[source]]\nname = "a"\naddress = ["::1", "::2"]', "source[0].address[1]", "only one IPv6 address"),
    (
        ONE + '[[source]]\nname = "b"\naddress = ["127.0.0.2"]',
        "source[1].address[0]",
        "is already an address of source[0]",
    ),
    (
        SIX + '[[source]]\nname = "b"\naddress = ["0:0::0:1"]',
        "source[1].address[0]",
        "is already an address of source[0]",
    ),
    ('[[source]]\nname = "a"\naddress = ["::ffff:1.2.3.4"]', "source[0].address[0]", 'write "1.2.3.4"'),
    ('[[source]]\nname = "a"\naddress = ["fe80::1"]', "source[0].address[0]", "is a link-local address"),
    (ONE + '[[zone]]\nsources = ["out2"]', "zone[0].sources[0]", "did you mean out1?"),
    (ONE + '[[zone]]\nsources = ["x"]', "zone[0].sources[0]", 'known names are "out1"'),
    ('[[zone]]\nsources = ["x"]', "zone[0].sources[0]", 'no [[source]] has this name "x"'),
    (ONE + '[[zone]]\nsources = ["out1", "out1"]', "zone[0].sources[1]", "twice"),
    (ONE + 'weight = 0\n[[zone]]\nsources = ["out1"]', "zone[0].sources", "weight = 0"),
    (
        ONE + SIX + '[[zone]]\nsources = ["out1", "six"]\nipv6 = false',
        "zone[0].sources",
        '"six" has IPv6 only',
    ),
]


@pytest.mark.parametrize(("text", "path", "words"), REFUSED)
def test_what_is_refused(text: str, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    [problem] = caught.value.problems
    assert problem.path == path
    assert words in problem.text


def test_a_wrong_source_does_not_blame_the_zones_that_name_it() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text('[[source]]\nname = "a b"\naddress = ["127.0.0.2"]\n[[zone]]\nsources = ["a b"]')
    assert [problem.path for problem in caught.value.problems] == ["source[0].name"]


def test_what_is_right() -> None:
    settings = load_text(ONE + SIX + 'weight = 0\n[[zone]]\nsources = ["out1", "six"]')
    assert list(advice(settings, "relay.example.org")) == []


def test_a_source_that_nobody_uses_is_noted() -> None:
    assert list(advice(load_text(ONE), "relay.example.org")) == ["source[0]: no zone sends from out1"]


def test_check_config_notes_addresses_that_this_machine_has_not_got(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "zonerelay.toml"
    file.write_text(
        '[[source]]\nname = "a"\naddress = ["127.0.0.2", "2001:db8::77"]\n[[zone]]\nsources = ["a"]\n'
    )
    assert check_config.run(file) == 0
    out = capsys.readouterr().out
    assert "note: source[0].address[1]: no interface of this machine has 2001:db8::77" in out
    assert not [line for line in out.splitlines() if "note: source" in line and "127.0.0.2" in line]
