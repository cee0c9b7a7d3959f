"""What a worker answers to its supervisor, which serves HTTP for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from zonerelay.control.messages.part_messages import Families, Reasons
from zonerelay.telemetry.metrics.families import Family


class ReadinessReasons(Protocol):
    @property
    def reasons(self) -> Sequence[str]: ...


class PartAnswers:
    """`refresh` is awaited before `families`, as before a scrape."""

    def __init__(
        self,
        refresh: Callable[[], Awaitable[None]],
        families: Callable[[], tuple[Family, ...]],
        readiness: Callable[[], Awaitable[ReadinessReasons]],
    ) -> None:
        self._refresh = refresh
        self._families = families
        self._readiness = readiness

    async def metrics(self) -> Families:
        await self._refresh()
        return Families(families=self._families())

    async def ready(self) -> Reasons:
        return Reasons(reasons=tuple((await self._readiness()).reasons))
