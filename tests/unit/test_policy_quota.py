"""The quota policy: exact limits, in bounded memory, from a file that may change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.inbound.policy import ClientInfo, PolicyContext, Rcpt
from zonerelay.inbound.policy.loading import load_policy
from zonerelay.model.clock import ManualClock
from zonerelay.policies import quota
from zonerelay.policies.quota import DAY, HOUR, SLOTS, Limits, Quota, Window, parse_limits

LIMITS = """
[default]
recipients_per_hour = 3
recipients_per_day = 5
[user."app1"]
recipients_per_hour = 10
[user.free]
recipients_per_hour = 0
recipients_per_day = 0
"""


class Bed:
    def __init__(self, path: Path, text: str = LIMITS) -> None:
        self.path = path / "quota.toml"
        self.path.write_text(text)
        self.clock = ManualClock()
        context = PolicyContext(file=self.path, clock=self.clock)
        policy = load_policy("zonerelay.policies.quota:Quota", context)
        assert isinstance(policy, Quota)
        self.policy = policy

    async def ask(self, user: str = "", address: str = "192.0.2.1") -> str:
        """`""`, or the refusal."""
        client = ClientInfo(address=address, user=user)
        event = Rcpt(client=client, sender="a@example.org", recipient="b@example.com")
        decision = await self.policy.rcpt(event)
        return str(decision.reply) if decision is not None else ""

    async def accepted(self, user: str = "", address: str = "192.0.2.1", *, most: int = 100) -> int:
        """How many recipients pass until one is refused."""
        for count in range(most):
            if await self.ask(user, address):
                return count
        return most


async def test_limits_per_hour_and_day_slide(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    assert await bed.accepted() == 3
    assert await bed.ask() == "452 4.7.1 Recipient limit reached, try again in 61 minutes"
    bed.clock.advance(HOUR + HOUR / SLOTS)
    assert await bed.accepted() == 2  # five in this day
    assert await bed.ask() == "452 4.7.1 Recipient limit reached, try again in 24 hours"
    bed.clock.advance((DAY - HOUR) * (1 + 1 / SLOTS))
    assert await bed.accepted() == 3


async def test_the_time_to_wait_is_true(tmp_path: Path) -> None:
    bed = Bed(tmp_path, "[default]\nrecipients_per_hour = 2\n")
    bed.clock.advance(17.0)
    assert await bed.ask() == ""
    bed.clock.advance(50 * 60)
    assert await bed.ask() == ""
    assert await bed.ask() == "452 4.7.1 Recipient limit reached, try again in 11 minutes"
    bed.clock.advance(11 * 60)
    assert await bed.accepted() == 1


async def test_users_have_limits_of_their_own_wherever_they_come_from(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    assert await bed.accepted("app1") == 5  # the day's limit is the default's
    assert await bed.accepted("app1", "192.0.2.99") == 0
    assert await bed.accepted("app2") == 3
    assert await bed.accepted("free") == 100
    assert await bed.accepted() == 3


async def test_clients_are_counted_by_address_and_ipv6_by_network(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    assert await bed.accepted(address="192.0.2.1") == 3
    assert await bed.accepted(address="192.0.2.2") == 3
    assert await bed.accepted(address="2001:db8::1") == 3
    assert await bed.accepted(address="2001:db8::ffff:1") == 0
    assert await bed.accepted(address="2001:db8:0:1::1") == 3
    assert await bed.accepted(address="") == 3  # the Unix socket
    assert await bed.accepted("192.0.2.1") == 3  # a user with such a name


async def test_a_refused_recipient_does_not_count(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    assert await bed.accepted() == 3
    for _ in range(100):
        assert await bed.ask()
    bed.clock.advance(HOUR + HOUR / SLOTS)
    assert await bed.accepted() == 2


async def test_a_changed_file_is_taken_up_and_a_wrong_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bed = Bed(tmp_path)
    assert await bed.accepted() == 3
    bed.path.write_text("[default]\nrecipients_per_hour = 4\n")
    assert await bed.ask()  # looked at once a second
    bed.clock.advance(1.0)
    assert await bed.accepted() == 1
    for text in ("[default", "[default]\nrecipients_per_minute = 1\n", "\xff"):
        bed.path.write_bytes(text.encode("latin-1"))
        bed.clock.advance(1.0)
        assert await bed.ask()
        bed.clock.advance(1.0)
        assert await bed.ask()
    assert caplog.text.count("the limits stay as they were") == 3
    bed.path.unlink()
    bed.clock.advance(1.0)
    assert await bed.ask()
    assert "No such file" in caplog.text
    bed.path.write_text("[default]\nrecipients_per_hour = 6\n")
    bed.clock.advance(1.0)
    assert await bed.accepted() == 2


async def test_memory_is_bounded_and_the_longest_silent_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "MAX_COUNTED", 10)
    bed = Bed(tmp_path)
    assert await bed.accepted("first") == 3
    for n in range(9):
        await bed.ask(f"user{n}")
    assert await bed.ask("first")  # still known, and known again
    await bed.ask("another")
    assert await bed.ask("first")
    assert len(bed.policy._counted) == 10
    for n in range(10):
        await bed.ask(f"more{n}")
    assert await bed.accepted("first") == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[defaults]\n", "no table defaults"),
        ("default = 1\n", "default is a table"),
        ("user = 1\n", "user is a table"),
        ("[user]\napp1 = 5\n", "user.app1 is a table"),
        ("[default]\nrecipients_per_hour = -1\n", "default.recipients_per_hour is a number"),
        ("[default]\nrecipients_per_hour = true\n", "default.recipients_per_hour is a number"),
        ('[user.a]\nrecipients_per_day = "5"\n', "user.a.recipients_per_day is a number"),
        ("[user.a]\nper_day = 5\n", "user.a.per_day is no limit"),
        ("=", "Invalid statement"),
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"cannot be used: .*quota\.toml: .*{words}"):
        Bed(tmp_path, text)


def test_a_missing_file_and_none_at_all_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="policy_file has to name the file"):
        Quota(PolicyContext())
    with pytest.raises(ValueError, match=r"cannot read .*none\.toml: No such file"):
        Quota(PolicyContext(file=tmp_path / "none.toml"))
    path = tmp_path / "big.toml"
    with path.open("wb") as file:
        os.ftruncate(file.fileno(), quota.MAX_FILE + 1)
    with pytest.raises(ValueError, match="longer than"):
        Quota(PolicyContext(file=path))


def test_an_empty_file_limits_nobody() -> None:
    assert parse_limits({}) == (Limits(), {})


@given(
    steps=st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=60),
    limit=st.integers(1, 5),
)
def test_no_window_ever_holds_more_than_its_limit(steps: list[tuple[float, bool]], limit: int) -> None:
    """Whatever the times: at most `limit` in any true window, and room when it was promised."""
    window, now, added = Window(60.0), 0.0, list[float]()
    for pause, to_the_promise in steps:
        now += pause
        window.slide(now)
        if window.total >= limit and to_the_promise:
            now = max(now, window.room_at(limit))
            window.slide(now)
            assert window.total < limit
        if window.total < limit:
            window.add(now)
            added.append(now)
        assert sum(now - 60.0 <= at for at in added) <= limit
    assert len(window._counts) <= SLOTS + 1
