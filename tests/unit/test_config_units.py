"""Durations and sizes: what is read, what is refused and with which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.config.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds", "reason"),
    [
        ("30s", 30, "seconds"),
        ("5m", 300, "m is minutes, never months or milli"),
        ("2h", 7200, "hours"),
        ("5d", 432_000, "days"),
        ("1.5h", 5400, "fractions"),
        ("250ms", 0.25, "milliseconds"),
        (" 5 m ", 300, "spaces around and one before the unit"),
        ("0", 0, "zero needs no unit"),
        (0, 0, "nor quotes"),
        (0.0, 0, "nor does a float zero"),
        ("0s", 0, "zero with a unit"),
    ],
)
def test_durations_are_seconds(text: str | float, seconds: float, reason: str) -> None:
    assert parse_duration(text) == seconds, reason


@pytest.mark.parametrize(
    ("text", "octets", "reason"),
    [
        ("64 KB", 65_536, "powers of 1024"),
        ("64KB", 65_536, "the space may be left out"),
        ("50 MB", 52_428_800, "megabytes"),
        ("1 GB", 1_073_741_824, "gigabytes"),
        ("2 TB", 2_199_023_255_552, "terabytes"),
        ("1.5 MB", 1_572_864, "fractions"),
        ("100 B", 100, "octets"),
        ("64 kib", 65_536, "KiB means the same, in any case"),
        (0, 0, "zero needs no unit"),
    ],
)
def test_sizes_are_octets(text: str | float, octets: int, reason: str) -> None:
    assert parse_size(text) == octets, reason


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (90, "90s"),
        (7200, "2h"),
        (86_400, "1d"),
        (0.25, "250ms"),
        (0.1, "100ms"),
        (0.0005, "0.0005s"),
    ],
)
def test_durations_are_shown_in_the_largest_whole_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("octets", "text"),
    [(0, "0 B"), (1000, "1000 B"), (1024, "1 KB"), (52_428_800, "50 MB"), (1025, "1025 B")],
)
def test_sizes_are_shown_in_the_largest_whole_unit(octets: int, text: str) -> None:
    assert format_size(octets) == text


@given(st.integers(0, 10**12))
def test_a_shown_size_is_read_back_the_same(octets: int) -> None:
    assert parse_size(format_size(octets)) == octets


@given(st.integers(0, 10**11).map(lambda milliseconds: milliseconds / 1000))
def test_a_shown_duration_is_read_back_the_same(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-9)
