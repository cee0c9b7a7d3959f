"""Configurations as operators write them: what is refused at which line, what is noted, what is taken.

Every file in `configurations/` has cases, each behind a line `--- what it shows`. A case is TOML with what is
said of it:

    ! path: words    a problem of the line above, whose text contains the words
    ~ path: words    a note, wherever it stands
    ~                no note at all
    = path: text     what the value is, as text; those of a list have commas between them

There are as many problems as the case has. Where it has notes, there are as many of those. Cases in
`checked/` are tried by `check-config`, which opens the files and imports the code that they name.
"""

import dataclasses
import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets.configuration import toml
from tests.support.certificates import DAY, make
from tests.support.credentials import file_of, user
from tests.support.dkim import rsa_pem
from tests.upgrades.configuration import every_option
from zonerelay.cli.main import main
from zonerelay.cli.setup.config import run as check_config
from zonerelay.cli.setup.init import configuration
from zonerelay.config import endpoints, toml_text
from zonerelay.config.checks import advice
from zonerelay.config.endpoints import ListenAddress, NameServer, NextHopKind, parse_listen
from zonerelay.config.load import ConfigError, load, load_text, read, read_copy
from zonerelay.config.options.options import options_of
from zonerelay.config.settings import REPEATED, TABLES, Settings, resolve_hostname
from zonerelay.config.toml_lines import line_numbers
from zonerelay.config.toml_text import about, defaults, effective, options
from zonerelay.config.units import format_duration, format_size, parse_duration, parse_size

FOLDER = Path(__file__).parent / "configurations"


