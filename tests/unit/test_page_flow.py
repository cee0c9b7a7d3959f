"""The picture of the overview."""

from __future__ import annotations

from msgspec import structs

from tests.support.fake_relay import _status
from zonerelay.admin.page.flow import MOST, flow_of
from zonerelay.operations.answers import DestinationStatus


def test_what_has_no_band_of_its_own_is_shown_together() -> None:
    rows = tuple(
        DestinationStatus(zone="default", destination=f"d{n}", hosts="", active=0, waiting=0, ready=n + 1)
        for n in range(MOST + 3)
    )
    flow = flow_of(structs.replace(_status(), destinations=rows))
    shown = {node.name: node.count for node in flow.nodes if not node.is_left}
    assert len(shown) == MOST + 1
    assert shown[f"d{MOST + 2}"] == str(MOST + 3), "the largest"
    assert shown["3 others"] == str(1 + 2 + 3)
    assert "3 others 6" in flow.title
