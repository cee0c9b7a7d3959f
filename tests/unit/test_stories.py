"""A failed test shows what the relays that it ran have logged."""

from __future__ import annotations

import pytest

from tests.support import stories
from tests.support.relay import MemoryLog


def test_whoever_keeps_a_log_is_asked_until_the_next_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stories, "_witnesses", [])
    MemoryLog().emit("info", "accepted", {"size": 7})
    MemoryLog()  # has seen nothing
    ((name, text),) = stories.testimonies()
    assert name == "log of the relay in this process"
    assert text == "accepted {'size': 7, 'level': 'info'}"
    stories.dismiss()
    assert stories.testimonies() == []


def test_only_the_end_of_a_long_log_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stories, "_witnesses", [])
    log = MemoryLog()
    for number in range(10_000):
        log.emit("info", "accepted", {"number": number})
    ((_, text),) = stories.testimonies()
    assert len(text) == stories.LONGEST
    assert "'number': 9999" in text
