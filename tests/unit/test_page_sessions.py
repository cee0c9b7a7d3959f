"""Sessions of the operators' page: they end, and there are few."""

from __future__ import annotations

from zonerelay.admin.page.sessions import IDLE, LONGEST, MAX_SESSIONS, Sessions
from zonerelay.config.credentials.identities import Token

TOKEN = Token(name="alice", scope="operate", sha256="", created=0.0)


class Clock:
    now = 1000.0


def test_a_session_ends() -> None:
    clock, valid = Clock(), [True]
    sessions = Sessions(lambda: clock.now, lambda _: valid[0])
    secret = sessions.begin(TOKEN, "192.0.2.1")
    while clock.now < 1000.0 + LONGEST - IDLE / 2:
        clock.now += IDLE / 2
        assert sessions.find(secret, by_itself=False) is not None
    clock.now += IDLE / 2
    assert sessions.find(secret, by_itself=False) is None, "twelve hours after the log-in"
    secret = sessions.begin(TOKEN, "192.0.2.1")
    clock.now += IDLE / 2
    assert sessions.find(secret, by_itself=True) is not None
    clock.now += IDLE / 2
    assert sessions.find(secret, by_itself=True) is None, "a page that refreshes itself keeps none alive"
    secret = sessions.begin(TOKEN, "192.0.2.1")
    valid[0] = False
    assert sessions.find(secret, by_itself=False) is None, "its token was removed"


def test_a_token_that_logs_in_again_and_again_ends_no_session_of_another() -> None:
    clock = Clock()
    sessions = Sessions(lambda: clock.now, lambda _: True)
    first = sessions.begin(TOKEN, "192.0.2.1")
    for _ in range(2 * MAX_SESSIONS):
        clock.now += 1
        sessions.begin(Token(name="bob", scope="read", sha256="", created=0.0), "192.0.2.2")
    assert sessions.find(first, by_itself=True) is not None
    assert len(sessions.open()) == MAX_SESSIONS


def test_there_are_few_and_none_is_found_by_another_secret() -> None:
    clock = Clock()
    sessions = Sessions(lambda: clock.now, lambda _: True)
    first = sessions.begin(TOKEN, "192.0.2.1")
    clock.now += 1
    second = sessions.begin(TOKEN, "192.0.2.1")
    for _ in range(MAX_SESSIONS - 1):
        sessions.begin(TOKEN, "192.0.2.2")
    assert len(sessions.open()) == MAX_SESSIONS
    assert sessions.find(first, by_itself=False) is None
    assert sessions.find(second, by_itself=False) is not None
    assert sessions.find(f"{second}x", by_itself=False) is None