@dataclass
class Case:
    """A configuration with what is said of it."""

    lines: list[str] = field(default_factory=list)
    problems: list[tuple[int, str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] | None = None
    values: dict[str, str] = field(default_factory=dict)

    def add(self, line: str) -> None:
        sign, _, rest = line.partition(" ")
        path, _, words = (part.strip() for part in f"{rest} ".partition(": "))
        if sign == "!":
            self.problems.append((max(1, len(self.lines)), path, words))
        elif sign == "~":
            self.notes = [*(self.notes or []), *([(path, words)] if path else [])]
        elif sign == "=":
            self.values[path] = words
        else:
            self.lines.append(line)


def cases(folder: Path) -> Iterator[ParameterSet]:
    """Yield the parameters of the test, each with the name of its file and its number there."""
    for path in sorted(folder.glob("*.txt")):
        found: list[Case] = []
        for line in path.read_text().splitlines():
            if line.startswith("---"):
                found.append(Case())
            else:
                found[-1].add(line)
        yield from (pytest.param(case, id=f"{path.stem}-{n}") for n, case in enumerate(found, 1))


CASES, CHECKED = list(cases(FOLDER)), list(cases(FOLDER / "checked"))


@pytest.mark.parametrize("case", CASES)
def test_a_configuration(case: Case) -> None:
    text = "\n".join(case.lines)
    try:
        settings = load_text(text, "relay.toml")
    except ConfigError as error:
        found = sorted(error.problems, key=lambda problem: problem.line)
        compare(case.problems, [(each.line, each.path, each.text) for each in found])
        return
    assert not case.problems
    assert case.values == {path: value_at(settings, path) for path in case.values}
    if case.notes is not None:
        compare(case.notes, [note.partition(": ")[::2] for note in advice(settings, "relay.example.org")])


def compare(wanted: Sequence[tuple[object, ...]], found: Sequence[tuple[object, ...]]) -> None:
    """Compare all but the last fields, which are words and texts that contain them."""
    assert [each[:-1] for each in found] == [each[:-1] for each in wanted], found
    for (*_, words), (*_, text) in zip(wanted, found, strict=True):
        assert str(words) in str(text)


def value_at(settings: Settings, path: str) -> str:
    value: Any = settings  # Any: an option or a table
    for part in path.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def test_there_are_configurations() -> None:
    assert len(CASES) > 400
    assert len(CHECKED) > 50


# ---- check-config ------------------------------------------------------------------------------

Check = Callable[[str], tuple[list[str], list[str]]]

CLOSERS = """
from zonerelay.inbound.policy import Policy
closed = []
class Well(Policy):
    def rcpt(self, event): return None
    async def close(self): closed.append(self.context.listener)
class Badly(Well):
    def close(self): raise KeyError('x')
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates, users, secrets and code, whose names say what they are: what `/here` stands for."""
    directory = tmp_path_factory.mktemp("checked")
    now, name = time.time(), "relay.example.org"
    pairs = {"good": (-1, 90), "again": (-1, 91), "ending": (-1, 3), "expired": (-9, -1), "later": (1, 90)}
    for pair, (starts, ends) in {**pairs, "open": (-1, 90)}.items():
        make(name, starts=now + starts * DAY, ends=now + ends * DAY).write(directory, pair)
    make("other.example.org", ends=now + 90 * DAY).write(directory, "other")
    texts = {
        "users": file_of(user()),
        "broken-users": f"{file_of(user())}\nbroken\n",
        "odd-users": file_of(user("crm", "correct horse", "a@-b-")),
        "secret": "a secret of some length\n",
        "dkim.key": rsa_pem().decode(),
        "closers_of_check_config.py": CLOSERS,
        "c": (directory / "good.key").read_text(),
    }
    for file, text in texts.items():
        for path in (directory / file, directory / f"open-{file}"):
            path.write_text(text)
            path.chmod(0o644 if path.name.startswith("open-") else 0o640)
    (directory / "open.key").chmod(0o644)
    return directory


@pytest.fixture
def check(files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Return the problems and the notes that check-config prints for a text to another user than root."""
    monkeypatch.syspath_prepend(str(files))
    monkeypatch.setattr("os.geteuid", lambda: 999)
    monkeypatch.setattr("socket.getfqdn", lambda: "relay.example.org")
    monkeypatch.setenv("GIVEN", "hunter2")

    def run(text: str) -> tuple[list[str], list[str]]:
        path = files / "relay.toml"
        path.write_text(text.replace("/here", str(files)))
        status = check_config(path)
        out, err = (each.replace(str(files), "/here") for each in capsys.readouterr())
        assert (status, bool(out), bool(err)) in ((0, True, False), (2, False, True))
        assert "hunter2" not in out + err
        notes = [line.removeprefix("  note: ") for line in out.splitlines() if line.startswith("  note: ")]
        return err.splitlines(), notes

    return run


@pytest.mark.parametrize("case", CHECKED)
def test_a_configuration_is_tried(case: Case, check: Check) -> None:
    problems, notes = check("\n".join(case.lines))
    found = [re.fullmatch(r"(\S+): (.*) \(line (\d+)\)", line) for line in problems]
    compare(case.problems, [(int(each[3]), each[1], each[2]) for each in found if each])
    assert len(found) == len(problems)
    if case.notes is not None:
        compare(case.notes, [note.partition(": ")[::2] for note in notes])


def test_root_is_told_what_the_relay_may_not_read(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    tls = '[[listener]]\ntls = "starttls"\ncertificate = "/here/good.pem"\nkey = "/here/good.key"\n'
    (note,) = check(tls)[1]
    assert note == "files were read as root; run this command with sudo -u zonerelay to check the permissions"
    assert check("") == ([], [])


def test_a_policy_that_was_made_is_closed_again(check: Check) -> None:
    assert check('[[listener]]\npolicy = "closers_of_check_config:Well"\n')[0] == []
    assert sys.modules["closers_of_check_config"].closed == ["127.0.0.1:2525"]


def test_openssl_is_not_loaded_where_nobody_has_tls(tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_text('[[access]]\nsender = ["a@example.com"]\n')
    program = (
        "import sys, pathlib; from zonerelay.cli.setup import config; "
        f"status = config.run(pathlib.Path({str(path)!r})); "
        "sys.exit(status or ('OpenSSL' in sys.modules) * 3 or ('cryptography' in sys.modules) * 4)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done


def test_a_missing_configuration_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_config(tmp_path / "none.toml") == 2
    assert "none.toml: cannot be read: No such file or directory" in capsys.readouterr().err


# Reading a configuration: defaults, values, and every way in which a single value can be wrong


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
    tables = [field.name for field in dataclasses.fields(Settings) if field.name not in options_of(Settings)]
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


# conf.d beside the configuration: it is one document with it, and each problem names its file and line


MAIN = """\
hostname = "relay.example.org"
[spool]
path = "/queue"
[[zone]]
name = "default"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "relay.toml").write_text(MAIN)
    return tmp_path / "relay.toml"


def add(config: Path, name: str, text: str) -> None:
    (config.parent / "conf.d" / name).write_text(text)


def problems_of(config: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(config)
    return list(map(str, caught.value.problems))


def test_tables_are_joined_in_the_order_of_names(config: Path) -> None:
    add(config, "20.toml", '[[zone]]\nname = "late"\n[spool]\nbackend = "memory"\n')
    add(config, "10.toml", '[[zone]]\nname = "early"\n[retry]\nmax_age = "1d"\n')
    add(config, "30.off", "not TOML")
    settings = load(config)
    assert [zone.name for zone in settings.zone] == ["default", "early", "late"]
    assert (settings.spool.backend, settings.spool.path) == ("memory", Path("/queue"))
    assert settings.retry.max_age == 86_400


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '[spool]\npath = "/other"',
            "spool.path: is set again in line 2 of conf.d/a.toml (line 3 of relay.toml)",
        ),
        (
            'hostname = "b.example"',
            "hostname: is set again in line 1 of conf.d/a.toml (line 1 of relay.toml)",
        ),
        ("[zone]\nport = 26", "zone: is set again in line 1 of conf.d/a.toml (line 4 of relay.toml)"),
        ('\n[[zone]]\nname = "x"\ntls = "maybe"', "(line 4 of conf.d/a.toml)"),
        ('[[zone]]\nname = "x"\nprt = 5', "did you mean port? (line 3 of conf.d/a.toml)"),
        ("x = [", "conf.d/a.toml: is not valid TOML"),
    ],
)
def test_a_problem_names_the_file_and_the_line(config: Path, text: str, told: str) -> None:
    add(config, "a.toml", text)
    (problem,) = problems_of(config)
    assert told in problem


