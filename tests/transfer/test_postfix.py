"""The queue of a Postfix that really ran."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.spools import Spool
from tests.support.ports import wait_until
from tests.support.postfix import PostfixInstance, PostfixSettings, PostfixTools
from tests.transfer.queues import hop, import_into, rows, submit
from zonerelay.model.clock import SystemClock
from zonerelay.model.envelope import BodyType, Notify, Ret
from zonerelay.transfer.others import reading
from zonerelay.transfer.stored import TransferError

BODY = b"Subject: x\r\nFrom: a@example.org\r\n\r\n.dot \xff\r\n" + b"x" * 5000 + b"\r\nend\r\n"


@pytest.fixture(scope="module")
def tools() -> PostfixTools:
    return PostfixTools()


@pytest.fixture
def postfix(tools: PostfixTools, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostfixInstance]:
    """It runs, and has a message that is deferred for two of three recipients."""
    directory = Path("/tmp") / f"postfix-{os.getpid()}"
    monkeypatch.setenv("PATH", f"{tools.sbin}:{os.environ['PATH']}")
    monkeypatch.setenv("LD_LIBRARY_PATH", tools.environment["LD_LIBRARY_PATH"])
    with hop() as port:
        instance = PostfixInstance(tools, directory, PostfixSettings(next_hop=f"[127.0.0.1]:{port}"))
        try:
            with instance:
                defer(instance)
                yield instance
        finally:
            subprocess.run(["rm", "-rf", str(directory)], check=True)


def defer(postfix: PostfixInstance) -> None:
    submit(postfix.smtp_port, BODY)
    deferred = postfix.queue / "deferred"
    assert wait_until(lambda: any(each.is_file() for each in deferred.rglob("*")), timeout=20)


async def test_a_queue_moves_in(postfix: PostfixInstance, tmp_path: Path) -> None:
    config = str(postfix.directory / "config")
    with pytest.raises(TransferError, match=f"running as process {postfix.pid}"):
        async with reading("postfix", config, 0.0):
            pass
    postfix.stop()
    (queued,) = [each for each in (postfix.queue / "deferred").rglob("*") if each.is_file()]
    due = queued.stat().st_mtime
    async with Spool(tmp_path / "spool", clock=SystemClock()) as spool:
        loaded = await import_into(spool.store, tmp_path, "postfix", config)
        assert (loaded.messages, loaded.deliveries, loaded.unusable) == (1, 2, 0)
        ((message, deliveries, body),) = await rows(spool.store)
        again = await import_into(spool.store, tmp_path, "postfix", config)
        assert (again.messages, again.already) == (0, 2)
    envelope = message.envelope
    assert (envelope.sender, envelope.ret, envelope.envid) == ("a@example.org", Ret.HDRS, "QQ+2B1")
    assert envelope.body is BodyType.EIGHT_BIT
    assert abs(envelope.created - SystemClock.now()) < 60
    assert body.endswith(BODY.partition(b"\r\n\r\n")[2])
    assert message.header("Subject") == "x"
    by_name = {each.recipient: each for each in deliveries}
    bad = by_name["bad@example.net"]  # type: ignore[index]
    assert (bad.notify, bad.orcpt) == (Notify.SUCCESS | Notify.FAILURE, "rfc822;orig+2Bx@example.net")
    for each in deliveries:
        assert (each.attempts, each.next_attempt, each.zone) == (1, due, "default")
        assert each.last is not None
        assert str(each.last.reply).startswith("450 4.2.1 <x> mailbox busy")


async def test_mail_on_hold_is_held_and_maildrop_is_named(postfix: PostfixInstance, tmp_path: Path) -> None:
    postfix.stop()
    (queued,) = [each for each in (postfix.queue / "deferred").rglob("*") if each.is_file()]
    queued.rename(postfix.queue / "hold" / queued.name)  # as postsuper -h does
    (postfix.queue / "maildrop" / "ABCDEF").write_bytes(b"")
    async with Spool(tmp_path / "spool") as spool:
        loaded = await import_into(spool.store, tmp_path, "postfix", str(postfix.directory / "config"))
        assert (loaded.deliveries, loaded.unusable) == (2, 1)
        ((_, deliveries, _),) = await rows(spool.store)
        assert all(each.held for each in deliveries)
