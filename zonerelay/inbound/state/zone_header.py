"""The header field in which a trusted client names the zone of its mail, such as `X-Sending-Zone`. No I/O.

The field is dropped from every message (`cleanup/own_headers`): recipients have no use for it, and the next
relay might obey it. Of several such fields the first counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from zonerelay.config.settings import ListenerSettings
from zonerelay.message.header.headers import Fields
from zonerelay.routing.addresses import Networks

_ANY = "*"


@dataclass(frozen=True, slots=True)
class ZoneHeader:
    """The field of one listener, and the clients that may use it. `name` is in lower case."""

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
        """Return the value of the first such field, `""` without one."""
        return next((value.strip() for name, value in fields if name.lower() == self.name), "")
