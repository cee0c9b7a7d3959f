"""Simulated failures that a test requests from the sandbox over the API: Mailpit's chaos, and scripted
replies by address.

Chaos concerns submission: MAIL, RCPT or a login is refused at random, with a given code. A scripted reply
concerns delivery: the sink treats the address like a local part of the sandbox's table ("defer-451").
"""

import random
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec

MAX_BEHAVIOURS = 1000


class ChaosTrigger(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """A trigger that makes the sandbox reject a command at random. `probability` is a percentage."""

    error_code: Annotated[int, msgspec.Meta(ge=400, le=599)] = 451
    probability: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0


class ChaosTriggers(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """The triggers of Mailpit's chaos, which make the sandbox reject commands; omitted ones are off."""

    sender: ChaosTrigger = ChaosTrigger()
    recipient: ChaosTrigger = ChaosTrigger()
    authentication: ChaosTrigger = ChaosTrigger(error_code=535)


class FaultError(Exception):
    """The sandbox cannot simulate the requested failure; the text of the exception gives the reason."""


class InjectedFaults:
    """The simulated failures that tests have requested from the sandbox. `is_known` returns whether a
    scripted reply of that name exists.
    """

    def __init__(self, is_known: Callable[[str], bool]) -> None:
        self._is_known = is_known
        self._random = random.Random()
        self.chaos = ChaosTriggers()
        self.behaviours: dict[str, str] = {}
        """Names of behaviours by address in lower case; the sink looks at this very mapping."""

    def set_behaviours(self, wanted: Mapping[str, str]) -> None:
        """Replace all scripted replies by the `wanted` ones, whose keys are addresses. Raise FaultError if
        one does not exist.
        """
        if len(wanted) > MAX_BEHAVIOURS:
            raise FaultError(f"at most {MAX_BEHAVIOURS} addresses can have a simulated reply")
        for address, name in wanted.items():
            if not self._is_known(name):
                raise FaultError(
                    f"{address}: unknown simulated reply {name}; the sandbox lists them at startup"
                )
        self.behaviours.clear()
        self.behaviours.update((address.lower(), name) for address, name in wanted.items())

    def strikes(self, trigger: ChaosTrigger) -> bool:
        return self._random.random() * 100 < trigger.probability
