"""`zonerelay log` about a real relay: what became of mail, what is not known; and mail never waits for it."""

import os
import pty
import re
import smtplib
import sqlite3
import subprocess
import sys
from pathlib import Path

from tests.acceptance.test_full_disk import mounted, occupy
from tests.support.command import PROGRAM, Shell
from tests.support.credentials import file_of, user
from tests.support.ports import LOOPBACK, wait_until
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from tests.support.toml import Table
from zonerelay.cli.main import main

MESSAGE = b"From: app@example.org\r\nMessage-ID: <Order.42@shop.example>\r\nSubject: order\r\n\r\nhello\r\n"
HEADER_ID = "<order.42@shop.example>"
RETRY: dict[str, Table] = {
    "retry": {"schedule": ["1s"], "jitter": 0, "suspend_min": "1s", "suspend_max": "2s"}
}


def relay_to(sink: Sink, directory: Path, **tables: Table) -> RelayProcess:
    return RelayProcess(directory, next_hop=f"{LOOPBACK}:{sink.port}", tables={**RETRY, **tables})


def test_mail_is_found_by_all_that_is_known_of_it(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    with relay_to(sink, tmp_path) as relay:
        relay.send("bob@example.com", "greylist@example.com", "reject-550@example.com", message=MESSAGE)
        report = zonerelay.found(relay, "--recipient", "app@example.org", "--outcome", "delivered")
        zonerelay.found(relay, "greylist@example.com", "--outcome", "delivered")
        relay.wait_until_empty()

        for words in (
            ("bob@example.com",),
            ("BOB@Example.com",),
            ("--recipient", "bob@example.com"),
            (HEADER_ID, "--recipient", "bob@example.com"),
            ("--sender", "app@example.org", "--recipient", "bob@example.com"),
            ("--client", LOOPBACK, "--recipient", "bob@example.com"),
            ("--destination", "127.0.0.1*", "--recipient", "bob@example.com"),
            ("--zone", "default", "--recipient", "bob@example.com", "--since", "1h"),
        ):
            (found,) = zonerelay.found(relay, *words)
            assert (found["outcome"], found["attempts"]) == ("delivered", 1), words
        files = [each.read_bytes() for each in (relay.spool.parent / "history").iterdir()]
        assert not any(b"bob@" in each for each in files), "addresses are stored as pseudonyms"
        (bounced,) = zonerelay.found(relay, "--outcome", "bounced")
        assert bounced["reply"].startswith("550")
        (late,) = zonerelay.found(relay, "--reply", "4.7.1")
        assert (late["outcome"], late["attempts"]) == ("delivered", 2)
        assert len(zonerelay.found(relay, "@example.com", count=3)) == 3
        assert len(zonerelay.found(relay, bounced["message_id"], count=3)) == 3
        nothing = zonerelay(relay, "log", "find", "carol@example.com")
        assert (nothing.status, nothing.out) == (1, "")
        assert "No matching event in the history of worker 0" in nothing.err
        assert "no events of that time" in nothing.err

        line = zonerelay(relay, "log", "show", bounced["message_id"])
        events = sorted(each.split("  ")[1] for each in line.out.splitlines()[1:])
        assert events == ["accepted", "bounced", "deferred", "delivered", "delivered", "report"]
        assert f"failed: message {report[0]['message_id']}" in line.out
        # It has left the queue: the trace is the same.
        trace = zonerelay(relay, "queue", "trace", bounced["message_id"])
        assert (trace.status, trace.out) == (0, line.out)
        accepted = relay.events("accepted")[0]
        assert accepted["recipients"] == 3
        assert len(accepted["to"].split()) == 3
        assert accepted["to"].split()[0] == zonerelay(relay, "resolve", "bob@example.com").out.strip()
        assert zonerelay(relay, "log", "find", accepted["message-id"], "--json").of("found")


def test_the_trace_of_waiting_mail_has_all_attempts(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    with relay_to(sink, tmp_path) as relay:
        relay.send("defer-451@example.com")
        zonerelay.found(relay, "--outcome", "deferred")
        assert wait_until(lambda: len(relay.events("deferred")) >= 3, timeout=20)
        message_id = relay.events("accepted")[0]["id"]

        def told() -> bool:
            rows = zonerelay(relay, "queue", "trace", message_id, "--json").rows
            events = [row["event"] for row in rows]
            return events.count("deferred") >= 3 and events[-1] in ("next attempt", "ready", "active")

        assert wait_until(told, timeout=10)
        rows = zonerelay(relay, "queue", "trace", message_id, "--json").rows
        # The queue knows the address, so the time line has it in clear.
        assert {row["recipient"] for row in rows} == {"", "defer-451@example.com"}


def test_mail_has_addresses_while_the_relay_knows_them(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    with relay_to(sink, tmp_path) as relay:
        relay.send("defer-451@example.com", "bob@example.com")
        zonerelay.found(relay, "--outcome", "deferred")
        zonerelay.found(relay, "--outcome", "delivered")
        message_id = relay.events("accepted")[0]["id"]
        rows = zonerelay(relay, "log", "find", "--json").of("found")
        assert {row["sender"] for row in rows} == {"app@example.org"}
        assert {row["recipient"] for row in rows} == {"defer-451@example.com", "bob@example.com"}
        assert "bob@example.com" in zonerelay(relay, "log", "find", message_id).out
        assert "bob@example.com" in zonerelay(relay, "log", "show", message_id).out
        traced = zonerelay(relay, "queue", "trace", message_id, "--json").rows
        assert {row["recipient"] for row in traced} >= {"defer-451@example.com", "bob@example.com"}
        assert any("app@example.org" in row["text"] for row in traced)
        assert "app@example.org" in zonerelay(relay, "report").out

        def dropped() -> bool:
            """Drop again what was left because it was being tried."""
            zonerelay(relay, "queue", "drop", "--all", "--yes")
            return bool(zonerelay(relay, "log", "find", "--outcome", "dropped", "--json").of("found"))

        assert wait_until(dropped, timeout=30)
        relay.wait_until_empty()
        rows = zonerelay(relay, "log", "find", "--json").of("found")
        assert {row["recipient"] for row in rows} == {"defer-451@example.com", "bob@example.com"}
        traced = zonerelay(relay, "queue", "trace", message_id, "--json").rows
        assert {row["recipient"] for row in traced} >= {"defer-451@example.com", "bob@example.com"}
        assert "app@example.org" in zonerelay(relay, "report").out
        # They were in memory alone.
        assert relay.terminate() == 0
        relay.start()
        assert "@example" not in zonerelay(relay, "log", "find").out
        assert "@example" not in zonerelay(relay, "log", "show", message_id).out
        assert "@example" not in zonerelay(relay, "report").out


def test_names_of_users_are_shown_always(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text(file_of(user("ann@example.org", "secret")))
    listener: Table = {"auth": "required", "unsafe": ["cleartext-auth"]}
    tables: dict[str, Table] = {"auth": {"credentials": str(credentials)}}
    with RelayProcess(
        tmp_path, next_hop=f"{LOOPBACK}:{sink.port}", listener=listener, tables=tables
    ) as relay:
        relay.send("bob@example.com", log_in=("ann@example.org", "secret"))
        (found,) = zonerelay.found(relay, "--outcome", "delivered")
        assert relay.terminate() == 0
        (found,) = zonerelay.found(relay, "--outcome", "delivered")
        assert found["user"] == "ann@example.org"
        assert "@example" not in found["sender"]
        assert "as user ann@example.org" in zonerelay(relay, "log", "show", found["message_id"]).out


def test_a_refused_recipient_is_found_by_what_is_known(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    rule: Table = {"recipient": ["no@example.com"], "action": "refuse"}
    relay = RelayProcess(
        tmp_path, next_hop=f"{LOOPBACK}:{sink.port}", tables={"access": [rule]}
    )  # fmt: skip
    with relay:
        with smtplib.SMTP(LOOPBACK, relay.smtp_port, timeout=30) as client:
            client.ehlo()
            client.mail("app@example.org")
            assert client.rcpt("no@example.com")[0] == 550
        for words in (
            ("no@example.com",),
            ("--sender", "app@example.org"),
            ("--client", LOOPBACK),
            ("--outcome", "refused"),
            ("--reply", "550"),
        ):
            (found,) = zonerelay.found(relay, *words)
            assert (found["outcome"], found["reply"][:3]) == ("refused", "550"), words


def test_the_files_of_all_workers_are_searched(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    relay = RelayProcess(tmp_path, next_hop=f"{LOOPBACK}:{sink.port}", top={"workers": 2})
    with relay:
        home = relay.spool.parent / "history"
        sent = 0

        def both() -> bool:
            nonlocal sent
            for _ in range(10):
                relay.send("bob@example.com")
                sent += 1
            return (home / "00.db").exists() and (home / "01.db").exists()

        assert wait_until(both, timeout=30)
        found = zonerelay.found(relay, "bob@example.com", "--limit", "1000", count=sent)
        assert len(found) == sent
        assert {each["message_id"][-2:] for each in found} == {"00", "01"}
        assert [each["at"] for each in found] == sorted(each["at"] for each in found)
        assert len(zonerelay.found(relay, "bob@example.com", "--limit", "5")) == 5
        assert relay.terminate() == 0
        (home / "01.db").write_bytes(b"no database at all, but somebody's letter " * 100)
        ran = zonerelay(relay, "log", "find", "carol@example.com")
        assert ran.status == 1
        assert "worker 1: 01.db cannot be read: file is not a database" in ran.err


def test_kill_9_costs_a_second_at_most_and_is_admitted(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    with relay_to(sink, tmp_path) as relay:
        relay.send("bob@example.com")
        zonerelay.found(relay, "bob@example.com", "--outcome", "delivered")
        relay.restart()  # kills it
        relay.send("carol@example.com")
        zonerelay.found(relay, "carol@example.com", "--outcome", "delivered")
        assert zonerelay.found(relay, "bob@example.com", "--outcome", "delivered")
        nothing = zonerelay(relay, "log", "find", "dave@example.com")
        assert "ended without a shutdown" in nothing.err
        assert relay.terminate() == 0
        relay.start()
        relay.send("erin@example.com")
        zonerelay.found(relay, "erin@example.com", "--outcome", "delivered")
        gaps = zonerelay(relay, "log", "find", "--json", "dave@example.com").of("gap")
        assert sum("ended without a shutdown" in gap["why"] for gap in gaps) == 1, (
            "a relay that stops leaves no gap"
        )


def test_a_damaged_file_is_set_aside_and_mail_goes_on(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    with relay_to(sink, tmp_path) as relay:
        relay.send("bob@example.com")
        zonerelay.found(relay, "bob@example.com")
        relay.kill()
        file = relay.spool.parent / "history" / "00.db"
        for end in ("-wal", "-shm"):
            Path(f"{file}{end}").unlink(missing_ok=True)
        file.write_bytes(os.urandom(20_000))
        relay.start()
        relay.send("carol@example.com")
        zonerelay.found(relay, "carol@example.com", "--outcome", "delivered")
        assert file.with_name("00.db.aside").stat().st_size == 20_000
        assert "cannot be read" in relay.events("history-broken")[0]["problem"]
        nothing = zonerelay(relay, "log", "find", "bob@example.com")
        assert nothing.status == 1
        assert "renamed to 00.db.aside" in nothing.err


def test_a_full_disk_stops_the_history_and_no_mail(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    relay = relay_to(sink, tmp_path / "relay")
    with mounted(relay.spool.parent / "history", 4 * 1024 * 1024) as small, relay:
        relay.send("bob@example.com")
        zonerelay.found(relay, "bob@example.com", "--outcome", "delivered")
        occupy(small / "neighbour")
        for _ in range(300):
            relay.send("during@example.com")
        assert wait_until(lambda: bool(relay.events("history-broken")), timeout=30)
        assert "history: " in zonerelay(relay, "status").out
        relay.wait_until_empty()
        assert len(relay.events("delivered")) == 301
        (small / "neighbour").unlink()
        assert wait_until(lambda: bool(relay.events("history-restored")), timeout=30)
        # What came meanwhile has waited in memory.
        found = zonerelay.found(relay, "during@example.com", "--limit", "1000", count=300)
        assert {each["outcome"] for each in found} == {"delivered"}
        assert "history: " not in zonerelay(relay, "status").out


def test_a_disk_that_stands_still_holds_no_mail_up(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    """The file is locked by another process: the writing thread waits, as in a write that does not return."""
    with relay_to(sink, tmp_path) as relay:
        relay.send("bob@example.com")
        zonerelay.found(relay, "bob@example.com", "--outcome", "delivered")
        other = sqlite3.connect(relay.spool.parent / "history" / "00.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for _ in range(50):
            relay.send("during@example.com")
        relay.wait_until_empty()
        assert len(relay.events("delivered")) == 51
        assert zonerelay(relay, "log", "find", "during@example.com").status == 1
        other.execute("ROLLBACK")
        other.close()
        assert len(zonerelay.found(relay, "during@example.com", count=50)) == 50


def test_what_is_forgotten_is_nowhere_in_the_files(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    with relay_to(sink, tmp_path, history={"addresses": "clear"}) as relay:
        relay.send("bob@example.com", "carol@example.com")
        relay.send("reject-550@example.com", sender="bob@example.com")
        zonerelay.found(relay, "carol@example.com", "--outcome", "delivered")
        zonerelay.found(relay, "b*b@example.com", "--outcome", "delivered", count=2)
        relay.wait_until_empty()
        assert zonerelay(relay, "log", "forget", "<").status == 2
        assert zonerelay(relay, "log", "forget", "Bob@example.com").status == 0
        assert zonerelay(relay, "log", "find", "bob@example.com").status == 1
        (found,) = zonerelay.found(relay, "carol@example.com")
        assert found["sender"] == "app@example.org"
        assert relay.terminate() == 0
        for file in (relay.spool.parent / "history").iterdir():
            assert b"bob@example.com" not in file.read_bytes().lower()


def test_another_key_hides_what_is_older_and_it_is_said(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    with relay_to(sink, tmp_path) as relay:
        relay.send("bob@example.com")
        (found,) = zonerelay.found(relay, "bob@example.com", "--outcome", "delivered")
        assert relay.terminate() == 0
        (relay.spool.parent / "redact.key").unlink()
        relay.start()
        relay.send("carol@example.com")
        zonerelay.found(relay, "carol@example.com", "--outcome", "delivered")
        nothing = zonerelay(relay, "log", "find", "bob@example.com")
        assert nothing.status == 1
        assert "addresses were hashed with another key" in nothing.err
        assert zonerelay.found(relay, found["message_id"])
        wildcard = main_status(relay, "log", "find", "b*b@example.com")
        assert wildcard == 2


def main_status(relay: RelayProcess, *words: str) -> int:
    return main([*words, "--config", str(relay.config)])


def test_a_backup_has_the_history_a_restore_brings_it(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    with relay_to(sink, tmp_path / "one") as relay:
        relay.send("bob@example.com")
        zonerelay.found(relay, "bob@example.com", "--outcome", "delivered")
        assert zonerelay(relay, "spool", "backup", str(tmp_path / "backup")).status == 0
    other = relay_to(sink, tmp_path / "other")
    assert zonerelay(other, "spool", "restore", str(tmp_path / "backup")).status == 0
    assert zonerelay.found(other, "bob@example.com", "--outcome", "delivered")
    with other:
        other.send("carol@example.com")
        zonerelay.found(other, "carol@example.com", "--outcome", "delivered")


def test_switched_off_has_no_file_and_leaves_a_gap(tmp_path: Path, sink: Sink, zonerelay: Shell) -> None:
    off = relay_to(sink, tmp_path / "off", history={"enabled": False})
    with off:
        off.send("bob@example.com")
        off.wait_until_empty()
        nothing = zonerelay(off, "log", "find", "bob@example.com")
        assert "The history is disabled" in nothing.err
        assert off.terminate() == 0
    assert not (off.spool.parent / "history").exists()
    with relay_to(sink, tmp_path / "on") as relay:
        relay.send("bob@example.com")
        zonerelay.found(relay, "bob@example.com", "--outcome", "delivered")
        assert relay.terminate() == 0
        text = relay.config.read_text()
        relay.config.write_text(f"{text}\n[history]\nenabled = false\n")
        relay.start()
        relay.send("carol@example.com")
        relay.wait_until_empty()
        assert "was disabled, and still is" in zonerelay(relay, "log", "find", "carol@example.com").err
        assert relay.terminate() == 0
        relay.config.write_text(text)
        relay.start()
        relay.send("dave@example.com")
        zonerelay.found(relay, "dave@example.com", "--outcome", "delivered")
        ran = zonerelay(relay, "log", "find", "carol@example.com")
        assert "the history was disabled" in ran.err
        assert "still is" not in ran.err


def test_it_fits_a_terminal_and_no_text_of_a_stranger_moves_a_cursor(tmp_path: Path, sink: Sink) -> None:
    def story() -> str:
        with relay_to(sink, tmp_path) as relay:
            relay.send("bob@example.com", "reject-550@example.com")
            relay.wait_until_empty()
            assert relay.terminate() == 0
            ours, theirs = pty.openpty()
            environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "NO_COLOR": "1"}
            words = ["log", "find", "app@example.org", "--config", str(relay.config)]
            with subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *words], stdout=theirs, stderr=theirs, env=environment
            ) as process:
                assert process.wait(60) == 0
            os.close(theirs)
            return os.read(ours, 100_000).decode()

    shown = story()
    lines = re.sub(r"\x1b\[[\d;]*m|\r", "", shown).splitlines()
    assert len(lines) >= 3
    assert max(map(len, lines)) <= 80, shown
    assert any("delivered" in line for line in lines)
    assert any("bounced" in line and "550" in line for line in lines), shown
