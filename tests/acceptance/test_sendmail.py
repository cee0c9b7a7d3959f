"""`zonerelay sendmail` and a real relay: what programs that call sendmail(1) rely on."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.crew import run
from tests.support.ports import LOOPBACK, free_port
from tests.support.process import PROGRAM, RelayProcess
from tests.support.sink import Sink
from tests.support.toml import Table
from zonerelay.config.tables import listener as of_settings
from zonerelay.sendmail import (
    ALIASES,
    CONFIG,
    DATAERR,
    DROP,
    IOERR,
    NOPERM,
    NOUSER,
    OK,
    OSERR,
    TEMPFAIL,
    USAGE,
    main,
)

HEADER = "From: App <app@b.example>\nSubject: x\n"


def ran(
    config: Path, *words: str, message: str, program: Sequence[str] = (str(PROGRAM), "sendmail"), **more: Any
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ZONERELAY_CONFIG": str(config)}
    given: dict[str, Any] = {"input": message, "env": env, "encoding": "utf-8", **more}
    return subprocess.run([*program, *words], capture_output=True, timeout=60, check=False, **given)


def sendmail(config: Path, *words: str, message: str = f"{HEADER}\nHello\n") -> tuple[int, str]:
    done = ran(config, *words, message=message)
    return done.returncode, done.stderr


def domain_here() -> str:
    mailname = Path("/etc/mailname")
    return mailname.read_text().strip() if mailname.exists() else "relay.test"


def test_what_is_given_on_standard_input_is_delivered(tmp_path: Path, sink: Sink) -> None:
    with RelayProcess(tmp_path, next_hop=f"{LOOPBACK}:{sink.port}") as relay:

        def sent(*words: str, message: str) -> tuple[str, list[str], str]:
            sink.messages.clear()
            result = sendmail(relay.config, *words, message=message)
            assert result == (OK, "")
            count = 2 if "-t" in words else 1
            recipients = sink.until_recipients(count)
            one = sink.messages[0]
            return one.mail_from, recipients, one.body.decode()

        sender, recipients, text = sent(
            "-f", "app@b.example", "c@d.example", message="Note: this\nis no header\n.\nnot this\n"
        )
        assert (sender, recipients) == ("app@b.example", ["c@d.example"])
        assert "\r\nFrom: app@b.example\r\n" in text
        assert text.endswith("\r\nNote: this\r\n\r\nis no header\r\n")

        letter = f"{HEADER}To: Ann <ann@d.example>,\n group: ;\nBcc: bob@d.example\n\n.\n..\nend"
        sender, recipients, text = sent("-t", "-oi", "-fapp@b.example", message=letter)
        assert (sender, recipients) == ("app@b.example", ["ann@d.example", "bob@d.example"])
        assert text.endswith("\r\n\r\n.\r\n..\r\nend\r\n")
        assert "bob@" not in text

        words = ("-i", "-F", "Zoë", "-N", "never", "--", "local")
        sender, recipients, text = sent(*words, message="Subject: grün\n\nGrüße\n")
        user = pwd.getpwuid(os.getuid()).pw_name
        assert (sender, recipients) == (f"{user}@{domain_here()}", [f"local@{domain_here()}"])
        assert f"\r\nFrom: =?utf-8?q?Zo=C3=AB?= <{sender}>\r\n" in text
        assert "Grüße" in text

        sender, _, _ = sent("-f", "<>", "c@d.example", message=f"{HEADER}\nx\n")
        assert sender == ""


def test_a_relay_that_is_down_is_worth_another_try_and_one_that_refuses_is_not(tmp_path: Path) -> None:
    rules = {"access": [{"recipient": ["no@d.example"], "action": "refuse"}]}
    listener = {"max_message_size": "2 KB"}
    with RelayProcess(tmp_path / "relay", next_hop="127.0.0.1:1", listener=listener, tables=rules) as relay:
        assert sendmail(relay.config, "yes@d.example", "no@d.example")[0] in (NOUSER, NOPERM)
        assert sendmail(relay.config, "c@d.example", message=f"{HEADER}\n{'x' * 3000}\n")[0] == DATAERR
        assert relay.events("accepted") == []
        assert relay.terminate() == 0
        status, said = sendmail(relay.config, "c@d.example")
        assert status == TEMPFAIL
        assert f"127.0.0.1:{relay.smtp_port}" in said


@pytest.mark.parametrize(
    ("words", "message", "status", "said"),
    [
        (["-bd"], "", USAGE, "zonerelay serve"),
        (["-Y"], "", USAGE, "option -Y"),
        (["-f"], "", USAGE, "option -f requires a value"),
        (["-f", "a@b.example, c@d.example", "x@d.example"], "", USAGE, "is not a single address"),
        (["-t"], f"{HEADER}To: Sales Team\n\n", USAGE, "'Sales Team' in To is not a valid address"),
        (["-t"], f"{HEADER}To: {'(' * 200_000}\n\n", USAGE, "in To is not a valid address"),
        (["-q"], "", OK, ""),
        (["-q15m", "-v"], "", OK, ""),
        (["-I"], "", OK, ""),
        (["-bz"], "", USAGE, "-bz is not supported"),
        ([], f"{HEADER}\n", USAGE, "no recipients"),
        (["-t"], f"{HEADER}To: none:;\n\n", USAGE, "no recipients"),
        (["c@d.example> NOTIFY=NEVER"], f"{HEADER}\n", DATAERR, "spaces and control characters"),
        (["-bi"], "", OK, ""),
        (["-V", "\udcff", "c@d.example"], f"{HEADER}\n", TEMPFAIL, "does not respond"),
    ],
)
def test_what_is_wrong_is_said_before_a_connection(
    words: list[str], message: str, status: int, said: str, tmp_path: Path
) -> None:
    config = tmp_path / "relay.toml"
    config.write_text(
        f'[sendmail]\ndrop = "{tmp_path}/none"\n[[listener]]\naddress = "127.0.0.1:{free_port()}"\n'
    )
    got, text = sendmail(config, *words, message=message)
    assert got == status
    assert said in text


@pytest.mark.parametrize(
    "listeners", ['[[listener]]\nauth = "required"\n[[listener]]\ntls = "implicit"\n', 'listener = ["x"]\n']
)
def test_a_relay_without_a_listener_for_this_machine_is_a_wrong_configuration(
    listeners: str, tmp_path: Path
) -> None:
    config = tmp_path / "relay.toml"
    config.write_text(listeners)
    status, said = sendmail(config, "c@d.example")
    assert (status, "[[listener]]" in said) == (CONFIG, True)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:smtp"])
def test_an_address_that_is_none_is_a_wrong_configuration(address: str, tmp_path: Path) -> None:
    config = tmp_path / "relay.toml"
    config.write_text(f'[[listener]]\naddress = "{address}"\n')
    status, said = sendmail(config, "c@d.example")
    assert (status, address in said, "Traceback" in said) == (CONFIG, True, False)


@pytest.mark.parametrize("words", [["c@d.example"], ["-t"], ["-bs"]])
def test_a_closed_standard_input_is_no_message(words: list[str], tmp_path: Path) -> None:
    done = ran(
        tmp_path / "none",
        *words,
        message="",
        program=("sh", "-c", f'exec "{PROGRAM}" sendmail "$@" <&-', "sh"),
    )
    assert (done.returncode, "standard input is closed" in done.stderr) == (IOERR, True)


def test_a_queue_that_cannot_be_shown_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "prefix", "/none")
    monkeypatch.setattr(os, "execv", Mock(side_effect=FileNotFoundError(2, "No such file or directory")))
    assert main(["-bp"]) == OSERR
    assert "/usr/bin/zonerelay cannot be run: No such file" in capsys.readouterr().err


def test_a_listener_of_conf_d_is_known(tmp_path: Path) -> None:
    config = tmp_path / "relay.toml"
    config.write_text(f'[sendmail]\ndrop = "{tmp_path}/none"\n[[listener]]\nauth = "required"\n')
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "local.toml").write_text(f'[[listener]]\naddress = "127.0.0.1:{free_port()}"\n')
    assert sendmail(config, "c@d.example")[0] == TEMPFAIL


PYTHONS = sorted({sys.executable, shutil.which("python3", path="/usr/bin") or sys.executable})
"""Debian's own reads lists of addresses in another way than later ones did."""
MAIN = "import sys; from zonerelay.sendmail import main; sys.exit(main(sys.argv[1:]))"
RESENT = "Resent-From: me@b.example\nResent-To: new@d.example\nResent-Bcc: hid@d.example\n"
LETTERS = {
    "brackets in a name": ("-t", "To: Shop [Sales] <s@d.example>", ["s@d.example"], ""),
    "an address for a name": (
        "-t", "To: a@d.example <a@d.example>\nBcc: b@d.example", ["a@d.example", "b@d.example"], ""),
    "semicolons": ("-t", "To: a@d.example; b@d.example", ["a@d.example", "b@d.example"], ""),
    "a comma in a comment": ("-t", "To: A (Foo, Inc) <a@d.example>", ["a@d.example"], ""),
    "one that cannot be read": ("-t", "To: x@@, Sales Team\nCc: a@d.example", ["a@d.example"], "'x@@' in To"),
    "dots anywhere": (
        "-t", "To: J. D. <john..doe@d.example>, .j.@d.example", ["john..doe@d.example", ".j.@d.example"], ""),
    "in the arguments": ("a@d.example x@@", "Subject: x", ["a@d.example"], "'x@@' in the arguments"),
    "an option behind": ("a@d.example -f b@b.example", "Subject: x", ["a@d.example"], ""),
    "an option like an address": ("-f b@b.example -- a@d.example", "Subject: x", ["a@d.example"], ""),
    "Resent- fields": ("-t", f"{RESENT}To: old@d.example", ["new@d.example", "hid@d.example"], ""),
    "older Resent- fields": (
        "-t", f"{RESENT}Resent-From: x@b.example\nResent-To: y@d.example",
        ["new@d.example", "hid@d.example"], ""),
    "Bcc without -t": ("a@d.example", "Bcc: hid@d.example", ["a@d.example"], ""),
    "a mailbox's first line": (
        "-t", "From me  Mon Jan  1 00:00:00 2026\nTo: a@d.example\nBcc: hid@d.example",
        ["a@d.example", "hid@d.example"], ""),
    "all of Postfix's options": (
        "-Ax -Bx -Cx -Fx -G -L x -N never -Ox -R hdrs -U -V a+=b -Xx -bm -c -em -f b@b.example -h1 -i -m -n"
        " -oem -o7 -px -r b@b.example -v -x a@d.example", "Subject: x", ["a@d.example"], ""),
    "-V alone": ("a@d.example -V", "Subject: x", ["a@d.example"], ""),
    "a name with the sender": ("-f Ann<b@b.example> a@d.example", "Subject: x", ["a@d.example"], ""),
}  # fmt: skip


