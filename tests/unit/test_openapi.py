"""The description of the HTTP API has what generators of clients need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from zonerelay.admin.api.openapi import document
from zonerelay.admin.api.verbs import VERBS
from zonerelay.admin.submission.verbs import SUBMISSION

APPENDED = ("raw", "request", "requestopts", "response", "data", "error", "errors", "async", "withhttpinfo")
"""What generators append to the name of an operation."""


def described() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(document([*VERBS, *SUBMISSION]))
    return found


def parts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(each)


def test_names_of_operations_and_types_stay_different_with_what_generators_append() -> None:
    paths, schemas = described()["paths"], described()["components"]["schemas"]
    operations = [each["operationId"] for path in paths.values() for each in path.values()]
    names = [each.replace("_", "").lower() for each in (*operations, *schemas)]
    made = [f"{name}{word}" for name in names[: len(operations)] for word in APPENDED]
    assert len(set(names)) == len(names)
    assert not set(names) & set(made)


def test_a_value_fits_one_alternative() -> None:
    for part in parts(described()):
        assert "anyOf" not in part
        kinds = [each for each in part.get("oneOf", ()) if "$ref" not in each]
        simple = ["number" if each["type"] == "integer" else each["type"] for each in kinds]
        assert len({*simple} - {"array"}) == len([each for each in simple if each != "array"]), part
