"""`python -m tests.bench.simulate`: the queue in virtual time, as tables."""

import argparse
import gc
import os
import sys
from dataclasses import replace

from rich.console import Console

from tests.bench.simulate.report import print_result
from tests.bench.simulate.run import simulate
from tests.bench.simulate.scenarios import NAMES, Death, scenario


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.simulate", description=__doc__)
    parser.add_argument("scenarios", nargs="*", default=["mix"], metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--deliveries", type=int, default=0, metavar="N", help="of the stream")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="relays that share the limits")
    parser.add_argument(
        "--death",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="the last node dies when a third of the stream has come, and is back after so long",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--watch", action="store_true", help="print each sample")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if "PYTHONHASHSEED" not in os.environ:
        # Or sets of names have another order in each run.
        command = [sys.executable, "-m", "tests.bench.simulate", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})
    console = Console(highlight=False, width=160)
    if unknown := [name for name in options.scenarios if name not in NAMES]:
        console.print(f"no scenario {unknown[0]!r}; there are {', '.join(NAMES)}")
        return 2
    # Almost nothing here is garbage, and looking for it costs a third of the time.
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    failed = False
    for name in options.scenarios:
        plan = scenario(name, deliveries=options.deliveries, nodes=options.nodes)
        if options.death and options.nodes > 1:
            third = plan.deliveries / plan.rate / 3
            plan = replace(plan, deaths=(Death(node=options.nodes - 1, at=third, seconds=options.death),))
        result = simulate(plan, seed=options.seed, say=console.print if options.watch else lambda text: None)
        print_result(console, result)
        failed = failed or bool(result.faults)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
