"""What a failed test has to tell besides its assertion: the logs of the relays that it ran.

Whoever keeps a log says so when it is made, and is asked if the test fails.
"""

from typing import Protocol

LONGEST = 12_000
"""Characters of each log: its end."""


class Witness(Protocol):
    @property
    def name(self) -> str: ...

    def testimony(self) -> str:
        """Everything that it knows, the latest at the end."""


_witnesses: list[Witness] = []


def call_as_witness(witness: Witness) -> None:
    """From now on it is asked."""
    _witnesses.append(witness)


def testimonies() -> list[tuple[str, str]]:
    """Of all that are there: names and the ends of what they know."""
    found = [(witness.name, witness.testimony()[-LONGEST:]) for witness in _witnesses]
    return sorted((name, text) for name, text in found if text)


def dismiss() -> None:
    """The next test has its own."""
    _witnesses.clear()
