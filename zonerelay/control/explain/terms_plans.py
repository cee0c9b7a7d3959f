"""The part of `explain` that is about terms: what TLS has to be and who says so, the policy, the limits."""

from __future__ import annotations

from zonerelay.config.options.units import Rate, format_size
from zonerelay.config.settings import ZoneSettings
from zonerelay.control.messages.plans import StsPlan, TlsPlan
from zonerelay.routing.destinations.mx import ExaminedRoute
from zonerelay.routing.destinations.nexthop import Limits, Route, TlsDemand
from zonerelay.routing.mta_sts.policies import PolicyLookup


def tls_plan(zone: ZoneSettings, found: ExaminedRoute) -> TlsPlan:
    answer = found.answer
    demand = answer.tls_in(zone) if isinstance(answer, Route) else TlsDemand(zone.tls)
    return TlsPlan(
        mode=demand.mode.value,
        because=demand.because,
        dane=demand.dane,
        names=demand.names,
        certificates=demand.certificates,
    )


def sts_plan(found: PolicyLookup | None) -> StsPlan | None:
    """`None` where no policy is asked for: the zone does not want it, or an entry has the say."""
    if found is None:
        return None
    held = found.held
    if held is None:
        return StsPlan(problem=found.problem)
    policy = held.policy
    return StsPlan(mode=policy.mode.value, policy=held.id, expires=held.expires, mx=policy.patterns)


def _limits(zone: ZoneSettings, found: ExaminedRoute) -> Limits:
    answer = found.answer
    return answer.limits_in(zone) if isinstance(answer, Route) else Limits.of_zone(zone)


def limits_in_force(zone: ZoneSettings, found: ExaminedRoute) -> dict[str, int]:
    limits = _limits(zone, found)
    in_force = {
        "max_connections": zone.max_connections,
        "max_connections_per_destination": limits.max_connections,
        "max_recipients_per_transaction": limits.max_recipients_per_transaction,
        "max_messages_per_connection": limits.max_messages_per_connection,
    }
    if zone.max_message_size:
        in_force["max_message_size"] = zone.max_message_size
    return in_force


def too_large_for(zone: ZoneSettings, size: int | None) -> str:
    """The reply that a message of this size is returned with; "" if it is not."""
    if not zone.max_message_size or size is None or size <= zone.max_message_size:
        return ""
    most = format_size(zone.max_message_size)
    return f"552 5.3.4 the message has {size} octets; zone {zone.name} sends no more than {most}"


def rates_in_force(zone: ZoneSettings, found: ExaminedRoute) -> dict[str, str]:
    """Those that there are, as they are written in the configuration."""
    rates: dict[str, Rate | None] = {
        "max_rate": zone.max_rate,
        "max_rate_per_destination": _limits(zone, found).max_rate,
    }
    return {name: str(rate) for name, rate in rates.items() if rate is not None}
