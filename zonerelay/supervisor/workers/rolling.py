"""Decides which worker is replaced next in a rolling restart. Pure.

Policy: workers are replaced one at a time, and only while another worker accepts connections, so that clients
hardly wait. The restart does not wait for workers that die at each start. A successor counts as up when it
has run for `STEADY` seconds, because one that dies with its first client is not a success. If a successor
does not come up, or dies while others are still being replaced, the remaining workers are not replaced and
the restart has failed, unless that worker was failing before.
"""

from collections.abc import Callable, Generator, Iterable, Mapping

from zonerelay.supervisor.workers.restart_policy import RestartPolicy, WorkerPhase

STEADY = 1.0
"""Seconds for which a successor must run before the next worker is replaced."""
HOPELESS = 3
"""Consecutive deaths after which the restart does not wait for a worker."""


def rolling_restart(
    workers: Iterable[int], policies: Callable[[], Mapping[int, RestartPolicy]], now: Callable[[], float]
) -> Generator[int | None, None, int | None]:
    """Yield the index of each worker when it is to be replaced, and None while the restart has to wait.
    Return the worker that did not come up, or None.
    """
    left, replaced = sorted(workers), dict[int, int]()

    def fallen() -> int | None:
        """Return a worker that was ready and has died since, or None."""
        there = policies()
        died = (each for each, deaths in replaced.items() if each in there and there[each].deaths > deaths)
        return next(died, None)

    while fallen() is None and (left := [each for each in left if each in policies()]):
        there = policies()
        worker = next((each for each in left if _can_be_spared(each, there)), None)
        if worker is None:
            yield None
            continue
        policy = there[worker]
        starts, had_failed = policy.starts, policy.deaths > 0 and policy.phase is not WorkerPhase.RUNNING
        yield worker
        while fallen() is None and policies().get(worker) is policy and not _is_up(policy, starts, now()):
            if policy.starts > starts and policy.phase is WorkerPhase.DOWN:
                if not had_failed:
                    return worker
                break
            yield None
        left.remove(worker)
        if not had_failed:
            replaced[worker] = policy.deaths
    return fallen()


def _is_up(policy: RestartPolicy, starts: int, now: float) -> bool:
    """Return whether the worker has run for a while since it had been started this often."""
    return policy.starts > starts and policy.phase is WorkerPhase.RUNNING and now - policy.since >= STEADY


def _can_be_spared(worker: int, policies: Mapping[int, RestartPolicy]) -> bool:
    """Return whether another worker accepts the clients, or none will soon, in which case they wait in the
    socket's queue.
    """
    others = [policy for other, policy in policies.items() if other != worker]
    return any(policy.phase is WorkerPhase.RUNNING for policy in others) or all(
        policy.deaths >= HOPELESS for policy in others
    )
