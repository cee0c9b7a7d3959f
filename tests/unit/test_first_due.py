"""A list is stored as mail that came due, so that it takes turns with everybody's fresh mail."""

from __future__ import annotations

import pytest

from tests.store.builders import NOW, envelope_for, message_id
from zonerelay.inbound.cleanup.intake import OVERDUE, first_due
from zonerelay.inbound.limits.connections import MANY


@pytest.mark.parametrize(("recipients", "due"), [(1, 0.0), (MANY, 0.0), (MANY + 1, NOW - OVERDUE)])
def test_only_a_message_for_many_is_put_behind_fresh_mail(recipients: int, due: float) -> None:
    envelope = envelope_for(message_id(1), *(f"u{n}@example.com" for n in range(recipients)))
    assert first_due(envelope) == due


@pytest.mark.parametrize("recipients", [1, MANY + 1])
def test_a_time_of_release_stays(recipients: int) -> None:
    envelope = envelope_for(message_id(1), *(f"u{n}@example.com" for n in range(recipients)))
    assert first_due(envelope, NOW + 60) == NOW + 60
