"""What a zone makes of a stored message: rules, signature, sender, and what is kept of it."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import pytest
from msgspec import structs

from tests.support.dkim import entry, keys_of, records, verified
from tests.support.event_log import EventLog
from tests.support.loop_turns import loop_turns
from tests.support.mail import Bodies, make_message
from zonerelay.config.settings import DkimMode, SrsSettings, ZoneSettings
from zonerelay.delivery.rewrite import rendering
from zonerelay.delivery.rewrite.rendering import RenderedMessage, Renderer, RenderError, SigningKeys
from zonerelay.message.dkim.signature import DkimKey, RelaxedBody
from zonerelay.message.srs import Srs
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import Message, MessageId
from zonerelay.store.contract import StoreError
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.metrics import Metrics

HEADER = (
    b"Received: from a by b\r\nFrom: Ann <ann@example.com>\r\nX-Mailer: secret\r\n 1.0\r\n"
    b"Subject: x\r\nX-Mailer: 2\r\nDate: Sat, 21 Nov 2026 10:00:00 +0000\r\n"
)
TEXT = HEADER + b"\r\nHello.\r\n"
ENTRIES = (entry("example.com", "ed", "ed.pem"), entry("example.com", "rsa"))
PUBLISHED = records(ENTRIES)
KEYS = keys_of(*ENTRIES)
SRS = Srs(SrsSettings(domain="srs.example.net"), ["a secret of some length"])
SIGNS = ZoneSettings()
RULES = ZoneSettings(
    dkim=DkimMode.OFF,
    header_remove=("received", "X-Nothing"),
    header_replace=("X-Mailer: zonerelay", "X-Other: 1"),
    header_add=("X-One: 1", "X-Two:  two   words"),
)
RULED = (
    b"X-One: 1\r\nX-Two: two words\r\nFrom: Ann <ann@example.com>\r\nX-Mailer: zonerelay\r\n"
    b"Subject: x\r\nDate: Sat, 21 Nov 2026 10:00:00 +0000\r\n"
)


@dataclass
class Setting:
    """A renderer on a body."""

    bodies: Bodies = field(default_factory=lambda: Bodies(TEXT))
    keys: SigningKeys | None = None
    srs: Srs | None = None
    clock: ManualClock = field(default_factory=ManualClock)
    log: EventLog = field(default_factory=EventLog)

    def __post_init__(self) -> None:
        self.events = Events(self.log, Metrics(), Redactor(b"", enabled=False), self.clock)
        self.renderer = Renderer(read_body=self.bodies.read, events=self.events, clock=self.clock)
        self.renderer.configure(keys=self.keys, srs=self.srs, max_header_size=0)

    @property
    def message(self) -> Message:
        return make_message(self.bodies.body)

    async def render(self, zone: ZoneSettings, message: Message | None = None) -> RenderedMessage:
        return await self.renderer.render(zone, message or self.message)


async def sent(rendered: RenderedMessage) -> bytes:
    pieces = [piece async for piece in rendered.read_body(rendered.message.id)]
    assert all(pieces), "an empty piece would be the end"
    body = b"".join(pieces)
    assert rendered.message.size == len(body)
    return body


@pytest.mark.parametrize(
    ("zone", "keys", "srs", "changes"),
    [
        (ZoneSettings(), None, None, False),
        (ZoneSettings(dkim=DkimMode.OFF), KEYS, SRS, False),
        (ZoneSettings(), KEYS, None, True),
        (ZoneSettings(dkim=DkimMode.REQUIRED), None, None, True),
        (ZoneSettings(srs=True), None, None, False),
        (ZoneSettings(srs=True), None, SRS, True),
        (ZoneSettings(header_remove=("X",)), None, None, True),
        (ZoneSettings(header_replace=("X: 1",)), None, None, True),
        (ZoneSettings(header_add=("X: 1",)), None, None, True),
    ],
)
async def test_a_zone_without_rules_changes_nothing(
    zone: ZoneSettings, keys: SigningKeys | None, srs: Srs | None, changes: bool
) -> None:
    setting = Setting(keys=keys, srs=srs)
    assert setting.renderer.changes(zone, setting.message) is changes
    assert setting.renderer.changes(zone, setting.message) is changes
    if not changes:
        message = setting.message
        assert (await setting.render(zone, message)).message is message


@pytest.mark.parametrize("piece_size", [1, 7, 100, 65536])
async def test_rules_are_applied_in_their_order(piece_size: int) -> None:
    setting = Setting(Bodies(TEXT, piece_size=piece_size))
    assert await sent(await setting.render(RULES)) == RULED + b"\r\nHello.\r\n"
    assert setting.bodies.open_now == 0


ADDS = ZoneSettings(dkim=DkimMode.OFF, header_add=("X: 1",))
STORED = {
    "usual": b"A: b\r\nC: d\r\n\r\nbody\r\n", "no body": b"A: b\r\n\r\n", "no empty line": b"A: b\r\n",
    "no line end": b"A: b", "empty lines around the body": b"A: b\r\n\r\n\r\n x \r\n\r\n",
    "no header": b"\r\nbody\r\n", "nothing": b"", "a body of one octet": b"A: b\r\n\r\nx",
}  # fmt: skip


@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
async def test_new_fields_stand_before_whatever_is_stored_however_it_is_cut(stored: bytes) -> None:
    for piece_size in range(1, len(stored) + 2):
        setting = Setting(Bodies(stored, piece_size=piece_size))
        assert await sent(await setting.render(ADDS)) == b"X: 1\r\n" + stored
        assert setting.bodies.open_now == 0


async def test_of_a_header_that_is_one_piece_and_goes_nothing_is_left() -> None:
    setting = Setting(Bodies(STORED["usual"], piece_size=12))
    zone = ZoneSettings(dkim=DkimMode.OFF, header_remove=("A", "C"))
    assert await sent(await setting.render(zone)) == b"\r\nbody\r\n"


async def test_nothing_stays_open_where_the_store_fails_or_somebody_stops_in_the_middle() -> None:
    setting = Setting(Bodies(TEXT, piece_size=len(HEADER) + 2))
    rendered = await setting.render(ADDS)
    sending = rendered.read_body(rendered.message.id)
    await anext(sending)
    assert setting.bodies.open_now == 1
    await sending.aclose()
    setting.bodies.fails_after = 1
    with pytest.raises(StoreError):
        await sent(rendered)
    broken = Setting(Bodies(TEXT, fails_after=0))
    with pytest.raises(StoreError):
        await broken.render(ADDS)
    assert setting.bodies.open_now == broken.bodies.open_now == 0


@pytest.mark.parametrize("piece_size", [1, 7, 100, 65536])
@pytest.mark.parametrize("hashed", [True, False])
async def test_the_signature_is_over_what_is_sent(piece_size: int, hashed: bool) -> None:
    setting = Setting(Bodies(TEXT, piece_size=piece_size), keys=KEYS)
    message = setting.message
    if hashed:
        relaxed = RelaxedBody()
        relaxed.feed(b"Hello.\r\n")
        message = structs.replace(message, body_hash=relaxed.digest())
    body = await sent(await setting.render(replace(RULES, dkim=DkimMode.SIGN), message))
    assert body.startswith(b"DKIM-Signature: v=1; a=rsa-sha256;")
    assert body.endswith(b"=\r\n" + RULED + b"\r\nHello.\r\n")
    assert verified(body, PUBLISHED) == [True, True]
    assert setting.bodies.open_now == 0
    assert setting.bodies.reads == (2 if hashed else 3)


async def test_existing_signatures_stay() -> None:
    text = b"DKIM-Signature: v=1; d=other.example\r\n" + TEXT
    setting = Setting(Bodies(text), keys=KEYS)
    body = await sent(await setting.render(SIGNS))
    assert body.endswith(text)
    assert body.count(b"DKIM-Signature:") == 3


async def test_the_sender_is_rewritten_and_nothing_else() -> None:
    setting = Setting(srs=SRS)
    zone = ZoneSettings(srs=True, dkim=DkimMode.OFF)
    rendered = await setting.render(zone)
    assert rendered.message.envelope.sender == SRS.forward(
        setting.message.envelope.sender, setting.clock.now()
    )
    assert await sent(rendered) == TEXT
    null = make_message(TEXT, sender="")
    assert (await Setting(srs=SRS).render(zone, null)).message.envelope is null.envelope


async def test_a_sender_too_long_for_srs_stays_and_the_log_says_so() -> None:
    setting = Setting(srs=SRS)
    message = make_message(TEXT, sender=f"{'a' * 240}@example.org")
    rendered = await setting.render(ZoneSettings(srs=True), message)
    assert rendered.message.envelope.sender == message.envelope.sender
    [(event, fields)] = setting.log.events
    assert (event, fields["reason"]) == ("sent-unchanged", "srs: too long")


@pytest.mark.parametrize(
    ("line", "plain"), [("X-Dot: .", True), (".X: 1", False), ("X: " + "w " * 40 + ".", True)]
)
async def test_lines_stay_plain_only_if_the_new_ones_are(line: str, plain: bool) -> None:
    setting = Setting()
    zone = ZoneSettings(dkim=DkimMode.OFF, header_add=(line,))
    for known in (True, False):
        message = structs.replace(setting.message, plain_lines=known)
        rendered = await setting.renderer.render(replace(zone), message)
        assert rendered.message.plain_lines is (plain and known)


NO_KEY = [
    (b"From: a@other.example\r\n", "no key for other.example"),
    (b"Subject: x\r\n", "From contains no author address"),
    (b"From: a@example.com\r\nFrom: b@example.com\r\n", "From contains no author address"),
]


@pytest.mark.parametrize(("header", "why"), NO_KEY)
async def test_without_a_key_it_goes_unsigned_or_waits(header: bytes, why: str) -> None:
    setting = Setting(Bodies(header + b"\r\nx\r\n"), keys=KEYS)
    message = setting.message
    assert await sent(await setting.render(SIGNS, message)) == header + b"\r\nx\r\n"
    assert setting.log.events == []
    required = ZoneSettings(dkim=DkimMode.REQUIRED)
    for _ in range(2):
        with pytest.raises(RenderError) as refused:
            await setting.render(required, message)
        assert str(refused.value.reply) == f"451 4.3.5 zone default requires a DKIM signature: {why}"
    assert setting.log.events == [("dkim-missing", {"zone": "default", "reason": why})]
    assert setting.bodies.open_now == 0


async def test_a_header_without_an_end_is_sent_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_HEADER", 1000)
    monkeypatch.setattr(rendering, "OUR_FIELDS", 0)
    text = b"From: ann@example.com\r\n" + b"a line that is no field\r\n" * 1000
    setting = Setting(Bodies(text, piece_size=500), keys=KEYS)
    zone = replace(RULES, dkim=DkimMode.SIGN)
    assert await sent(await setting.render(zone)) == text
    assert setting.log.events == [
        ("sent-unchanged", {"id": setting.message.id, "zone": "default", "reason": "the header has no end"})
    ]
    with pytest.raises(RenderError, match="the header has no end"):
        await setting.render(replace(zone, dkim=DkimMode.REQUIRED))
    assert setting.bodies.open_now == 0


class CountingKeys:
    """Counts how often somebody signs."""

    def __init__(self) -> None:
        self.asked = 0

    def for_author(self, domain: str, now: float) -> tuple[DkimKey, ...]:
        self.asked += 1
        return KEYS.for_author(domain, now)


async def test_the_next_connection_gets_the_same_signature() -> None:
    keys = CountingKeys()
    setting = Setting(keys=keys)
    rendered = await setting.render(SIGNS)
    first = await sent(rendered)
    assert await sent(rendered) == first
    setting.clock.advance(100)
    assert await sent(await setting.render(SIGNS)) == first
    assert keys.asked == 1
    setting.clock.advance(rendering.KEEP_FOR)
    later = await sent(await setting.render(SIGNS))
    assert later != first, "it has another time"
    assert keys.asked == 2


async def test_each_zone_has_its_own() -> None:
    setting = Setting(keys=KEYS)
    other = ZoneSettings(name="other", header_add=("X: 1",))
    assert await sent(await setting.render(SIGNS)) != await sent(await setting.render(other))


async def test_new_settings_forget_what_was_kept() -> None:
    keys = CountingKeys()
    setting = Setting(keys=keys)
    await setting.render(SIGNS)
    changed = ZoneSettings(header_add=("X: 1",))
    assert (await sent(await setting.render(changed))).count(b"X: 1\r\n") == 1
    assert b"X: 1\r\n" not in await sent(await setting.render(SIGNS)), "a batch of before the reload"
    setting.renderer.configure(keys=None, srs=None, max_header_size=0)
    assert await sent(await setting.render(SIGNS)) == TEXT


async def test_many_at_once_are_signed_once() -> None:
    keys = CountingKeys()
    setting = Setting(Bodies(TEXT, piece_size=10), keys=keys)
    rendered = await asyncio.gather(*(setting.render(SIGNS) for _ in range(50)))
    bodies = {await sent(each) for each in rendered}
    assert len(bodies) == 1
    assert keys.asked == 1
    assert setting.bodies.open_now == 0


@dataclass
class Gate:
    """A store that reads when it is told to, or fails."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    failures: int = 0
    reads: int = 0

    async def read(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
        self.reads += 1
        await self.opened.wait()
        if self.reads <= self.failures:
            raise StoreError("not now")
        yield TEXT


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_when_the_one_that_renders_ends_another_does_it(how: str) -> None:
    gate = Gate(failures=1 if how == "fails" else 0)
    setting = Setting()
    renderer = Renderer(read_body=gate.read, events=setting.events, clock=setting.clock)
    renderer.configure(keys=KEYS, srs=None, max_header_size=0)
    tasks = [asyncio.create_task(renderer.render(SIGNS, make_message(TEXT))) for _ in range(3)]
    await asyncio.sleep(0)
    if how == "is cancelled":
        tasks[0].cancel()
    gate.opened.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], StoreError if how == "fails" else asyncio.CancelledError)
    assert all(isinstance(result, RenderedMessage) for result in results[1:])


