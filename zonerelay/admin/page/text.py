"""Formats times for people. No I/O."""

from __future__ import annotations

from datetime import datetime


def when(then: float) -> str:
    return datetime.fromtimestamp(then).astimezone().strftime("%Y-%m-%d %H:%M:%S")
