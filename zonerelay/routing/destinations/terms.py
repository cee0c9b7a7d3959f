"""The terms of a route: TLS demand, limits, and the hosts that remain.

TLS is decided in this order:

1. an entry of [[destination]] with a `tls` of its own decides alone: it replaces the demands of the zone, of
   DANE and of MTA-STS, so that an operator can get past a peer's mistake, in words;
2. the zone decides, and in addition DANE where DNSSEC vouches for the hosts' names (RFC 7672), and the
   domain's MTA-STS policy in mode enforce (RFC 8461 5): a certificate that is valid for the host, and only
   hosts that the policy names. Neither weakens the zone's demand.

`Route.terms` names what differs from the zone, so that such mail is a destination of its own. Nothing here
does I/O; a host outside a policy is reported to `StsPolicies`.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from zonerelay.config.settings import TlsMode, ZoneSettings
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.reply import Reply
from zonerelay.routing.destinations.destination_table import DestinationEntry
from zonerelay.routing.destinations.route import MxHost, Route, TlsDemand, Unroutable
from zonerelay.routing.mta_sts.policies import PolicyLookup, StsPolicies
from zonerelay.routing.mta_sts.policy_text import HeldPolicy, StsMode

_VERIFYING = (TlsMode.VERIFY, TlsMode.DANE)
MTA_STS = "mta-sts"
_MAX_NAMED = 3  # hosts in a text


def on_terms(
    zone: ZoneSettings, route: Route, entry: DestinationEntry | None, *, enforced: bool = False
) -> Route:
    """Returns the route with its terms. `enforced`: the hosts have passed the domain's MTA-STS policy."""
    words = [entry.name] if entry is not None and not entry.changes_nothing else []
    if entry is not None and entry.has_tls:
        demand = entry.tls(secure=route.secure)
    else:
        demand = _of_zone(zone, secure=route.secure, enforced=enforced)
        if demand.because == MTA_STS:
            words.append(MTA_STS)
    if demand.dane:  # in one line with an insecure domain's mail the last look-up would decide for both
        words.append("dane")
    tls = None if demand == TlsDemand(zone.tls) else demand
    limits = None if entry is None else entry.limits(zone)
    if tls is None and limits is None:
        return route
    return structs.replace(route, tls=tls, limits=limits, terms=" ".join(words))


def by_policy(
    zone: ZoneSettings,
    route: Route,
    entry: DestinationEntry | None,
    found: PolicyLookup,
    policies: StsPolicies,
) -> Route | Unroutable:
    """Returns the route with its terms under what was found about the domain's policy."""
    route = structs.replace(route, expires=min(route.expires, found.expires))
    held = found.held
    if held is None or held.policy.mode is StsMode.NONE:
        return on_terms(zone, route, entry)
    hosts = tuple(host for host in route.hosts if held.policy.allows(host.name))
    others = [host for host in route.hosts if host not in hosts]
    if others:
        policies.mismatch(held, [host.name for host in others])
    if held.policy.mode is StsMode.TESTING:
        return on_terms(zone, route, entry)
    if not hosts:
        return Unroutable(zone.name, route.name, _not_allowed(held, others), route.expires)
    return on_terms(zone, structs.replace(route, hosts=hosts), entry, enforced=True)


def _of_zone(zone: ZoneSettings, *, secure: bool, enforced: bool) -> TlsDemand:
    by_sts = enforced and zone.tls not in _VERIFYING
    mode = TlsMode.VERIFY if by_sts else zone.tls
    dane = secure and (mode is TlsMode.DANE or (zone.dane and mode is not TlsMode.NONE))
    return TlsDemand(mode, dane=dane, because=MTA_STS if by_sts else "zone")


def _not_allowed(held: HeldPolicy, hosts: Sequence[MxHost]) -> Outcome:
    names = ", ".join(host.name for host in hosts[:_MAX_NAMED])
    more = f" and {len(hosts) - _MAX_NAMED} more" if len(hosts) > _MAX_NAMED else ""
    text = f"the MTA-STS policy {held.id} of {held.domain} allows none of its MX hosts: {names}{more}"
    return Outcome(Verdict.DEFERRED, Reply(451, "7.5", text), scope=Scope.DOMAIN, local=True)
