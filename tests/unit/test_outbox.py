"""Rows as mail, without a database: what is composed is what was meant, and nothing more."""

import asyncio
import base64
import email.policy
import email.utils
import json
import random
import string
import tracemalloc
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.event_log import EventLog, events_into
from tests.support.memory_store import MemoryStore
from tests.support.queueing import deliveries_of, make_message
from zonerelay.config.settings import OutboxSettings
from zonerelay.message.compose import Address, AttachedFile, Base64Error, Base64Text, Draft, compose
from zonerelay.model.clock import Clock, SystemClock
from zonerelay.model.delivery import QueueName, queue_of
from zonerelay.model.envelope import Mailbox, MessageIdSource, is_row, row_id, row_of
from zonerelay.model.reply import Outcome, Reply, Verdict
from zonerelay.outbox.composer import Composer, compose_row
from zonerelay.outbox.database.passwords import PasswordError, read_key, seal, unseal
from zonerelay.outbox.drafts import BadRowError, RowContent, address, draft_of, recipients_of
from zonerelay.outbox.keeper import OutboxContext, OutboxKeeper
from zonerelay.outbox.rows import claims
from zonerelay.outbox.rows.claims import ClaimWindow, OutboxReader, OutboxWriter
from zonerelay.outbox.rows.mailboxes import Mailbox as OutboxMailbox
from zonerelay.outbox.rows.mailboxes import Mailboxes
from zonerelay.outbox.rows.row import FAILED, PROCESSING, QUEUED, SENT, Row, read_states
from zonerelay.outbox.store import OutboxStore
from zonerelay.store.postgres.driver import DatabaseAccess, StatementRejectedError
from zonerelay.telemetry.logs.redact import Redactor

NOW = 1_700_000_000.0
REDACT = Redactor(b"key", enabled=True)

# What PostgreSQL can hold, without what ends a line.
line = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp"), exclude_characters="\x85"), max_size=120
)
visible = line.map(str.strip).filter(bool)
names = line.map(lambda text: " ".join(text.split())[:100])
bodies = st.text(st.characters(exclude_categories=("Cs", "Cc"), include_characters="\n\t.=-"), max_size=400)
locals_ = st.text(string.ascii_letters + string.digits, min_size=1, max_size=20)
addresses = st.builds(lambda name, local: Address(Mailbox(f"{local}@example.com"), name), names, locals_)
texts = st.binary(max_size=300).map(base64.b64encode).map(Base64Text)
files = st.builds(AttachedFile, names, st.sampled_from(["application/pdf", "image/png"]), texts)


@settings(max_examples=25, deadline=None)
@given(
    author=addresses,
    to=st.lists(addresses, min_size=1, max_size=5),
    subject=line,
    text=st.none() | bodies,
    html=st.none() | bodies,
    value=visible,
    attached=st.lists(files, max_size=2),
)
@example(
    author=Address(Mailbox("a@example.com"), "A"), to=[Address(Mailbox("b@example.com"), "B")], subject="s",
    text="t", html=None, value="v", attached=[AttachedFile("'", "image/png", Base64Text(b"eQ=="))],
)  # fmt: skip
def test_what_is_composed_is_read_again(
    author: Address,
    to: list[Address],
    subject: str,
    text: str | None,
    html: str | None,
    value: str,
    attached: list[AttachedFile],
) -> None:
    draft = Draft(
        message_id="<1@example.org>", created=NOW, author=author, to=tuple(to), subject=subject, text=text,
        html=html, headers=(("X-Value", value),), files=tuple(attached),
    )  # fmt: skip
    composed = compose(draft)
    assert composed == compose(draft)
    assert composed.isascii()
    assert max(map(len, composed.split(b"\r\n"))) <= 998
    assert b"\n" not in composed.replace(b"\r\n", b"")
    parsed = email.message_from_bytes(composed, policy=email.policy.default)
    # RFC 5322 3.6: Date and From are required, Message-ID should be there, and each of them once.
    assert [each.datetime.timestamp() for each in parsed.get_all("date", [])] == [int(NOW)]
    assert parsed.get_all("message-id") == ["<1@example.org>"]
    assert len(parsed.get_all("from", [])) == 1
    assert [each.addr_spec for each in parsed["to"].addresses] == [each.mailbox for each in to]
    # Python 3.11 keeps the blanks between encoded words of a name, which RFC 2047 6.2 has readers drop.
    name = parsed["from"].addresses[0].display_name
    assert name.replace(" ", "") == author.name.replace(" ", "")
    assert parsed["subject"] == subject
    assert parsed["x-value"] == value
    parts = [part for part in parsed.walk() if not part.is_multipart()]
    shown = [part for part in parts if part.get_content_disposition() != "attachment"]
    wanted = [each for each in (text, html) if each is not None] or [""]
    assert [lines_of(part.get_content()) for part in shown] == [lines_of(each) for each in wanted]
    others = [part for part in parts if part.get_content_disposition() == "attachment"]
    assert [part.get_content() for part in others] == [b"".join(file.content.pieces()) for file in attached]
    # The standard library removes the quotes of a name that has some, too.
    names = [email.utils.unquote(file.name) for file in attached]
    assert [part.get_filename() or "" for part in others] == names


