"""Parts of an `Explanation` (`messages.py`), under the same promise: fields are added, never renamed."""

from __future__ import annotations

import msgspec


class TlsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`because` is who says so: "zone", "destination" or "mta-sts". `dane`: hosts with TLSA records are held
    to them. `names` and `certificates` are accepted instead of the host's name.
    """

    mode: str
    because: str
    dane: bool = False
    names: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()


class StsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The domain's MTA-STS policy. `mode` is "" when none is held; `problem` says why, where there should be
    one.
    """

    mode: str = ""
    policy: str = ""
    expires: float | None = None
    mx: tuple[str, ...] = ()
    problem: str = ""


class RewritePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the `sender` or the `recipient` becomes, and `by` what: `rewrite=2` (they count from 1) or `srs`.

    `problem`: RCPT would be refused instead.
    """

    what: str
    by: str
    becomes: str = ""
    problem: str = ""
