"""What several hosts together mean for a recipient that none of them has taken."""

from __future__ import annotations

import pytest

from tests.support.mail import make_batch, make_message, route_to
from zonerelay.delivery.batch.batch_state import NO_8BITMIME, BatchProgress
from zonerelay.delivery.peer import HostFailure
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.reply import Reply
from zonerelay.smtp.client.transaction import Peer

OTHERWISE = Outcome(Verdict.DEFERRED, Reply(451, "4.4", "no host"), Scope.LOCAL)
NO_ANSWER = HostFailure(Reply(451, "4.2", "no answer"), asked=False)
NO_SOURCE = HostFailure(Reply(451, "3.5", "no source"), asked=False, scope=Scope.LOCAL)


def progress() -> BatchProgress:
    return BatchProgress(make_batch(make_message(), route_to(25)).deliveries)


def lacks(some: BatchProgress) -> None:
    some.unsupported(some.open, NO_8BITMIME, Peer("mx.example.com"), for_now=False)


def test_what_every_host_lacks_is_final() -> None:
    some = progress()
    lacks(some)
    lacks(some)
    [outcome] = some.outcomes(OTHERWISE)
    assert (outcome.verdict, outcome.reply.status) == (Verdict.BOUNCED, "5.6.3")


@pytest.mark.parametrize(
    ("trouble", "scope"), [(NO_ANSWER, Scope.HOST), (NO_SOURCE, Scope.LOCAL)], ids=["host", "ours"]
)
@pytest.mark.parametrize("first", [True, False])
def test_nothing_is_final_while_a_host_could_not_be_asked(
    trouble: HostFailure, scope: Scope, first: bool
) -> None:
    assert trouble.scope is scope
    some = progress()
    if first:
        lacks(some)
    some.host_failed("mx2.example.com", trouble)
    if not first:
        lacks(some)
    [outcome] = some.outcomes(OTHERWISE)
    assert outcome.verdict is Verdict.DEFERRED
