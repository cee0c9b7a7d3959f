"""Seeds of the simulation, as processes of their own: the order of sets is part of a run (PYTHONHASHSEED)."""

from __future__ import annotations

import subprocess
import sys

import pytest


def simulation(*arguments: str, seconds: float = 600.0) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "tests.simulation", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.parametrize("first", range(1, 301, 50))
def test_no_seed_of_three_hundred_fails(first: int) -> None:
    done = simulation("--seeds", f"{first}-{first + 49}", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.proof
@pytest.mark.parametrize("first", range(1, 5001, 500))
def test_no_seed_of_five_thousand_fails_and_each_branch_is_met(first: int) -> None:
    done = simulation("--seeds", f"{first}-{first + 499}", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_takes_the_same_course_in_every_process_and_after_every_other_seed() -> None:
    seeds = [str(seed) for seed in (2, 5, 13, 17, 22, 28)]
    forward = simulation("--digests", *seeds)
    backward = simulation("--digests", *reversed(seeds))
    assert len(set(forward.stdout.split()[1::2])) == len(seeds), forward.stderr
    assert sorted(forward.stdout.splitlines()) == sorted(backward.stdout.splitlines())
