"""[[route]], [[access]] and [auth]: the choice of the zone, access rules, and user authentication."""

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.options import forms
from zonerelay.config.options import options as declare
from zonerelay.config.options.options import DAY, MINUTE
from zonerelay.config.problems import Findings, unreachable
from zonerelay.config.tables.listener import ListenerAuth, ListenerSettings, Network, in_full
from zonerelay.config.tables.zone import DEFAULT_ZONE
from zonerelay.config.units import format_size
from zonerelay.model.envelope import Priority

# [auth] and [[access]]: the users who may log in, and the clients that may use the relay for a recipient.


class AccessAction(enum.StrEnum):
    """The action of an [[access]] rule on a recipient that it matches."""

    REFUSE = "refuse"
    DEFER = "defer"
    ACCEPT = "accept"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    """User authentication for all listeners (docs/send/users.md)."""

    credentials: Path = declare.path(Path("/etc/zonerelay/credentials"))
    """The file of users and argon2 password hashes, which zonerelay user maintains. Listeners with auth
    require it; changes count from the next login.
    """
    max_client_failures: int = declare.count(10)
    """Failed logins of one client (an IPv4 address or an IPv6 /64) within forget_failures, after which it
    gets 454 4.7.0 without a password check.
    """
    max_network_failures: int = declare.count(50)
    """The same for a network (an IPv4 /24 or an IPv6 /48)."""
    max_account_failures: int = declare.count(100)
    """The same for an account. Users who recently logged in from a network are not locked out of it by
    others' failures.
    """
    forget_failures: float = declare.duration(15 * MINUTE, most=DAY)
    """How long a failed login is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """A rule that allows or rejects recipients. The first rule whose every condition matches decides."""

    client: tuple[Network, ...] = declare.networks(())
    """Addresses and networks of clients."""
    sender: tuple[str, ...] = declare.texts((), form=forms.address_pattern)
    """Envelope senders: "user@example.com", "example.com", "*.example.com" (every subdomain),
    "bounce-*@example.com", "<>".
    """
    recipient: tuple[str, ...] = declare.texts((), form=forms.address_pattern)
    """Recipients, in the same forms."""
    user: tuple[str, ...] = declare.texts(())
    """Authenticated users; "*" is any user."""
    action: AccessAction = declare.choice(AccessAction.REFUSE)
    """refuse: 550 5.7.1. defer: 450 4.7.1. accept: later rules are skipped; it does not allow clients to
    relay that otherwise could not.
    """
    reply: str = declare.text("", form=forms.reply)
    """Another reply: "554 5.7.1 Ask postmaster@example.org", a 5yz code for refuse, a 4yz code for defer."""


def access_problems(rule: AccessSettings) -> Findings:
    if not any((rule.client, rule.sender, rule.recipient, rule.user)):
        no = "has no condition, so it would match all mail; add client, sender, recipient or user"
        yield (), no
    suits = {AccessAction.REFUSE: "5", AccessAction.DEFER: "4"}.get(rule.action)
    if rule.reply and suits is None:
        yield "reply", 'has no effect with action = "accept"; remove one of them'
    elif rule.reply and not rule.reply.startswith(suits or ""):
        other = "defer" if suits == "5" else "refuse"
        codes = f"a code from {suits}00 to {suits}99"
        yield "reply", f'action = "{rule.action}" requires {codes}; change it, or set action = "{other}"'
    elif rule.reply.startswith("421"):
        yield "reply", "must not use 421, which announces that the connection is closed; use 450 or 451"


def auth_advice(auth: AuthSettings, listeners: Sequence[ListenerSettings]) -> Findings:
    needed = any(listener.auth is not ListenerAuth.OFF for listener in listeners)
    if needed and not auth.credentials.is_absolute():
        yield "credentials", in_full(auth.credentials)
    if not needed and auth != AuthSettings():
        yield (), 'applies only to mail submitted over HTTP: no listener has auth = "optional" or "required"'


def access_advice(rules: Sequence[AccessSettings]) -> Findings:
    if rules and rules[-1].action is AccessAction.ACCEPT:
        nothing = "accept has no effect in the last rule; add a rule after it that refuses other mail"
        yield (len(rules) - 1, "action"), nothing


def route_problems(route: "RouteSettings") -> Findings:
    if not route.conditions:
        default = f'mail that no route matches is sent in the zone "{DEFAULT_ZONE}"'
        yield (), f"has no condition, so it would match all mail; add one ({default})"
    if route.max_size and route.min_size > route.max_size:
        more = f"{format_size(route.min_size)} is more than max_size = {format_size(route.max_size)}"
        yield "min_size", f"{more}, so this route would never match"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """A rule that chooses the zone of a message (docs/deliver/routing.md). The first route whose every
    condition matches counts; other mail goes to the zone named default.
    """

    zone: str = declare.text("default", form=forms.name)
    """The zone of mail that matches all conditions."""
    set_priority: Priority | None = declare.optional_choice(Priority)
    """The priority of this mail: high, normal or bulk. Empty: unchanged."""
    recipient_domain: tuple[str, ...] = declare.texts((), form=forms.domain)
    """The recipient's domain: "example.com", "*.example.com" (every subdomain), "*" (any)."""
    recipient: tuple[str, ...] = declare.texts((), form=forms.address_pattern)
    """The recipient: "user@example.com", "example.com", "*.example.com", "bounce-*@example.com"."""
    sender_domain: tuple[str, ...] = declare.texts((), form=forms.domain)
    """The domain of the envelope sender, as in recipient_domain."""
    sender: tuple[str, ...] = declare.texts((), form=forms.address_pattern)
    """The envelope sender, as in recipient; "<>" is the null sender."""
    user: tuple[str, ...] = declare.texts(())
    """The authenticated user; "*" is any user."""
    listener: tuple[str, ...] = declare.texts((), form=forms.listen)
    """The listener that accepted the mail, by its address."""
    client: tuple[Network, ...] = declare.networks(())
    """The client's address or network."""
    certificate: tuple[str, ...] = declare.texts((), form=forms.fingerprint)
    """The SHA-256 fingerprint of the client's certificate. It requires allow_certificates of the listener."""
    priority: tuple[Priority, ...] = declare.choices(Priority)
    """The priority: "high", "normal", "bulk"."""
    min_size: int = declare.size(0, least=1, optional=True)
    """The minimum size of the message as it was received. 0: any."""
    max_size: int = declare.size(0, least=1, optional=True)
    """The maximum size of the message. 0: any."""
    header: tuple[str, ...] = declare.texts((), form=forms.header)
    """A header field: "X-Stream" (any value) or "X-Stream: bulk" (the value contains the text)."""

    @property
    def conditions(self) -> dict[str, tuple[object, ...]]:
        """The values of each condition of the route, by the name of the option."""
        named = ((name, getattr(self, name)) for name in _CONDITIONS)
        return {name: value if isinstance(value, tuple) else (value,) for name, value in named if value}


_CONDITIONS = tuple(
    field.name for field in dataclasses.fields(RouteSettings) if field.name not in ("zone", "set_priority")
)


def route_advice(routes: Sequence[RouteSettings], listeners: Sequence[ListenerSettings]) -> Findings:
    conditions = [{name: frozenset(values) for name, values in route.conditions.items()} for route in routes]
    for at, other in unreachable(conditions):
        yield (at,), f"never matches, because route[{other}] comes first and matches all its mail"
    certificates = any(each.allow_certificates for each in listeners)
    for at, route in enumerate(routes):
        if route.certificate and not certificates:
            yield (at, "certificate"), "never matches: no listener requests certificates (allow_certificates)"
