"""`python -m tests.bench`: zonerelay and Postfix under the same load, in one run, as a table.

With `--workers` it is zonerelay with several workers, too. With `--against` it is zonerelay and other source
trees of zonerelay, in Postfix's place. With `--engines` it is every storage engine, with one relay and with
three, as one table (docs/store/engines.md).
"""

import argparse
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from tests.bench import engines
from tests.bench.fsyncs import find_strace
from tests.bench.relays import Starter, starters, tree_starter, zonerelay_starter
from tests.bench.report import describe_machine, print_profile, print_row, write_json
from tests.bench.results import Result
from tests.bench.rows import POSTFIX, ZONERELAY, Row, rows_named
from tests.bench.runner import Plan, profile_path, run_row
from tests.bench.spools import SPOOLS
from tests.support.meters import busy_share, open_group
from tests.support.postfix import PostfixError, PostfixTools

DIRECTORY = Path("/var/tmp")  # survives on disk where /tmp is memory
BUSY = 0.1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--rows", default="", metavar="A,B", help="only these rows")
    parser.add_argument("--only", choices=(POSTFIX, ZONERELAY), help="only this relay, so without ratios")
    parser.add_argument(
        "--against",
        type=Path,
        nargs="+",
        metavar="TREE",
        help="zonerelay from these source trees in Postfix's place; the ratio is to the last",
    )
    parser.add_argument(
        "--spool",
        choices=sorted(SPOOLS.keys() - {"leveldb"}),
        nargs="+",
        help="zonerelay with these spools in Postfix's place; the ratio is to the last",
    )
    parser.add_argument(
        "--engines",
        choices=("all", *engines.ENGINES),
        nargs="+",
        metavar="NAME",
        help="only storage engines: all, or these of " + ", ".join(engines.ENGINES),
    )
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        metavar="N",
        help="zonerelay with these numbers of workers, and Postfix; the ratio is to zonerelay with one",
    )
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
    if options.engines:
        return bench_engines(options, console)
    try:
        tools = PostfixTools(say=console.print)
        found = available(options, tools, console)
        rows = chosen(options, found)
    except (ValueError, PostfixError) as error:
        console.print(str(error), markup=False)
        return 2
    with tempfile.TemporaryDirectory(prefix="zonerelay-bench-", dir=options.directory) as name:
        directory = Path(name)
        directory.chmod(0o755)  # Postfix's users must be able to enter
        return bench(options, rows, found, tools, directory, console)


def bench_engines(options: argparse.Namespace, console: Console) -> int:
    names = engines.ENGINES if "all" in options.engines else options.engines
    busy = busy_share()
    repeat = max(1, options.repeat)
    found = engines.run(names, repeat=repeat, scale=options.scale, directory=options.directory)
    console.print(engines.table(found), soft_wrap=True)
    console.print(f"{os.cpu_count()} cores, {busy:.0%} of them busy before")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return 0


def chosen(options: argparse.Namespace, found: dict[str, Starter]) -> list[Row]:
    """The rows asked for, as far as there is a relay for them. Raises ValueError."""
    rows = [row.scaled(options.scale) for row in rows_named(options.rows)]
    if options.against:
        # Goals are about Postfix; and of rows that compare something else, the other tree may lack it.
        relays = (ZONERELAY, *(tree_name(tree) for tree in options.against))
        rows = [replace(row, relays=relays, goals=()) for row in rows if row.relays[-1] == POSTFIX]
    if options.spool:
        relays = (ZONERELAY, *map(spool_name, options.spool))
        rows = [replace(row, relays=relays, goals=()) for row in rows if row.relays[-1] == POSTFIX]
    if options.workers:
        # One worker is last: what is told round by round is told against the last.
        relays = (*map(workers_name, options.workers), POSTFIX, ZONERELAY)
        rows = [replace(row, relays=relays, goals=()) for row in rows if row.relays[-1] == POSTFIX]
    return [row for row in rows if any(name in found for name in row.relays)]


def tree_name(tree: Path) -> str:
    return tree.resolve().name


def spool_name(spool: str) -> str:
    return f"on {spool}"


def workers_name(workers: int) -> str:
    return f"{workers} workers"


def available(options: argparse.Namespace, tools: PostfixTools, console: Console) -> dict[str, Starter]:
    """Starters by the relay's name. Raises ValueError."""
    found = starters(tools)
    if options.against:
        trees = {tree_name(tree): tree_starter(tree.resolve()) for tree in options.against}
        return {ZONERELAY: found[ZONERELAY], **trees}
    if options.spool:
        others = {spool_name(name): zonerelay_starter(spool=SPOOLS[name]) for name in options.spool}
        return {ZONERELAY: found[ZONERELAY], **others}
    if options.workers:
        found |= {workers_name(number): zonerelay_starter(workers=number) for number in options.workers}
    if options.only == POSTFIX:
        return {POSTFIX: found[POSTFIX]}
    if options.only == ZONERELAY:
        del found[POSTFIX]
    elif os.geteuid() != 0:
        console.print(
            "Postfix's master runs only as root, so only zonerelay is measured; try sudo make bench"
        )
        del found[POSTFIX]
    return found


def bench(
    options: argparse.Namespace,
    rows: list[Row],
    found: dict[str, Starter],
    tools: PostfixTools,
    directory: Path,
    console: Console,
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
            starters=found,
            repetitions=max(1, options.repeat),
            strace=None if options.no_strace else find_strace(say=console.print),
            profiles=options.profile,
            say=status.update if console.is_terminal else console.print,
        )
        for row in rows:
            measured = run_row(plan, row)
            print_row(console, measured)
            results += measured
            if options.profile and (path := profile_path(options.profile, row)).exists():
                print_profile(console, path)
    if options.json:
        write_json(options.json, results, machine=machine)
    return 1 if any(result.notes for result in results) else 0


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
