"""What must hold between settings, and what a valid configuration still has to say for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from zonerelay.cli.setup import check_config
from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load_text
from zonerelay.config.settings import resolve_hostname

WORDS = 'unsafe = ["open-relay"]'


def test_the_default_share_of_a_destination_gives_way_to_a_small_zone() -> None:
    (zone,) = load_text("[[zone]]\nmax_connections = 3").zone
    assert zone.max_connections_per_destination == 3


def test_a_value_that_is_refused_causes_no_second_complaint() -> None:
    text = (
        '[[listener]]\nallow_networks = ["x"]\n'
        '[[zone]]\nname = "a b"\nmax_connections = "3"\nmax_connections_per_destination = 50\n'
        '[[route]]\nzone = "bulk"\nsender_domain = ["a@b"]\n'
        '[retry]\npolicy = "x"\nschedule = ["x"]\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    assert [problem.path for problem in caught.value.problems] == [
        "listener[0].allow_networks[0]",
        "zone[0].name",
        "zone[0].max_connections",
        "route[0].sender_domain[0]",
        "retry.policy",
        "retry.schedule[0]",
    ]


def test_an_open_relay_is_found_beside_a_network_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text('[[listener]]\nallow_networks = ["x", "0.0.0.0/0"]')
    assert [problem.path for problem in caught.value.problems] == [
        "listener[0].allow_networks",
        "listener[0].allow_networks[0]",
    ]


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


def test_sound_defaults_need_no_advice() -> None:
    assert advice(load_text(""), "relay.example.org") == ()


def test_check_config_notes_who_may_relay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(f'[[listener]]\naddress = "127.0.0.1:1"\n{WORDS}\n[[listener]]\naddress = "unix:/x"\n')
    assert check_config.run(path) == 0
    out = capsys.readouterr().out
    assert "  note: listener[0].unsafe: every client that reaches 127.0.0.1:1 may relay\n" in out


def test_check_config_prints_every_problem_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "relay.toml"
    path.write_text("[[listener]]\nmax_connection = 5\n[log]\nredact = 1\n")
    assert check_config.run(path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "listener[0].max_connection: unknown key; did you mean max_connections? (line 2)",
        "log.redact: expected true or false (no quotes), not a number (line 4)",
    ]


def test_check_config_says_that_a_file_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_config.run(tmp_path / "none.toml") == 2
    assert capsys.readouterr().err == f"{tmp_path}/none.toml: cannot be read: No such file or directory\n"


def test_a_pattern_that_no_name_can_match_is_found_when_the_file_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "zonerelay.toml"
    config.write_text(
        f'hostname = "relay.example.org"\n[spool]\npath = "{tmp_path}/spool"\n'
        '[[destination]]\ndomain = ["example.com"]\nmx = ["ü..example"]\n'
    )
    assert check_config.run(config) == 2
    assert 'destination[0].mx[0]: "ü..example" cannot be matched' in capsys.readouterr().err


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


def test_of_many_routes_only_those_that_take_everything_are_looked_at() -> None:
    many = "".join(f'[[route]]\nrecipient_domain = ["d{n}.example"]\n' for n in range(1000))
    assert advice(load_text(many + many), "relay.example.org") == ()
    assert len(advice(load_text('[[route]]\nrecipient_domain = ["*"]\n' + many), "relay.example.org")) == 1000
