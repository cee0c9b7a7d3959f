"""Seeds of the simulation, as processes of their own: the order of sets is part of a run (PYTHONHASHSEED)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.simulation.mutants import FOUND_BY, MUTANTS, applied

PROVED = 600
"""Seeds that `make proof` runs."""


def simulation(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "tests.simulation", "--jobs", "1", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.parametrize("first", [1, 151])
def test_no_seed_of_three_hundred_fails(first: int) -> None:
    done = simulation("--seeds", f"{first}-{first + 149}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("seed", [368, 429, 772, 943, 2089, 2554])
def test_seeds_that_found_a_fault_of_the_relay_pass(seed: int) -> None:
    done = simulation("--seeds", f"{seed}-{seed}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.proof
@pytest.mark.parametrize("first", range(1, PROVED, 300))
def test_no_seed_fails_and_every_branch_is_met(first: int) -> None:
    done = simulation("--seeds", f"{first}-{first + 299}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_takes_the_same_course_in_every_process_and_after_every_other_seed() -> None:
    seeds = [str(seed) for seed in (2, 5, 7, 13, 16, 28)]
    forward = simulation("--digests", *seeds)
    backward = simulation("--digests", *reversed(seeds))
    assert len(set(forward.stdout.split()[1::2])) == len(seeds), forward.stderr
    assert sorted(forward.stdout.splitlines()) == sorted(backward.stdout.splitlines())


def test_every_mutant_has_a_function_to_replace() -> None:
    for mutant in MUTANTS:
        with applied(mutant):
            pass


@pytest.mark.proof
@pytest.mark.parametrize("mutant", FOUND_BY)
def test_a_fault_of_the_relay_is_found(mutant: str) -> None:
    """Another seed may find it when this one does not any more: `--mutant NAME --hunt --seeds 1-2000`."""
    seed = FOUND_BY[mutant]
    assert seed <= 2000
    done = simulation("--mutant", mutant, "--hunt", "--seeds", f"{seed}-{seed}")
    assert done.returncode == 1, f"seed {seed} no longer finds {mutant}: {done.stdout}{done.stderr}"
    assert f"seed {seed}: " in done.stdout, done.stdout + done.stderr