@pytest.mark.parametrize("python", PYTHONS)
def test_a_message_goes_to_whom_its_author_means(python: str, tmp_path: Path, sink: Sink) -> None:
    with RelayProcess(tmp_path, next_hop=f"{LOOPBACK}:{sink.port}") as relay:
        for count, (what, (words, header, wanted, said)) in enumerate(LETTERS.items(), 1):
            sink.messages.clear()
            letter, program = f"{header}\n\nHello\n", (python, "-c", MAIN)
            done = ran(relay.config, *words.split(), message=letter, program=program, cwd=PROGRAM.parents[2])
            assert done.returncode == OK, (what, done.stderr)
            assert said in done.stderr
            assert bool(said) == bool(done.stderr), (what, done.stderr)
            assert sink.until_recipients(len(wanted)) == sorted(wanted), what
            accepted = relay.events("accepted")
            assert (len(accepted), accepted[-1]["recipients"]) == (count, len(wanted)), what
            assert not any(b"hid@d.example" in each.body for each in sink.messages), what
            if "b@b.example" in words:
                assert {each.mail_from for each in sink.messages} == {"b@b.example"}, what


def test_addresses_of_the_header_get_the_domain_too(tmp_path: Path, sink: Sink) -> None:
    """As cron writes them, which leaves them to sendmail."""
    letter = (
        "From: root (Cron Daemon)\nTo: ops, Ann <ann>, c@d.example\nCc: =?utf-8?q?B?= <bob>\n"
        'Reply-To:\n "The Root" <root>\nX-To: ops\nSubject: root\n\nFrom: root\n'
    )
    with RelayProcess(tmp_path, next_hop=f"{LOOPBACK}:{sink.port}") as relay:
        assert sendmail(relay.config, "x@d.example", message=letter) == (OK, "")
        sink.until(1, timeout=20)
        here, text = domain_here(), sink.messages[0].body.decode()
        assert f"\r\nFrom: root@{here} (Cron Daemon)\r\n" in text
        assert f"\r\nTo: ops@{here}, Ann <ann@{here}>, c@d.example\r\n" in text
        assert f"\r\nCc: =?utf-8?q?B?= <bob@{here}>\r\n" in text
        assert f'\r\nReply-To:\r\n "The Root" <root@{here}>\r\n' in text
        assert text.endswith("\r\nX-To: ops\r\nSubject: root\r\n\r\nFrom: root\r\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes a user without a name")
