"""Limits, rates and times of zones that contradict each other, or have no effect."""

from __future__ import annotations

import pytest

from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load_text


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        (
            '[[zone]]\nschedule = ["2h"]\nmax_age = "1h"',
            "zone[0].schedule",
            "the first delay of 2h is longer than max_age = 1h, when mail is given up",
        ),
        (
            '[[zone]]\nschedule = ["6d", "7d"]',
            "zone[0].schedule",
            "the first delay of 6d is longer than max_age in [retry] = 5d",
        ),
        (
            "[[zone]]\nmax_connections = 5\nmax_connections_per_destination = 6",
            "zone[0].max_connections_per_destination",
            "6 is more than max_connections = 5",
        ),
        (
            '[[zone]]\nmax_rate = "100"',
            "zone[0].max_rate",
            '"100" is not a rate; expected a rate such as "100/1m"',
        ),
        ('[[zone]]\nmax_rate = "0/1m"', "zone[0].max_rate", "is not a rate"),
        ('[[zone]]\nmax_rate = "1/2d"', "zone[0].max_rate", "the period of a rate must be"),
        ('[[zone]]\nmax_rate = "1/m5"', "zone[0].max_rate", "is not a duration"),
        ('[[destination]]\nmx = ["x.example"]\nmax_rate = 5', "destination[0].max_rate", "rate"),
    ],
)
def test_what_contradicts_itself_is_refused(text: str, path: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert said in problem.text


def test_of_a_schedule_that_is_wrong_itself_nothing_more_is_said() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text('[[zone]]\nschedule = ["9d", "x"]\nmax_age = "1h"')
    assert [problem.path for problem in caught.value.problems] == ["zone[0].schedule[1]"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[[zone]]\nschedule = ["1h", "5m"]',
            "zone[0].schedule: 5m is after 1h: mail is tried more often",
        ),
        ('[retry]\nschedule = ["1m", "30s", "10s"]', "retry.schedule: 30s is after 1m"),
        (
            '[[zone]]\nmax_rate = "60/1m"\nmax_rate_per_destination = "100/1m"',
            "zone[0].max_rate_per_destination: never reached: max_rate = 60/1m of the whole zone is slower",
        ),
        (
            '[[zone]]\nmax_rate = "60/1m"\n[[destination]]\nmx = ["x.example"]\nmax_rate = "2/1s"',
            "destination[0].max_rate: never reached: max_rate of zone default is slower",
        ),
    ],
)
def test_what_has_no_effect_is_remarked_once(text: str, said: str) -> None:
    (note,) = advice(load_text(text), "relay.example.org")
    assert note.startswith(said)


@pytest.mark.parametrize(
    "text",
    [
        '[[zone]]\nmax_rate = "100/1m"\nmax_rate_per_destination = "1/s"\nmax_connections = 5',
        '[[zone]]\nmax_rate = "1/1m"\n[[zone]]\nname = "free"\n'
        '[[destination]]\nmx = ["x.example"]\nmax_rate = "1000/1m"',
        '[[zone]]\nschedule = ["1m", "1m", "5m"]\nmax_age = "5m"',
    ],
)
def test_what_makes_sense_is_left_alone(text: str) -> None:
    assert advice(load_text(text), "relay.example.org") == ()
