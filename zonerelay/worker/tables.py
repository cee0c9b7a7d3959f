"""Builds objects from the long tables of the configuration: rules, routes and keys.

Building them may take a second for ten thousand entries, so a reload does that in a thread and passes the
result to the event loop. Settings that have not changed stay the same objects, so comparing them again is
cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from zonerelay.config.settings import REPEATED, Settings, read_key_file, srs_secrets
from zonerelay.delivery.auth.logins import Senders, senders_of
from zonerelay.inbound.listen.listeners import ListenerRules, build_rules
from zonerelay.message.srs import Srs
from zonerelay.routing.addresses import ascii_domain, networks_of
from zonerelay.routing.destinations.mx import DestinationTable
from zonerelay.routing.zones.zones import Zones

if TYPE_CHECKING:
    from zonerelay.message.dkim.keys import DkimKeys

_NAMED = {"zone": "name", "listener": "address"}
"""Tables with a key, which are compared entry by entry."""


class Tables(msgspec.Struct, frozen=True):
    """The objects built from the tables of the configuration. `dkim_keys` is None if no keys are configured,
    and `srs` if [srs] has no domain. `senders` are those of credentials. `advice` is about the keys.
    """

    settings: Settings
    destinations: DestinationTable
    zones: Zones
    rules: ListenerRules
    srs: Srs | None
    senders: Senders
    dkim_keys: DkimKeys | None
    advice: tuple[str, ...]


def build_tables(
    settings: Settings, now: float, environment: Mapping[str, str], old: Tables | None = None
) -> Tables:
    """Build the tables, and reuse those of `old` whose settings have not changed. Blocks. Raise ValueError
    with a message.
    """
    before = None if old is None else old.settings
    if before is not None:
        settings = _with_objects_of(before, settings)

    def changed(*names: str) -> bool:
        return old is None or any(
            getattr(settings, name) is not getattr(old.settings, name) for name in names
        )

    for each in settings.listener:
        for networks in (each.allow_networks, each.proxy_networks, each.xclient_networks):
            networks_of(networks)
    dkim_keys = build_dkim_keys(settings, None if old is None else old.dkim_keys)
    return Tables(
        settings,
        DestinationTable(settings.destination) if old is None or changed("destination") else old.destinations,
        Zones(settings.zone, settings.route) if old is None or changed("zone", "route") else old.zones,
        build_rules(settings) if old is None or changed("access", "rewrite") else old.rules,
        build_srs(settings, environment),
        senders_of(settings.credential),
        dkim_keys,
        () if dkim_keys is None else tuple(dkim_keys.advice(now)),
    )


def build_dkim_keys(settings: Settings, old: DkimKeys | None = None) -> DkimKeys | None:
    """Build the DKIM keys, or return None without loading any code if [[dkim]] is empty. Keys of `old` are
    not tested again. Raise ValueError with a message.
    """
    if not settings.dkim:
        return None
    from zonerelay.message.dkim.keys import DkimKeys  # noqa: PLC0415

    return DkimKeys(settings.dkim, read=read_key_file, ascii_domain=ascii_domain, old=old)


def build_srs(settings: Settings, environment: Mapping[str, str]) -> Srs | None:
    """Return the SRS rewriter, or None if no domain is set in [srs]. Raise ValueError with a message."""
    if not settings.srs.domain:
        return None
    return Srs(settings.srs, srs_secrets(settings.srs, environment))


def _with_objects_of(old: Settings, new: Settings) -> Settings:
    """Return the new settings, with the old object in place of each table that has not changed."""
    found: dict[str, object] = {}
    for name in REPEATED:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            found[name] = before
        elif name in _NAMED:
            known = {getattr(each, _NAMED[name]): each for each in before}
            same = ((known.get(getattr(each, _NAMED[name])), each) for each in after)
            found[name] = tuple(there if there == each else each for there, each in same)
    return replace(new, **found)  # type: ignore[arg-type]
