"""What the ledger of a zone has written down: holders, and what each has of a line. Values that change;
`ledger.py` changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Entry:
    """What one holder has of one line. `told`: units, surrender and pressed as the holder was told last."""

    holder: Holder = field(repr=False)
    site: str
    line: str
    limit: int = 0
    units: int = 0
    want: int = 0
    since: float = 0.0
    surrender: int = 0
    pressed: int = 0
    told: tuple[int, int, int] = (0, 0, 0)

    @property
    def left(self) -> int:
        """Units that are not asked back."""
        return self.units - self.surrender

    @property
    def is_news(self) -> bool:
        """The holder ought to ask: there is more for it, or others need what it has."""
        units, surrender, pressed = self.told
        return self.units != units or self.surrender > surrender or bool(self.pressed and not pressed)


@dataclass(slots=True, eq=False)
class Holder:
    """`until`: when what it has ends unless it is heard of. `pressed_told`: as it was told last. `unheard`:
    entries that may be otherwise than it was told.
    """

    name: str
    zone_limit: int = 0
    until: float = float("inf")
    units: int = 0
    pressed_told: int = 0
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    unheard: dict[Entry, None] = field(default_factory=dict)
