"""The header field in which a trusted client names the zone of its mail, such as `X-Sending-Zone`. No I/O.

Taken out of every message, whoever wrote it: recipients have no use for it, and the next relay might obey it.
Nobody behind the door sees it either: not the policy, not the routes, not who reads the queue. Of
several such fields the first counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zonerelay.config.models import ListenerSettings
from zonerelay.message.headers import Fields, Header
from zonerelay.routing.networks import Networks

_ANY = "*"


@dataclass(frozen=True, slots=True)
class ZoneHeader:
    """Of one listener. `name` is in lower case."""

    name: str
    users: frozenset[str]
    networks: Networks

    @classmethod
    def of(cls, settings: ListenerSettings) -> ZoneHeader | None:
        """`None` when the listener has no such field."""
        if not settings.zone_header:
            return None
        users = frozenset(settings.zone_header_users)
        return cls(settings.zone_header.lower(), users, Networks(settings.zone_header_networks))

    def trusts(self, client_address: str, user: str) -> bool:
        if user and (user in self.users or _ANY in self.users):
            return True
        return self.networks.match(client_address)

    def zone_in(self, fields: Fields) -> str:
        """What the first such field says, `""` when none says anything."""
        return next((value.strip() for name, value in fields if name.lower() == self.name), "")

    def taken_out_of(self, header: Header) -> Header:
        fields = tuple(field for field in header.fields if field[0].lower() != self.name)
        return replace(header, fields=fields, names=header.names - {self.name})
