"""The receivers of a simulation: kinds of domains, the servers behind them and how these behave.

A domain's name says its kind (`d17.greylisting.test`), so that nothing has to be remembered about 100,000 of
them; a server is made when somebody first connects. What a server does is decided by the time and by a
random number generator with a seed.
"""

import zlib
from collections import deque
from dataclasses import dataclass, replace
from random import Random

from zonerelay.model.delivery import Delivery
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.routing.destinations.route import DestinationLimits

HOUR = 3600.0
TLD = ".test"

TAKEN = Outcome(Verdict.DELIVERED, Reply(250, "0.0", "taken"), host="mx.test", peer="192.0.2.1:25")
REFUSED = Outcome(Verdict.BOUNCED, Reply(550, "1.1", "no such user"), host="mx.test")
GREYLISTED = Outcome(Verdict.DEFERRED, Reply(451, "7.1", "greylisted, come back later"), host="mx.test")
TOO_MUCH = Outcome(Verdict.DEFERRED, Reply(451, "7.0", "too much mail from you"), host="mx.test")
TRY_LATER = Outcome(Verdict.DEFERRED, Reply(450, "2.0", "mailbox busy"), host="mx.test")
NO_HOST = Outcome(Verdict.DEFERRED, Reply(451, "4.1", "no host answers"), Scope.HOST, local=True)
TOO_MANY = Outcome(Verdict.DEFERRED, Reply(421, "7.0", "too many connections"), Scope.HOST, host="mx.test")
SILENT = Outcome(Verdict.DEFERRED, Reply(451, "4.2", "no answer in time"), Scope.MESSAGE, local=True)
NO_DNS = Outcome(
    Verdict.DEFERRED, Reply(451, "4.3", "name servers do not answer"), Scope.DOMAIN, local=True, counts=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Domains that behave alike. `share` of all recipients, over `domains` names on `sites` sets of hosts
    (0: each domain its own).

    `seconds`: what a transaction takes, from–to. `limits`: what the relay's configuration says about them.
    What the receiver wants: `most_connections` at once, others get 421; `most_rate` messages a minute, others
    get 451; a first attempt that lies back `greylist` seconds. In the seconds (from, to) of `down` nobody
    answers. `refused`, `busy`: the part of the recipients that gets 550, of the attempts that gets 450.
    `connecting`: seconds until a connection stands, or fails where the host is dead.
    """

    name: str
    share: float
    domains: int
    sites: int = 0
    seconds: tuple[float, float] = (0.05, 0.3)
    connecting: float = 0.1
    limits: DestinationLimits | None = None
    most_connections: int = 1000
    most_rate: float = 0.0
    greylist: float = 0.0
    down: tuple[tuple[float, float], ...] = ()
    dead: bool = False
    silent: bool = False
    refused: float = 0.0
    busy: float = 0.0
    no_dns: bool = False
    look_up: float = 0.02
    even: bool = False
    """Every domain gets as much mail as the next one; otherwise a few get most of it."""


@dataclass(slots=True)
class Site:
    """The hosts behind one or many domains."""

    name: str
    kind: Kind
    open: int = 0
    most_open: int = 0
    taken: int = 0
    recent: deque[float] | None = None
    """When the last messages came, where the configuration or the server limits their rate."""

    def is_down(self, now: float) -> bool:
        return self.kind.dead or any(start <= now < end for start, end in self.kind.down)

    def greet(self, now: float) -> Outcome | None:
        """Why a new connection is no use; `None` when it is."""
        if self.is_down(now):
            return NO_HOST
        return TOO_MANY if self.open >= self.kind.most_connections else None

    def answer(self, delivery: Delivery, now: float, age: float, random: Random) -> Outcome:
        kind = self.kind
        if kind.silent:
            return SILENT
        if kind.refused and zlib.crc32(delivery.recipient.encode()) % 1000 < 1000 * kind.refused:
            return REFUSED
        if kind.greylist and (not delivery.attempts or age < kind.greylist):
            return GREYLISTED
        if kind.busy and random.random() < kind.busy:
            return TRY_LATER
        return TOO_MUCH if kind.most_rate and not self._may_take(now) else TAKEN

    def _may_take(self, now: float) -> bool:
        recent = self.recent = deque() if self.recent is None else self.recent
        while recent and recent[0] <= now - 60.0:
            recent.popleft()
        if len(recent) >= self.kind.most_rate:
            return False
        recent.append(now)
        return True


class World:
    """All domains. `pick` draws one for a recipient."""

    def __init__(self, kinds: tuple[Kind, ...], random: Random) -> None:
        self.kinds = {kind.name: kind for kind in kinds}
        self.random = random
        self.sites: dict[str, Site] = {}
        self._list = list(kinds)
        self._bounds: list[float] = []
        total = 0.0
        for kind in kinds:
            total += kind.share
            self._bounds.append(total)

    def pick(self) -> str:
        kind = self.random.choices(self._list, cum_weights=self._bounds)[0]
        return self.domain_in(kind)

    def domain_in(self, kind: Kind) -> str:
        draw = self.random.random()
        return f"d{int(kind.domains * (draw if kind.even else draw**3))}.{kind.name}{TLD}"

    def kind_of(self, domain: str) -> Kind:
        return self.kinds[kind_name(domain)]

    def site_name(self, domain: str) -> str:
        """The name of the hosts that take mail for a domain."""
        kind = self.kind_of(domain)
        if not kind.sites:
            return f"mx.{domain}"
        number = int(domain[1 : domain.index(".")]) % kind.sites
        return f"mx.d{number}.{kind.name}{TLD}"

    def site(self, name: str) -> Site:
        site = self.sites.get(name)
        if site is None:
            site = self.sites[name] = Site(name, self.kind_of(name))
        return site


def kind_name(domain: str) -> str:
    """`greylisting` of `d17.greylisting.test`, also of a host or an address there."""
    return domain.rsplit(".", 2)[-2]


def with_kind(kinds: tuple[Kind, ...], name: str, **changes: object) -> tuple[Kind, ...]:
    """The same kinds, one of them changed."""
    return tuple(replace(kind, **changes) if kind.name == name else kind for kind in kinds)  # type: ignore[arg-type]  # fields by name
