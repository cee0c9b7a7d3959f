"""Templates of a batch: what they cost is bounded before anything is filled in."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from zonerelay.admin.api.problems import ApiError
from zonerelay.admin.submission.batch import MAX_OUTPUT, MAX_TAGS, substituted
from zonerelay.admin.submission.body import JsonBody

FIELDS = ("subject", "text", "html")
FILLER = "{{a}}" * (65_000 // 5)


def filled(fields: dict[str, Any], directory: Path = Path("/nonexistent")) -> dict[str, Any]:
    return substituted(fields, JsonBody(10**6, directory))


COSTLY: dict[str, dict[str, Any]] = {
    "seven fields": {
        **dict.fromkeys(FIELDS, FILLER),
        "headers": {f"X-{each}": FILLER for each in range(4)},
        "substitutions": {"a": "x"},
    },
    "one field": {"text": FILLER, "substitutions": {"a": ""}},
    "many headers": {
        "headers": {f"X-{each}": "{{a}}" * 10 for each in range(MAX_TAGS // 10 + 1)},
        "substitutions": {"a": "x"},
    },
    "sections": {"text": "{{#a}}x{{/a}}" * MAX_TAGS, "substitutions": {"a": True}},
    "unbalanced": {"text": "{{" * (MAX_TAGS + 1), "substitutions": {"a": 1}},
    "long values": {
        "text": "{{a}}" * 900,
        "html": "{{a}}" * 90,
        "substitutions": {"a": "<" * (MAX_OUTPUT // 5000)},
    },
    "unsupported delimiters": {"text": "{{=<% %>=}}" + "<%a%>" * 100, "substitutions": {"a": "x"}},
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_template_is_refused_before_it_is_filled_in(name: str) -> None:
    """65 KB of {{a}} in seven fields, in 150 messages, held the event loop for 35 s."""
    began = time.process_time()
    for _ in range(150):
        with pytest.raises(ApiError) as caught:
            filled(COSTLY[name])
        assert caught.value.body.status == 422
    assert time.process_time() - began < 2


def test_templates_within_the_bound_are_filled_in() -> None:
    given = {"text": "{{a}}" * (MAX_TAGS - 1), "html": "{{a}}", "substitutions": {"a": "<&"}}
    found = filled(given)
    assert found == {"text": "<&" * (MAX_TAGS - 1), "html": "&lt;&amp;"}
