"""The picture of the overview."""

from __future__ import annotations

from msgspec import structs

from tests.support.fake_relay import _status
from zonerelay.admin.page.flow import MOST, flow_of
from zonerelay.operations.answers import DestinationStatus, ZoneStatus


def test_what_has_no_band_of_its_own_is_shown_together() -> None:
    rows = tuple(
        DestinationStatus(zone="default", destination=f"d{n}", hosts="", active=0, waiting=0, ready=n + 1)
        for n in range(MOST + 3)
    )
    flow = flow_of(structs.replace(_status(), destinations=rows))
    shown = {node.name: node.count for node in flow.nodes if node.kind}
    assert len(shown) == MOST + 1
    assert shown[f"d{MOST + 2}"] == str(MOST + 3), "the largest"
    assert shown["3 others"] == str(1 + 2 + 3)
    assert "3 others 6" in flow.title


def test_a_list_that_is_cut_drops_no_mail_from_the_picture() -> None:
    rows = tuple(
        DestinationStatus(zone="default", destination=f"d{n}", hosts="", active=0, waiting=0, ready=n + 1)
        for n in range(MOST + 1)
    )
    zone = ZoneStatus(name="default", ready=0, active=0, deferred=5000, held=0, oldest_seconds=1.0)
    status = structs.replace(
        _status(), destinations=rows, destinations_total=2000, zones=(structs.replace(zone, ready=900),)
    )
    others = flow_of(status).nodes[-1]
    assert (others.name, others.kind) == ("others", "deferred")
    assert others.count == f"{5900 - sum(range(2, MOST + 2)):,}"
    # Nothing is known about destinations yet.
    counting = structs.replace(_status(), destinations=(), every=0, zones=(zone,))
    assert [(node.name, node.count) for node in flow_of(counting).nodes] == [
        ("default", "5,000"),
        ("others", "5,000"),
    ]


def test_one_other_destination_has_its_name() -> None:
    rows = tuple(
        DestinationStatus(zone="default", destination=f"d{n}", hosts="", active=0, waiting=0, ready=n + 1)
        for n in range(MOST + 1)
    )
    assert flow_of(structs.replace(_status(), destinations=rows)).nodes[-1].name == "d0"
