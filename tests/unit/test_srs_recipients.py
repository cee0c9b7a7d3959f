"""Guesses of hashes, and what next hops have refused. The clock is a manual one."""

from __future__ import annotations

import time

import pytest

from tests.support.inbound import listening
from zonerelay.config.settings import ListenerSettings, SrsSettings
from zonerelay.inbound.limits import auth_failures
from zonerelay.inbound.limits.auth_failures import SrsRecipients, TooManyGuessesError, WrongHashError
from zonerelay.inbound.state.context import SharedContext
from zonerelay.message.srs import Srs, SrsError
from zonerelay.model.address import Mailbox
from zonerelay.model.clock import ManualClock
from zonerelay.model.reply import Reply

OURS = "srs.example"
SRS = Srs(SrsSettings(domain=OURS, accept_legacy=True), ("0123456789abcdef",))
ANN = Mailbox("ann@first.example")
OLD = Mailbox(f"SRS0=6AcJ=G3=first.example=ann@{OURS}")
OLD_WRONG = Mailbox(f"SRS0=6AcK=G3=first.example=ann@{OURS}")


def guess(book: SrsRecipients, address: Mailbox, clock: ManualClock, client: str = "192.0.2.1") -> float:
    """How long the answer waits."""
    with pytest.raises(WrongHashError) as wrong:
        book.reverse(SRS, address, client, clock)
    return wrong.value.delay


def test_each_wrong_hash_waits_longer_and_the_first_two_do_not() -> None:
    book, clock = SrsRecipients(), ManualClock()
    wrong = Mailbox(f"SRS0=AYRW2KZA=G3=first.example=ann@{OURS}")
    waits = [guess(book, wrong, clock) for _ in range(8)]
    assert waits == [0.0, 0.0, 1.0, 3.0, 7.0, 9.0, 9.0, 9.0]
    assert guess(book, wrong, clock, "192.0.2.2") == 0.0
    # 40 bits: no client is locked out for the sake of addresses that nobody guesses.
    for _ in range(200):
        guess(book, wrong, clock)
    assert book.reverse(SRS, SRS.forward(ANN, clock.now()), "192.0.2.1", clock) == ANN


def test_of_the_old_form_a_client_has_some_guesses_in_an_hour() -> None:
    book, clock = SrsRecipients(), ManualClock()
    for _ in range(auth_failures.MAX_OLD):
        guess(book, OLD_WRONG, clock)
    for address in (OLD_WRONG, OLD):
        with pytest.raises(TooManyGuessesError):
            book.reverse(SRS, address, "192.0.2.1", clock)
    assert book.reverse(SRS, OLD, "192.0.2.2", clock) == ANN
    assert book.reverse(SRS, SRS.forward(ANN, clock.now()), "192.0.2.1", clock) == ANN
    assert book.reverse(SRS, ANN, "192.0.2.1", clock) is None
    clock.advance(auth_failures.HOUR)
    assert book.reverse(SRS, OLD, "192.0.2.1", clock) == ANN


def test_all_clients_together_have_few_more() -> None:
    book, clock = SrsRecipients(), ManualClock()
    for number in range(auth_failures.MAX_OLD_IN_ALL):
        guess(book, OLD_WRONG, clock, f"192.0.2.{number}")
    with pytest.raises(TooManyGuessesError):
        book.reverse(SRS, OLD, "198.51.100.1", clock)
    assert book.reverse(SRS, SRS.forward(ANN, clock.now()), "198.51.100.1", clock) == ANN


def test_where_the_old_form_is_not_read_nothing_is_answered_and_nothing_counts() -> None:
    book, clock = SrsRecipients(), ManualClock()
    srs = Srs(SrsSettings(domain=OURS), ("0123456789abcdef",))
    for address in (OLD, OLD_WRONG):
        for _ in range(auth_failures.MAX_OLD_IN_ALL + 1):
            with pytest.raises(SrsError, match="old form"):
                book.reverse(srs, address, "192.0.2.1", clock)
    assert book.reverse(SRS, OLD, "192.0.2.1", clock) == ANN


def test_what_is_known_of_a_recipient_is_known_for_an_hour() -> None:
    book, now = SrsRecipients(), 5.0
    book.refused(ANN, Reply(550, "1.1", "no such user ann@first.example"), now)
    assert book.refusal(Mailbox("ann@FIRST.example"), now) == "550 5.1.1"
    assert book.refusal(Mailbox("bob@first.example"), now) == ""
    assert book.refusal(ANN, now + auth_failures.REMEMBERED) == ""


@pytest.mark.parametrize(
    "reply", [Reply(550, "7.1", "spam"), Reply(550, "", "no"), Reply(552, "2.2", "full")]
)
def test_what_is_about_the_message_is_not_held_against_the_next_one(reply: Reply) -> None:
    book = SrsRecipients()
    book.refused(ANN, reply, 0.0)
    assert book.refusal(ANN, 1.0) == ""


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth_failures, "MAX_REMEMBERED", 3)
    book = SrsRecipients()
    for number in range(5):
        book.refused(Mailbox(f"{number}@first.example"), Reply(550, "1.1", "no"), 0.0)
    known = [number for number in range(5) if book.refusal(Mailbox(f"{number}@first.example"), 1.0)]
    assert known == [2, 3, 4]


async def test_a_client_hears_it_later_each_time_and_in_the_old_form_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auth_failures, "AT_ONCE", 0.8)
    monkeypatch.setattr(auth_failures, "MAX_OLD", 2)
    settings = ListenerSettings(address="127.0.0.1:0", allow_networks=())
    shared = SharedContext(srs=SRS, srs_recipients=SrsRecipients())
    async with listening(settings, shared=shared) as house, await house.connect() as talk:
        began = time.monotonic()
        wrong = b"RCPT TO:<%b>\r\n" % OLD_WRONG.encode()
        right = b"RCPT TO:<%b>\r\n" % SRS.forward(ANN, house.clock.now()).encode()
        talk.send(b"EHLO x\r\n")
        await talk.reply()
        talk.send(b"MAIL FROM:<>\r\n" + wrong + wrong + wrong + right)
        codes = [(await talk.line())[:9] for _ in range(5)]
        assert codes == [b"250 2.1.0", b"550 5.1.1", b"550 5.1.1", b"451 4.7.0", b"250 2.1.5"]
        assert time.monotonic() - began >= 0.2
        assert house.log.reasons() == ["srs", "srs", "srs-guesses"]
