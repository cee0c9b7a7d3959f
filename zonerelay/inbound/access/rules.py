"""The [[access]] rules: which clients, users and addresses are refused, deferred or accepted.

The first rule decides whose every given condition matches; after `accept` no later rule is asked. The cost of
a rule does not grow with the number of its networks and address patterns (`routing/zones/address_patterns`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from zonerelay.config.settings import AccessAction, AccessSettings
from zonerelay.model.reply import Reply
from zonerelay.routing.zones.address_patterns import AddressPatterns
from zonerelay.routing.zones.networks import Networks

REFUSED = Reply(550, "7.1", "Access denied")
DEFERRED = Reply(450, "7.1", "Access denied for now")

_ANY = "*"
_REPLY = re.compile(r"([0-9]{3}) (?:[245]\.([0-9]{1,3}\.[0-9]{1,3}) )?(.*)")


class AccessRules:
    """The rules, made once from the settings. Raises ValueError when the domain of a pattern is invalid."""

    def __init__(self, rules: Sequence[AccessSettings]) -> None:
        self._rules = tuple(_Rule(rule) for rule in rules)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def decide(self, client_address: str, user: str, sender: str, recipient: str) -> Reply | None:
        """The refusal, if there is one. `client_address` is `""` on a Unix socket: in no network."""
        for rule in self._rules:
            if rule.matches(client_address, user, sender, recipient):
                return rule.reply
        return None


class _Rule:
    def __init__(self, settings: AccessSettings) -> None:
        self.reply = _reply(settings)
        self._networks = Networks(settings.client) if settings.client else None
        self._users = frozenset(settings.user)
        self._sender = AddressPatterns(settings.sender) if settings.sender else None
        self._recipient = AddressPatterns(settings.recipient) if settings.recipient else None

    def matches(self, client_address: str, user: str, sender: str, recipient: str) -> bool:
        return (
            (not self._users or user in self._users or (bool(user) and _ANY in self._users))
            and (self._networks is None or self._networks.match(client_address))
            and (self._recipient is None or self._recipient.match(recipient))
            and (self._sender is None or self._sender.match(sender))
        )


def _reply(settings: AccessSettings) -> Reply | None:
    if settings.action is AccessAction.ACCEPT:
        return None
    usual = REFUSED if settings.action is AccessAction.REFUSE else DEFERRED
    match = _REPLY.fullmatch(settings.reply)
    if match is None:
        return usual
    return Reply(int(match[1]), match[2] or usual.detail, match[3])
