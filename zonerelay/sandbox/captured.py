"""What the sandbox captures, and the troubles that its API scripts.

The sink answers 250 when a message is in the store of captured mail. `Chaos` is the policy of the sandbox's
listener: it refuses MAIL and RCPT as Mailpit's chaos does, so that the application under test sees it.
"""

from __future__ import annotations

from zonerelay.admin.captured import CaptureError
from zonerelay.admin.operators import Sandbox
from zonerelay.capture.store import Capture, CaptureTooLargeError, open_capture
from zonerelay.capture.troubles import Trigger, Troubles
from zonerelay.config.settings import Settings
from zonerelay.inbound.policy import Decision, Mail, Policy, Rcpt, refuse
from zonerelay.model.clock import Clock
from zonerelay.model.message_id import MessageIdSource
from zonerelay.process.threads import OPERATORS
from zonerelay.sandbox.behaviours import is_behaviour
from zonerelay.sandbox.conversation import Manners, NotTakenError, Received
from zonerelay.sandbox.sink import Sink

CHAOS = "zonerelay.sandbox.captured:Chaos"

_TROUBLES = Troubles(is_behaviour)
"""A listener makes its policy by name, so the one sandbox of a process shares these with it here."""


def build(settings: Settings, clock: Clock) -> tuple[Sandbox, CapturingSink]:
    capture = open_capture(settings, clock.now)
    return Sandbox(capture, _TROUBLES), CapturingSink(capture, clock)


class CapturingSink(Sink):
    def __init__(self, capture: Capture, clock: Clock) -> None:
        super().__init__(manners=Manners(greylisting=2.0))
        self._capture = capture
        self._ids = MessageIdSource(clock)
        self.behaviours = _TROUBLES.behaviours

    async def accept(self, message: Received) -> None:
        self.commands.clear()  # nothing grows while the sandbox runs
        add = self._capture.add
        try:
            await OPERATORS.run(add, self._ids.next(), message.mail_from, message.recipients, message.body)
        except CaptureTooLargeError as error:
            raise NotTakenError(f"552 5.3.4 {error}") from error
        except CaptureError as error:
            raise NotTakenError(f"452 4.3.1 {error}") from error


class Chaos(Policy):
    def mail(self, event: Mail) -> Decision | None:
        return _struck(_TROUBLES.chaos.sender)

    def rcpt(self, event: Rcpt) -> Decision | None:
        return _struck(_TROUBLES.chaos.recipient)


def _struck(trigger: Trigger) -> Decision | None:
    if not _TROUBLES.strikes(trigger):
        return None
    return refuse(trigger.error_code, "0.0", "Chaos asks for it")
