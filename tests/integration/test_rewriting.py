"""Other addresses in a running relay, and what a zone changes on the way out: header, signatures, senders."""

import asyncio
import base64
import hashlib
import re
import smtplib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from dkim.canonicalization import Relaxed

from tests.support.dkim import PEMS, entry, records, verified
from tests.support.relay import HOSTNAME, LOOPBACK, QUICK, Running, relay_with, settings
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners
from zonerelay.config import settings as options
from zonerelay.config.settings import DkimSettings, ListenerSettings, Settings, SrsSettings, ZoneSettings
from zonerelay.message.srs import Srs
from zonerelay.model.envelope import Mailbox, MessageId
from zonerelay.store.contract import CHUNK_SIZE

MESSAGE = (
    b"From: App <app@old.example>\r\nTo: ann@old.example\r\nBcc: x@y.example\r\nSubject: x\r\n\r\n"
    b"hello \t x\r\n"
)
MOVED = options.RewriteSettings(address=("old.example",), to="@new.example")
STANDSTILL = options.RetrySettings(schedule=(3600.0,), suspend_min=3000.0, suspend_max=3600.0)
NOWHERE = ZoneSettings(next_hop=f"{LOOPBACK}:1")


def to_sink(sink: Sink, name: str = "default", *, srs: bool = False) -> ZoneSettings:
    return ZoneSettings(name=name, next_hop=f"{LOOPBACK}:{sink.port}", srs=srs)


async def test_routes_queue_and_header_have_the_other_addresses(tmp_path: Path, sink: Sink) -> None:
    zones = (NOWHERE, to_sink(sink, "new"))
    routes = (options.RouteSettings(recipient=("ann@new.example",), header=("From: app@new",), zone="new"),)
    chosen = settings(tmp_path, zone=zones, route=routes, rewrite=(MOVED,))
    async with relay_with(chosen) as running:
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        (received,) = await sink.wait_for(1)
        assert (received.mail_from, received.recipients) == ("app@new.example", ("ann@new.example",))
        assert b"\r\nFrom: App <app@new.example>\r\nTo: ann@new.example\r\nSubject: x\r\n" in received.body
        assert b"Bcc" not in received.body
        found = await running.explain("ann@old.example", sender="app@old.example")
        assert [(each.what, each.becomes, each.by) for each in found.rewritten] == [
            ("sender", "app@new.example", "rewrite=1"),
            ("recipient", "ann@new.example", "rewrite=1"),
        ]
        assert (found.address, found.sender, found.domain) == (
            "ann@old.example",
            "app@old.example",
            "new.example",
        )


async def test_a_report_names_the_recipient_that_the_sender_knows(tmp_path: Path, sink: Sink) -> None:
    rules = (
        options.RewriteSettings(
            address=("ann@old.example",), to="permerror@new.example", where=options.RewriteScope.RECIPIENT
        ),
    )
    chosen = settings(tmp_path, zone=to_sink(sink), rewrite=rules)
    async with relay_with(chosen) as running:
        await running.send("app@x.example", ["ann@old.example"], b"Subject: x\r\n\r\nx\r\n")
        (report,) = await sink.wait_for(1)
        assert (report.mail_from, report.recipients) == ("", ("app@x.example",))
        assert b"\r\nOriginal-Recipient: rfc822; ann@old.example\r\n" in report.body
        assert b"\r\nFinal-Recipient: rfc822; permerror@new.example\r\n" in report.body


