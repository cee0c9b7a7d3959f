"""Reads an S3 queue without joining it: no lease, no claim, no number.

Each message is as its object is when it is read, and the list of them as the bucket shows it at the start.
What leaves meanwhile is not found.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from zonerelay.config.settings import S3Settings
from zonerelay.model.clock import SystemClock
from zonerelay.store.common.queue_mark import QueueMark
from zonerelay.store.s3.check import looking
from zonerelay.store.s3.nodes import Nodes
from zonerelay.store.s3.objects import Objects
from zonerelay.store.s3.own_messages import OwnMessages
from zonerelay.store.s3.reader import S3Reader
from zonerelay.store.s3.records import LeaseRecord


class _Outside:
    """In the place of the keeper: the relay of this view is never one of the nodes."""

    def __init__(self, objects: Objects, settings: S3Settings) -> None:
        self.nodes = Nodes(objects, settings, QueueMark(Path(), ""), SystemClock(), LeaseRecord)

    def check_open(self) -> None:
        """It is open until the command ends."""

    def check_usable(self) -> None:
        """Each request says by itself when the service cannot be used."""


@contextlib.asynccontextmanager
async def view(settings: S3Settings, environment: Mapping[str, str]) -> AsyncIterator[S3Reader]:
    """Raises StoreError."""
    async with looking(settings, environment) as objects:
        yield S3Reader(objects, OwnMessages(), _Outside(objects, settings))
