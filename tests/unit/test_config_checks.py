"""What must hold between settings, and what a valid configuration still has to say for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from zonerelay.cli.setup import check_config
from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load_text
from zonerelay.config.settings import resolve_hostname

WORDS = 'unsafe = ["open-relay"]'

REFUSED = [
    ('[[listener]]\nallow_networks = ["0.0.0.0/0"]', "listener[0].allow_networks", "open relay"),
    ('[[listener]]\nallow_networks = ["::/0"]', "listener[0].allow_networks", '"::/0" would make'),
    ('[[listener]]\nallow_networks = ["128.0.0.0/1"]', "listener[0].allow_networks", "open relay"),
    ('[[listener]]\nallow_networks = ["2000::/3"]', "listener[0].allow_networks", "open relay"),
    (
        '[[listener]]\nallow_networks = ["0.0.0.0/2", "64.0.0.0/2", "128.0.0.0/1"]',
        "listener[0].allow_networks",
        '"0.0.0.0/0" would make this an open relay',
    ),
    (
        f"[[listener]]\nallow_networks = {[f'{n}.0.0.0/8' for n in range(256)]}",
        "listener[0].allow_networks",
        '"0.0.0.0/0" would make this an open relay',
    ),
    (
        '[[listener]]\nallow_networks = ["10.0.0.0/8"]\nunsafe = ["open-rely"]',
        "listener[0].unsafe[0]",
        "did you mean open-relay?",
    ),
    (
        f'[[listener]]\naddress = "127.0.0.1:1"\n{WORDS}\n[[listener]]\nallow_networks = ["::/0"]',
        "listener[1].allow_networks",
        "open relay",
    ),
    ("[[listener]]\nallow_networks = []", "listener[0].allow_networks", "no client could relay"),
    ("listener = []", "listener", "no client could hand in mail"),
    (
        '[[listener]]\naddress = "[::1]:25"\n[[listener]]\naddress = "[0::1]:25"',
        "listener[1].address",
        "[::1]:25 is already taken by listener[0]",
    ),
    (
        '[[listener]]\naddress = "0.0.0.0:25"\n[[listener]]\naddress = "127.0.0.1:25"',
        "listener[1].address",
        "is already taken by listener[0]",
    ),
    (
        '[[listener]]\naddress = "127.0.0.1:8025"',
        "listener[0].address",
        "is already taken by the admin address",
    ),
    (
        '[[listener]]\naddress = "unix:/x"\n[[listener]]\naddress = "unix:/x"',
        "listener[1].address",
        "is already taken",
    ),
    ('[postgres]\nurl = "postgresql://relay:secret@db.example/mail"', "postgres.url", "contains a password"),
    (
        '[postgres]\nurl = "postgresql://db.example/mail?password=secret"',
        "postgres.url",
        "contains a password",
    ),
    ('[postgres]\nurl = "mysql://db.example/mail"', "postgres.url", 'must begin with "postgresql://"'),
    ('[postgres]\nurl = "postgresql:///mail"', "postgres.url", "has no host"),
    ('[postgres]\nurl = "postgresql://[db/mail"', "postgres.url", "is not a URL"),
    ("[postgres]\nschema = 'Mail; DROP'", "postgres.schema", "is a name of small letters"),
    ("[postgres]\nunsafe = true", "postgres.unsafe", "expected a list in brackets"),
    ('[[zone]]\n[[zone]]\nname = "default"', "zone[1].name", "is the name of zone[0] already"),
    ("[[zone]]\n[[zone]]\nport = 26", "zone[1].name", "is missing"),
    ('[[zone]]\nname = "bulk"', "zone", 'is sent through the zone "default", but the zones are "bulk"'),
    ("zone = []", "zone", "but no zone is configured"),
    (
        '[[zone]]\n[[zone]]\nname = "bulk"\n[[route]]\nzone = "bluk"\nuser = ["x"]',
        "route[0].zone",
        'no zone is named "bluk"; did you mean bulk?',
    ),
    ('[[route]]\nzone = "default"', "route[0]", "no later route would ever be asked"),
    (
        '[[route]]\nmin_size = "2 MB"\nmax_size = "1 MB"',
        "route[0].min_size",
        "2 MB is more than max_size = 1 MB, so this route would never match",
    ),
    (
        '[[listener]]\naddress = "0.0.0.0:587"\n[[route]]\nlistener = ["0.0.0.0:587", "0.0.0.0:578"]',
        "route[0].listener[1]",
        'no [[listener]] has the address "0.0.0.0:578"; did you mean 0.0.0.0:587?',
    ),
    (
        '[[listener]]\naddress = "0.0.0.0:587"\n[[route]]\nlistener = ["unix:/run/smtp"]',
        "route[0].listener[0]",
        'no [[listener]] has the address "unix:/run/smtp"; known names are "0.0.0.0:587"',
    ),
    (
        '[[listener]]\nzone_header_users = ["app"]',
        "listener[0].zone_header_users",
        'say zone_header = "X-Sending-Zone"',
    ),
    (
        '[[listener]]\naddress = "unix:/x"\nzone_header = "X-Z"\nzone_header_networks = ["10.0.0.0/8"]',
        "listener[0].zone_header_networks",
        "is not used on a Unix socket",
    ),
    (
        "[[zone]]\nmax_connections = 5\nmax_connections_per_destination = 6",
        "zone[0].max_connections_per_destination",
        "6 is more than max_connections = 5",
    ),
    ("[retry]\nschedule = []", "retry.schedule", "is empty"),
    (
        '[retry]\npolicy = "quadratic"\nschedule = ["1m"]',
        "retry.schedule",
        'is not used with policy = "quadratic"',
    ),
    ('[retry]\npolicy = "schedule"\nbackoff = "m:f"', "retry.backoff", "takes the place of policy"),
    ('[retry]\nsuspend_min = "1h"', "retry.suspend_min", "is longer than suspend_max"),
]


@pytest.mark.parametrize(("text", "path", "said"), REFUSED)
def test_settings_that_contradict_each_other_are_refused(text: str, path: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert said in problem.text
    assert problem.line > 0


ACCEPTED = [
    '[[listener]]\nallow_networks = ["10.0.0.0/8", "192.168.0.0/16", "fc00::/7", "fe80::/10"]',
    '[[listener]]\nallow_networks = ["203.0.0.0/8", "2001:db8::/32"]',
    f'[[listener]]\nallow_networks = ["0.0.0.0/0", "::/0"]\n{WORDS}',
    '[[listener]]\naddress = "unix:/x"\nallow_networks = []',
    '[[listener]]\naddress = "0.0.0.0:25"\n[[listener]]\naddress = "[::1]:25"',
    '[admin]\naddress = "127.0.0.1:0"\n[[listener]]\naddress = "127.0.0.1:0"',
    '[[zone]]\n[[zone]]\nname = "bulk"',
    '[[route]]\nrecipient_domain = ["example.com"]',
    '[retry]\nbackoff = "my.policy:backoff"\nmax_attempts = 3',
    '[retry]\npolicy = "exponential"\nmax_attempts = 3',
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_settings_that_only_look_odd_are_accepted(text: str) -> None:
    load_text(text)


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


POSTGRES = '[spool]\nbackend = "postgres"\n[postgres]\n'

ADVICE = [
    (f'{POSTGRES}lease = "1m"', "relay.example.org", "postgres.lease"),
    (f'{POSTGRES}unsafe = ["mail-loss"]', "relay.example.org", "postgres.unsafe"),
    (
        f'{POSTGRES}url = "postgresql://relay@db.example/mail?sslmode=require"',
        "relay.example.org",
        "postgres.url",
    ),
    ("", "relay", "hostname"),
    ('[spool]\nbackend = "memory"', "relay.example.org", "spool.backend"),
    ('[spool]\nbackend = "memory"\nshelve = "/q"', "relay.example.org", "spool.shelve"),
    ("[spool]\nmin_free_space = 0", "relay.example.org", "spool.min_free_space"),
    (f"[[listener]]\n{WORDS}", "relay.example.org", "listener[0].unsafe"),
    ('[[zone]]\ntls = "none"', "relay.example.org", "zone[0].tls"),
    ('[[route]]\nuser = ["x"]', "relay.example.org", "route[0].user"),
    ('[admin]\naddress = "0.0.0.0:8025"', "relay.example.org", "admin.address"),
]


@pytest.mark.parametrize(("text", "hostname", "path"), ADVICE)
def test_what_an_operator_may_not_expect_is_said_once(text: str, hostname: str, path: str) -> None:
    (line,) = advice(load_text(text), hostname)
    assert line.startswith(f"{path}: ")


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