def lines_of(text: str) -> list[str]:
    text = text.replace("\r\n", "\n")
    return text.removesuffix("\n").split("\n")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a@example.com", Address(Mailbox("a@example.com"))),
        (" Ann Other <a@example.com> ", Address(Mailbox("a@example.com"), "Ann Other")),
        ('"Other, \\"Ann\\"" <a@example.com>', Address(Mailbox("a@example.com"), 'Other, "Ann"')),
        ("a@Bücher.example", Address(Mailbox("a@xn--bcher-kva.example"))),
        ("Łukasz <łukasz@example.com>", Address(Mailbox("łukasz@example.com"), "Łukasz")),
    ],
)
def test_addresses_are_read_as_people_write_them(text: str, wanted: Address) -> None:
    assert address(text, "to_addresses") == wanted


SEVERAL = "Ann <a@example.com>, Bob <b@example.com>"


def test_a_text_with_several_addresses_goes_to_all_or_is_refused() -> None:
    def people(**row: object) -> list[str]:
        return [*recipients_of({"from_address": "app@example.org", **row}).everybody]

    for column in ("to_addresses", "cc_addresses", "bcc_addresses"):
        for text in (SEVERAL, SEVERAL.replace(",", ";"), f"Us: {SEVERAL};"):
            assert people(**{column: [text]}) == ["a@example.com", "b@example.com"]
    with pytest.raises(BadRowError, match="to_addresses contains no address at position 2 of 2"):
        people(to_addresses=["a@example.com, bob"])
    for column in ("from_address", "sender"):
        with pytest.raises(BadRowError, match=f"{column} must contain exactly one address, but has 2"):
            people(**{"to_addresses": ["a@example.com"], column: SEVERAL})


@given(st.text(max_size=40))
def test_no_text_becomes_an_address_with_a_line_end(text: str) -> None:
    try:
        found = address(f"{text}@example.com", "to_addresses")
    except BadRowError:
        return
    assert not {"\r", "\n", "<", ">"} & set(found.mailbox)


def test_the_key_of_a_row_reaches_nobody_and_its_urls_stay_urls() -> None:
    people = recipients_of({"from_address": "a@example.org", "to_addresses": ["b@example.net"]})
    url = "<https://x.example/?a=?utf-8?b?eA==?=>"
    headers = json.dumps({"idempotency-KEY": "k", "List-Unsubscribe": url})
    composed = compose(draft_of(1, NOW, people, RowContent(text="t", headers=headers)))
    assert b"idempotency" not in composed.lower()
    assert f"List-Unsubscribe: {url}\r\n".encode() in composed