def test_problems_are_in_the_order_of_the_files(config: Path) -> None:
    add(config, "b.toml", "[dns]\ntimeout = 5\n")
    add(config, "a.toml", "\n\n\n[retry]\njitter = 5\n")
    assert [each.partition(":")[0] for each in problems_of(config)] == ["retry.jitter", "dns.timeout"]


def test_a_folder_that_cannot_be_read_is_a_problem(config: Path) -> None:
    add(config, "a.toml", "")
    (config.parent / "conf.d" / "b.toml").mkdir()
    (problem,) = problems_of(config)
    assert "b.toml: cannot be read" in problem


def test_what_is_active_names_the_file_of_each_key(config: Path) -> None:
    add(config, "a.toml", '[spool]\nbackend = "memory"\n')
    shown = effective(*read(config)).splitlines()
    assert 'backend = "memory"  # line 2 of conf.d/a.toml' in shown
    assert 'path = "/queue"  # line 3 of relay.toml' in shown


def test_the_copy_for_workers_says_the_same(config: Path) -> None:
    assert read_copy(config)[0] == MAIN.encode()
    add(config, "a.toml", '[[dkim]]\ndomain = "a.example"\nselector = "s"\nkey_file = "/k"\n'
        'not_before = 2026-03-01T12:00:00Z\n[retry]\njitter = 0.5\nschedule = ["1m", "2m"]\n'
        '[bounce]\nenabled = false\n')  # fmt: skip
    copy, settings = read_copy(config)
    assert load_text(copy.decode()) == settings == load(config)