async def test_other_rules_are_for_sessions_that_begin_later(tmp_path: Path, sink: Sink) -> None:
    chosen = settings(tmp_path, zone=to_sink(sink), rewrite=(MOVED,))
    async with relay_with(chosen) as running:
        before = await asyncio.to_thread(smtplib.SMTP, *running.address, timeout=10)

        async def old_session() -> None:
            await asyncio.to_thread(before.sendmail, "app@old.example", ["ann@old.example"], MESSAGE)

        await old_session()
        other = replace(MOVED, to="@other.example")
        current = running.worker.settings
        await running.worker.reload(replace(current, rewrite=(other,)))
        assert list(running.worker.problems) == []
        await old_session()
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        assert (await running.explain("ann@old.example")).domain == "other.example"
        await running.worker.reload(replace(current, rewrite=(replace(MOVED, address=("a..b",)),)))
        (problem,) = running.worker.problems
        assert 'rewrite[0]: "a..b" cannot be matched' in problem
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        await running.worker.reload(replace(current, rewrite=()))
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        received = await sink.wait_for(5)
        domains = sorted(each.recipients[0].partition("@")[2] for each in received)
        assert domains == ["new.example"] * 2 + ["old.example"] + ["other.example"] * 2
        await asyncio.to_thread(before.quit)


# Reports to senders that SRS has made.


def with_srs(directory: Path, sink: Sink) -> Settings:
    return settings(directory, zone=to_sink(sink, srs=True), srs=srs_settings(directory))


async def rcpt(running: Running, recipient: str) -> int:
    def talk() -> int:
        with smtplib.SMTP(*running.address, timeout=10) as client:
            client.ehlo()
            client.mail("")
            return client.rcpt(recipient)[0]

    return await asyncio.to_thread(talk)


async def test_a_report_to_a_sender_that_we_made_reaches_the_first(tmp_path: Path, sink: Sink) -> None:
    chosen = with_srs(tmp_path, sink)
    async with relay_with(chosen) as running:
        await running.send("ann@first.example", ["bob@x.example"], MESSAGE)
        (forwarded,) = await sink.wait_for(1)
        assert forwarded.mail_from.startswith("SRS0=")
        strangers = replace(running.worker.settings.listener[0], allow_networks=())
        await running.worker.reload(replace(running.worker.settings, listener=(strangers,)))
        assert await rcpt(running, "ann@first.example") == 550
        await running.send("", [forwarded.mail_from], b"Subject: failed\r\n\r\nx\r\n")
        report = (await sink.wait_for(2))[1]
        assert (report.mail_from, report.recipients) == ("", ("ann@first.example",))
        found = await running.explain(forwarded.mail_from)
        assert [(each.becomes, each.by) for each in found.rewritten] == [("ann@first.example", "srs")]
        wrong = await running.explain("SRS0=aaaa=AA=first.example=ann@srs.example")
        assert wrong.rewritten[0].problem == "rejected with 550 5.1.1: old form"


async def test_srs_is_switched_on_and_off_and_keeps_a_secret_that_works(tmp_path: Path, sink: Sink) -> None:
    chosen = with_srs(tmp_path, sink)
    strangers = ListenerSettings(address=f"{LOOPBACK}:0", allow_networks=())
    off = replace(chosen, srs=SrsSettings(), zone=(to_sink(sink),), listener=(strangers,))
    async with relay_with(off) as running:

        async def reload(srs: SrsSettings) -> None:
            await running.worker.reload(replace(running.worker.settings, srs=srs))

        await reload(chosen.srs)
        srs = running.worker.sending.srs
        assert srs is not None
        address = srs.forward(Mailbox("ann@first.example"), running.worker.clock.now())
        assert await rcpt(running, address) == 250
        missing = tmp_path / "none"
        await reload(replace(chosen.srs, secret=str(missing)))
        assert "cannot be read" in running.worker.problems[0]
        assert await rcpt(running, address) == 250
        missing.write_text("another secret of some length")
        await reload(replace(chosen.srs, secret=str(missing), old_secrets=(chosen.srs.secret,)))
        assert await rcpt(running, address) == 250
        await reload(replace(chosen.srs, secret=str(missing)))
        assert await rcpt(running, address) == 550
        await reload(SrsSettings())
        assert await rcpt(running, address) == 550


VICTIM = "victim@third.example"
GONE = "reply-550-5.1.1@first.example"
FULL = "reply-552-5.2.2@first.example"