def numbered(number: int) -> Message:
    message = make_message(TEXT)
    return structs.replace(
        message, envelope=structs.replace(message.envelope, id=MessageId(f"{number:016x}"))
    )


@pytest.mark.parametrize(("entries", "octets"), [(3, 10**9), (10**9, 3 * 800)])
async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch, entries: int, octets: int) -> None:
    monkeypatch.setattr(rendering, "MAX_KEPT", entries)
    monkeypatch.setattr(rendering, "MAX_KEPT_OCTETS", octets)
    keys = CountingKeys()
    setting = Setting(keys=keys)
    for number in range(5):
        await sent(await setting.render(SIGNS, numbered(number)))
    kept = 5
    while kept and keys.asked == 5:
        kept -= 1
        await sent(await setting.render(SIGNS, numbered(kept)))
    assert 1 <= 4 - kept <= 3


async def test_a_signature_that_cannot_be_made_is_counted_and_raised() -> None:
    class Broken:
        def for_author(self, domain: str, now: float) -> tuple[DkimKey, ...]:
            def sign(digest: bytes) -> bytes:
                raise ZeroDivisionError

            return tuple(replace(key, sign=sign) for key in KEYS.for_author(domain, now))

    setting = Setting(keys=Broken())
    with pytest.raises(ZeroDivisionError):
        await setting.render(SIGNS)
    await Setting(keys=KEYS).render(SIGNS)
    text = setting.events.metrics.exposition().decode()
    assert 'zonerelay_dkim_signatures_total{result="failed"} 1.0' in text
    assert setting.bodies.open_now == 0


async def test_other_work_runs_between_the_pieces_of_a_conversion() -> None:
    bodies = Bodies(HEADER + b"\r\n" + b"\xff\r\n" * 500, piece_size=100)
    work = rendering.conversion_of(MessageId("0"), bodies.read, seven_bit=True, signed_too=False)
    assert await loop_turns(work) > len(bodies.body) // bodies.piece_size
