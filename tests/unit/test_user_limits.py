"""Guard rails: their file, their windows, their patterns. Only time is the test's own."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.credentials import file_of, user
from zonerelay.cli.spool import home_files
from zonerelay.config import user_limits
from zonerelay.config.credentials.file import CredentialsError, change_user
from zonerelay.config.settings import Settings, SpoolSettings
from zonerelay.config.user_limits import NONE, UserLimits, UserMode, changed
from zonerelay.inbound.access.guard import Allowance
from zonerelay.inbound.cleanup.intake import deliveries_of
from zonerelay.inbound.limits.quotas import LENGTHS, QuotaLevel, Quotas, Usage
from zonerelay.inbound.limits.usage_file import UsageFile
from zonerelay.inbound.state.transaction import NO_EDITS, MailTransaction
from zonerelay.limits.values import AuthorityError
from zonerelay.model.address import Mailbox
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import Origin, Recipient
from zonerelay.model.message_id import MessageId
from zonerelay.routing.zones.zones import ZoneChoice
from zonerelay.smtp.server.params import MailCommand
from zonerelay.store.check import Findings

EVERY = (
    *(
        "disabled=true",
        "expires=2027-01-01T12:00:00Z",
        "networks=192.0.2.0/24,::1",
        "recipients=*.x.example, a@y.example",
    ),
    *("zones=bulk", "max_message_size=5MB", "mode=copy", "mailbox=qa@example.org", "idempotency=message-id"),
    *(f"{what}_per_{window}=7" for what in ("messages", "recipients") for window in user_limits.WINDOWS),
    *(f"octets_per_{window}=7KB" for window in user_limits.WINDOWS),
)


def test_every_guard_rail_comes_back_from_the_file() -> None:
    there = changed(NONE, list(EVERY))
    assert [key for key in user_limits.OPTIONS if getattr(there, key) == getattr(NONE, key)] == [
        "second_hash"
    ]
    text = user_limits.UserLimitsFile("credentials.rails.toml").changed("a@x.example", there)
    assert user_limits.parse(text, "file").own("a@x.example") == there
    text = user_limits.parse(text, "file").changed('a"b\\@x.example', there)
    found = user_limits.parse(text, "file")
    assert [found.own(each) for each in found.users()] == [there, there]
    assert found.lines, "a name with an escape is read as a whole"
    assert user_limits.parse(found.changed("a@x.example", NONE), "file").users() == ['a"b\\@x.example']
    back = [f"{each.partition('=')[0]}=" for each in EVERY]
    assert changed(there, back) == NONE


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("mod=copy", '"mod" is not a key of a user; did you mean mode?'),
        ("second_hash=x", "is not a key of a user"),
        ("mode", "mode: write mode=VALUE"),
        ("mode=redirect", 'mode = "redirect" requires a mailbox'),
        ("mode=listed", 'mode = "listed" requires recipients'),
        ("mailbox=@example.org", "is not an address"),
        ("expires=soon", "expected a date"),
        ("messages_per_day=-1", "must be from 1"),
        ("networks=10.0.0.1/8", "write the network"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(assignment: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        changed(NONE, [assignment])


WRONG = '[user.shop]\nmods = "copy"\n[user.other]\ndisabled = true\n'


@pytest.mark.parametrize("whole", [True, False], ids=["a file that is read as a whole", "by user"])
def test_a_wrong_table_is_its_users_alone_and_no_change_loses_it(tmp_path: Path, *, whole: bool) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text(file_of(user("shop"), user("other")))
    file = user_limits.file_beside(credentials)
    file.write_text(WRONG + ('[user."a\\\\b"]\ndisabled = true\n' if whole else ""))
    found = user_limits.read(file)
    assert found.own("other") == UserLimits(disabled=True)
    with pytest.raises(CredentialsError, match=r"did you mean mode\? \(line 2\)"):
        found.of("shop")

    def change(name: str) -> None:
        beside = user_limits.change_beside(credentials, name, lambda _, there: changed(there, ["zones=bulk"]))
        change_user(credentials, name, lambda there: there, beside)

    before = file.read_text()
    for name in ("shop", "other") if whole else ("shop",):
        with pytest.raises(CredentialsError, match="did you mean mode"):
            change(name)
    assert file.read_text() == before
    if not whole:
        change("other")
        assert file.read_text().startswith(WRONG.partition("[user.other")[0])
        assert user_limits.read(file).own("other").zones == ("bulk",)
        change_user(credentials, "shop", lambda _: None, user_limits.change_beside(credentials, "shop"))
        assert user_limits.read(file).users() == ["other"]


def test_a_file_without_tables_of_users_is_refused() -> None:
    with pytest.raises(CredentialsError, match="is not valid TOML"):
        user_limits.parse("[user.shop", "file")
    for text in ("x = 1", "user = 1", "[[user]]", "x = 1\n[user.shop]\n"):
        with pytest.raises(CredentialsError, match="expected only tables such as"):
            user_limits.parse(text, "file")
    for text in ("[user.a]\n[user.a]\n", "[user.a]\n[user.'a']\n"):
        with pytest.raises(CredentialsError, match="is not valid TOML"):
            user_limits.parse(text, "file")


def test_the_default_holds_for_what_a_user_s_own_table_does_not_say(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text(file_of(user("shop"), user("other")))
    file = user_limits.file_beside(credentials)
    user_limits.change_default(
        credentials, ["recipients_per_day=5000", "networks=192.0.2.0/24", "mode=capture"]
    )

    def change(*assignments: str) -> UserLimits:
        beside = user_limits.change_beside(
            credentials, "shop", lambda _, there: changed(there, list(assignments))
        )
        change_user(credentials, "shop", lambda there: there, beside)
        found = user_limits.read(file).of("shop")
        assert found is not None
        return found

    default = user_limits.read(file).default
    assert user_limits.read(file).of("other") == default
    own = change("recipients_per_day=9", "mode=deliver", "networks=")
    assert (own.recipients_per_day, own.mode, own.networks) == (9, "deliver", default.networks)
    own = change("recipients_per_day=0")
    assert (own.recipients_per_day, own.mode, own.networks) == (0, "deliver", default.networks)
    assert change("recipients_per_day=", "mode=") == default
    user_limits.change_default(credentials, ["networks="])
    assert user_limits.read(file).of("shop") == UserLimits(recipients_per_day=5000, mode=UserMode.CAPTURE)
    with pytest.raises(ValueError, match="requires a mailbox that receives the mail"):
        user_limits.change_default(credentials, ["mode=copy"])
    file.write_text('[default]\nmod = "copy"\n')
    with pytest.raises(CredentialsError, match=r"did you mean mode\? \(line 2\)"):
        user_limits.read(file)


def test_a_new_user_has_no_guard_rails_of_an_older_one(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text(file_of(user("other")))
    file = user_limits.file_beside(credentials)
    file.write_text("[user.shop]\ndisabled = true\n")
    change_user(credentials, "shop", lambda _: user("shop"), user_limits.change_beside(credentials, "shop"))
    assert user_limits.read(file).users() == []


def test_recipients_and_captured_mail() -> None:
    deliver = Allowance("x", changed(NONE, ["recipients=*.x.example,a@y.example"]))
    listed = Allowance("x", changed(deliver.rails, ["mode=listed"]))
    for address, is_listed in (("A@y.example", True), ("b@y.example", False), ("z@m.X.example", True)):
        assert (deliver.rcpt_refusal(Mailbox(address), 0) is None) == is_listed
        assert not deliver.is_captured(Mailbox(address))
        assert listed.rcpt_refusal(Mailbox(address), 0) is None
        assert listed.is_captured(Mailbox(address)) != is_listed


Steps = st.lists(st.tuples(st.floats(0, 4000), st.integers(1, 4)), max_size=60)


@given(steps=Steps, most=st.integers(1, 12), window=st.sampled_from(user_limits.WINDOWS))
def test_no_window_ever_has_more_than_its_quota(
    steps: list[tuple[float, int]], most: int, window: str
) -> None:
    quota = changed(NONE, [f"recipients_per_{window}={most}"])
    length, slots = LENGTHS[window]
    usage, now = Usage(None, 1e9), 1e9
    taken: list[tuple[float, int]] = []
    for pause, count in steps:
        now += pause
        usage = Usage(usage.encode(), now)
        full = usage.full(quota, (1, count, 1))
        if full is None:
            usage.add((1, count, 1))
            taken.append((now, count))
        elif count <= most:
            later = Usage(usage.encode(), now + full.seconds)
            assert later.full(quota, (1, count, 1)) is None, "there is room when it says"
        for at, _ in taken:
            assert sum(each for when, each in taken if at <= when < at + length) <= most
    old = [count for when, count in taken if when > now - length - length / slots]
    assert next(usage.levels(quota)).used <= sum(old)


def test_a_message_that_never_fits_and_a_clock_that_is_set_back() -> None:
    quota = changed(NONE, ["octets_per_day=1KB", "messages_per_hour=1"])
    usage = Usage(None, 1e9)
    full = usage.full(quota, (1, 1, 2000))
    assert full is not None
    assert math.isinf(full.seconds)
    usage.add((1, 1, 10))
    assert usage.full(quota, (1, 1, 10)) is not None
    assert Usage(usage.encode(), 1e9 - 7 * 86400).full(quota, (1, 1, 10)) is None


async def test_several_count_in_one_file_exactly_and_warn_once(tmp_path: Path) -> None:
    clock = ManualClock()
    quota = changed(NONE, ["messages_per_hour=50"])
    near: list[tuple[str, QuotaLevel]] = []

    def quotas() -> Quotas:
        return Quotas(lambda: UsageFile(tmp_path, clock), clock, lambda *said: near.append(said))

    workers = [quotas() for _ in range(3)]
    answers = await asyncio.gather(*(workers[each % 3].take("shop", quota, (1, 1, 10)) for each in range(80)))
    assert answers.count(None) == 50
    assert near == [("shop", QuotaLevel("messages_per_hour", 40, 50))]
    await workers[0].give_back("shop", quota, (1, 1, 10))
    for each in workers:
        await each.close()
    again = quotas()
    assert [level.used for level in (await again.usage("shop")).levels(quota)] == [49]
    assert await again.take("other", quota, (1, 1, 10)) is None
    await again.close()


async def test_a_file_that_cannot_be_read_is_no_room(tmp_path: Path) -> None:
    (tmp_path / "usage").mkdir()
    (tmp_path / "usage" / "usage.db").write_text("no database" * 100)
    quotas = Quotas(lambda: UsageFile(tmp_path, ManualClock()), ManualClock(), lambda *_: None)
    with pytest.raises(AuthorityError, match="it is damaged; move it away"):
        await quotas.usage("shop")
    await quotas.close()


def test_captured_mail_goes_to_the_zone_that_captures_or_is_held() -> None:
    transaction = MailTransaction(MailCommand(sender=Mailbox("a@example.org")), release=0.0, edits=NO_EDITS)
    transaction.allowance = Allowance(
        "x", changed(NONE, ["mode=listed", "recipients=y.example", "zones=default"])
    )
    for name in ("a@y.example", "b@z.example"):
        transaction.recipients[name] = Recipient(address=Mailbox(name))
    envelope = transaction.envelope(
        MessageId("1" * 16), 1.0, Origin(client_address="", helo="", protocol="SMTP")
    )

    def of(capture_zone: str) -> list[tuple[str, bool]]:
        found, _ = deliveries_of(
            envelope, transaction, lambda _: ZoneChoice("default", ""), None, capture_zone
        )
        assert transaction.allowance is not None
        assert transaction.allowance.zone_refusal(found) is None
        return [(each.zone, each.held) for each in found]

    assert of("") == [("default", False), ("default", True)]
    assert of("kept") == [("default", False), ("kept", False)]


async def test_usage_is_in_backups_and_looked_at_by_a_check(tmp_path: Path) -> None:
    settings = Settings(spool=SpoolSettings(path=tmp_path / "home" / "spool"))
    quota, clock = changed(NONE, ["messages_per_hour=50"]), ManualClock()
    quotas = Quotas(lambda: UsageFile(tmp_path / "home", clock), clock, lambda *_: None)
    await quotas.take("shop", quota, (1, 1, 10))
    home_files.save(settings, tmp_path / "backup")
    await quotas.close()
    (tmp_path / "home" / "usage" / "usage.db").unlink()
    home_files.restore(settings, tmp_path / "backup")
    again = Quotas(lambda: UsageFile(tmp_path / "home", clock), clock, lambda *_: None)
    assert [level.used for level in (await again.usage("shop")).levels(quota)] == [1]
    await again.close()
    findings = Findings()
    home_files.check(settings, findings)
    assert findings.kept == []
    (tmp_path / "home" / "usage" / "usage.db").write_text("no database" * 100)
    home_files.check(settings, findings)
    assert len(findings.kept) == 1
