"""The message that a session receives, as far as the order of its octets goes. Values only."""

from __future__ import annotations

from zonerelay.inbound.cleanup.intake import BACKLOG, Intake
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.replies import ServerReply


class Body:
    """`intake` is the message being read or stored, `parked` one between two of its chunks (BDAT): there is
    one of them at most. Of a refused chunk `discarding` octets are still to be dropped, and then `owed` is
    answered.
    """

    __slots__ = ("behind_others", "discarding", "intake", "owed", "parked")

    def __init__(self) -> None:
        self.intake: Intake | None = None
        self.parked: Intake | None = None
        self.discarding = 0
        self.owed: ServerReply = replies.OK
        self.behind_others = False  # other large bodies are read first

    @property
    def current(self) -> Intake | None:
        return self.intake or self.parked

    @property
    def held(self) -> int:
        """Octets in the account of all sessions."""
        intake = self.intake or self.parked
        return 0 if intake is None else intake.held

    @property
    def held_up(self) -> bool:
        """Octets wait for the store, or for other bodies."""
        intake = self.intake or self.parked
        return self.behind_others or (intake is not None and intake.backlog > BACKLOG)

    @property
    def waits_for_store(self) -> bool:
        return self.intake is not None and self.intake.complete
