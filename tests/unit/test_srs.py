"""Senders there and back; the table of old addresses is what postsrsd 1.10 (libsrs2) made on that day."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zonerelay.config.settings import DAY, SrsSettings
from zonerelay.message.srs import Srs, SrsError, SrsFault
from zonerelay.model.address import NULL_SENDER, Mailbox
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
def test_reports_are_taken_for_a_time_that_never_comes_again(
    sender: str, days: int, fault: SrsFault | None
) -> None:
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
