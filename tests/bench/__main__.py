"""`python -m tests.bench`: zonerelay and Postfix under the same load, in one run, as a table."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tests.bench.fsyncs import find_strace
from tests.bench.relays import POSTFIX, ZONERELAY, Starter, postfix_starter, start_zonerelay
from tests.bench.report import describe_machine, print_profile, print_row, write_json
from tests.bench.results import Result
from tests.bench.rows import Row, rows_named
from tests.bench.runner import Plan, profile_path, run_row
from tests.support.meters import busy_share, open_group
from tests.support.postfix import PostfixError, PostfixTools

DIRECTORY = Path("/var/tmp")  # survives on disk where /tmp is memory
BUSY = 0.1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rows", default="", metavar="A,B", help="only these rows")
    parser.add_argument("--only", choices=(POSTFIX, ZONERELAY), help="only this relay, so without ratios")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="timed repetitions (default 3)")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="messages times X, to try things out"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="py-spy of zonerelay for each row, into DIR"
    )
    parser.add_argument("--no-strace", action="store_true", help="do not count fsyncs")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where spool and queue are put")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    # So that every relay and directory is cleaned up when somebody ends the bench.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(highlight=False)
    try:
        rows = [row.scaled(options.scale) for row in rows_named(options.rows)]
        tools = PostfixTools(say=console.print)
    except (ValueError, PostfixError) as error:
        console.print(str(error), markup=False)
        return 2
    with tempfile.TemporaryDirectory(prefix="zonerelay-bench-", dir=options.directory) as name:
        directory = Path(name)
        directory.chmod(0o755)  # Postfix's users must be able to enter
        return bench(options, rows, tools, directory, console)


def bench(
    options: argparse.Namespace, rows: list[Row], tools: PostfixTools, directory: Path, console: Console
) -> int:
    machine = describe(directory, tools)
    console.print(", ".join(f"{name}: {value}" for name, value in machine.items()))
    warn(machine, console)
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    with console.status("…") as status:
        plan = Plan(
            directory=directory,
            tools=tools,
            starters=starters(options.only, tools, console),
            repetitions=max(1, options.repeat),
            strace=None if options.no_strace else find_strace(say=console.print),
            profiles=options.profile,
            say=status.update if console.is_terminal else console.print,
        )
        for row in rows:
            found = run_row(plan, row)
            print_row(console, found)
            results += found
            if options.profile and (path := profile_path(options.profile, row)).exists():
                print_profile(console, path)
    if options.json:
        write_json(options.json, results, machine=machine)
    return 1 if any(result.notes for result in results) else 0


def starters(only: str | None, tools: PostfixTools, console: Console) -> dict[str, Starter]:
    found: dict[str, Starter] = {ZONERELAY: start_zonerelay, POSTFIX: postfix_starter(tools)}
    if only:
        return {only: found[only]}
    if os.geteuid() != 0:
        console.print(
            "Postfix's master runs only as root, so only zonerelay is measured; try sudo make bench"
        )
        del found[POSTFIX]
    return found


def describe(directory: Path, tools: PostfixTools) -> dict[str, object]:
    group = open_group()
    group.close()
    cores = os.cpu_count() or 1
    return describe_machine(
        directory, cores=cores, busy=busy_share(), cpu_meter=group.how, postfix=tools.version
    )


def warn(machine: dict[str, object], console: Console) -> None:
    if machine["filesystem"] == "tmpfs":
        console.print("! the directory is in memory: fsync is free there; try --directory on a disk")
    busy = machine["busy_before"]
    if isinstance(busy, float) and busy > BUSY:
        console.print(f"! {busy:.0%} of the cores are busy already: the figures will be noisy")


if __name__ == "__main__":
    sys.exit(main())