def test_a_user_without_a_name_sends(tmp_path: Path, sink: Sink) -> None:
    with (
        tempfile.TemporaryDirectory() as place,  # below tmp_path other users may not go
        RelayProcess(tmp_path / "relay", next_hop=f"{LOOPBACK}:{sink.port}") as relay,
    ):
        code, config = Path(place) / "zonerelay", Path(place) / "relay.toml"
        (code / "model").mkdir(parents=True)
        for name in ("__init__", "sendmail", "model/__init__", "model/address_list"):
            (code / f"{name}.py").write_bytes((PROGRAM.parents[2] / "zonerelay" / f"{name}.py").read_bytes())
        config.write_text(
            f'hostname = "relay.test"\n[[listener]]\naddress = "{LOOPBACK}:{relay.smtp_port}"\n'
        )
        code.parent.chmod(0o755)
        for header, sender in ((HEADER, "app@b.example"), ("Subject: x\n", f"uid-54321@{domain_here()}")):
            sink.messages.clear()
            nobody: dict[str, Any] = {"user": 54321, "group": 54321, "extra_groups": [], "cwd": place}
            nobody |= {"env": {"ZONERELAY_CONFIG": str(config)}, "program": ("/usr/bin/python3", "-c", MAIN)}
            done = ran(config, "c@d.example", message=f"{header}\nHello\n", **nobody)
            assert (done.returncode, done.stderr) == (OK, "")
            sink.until(1, timeout=20)
            assert sink.messages[0].mail_from == sender


