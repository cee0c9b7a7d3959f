"""Seeds of the simulation, as processes of their own: the order of sets is part of a run (PYTHONHASHSEED)."""

import subprocess
import sys

import pytest

from tests.simulation.mutants import MUTANTS, applied

PROVED, CHUNK = 5000, 470
"""Seeds that `make proof` runs after the first 300; a chunk takes a minute or two."""


def simulation(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "tests.simulation", "--jobs", "1", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=2400, check=False)


@pytest.mark.parametrize(
    "seeds",
    [
        ["1-150"],
        ["151-300"],
        ["368", "429", "772", "943", "2089", "2554", "3412", "3690", "4500"],  # found faults
        *(
            pytest.param([f"{first}-{min(first + CHUNK - 1, PROVED)}"], marks=pytest.mark.proof)
            for first in range(301, PROVED, CHUNK)
        ),
    ],
    ids="-".join,
)
def test_no_seed_fails_and_every_branch_is_met(seeds: list[str]) -> None:
    done = simulation("--seeds", *seeds)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_takes_the_same_course_in_every_process_and_after_every_other_seed() -> None:
    seeds = ["2", "5", "7", "13", "16", "28"]
    forward = simulation("--digests", "--seeds", *seeds)
    backward = simulation("--digests", "--seeds", *reversed(seeds))
    assert len(set(forward.stdout.split()[1::2])) == len(seeds), forward.stderr
    assert sorted(forward.stdout.splitlines()) == sorted(backward.stdout.splitlines())


def test_every_mutant_has_a_function_to_replace() -> None:
    for mutant in MUTANTS:
        with applied(mutant):
            pass


@pytest.mark.proof
@pytest.mark.parametrize("half", [0, 1])
def test_the_faults_of_the_relay_are_found(half: int) -> None:
    """Another seed may find one when this one does not any more: `--mutant NAME --hunt --seeds 1-2000`."""
    names = list(MUTANTS)[half::2]
    assert all(0 < MUTANTS[name][0] <= 2000 for name in names)
    done = simulation("--mutants", *names)
    assert done.returncode == 0, done.stdout + done.stderr
