"""What a supervisor asks its workers, in the form of `messages.py`: never printed, so no outside contract."""

from __future__ import annotations

import msgspec

from zonerelay.telemetry.metrics.families import Family


class PartMetrics(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="verb",
    tag="part-metrics",
    forbid_unknown_fields=True,
):
    """Every metric of this worker."""

    version: int = 1


class PartReadiness(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="verb",
    tag="part-readiness",
    forbid_unknown_fields=True,
):
    """Is this worker ready for mail?"""

    version: int = 1


class Families(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="families"):
    families: tuple[Family, ...]


class Reasons(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="reasons"):
    """Against being ready; none is good."""

    reasons: tuple[str, ...]