def test_recipients_can_be_verified_without_a_message(tmp_path: Path) -> None:
    rules = {"access": [{"recipient": ["no@d.example"], "action": "refuse"}]}
    with RelayProcess(tmp_path, next_hop="127.0.0.1:1", tables=rules) as relay:
        done = ran(relay.config, "-bv", "yes@d.example", "no@d.example", message="")
        assert done.returncode in (NOUSER, NOPERM)
        good, bad = done.stdout.splitlines()
        assert good == "yes@d.example ... deliverable: the relay accepts it"
        assert bad.startswith("no@d.example ... the relay rejected the recipient no@d.example: 5")
        assert relay.events("accepted") == []


SESSION = "EHLO x\nMAIL FROM:<a@b.example>\nRCPT TO:<c@d.example>\n"
SESSIONS = {
    "LF alone": f"{SESSION}DATA\nSubject: x\n\nhi\n..\n.\nQUIT\n",
    "CRLF": f"{SESSION}DATA\nSubject: x\n\nhi\n..\n.\nQUIT\n".replace("\n", "\r\n"),
    "chunks": f"{SESSION}BDAT 14\nSubject: x\r\n\r\nBDAT 7 LAST\nhi\r\n.\r\nQUIT\n",
    "no QUIT": f"{SESSION}DATA\nSubject: x\n\nhi\n..\n.",
}


