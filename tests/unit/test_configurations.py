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

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.support.certificates import DAY, make
from tests.support.credentials import file_of, user
from tests.support.dkim import rsa_pem
from zonerelay.cli.setup.config import run as check_config
from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load_text
from zonerelay.config.settings import Settings

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


def test_root_is_told_that_the_relay_may_not_be_able_to_read_what_root_can(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    tls = '[[listener]]\ntls = "starttls"\ncertificate = "/here/good.pem"\nkey = "/here/good.key"\n'
    (note,) = check(tls)[1]
    assert note == "files were read as root: to try them as the relay's user, sudo -u zonerelay this command"
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


def test_a_configuration_that_is_not_there_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_config(tmp_path / "none.toml") == 2
    assert "none.toml: cannot be read: No such file or directory" in capsys.readouterr().err