def test_a_picture_that_the_html_shows_is_related_to_it() -> None:
    picture = {"content": base64.b64encode(b"png").decode(), "content_type": "image/png", "content_id": "p@x"}
    content = RowContent(text="t", html='<img src="cid:p@x">', attachments=json.dumps([picture]).encode())
    people = recipients_of({"from_address": "a@b.example", "to_addresses": ["c@d.example"]})
    parsed = email.message_from_bytes(compose(draft_of(1, NOW, people, content)), policy=email.policy.default)
    _, related = parsed.iter_parts()
    assert [parsed.get_content_type(), related.get_content_type()] == [
        *("multipart/alternative", "multipart/related")
    ]
    _, image = related.iter_parts()
    assert image["content-id"] == "<p@x>"


def test_ids_and_zones_of_the_outbox_are_told_from_others() -> None:
    assert row_of(row_id(7)) == 7
    assert is_row(row_id(7))
    assert row_id(7) < row_id(8)
    assert queue_of("mailbox/7").label == "mailbox"
    assert queue_of("mailboxes").label == "mailboxes"


# --- what becomes of a row


def row(*recipients: str) -> Row:
    people = recipients_of({"from_address": "app@example.org", "to_addresses": list(recipients)})
    made = Row(1, "t", zone="z", created=NOW, attempts=0, people=people, states={}, content=None)
    made.take_due(NOW)
    return made


def outcome(code: int) -> Outcome:
    return Outcome(Verdict.BOUNCED, Reply(code, "1.1", "<b@example.com> unknown"))


def test_a_row_is_finalised_with_its_last_recipient() -> None:
    one = row("a@example.com", "b@example.com", "c@example.com")
    first, second, third = one.open()
    one.finish(first, None, NOW, REDACT)
    assert one.write(NOW, REDACT).status == PROCESSING
    one.finish(second, outcome(550), NOW, REDACT)
    one.postpone(third.deferred(NOW + 60, outcome(450).attempt(NOW)), REDACT)
    write = one.write(NOW, REDACT)
    assert (write.status, write.delay, write.attempts) == (QUEUED, 60.0, 1)
    assert [each.recipient for each in one.open()] == ["c@example.com"]
    assert [each.recipient for each in one.take_due(NOW + 60)] == ["c@example.com"]
    one.finish(one.open()[0], None, NOW, REDACT)
    write = one.write(NOW, REDACT)
    assert write.status == FAILED
    assert write.error_log is not None
    assert "example.com" not in write.error_log
    assert REDACT.mailbox(Mailbox("b@example.com")) in write.error_log


def test_a_row_whose_recipients_all_have_it_is_sent() -> None:
    one = row("a@example.com", "b@example.com")
    for delivery in one.open():
        one.finish(delivery, None, NOW, REDACT)
    assert one.write(NOW, REDACT)._replace(state=None) == (1, "t", SENT, 1, None, None, None)


def test_what_is_held_waits_for_ever() -> None:
    one = row("a@example.com")
    (delivery,) = one.open()
    one.postpone(
        type(delivery)(
            queue=queue_of("z"),
            message_id=one.message_id,
            recipient=delivery.recipient,
            created=NOW,
            held=True,
        ),
        REDACT,
    )
    assert one.write(NOW, REDACT).delay == float("inf")


@given(st.text(max_size=300))
def test_what_is_stored_is_redacted_once_and_for_all(text: str) -> None:
    once = REDACT.text(f"{text} <alice@example.com> {text}")
    assert "alice@example.com" not in once
    assert REDACT.text(once) == once


@given(st.text(max_size=60), st.sampled_from([" ", "", ".", ",", "-", "(", ")", "<", ">", "'"]))
def test_what_is_stored_says_that_it_is_redacted_and_joins_with_the_log(text: str, beside: str) -> None:
    """However often it is cleaned or marked again."""
    alice = REDACT.mailbox(Mailbox("alice@example.com"))
    once = REDACT.stored(
        REDACT.text(f"{text} 550 <alice@example.com>{beside}alice@example.com{beside} {text}")
    )
    assert f"<redacted:{alice}>" in once
    assert once.count(alice) == once.count(f"<redacted:{alice}>")
    assert REDACT.stored(once) == once
    assert REDACT.text(once) == once


