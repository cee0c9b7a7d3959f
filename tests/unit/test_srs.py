"""Senders there and back; the table of old addresses is what postsrsd 1.10 (libsrs2) made on that day."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.inbound import listening
from zonerelay.cli.setup.config import try_out
from zonerelay.config.load import ConfigError, load_text
from zonerelay.config.problems import Report
from zonerelay.config.settings import DAY, ListenerSettings, Settings, SrsSettings
from zonerelay.config.tables.rewrite import srs_secrets
from zonerelay.inbound.limits import clients
from zonerelay.inbound.limits.clients import SrsRecipients, TooManyGuessesError
from zonerelay.inbound.state.context import SharedContext
from zonerelay.message.srs import Srs, SrsError, SrsFault
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import NULL_SENDER, Mailbox
from zonerelay.model.reply import Reply
from zonerelay.smtp.server.paths import CommandError, reverse_path

SECRET = "tops3cr3t-of-sixteen"
NOW = 1_795_220_219.0
OURS = "srs.example.net"
SETTINGS = SrsSettings(domain=OURS)
SRS = Srs(SETTINGS, [SECRET])
OLD = Srs(SrsSettings(domain=OURS, accept_legacy=True), [SECRET])

POSTSRSD = [
    ("ann@first.example", "SRS0=Xg8L=JK=first.example=ann"),
    ("Ann.Bo=b+c@First.Example", "SRS0=k9Cc=JK=First.Example=Ann.Bo=b+c"),
    ("SRS0=aaaa=bb=c.d=e@other.example", "SRS1=ahdb=other.example==aaaa=bb=c.d=e"),
    ("SRS0+aaaa=bb=c.d=e@other.example", "SRS1=Jz7n=other.example=+aaaa=bb=c.d=e"),
    ("srs0-Xy+z=aB=c.d=e@Other.example", "SRS1=22op=Other.example=-Xy+z=aB=c.d=e"),
    ("SRS1=abcd=c.d==x=y=z=w@other.example", "SRS1=y/jX=c.d==x=y=z=w"),
]


# The sender that each of them stands for, in our form: our hash is twice as long, and SRS1 has a day.
FORMS = [
    (r"SRS0=([A-Z2-7]{8})=JK=first\.example=ann", "ann@first.example"),
    (r"SRS0=([A-Z2-7]{8})=JK=First\.Example=Ann\.Bo=b\+c", "Ann.Bo=b+c@First.Example"),
    (r"SRS1=JK([A-Z2-7]{8})=other\.example==aaaa=bb=c\.d=e", "SRS0=aaaa=bb=c.d=e@other.example"),
    (r"SRS1=JK([A-Z2-7]{8})=other\.example=\+aaaa=bb=c\.d=e", "SRS0+aaaa=bb=c.d=e@other.example"),
    (r"SRS1=JK([A-Z2-7]{8})=Other\.example=-Xy\+z=aB=c\.d=e", "srs0-Xy+z=aB=c.d=e@Other.example"),
    (r"SRS1=JK([A-Z2-7]{8})=c\.d==x=y=z=w", "SRS1=abcd=c.d==x=y=z=w@other.example"),
]


@pytest.mark.parametrize(("pattern", "sender"), FORMS, ids=[row[1] for row in FORMS])
def test_senders_become_addresses_of_ours(pattern: str, sender: str) -> None:
    local, _, domain = SRS.forward(Mailbox(sender), NOW).rpartition("@")
    assert domain == OURS
    assert re.fullmatch(pattern, local)
    for case in (local, local.lower(), local.upper()):  # servers change it
        back = SRS.reverse(Mailbox(f"{case}@{OURS}"), NOW)
        assert back is not None
        assert back.lower() in (sender.lower(), "srs0=x=y=z=w@c.d")


def test_parts_are_joined_with_a_seam() -> None:
    """In the old form a hash for one of these is right for the other."""
    one, other = Mailbox("mbob@victim.co"), Mailbox("bob@victim.com")
    made = SRS.forward(one, NOW)
    moved = made.replace("=victim.co=mbob@", "=victim.com=bob@")
    assert moved != made
    with pytest.raises(SrsError) as refused:
        SRS.reverse(Mailbox(moved), NOW)
    assert refused.value.kind is SrsFault.WRONG_HASH
    assert SRS.reverse(SRS.forward(other, NOW), NOW) == other


def test_a_hash_of_one_kind_is_no_hash_of_the_other() -> None:
    """SRS1 of a chain whose parts are those of an SRS0."""
    made = SRS.forward(Mailbox("=x=y=z=u@first.example"), NOW)
    found = re.fullmatch(r"SRS0=(\w+)=(\w\w)=first.example==x=y=z=u@.*", made)
    assert found
    with pytest.raises(SrsError):
        SRS.reverse(Mailbox(f"SRS1={found[2]}{found[1]}=first.example==x=y=z=u@{OURS}"), NOW)


@pytest.mark.parametrize("local", [row[1] for row in POSTSRSD])
def test_the_old_form_is_read_on_request(local: str) -> None:
    address = Mailbox(f"{local}@{OURS}")
    wanted = OLD.reverse(address, NOW)
    assert wanted is not None
    with pytest.raises(SrsError) as refused:
        SRS.reverse(address, NOW)
    assert refused.value.kind is SrsFault.OLD_FORM
    assert SRS.is_in_old_form(address)
    assert not SRS.is_in_old_form(SRS.forward(wanted, NOW))


BACK = [
    ("SRS0=Xg8L=JK=first.example=ann", "ann@first.example", "as it was made"),
    ("srs0=xg8l=jk=first.example=ann", "ann@first.example", "a server has changed the case"),
    ("SRS0=XG8L=JK=FIRST.EXAMPLE=ANN", "ANN@FIRST.EXAMPLE", "the other way"),
    ("SRS0+Xg8L=JK=first.example=ann", "ann@first.example", "another first separator"),
    ("SRS1=ahdb=other.example==aaaa=bb=c.d=e", "SRS0=aaaa=bb=c.d=e@other.example", "to the first forwarder"),
    ("SRS1=Jz7n=other.example=+aaaa=bb=c.d=e", "SRS0+aaaa=bb=c.d=e@other.example", "with its separator"),
]


@pytest.mark.parametrize(("local", "expected", "reason"), BACK, ids=[row[2] for row in BACK])
def test_and_back_from_the_old_form(local: str, expected: str, reason: str) -> None:
    assert OLD.reverse(Mailbox(f"{local}@{OURS.upper()}"), NOW) == expected, reason


@pytest.mark.parametrize(
    "sender",
    [
        '"a b"@x.example',
        '""@x.example',
        r'"a\"b\\c"@x.example',
        ".a..b.@x.example",
        f"{'a' * 150}@x.example",
        "a@[192.0.2.1]",
        "a@[IPv6:2001:db8::1]",
        "ü.ä@bücher.example",
        "srs0=foo@x.example",
        "SRS1=foo@x.example",
        "=@x.example",
        "a=b==c=@x.example",
        "{}|~/*'`?^!#$&@x.example",
    ],
)
def test_every_kind_of_sender_comes_back(sender: str) -> None:
    forwarded = SRS.forward(Mailbox(sender), NOW)
    assert forwarded.endswith(f"@{OURS}")
    assert reverse_path(f"<{forwarded}>") == (forwarded, "")
    assert SRS.reverse(forwarded, NOW) == sender


def test_quotes_that_nothing_needs_are_not_kept() -> None:
    assert SRS.reverse(SRS.forward(Mailbox('"ann"@x.example'), NOW), NOW) == "ann@x.example"


LOCAL = Srs(SrsSettings(domain=OURS, local_domains=("example.com", "*.example.org")), [SECRET])


@pytest.mark.parametrize(
    ("sender", "stays"),
    [
        (NULL_SENDER, True),
        (f"bounces@{OURS}", True),
        ("a@Example.Com", True),
        ("a@sub.example.com", False),
        ("a@deep.sub.example.org", True),
        ("a@example.org", False),
        ("a@notexample.org", False),
        ("a@localhost", False),
    ],
)
def test_local_domains_and_the_null_sender_stay(sender: str, stays: bool) -> None:
    assert (LOCAL.forward(Mailbox(sender), NOW) == sender) is stays


@pytest.mark.parametrize(
    "address", ["ann@first.example", f"postmaster@{OURS}", f"srs@{OURS}", f"SRS0x@{OURS}", "postmaster", ""]
)
def test_what_is_not_rewritten_is_none_of_ours(address: str) -> None:
    assert SRS.reverse(Mailbox(address), NOW) is None


WRONG = [
    ("SRS0=Xg8M=JK=first.example=ann", SrsFault.WRONG_HASH, "another hash"),
    ("SRS0=Xg8=JK=first.example=ann", SrsFault.WRONG_HASH, "a part of the hash"),
    ("SRS0=Xg8L=JK=first.example=bob", SrsFault.WRONG_HASH, "another user"),
    ("SRS0=Xg8L=JL=first.example=ann", SrsFault.WRONG_HASH, "another day"),
    ("SRS1=ahdc=other.example==aaaa=bb=c.d=e", SrsFault.WRONG_HASH, "another hash of a chain"),
    ("SRS1=ahdb=evil.example==aaaa=bb=c.d=e", SrsFault.WRONG_HASH, "another forwarder"),
    ("SRS0=Xg8L=JK=first.example", SrsFault.MALFORMED, "no user"),
    ("SRS0==JK=first.example=ann", SrsFault.MALFORMED, "no hash"),
    ("SRS1=ahdb=other.example=aaaa", SrsFault.MALFORMED, "no first address"),
    ("SRS0=", SrsFault.MALFORMED, "nothing"),
    ("SRS0=Xg8Lü=JK=first.example=ann", SrsFault.WRONG_HASH, "a hash that is none"),
]


@pytest.mark.parametrize(("local", "fault", "reason"), WRONG, ids=[row[2] for row in WRONG])
def test_refused(local: str, fault: SrsFault, reason: str) -> None:
    with pytest.raises(SrsError) as refused:
        OLD.reverse(Mailbox(f"{local}@{OURS}"), NOW)
    assert refused.value.kind is fault, reason
    assert "first" not in str(refused.value)


@pytest.mark.parametrize("sender", ["ann@first.example", "SRS0=aaaa=bb=c.d=e@other.example"])
@pytest.mark.parametrize(
    ("days", "fault"),
    [
        (0, None),
        (21, None),
        (22, SrsFault.EXPIRED),
        (-1, None),
        (-2, SrsFault.WRONG_HASH),
        (1022, SrsFault.EXPIRED),
        (1023, SrsFault.WRONG_HASH),
        (1024, SrsFault.WRONG_HASH),
        (1025, SrsFault.WRONG_HASH),
    ],
)
def test_reports_are_taken_for_a_time_that_is_over(sender: str, days: int, fault: SrsFault | None) -> None:
    """Of the day only two digits are seen, which come again after 1,024 days; the hash knows all of it."""
    address = SRS.forward(Mailbox(sender), NOW)
    later = NOW + days * DAY
    if fault is None:
        assert SRS.reverse(address, later) == sender
        return
    with pytest.raises(SrsError) as refused:
        SRS.reverse(address, later)
    assert refused.value.kind is fault


def test_former_secrets_are_accepted_and_the_first_signs() -> None:
    address = SRS.forward(Mailbox("ann@first.example"), NOW)
    both = Srs(SETTINGS, ["another secret, longer", SECRET])
    assert both.reverse(address, NOW) == "ann@first.example"
    renewed = both.forward(Mailbox("ann@first.example"), NOW)
    assert renewed != address
    with pytest.raises(SrsError):
        SRS.reverse(renewed, NOW)


def test_longer_hashes_of_others_are_taken_and_checked_whole() -> None:
    assert OLD.reverse(Mailbox(f"SRS0=Xg8LVnQv=JK=first.example=ann@{OURS}"), NOW) == "ann@first.example"
    with pytest.raises(SrsError):
        OLD.reverse(Mailbox(f"SRS0=Xg8LVnQw=JK=first.example=ann@{OURS}"), NOW)


def test_there_must_be_a_secret() -> None:
    for secrets in ([], [""], [SECRET, ""]):
        with pytest.raises(ValueError, match="no secret"):
            Srs(SETTINGS, secrets)


def test_what_becomes_too_long_is_an_error() -> None:
    fits = Mailbox("a" * (255 - len(SRS.forward(Mailbox("a@x.example"), NOW))) + "@x.example")
    assert len(SRS.forward(fits, NOW)) == 254
    with pytest.raises(SrsError) as refused:
        SRS.forward(Mailbox(f"a{fits}"), NOW)
    assert refused.value.kind is SrsFault.TOO_LONG


LETTERS = st.text(st.sampled_from("aB0=+-_./ü \\\"'@SRs1"), min_size=1, max_size=20)


@settings(max_examples=300, deadline=None)
@given(local=LETTERS, quoted=st.booleans())
def test_whatever_can_be_sent_comes_back_the_same(local: str, quoted: bool) -> None:
    if quoted:
        local = '"' + local.replace("\\", "\\\\").replace('"', '\\"') + '"'
    try:
        sender, rest = reverse_path(f"<{local}@x.example>")
    except CommandError:
        return
    if rest:
        return
    back = SRS.reverse(SRS.forward(sender, NOW), NOW)
    assert back is not None
    assert back.replace('"', "").replace("\\", "") == sender.replace('"', "").replace("\\", "")


# [srs] in a configuration, and where the secrets come from


def test_a_zone_with_srs_and_all_it_needs_is_taken() -> None:
    text = (
        '[[zone]]\nsrs = true\n[srs]\ndomain = "SRS.example.com"\nsecret = "env:S"\nold_secrets = ["env:T"]'
    )
    assert load_text(text).srs.domain == "srs.example.com"


def test_the_secret_that_signs_is_first(tmp_path: Path) -> None:
    file = tmp_path / "old"
    file.write_text(f"{SECRET[::-1]}\n")
    settings = SrsSettings(domain="srs.example.com", secret="env:NEW", old_secrets=(str(file),))
    assert srs_secrets(settings, {"NEW": SECRET}) == (SECRET, SECRET[::-1])


def test_start_and_check_config_agree_on_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "short"
    file.write_text("too short")
    srs = SrsSettings(domain="srs.example.com", secret="env:MISSING", old_secrets=(str(file),))
    monkeypatch.delenv("MISSING", raising=False)
    report = Report({})
    try_out(Settings(hostname="relay.example.com", srs=srs), "relay.example.com", report)
    with pytest.raises(ConfigError) as refused:
        report.raise_problems()
    assert [str(problem) for problem in refused.value.problems] == [
        f"srs.old_secrets[0]: {file} has fewer than 16 characters (line 1)",
        "srs.secret: the environment variable MISSING is not set (line 1)",
    ]
    with pytest.raises(ValueError, match=r"^srs\.secret: the environment variable MISSING is not set$"):
        srs_secrets(srs, {})
    with pytest.raises(ValueError, match=r"^srs\.old_secrets\[0\]: .* fewer than 16 characters$") as short:
        srs_secrets(srs, {"MISSING": SECRET})
    assert "too short" not in str(short.value)


# Recipients


HERE = "srs.example"
TAKES_LEGACY = Srs(SrsSettings(domain=HERE, accept_legacy=True), ("0123456789abcdef",))
ANN = Mailbox("ann@first.example")
LEGACY = Mailbox(f"SRS0=6AcJ=G3=first.example=ann@{HERE}")
LEGACY_WRONG = Mailbox(f"SRS0=6AcK=G3=first.example=ann@{HERE}")


def guess(book: SrsRecipients, address: Mailbox, clock: ManualClock, client: str = "192.0.2.1") -> float:
    """How long the answer waits."""
    with pytest.raises(SrsError) as wrong:
        book.reverse(TAKES_LEGACY, address, client, clock)
    return wrong.value.delay


def test_each_wrong_hash_waits_longer_and_the_first_two_do_not() -> None:
    book, clock = SrsRecipients(), ManualClock()
    wrong = Mailbox(f"SRS0=AYRW2KZA=G3=first.example=ann@{HERE}")
    waits = [guess(book, wrong, clock) for _ in range(8)]
    assert waits == [0.0, 0.0, 1.0, 3.0, 7.0, 9.0, 9.0, 9.0]
    assert guess(book, wrong, clock, "192.0.2.2") == 0.0
    # 40 bits: no client is locked out for the sake of addresses that nobody guesses.
    for _ in range(200):
        guess(book, wrong, clock)
    assert book.reverse(TAKES_LEGACY, TAKES_LEGACY.forward(ANN, clock.now()), "192.0.2.1", clock) == ANN


def test_of_the_old_form_a_client_has_some_guesses_in_an_hour() -> None:
    book, clock = SrsRecipients(), ManualClock()
    for _ in range(clients.MAX_OLD):
        guess(book, LEGACY_WRONG, clock)
    for address in (LEGACY_WRONG, LEGACY):
        with pytest.raises(TooManyGuessesError):
            book.reverse(TAKES_LEGACY, address, "192.0.2.1", clock)
    assert book.reverse(TAKES_LEGACY, LEGACY, "192.0.2.2", clock) == ANN
    assert book.reverse(TAKES_LEGACY, TAKES_LEGACY.forward(ANN, clock.now()), "192.0.2.1", clock) == ANN
    assert book.reverse(TAKES_LEGACY, ANN, "192.0.2.1", clock) is None
    clock.advance(clients.HOUR)
    assert book.reverse(TAKES_LEGACY, LEGACY, "192.0.2.1", clock) == ANN


def test_all_clients_together_have_few_more() -> None:
    book, clock = SrsRecipients(), ManualClock()
    for number in range(clients.MAX_OLD_IN_ALL):
        guess(book, LEGACY_WRONG, clock, f"192.0.2.{number}")
    with pytest.raises(TooManyGuessesError):
        book.reverse(TAKES_LEGACY, LEGACY, "198.51.100.1", clock)
    assert book.reverse(TAKES_LEGACY, TAKES_LEGACY.forward(ANN, clock.now()), "198.51.100.1", clock) == ANN


def test_where_the_old_form_is_not_read_nothing_is_answered_and_nothing_counts() -> None:
    book, clock = SrsRecipients(), ManualClock()
    srs = Srs(SrsSettings(domain=HERE), ("0123456789abcdef",))
    for address in (LEGACY, LEGACY_WRONG):
        for _ in range(clients.MAX_OLD_IN_ALL + 1):
            with pytest.raises(SrsError, match="old form"):
                book.reverse(srs, address, "192.0.2.1", clock)
    assert book.reverse(TAKES_LEGACY, LEGACY, "192.0.2.1", clock) == ANN


def test_what_is_known_of_a_recipient_is_known_for_an_hour() -> None:
    book, now = SrsRecipients(), 5.0
    book.refused(ANN, Reply(550, "1.1", "no such user ann@first.example"), now)
    assert book.refusal(Mailbox("ann@FIRST.example"), now) == "550 5.1.1"
    assert book.refusal(Mailbox("bob@first.example"), now) == ""
    assert book.refusal(ANN, now + clients.REMEMBERED) == ""


@pytest.mark.parametrize(
    "reply", [Reply(550, "7.1", "spam"), Reply(550, "", "no"), Reply(552, "2.2", "full")]
)
def test_what_is_about_the_message_is_not_held_against_the_next_one(reply: Reply) -> None:
    book = SrsRecipients()
    book.refused(ANN, reply, 0.0)
    assert book.refusal(ANN, 1.0) == ""


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_REMEMBERED", 3)
    book = SrsRecipients()
    for number in range(5):
        book.refused(Mailbox(f"{number}@first.example"), Reply(550, "1.1", "no"), 0.0)
    known = [number for number in range(5) if book.refusal(Mailbox(f"{number}@first.example"), 1.0)]
    assert known == [2, 3, 4]


async def test_a_client_hears_it_later_and_in_the_old_form_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "AT_ONCE", 0.8)
    monkeypatch.setattr(clients, "MAX_OLD", 2)
    settings = ListenerSettings(address="127.0.0.1:0", allow_networks=())
    shared = SharedContext(srs=TAKES_LEGACY, srs_recipients=SrsRecipients())
    async with listening(settings, shared=shared) as house, await house.connect() as talk:
        began = time.monotonic()
        wrong = b"RCPT TO:<%b>\r\n" % LEGACY_WRONG.encode()
        right = b"RCPT TO:<%b>\r\n" % TAKES_LEGACY.forward(ANN, house.clock.now()).encode()
        talk.send(b"EHLO x\r\n")
        await talk.reply()
        talk.send(b"MAIL FROM:<>\r\n" + wrong + wrong + wrong + right)
        codes = [(await talk.line())[:9] for _ in range(5)]
        assert codes == [b"250 2.1.0", b"550 5.1.1", b"550 5.1.1", b"451 4.7.0", b"250 2.1.5"]
        assert time.monotonic() - began >= 0.2
        assert house.log.reasons() == ["srs", "srs", "srs-guesses"]
