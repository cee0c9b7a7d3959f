"""The outcomes of one batch while the courier goes from connection to connection.

A recipient is *open* until a peer has answered for it. An open recipient may have a *tentative* outcome: the
one that it gets when no connection is left to try.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zonerelay.delivery.peer.sockets import HostTrouble
from zonerelay.model.delivery import Delivery
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.reply import Reply
from zonerelay.smtp.client.transaction import Peer, Phase, Transaction

OVERFLOW = Reply(452, "5.3", "more recipients or commands than the peer takes in one transaction")
CLOSING = 421
NO_8BITMIME = Reply(550, "6.3", "the host does not support 8BITMIME, which the message needs")
NO_SMTPUTF8 = Reply(550, "6.7", "the host does not support SMTPUTF8, which the addresses or the header need")

MAY_CHANGE = "it has taken no mail from here yet and is asked again for an hour"


class BatchProgress:
    """Outcomes of a batch's deliveries, by their position in the batch."""

    __slots__ = ("_known", "_tentative", "open")

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self.open = list(range(len(deliveries)))
        self._known: list[Outcome | None] = [None] * len(deliveries)
        self._tentative: list[Outcome | None] = [None] * len(deliveries)

    @property
    def answered(self) -> bool:
        """True when a recipient has a final outcome."""
        return len(self.open) < len(self._known)

    def settle_open(self, outcome: Outcome) -> None:
        """Gives every open recipient the same final outcome."""
        for index in self.open:
            self._known[index] = outcome
        self.open = []

    def host_failed(self, host: str, trouble: HostTrouble, *, counts: bool = True) -> None:
        """Records that a host could not be asked. A later host that cannot be asked outweighs what an earlier
        host said. `counts` false: it uses up no attempt.

        A trouble of our own (scope LOCAL) does not replace a deferral by a host.
        """
        outcome = Outcome(
            Verdict.DEFERRED,
            trouble.reply,
            trouble.scope,
            host=host,
            peer=trouble.address,
            local=True,
            counts=counts and trouble.asked,
        )
        if trouble.scope is not Scope.LOCAL:
            self._suppose(outcome)
        else:
            self.undecided(outcome)

    def give_up(self) -> None:
        """Makes the tentative outcomes of the open recipients final."""
        for index in self.open:
            self._known[index] = self._tentative[index]
        self.open = []

    def undecided(self, outcome: Outcome) -> None:
        """Gives this deferral to the open recipients that no host has deferred so far, because some hosts
        were not asked.
        """
        for index in self.open:
            known = self._tentative[index]
            if known is None or known.verdict is Verdict.BOUNCED:
                self._tentative[index] = outcome

    def refuse_open(self, reply: Reply, peer: Peer) -> None:
        """Bounces the open recipients: the peer announced that it would refuse the message, so it is not
        asked.
        """
        self.settle_open(
            Outcome(Verdict.BOUNCED, reply, Scope.MESSAGE, peer.host, peer.address, peer.tls, local=True)
        )

    def unsupported(self, indices: Sequence[int], reply: Reply, peer: Peer, *, for_now: bool) -> None:
        """Notes that this host lacks what the recipients need. The bounce is final only when every host of
        the route does. `for_now`: the host may offer more later, so that they are deferred.
        """
        verdict = Verdict.BOUNCED
        if for_now:
            verdict, reply = Verdict.DEFERRED, Reply(451, reply.detail, f"{reply.text}; {MAY_CHANGE}")
        outcome = Outcome(verdict, reply, Scope.RECIPIENT, peer.host, peer.address, peer.tls, local=True)
        for index in indices:
            if self._tentative[index] is None:
                self._tentative[index] = outcome

    def record(self, indices: Sequence[int], transaction: Transaction, peer: Peer) -> None:
        """Takes over the outcomes of a finished transaction for these recipients."""
        if transaction.unanswered:
            self._suppose(transaction.outcomes[0])
            return
        outcomes = transaction.outcomes
        if len(outcomes) == len(self._known) and not (transaction.overflow or transaction.again):
            self._known, self.open = outcomes, []
            return
        for index, outcome in zip(indices, outcomes, strict=True):
            self._known[index] = outcome
        self.open = [index for index in self.open if self._known[index] is None]
        if transaction.overflow or transaction.again:
            self.left_out([index for index in indices if self._known[index] is None], peer)

    def suspect(self, indices: Sequence[int], transaction: Transaction) -> None:
        """Takes over the outcomes of a transaction whose refusal may be about the connection, and leaves the
        recipients without an answer of their own open.

        They are deferred without an attempt when nothing is left to ask, also after a permanent refusal.
        """
        refusal = transaction.refusal
        everyone = transaction.refused_at is Phase.RCPT and refusal is not None and refusal.code != CLOSING
        for index, outcome in zip(indices, transaction.outcomes, strict=True):
            if outcome is not None and outcome.scope is Scope.RECIPIENT and outcome.counts and not everyone:
                self._known[index] = outcome
            else:
                self._tentative[index] = None if outcome is None else _without_attempt(outcome)
        self.open = [index for index in self.open if self._known[index] is None]

    def left_out(self, indices: Sequence[int], peer: Peer) -> None:
        """Notes that the recipients need another transaction."""
        later = Outcome(
            Verdict.DEFERRED, OVERFLOW, Scope.RECIPIENT, peer.host, peer.address, peer.tls, counts=False
        )
        for index in indices:
            self._tentative[index] = later

    def outcomes(self, otherwise: Outcome) -> list[Outcome]:
        """Returns the result. When a host has answered for some recipients, the rest has no HOST trouble."""
        answered = self.answered
        for index in self.open:
            outcome = self._tentative[index] or otherwise
            if answered and outcome.scope is Scope.HOST:
                outcome = replace(outcome, scope=Scope.MESSAGE)
            self._known[index] = outcome
        return [outcome or otherwise for outcome in self._known]

    def _suppose(self, outcome: Outcome | None) -> None:
        for index in self.open:
            self._tentative[index] = outcome


def _without_attempt(outcome: Outcome) -> Outcome:
    if outcome.verdict is Verdict.DEFERRED:
        return replace(outcome, scope=Scope.MESSAGE, counts=False)
    reply = outcome.reply
    text = f"the host refused this on a connection in use, and could not be asked on another one: {reply}"
    return replace(
        outcome,
        verdict=Verdict.DEFERRED,
        reply=Reply(451, reply.detail, text),
        scope=Scope.MESSAGE,
        local=True,
        counts=False,
    )