def test_commands_find_the_socket_that_conf_d_names(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(config, "a.toml", '[admin]\nsocket = "/run/relay-of-the-test.sock"\n')
    assert main(["status", "--config", str(config)]) == 1
    assert "/run/relay-of-the-test.sock" in capsys.readouterr().err


# Addresses, next hops, name servers and EHLO names, as an operator writes them


@pytest.mark.parametrize(
    ("text", "address", "reason"),
    [
        ("127.0.0.1:2525", ListenAddress("127.0.0.1", 2525), "IPv4"),
        ("[::]:25", ListenAddress("::", 25), "every address"),
        ("[2001:DB8::0:1]:25", ListenAddress("2001:db8::1", 25), "IPv6 in one spelling, so that two compare"),
        ("127.0.0.1:0", ListenAddress("127.0.0.1", 0), "a port that the system chooses"),
        ("unix:/run/zonerelay/smtp.sock", ListenAddress(path="/run/zonerelay/smtp.sock"), "a Unix socket"),
        ("unix:/run/a:b", ListenAddress(path="/run/a:b"), "a path may hold a colon"),
    ],
)
def test_listen_addresses(text: str, address: ListenAddress, reason: str) -> None:
    assert parse_listen(text) == address, reason
    assert parse_listen(str(address)) == address


@pytest.mark.parametrize(
    ("text", "kind", "host", "port", "reason"),
    [
        ("smtp.example.net", NextHopKind.MX, "smtp.example.net", None, "a name: its MX hosts"),
        ("smtp.example.net:587", NextHopKind.MX, "smtp.example.net", 587, "its MX hosts on another port"),
        ("[smtp.example.net]", NextHopKind.HOST, "smtp.example.net", None, "brackets: no MX look-up"),
        ("[SMTP.example.net]:587", NextHopKind.HOST, "smtp.example.net", 587, "names are lower case"),
        ("[smtp_sink]:25", NextHopKind.HOST, "smtp_sink", 25, "container names have underscores"),
        ("192.0.2.1", NextHopKind.ADDRESS, "192.0.2.1", None, "an address"),
        ("192.0.2.1:26", NextHopKind.ADDRESS, "192.0.2.1", 26, "an address and port"),
        ("[192.0.2.1]:26", NextHopKind.ADDRESS, "192.0.2.1", 26, "brackets around IPv4"),
        ("[2001:db8::1]:26", NextHopKind.ADDRESS, "2001:db8::1", 26, "IPv6 and port"),
        ("2001:db8::1", NextHopKind.ADDRESS, "2001:db8::1", None, "IPv6 needs no brackets without a port"),
    ],
)
def test_next_hops(text: str, kind: NextHopKind, host: str, port: int | None, reason: str) -> None:
    assert endpoints.parse_next_hop(text) == endpoints.NextHop(kind, host, port), reason


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("192.0.2.53", NameServer("192.0.2.53", 53)),
        ("127.0.0.1:5353", NameServer("127.0.0.1", 5353)),
        ("::1", NameServer("::1", 53)),
        ("[::1]:5353", NameServer("::1", 5353)),
        ("[fe80::1%eth0]:53", NameServer("fe80::1%eth0", 53)),
    ],
)
def test_name_servers(text: str, server: NameServer) -> None:
    assert endpoints.parse_name_server(text) == server


@pytest.mark.parametrize(
    ("text", "loopback", "wildcard"),
    [
        ("127.0.0.2:1", True, False),
        ("[::1]:1", True, False),
        ("unix:/x", True, False),
        ("0.0.0.0:1", False, True),
        ("[::]:1", False, True),
        ("192.0.2.1:1", False, False),
    ],
)
def test_who_can_reach_an_address(text: str, loopback: bool, wildcard: bool) -> None:
    address = parse_listen(text)
    assert (address.is_loopback, address.is_wildcard) == (loopback, wildcard)


def test_a_domain_has_at_most_253_characters() -> None:
    longest = ".".join(["a" * 49] * 5) + ".bc"
    assert len(longest) == 252
    assert endpoints.is_domain(longest + "d")
    assert not endpoints.is_domain(longest + "de")


# Durations and sizes: what is read, what is refused and with which words