def test_smtp_from_a_pipe_all_at_once(tmp_path: Path, sink: Sink) -> None:
    with RelayProcess(tmp_path, next_hop=f"{LOOPBACK}:{sink.port}") as relay:

        def given(text: str) -> tuple[int, list[str]]:
            done = ran(relay.config, "-bs", message=text)
            return done.returncode, [line for line in done.stdout.splitlines() if line[3:4] == " "]

        for what, text in SESSIONS.items():
            sink.messages.clear()
            status, replies = given(text)
            assert status == OK, what
            assert any("queued as" in reply for reply in replies), (what, replies)
            sink.until(1, timeout=20)
            assert sink.messages[0].body.endswith(b"\r\n\r\nhi\r\n.\r\n"), what
        status, replies = given(f"{SESSION}DATA\nSubject: x\n\nhi\n")
        assert (status, replies[-1][:3]) == (DATAERR, "354")
        assert len(relay.events("accepted")) == len(SESSIONS)


def drop_directory(place: Path) -> Path:
    for name in ("new", "tmp"):
        (place / name).mkdir(parents=True)
        (place / name).chmod(0o3733)
    return place


def test_mail_of_a_relay_that_is_down_waits_and_its_owner_submits_it(tmp_path: Path, sink: Sink) -> None:
    drop = drop_directory(tmp_path / "drop")
    refused = {"recipient": ["no@d.example"], "action": "refuse"}
    tables: Mapping[str, Table | Sequence[Table]] = {"sendmail": {"drop": str(drop)}, "access": [refused]}

    with RelayProcess(tmp_path, next_hop=f"{LOOPBACK}:{sink.port}", tables=tables) as relay:
        relay.terminate()
        for word in ("c@d.example", "no@d.example"):
            assert sendmail(relay.config, "-f", "app@b.example", "-N", "never", word) == (OK, "")
        kept = {each.name: each.read_bytes() for each in (drop / "new").iterdir()}
        outside = tmp_path / "secret"
        outside.write_text(
            "zonerelay-drop-1\nMAIL FROM:<a@b.example>\nRCPT TO:<secret@d.example>\n\nx: y\n\nsecret\n"
        )
        os.link(outside, drop / "new" / "linked")
        (drop / "new" / "pointing").symlink_to(outside)
        os.mkfifo(drop / "new" / "pipe")
        (drop / "new" / "nonsense").write_text("hello\n")
        relay.start()
        relay.wait_for(
            lambda: len(relay.events("drop-refused")) == 5 and bool(sink.messages), what="what was dropped"
        )
        # As after a crash between the 250 and the removal of the file.
        for name, content in kept.items():
            if b"RCPT TO:<c@d.example>" in content:
                (drop / "new" / name).write_bytes(content)
        relay.wait_for(lambda: len(relay.events("repeated")) == 1, what="the same file again")
        relay.wait_for(lambda: len(list((drop / "new").iterdir())) == 5, what="its removal")

        (taken,) = sink.messages
        assert (taken.mail_from, [*taken.recipients]) == ("app@b.example", ["c@d.example"])
        name = pwd.getpwuid(os.getuid()).pw_name
        assert f"(sendmail, user {os.getuid()}, {name});" in taken.body.decode()
        assert "dempotency" not in taken.body.decode()
        assert all(each.name.endswith(".refused") for each in (drop / "new").iterdir())
        assert "5 messages of sendmail(1) were rejected" in run(relay, "status").stdout


