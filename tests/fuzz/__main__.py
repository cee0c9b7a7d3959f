"""`python -m tests.fuzz [TARGET …] [--seconds N]`: fuzzing with atheris, each target in a process of its own.

Inputs are kept below `.cache/fuzz`, which git ignores, and read from `corpus/TARGET`, which it does not.
An input that breaks a promise is written to `corpus/TARGET/crash-…`: from then on `test_corpus` fails until
the code is right, and keeps it so. Exit status 1 when anything was found. Needs the extra `fuzz`.
"""

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
WORDS = HERE / "words"
FOUND = HERE.parents[1] / ".cache" / "fuzz"
# Longer inputs make runs slow and findings hard to read.
MAX_LENGTH = 4096
MAX_MEMORY_MB = 2048
MAX_SECONDS_PER_INPUT = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all of them when none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (60)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.here:
        fuzz(chosen.targets[0], chosen.seconds)
    names = chosen.targets or sorted(each.name for each in CORPUS.iterdir() if each.is_dir())
    if unknown := [name for name in names if not (CORPUS / name).is_dir()]:
        parser.error(f"no such target: {', '.join(unknown)}")
    bad = [name for name in names if run(name, chosen.seconds)]
    print(f"found something: {', '.join(bad)}" if bad else f"nothing found in {', '.join(names)}")
    return 1 if bad else 0


def run(name: str, seconds: int) -> int:
    """libFuzzer ends its process, so each target gets one."""
    print(f"== {name}: {seconds} s", flush=True)
    command = [sys.executable, "-m", "tests.fuzz", "--here", name, "--seconds", str(seconds)]
    return subprocess.run(command, cwd=HERE.parents[1], check=False).returncode


def fuzz(name: str, seconds: int) -> None:
    import atheris

    # Nothing of ours may have been imported before: only then it is instrumented.
    with atheris.instrument_imports(include=["zonerelay"]):
        targets = importlib.import_module("tests.fuzz.targets").TARGETS
    found = FOUND / name
    found.mkdir(parents=True, exist_ok=True)
    words = [f"-dict={WORDS / name}"] if (WORDS / name).exists() else []
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={MAX_LENGTH}",
        f"-rss_limit_mb={MAX_MEMORY_MB}",
        f"-timeout={MAX_SECONDS_PER_INPUT}",
        f"-artifact_prefix={CORPUS / name}/",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, *words, str(found), str(CORPUS / name)], targets[name])
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