def test_numbers_that_the_database_would_not_take_are_not_written() -> None:
    one = row("a@example.com")
    one.attempts = 2**40
    one.postpone(one.open()[0].deferred(1e300, outcome(450).attempt(NOW)), REDACT)
    write = one.write(NOW, REDACT)
    assert write.attempts < 2**31
    assert write.delay is not None
    assert write.delay < 1e9


# --- two halves of one queue


def connected(clock: Clock) -> OutboxKeeper:
    """A keeper as it is while the database can be used, without one."""
    keeper = OutboxKeeper(
        DatabaseAccess("", str, "s", "test", 60.0),
        "relay",
        OutboxContext(
            OutboxSettings(url="postgresql://db/s"),
            clock,
            REDACT,
            events_into(EventLog(), clock),
            known_zones=lambda: {"default"},
            on_news=lambda _: None,
            on_lost=lambda _: None,
        ),
    )
    keeper._unusable.clear()
    keeper._held_until = float("inf")
    return keeper


async def test_a_change_is_stored_with_its_own_write(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, asked, answer = connected(SystemClock()), asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def fetch(_: str, *columns: list[object]) -> list[list[object]]:
        asked.release()
        await answer.acquire()
        return [columns[0]]

    monkeypatch.setattr(keeper, "fetch", fetch)
    writer = OutboxWriter(keeper, lambda *_: None)
    write = row("a@example.com").write(NOW, REDACT)
    writer.put(write)
    await asked.acquire()
    change = asyncio.create_task(writer.store(write._replace(status=QUEUED)))
    await asyncio.sleep(0)
    answer.release()
    await asked.acquire()
    await asyncio.wait([change], timeout=0.05)
    assert not change.done()
    answer.release()
    await change
    await writer.close(1.0)


async def test_what_the_database_rejects_replaces_no_newer_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, written, failed = connected(SystemClock()), [], asyncio.Event()
    monkeypatch.setattr(claims, "PAUSE", 0.0)
    writer = OutboxWriter(keeper, lambda write, _: written.append(write))
    first = row("a@example.com").write(NOW, REDACT)._replace(error_log="text")

    async def fetch(_: str, *columns: list[object]) -> list[list[object]]:
        if failed.is_set():
            return [columns[0]]
        failed.set()
        writer.put(first._replace(status=SENT))
        raise StatementRejectedError("no such value")

    monkeypatch.setattr(keeper, "fetch", fetch)
    await writer.store(first)
    assert [write.status for write in written] == [SENT]
    await writer.close(1.0)


async def test_a_large_row_is_composed_once_for_all_its_batches() -> None:
    """Each batch of a row with several destinations read all of it, and composed it again."""
    reads: list[int] = []

    class Reader:
        async def size(self, row: int) -> int:
            return 2_000_000

        async def content(self, row: int) -> RowContent:
            reads.append(row)
            return RowContent(text="hello")

    composer = Composer(cast(OutboxReader, Reader()), 10_000_000)
    large = row("a@example.com", "b@example.net")
    first, *others = await asyncio.gather(*(composer.compose(large) for _ in range(3)))
    assert reads == [1]
    assert all(each is first for each in others)


async def test_rows_and_the_mail_of_the_spool_have_half_of_each_claim() -> None:
    clock, spool = SystemClock(), MemoryStore()
    keeper = connected(clock)
    store = OutboxStore(spool, keeper, Mailboxes([], clock.monotonic), counts_rows=False)
    people = recipients_of({"from_address": "a@example.org", "to_addresses": ["b@example.com"]})
    ids = MessageIdSource(clock)
    for number in range(5):
        store.claims._admit(
            Row(number, "t", "default", created=NOW, attempts=0, people=people, states={}, content=None)
        )
        message = make_message(ids, ["b@example.com"], created=NOW)
        spool.add(message, [], deliveries_of(message))
    for limit, rows in ((4, 2), (1, 1), (4, 2), (8, 0)):
        found = await store.claim(queue_of("default"), limit, now=NOW + 1)
        assert [is_row(each.message_id) for each in found] == [True] * rows + [False] * (len(found) - rows)
    assert len(found) == 1
    assert not await store.claim(queue_of("default"), 8, now=NOW + 1)
    await store.close()


# --- mailboxes and passwords


def test_a_password_opens_with_any_of_the_keys_and_for_its_server_only() -> None:
    old, new = b"o" * 32, b"n" * 32
    sealed = seal("pässword", old, b"0" * 12, host="SMTP.example.net", port=587, user="u")
    assert unseal(sealed, [new, old], host="smtp.example.net", port=587, user="u") == "pässword"
    for keys, host, port, user in (
        ([new], "smtp.example.net", 587, "u"),
        ([old], "smtp.attacker.example", 587, "u"),
        ([old], "smtp.example.net", 25, "u"),
        ([old], "smtp.example.net", 587, "v"),
        ([], "smtp.example.net", 587, "u"),
    ):
        with pytest.raises(PasswordError) as raised:
            unseal(sealed, keys, host=host, port=port, user=user)
        assert "pässword" not in str(raised.value)
    for wrong in ("", "zr1.", "zr1.AAAA", "zr1.%", "zr1." + "A" * 5000, "plain"):
        with pytest.raises(PasswordError):
            unseal(wrong, [old], host="h", port=1, user="u")
    assert read_key(base64.b64encode(old).decode()) == old
    with pytest.raises(PasswordError):
        read_key("short")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"host": "[::1]", "tls": "none", "user": ""}, ""),
        ({"host": "smtp.example.net", "tls": "none", "user": ""}, "for a server on loopback"),
        ({"tls": "none"}, "without a user name"),
        ({"tls": "ssl"}, "smtp_tls must be one of"),
        ({"port": 0}, "smtp_port is not a port"),
        ({"host": "not a host"}, "smtp_host is not a host name"),
        ({"sealed": ""}, "but smtp_password_encrypted is not"),
    ],
)
def test_a_mailbox_that_cannot_be_used_says_why(changes: dict[str, object], problem: str) -> None:
    columns: dict[str, object] = {
        "id": 7, "from_address": "", "host": "127.0.0.1", "port": 587, "tls": "starttls", "verify": True,
        "user": "u", "sealed": "zr1.x", **changes,
    }  # fmt: skip
    mailbox = OutboxMailbox(**columns)  # type: ignore[arg-type]  # columns by name
    assert problem in mailbox.problem()
    assert bool(problem) is bool(mailbox.problem())
    if not problem:
        assert mailbox.settings().name == "mailbox/7"


