"""A next hop that wants us to log in first, or to use TLS, although nobody configured it: nothing bounces.

530 (RFC 4954 6, RFC 3207 4) says nothing about the mail: it is our configuration that is wrong, and whatever
else is for that next hop would fare the same. So it is the hosts' trouble, and mail waits until an operator
has seen it. An MX host that says so refuses the mail: nobody can have credentials for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.reply import Reply

WANTS_MORE = 530


def spared(outcomes: Sequence[Outcome | None], zone: str) -> list[Outcome | None]:
    """Outcomes of a transaction with a next hop, without bounces that are not the mail's fault."""
    return [None if each is None else _spared(each, zone) for each in outcomes]


def _spared(outcome: Outcome, zone: str) -> Outcome:
    if outcome.verdict is not Verdict.BOUNCED or outcome.reply.code != WANTS_MORE:
        return outcome
    said = outcome.reply
    text = f"the next hop wants a log-in or TLS first, which zone {zone} does not do there: {said}"
    return replace(
        outcome,
        verdict=Verdict.DEFERRED,
        reply=Reply(451, said.detail or "7.0", text),
        scope=Scope.HOST,
        local=True,
        counts=False,
    )