READ: list[tuple[Callable[[str | float], float], dict[str | float, float]]] = [
    (parse_duration, {"30s": 30, "5m": 300, "2h": 7200, "5d": 432_000, "1.5h": 5400, "250ms": 0.25}),
    (parse_duration, {" 5 m ": 300, "0": 0, 0: 0, "0s": 0}),  # zero needs no unit, nor quotes
    (parse_duration, {0.0: 0}),
    (parse_size, {"64 KB": 65_536, "64KB": 65_536, "50 MB": 52_428_800, "1 GB": 1_073_741_824}),
    (parse_size, {"2 TB": 2_199_023_255_552, "1.5 MB": 1_572_864, "100 B": 100, "64 kib": 65_536, 0: 0}),
]
WRITTEN: list[tuple[Callable[[Any], str], dict[float, str]]] = [  # Any: of either function's type
    (format_duration, {0: "0s", 90: "90s", 7200: "2h", 86_400: "1d", 0.25: "250ms", 0.1: "100ms"}),
    (format_duration, {0.0005: "0.0005s"}),
    (format_size, {0: "0 B", 1000: "1000 B", 1024: "1 KB", 52_428_800: "50 MB", 1025: "1025 B"}),
]


@pytest.mark.parametrize(("read_as", "values"), READ)
def test_durations_are_seconds_and_sizes_octets(
    read_as: Callable[[str | float], float], values: dict[str | float, float]
) -> None:
    assert {text: read_as(text) for text in values} == values


@pytest.mark.parametrize(("shown_as", "values"), WRITTEN)
def test_they_are_shown_in_the_largest_unit(shown_as: Callable[[Any], str], values: dict[float, str]) -> None:
    assert {value: shown_as(value) for value in values} == values


@given(st.integers(0, 10**12))
def test_a_shown_size_is_read_back_the_same(octets: int) -> None:
    assert parse_size(format_size(octets)) == octets


@given(st.integers(0, 10**11).map(lambda milliseconds: milliseconds / 1000))
def test_a_shown_duration_is_read_back_the_same(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-9)


# The line scanner agrees with tomllib about what is in a document, and says where it is


SHIPPED_TEXT = Path(__file__).parents[2] / "config"


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


def test_the_shipped_file_is_read_the_same_way() -> None:
    document = (SHIPPED_TEXT / "zonerelay.toml").read_text(encoding="utf-8")
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
STATEMENT_LINES = (
    st.tuples(BLANKS, KEYS, VALUES).map(lambda t: f"{t[0]}{t[1]} = {t[2]}")
    | KEYS.map(lambda key: f"[{key}]")
    | KEYS.map(lambda key: f"[[{key}]]")
    | st.sampled_from(["", "# [a]", "  "])
)


@settings(max_examples=100, deadline=None)
@given(st.lists(STATEMENT_LINES, max_size=8).map("\n".join))
def test_generated_documents_are_read_as_tomllib_reads_them(document: str) -> None:
    try:
        expected = paths_in(tomllib.loads(document))
    except tomllib.TOMLDecodeError:
        return
    assert set(line_numbers(document)) == expected


# What `config show` prints is read back as the same settings, and says where each key is from


FILES = [path.read_text() for path in sorted((Path(__file__).parents[2] / "config").rglob("*.toml"))]
RICH = """\
hostname = "relay.example.org"
workers = "auto"
[spool]
backend = "postgres"
min_free_space = "1.5 GB"
[postgres]
password = "env:DATABASE_PASSWORD"
[[listener]]
address = "[::1]:2525"
allow_networks = ["192.0.2.0/24", "2001:db8::/32"]
[[zone]]
name = "default"
max_connections = 5
schedule = ["90s", "2h", "0.25s"]
[[zone]]
name = "bulk"
max_rate = "100/1m"
mix_domains = true
header_add = ['X-Said: "quoted \\ text"']
[[dkim]]
domain = "example.org"
selector = "s1"
key_file = "/etc/zonerelay/s1.pem"
not_before = 2026-03-01T12:00:00+02:00
[[route]]
recipient = ["*@example.com"]
min_size = "1 MB"
zone = "bulk"
"""
UNFIT = ['[retry]\npolicy = "exponential"\n', '[retry]\nbackoff = "m:f"\n']
"""A default that is written out beside these is refused."""


@pytest.mark.parametrize("text", [*FILES, RICH, *UNFIT, ""])
def test_what_is_shown_reads_back_as_the_same_settings(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "relay.toml").write_text(text)
    settings, report = read(path)
    for shown in (toml_text.effective(settings, report), toml_text.changed(settings, report)):
        assert load_text(shown) == settings