# --- files


@given(
    st.binary(max_size=500), st.lists(st.tuples(st.integers(0, 700), st.sampled_from(" \n\t")), max_size=4)
)
@settings(max_examples=25, deadline=None)
def test_base64_is_decoded_as_if_it_were_done_at_once(data: bytes, gaps: list[tuple[int, str]]) -> None:
    text = base64.b64encode(data).decode()
    for at, gap in gaps:
        text = text[:at] + gap + text[at:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zonerelay.message.compose._SLICE", 2 * 76)
        pieces = list(Base64Text(text.encode()).pieces())
    assert b"".join(pieces) == data
    assert all(len(piece) % 57 == 0 for piece in pieces[:-1])


@pytest.mark.parametrize(
    "text", ["QQ", "Q", "QQ==QQ==", "Q\u00e4==", "QQ==" + "A" * 80_000, "A" * 80_000 + "%"]
)
def test_what_is_no_base64_is_said_to_be_none(text: str) -> None:
    with pytest.raises(Base64Error, match=r"^attachments\[0\].content is not base64$"):
        list(Base64Text(text.encode(), "attachments[0].content").pieces())


def test_a_large_file_is_in_memory_once() -> None:
    """As it came from the database; what is made of it goes into a file, a piece at a time."""
    octets = bytes(range(256)) * 10_000
    content = base64.b64encode(octets).decode()
    attachments = b'[{"filename": "a.bin", "content": "' + content.encode() + b'"}]'
    people = recipients_of({"from_address": "a@example.org", "to_addresses": ["b@example.com"]})
    row = Row(1, "t", zone="z", created=NOW, attempts=0, people=people, states={}, content=None)
    tracemalloc.start()
    made = compose_row(row, RowContent(text="t", attachments=attachments), 5_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000
    assert made.file is not None
    made.file.seek(0)
    whole = made.file.read()
    made.file.close()
    assert len(whole) == made.message.size
    _, attached = email.message_from_bytes(whole, policy=email.policy.default).iter_parts()
    assert attached.get_content() == octets
    with pytest.raises(BadRowError, match="max_message_size"):
        compose_row(row, RowContent(text="t", attachments=attachments), 1_000_000)
    escaped = b'[{"content": "QUJ\\u0044", "filename": "b"}]'
    assert b"QUJD" in compose_row(row, RowContent(attachments=escaped), 5_000).data


# The window of what is being sent


SLOW = queue_of("slow")


def fill(held: ClaimWindow, queues: dict[QueueName, int]) -> list[QueueName]:
    """Claim as long as there is room, from endless queues first come, first served; who got something."""
    came: list[QueueName] = []
    while room := held.room():
        full = held.full()
        open_ = [queue for queue, left in queues.items() if left and queue not in full]
        if not open_:
            break
        for _ in range(room):
            queue = next((each for each in open_ if queues[each]), None)
            if queue is None:
                break
            queues[queue] -= 1
            held.add(queue)
            came.append(queue)
    return came


def test_one_queue_alone_has_its_share_and_no_more() -> None:
    held = ClaimWindow()
    assert len(fill(held, {SLOW: 10_000})) == claims.SHARE
    assert list(held.full()) == [SLOW]


def test_however_many_are_slow_the_next_queue_comes_in() -> None:
    held, quick = ClaimWindow(), queue_of("quick")
    for number in range(150):
        fill(held, {queue_of(f"slow {number}"): 500})
        assert quick in fill(held, {quick: 1})
        held.remove(quick)
        assert sum(held._counts.values()) <= claims.MOST + claims.RESERVE


def test_the_end_is_the_end_and_the_first_that_leaves_makes_room() -> None:
    held = ClaimWindow()
    fill(held, {queue_of(f"slow {number}"): 500 for number in range(1000)})
    assert sum(held._counts.values()) == claims.MOST + claims.RESERVE
    assert held.room() == 0
    looks = [held.remove(queue) for queue in list(held.queues)[-claims.FEW :]]
    assert looks[-1]
    assert held.room() == claims.FEW


def test_a_queue_that_has_half_of_its_share_left_is_filled_up_again() -> None:
    held = ClaimWindow()
    fill(held, {SLOW: claims.SHARE})
    for _ in range(claims.SHARE // 2 - 1):
        assert not held.remove(SLOW)
        assert SLOW in held.full()
    assert held.remove(SLOW)
    assert not held.full()
    assert held.room() == claims.BATCH


def test_nothing_is_forgotten_whatever_comes_and_goes() -> None:
    """The counts add up, and a queue with nothing at hand is never passed over while there is room."""
    chance, held, count = random.Random(7), ClaimWindow(), {queue_of(str(n)): 0 for n in range(40)}
    for _ in range(20_000):
        queue = chance.choice(list(count))
        if chance.random() < 0.6 and held.room() and queue not in held.full():
            held.add(queue)
            count[queue] += 1
        elif count[queue]:
            held.remove(queue)
            count[queue] -= 1
        assert not any(not count[each] for each in held.full())
    assert held.queues == {each for each, left in count.items() if left}
    assert sum(count.values()) <= claims.MOST + claims.RESERVE


def test_states_that_are_nested_too_deeply_are_not_of_a_relay() -> None:
    assert read_states(f'{{"a@example.net": {{"x": {"[" * 10_000}{"]" * 10_000}}}}}') == {}
