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


class ChangePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the zone changes. `sender` is what SRS makes of it, "" where it stays; `removed`, `replaced` and
    `added` are its rules. `signed_by` are the signatures for the domain `author`, `unsigned` is why there is
    none, and with `must_sign` mail waits then. `author_assumed`: no From was given, the sender's domain is
    taken for it.
    """

    sender: str = ""
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    author: str = ""
    author_assumed: bool = False
    signed_by: tuple[str, ...] = ()
    unsigned: str = ""
    must_sign: bool = False


class AddressPlan(msgspec.Struct, frozen=True, kw_only=True):
    """An IP address of a host, and ours that packets to it leave from: several, with commas between, where
    that depends on the message. `problem`: it would not be used.
    """

    address: str
    source: str = ""
    problem: str = ""


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One MX host, or the next hop. `problem` says why it cannot be used now.

    `tlsa`: the kinds of its TLSA records that its certificate must match, as "3 1 1" (DANE).
    """

    name: str
    port: int
    preference: int
    addresses: tuple[AddressPlan, ...] = ()
    problem: str = ""
    tlsa: tuple[str, ...] = ()


class SourcePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A source of the zone and its share of the mail. `chosen`: the mail would go out from it; `None` when
    that depends on the message. `refused_until`: the destination has refused it; it, or its IPv6, is passed
    over. `absent`: those of its addresses that this machine has not got.
    """

    name: str
    addresses: tuple[str, ...]
    ehlo_name: str
    share: float
    chosen: bool | None = None
    refused_until: float | None = None
    refused_reply: str = ""
    refused_ipv6_only: bool = False
    absent: tuple[str, ...] = ()


class RouteCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What a `[[route]]` says; they count from 1. `unmatched` are the conditions that do not hold."""

    rule: int
    zone: str
    matches: bool
    unmatched: tuple[str, ...] = ()
