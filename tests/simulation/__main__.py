"""Run seeds of the simulation: `python -m tests.simulation --seeds 1-300`.

    --seeds N A-B …     run these, in as many processes as there are cores (or --jobs N)
    --trace             print the time line of the first one
    --digests           print a digest of the log of each, to compare two runs
    --mutant NAME       run with a fault in the relay; --hunt stops at the first find
    --mutants [NAME …]  run each mutant with the seed that finds it; the exit status is 1 if one is not found

The first seed that fails is shrunk: faults and messages are left out as long as it fails. The exit status is
1 if a seed fails, or if an interesting branch was hit by none of 300 seeds or more.
"""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

from tests.simulation.mutants import MUTANTS, applied
from tests.simulation.scenario import Plan, Run, draw, run

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
    for what in ("faults", "messages"):
        step = max(1, len(getattr(plan, what)) // 2)
        while step:
            start = 0
            while start < len(events := getattr(plan, what)):
                fewer = replace(plan, **{what: events[:start] + events[start + step :]})
                if any(kind_of(each) == kind for each in run(fewer).failures):
                    plan = fewer
                else:
                    start += step
            step //= 2
    return plan


def kind_of(failure: str) -> str:
    """The failure without its numbers and names."""
    return "".join(" " if each.isdigit() else each for each in failure)[-30:]


def print_plan(result: Run) -> None:
    plan = result.plan
    print(f"seed {plan.seed}: {plan.store}, {plan.workers} worker(s), {len(plan.messages)} messages,"
          f" {len(plan.faults)} faults, {result.ledger.loop.now:.0f} virtual seconds")  # fmt: skip
    for event in plan.faults:
        print(f"    {event.at:9.3f} {event.what} of {event.arguments[0]} for {event.arguments[1]} s")
    for failure in result.failures:
        print(f"    FAILED: {failure}")


def print_trace(result: Run) -> None:
    shown = ("id", "recipient", "to", "reply", "reason", "what", "text", "host", "destination")
    for at, process, event, fields in result.ledger.log:
        words = " ".join(f"{name}={fields[name]}" for name in shown if name in fields)
        print(f"{at:12.4f} {process:6} {event:14} {words}")
    print_plan(result)


def _one(seed: int, mutant: str) -> Run:
    with applied(mutant):
        return run(draw(seed))


def _outcome(seed: int, mutant: str) -> tuple[int, list[str], Counter[str]]:
    result = _one(seed, mutant)
    return seed, result.failures, result.ledger.sometimes


def _many(seeds: list[int], mutant: str, jobs: int, *, hunt: bool) -> bool:
    """Print the seeds that fail. Return whether all is well."""
    began, done, failed = time.monotonic(), 0, []
    hits: Counter[str] = Counter()
    with ProcessPoolExecutor(jobs) as pool:
        for seed, failures, sometimes in pool.map(partial(_outcome, mutant=mutant), seeds, chunksize=4):
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
        with applied(mutant):
            plan = draw(failed[0])
            print_plan(run(shrink(plan, kind_of(run(plan).failures[0]))))
    return not (failed or missing)


def _is_found(name: str) -> bool:
    """Print what finds a mutant, if its seed does."""
    seed, place, _ = MUTANTS[name]
    failures = _one(seed, name).failures
    print(f"{name} ({place}), seed {seed}: {failures[:1] or 'NOT FOUND'}", flush=True)
    return bool(failures)


def _numbers(text: str) -> list[int]:
    """The seeds of `7` or `1-300`."""
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> bool:
    """Return whether all is well."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.simulation", description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=_numbers, nargs="+", default=[_numbers("1-300")])
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--digests", action="store_true")
    parser.add_argument("--mutant", default="", choices=("", *MUTANTS))
    parser.add_argument("--hunt", action="store_true")
    parser.add_argument("--mutants", nargs="*", choices=MUTANTS)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    seeds = [seed for each in given.seeds for seed in each]
    if given.mutants is not None:
        missed = [name for name in given.mutants or MUTANTS if not _is_found(name)]
        return not missed
    if given.digests:
        for seed in seeds:
            print(seed, _one(seed, given.mutant).ledger.digest())
        return True
    if given.trace:
        print_trace(result := _one(seeds[0], given.mutant))
        return not result.failures
    return _many(seeds, given.mutant, given.jobs, hunt=given.hunt)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a run
        command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(not main())
