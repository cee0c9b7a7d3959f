"""Run seeds of the simulation: `python -m tests.simulation --seeds 1-300`.

    --seed N            run one seed; --trace prints its time line
    --seeds A-B         run many, in as many processes as there are cores (or --jobs N)
    --mutant NAME       run with a fault in the relay (--mutants lists them); --hunt stops at the first find
    --digests N …       print a digest of the log of each seed, to compare two runs

A seed that fails is shrunk: faults and messages are left out as long as it fails. The exit status is 1 if a
seed fails, or if an interesting branch was hit by none of 300 seeds or more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

from tests.simulation import mutants
from tests.simulation.scenario import Event, Plan, Result, draw, run

SOMETIMES = (
    "421 greeting", "bounced", "client left in the body", "client without an answer after the dot",
    "crash between the dot and the reply", "crash just after a receiver's 250", "deferred", "delivered",
    "dropped", "dsn", "expired", "expired while suspended", "late reply", "limits-lost", "limits-restored",
    "no name server", "operator: hold", "operator: bounce", "operator: drop", "operator: release",
    "refused with 451 after the dot", "reply lost after the dot", "reply-lost", "repeated", "resumed",
    "session limit", "client left after the dot", "store-recovered", "store-unhealthy", "suspended",
    "order-given", "order-ended", "order-expired", "held", "take-over", "fence refused", "clock-set-back",
    "HTTP: 202", "machine suspended", "stood still at a write", "a connection held up the zone",
    "operator: retry", "operator: undo", "a rate was used up", "workers used a limit up",
    "the window was full", "a snapshot replaced a log",
)  # fmt: skip
"""Each of these has to happen in some seed of three hundred: a branch that is never met is not tested."""
ENOUGH = 300


def shrink(plan: Plan, kind: str) -> Plan:
    """Leave out faults and messages as long as the run fails in the same way."""
    plan = replace(plan, faults=_fewer(plan.faults, lambda faults: replace(plan, faults=faults), kind))
    return replace(
        plan, messages=_fewer(plan.messages, lambda messages: replace(plan, messages=messages), kind)
    )


def _fewer(
    events: tuple[Event, ...], make: Callable[[tuple[Event, ...]], Plan], kind: str
) -> tuple[Event, ...]:
    step = max(1, len(events) // 2)
    while step:
        start = 0
        while start < len(events):
            fewer = events[:start] + events[start + step :]
            if any(kind_of(each) == kind for each in run(make(fewer)).failures):
                events = fewer
            else:
                start += step
        step //= 2
    return events


def kind_of(failure: str) -> str:
    """The failure without its numbers and names."""
    return "".join(" " if each.isdigit() else each for each in failure)[-30:]


def print_plan(result: Result) -> None:
    plan = result.plan
    print(f"seed {plan.seed}: {plan.store}, {plan.workers} worker(s), {len(plan.messages)} messages,"
          f" {len(plan.faults)} faults, {result.seconds:.0f} virtual seconds")  # fmt: skip
    for event in plan.faults:
        print(f"    {event.at:9.3f} {event.what} of {event.arguments[0]} for {event.arguments[1]} s")
    for failure in result.failures:
        print(f"    FAILED: {failure}")


def trace(result: Result) -> None:
    shown = ("id", "recipient", "to", "reply", "reason", "what", "text", "host", "destination")
    for at, process, event, fields in result.ledger.log:
        words = " ".join(f"{name}={fields[name]}" for name in shown if name in fields)
        print(f"{at:12.4f} {process:6} {event:14} {words}")


def _one(seed: int, mutant: str) -> tuple[int, list[str], Counter[str]]:
    with mutants.applied(mutant):
        result = run(draw(seed))
    return seed, result.failures, result.sometimes


def _many(first: int, last: int, mutant: str, jobs: int, *, hunt: bool) -> int:
    began, done, failed = time.monotonic(), 0, []
    hits: Counter[str] = Counter()
    with ProcessPoolExecutor(jobs) as pool:
        work = partial(_one, mutant=mutant)
        for seed, failures, sometimes in pool.map(work, range(first, last + 1), chunksize=4):
            done += 1
            hits.update(sometimes.keys())
            if failures:
                failed.append(seed)
                print(f"seed {seed}: {failures[0]}", flush=True)
                if hunt:
                    pool.shutdown(cancel_futures=True)
                    break
    print(f"{done} seeds in {time.monotonic() - began:.1f} s, {len(failed)} failed")
    missing = [each for each in SOMETIMES if not hits[each]] if done >= ENOUGH and not mutant else []
    for each in missing:
        print(f"never happened: {each}")
    if failed and not hunt:
        _show(failed[0], mutant)
    return int(bool(failed or missing))


def _show(seed: int, mutant: str, *, is_traced: bool = False) -> bool:
    """Print the plan of a seed, and return whether it failed."""
    with mutants.applied(mutant):
        result = run(draw(seed))
        if is_traced:
            trace(result)
        elif result.failures:
            result = run(shrink(result.plan, kind_of(result.failures[0])))
    print_plan(result)
    return bool(result.failures)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="1-300")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--mutant", default="", choices=("", *mutants.MUTANTS))
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--hunt", action="store_true")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--digests", type=int, nargs="+", default=())
    given = parser.parse_args()
    if given.mutants:
        for name, mutant in mutants.MUTANTS.items():
            print(f"{name:32} {mutant.breaks}")
        return 0
    for seed in given.digests:
        print(seed, run(draw(seed)).ledger.digest())
    if given.digests:
        return 0
    if given.seed is None:
        first, _, last = given.seeds.partition("-")
        return _many(int(first), int(last), given.mutant, given.jobs, hunt=given.hunt)
    return int(_show(given.seed, given.mutant, is_traced=given.trace))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a run
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    sys.exit(main())