async def test_what_a_next_hop_refuses_of_strangers_is_reported_to_nobody(tmp_path: Path, sink: Sink) -> None:
    chosen = with_srs(tmp_path, sink)
    chosen = replace(chosen, listener=(ListenerSettings(address=f"{LOOPBACK}:0", allow_networks=()),))
    srs = Srs(chosen.srs, [SRS_SECRET])
    gone, full = (srs.forward(Mailbox(each), time.time()) for each in (GONE, FULL))
    closed = replace(chosen.zone[0], next_hop=f"{LOOPBACK}:1")
    quick = replace(QUICK, suspend_min=0.1, suspend_max=0.2)
    async with relay_with(replace(chosen, zone=(closed,), retry=quick)) as running:
        await running.send(VICTIM, [gone, full], MESSAGE)
        await running.until_logged("deferred", 2)
    # Another process goes on with it: what is known of the client is in the queue.
    async with relay_with(replace(chosen, retry=quick)) as running:
        await running.until_empty()
        assert len(running.log.named("bounced")) == 2
        assert [event["reason"] for event in running.log.named("no-dsn")] == ["stranger"]
        assert 'zonerelay_dsn_withheld_total{reason="stranger"} 1.0' in running.metrics()
        assert not running.log.named("dsn")
        # What is about the recipient is said to the next one; what is about that message is not.
        assert (await rcpt(running, gone), await rcpt(running, full)) == (550, 250)
        assert running.log.named("refused")[-1]["detail"] == "the next hop rejects it: 550 5.1.1"
        await running.send("", [full], MESSAGE)
        await running.until_logged("no-dsn", 2)


async def test_strangers_get_no_address_of_ours_for_their_sender(tmp_path: Path, sink: Sink) -> None:
    """It would let them write to that person, and have the next host's reports sent there."""
    chosen = with_srs(tmp_path, sink)
    chosen = replace(chosen, listener=(ListenerSettings(address=f"{LOOPBACK}:0", allow_networks=()),))
    own = Srs(chosen.srs, [SRS_SECRET]).forward(Mailbox("mallory@evil.example"), time.time())
    async with relay_with(chosen) as running:
        await running.send(VICTIM, [own], MESSAGE)
        (received,) = await sink.wait_for(1)
        assert (received.mail_from, received.recipients) == ("", ("mallory@evil.example",))


# The body's hash.


async def stored_hash(running: Running) -> str:
    """Of the message that was accepted last."""
    accepted = running.log.named("accepted")[-1]
    return (await running.worker.store.read_message(MessageId(str(accepted["id"])))).body_hash


async def test_the_bodys_hash_is_stored_while_there_are_keys_and_outlives_a_restart(tmp_path: Path) -> None:
    signing = keys(tmp_path, entry("new.example", "s"))
    chosen = settings(tmp_path, zone=NOWHERE, retry=STANDSTILL)
    form = Relaxed.canonicalize_body(b"hello \t x\r\n")
    wanted = base64.b64encode(hashlib.sha256(form).digest()).decode()
    async with relay_with(chosen) as running:
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        assert await stored_hash(running) == ""
        await running.worker.reload(replace(running.worker.settings, dkim=signing))
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        assert await stored_hash(running) == wanted
        kept = MessageId(str(running.log.named("accepted")[-1]["id"]))
        await running.worker.reload(replace(running.worker.settings, dkim=()))
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        assert await stored_hash(running) == ""
    async with relay_with(chosen) as running:
        assert (await running.worker.store.read_message(kept)).body_hash == wanted


# ---- what a zone changes on the way out, as the next host sees it -----------------------------------


DOMAIN = "example.org"
ENTRIES = tuple(
    entry(domain, selector, file)
    for domain in (DOMAIN, HOSTNAME)
    for selector, file in (("rsa", "rsa.pem"), ("ed", "ed.pem"))
)
PUBLISHED = records(ENTRIES)
SRS_SECRET = "a secret of some length"
SRS_DOMAIN = "srs.example"
MAILED = b"From: app@example.org\r\nSubject: hello\r\nX-Mailer: app\r\n\r\nOne line.\r\n"


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
    file.write_text(f"{SRS_SECRET}\n")
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


