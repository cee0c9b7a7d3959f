"""Which hosts were found dead, so that mail goes to the next one at once instead of waiting for each again.

    up ──cannot be connected to, or greets badly──▶ down for 30 s ──▶ a probe ──it talks──▶ up
                                                        ▲               │
                                                        └── twice as long, up to 10 minutes

Kept for each address (`ip:port`) and, for who chooses between hosts before they are looked up, for each
`name:port`. While the time of an address runs, and while its probe is on the way, it is tried after all
others; when its time is over one batch tries it in its usual place. Nothing is ever left out: with every
address down mail is tried as if none were.

Pure but for its clock. Bounded: of more than `MAX_REMEMBERED` the ones that failed longest ago are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

from zonerelay.model.clock import Clock

FIRST_PAUSE = 30.0
LONGEST_PAUSE = 600.0

PROBE_TIME = 60.0
"""How long the batch that tries a host again keeps others from it, should it never report back."""

MAX_REMEMBERED = 10_000


class _Down:
    __slots__ = ("failures", "probed", "until")

    def __init__(self) -> None:
        self.failures = 0
        self.probed = True
        self.until = 0.0


class Health:
    """One per worker. As a condition: whether anything is down at all."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._down: OrderedDict[str, _Down] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._down)

    def is_down(self, key: str) -> bool:
        """Whether to try others first. When its time is over the first to ask is its probe, and told no."""
        down = self._down.get(key)
        if down is None:
            return False
        now = self._clock.monotonic()
        if now < down.until:
            return True
        down.probed = True
        down.until = now + PROBE_TIME
        return False

    def looks_down(self, key: str) -> bool:
        """The same for who only wants to know, and tries nothing."""
        down = self._down.get(key)
        return down is not None and self._clock.monotonic() < down.until

    def failed(self, key: str) -> None:
        """Ten connections that fail together are one failure, not ten doublings."""
        now = self._clock.monotonic()
        down = self._down.get(key)
        if down is None:
            down = self._down[key] = _Down()
            if len(self._down) > MAX_REMEMBERED:
                self._down.popitem(last=False)
        if down.probed or now >= down.until:
            self._down.move_to_end(key)
            down.probed = False
            down.until = now + _pause(down.failures)
            down.failures += 1

    def talked(self, key: str) -> None:
        self._down.pop(key, None)


def _pause(failures: int) -> float:
    return min(FIRST_PAUSE * 2.0 ** min(failures, 30), LONGEST_PAUSE)
