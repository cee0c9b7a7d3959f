"""The [[access]] rules: who is refused, put off or let through, whatever else they may.

The first rule whose every given condition matches decides; accept means that no later rule is asked.
Networks and address patterns are looked up in sets: what a rule costs does not grow with their number,
except for patterns with a `*` in the local part, of which those for the mail's own domain are tried in turn.

Patterns: "user@example.com"; "example.com" (and "@example.com"): every address there; "*.example.com": at
every name below it, not at itself; "*": every address; "<>": the null sender, which nothing else matches. A
`*` in a local part stands for any text. Local parts are compared without case and quotes, because that is
how nearly every server delivers them: a list that `SPAM@` or `"spam"@` gets around is no list. Domains are
compared as A-labels in lower case.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from zonerelay.config.models import AccessAction, AccessSettings, Network
from zonerelay.model.reply import Reply
from zonerelay.routing.idna import ascii_domain, is_literal, literal_address

REFUSED = Reply(550, "7.1", "Access denied")
DEFERRED = Reply(450, "7.1", "Access denied for now")

_ANY = "*"
_NULL_SENDER = "<>"
_ESCAPED = re.compile(r"\\(.)")
_REPLY = re.compile(r"([0-9]{3}) (?:[245]\.([0-9]{1,3}\.[0-9]{1,3}) )?(.*)")


class AccessRules:
    """Made once from the settings; raises ValueError in words when a pattern's domain is none."""

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
        self._networks = _Networks(settings.client) if settings.client else None
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


class AddressPatterns:
    """Raises ValueError in words when a pattern's domain is none."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._null_sender = False
        self._addresses: set[tuple[str, str]] = set()
        self._domains: set[str] = set()
        self._below: set[str] = set()
        self._globs: dict[str, list[Callable[[str], bool]]] = {}  # by the domain pattern
        for pattern in patterns:
            self._add(pattern)

    def match(self, mailbox: str) -> bool:
        """`mailbox` as in an envelope, `""` for the null sender."""
        if not mailbox:
            return self._null_sender
        local, domain = _parts(mailbox)
        if domain in self._domains or _ANY in self._domains or (local, domain) in self._addresses:
            return True
        if self._below and any(parent in self._below for parent in _parents(domain)):
            return True
        return bool(self._globs) and self._matches_glob(local, domain)

    def _add(self, pattern: str) -> None:
        local, _, domain = pattern.rpartition("@")
        name = _domain_pattern(domain)
        if pattern == _NULL_SENDER:
            self._null_sender = True
        elif local in ("", _ANY):
            (self._below if name.startswith("*.") else self._domains).add(name.removeprefix("*."))
        elif _ANY in local or _ANY in name:
            self._globs.setdefault(name, []).append(_glob(_local_part(local)))
        else:
            self._addresses.add((_local_part(local), name))

    def _matches_glob(self, local: str, domain: str) -> bool:
        names = (domain, _ANY, *(f"*.{parent}" for parent in _parents(domain)))
        return any(matches(local) for name in names for matches in self._globs.get(name, ()))


class _Networks:
    """Networks in a set for each length of prefix."""

    def __init__(self, networks: Iterable[Network]) -> None:
        self._prefixes: dict[tuple[int, int], set[int]] = {}
        for network in networks:
            shift = network.max_prefixlen - network.prefixlen
            found = self._prefixes.setdefault((network.version, shift), set())
            found.add(int(network.network_address) >> shift)

    def match(self, address: str) -> bool:
        version, number = _number(address)
        return any(
            version == of and number >> shift in prefixes for (of, shift), prefixes in self._prefixes.items()
        )


def _reply(settings: AccessSettings) -> Reply | None:
    if settings.action is AccessAction.ACCEPT:
        return None
    usual = REFUSED if settings.action is AccessAction.REFUSE else DEFERRED
    match = _REPLY.fullmatch(settings.reply)
    if match is None:
        return usual
    return Reply(int(match[1]), match[2] or usual.detail, match[3])


def _glob(pattern: str) -> Callable[[str], bool]:
    """Pieces are looked for from left to right: no pattern makes a text be gone through twice."""
    first, *middle = pattern.split(_ANY)
    last = middle.pop() if middle else None

    def matches(text: str) -> bool:
        if last is None:
            return text == first
        if not (text.startswith(first) and text.endswith(last)):
            return False
        at, end = len(first), len(text) - len(last)
        for piece in middle:
            at = text.find(piece, at, end)
            if at < 0:
                return False
            at += len(piece)
        return at <= end

    return matches


def _domain_pattern(pattern: str) -> str:
    if pattern in (_ANY, _NULL_SENDER):
        return pattern
    name = pattern.removeprefix("*.")
    try:
        ascii_form = _literal(name) if is_literal(name) else ascii_domain(name)
    except ValueError as error:
        raise ValueError(f'"{pattern}" cannot be matched: {error}') from error
    return f"*.{ascii_form}" if name != pattern else ascii_form


@lru_cache(4096)
def _parts(mailbox: str) -> tuple[str, str]:
    """Local part and domain as they compare; a bare postmaster (RFC 5321 4.5.1) has no domain."""
    local, at, domain = mailbox.rpartition("@")
    if not at:
        return _local_part(domain), ""
    try:
        return _local_part(local), _literal(domain) if is_literal(domain) else ascii_domain(domain)
    except ValueError:
        return _local_part(local), domain.lower()


def _local_part(text: str) -> str:
    if len(text) > 1 and text.startswith('"') and text.endswith('"'):
        text = _ESCAPED.sub(r"\1", text[1:-1])
    return text.lower()


def _literal(domain: str) -> str:
    address = literal_address(domain)
    return f"[{address}]" if address is not None else domain.lower()


def _parents(domain: str) -> Iterator[str]:
    while domain := domain.partition(".")[2]:
        yield domain


@lru_cache(1024)
def _number(address: str) -> tuple[int, int]:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket
        return 0, 0
    return ip.version, int(ip)
