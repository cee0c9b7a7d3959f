"""check-config tries what a start would: certificates, users, patterns, an operator's code."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.certificates import DAY, make
from tests.support.credentials import file_of, user
from tests.support.dkim import rsa_pem
from zonerelay.cli.setup import check_config

POLICY = "tests.bench.policies:Nothing"

Check = Callable[[str], "Checked"]


@dataclass(frozen=True)
class Checked:
    status: int
    out: list[str]
    err: list[str]

    @property
    def notes(self) -> list[str]:
        return [line.removeprefix("  note: ") for line in self.out if line.startswith("  note: ")]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.setattr("os.geteuid", lambda: 999)

    def run(text: str) -> Checked:
        path = tmp_path / "relay.toml"
        path.write_text(f'hostname = "relay.example.org"\n{text}')
        status = check_config.run(path)
        out, err = capsys.readouterr()
        return Checked(status, out.splitlines(), err.splitlines())

    return run


def pair(directory: Path, name: str = "relay.example.org", *, days: float = 90) -> tuple[str, str]:
    """A certificate and its key, written as TOML."""
    made = make(name, starts=time.time() - DAY, ends=time.time() + days * DAY)
    certificate, key = made.write(directory, f"{name}-{days}")
    return json.dumps(str(certificate)), json.dumps(str(key))


def listener(certificate: str, key: str = "", more: str = "") -> str:
    keys = f"key = {key}\n" if key else ""
    return f'[[listener]]\ntls = "starttls"\ncertificate = {certificate}\n{keys}{more}\n'


def test_a_submission_listener_is_understood(tmp_path: Path, check: Check) -> None:
    users = tmp_path / "users"
    users.write_text(file_of(user()))
    users.chmod(0o600)
    found = check(
        listener(*pair(tmp_path), 'require_tls = true\nauth = "required"\naddress = "0.0.0.0:587"')
        + listener(*pair(tmp_path), f'allow_certificates = ["{"a" * 64}"]\npolicy = "{POLICY}"')
        + f'policy_file = "{users}"\n'
        + f'[auth]\ncredentials = "{users}"\n[[access]]\nuser = ["app"]\n'
    )
    assert (found.status, found.err) == (0, [])
    assert found.notes == []


def test_a_certificate_that_is_not_there_is_a_problem_with_its_key_and_line(
    tmp_path: Path, check: Check
) -> None:
    found = check(listener(f'"{tmp_path}/none.pem"'))
    assert (found.status, found.out) == (2, [])
    assert found.err == [
        f"listener[0].certificate: {tmp_path}/none.pem does not exist; expected the certificate there "
        "(line 4)"
    ]


def test_of_several_certificates_the_wrong_one_is_named(tmp_path: Path, check: Check) -> None:
    one, one_key = pair(tmp_path, "one.example.org")
    two, _ = pair(tmp_path, "two.example.org")
    found = check(listener(f"[{one},\n {two}]", f"[{one_key},\n {one_key}]"))
    assert found.status == 2
    (line,) = found.err
    assert line.startswith("listener[0].key[1]: the key in ")
    assert "does not match the certificate in" in line
    assert line.endswith("(line 7)")


def test_a_key_that_is_a_certificate_is_blamed_on_the_key(tmp_path: Path, check: Check) -> None:
    certificate, _ = pair(tmp_path)
    copy = tmp_path / "copy.pem"
    copy.write_bytes(Path(json.loads(certificate)).read_bytes())
    (line,) = check(listener(certificate, f'"{copy}"')).err
    assert line.startswith(f"listener[0].key: {copy} contains no private key: only a certificate")
    assert line.endswith("(line 5)")


def test_a_key_whose_name_begins_like_the_certificates_is_not_blamed_for_it(
    tmp_path: Path, check: Check
) -> None:
    _, key = pair(tmp_path)
    (tmp_path / "c").write_bytes(Path(json.loads(key)).read_bytes())
    (line,) = check(listener(f'"{tmp_path}/c.pem"', f'"{tmp_path}/c"')).err
    assert line.startswith(f"listener[0].certificate: {tmp_path}/c.pem does not exist")


@pytest.mark.parametrize(("days", "said"), [(-1, "has expired on 2"), (3, "expires on 2"), (90, "")])
def test_the_end_of_a_certificate_is_noted(days: float, said: str, tmp_path: Path, check: Check) -> None:
    found = check(listener(*pair(tmp_path, days=days)))
    assert found.status == 0
    assert len(found.notes) == (1 if said else 0)
    assert all(note.startswith("listener[0].certificate: ") and said in note for note in found.notes)


def test_a_certificate_of_tomorrow_is_noted(tmp_path: Path, check: Check) -> None:
    made = make("relay.example.org", starts=time.time() + DAY, ends=time.time() + 90 * DAY)
    certificate, key = made.write(tmp_path, "later")
    (note,) = check(listener(f'"{certificate}"', f'"{key}"')).notes
    assert "is not valid before 2" in note


def test_a_certificate_that_nobody_is_shown_is_noted(tmp_path: Path, check: Check) -> None:
    one, one_key = pair(tmp_path)
    two, two_key = pair(tmp_path, days=91)
    (note,) = check(listener(f"[{one}, {two}]", f"[{one_key}, {two_key}]")).notes
    assert note == f"listener[0].certificate: {json.loads(two)} is never used: one before it has its names"


def test_a_key_that_everybody_can_read_is_noted(tmp_path: Path, check: Check) -> None:
    certificate, key = pair(tmp_path)
    Path(json.loads(key)).chmod(0o644)
    (note,) = check(listener(certificate, key)).notes
    assert note == (f"listener[0].key: every user of this machine can read {json.loads(key)}: chmod o-r it")


def test_secrets_that_everybody_can_read_are_noted(tmp_path: Path, check: Check) -> None:
    files = [tmp_path / name for name in ("users", "new", "old", "postgres", "s3")]
    for file in files:
        file.write_text("a secret of some length\n")
    users, new, old, postgres, s3 = files
    users.write_text(file_of(user()))
    text = (
        '[[listener]]\nauth = "optional"\n'
        'unsafe = ["cleartext-auth"]\n'
        f'[auth]\ncredentials = "{users}"\n'
        f'[srs]\ndomain = "srs.example.org"\nsecret = "{new}"\nold_secrets = ["{old}"]\n'
        f'[postgres]\npassword = "{postgres}"\n[s3]\naccess_key = "x"\nsecret_key = "{s3}"\n'
    )

    def told() -> list[str]:
        return [note for note in check(text).notes if "every user of this machine" in note]

    for file in files:
        file.chmod(0o644)
    options = ("auth.credentials", "postgres.password", "s3.secret_key", "srs.secret", "srs.old_secrets[0]")
    by_option = dict(zip(options, (users, postgres, s3, new, old), strict=True))
    assert told() == [
        f"{option}: every user of this machine can use {file}: chmod o-rwx it"
        for option, file in by_option.items()
    ]
    for file in files:
        file.chmod(0o640)
    assert told() == []


def test_root_is_told_that_the_relay_may_not_be_able_to_read_what_root_can(
    tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    (note,) = check(listener(*pair(tmp_path))).notes
    assert note == "files were read as root: to try them as the relay's user, sudo -u zonerelay this command"
    assert check("").notes == []


def with_users(directory: Path, content: str) -> str:
    (directory / "users").write_text(content)
    return listener(*pair(directory), 'auth = "required"') + f'[auth]\ncredentials = "{directory}/users"\n'


def test_a_credentials_file_is_read_when_somebody_may_log_in(tmp_path: Path, check: Check) -> None:
    found = check(with_users(tmp_path, f"{file_of(user())}\nbroken\n"))
    assert found.status == 2
    assert found.err == [
        f"auth.credentials: {tmp_path}/users:3: expected name:hash, name:hash:sender,sender "
        "or name:hash:senders:priority "
        "(zonerelay user add writes it) (line 8)"
    ]


def test_a_missing_credentials_file_says_how_to_make_it(tmp_path: Path, check: Check) -> None:
    text = with_users(tmp_path, "").replace("/users", "/none")
    (line,) = check(text).err
    assert line == (
        f"auth.credentials: {tmp_path}/none: No such file or directory; "
        "create it with zonerelay user add (line 8)"
    )


def test_a_missing_credentials_file_that_nobody_needs_is_no_problem(check: Check) -> None:
    assert check("").status == 0


def test_a_user_whose_senders_can_match_nothing_is_a_problem(tmp_path: Path, check: Check) -> None:
    (line,) = check(with_users(tmp_path, file_of(user("crm", "correct horse", "a@-b-")))).err
    assert line.startswith(f"auth.credentials: {tmp_path}/users: a sender of the user crm: ")
    assert '"-b-" cannot be matched' in line


def test_a_pattern_that_can_match_nothing_is_a_problem_where_it_stands(check: Check) -> None:
    found = check('[[access]]\nsender = ["a@example.com",\n  "a@ex..ample"]\nrecipient = ["x@-y-"]\n')
    assert found.status == 2
    assert found.err == [
        'access[0].sender[1]: "ex..ample" cannot be matched: not a domain name: write the domain as in '
        '"user@example.com" or "*.example.com" (line 4)',
        'access[0].recipient[0]: "-y-" cannot be matched: not a domain name: write the domain as in '
        '"user@example.com" or "*.example.com" (line 5)',
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('policy = "nowhere_at_all:X"', "listener[0].policy: the module 'nowhere_at_all' was not found"),
        ('policy = "tests.bench.policies:Nothin"', "did you mean 'Nothing'?"),
    ],
)
def test_a_policy_is_made_as_at_a_start(text: str, said: str, check: Check) -> None:
    found = check(f"[[listener]]\n{text}\n")
    assert found.status == 2
    (line,) = found.err
    assert said in line


HANDLERS = "tests.support.handlers"
AUTH = 'auth = "optional"\nunsafe = ["cleartext-auth"]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'policy = "{HANDLERS}:Sink"', "Sink is neither a subclass of"),
        (f'policy = "{HANDLERS}:SEEN"', "this object has no method such as handle_DATA"),
        (f'policy = "{HANDLERS}:Mailbox"', "missing a required argument: 'mail_dir'; create the object"),
        (f'policy = "{HANDLERS}:Gatewai"', "did you mean 'Gateway'? (line 3)"),
        (f'policy = "{HANDLERS}:Past"', "process_message is deprecated in aiosmtpd; use handle_DATA"),
        (
            f'policy = "{HANDLERS}:OwnMechanism"',
            "the hook auth_CRAM__MD5 is not supported: logins are checked by",
        ),
        (f'policy = "{HANDLERS}:Proxied"', "the hook handle_PROXY is not supported: proxy_networks"),
        (f'policy = "{HANDLERS}:Gateway"\npolicy_file = "/x"', "policy_file is not passed to an aiosmtpd"),
        (f'authenticator = "{HANDLERS}:PasswordBook"', "listener[0].authenticator: is not used with auth ="),
        (f'{AUTH}authenticator = "{HANDLERS}:SEEN"', "listener[0].authenticator: tests.support.handlers:S"),
        (f'{AUTH}authenticator = "{HANDLERS}:mailbox"', "as authenticators of aiosmtpd: too many positional"),
        (f'{AUTH}authenticator = "{HANDLERS}:nobody"', "module 'tests.support.handlers' has no 'nobody'"),
    ],
)
def test_what_is_no_handler_or_authenticator_is_said(text: str, said: str, check: Check) -> None:
    found = check(f"[[listener]]\n{text}\n")
    assert found.status == 2
    (line,) = found.err
    assert said in line


def test_handlers_and_authenticators_are_tried(check: Check) -> None:
    """No file of users is needed when an authenticator knows them."""
    keys = f'policy = "{HANDLERS}:Gateway"\n{AUTH}authenticator = "{HANDLERS}:PasswordBook"\n'
    found = check(f"[[listener]]\n{keys}")
    assert found.status == 0
    assert any(
        "listener[0].policy_max_size: the maximum message size is limited" in each for each in found.out
    )


@pytest.fixture
def closers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "closers_of_check_config.py").write_text(
        "from zonerelay.inbound.policy import Policy\n"
        "closed = []\n"
        "class Well(Policy):\n"
        "    def rcpt(self, event): return None\n"
        "    async def close(self): closed.append(self.context.listener)\n"
        "class Badly(Well):\n"
        "    def close(self): raise KeyError('x')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "closers_of_check_config"


def test_a_policy_that_was_made_is_closed_again(closers: str, check: Check) -> None:
    assert check(f'[[listener]]\npolicy = "{closers}:Well"\n').status == 0
    assert sys.modules[closers].closed == ["127.0.0.1:2525"]


def test_a_policy_that_cannot_be_closed_is_a_problem(closers: str, check: Check) -> None:
    found = check(f'[[listener]]\npolicy = "{closers}:Badly"\n')
    assert found.err == [f"listener[0].policy: {closers}:Badly: close() failed: KeyError: 'x' (line 3)"]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nowhere_at_all:f", "retry.backoff: cannot import 'nowhere_at_all': ModuleNotFoundError"),
        ("math:squrt", "retry.backoff: module 'math' has no 'squrt' (line 3)"),
        ("math:pi", "retry.backoff: 'pi' in module 'math' is not a function (line 3)"),
    ],
)
def test_a_back_off_function_is_looked_for(function: str, said: str, check: Check) -> None:
    found = check(f'[retry]\nbackoff = "{function}"\n')
    assert found.status == 2
    (line,) = found.err
    assert said in line


def test_everything_is_tried_before_anything_is_said(tmp_path: Path, check: Check) -> None:
    found = check(
        '[[listener]]\ntls = "starttls"\ncertificate = "/none"\nauth = "optional"\npolicy = "nowhere_at:X"\n'
        '[auth]\ncredentials = "/none"\n[[access]]\nsender = ["a@-"]\n'
        '[[route]]\nsender = ["a@-"]\nrecipient = ["b", "*@*.-"]\n[retry]\nbackoff = "math:pi"\n'
    )
    assert [line.partition(":")[0] for line in found.err] == [
        "listener[0].certificate",
        "listener[0].policy",
        "auth.credentials",
        "access[0].sender[0]",
        "route[0].sender[0]",
        "route[0].recipient[1]",
        "retry.backoff",
    ]


def test_files_are_not_looked_at_while_the_configuration_itself_is_wrong(check: Check) -> None:
    found = check('[[listener]]\ntls = "starttls"\ncertificate = "/none"\nmax_errors = 0\n')
    assert [line.partition(":")[0] for line in found.err] == ["listener[0].max_errors"]


def test_openssl_is_not_loaded_where_nobody_has_tls(tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_text('[[access]]\nsender = ["a@example.com"]\n')
    program = (
        "import sys, pathlib; from zonerelay.cli.setup import check_config; "
        f"status = check_config.run(pathlib.Path({str(path)!r})); "
        "sys.exit(status or ('OpenSSL' in sys.modules) * 3 or ('cryptography' in sys.modules) * 4)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            '[[listener]]\naddress = "127.0.0.1:1"\nunsafe = ["open-relay"]\n',
            "listener[0].unsafe: every client that reaches 127.0.0.1:1 may relay",
        ),
        (
            '[[source]]\nname = "a"\naddress = ["127.0.0.2", "2001:db8::77"]\n[[zone]]\nsources = ["a"]\n',
            "source[0].address[1]: no interface of this machine has 2001:db8::77",
        ),
    ],
)
def test_what_is_noted(text: str, note: str, check: Check) -> None:
    (line,) = check(text).notes
    assert line.startswith(note)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "[[listener]]\nmax_connection = 5\n[log]\nredact = 1\n",
            [
                "listener[0].max_connection: unknown key; did you mean max_connections? (line 3)",
                "log.redact: expected true or false (no quotes), not a number (line 5)",
            ],
        ),
        (
            '[[destination]]\ndomain = ["example.com"]\nmx = ["ü..example"]\n',
            ['destination[0].mx[0]: "ü..example" cannot be matched'],
        ),
        (
            '[[rewrite]]\naddress = ["a@b", "c@d..e"]\nto = "@f"',
            ['rewrite[0].address[1]: "d..e" cannot be matched'],
        ),
        ('[[rewrite]]\naddress = ["*"]\nto = "a@c..example"', ["rewrite[0].to: "]),
        ('[[rewrite]]\naddress = ["*"]\nto = "@c_.-example"', ["rewrite[0].to: "]),
        ('[[rewrite]]\naddress = ["*"]\nto = "jü@c.example"', ["rewrite[0].to: "]),
        (f'[[rewrite]]\naddress = ["*"]\nto = "@{"a." * 95}example"', ["rewrite[0].to: "]),
    ],
    ids=["wrong", "mx", "pattern", "empty label", "hyphen", "not ASCII", "too long"],
)
def test_every_problem_is_printed(text: str, problems: list[str], check: Check) -> None:
    found = check(text)
    assert (found.status, found.out, len(found.err)) == (2, [], len(problems))
    assert all(line.startswith(problem) for line, problem in zip(found.err, problems, strict=True))


def test_a_configuration_that_is_not_there_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_config.run(tmp_path / "none.toml") == 2
    assert "none.toml: cannot be read: No such file or directory" in capsys.readouterr().err


def dkim(key: object, selector: str = "s1") -> str:
    return f'[[dkim]]\ndomain = "example.com"\nselector = "{selector}"\nkey_file = "{key}"\n'


def test_signing_keys_are_tried(tmp_path: Path, check: Check) -> None:
    key = tmp_path / "s1.key"
    key.write_bytes(rsa_pem())
    key.chmod(0o600)
    found = check(dkim(key))
    assert (found.status, found.notes) == (0, [])
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + DAY))
    (note,) = check(f"{dkim(key)}not_after = {end}\n").notes
    assert note.startswith("dkim[0].not_after: this key ends on")
    key.chmod(0o644)
    (note,) = check(dkim(key)).notes
    assert note.startswith(f"dkim[0].key_file: every user of this machine can read {key}")
    key.write_text("-----BEGIN PUBLIC KEY-----\n")
    (line,) = check(dkim(key)).err
    assert line.startswith("dkim[0].key_file: ")
    assert line.endswith("s1.key is not a private key in PEM (line 5)")
    missing = check(dkim("/gone/1") + dkim("/gone/2", "s2")).err
    assert [line.partition(":")[0] for line in missing] == ["dkim[0].key_file", "dkim[1].key_file"]
