"""The part of `explain` and `status` about the sources of a zone, as messages of the control socket."""

from __future__ import annotations

from collections.abc import Sequence

from zonerelay.config.settings import ZoneSettings
from zonerelay.delivery.source.selection import SourceSelection, SourceStatus
from zonerelay.model.reply import Reply
from zonerelay.operations.answers import SourcePenalty, SourcePlan
from zonerelay.routing.destinations.route import SiteKey

MAX_PENALTIES = 1000


class Untold:
    """Satisfies `source_ways.Reports` where there is no relay whose log it could go to."""

    def source_refused(self, zone: str, source: str, destination: str, reply: Reply, until: float) -> None:
        pass

    def source_refused_again(self, source: str) -> None:
        pass

    def source_absent(self, source: str, address: str, problem: str) -> None:
        pass

    def source_back(self, source: str, address: str) -> None:
        pass


class SourcePlans:
    """`hostname` is what the relay calls itself."""

    def __init__(self, selection: SourceSelection, *, hostname: str) -> None:
        self._selection = selection
        self._hostname = hostname

    def of(self, zone: ZoneSettings, site: SiteKey | None, sender: str) -> tuple[SourcePlan, ...]:
        """Returns the sources for mail of this sender (`""`: unknown) to these hosts, if there are any."""
        if not zone.sources:
            return ()
        return tuple(self._plan(zone, each) for each in self._selection.statuses(zone, site, sender))

    def _plan(self, zone: ZoneSettings, status: SourceStatus) -> SourcePlan:
        source, penalty = status.source, status.penalty
        return SourcePlan(
            name=source.name,
            addresses=source.address,
            ehlo_name=source.ehlo_name or zone.ehlo_name or self._hostname,
            share=round(status.share, 4),
            chosen=status.first,
            refused_until=penalty.until if penalty else None,
            refused_reply=str(penalty.reply) if penalty else "",
            refused_ipv6_only=penalty.ipv6 if penalty else False,
            absent=status.absent,
        )

    def penalties(self) -> tuple[SourcePenalty, ...]:
        """The latest first."""
        latest = self._selection.penalties()[: -MAX_PENALTIES - 1 : -1]
        return tuple(
            SourcePenalty(
                source=each.source,
                destination=each.hosts,
                until=each.until,
                reply=str(each.reply),
                ipv6_only=each.ipv6,
            )
            for each in latest
        )


def candidates(plans: Sequence[SourcePlan]) -> list[SourcePlan]:
    """Returns the sources that the mail may go out from: one, where that is certain."""
    chosen = [plan for plan in plans if plan.chosen]
    return chosen or [plan for plan in plans if plan.share]


def own_addresses(plans: Sequence[SourcePlan], *, ipv6: bool) -> str:
    """Returns the addresses of a family, in the order of the configuration; `""` if there is none."""
    return ", ".join(ip for plan in candidates(plans) for ip in plan.addresses if (":" in ip) == ipv6)
