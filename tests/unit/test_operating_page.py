"""docs/operate/operating.md cannot drift: what the relay shows, the page explains."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from zonerelay.operations.requests import CHANGES
from zonerelay.telemetry.events import events
from zonerelay.telemetry.events import events as subsystems
from zonerelay.telemetry.logs import logs as refusals
from zonerelay.telemetry.metrics.metrics import Metrics

PAGE = (Path(__file__).parents[2] / "docs" / "operate" / "operating.md").read_text()


def test_every_metric_of_ours_is_explained() -> None:
    names = re.findall(r"^# TYPE (zonerelay_\w+)", Metrics().exposition().decode(), re.MULTILINE)
    assert len(names) > 10
    assert [name for name in names if f"`{name}" not in PAGE] == []


def test_every_log_event_is_explained() -> None:
    sources = "".join(map(inspect.getsource, (events, subsystems, refusals)))
    found = re.findall(r'"(?:info|warning|error)",\s*"([a-z-]+)"', sources)
    assert {"accepted", "suspended", "trouble"} <= set(found)
    assert [name for name in found if f"`{name}`" not in PAGE] == []


def test_every_changing_verb_and_every_filter_is_explained() -> None:
    verbs = [verb for verb in CHANGES if f"| `{verb}" not in PAGE]
    assert verbs == []
    for command in (
        "status",
        "explain",
        "resolve",
        "queue list",
        "queue show",
        "queue trace",
        "cert self-signed",
    ):
        assert f"zonerelay {command} " in PAGE.replace("\n", " ")
    for option in ("sender", "recipient", "domain", "zone", "state", "older-than", "younger-than", "reply"):
        assert f"`--{option} " in PAGE
