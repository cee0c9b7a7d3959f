"""The troubles that a test asks the sandbox for by API: Mailpit's chaos, and behaviours for addresses.

Chaos is about handing mail in: MAIL, RCPT or a log-in is refused with a code, at random. A behaviour is about
delivery: the sink treats the address as the table of the sandbox says of its local parts ("defer-451").
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec

MAX_BEHAVIOURS = 1000


class Trigger(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """A refusal at random. `probability` is in per cent."""

    error_code: Annotated[int, msgspec.Meta(ge=400, le=599)] = 451
    probability: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0


class Chaos(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """As Mailpit has it; what is left out is off."""

    sender: Trigger = Trigger()
    recipient: Trigger = Trigger()
    authentication: Trigger = Trigger(error_code=535)


class TroubleError(Exception):
    """The sandbox cannot make this trouble; the text says why."""


class Troubles:
    """The troubles that a test asked for. `is_known` says whether a behaviour of that name exists."""

    def __init__(self, is_known: Callable[[str], bool]) -> None:
        self._is_known = is_known
        self._random = random.Random()
        self.chaos = Chaos()
        self.behaviours: dict[str, str] = {}
        """Names of behaviours by address in lower case; the sink looks at this very mapping."""

    def set_chaos(self, chaos: Chaos) -> None:
        self.chaos = chaos

    def set_behaviours(self, wanted: Mapping[str, str]) -> None:
        """Set these and no others. Raises TroubleError."""
        if len(wanted) > MAX_BEHAVIOURS:
            raise TroubleError(f"at most {MAX_BEHAVIOURS} addresses have a behaviour")
        for address, name in wanted.items():
            if not self._is_known(name):
                raise TroubleError(
                    f"{address}: there is no behaviour {name}; the sandbox prints what there is"
                )
        self.behaviours.clear()
        self.behaviours.update((address.lower(), name) for address, name in wanted.items())

    def strikes(self, trigger: Trigger) -> bool:
        return self._random.random() * 100 < trigger.probability
