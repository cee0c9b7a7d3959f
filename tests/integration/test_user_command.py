"""`zonerelay user` on real files: in this process, on a terminal, and two at a time."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.command import PROGRAM, Ran, ran, typed
from tests.support.toml import toml_document
from zonerelay.config import user_limits
from zonerelay.config.credentials import file as credentials
from zonerelay.config.credentials import passwords

PASSWORD = "correct horse"


class Shell:
    def __init__(
        self, file: Path, capture: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.file = file
        self._capture = capture
        self._monkeypatch = monkeypatch

    def user(self, *words: str, typed: str | bytes = "", where: Sequence[str] | None = None) -> Ran:
        """With standard input that is no terminal, as in a script."""
        data = typed.encode() if isinstance(typed, str) else typed
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return ran(self._capture, "user", *words, *(where or ("--file", str(self.file))))

    def typing(self, lines: Sequence[str], *words: str) -> Ran:
        return typed(lines, "user", *words, "--file", str(self.file))

    def senders(self) -> dict[str, tuple[str, ...]]:
        return {name: user.senders for name, user in credentials.read(self.file).items()}

    def knows(self, name: str, password: str) -> bool:
        return passwords.matches(credentials.read(self.file)[name].hash, password)


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path / "credentials", capsys, monkeypatch)


def test_a_user_is_added_with_a_password_from_a_script(shell: Shell) -> None:
    ran = shell.user("add", "app", "--password-stdin", typed=f"{PASSWORD}\n")
    assert (ran.status, ran.out) == (0, "")
    assert f"User app was added to {shell.file}." in ran.err
    assert "The relay's user must be one of them" in ran.err or "cannot read it" in ran.err
    assert shell.knows("app", PASSWORD)
    assert PASSWORD not in shell.file.read_text()


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_line_end_does_not_belong_to_the_password(shell: Shell, end: str) -> None:
    assert shell.user("add", "app", "--password-stdin", typed=f" {PASSWORD} {end}").status == 0
    assert shell.knows("app", f" {PASSWORD} ")


def test_a_generated_password_is_all_that_standard_output_has(shell: Shell) -> None:
    ran = shell.user("add", "app", "--generate")
    password = ran.out.removesuffix("\n")
    assert len(password) == 24
    assert shell.knows("app", password)
    again = shell.user("passwd", "app", "--generate")
    assert again.out != ran.out
    assert shell.knows("app", again.out.strip())
    assert not shell.knows("app", password)


def test_senders_are_kept_when_the_password_changes(shell: Shell) -> None:
    patterns = ("example.com", "*.example.com", "bounce-*@example.net")
    options = [word for pattern in (*patterns, "example.com") for word in ("--sender", pattern)]
    shell.user("add", "crm", "--generate", *options)
    assert shell.senders() == {"crm": patterns}
    assert shell.user("passwd", "crm", "--password-stdin", typed=PASSWORD).status == 0
    assert shell.senders() == {"crm": patterns}
    assert shell.knows("crm", PASSWORD)


def test_names_and_passwords_are_kept_as_clients_will_be_read(shell: Shell) -> None:
    typed = "pa\u0308sswo\u0308rd\u00a0!"
    assert shell.user("add", "ju\u0308rgen", "--password-stdin", typed=typed).status == 0
    assert shell.knows("jürgen", "pässwörd !")
    assert shell.user("remove", "ju\u0308rgen").status == 0


def test_users_are_listed(shell: Shell) -> None:
    shell.user("add", "zoe", "--generate")
    shell.user("add", "app", "--generate", "--sender", "example.com", "--priority", "bulk")
    assert [line.split() for line in shell.user("list").out.splitlines()] == [
        ["USER", "SENDERS", "PRIORITY"],
        ["app", "example.com", "bulk"],
        ["zoe", "any"],
    ]
    listed = [json.loads(line) for line in shell.user("list", "--json").out.splitlines()]
    assert listed == [
        {"name": "app", "senders": ["example.com"], "priority": "bulk"},
        {"name": "zoe", "senders": [], "priority": ""},
    ]
    assert "argon2" not in shell.user("list", "--json").out


def test_a_user_is_removed_once(shell: Shell) -> None:
    shell.user("add", "app", "--generate")
    assert shell.user("remove", "app").status == 0
    assert shell.senders() == {}
    ran = shell.user("remove", "app")
    assert (ran.status, ran.err) == (
        1,
        f"zonerelay: {shell.file} does not contain the user app; names are case-sensitive\n",
    )
    ran = shell.user("list")
    assert (ran.status, ran.out) == (0, "")
    assert "has no users yet" in ran.err


@pytest.mark.parametrize(
    ("words", "typed", "status", "said"),
    [
        (("add", "app", "--generate"), "", 1, "app is already in"),
        (
            ("add", "new", "--password-stdin"),
            "short",
            1,
            "the password is too weak: use at least 8 characters",
        ),
        (("passwd", "app", "--password-stdin"), "short", 1, "too weak"),
        (("add", "long-name", "--password-stdin"), "long-name", 1, "not the user's name"),
        (("add", "new", "--password-stdin"), "", 1, "no password was given"),
        (("add", "new", "--password-stdin"), "\n", 1, "no password was given"),
        (("add", "new", "--password-stdin"), "two lines\nof password\n", 1, "a single line"),
        (("add", "new", "--password-stdin"), "with\0nul in it", 1, "without control characters"),
        (("add", "new", "--password-stdin"), b"not \xff UTF-8", 1, "is not UTF-8"),
        (("add", "new", "--password-stdin"), "x" * 1025, 1, "exceeds 1024 bytes"),
        (("add", "new", "--password-stdin"), "x" * 100_000, 1, "exceeds 1024 bytes"),
        (("add", "new"), "", 2, "cannot prompt for a password"),
        (("add", "new", "--password-stdin", "--generate"), "", 2, "not allowed with"),
        (("add", "a:b", "--generate"), "", 2, '"a:b" is not a valid user name'),
        (("add", "", "--generate"), "", 2, "the user name is missing"),
        (("add", "new", "--generate", "--sender", "a b"), "", 2, '--sender: "a b" is not a domain'),
        (
            ("add", "new", "--generate", "--sender", "a,b"),
            "",
            2,
            "--sender: a sender pattern is empty; separate",
        ),
        (("passwd", "APP", "--generate"), "", 1, "does not contain the user APP; names are case-sensitive"),
        (("remove", "APP"), "", 1, "does not contain the user APP"),
        (("change", "app"), "", 2, "unknown value"),
    ],
)
def test_what_is_refused_is_said_and_changes_nothing(
    shell: Shell, words: tuple[str, ...], typed: str | bytes, status: int, said: str
) -> None:
    shell.user("add", "app", "--generate")
    before = shell.file.read_text()
    ran = shell.user(*words, typed=typed)
    assert (ran.status, ran.out) == (status, "")
    assert said in ran.err
    assert shell.file.read_text() == before


@pytest.mark.parametrize("words", [("list",), ("passwd", "app", "--generate"), ("remove", "app")])
def test_a_missing_file_says_what_makes_it(shell: Shell, words: tuple[str, ...]) -> None:
    ran = shell.user(*words)
    assert ran.status == 1
    assert ran.err == f"zonerelay: {shell.file} does not exist; create it with: zonerelay user add NAME\n"
    assert not shell.file.exists()


def test_a_wrong_file_is_named_with_its_line(shell: Shell) -> None:
    shell.file.write_text("# ours\napp:secret\n")
    for words in (("list",), ("add", "new", "--generate"), ("remove", "app")):
        ran = shell.user(*words)
        assert (ran.status, ran.out) == (1, "")
        assert ran.err.startswith(f"zonerelay: {shell.file}:2: ")
        assert "secret" not in ran.err


def test_a_file_that_everybody_can_read_is_worth_a_word(shell: Shell) -> None:
    shell.user("add", "app", "--generate")
    shell.file.chmod(0o644)
    assert f"chmod 640 {shell.file}" in shell.user("passwd", "app", "--generate").err


def test_the_configuration_names_the_file(shell: Shell, tmp_path: Path) -> None:
    config = tmp_path / "zonerelay.toml"
    config.write_text(
        toml_document(
            {}, {"auth": {"credentials": str(shell.file)}, "listener": [{"address": "127.0.0.1:2525"}]}
        )
    )
    where = ("--config", str(config))
    assert shell.user("add", "app", "--generate", where=where).status == 0
    assert shell.user("list", where=where).out == shell.user("list").out
    assert set(shell.senders()) == {"app"}


def test_a_terminal_is_asked_twice_and_shows_nothing(shell: Shell) -> None:
    ran = shell.typing([PASSWORD, PASSWORD], "add", "app")
    assert ran.status == 0, ran.err
    assert "Password for app: " in ran.err
    assert PASSWORD not in ran.err + ran.out
    assert shell.knows("app", PASSWORD)


def test_two_different_passwords_change_nothing(shell: Shell) -> None:
    ran = shell.typing([PASSWORD, "correct house"], "add", "app")
    assert ran.status == 1
    assert "do not match" in ran.err
    assert not shell.file.exists()


def test_a_password_in_another_character_set_is_refused_in_words(shell: Shell) -> None:
    ran = shell.typing(["gr\udcfcn und blau"], "add", "app")
    assert ran.status == 1
    assert "the password is not UTF-8" in ran.err
    assert "Traceback" not in ran.err


def test_end_of_input_instead_of_a_password_changes_nothing(shell: Shell) -> None:
    for lines in (["\x04"], [PASSWORD, "\x04"]):
        ran = shell.typing(lines, "add", "app")
        assert ran.status == 1
        assert "no password was given; nothing was changed" in ran.err
        assert "Traceback" not in ran.err
        assert not shell.file.exists()


def test_two_commands_at_once_lose_nothing(shell: Shell) -> None:
    """Two processes, twenty users each, on one file."""
    adds = (
        "import sys; from pathlib import Path\n"
        "from zonerelay.config.credentials.file import User\n"
        "from zonerelay.config.user_limits import NONE, change_user\n"
        "from tests.support.credentials import user\n"
        "sys.stdin.readline()\n"
        "for n in range(20):\n"
        "    name = f'{sys.argv[2]}{n}'\n"
        "    change_user(Path(sys.argv[1]), name, lambda *_: (user(name), NONE))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", adds, str(shell.file), name], stdin=subprocess.PIPE)
        for name in ("a", "b")
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert set(shell.senders()) == {f"{name}{n}" for name in ("a", "b") for n in range(20)}
    assert list(shell.file.parent.iterdir()) == [shell.file]


def test_two_commands_for_one_name_make_one_user(shell: Shell) -> None:
    command = [sys.executable, "-c", PROGRAM, "user", "add", "app", "--generate", "--file", str(shell.file)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in "ab"]
    outputs = [(process.communicate(timeout=60)[0].decode(), process.returncode) for process in processes]
    [winner] = [out.strip() for out, status in outputs if status == 0]
    assert shell.knows("app", winner)


def test_guard_rails_are_set_shown_and_taken_back(shell: Shell) -> None:
    shell.user("add", "app", "--generate")
    mode = shell.file.stat().st_mode
    set_keys = ("senders=example.com", "priority=bulk", "octets_per_day=5MB", "networks=::1,10.0.0.0/8")
    ran = shell.user("set", "app", *set_keys)
    assert (ran.status, ran.out) == (0, "")
    assert "This applies from the next message." in ran.err
    assert user_limits.file_beside(shell.file).stat().st_mode == mode
    shown = json.loads(shell.user("show", "app", "--json").out)
    assert shown == {
        "name": "app",
        "senders": ["example.com"],
        "priority": "bulk",
        "passwords": 1,
        "rails": {"networks": ["::1/128", "10.0.0.0/8"], "octets_per_day": "5 MB"},
        "usage": {},
        "usage_unknown": "",
    }
    assert shell.user("disable", "app").status == 0
    table = shell.user("show", "app").out
    assert ["disabled", "true"] in [line.split() for line in table.splitlines()]
    assert max(map(len, table.splitlines())) <= 80
    for wrong, said in (("mod=copy", "did you mean mode?"), ("mode=copy", "requires a mailbox")):
        ran = shell.user("set", "app", "senders=", wrong)
        assert ran.status == 2
        assert f"{said}" in ran.err
        assert "nothing was changed" in ran.err
    assert shell.senders() == {"app": ("example.com",)}
    assert shell.user("set", "nobody", "zones=bulk").status == 1
    assert shell.user("enable", "app").status == 0
    assert "disabled" not in shell.user("show", "app").out
    shell.user("remove", "app")
    shell.user("add", "app", "--generate")
    assert json.loads(shell.user("show", "app", "--json").out)["rails"] == {}
    assert "There are no default limits" in shell.user("default").out
    assert shell.user("default", "recipients_per_day=5000").status == 0
    assert shell.user("default").out == "recipients_per_day = 5000\n"
    assert re.search(r"recipients_per_day +5000, the default", shell.user("show", "app").out)
    assert "did you mean mode?" in shell.user("default", "mod=copy").err


@pytest.mark.parametrize("words", [("enable", "app"), ("set", "app", "messages_per_hour=")])
def test_what_was_never_limited_can_be_allowed_again(shell: Shell, words: tuple[str, ...]) -> None:
    shell.user("add", "app", "--generate")
    ran = shell.user(*words)
    assert (ran.status, ran.out) == (0, "")
    assert ran.err.startswith("app was changed: ")


def test_a_sender_that_is_not_text_is_refused(shell: Shell) -> None:
    ran = shell.user("add", "app", "--sender", "\udcff@example.com", "--generate")
    assert (ran.status, ran.out) == (2, "")
    assert "--sender: " in ran.err
    assert not shell.file.exists()


def test_a_rotation_has_two_passwords_until_it_is_finished(shell: Shell) -> None:
    first = shell.user("add", "app", "--generate").out.strip()
    line = shell.file.read_text()
    second = shell.user("rotate", "app", "--generate").out.strip()
    assert shell.file.read_text() == line, "an older release goes on"
    assert json.loads(shell.user("show", "app", "--json").out)["passwords"] == 2
    assert "argon2" not in shell.user("show", "app").out
    ran = shell.user("rotate", "app", "--generate")
    assert (ran.status, ran.out) == (1, "")
    assert shell.user("rotate", "app", "--finish").status == 0
    assert shell.knows("app", second)
    assert not shell.knows("app", first)
    assert shell.user("rotate", "app", "--finish").status == 1
    shell.user("rotate", "app", "--generate")
    third = shell.user("passwd", "app", "--generate").out.strip()
    assert shell.knows("app", third)
    assert json.loads(shell.user("show", "app", "--json").out)["passwords"] == 1


def _fill(file: Path, size: int) -> None:
    """Make the file that large with a comment."""
    there = file.read_text() if file.exists() else ""
    file.write_text(f"{there}#{'x' * (size - len(there.encode()) - 2)}\n")
    assert file.stat().st_size == size


def test_no_command_writes_users_that_the_relay_cannot_read(shell: Shell) -> None:
    assert shell.user("add", "app", "--generate").status == 0
    _fill(shell.file, credentials.MAX_FILE - 20)
    before = shell.file.read_bytes()
    for words in (("add", "shop", "--generate"), ("set", "app", "senders=a.example,b.example,c.example")):
        ran = shell.user(*words)
        assert ran.status == 1
        assert "16,777,216" in ran.err
        assert "Nothing was changed" in ran.err
        assert shell.file.read_bytes() == before
        credentials.read(shell.file)


def test_a_file_that_is_too_large_can_be_made_smaller(shell: Shell) -> None:
    for name in ("app", "shop"):
        assert shell.user("add", name, "--generate").status == 0
    _fill(shell.file, credentials.MAX_FILE + 50)
    with pytest.raises(credentials.CredentialsError, match="exceeds"):
        credentials.read(shell.file)
    ran = shell.user("list", "--json")
    assert [json.loads(line)["name"] for line in ran.out.splitlines()] == ["app", "shop"]
    assert "No user can log in" in ran.err
    assert shell.user("passwd", "app", "--generate").status == 1  # no smaller than before
    ran = shell.user("remove", "shop")
    assert ran.status == 0
    assert "is nearly full" in ran.err
    assert list(credentials.read(shell.file)) == ["app"]


def test_a_file_that_fills_says_so(shell: Shell) -> None:
    _fill(shell.file, int(credentials.MAX_FILE * 0.79))
    assert "nearly full" not in shell.user("add", "app", "--generate").err
    _fill(shell.file, int(credentials.MAX_FILE * 0.81))
    ran = shell.user("add", "shop", "--generate")
    assert ran.status == 0
    assert "nearly full" in ran.err


def test_no_command_writes_rails_that_cannot_be_read(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shell.user("add", "app", "--generate").status == 0
    assert shell.user("set", "app", "recipients_per_hour=10").status == 0
    beside = user_limits.file_beside(shell.file)
    monkeypatch.setattr("zonerelay.config.credentials.file.MAX_FILE", beside.stat().st_size)
    before = beside.read_bytes(), shell.file.read_bytes()
    for words in (
        ("set", "app", "recipients_per_day=100"),
        ("rotate", "app", "--generate"),
        ("default", "recipients_per_hour=20"),
    ):
        ran = shell.user(*words)
        assert ran.status == 1
        assert "Nothing was changed" in ran.err
        assert (beside.read_bytes(), shell.file.read_bytes()) == before
    assert shell.user("set", "app", "recipients_per_hour=").status == 0


def test_a_mistake_elsewhere_in_the_file_stops_no_change_of_users(shell: Shell, tmp_path: Path) -> None:
    config = tmp_path / "zonerelay.toml"
    where = ("--config", str(config))
    config.write_text(toml_document({}, {"auth": {"credentials": str(shell.file)}, "retry": {"backof": 5}}))
    ran = shell.user("add", "app", "--generate", where=where)
    assert ran.status == 0
    assert "retry.backof: unknown key" in ran.err
    assert list(credentials.read(shell.file)) == ["app"]
    config.write_text(toml_document({}, {"auth": {"credential": str(shell.file)}}))  # which file is meant?
    ran = shell.user("add", "shop", "--generate", where=where)
    assert ran.status == 2
    assert "did you mean credentials?" in ran.err