def test_users_of_the_machine_have_aliases(tmp_path: Path, sink: Sink) -> None:
    aliases = tmp_path / "aliases"
    aliases.write_text(
        "# of this machine\nroot: ops@d.example,\n  ann\nann: ann, bob@e.example\npipe: |/bin/x\n"
    )
    tables = {"sendmail": {"aliases": str(aliases)}}
    with RelayProcess(tmp_path, next_hop=f"{LOOPBACK}:{sink.port}", tables=tables) as relay:
        assert sendmail(relay.config, "root,x@y.example") == (OK, "")
        found = sink.until_recipients(4)
        assert found == sorted([f"ann@{domain_here()}", "bob@e.example", "ops@d.example", "x@y.example"])
        status, said = sendmail(relay.config, "pipe")
        assert status == CONFIG
        assert "only addresses are supported" in said


def test_smtp_on_standard_input_is_the_listener_s(tmp_path: Path) -> None:
    replies = []
    with RelayProcess(tmp_path, next_hop="127.0.0.1:1") as relay:
        process = subprocess.Popen(
            [str(PROGRAM), "sendmail", "-bs"],
            env={**os.environ, "ZONERELAY_CONFIG": str(relay.config)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            for command in ("", "EHLO x\r\n", "MAIL FROM:<a@b.example>\r\n", "QUIT\r\n"):
                process.stdin.write(command.encode())
                process.stdin.flush()
                while (line := process.stdout.readline())[3:4] == b"-":
                    pass
                replies.append(line[:3])
    assert (process.returncode, replies) == (OK, [b"220", b"250", b"250", b"221"])


def test_little_is_imported() -> None:
    code = (
        "import sys; before = set(sys.modules); import zonerelay.sendmail; print(*set(sys.modules) - before)"
    )
    line = [sys.executable, "-S", "-c", code]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=60, check=True, cwd=PROGRAM.parents[2]
    )
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert not packages & {"asyncio", "email", "ssl", "logging", "tomllib", "argparse", "pathlib", "msgspec"}
    ours = {name for name in done.stdout.split() if name.startswith("zonerelay.")}
    assert ours == {f"zonerelay.{name}" for name in ("sendmail", "model", "model.address_list")}


def test_the_configuration_has_the_paths_that_sendmail_has_without_one() -> None:
    assert (of_settings.DROP, of_settings.ALIASES) == (DROP, ALIASES)


def test_a_dropped_file_that_ends_in_half_a_line_delays_nobody(tmp_path: Path, sink: Sink) -> None:
    """It once kept the listener waiting for the end of the data: 306 s in each pass, for everybody's mail."""
    drop = drop_directory(tmp_path / "drop")
    relay = RelayProcess(
        tmp_path, next_hop=f"{LOOPBACK}:{sink.port}", tables={"sendmail": {"drop": str(drop)}}
    )
    head = b"zonerelay-drop-1\nMAIL FROM:<a@b.example>\nRCPT TO:<ann@d.example>\n\n"
    endings = (
        b"Subject: x\n\nhalf a line",
        b"Subject: x\n\n.",
        b"Subject: x",
        b"\n",
        b"",
        b"x\r",
        b"a\n\nb\0",
    )
    for number, message in enumerate(endings):
        (drop / "new" / f"{number}").write_bytes(head + message)

    try:
        relay.start()
        began = time.monotonic()
        relay.wait_for(lambda: not any((drop / "new").iterdir()), what="all are taken", timeout=60)
        assert time.monotonic() - began < 60
        sink.until(len(endings), timeout=30)
        assert not relay.events("drop-delayed")
    finally:
        relay.kill()
