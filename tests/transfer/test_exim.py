"""The spool of an Exim that really ran."""

from __future__ import annotations

import asyncio
import fcntl
import subprocess
from pathlib import Path

import pytest

from tests.store.spools import Spool
from tests.support.exim import EximSender
from tests.support.ports import wait_until
from tests.support.senders import Server
from tests.transfer.queues import hop, import_into, rows, submit
from zonerelay.model.clock import SystemClock
from zonerelay.model.envelope import Notify, Ret
from zonerelay.transfer.others import exim as reader
from zonerelay.transfer.others import reading
from zonerelay.transfer.stored import TransferError

BODY = b"Subject: x\r\nFrom: a@example.org\r\n\r\n.dot \xff\r\n" + b"x" * 300 + b"\r\nend\r\n"


@pytest.fixture
def spool_of_exim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It has one message, which is deferred for two of three recipients. Exim was refused, and has ended."""
    directory = tmp_path / "exim"
    for each in (directory, *list(directory.parents)[:4]):
        each.mkdir(exist_ok=True)
        each.chmod(0o755)
    exim = EximSender(directory)
    with hop() as port, exim.receiving(Server(port=port), options="dsn_advertise_hosts = *\n") as own:
        submit(own, BODY)
        log = directory / "log" / "main"
        assert wait_until(lambda: log.read_text().count(" == ") == 2, timeout=20), log.read_text()
        asyncio.run(refused(directory / "spool"))
    # Another test may run an Exim at this moment.
    monkeypatch.setattr(reader, "_PROGRAMS", (b"no-exim",))
    return directory / "spool"


async def refused(spool: Path) -> None:
    with pytest.raises(TransferError, match=r"Exim is running as process \d+"):
        async with reading("exim", str(spool), 0.0):
            pass


async def test_a_spool_moves_in(spool_of_exim: Path, tmp_path: Path) -> None:
    async with Spool(tmp_path / "spool", clock=SystemClock()) as spool:
        loaded = await import_into(spool.store, tmp_path, "exim", str(spool_of_exim))
        assert (loaded.messages, loaded.deliveries, loaded.unusable) == (1, 2, 0)
        ((message, deliveries, body),) = await rows(spool.store)
        again = await import_into(spool.store, tmp_path, "exim", str(spool_of_exim))
        assert (again.messages, again.already) == (0, 2)
    envelope = message.envelope
    assert (envelope.sender, envelope.ret, envelope.envid) == ("a@example.org", Ret.HDRS, "QQ+2B1")
    assert abs(envelope.created - SystemClock.now()) < 60
    assert (envelope.origin.client_address, envelope.origin.helo) == ("127.0.0.1", "client.example.org")
    assert body == BODY
    second, first = deliveries
    assert (first.recipient, second.recipient) == ("bad@example.net", "bad2@example.net")
    assert (first.notify, first.orcpt) == (Notify.SUCCESS | Notify.FAILURE, "rfc822;orig+2Bx@example.net")
    for each in deliveries:
        assert (each.attempts, each.next_attempt, each.held) == (1, 0.0, False)
        assert each.last is not None
        assert str(each.last.reply) == "450 4.2.1 <x> mailbox busy"
        assert abs(each.last.at - SystemClock.now()) < 60


async def test_the_journal_frozen_mail_and_mail_in_delivery(spool_of_exim: Path, tmp_path: Path) -> None:
    (head,) = (spool_of_exim / "input").glob("*-H")
    head.write_bytes(head.read_bytes().replace(b"-body_linecount", b"-frozen 1795576102\n-body_linecount"))
    journal = head.with_name(head.name.replace("-H", "-J"))
    journal.write_text("bad2@example.net\n")  # as a delivery that was killed leaves it
    data = head.with_name(head.name.replace("-H", "-D"))
    async with Spool(tmp_path / "spool") as spool:
        lock = (
            f"import fcntl; f = open({str(data)!r}, 'r+b'); fcntl.lockf(f, {fcntl.LOCK_EX});"
            "print(1, flush=True); input()"
        )
        with subprocess.Popen(
            ["python3", "-c", lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as delivering:
            assert delivering.stdout is not None
            delivering.stdout.readline()
            loaded = await import_into(spool.store, tmp_path, "exim", str(spool_of_exim))
            assert (loaded.messages, loaded.unusable) == (0, 1)
            delivering.kill()
        await import_into(spool.store, tmp_path, "exim", str(spool_of_exim))
        ((_, (only,), _),) = await rows(spool.store)
        assert (only.recipient, only.held) == ("bad@example.net", True)


def test_a_tree_of_finished_recipients_is_read_whole() -> None:
    raw = (
        b"1xW3Ms-0007Ih-0w-H\nmail 8 8\n<>\n1795576102 0\n"
        b"YY c@x.org\nNY a@x.org\nNN b@x.org\nNN d@x.org\n"
        b'3\na@x.org\n"e f"@x.org er@x.org 8,-1#1\n"g h"@x.org  0,16 er@x.org 8,-1#3\n\n'
        b"044* Received: ; Wed, 25 Nov 2026 03:08:22 +0000\n011  Subject: x\n"
    )
    head = reader.parse_head(raw)
    assert head.finished == {"a@x.org", "b@x.org", "c@x.org", "d@x.org"}
    assert [each.address for each in head.recipients] == ["a@x.org", '"e f"@x.org', '"g h"@x.org']
    assert head.recipients[2].notify is Notify.DELAY
    assert head.header == b"Subject: x\n"
    for cut in range(len(raw) - 1):
        if not raw[:cut].endswith(b"\n011  Subject: x") and cut not in (
            raw.index(b"044*"),
            raw.index(b"011 "),
        ):
            with pytest.raises(ValueError):
                reader.parse_head(raw[:cut])