def test_the_defaults_read_back_and_name_every_table() -> None:
    shown = defaults()
    assert load_text(shown) == Settings()
    assert "#[[route]]\n" in shown
    assert "\n[[zone]]\n" in shown


def test_only_what_differs_has_a_line_or_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "relay.toml").write_text(RICH)
    assert main(["config", "show", "--changed", "--config", str(path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert 'min_free_space = "1536 MB"  # line 5' in shown
    assert "max_connections_per_destination = 5  # depends on other options" in shown
    assert 'name = "default"  # line 12' in shown
    assert not [line for line in shown if "port" in line]


def test_a_secret_is_shown_as_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    (path := tmp_path / "relay.toml").write_text(RICH)
    assert main(["config", "show", "--json", "--config", str(path)]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert json.loads(out)["postgres"]["password"] == "env:DATABASE_PASSWORD"
    assert json.loads(out)["zone"][1]["max_rate"] == "100/1m"


def test_a_wrong_file_is_a_list_of_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "relay.toml").write_text('wokers = 2\n[retry]\njitter = "x"\n')
    assert main(["config", "show", "--config", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


# The shipped configuration is short and loads, and every option has a default and a reason


CONFIG = Path(__file__).parents[2] / "config"
SHIPPED = (CONFIG / "zonerelay.toml").read_text(encoding="utf-8")


def uncomment(text: str) -> str:
    return re.sub(r"^#(?=[\w\[])", "", text, flags=re.MULTILINE)


def test_every_default_can_be_written_out() -> None:
    """All defaults written out mean the same as an empty file, and none of them is refused."""
    settings = load_text(every_option())
    bare = dataclasses.replace(
        settings,
        route=(),
        access=(),
        source=(),
        destination=(),
        credential=(),
        dkim=(),
        rewrite=(),
        webhook=(),
    )
    assert bare == Settings()
    assert len(settings.route) == 1
    assert len(settings.access) == 1


def test_it_differs_from_the_defaults_only_in_the_spool_directory() -> None:
    settings = load(CONFIG / "zonerelay.toml")
    assert settings.spool.path == Path("var/spool")
    assert dataclasses.replace(settings, spool=Settings().spool) == Settings()
    assert dataclasses.replace(settings.spool, path=Settings().spool.path) == Settings().spool


def test_its_examples_load() -> None:
    settings = load_text(uncomment(SHIPPED))
    assert settings.zone[0].credentials == (settings.credential[0].name,)


def test_it_is_short_and_no_wider_than_a_terminal() -> None:
    lines = [line for line in SHIPPED.splitlines() if re.match(r"#?[\w\[]", line)]
    assert 20 <= len(lines) <= 40
    assert max(map(len, SHIPPED.splitlines())) <= 110


def test_only_this_machine_can_reach_what_make_run_starts() -> None:
    settings = load(CONFIG / "zonerelay.toml")
    assert [listener.address for listener in settings.listener] == ["127.0.0.1:2525"]
    assert all(parse_listen(listener.address).is_loopback for listener in settings.listener)
    assert parse_listen(settings.admin.address).is_loopback


def test_every_table_and_every_option_has_a_reason() -> None:
    for option in options():
        assert re.fullmatch(r"[A-Za-z].{15,}\.", option.doc), f"{option.table}.{option.key}"
    for table in TABLES:
        assert re.fullmatch(r"[A-Z].{15,}\.", about(table)), table


# `zonerelay init`: nothing is overwritten, and a relay of the machine keeps its mail where its unit says


@pytest.mark.parametrize("existing", ["zonerelay.toml", "zonerelay.socket"])
def test_a_file_that_exists_is_named_and_no_other_is_written(
    existing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / existing).write_text("mine")
    assert main(["init", str(tmp_path)]) == 1
    assert f"{tmp_path / existing} already exists" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {existing: "mine"}


def test_a_path_that_a_unit_must_quote_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "my mail")]) == 2
    assert "the path may contain" in capsys.readouterr().err


def test_the_configuration_of_the_machine_is_the_default_but_for_comments() -> None:
    assert load_text(configuration(None)) == Settings()
