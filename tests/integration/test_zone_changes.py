"""What a zone changes on the way out, as the next host sees it; and that the spool keeps what came in."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.dkim import PEMS, entry, records, verified
from tests.support.relay import HOSTNAME, LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import (
    DkimMode,
    DkimSettings,
    Settings,
    SrsSettings,
    ZoneSettings,
)
from zonerelay.message.srs import Srs
from zonerelay.model.address import Mailbox
from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import CHUNK_SIZE

DOMAIN = "example.org"
ENTRIES = tuple(
    entry(domain, selector, file)
    for domain in (DOMAIN, HOSTNAME)
    for selector, file in (("rsa", "rsa.pem"), ("ed", "ed.pem"))
)
PUBLISHED = records(ENTRIES)
SECRET = "a secret of some length"
SRS_DOMAIN = "srs.example.net"
MESSAGE = b"From: app@example.org\r\nSubject: hello\r\nX-Mailer: app\r\n\r\nOne line.\r\n"


@dataclass(slots=True)
class Stage:
    running: Running
    sink: Sink
    chosen: Settings

    async def reload(self, **changes: object) -> None:
        self.chosen = replace(self.chosen, **changes)  # type: ignore[arg-type]  # as given
        await self.running.worker.reload(self.chosen)


def keys(directory: Path, *entries: DkimSettings) -> tuple[DkimSettings, ...]:
    """The entries with files that are there."""
    for each in entries or ENTRIES:
        (directory / each.key_file.name).write_bytes(PEMS[each.key_file.name]())
    return tuple(replace(each, key_file=directory / each.key_file.name) for each in entries or ENTRIES)


def srs_settings(directory: Path) -> SrsSettings:
    file = directory / "srs.secret"
    file.write_text(f"{SECRET}\n")
    return SrsSettings(domain=SRS_DOMAIN, secret=str(file))


@asynccontextmanager
async def staged(
    directory: Path,
    *,
    manners: Manners | None = None,
    sign: bool = False,
    signing: Sequence[DkimSettings] = (),
    srs: bool = False,
    **zone: object,
) -> AsyncIterator[Stage]:
    async with Sink(manners=manners) as sink:
        hop = f"{LOOPBACK}:{sink.port}"
        chosen = settings(directory, zone=ZoneSettings(next_hop=hop, srs=srs, **zone))  # type: ignore[arg-type]
        if sign or signing:
            chosen = replace(chosen, dkim=keys(directory, *signing))
        if srs:
            chosen = replace(chosen, srs=srs_settings(directory))
        async with relay_with(chosen) as running:
            yield Stage(running, sink, chosen)


async def stored(running: Running, message_id: object) -> bytes:
    pieces = running.worker.store.read_body(MessageId(str(message_id)))
    return b"".join([piece async for piece in pieces])


async def test_header_rules_are_seen_by_the_next_host_and_the_spool_keeps_what_came(tmp_path: Path) -> None:
    async with staged(
        tmp_path,
        manners=Manners(size=1_000_000),
        header_remove=("X-Mailer",),
        header_replace=("Subject: replaced", "X-Not-There: 1"),
        header_add=("X-Relayed: yes",),
    ) as stage:
        running = stage.running
        await running.send("app@example.org", ["a@example.com", "defer-451@example.com"], MESSAGE)
        [received] = await stage.sink.wait_for(1)
        header, _, body = received.body.partition(b"\r\n\r\n")
        header += b"\r\n"
        assert header.startswith(b"X-Relayed: yes\r\nReceived: ")
        assert b"\r\nSubject: replaced\r\n" in header
        assert b"X-Mailer" not in header
        assert b"X-Not-There" not in header
        assert body == b"One line.\r\n"
        assert f"SIZE={len(received.body)}" in received.parameters
        [accepted] = running.log.named("accepted")
        original = await stored(running, accepted["id"])
        assert MESSAGE.partition(b"\r\n")[0] in original
        assert b"Subject: hello\r\nX-Mailer: app\r\n" in original
        assert len(original) == accepted["size"]


async def test_lines_that_are_too_long_arrive_signed_in_a_form_that_hosts_take(tmp_path: Path) -> None:
    long = MESSAGE.replace(b"Subject:", b"References: " + b"<a@example.org> " * 100 + b"\r\nSubject:")
    async with staged(tmp_path, sign=True) as stage:
        await stage.running.send("app@example.org", ["a@example.com"], long + b"x" * 5000 + b"\r\n")
        [received] = await stage.sink.wait_for(1)
    assert max(map(len, received.body.split(b"\r\n"))) <= 998
    assert b"quoted-printable" in received.body
    assert verified(received.body, PUBLISHED) == [True, True]


LINES = b"A line of text, which is long enough to be one.\r\n"


def body_of(size: int) -> bytes:
    return (LINES * (size // len(LINES) + 1))[: max(size - 2, 0)] + b"\r\n"[:size]


BODIES = [
    (b"", "nothing"),
    (b"x", "one octet without a line end"),
    (body_of(65535), "a piece less one"),
    (body_of(65536), "a piece"),
    (body_of(65537), "a piece and one"),
    (body_of(3_000_000), "many pieces"),
    (b".\r\n..\r\n. dot\r\n\r\n.\r\n", "lines with dots"),
    ("grün\t  und \r\n blau  \r\n\r\n\r\n".encode(), "8-bit, blanks, empty lines at the end"),
]


@pytest.mark.parametrize("chunking", [True, False])
async def test_a_foreign_verifier_accepts_every_body(tmp_path: Path, chunking: bool) -> None:
    manners = Manners(chunking=chunking)
    async with staged(tmp_path, manners=manners, sign=True, header_add=("X-Relayed: yes",)) as stage:
        for number, (body, what) in enumerate(BODIES):
            await stage.running.send(f"app@{DOMAIN}", ["a@example.com"], MESSAGE[:-11] + body)
            received = (await stage.sink.wait_for(number + 1))[-1]
            text = received.body
            assert text.startswith(b"DKIM-Signature: "), what
            assert b"\r\nX-Relayed: yes\r\n" in text, what
            assert await asyncio.to_thread(verified, text, PUBLISHED) == [True, True], what
            assert bool(received.chunks) is (chunking and len(text) <= CHUNK_SIZE), what
            assert text.partition(b"\r\n\r\n")[2].startswith(body), what
        assert 'zonerelay_dkim_signatures_total{result="signed"} 8.0' in stage.running.metrics()


async def test_what_came_before_there_were_keys_is_hashed_and_signed(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        running = stage.running
        long = MESSAGE + LINES * 5000
        await running.send(f"app@{DOMAIN}", ["greylist@example.com"], long)
        await running.until_logged("deferred")
        await stage.reload(dkim=keys(tmp_path))
        [received] = await stage.sink.wait_for(1)
        assert verified(received.body, PUBLISHED) == [True, True]


def signature(body: bytes) -> bytes:
    return body.partition(b"Received:")[0]


async def test_a_retry_and_another_transaction_send_the_same_signature(tmp_path: Path) -> None:
    async with staged(tmp_path, sign=True, max_recipients_per_transaction=1) as stage:
        recipients = ["greylist@example.com", "a@example.com", "datacmd-451@example.com", "b@example.net"]
        await stage.running.send(f"app@{DOMAIN}", recipients, MESSAGE)
        messages = await stage.sink.wait_for(3)
        assert {verified(each.body, PUBLISHED)[0] for each in messages} == {True}
        assert len({signature(each.body) for each in messages}) == 1
        assert 'signatures_total{result="signed"} 1.0' in stage.running.metrics()


async def test_reports_of_our_own_are_signed(tmp_path: Path) -> None:
    async with staged(tmp_path, sign=True) as stage:
        await stage.running.send(f"app@{DOMAIN}", ["permerror@example.com"], MESSAGE)
        [report] = await stage.sink.wait_for(1)
        assert report.mail_from == ""
        assert f"d={HOSTNAME};".encode() in signature(report.body)
        assert verified(report.body, PUBLISHED)[:2] == [True, True]


async def test_where_a_signature_is_required_mail_waits_for_its_key(tmp_path: Path) -> None:
    async with staged(tmp_path, sign=True, dkim=DkimMode.REQUIRED) as stage:
        running = stage.running
        theirs = b"From: x@other.example\r\n\r\nx\r\n"
        for count in (1, 2):
            await running.send("x@other.example", ["a@example.com"], theirs)
            [deferred, *_] = await running.until_logged("deferred", count)
        assert deferred["reply"] == (
            "451 4.3.5 zone default requires a DKIM signature: no key for other.example"
        )
        assert deferred["host"] == ""
        [missing] = running.log.named("dkim-missing")
        assert (missing["level"], missing["zone"]) == ("error", "default")
        assert stage.sink.connections == 0
        other = replace(stage.chosen.dkim[0], domain="other.example")
        await stage.reload(dkim=(*stage.chosen.dkim, other))
        await running.send("x@other.example", ["a@example.com"], theirs)
        [received] = await stage.sink.wait_for(1)
        assert verified(received.body, records((entry("other.example", "rsa"),))) == [True]


async def test_rules_and_keys_change_on_reload_and_bad_ones_do_not(tmp_path: Path) -> None:
    async with staged(tmp_path, sign=True) as stage:
        running = stage.running
        [zone] = stage.chosen.zone
        await stage.reload(zone=(replace(zone, header_add=("X-New: 1",), dkim=DkimMode.OFF),))
        await running.send(f"app@{DOMAIN}", ["a@example.com"], MESSAGE)
        [received] = await stage.sink.wait_for(1)
        assert received.body.startswith(b"X-New: 1\r\nReceived: ")
        await stage.reload(
            srs=replace(srs_settings(tmp_path), secret=str(tmp_path / "nowhere")), zone=(zone,)
        )
        [problem] = running.worker.problems
        assert "srs.secret" in problem
        await running.send(f"app@{DOMAIN}", ["b@example.com"], MESSAGE)
        received = (await stage.sink.wait_for(2))[-1]
        assert received.body.startswith(b"X-New: 1\r\nReceived: ")


async def test_senders_are_rewritten_and_reports_keep_the_first_one(tmp_path: Path) -> None:
    async with staged(tmp_path, srs=True) as stage:
        running = stage.running
        recipients = ["a@example.com", "permerror@example.com"]
        await running.send("ann@first.example", recipients, MESSAGE)
        first, report = sorted(await stage.sink.wait_for(2), key=lambda each: each.mail_from == "")
        assert re.fullmatch(
            r"SRS0=[A-Z2-7]{8}=[A-Z2-7]{2}=first\.example=ann@srs\.example\.net", first.mail_from
        )
        srs = Srs(SrsSettings(domain=SRS_DOMAIN), [SECRET])
        now = running.worker.clock.now()
        assert srs.reverse(Mailbox(first.mail_from), now) == "ann@first.example"
        assert first.body.startswith(b"Received: ")
        assert report.mail_from == ""
        assert report.recipients == ("ann@first.example",)
        [accepted] = running.log.named("accepted")
        assert accepted["sender"] == "ann@first.example"


async def test_nothing_is_signed_for_strangers_who_write_to_a_rewritten_sender(tmp_path: Path) -> None:
    async with staged(tmp_path, srs=True, sign=True) as stage:
        running = stage.running
        await running.send("ann@first.example", ["a@example.com"], MESSAGE)
        [forwarded] = await stage.sink.wait_for(1)
        assert forwarded.body.startswith(b"DKIM-Signature: ")
        # Whoever got an address of his own forwarded could else have any From signed, and send it to all.
        strangers = replace(running.worker.settings.listener[0], allow_networks=())
        await stage.reload(listener=(strangers,))
        await running.send("x@other.example", [forwarded.mail_from], MESSAGE)
        returned = (await stage.sink.wait_for(2))[-1]
        assert returned.recipients == ("ann@first.example",)
        assert returned.body.startswith(b"Received: ")
        assert 'signatures_total{result="no_key"} 1.0' in running.metrics()


# Keys that change while the relay runs.

OLD, NEW, ED = (
    entry("example.com", "old"),
    entry("example.com", "new", "rsa2.pem"),
    entry("example.com", "ed", "ed.pem"),
)


async def selectors(stage: Stage) -> list[str]:
    """Of the signatures of a message that is sent now; they all hold."""
    sent = len(stage.sink.messages)
    await stage.running.send(
        "ann@example.com", ["bob@example.net"], MESSAGE.replace(b"app@example.org", b"ann@example.com")
    )
    message = (await stage.sink.wait_for(sent + 1))[-1].body
    found = [each.decode() for each in re.findall(rb" s=([a-z0-9]+);", message)]
    assert verified(message, records((OLD, NEW, ED))) == [True] * len(found)
    return found


async def test_a_reload_brings_new_keys_and_a_bad_one_leaves_the_old_ones(tmp_path: Path) -> None:
    async with staged(tmp_path, signing=[OLD]) as stage:
        assert await selectors(stage) == ["old"]
        await stage.reload(dkim=keys(tmp_path, NEW, ED))
        assert await selectors(stage) == ["new", "ed"]
        bad = keys(tmp_path, OLD)
        bad[0].key_file.write_text("no key")
        await stage.reload(dkim=bad)
        (refused,) = stage.running.log.named("reload-refused")
        assert str(refused["first"]).startswith("dkim[0].key_file: ")
        assert "is not a private key in PEM" in stage.running.worker.problems[0]
        assert await selectors(stage) == ["new", "ed"]
        await stage.reload(dkim=())
        assert stage.running.worker.problems == ()
        assert await selectors(stage) == []


async def test_a_key_whose_time_comes_signs_from_then_on_without_a_reload(tmp_path: Path) -> None:
    """The clock is the machine's here; the very second is in the unit tests."""
    async with staged(tmp_path, signing=[OLD]) as stage:
        assert await selectors(stage) == ["old"]
        change = time.time() + 0.3
        await stage.reload(
            dkim=keys(tmp_path, replace(OLD, not_after=change), replace(NEW, not_before=change))
        )
        await stage.running.until(lambda: time.time() > change, what="the change")
        assert await selectors(stage) == ["new"]


async def test_keys_that_end_soon_are_spoken_of_at_the_start(tmp_path: Path) -> None:
    async with staged(tmp_path, signing=[replace(OLD, not_after=time.time() + 86_400)]) as stage:
        (advice,) = stage.running.log.named("advice")
        assert str(advice["note"]).startswith("dkim[0].not_after: this key ends on")
