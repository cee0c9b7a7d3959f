from __future__ import annotations

from dataclasses import dataclass

from zonerelay.inbound.limits.memory import SESSION_COST, SessionMemory

MB = 1024 * 1024


@dataclass(eq=False)
class Session:
    held: int
    must_stay: bool = False
    is_shed: bool = False

    def shed(self) -> None:
        self.is_shed = True


def test_what_sessions_hold_and_what_they_are_counts() -> None:
    memory = SessionMemory(100 * MB)
    memory.holders |= {Session(0), Session(1000), Session(0)}
    memory.used += 1000
    assert memory.total == 1000 + 3 * SESSION_COST
    memory.used -= 1000
    memory.holders.clear()
    assert memory.total == 0


def test_it_is_tight_before_it_is_full() -> None:
    memory = SessionMemory(100 * MB)
    for used, tight, full in ((79 * MB, False, False), (80 * MB, True, False), (100 * MB, True, True)):
        memory.used = used
        assert (memory.tight, memory.full) == (tight, full), used


def test_connections_alone_can_fill_it() -> None:
    memory = SessionMemory(16 * MB)
    memory.holders |= {Session(0) for _ in range(16 * MB // SESSION_COST - 1)}
    assert (memory.tight, memory.full) == (True, False)
    memory.holders.add(Session(0))
    assert memory.full


def test_another_limit_holds_at_once() -> None:
    memory = SessionMemory(100 * MB)
    memory.used = 90 * MB
    memory.change(200 * MB)
    assert (memory.tight, memory.full) == (False, False)
    memory.change(50 * MB)
    assert memory.full


def relieved(*sessions: Session) -> list[bool]:
    memory = SessionMemory(MB)
    memory.holders |= set(sessions)
    memory.relieve()
    return [session.is_shed for session in sessions]


def test_who_holds_most_has_to_go() -> None:
    assert relieved(Session(5), Session(700), Session(0), Session(699)) == [False, True, False, False]


def test_nobody_goes_when_nobody_holds_anything() -> None:
    assert relieved() == []
    assert relieved(Session(0), Session(0)) == [False, False]


def test_who_cannot_go_does_not_keep_the_others_from_going() -> None:
    """A message that waits for the store stays the heaviest for as long as the store likes."""
    assert relieved(Session(5), Session(900, must_stay=True), Session(7)) == [False, False, True]