async def stored_body(running: Running, message_id: object) -> bytes:
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
        await running.send("app@example.org", ["a@example.com", "defer-451@example.com"], MAILED)
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
        original = await stored_body(running, accepted["id"])
        assert MAILED.partition(b"\r\n")[0] in original
        assert b"Subject: hello\r\nX-Mailer: app\r\n" in original
        assert len(original) == accepted["size"]


async def test_lines_that_are_too_long_arrive_signed_in_a_form_that_hosts_take(tmp_path: Path) -> None:
    long = MAILED.replace(b"Subject:", b"References: " + b"<a@example.org> " * 100 + b"\r\nSubject:")
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
            await stage.running.send(f"app@{DOMAIN}", ["a@example.com"], MAILED[:-11] + body)
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
        long = MAILED + LINES * 5000
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
        await stage.running.send(f"app@{DOMAIN}", recipients, MAILED)
        messages = await stage.sink.wait_for(3)
        assert {verified(each.body, PUBLISHED)[0] for each in messages} == {True}
        assert len({signature(each.body) for each in messages}) == 1
        assert 'signatures_total{result="signed"} 1.0' in stage.running.metrics()


async def test_reports_of_our_own_are_signed(tmp_path: Path) -> None:
    async with staged(tmp_path, sign=True) as stage:
        await stage.running.send(f"app@{DOMAIN}", ["permerror@example.com"], MAILED)
        [report] = await stage.sink.wait_for(1)
        assert report.mail_from == ""
        assert f"d={HOSTNAME};".encode() in signature(report.body)
        assert verified(report.body, PUBLISHED)[:2] == [True, True]


async def test_where_a_signature_is_required_mail_waits_for_its_key(tmp_path: Path) -> None:
    async with staged(tmp_path, sign=True, dkim=options.DkimMode.REQUIRED) as stage:
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


async def test_rules_and_keys_change_on_reload(tmp_path: Path) -> None:
    async with staged(tmp_path, sign=True) as stage:
        running = stage.running
        [zone] = stage.chosen.zone
        await stage.reload(zone=(replace(zone, header_add=("X-New: 1",), dkim=options.DkimMode.OFF),))
        await running.send(f"app@{DOMAIN}", ["a@example.com"], MAILED)
        [received] = await stage.sink.wait_for(1)
        assert received.body.startswith(b"X-New: 1\r\nReceived: ")


async def test_senders_are_rewritten_and_reports_keep_the_first_one(tmp_path: Path) -> None:
    async with staged(tmp_path, srs=True) as stage:
        running = stage.running
        recipients = ["a@example.com", "permerror@example.com"]
        await running.send("ann@first.example", recipients, MAILED)
        first, report = sorted(await stage.sink.wait_for(2), key=lambda each: each.mail_from == "")
        assert re.fullmatch(r"SRS0=[A-Z2-7]{8}=[A-Z2-7]{2}=first\.example=ann@srs\.example", first.mail_from)
        srs = Srs(SrsSettings(domain=SRS_DOMAIN), [SRS_SECRET])
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
        await running.send("ann@first.example", ["a@example.com"], MAILED)
        [forwarded] = await stage.sink.wait_for(1)
        assert forwarded.body.startswith(b"DKIM-Signature: ")
        # Whoever got an address of his own forwarded could else have any From signed, and send it to all.
        strangers = replace(running.worker.settings.listener[0], allow_networks=())
        await stage.reload(listener=(strangers,))
        await running.send("x@other.example", [forwarded.mail_from], MAILED)
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
        "ann@example.com", ["bob@example.net"], MAILED.replace(b"app@example.org", b"ann@example.com")
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


async def test_keys_that_end_soon_are_spoken_of_at_the_start(tmp_path: Path) -> None:
    async with staged(tmp_path, signing=[replace(OLD, not_after=time.time() + 86_400)]) as stage:
        (advice,) = stage.running.log.named("advice")
        assert str(advice["note"]).startswith("dkim[0].not_after: this key expires on")
