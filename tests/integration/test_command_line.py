"""The command line against a control server: what it prints, what it refuses, how it exits."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.command import PROGRAM, Ran, ran, typed
from tests.support.fake_relay import FakeRelay, delivery
from zonerelay.cli import relay
from zonerelay.cli.terminal import output
from zonerelay.cli.terminal.text import when
from zonerelay.config.settings import SpoolSettings
from zonerelay.operations.requests import Explain, Status


@dataclass
class Shell:
    relay: FakeRelay
    capture: pytest.CaptureFixture[str]

    async def run(self, *words: str) -> Ran:
        """In this process: standard input is no terminal here, as in a script."""
        return await asyncio.to_thread(ran, self.capture, *words, "--config", str(self.relay.config))

    async def typing(self, text: str, *words: str) -> Ran:
        return await asyncio.to_thread(typed, [text], *words, "--config", str(self.relay.config))


@pytest.fixture
async def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Shell]:
    relay = FakeRelay(tmp_path)
    relay.rows = [
        delivery(1, state="deferred", attempts=3, reply="451 4.2.0 later\x1b[2J", next_attempt=4e9),
        delivery(2, sender="", recipient="bob@example.net", domain="example.net"),
        delivery(3, state="held"),
    ]
    await relay.start()
    yield Shell(relay, capsys)
    await asyncio.sleep(0.01)  # Python 3.11 leaks a connection that is accepted while its server closes
    await relay.server.close()


ONE, GONE = f"{1:016x}", "f" * 16
SAID: list[tuple[str, int, list[str], list[str]]] = [
    # words, status, on standard output, on standard error
    ("queue list --domain nowhere.example", 0, [], ["No delivery matches"]),
    (f"queue show {GONE}", 1, [], [f"zonerelay: message {GONE} is not in the queue\n"]),
    (f"queue trace {ONE}", 0, ["accepted", "from 192.0.2.1"], []),
    (f"queue drop {GONE}", 1, ["0 deliveries"], ["The message is not in the queue"]),
    ("queue drop --domain example.com", 2, [], ["--yes"]),
    ("queue drop --yes", 2, [], ["--all"]),
    ("queue bounce --domain example.com --dry-run", 0, ["2 deliveries, which could not be restored"], []),
    ("status", 0, ["the disk is full", "12,345", "421 4.4.1 no answer", "2 more destinations"], []),
    ("status", 0, ["waits for a rate limit: in", "the last of"], []),
    (
        "explain alice@example.com --from app@example.org",
        0,
        ["recipient_domain matches example.com", "mx.example.com port 25", "192.0.2.9 from 192.0.2.1"],
        [],
    ),
    ("queue list --limit 2", 0, ["deferred ×3"], ["are shown"]),
    ("resolve a*@example.org", 2, [], ["cannot be searched by parts"]),
    ("resolve u-aaaa@d-bbbb", 0, ["alice@example.com"], []),
    ("resolve u-zzzz@d-bbbb", 1, [], []),
]


@pytest.mark.parametrize(("words", "status", "out", "err"), SAID, ids=[each[0] for each in SAID])
async def test_a_command_says_what_it_found_and_changes_nothing(
    shell: Shell, words: str, status: int, out: list[str], err: list[str]
) -> None:
    ran = await shell.run(*words.split())
    assert ran.status == status
    assert [each for each in out if each not in ran.out] == []
    assert [each for each in err if each not in ran.err] == []
    assert bool(ran.out) is bool(out)
    assert all(change.message_ids == (GONE,) for change in shell.relay.changes)
    if status == 2:
        assert shell.relay.requests == []


async def test_list_prints_a_line_per_delivery(shell: Shell) -> None:
    ran = await shell.run("queue", "list")
    assert ran.status == 0
    head, *rows = ran.out.splitlines()
    assert head.split() == ["ID", "AGE", "STATE", "NEXT", "ZONE", "FROM", "TO", "LAST", "REPLY"]
    assert len(rows) == 3
    assert "deferred ×3" in rows[0]
    assert "<>" in rows[1]
    assert "user3@example.com" in rows[2]


async def test_a_strangers_text_cannot_move_the_cursor(shell: Shell) -> None:
    for words in (("queue", "list"), ("queue", "show", f"{1:016x}")):
        ran = await shell.run(*words)
        assert "\x1b" not in ran.out
        assert "later␛[2J" in ran.out


HIDDEN = "x\x9b2J\u202ey\x7f\u2028\u200b\U000e0041\x85z"


@pytest.mark.parametrize("json_too", [False, True])
async def test_nothing_that_is_printed_can_be_no_text(shell: Shell, json_too: bool) -> None:
    """C0 and C1 controls, and characters that turn writing around, hide it or end lines; JSON stays JSON."""
    bad = delivery(7, state="deferred", attempts=1, reply=f"451 4.2.0 {HIDDEN}", next_attempt=4e9)
    shell.relay.rows.append(bad)
    for words in (("queue", "list"), ("queue", "show", f"{7:016x}")):
        ran = await shell.run(*words, *(["--json"] if json_too else []))
        assert all(line.isprintable() for line in (ran.out + ran.err).split("\n"))
        if json_too and words[1] == "list":
            assert json.loads(ran.out.splitlines()[-1])["reply"] == f"451 4.2.0 {HIDDEN}"
        elif json_too:
            assert any(HIDDEN in text for text in _texts(json.loads(ran.out)))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def test_whatever_a_command_prints_goes_through_the_same_filter(capsys: pytest.CaptureFixture[str]) -> None:
    for console in (output.console(), output.chatter()):
        console.print(f"a {HIDDEN}")
        console.print(output.facts([("name", HIDDEN)]))
        console.print(output.table([{"one": HIDDEN}]))
    printed = capsys.readouterr()
    for text in printed:
        assert text.count("2J") == 3
        assert all(line.isprintable() for line in text.split("\n"))


async def test_list_json_is_one_object_per_line(shell: Shell) -> None:
    ran = await shell.run("queue", "list", "--json", "--domain", "example.com")
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert [row["recipient"] for row in rows] == ["user1@example.com", "user3@example.com"]
    assert rows[0]["kind"] == "delivery"
    assert rows[0]["reply"] == "451 4.2.0 later\x1b[2J"
    assert ran.err == ""


async def test_show_prints_the_message_and_its_deliveries(shell: Shell) -> None:
    ran = await shell.run("queue", "show", f"{1:016x}")
    assert ran.status == 0
    facts = dict(line.split(maxsplit=1) for line in ran.out.splitlines() if line)
    assert facts["from"].strip() == "<>"
    assert facts["size"].strip() == "4.0 KB, 8BITMIME"
    assert facts["client"].strip() == "192.0.2.1 (app.example.org)"
    assert facts["recipients"].strip() == "2 accepted, 1 still in the queue"
    assert facts["attempts"].strip() == "3"


async def test_list_and_show_say_until_when_a_sender_holds_mail_back(shell: Shell) -> None:
    release = 4e9
    shell.relay.rows = [
        delivery(1, state="deferred", created=release, next_attempt=release),
        delivery(2, state="ready", created=release),
        delivery(3, state="deferred", created=release, next_attempt=release, reply="451 sent too early"),
    ]
    words = f"held by its sender until {when(release)}"
    listed = (await shell.run("queue", "list")).out.splitlines()
    assert words in listed[1]
    assert "0s" in listed[1]
    assert "held by its sender" not in listed[2]
    assert "451 sent too early" in listed[3]
    shown = (await shell.run("queue", "show", f"{1:016x}")).out
    facts = dict(line.split(maxsplit=1) for line in shown.splitlines() if line)
    assert facts["release"].strip() == words


async def test_show_json_is_one_document(shell: Shell) -> None:
    ran = await shell.run("queue", "show", f"{1:016x}", "--json")
    shown = json.loads(ran.out)
    assert shown["deliveries"][0]["attempts"] == 3
    assert shown["headers"] == [["Subject", "hello \x1b[31mred"]]


async def test_named_messages_are_changed_without_asking(shell: Shell) -> None:
    ran = await shell.run("queue", "hold", f"{1:016x}", f"{2:016x}")
    assert ran.status == 0
    assert "2 deliveries held." in ran.out
    (change,) = shell.relay.changes
    assert change.message_ids == (f"{1:016x}", f"{2:016x}")


async def test_a_bulk_verb_with_yes_is_done(shell: Shell) -> None:
    ran = await shell.run("queue", "drop", "--domain", "example.com", "--yes", "--json")
    assert ran.status == 0
    assert (
        json.loads(ran.out).items()
        >= {"kind": "changed", "action": "drop", "matched": 2, "changed": 2, "busy": 0}.items()
    )


async def test_all_is_everything(shell: Shell) -> None:
    ran = await shell.run("queue", "retry", "--all", "--yes")
    assert ran.status == 0
    assert "3 deliveries will be retried now." in ran.out
    assert shell.relay.changes[0].everything


async def test_deliveries_under_way_are_reported_and_fail(shell: Shell) -> None:
    shell.relay.busy = 1
    ran = await shell.run("queue", "drop", "--domain", "example.com", "--yes")
    assert ran.status == 1
    assert "1 delivery dropped." in ran.out
    assert "1 delivery being attempted" in ran.err


async def test_a_reason_travels_with_a_bounce(shell: Shell) -> None:
    await shell.run("queue", "bounce", f"{1:016x}", "--reason", "domain is gone")
    assert shell.relay.changes[0].reason == "domain is gone"


async def test_on_a_terminal_a_bulk_verb_shows_and_asks(shell: Shell) -> None:
    ran = await shell.typing("y", "queue", "hold", "--domain", "example.com")
    assert ran.status == 0
    assert "user1@example.com" in ran.err
    assert "Hold 2 deliveries? [y/N]" in ran.err
    assert "2 deliveries held." in ran.out


@pytest.mark.parametrize("answer", ["", "n", "\udcfc"])
async def test_anything_but_yes_changes_nothing(shell: Shell, answer: str) -> None:
    ran = await shell.typing(answer, "queue", "drop", "--all")
    assert ran.status == 1
    assert "Nothing was changed." in ran.err
    assert shell.relay.changes == []


async def test_status_says_what_waits_beyond_a_sample_and_how_the_relay_is(shell: Shell) -> None:
    ran = await shell.run("status")
    assert "3.0 GB free" in ran.out
    assert "53: reachable" in ran.out
    assert "a reload was rejected" in ran.out
    assert "the file was changed" in ran.out
    row = next(line.split() for line in ran.out.splitlines() if line.startswith("slow.example"))
    assert row[:8] == ["slow.example", "default", "0", "0/m", "3", "21k", "<50", "2h1m"]
    assert "idle.example" not in ran.out
    assert "idle.example" in (await shell.run("status", "--all")).out


async def test_a_watch_is_drawn_again_until_q(shell: Shell) -> None:
    assert (await shell.run("status", "--watch")).status == 2
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    watching = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, "status", "--watch", "--config", str(shell.relay.config)),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    async with asyncio.timeout(30):
        while sum(isinstance(each, Status) for each in shell.relay.requests) < 2:
            seen += await asyncio.to_thread(os.read, ours, 65536)
        os.write(ours, b"xq")
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while piece := await asyncio.to_thread(os.read, ours, 65536):
                seen += piece
        assert await watching.wait() == 0
    os.close(ours)
    assert b"slow.example" in seen
    assert b"\x1b[?1049h" in seen
    assert seen.rstrip().endswith((b"\x1b[?1049l", b"\x1b[?25h"))


async def test_explain_says_what_each_route_says(shell: Shell) -> None:
    ran = await shell.run("explain", "alice@example.com")
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert "routes 11 more that do not match (--json lists all)" in lines
    assert "route 12 no, user, size (to bulk)" in lines
    assert "route 11 no, user, size (to bulk)" not in lines
    assert "route 31 yes, recipient_domain matches example.com" in lines


async def test_explain_passes_on_what_is_known_of_the_mail(shell: Shell) -> None:
    fingerprint = ":".join(["AB"] * 32)
    words = ("--user", "app", "--listener", "127.0.0.1:25", "--client", "2001:DB8::1", "--size", "12 MB")
    fields = ("--header", "X-Stream: news: 1", "--header", "List-Id:", "--certificate", fingerprint)
    assert (await shell.run("explain", "alice@example.com", *words, *fields)).status == 0
    assert shell.relay.requests[-1] == Explain(
        address="alice@example.com",
        user="app",
        listener="127.0.0.1:25",
        client="2001:db8::1",
        certificate="ab" * 32,
        size=12 << 20,
        headers=(("X-Stream", "news: 1"), ("List-Id", "")),
    )
    await shell.run("explain", "alice@example.com", "--size", "700")
    assert shell.relay.requests[-1] == Explain(address="alice@example.com", size=700)


async def test_explain_asks_which_mail(shell: Shell) -> None:
    ran = await shell.run("explain", "--from", "app@example.org")
    assert (ran.status, ran.err) == (
        2,
        "zonerelay: which mail? Specify the address of a recipient, or a queued message with --id\n",
    )


async def test_explain_asks_the_configuration_when_no_relay_runs(shell: Shell) -> None:
    await shell.relay.server.close()
    with shell.relay.config.open("a") as config:
        config.write(
            '[[listener]]\naddress = "127.0.0.1:25"\n[[zone]]\n'
            '[[zone]]\nname = "bulk"\nnext_hop = "127.0.0.1:1"\nallow_private_addresses = true\n'
            '[[route]]\nzone = "bulk"\nlistener = ["127.0.0.1:25"]\nsender = ["app@*"]\n'
        )
    words = ("explain", "a@example.com", "--from", "app@x.example", "--listener", "127.0.0.1:25", "--json")
    explained = json.loads((await shell.run(*words)).out)
    assert (explained["relay_running"], explained["zone"], explained["rule"]) == (False, "bulk", 1)
    assert explained["routes"] == [{"rule": 1, "zone": "bulk", "matches": True, "unmatched": []}]
    assert explained["hosts"][0]["addresses"] == [
        {"address": "127.0.0.1", "source": "127.0.0.1", "problem": "", "learned": []}
    ]
    ran = await shell.run("explain", "a@example.com", "--listener", "127.0.0.1:26")
    assert (ran.status, "did you mean 127.0.0.1:25?" in ran.err) == (1, True)


async def test_a_route_that_cannot_be_used_is_said_in_words_when_no_relay_runs(shell: Shell) -> None:
    await shell.relay.server.close()
    with shell.relay.config.open("a") as config:
        config.write('[[route]]\nsender = ["a@-x-"]\n')
    ran = await shell.run("explain", "a@example.com")
    assert ran.status == 2
    assert 'route[0]: "-x-" cannot be matched: not a domain name' in ran.err
    assert "Traceback" not in ran.err


async def test_no_relay_is_said_in_words(shell: Shell) -> None:
    await shell.relay.server.close()
    ran = await shell.run("status")
    assert ran.status == 1
    assert "`zonerelay serve` is running" in ran.err
    assert "Traceback" not in ran.err


async def test_a_transcript_that_does_not_begin_leaves_no_file(shell: Shell) -> None:
    await shell.relay.server.close()
    file = shell.relay.directory / "transcript"
    for _ in range(2):
        ran = await shell.run("transcript", "--client", "192.0.2.1", "--out", str(file))
        assert (ran.status, file.exists()) == (1, False)
        assert "no relay is listening" in ran.err


async def test_a_wrong_config_of_no_relay_is_status_2(shell: Shell) -> None:
    shell.relay.config.write_text("[spol]\n")
    ran = await shell.run("queue", "list")
    assert ran.status == 2
    assert "spol: unknown key; did you mean spool?" in ran.err


@pytest.mark.parametrize(
    "fault",
    [
        "\n[[listener]]\ntls = 'ssl'\n[retry]\nbackof = 5\n",
        "\n[spol]\n",
        "\nthis is no TOML\n",
        '\n[[listener]]\naddress = "127.0.0.1:25\n',
        "\n[retry\nmax_age = 5d\n",
        "\n# \udce9\n",
        "\n[[[[",
        "\n[admin]\n",
    ],
    ids=range(8),
)
async def test_a_config_that_is_wrong_still_says_where_the_relay_is(shell: Shell, fault: str) -> None:
    with shell.relay.config.open("ab") as file:
        file.write(fault.encode("utf-8", "surrogateescape"))
    for words in (("status",), ("queue", "list"), ("status", "--json")):
        ran = await shell.run(*words)
        assert ran.status == 0, ran.err
        assert ran.err.count("zonerelay: warning: ") == 1
        assert "zonerelay check-config" in ran.err
        assert "Traceback" not in ran.err
    ran = await shell.run("queue", "show", "f" * 16)
    assert ran.status == 1  # its own


def test_a_process_of_another_user_is_not_taken_for_the_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, path = tmp_path / "relay.toml", tmp_path / "control.sock"
    listens = "import socket, sys; s = socket.socket(1); s.bind(sys.argv[1]); s.listen(); print(); input()"
    words = [sys.executable, "-c", listens, str(path), "serve", "--config", str(config)]
    monkeypatch.setattr(relay, "_is_control", lambda _: True)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert relay.control_socket_of(config) == path
        monkeypatch.setattr(relay, "_users_of", lambda _: {0, 4711})
        assert relay.control_socket_of(config) is None
        process.kill()


async def test_the_socket_can_be_named_whatever_the_config_is(shell: Shell) -> None:
    socket = shell.relay.directory / "control.sock"
    shell.relay.config.write_bytes(b"\xff[")
    assert (await shell.run("status")).status == 2
    ran = await shell.run("status", "--socket", str(socket))
    assert (ran.status, ran.err) == (0, "")
    shell.relay.config.unlink()
    assert (await shell.run("queue", "list", "--socket", str(socket))).status == 0
    ran = await shell.run("status")
    assert ran.status == 2  # no other relay of this machine is asked
    assert "cannot be read" in ran.err


async def test_a_closed_pipe_ends_quietly(shell: Shell) -> None:
    shell.relay.rows = [delivery(number) for number in range(20_000)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        "queue",
        "list",
        "--json",
        "--config",
        str(shell.relay.config),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert b"delivery" in await process.stdout.readline()
    process.stdout._transport.close()  # type: ignore[attr-defined]  # as `head` does; there is no public way
    assert await process.stderr.read() == b""
    assert await process.wait() == 141


@pytest.mark.parametrize(
    ("words", "streams", "status", "said"),
    [
        ("version", ">/dev/full", 1, "No space left on device"),
        ("version", ">&-", 0, ""),
        ("user add bob --file /none/users", "<&-", 2, "standard input is not a terminal"),
    ],
)
async def test_streams_that_take_nothing_are_no_traceback(
    words: str, streams: str, status: int, said: str
) -> None:
    command = ("sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-c", PROGRAM, *words.split())
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, err = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, said in err.decode(), err.count(b"\n")) == (status, True, bool(said))


@pytest.mark.parametrize("words", [("suspend", "--all", "--reason", "x"), ("resume", "--all")], ids=" ".join)
async def test_ctrl_c_leaves_no_half_of_a_suspension(shell: Shell, words: tuple[str, ...]) -> None:
    command = (sys.executable, "-c", PROGRAM, *words, "--config", str(shell.relay.config))
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    await asyncio.wait_for(shell.relay.asked.wait(), 30)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, err) == (130, b"")
    shell.relay.go_on.set()
    await asyncio.wait_for(shell.relay.done.wait(), 30)


async def test_a_file_that_a_relay_has_started_with_is_not_checked_again(shell: Shell) -> None:
    """The check takes half of the time of a command. A file that has changed since is checked."""
    look = (
        "import os, sys; from zonerelay.cli.main import main; main();"
        "os._exit('zonerelay.config.load' in sys.modules)"
    )
    socket = shell.relay.directory / "control.sock"
    for changed in (False, True):
        os.utime(socket, times=(0, 0) if changed else (4e9, 4e9))
        command = (sys.executable, "-c", look, "status", "--json", "--config", str(shell.relay.config))
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        assert await process.wait() == changed


def test_the_place_of_the_spool_is_the_default_of_its_option() -> None:
    assert Path(relay.DEFAULT_SPOOL) == SpoolSettings().path
