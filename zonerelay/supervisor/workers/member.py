"""One worker as the supervisor keeps it: its life, its present process, and what it said last."""

from __future__ import annotations

from dataclasses import dataclass, field

from zonerelay.control.messages.answers import WorkerStatus
from zonerelay.supervisor.workers.child import Child
from zonerelay.supervisor.workers.restart_policy import Life, Phase

MAX_WORDS = 500


@dataclass(slots=True)
class Member:
    """`heir`: it listens nowhere and ends when its spool is empty. `edition`: of the configuration it has.
    `verdict`: what it said of a reload.
    """

    index: int
    life: Life
    heir: bool = False
    edition: int = 0
    child: Child | None = None
    emptied: bool = False
    last_words: str = ""
    metrics: str = ""
    because: str = ""
    problem: str = ""
    verdict: str | None = None
    verdicts: int = field(default=0)

    @property
    def name(self) -> str:
        return f"worker {self.index}"

    @property
    def answers(self) -> bool:
        """Its control socket is open."""
        return self.life.phase in (Phase.RUNNING, Phase.HUNG, Phase.STOPPING)

    def status(self, now: float) -> WorkerStatus:
        state = "emptying" if self.heir and self.life.phase is Phase.RUNNING else str(self.life.phase)
        return WorkerStatus(
            worker=self.index,
            pid=0 if self.child is None else self.child.pid,
            state=state,
            uptime=max(now - self.life.since, 0.0),
            restarts=self.life.restarts,
            problem=self.problem + self._next_start(now),
        )

    def _next_start(self, now: float) -> str:
        left = self.life.next_start - now
        return f"; started again in {left:.0f} s" if self.life.phase is Phase.DOWN and left >= 1 else ""
