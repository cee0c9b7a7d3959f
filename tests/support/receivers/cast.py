"""Who plays what: names, addresses, DNS, and what a relay is told about its limits.

The receiver `name` has the domain `name.test`, and the host `mx.name.test` at its address.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.dns import Records
from tests.support.receivers.ledger import Promise
from tests.support.receivers.nature import Nature, Point, Tls
from tests.support.toml import Table, Value
from zonerelay.config.units import Rate

BLOCKED_SOURCE = "127.0.0.2"
GOOD_SOURCE = "127.0.0.3"
EHLO_NAMES = {BLOCKED_SOURCE: "out2.relay.test", GOOD_SOURCE: "out3.relay.test"}
PROVIDER_DOMAINS = 1000
ZONE_CONNECTIONS = 60


@dataclass(frozen=True, kw_only=True)
class Member:
    """`mails`: messages that the load has for it, to at most `recipients` each. `lists`: to a hundred.

    `before`: numbers of addresses where nobody listens, or nobody speaks, with a better preference.
    """

    name: str
    number: int
    nature: Nature = field(default_factory=Nature)
    mails: int = 0
    lists: int = 0
    recipients: int = 1
    before: tuple[int, ...] = ()
    domains: tuple[str, ...] = ()
    told: Table = field(default_factory=dict)
    hopeless: bool = False
    plain: bool = False

    @property
    def address(self) -> str:
        return f"127.0.1.{self.number}"

    @property
    def host(self) -> str:
        return f"mx.{self.name}.test"

    @property
    def all_domains(self) -> tuple[str, ...]:
        return self.domains or (f"{self.name}.test",)


DEAD, SILENT = 250, 240
"""Numbers of addresses: nobody listens there; somebody does, and never greets."""

_TIGHT = Promise(connections=3, rate=(20, 1.0), recipients=10, messages=15)
_PROVIDER = Promise(connections=3, recipients=50)

CAST = (
    # Good ones.
    Member(name="plain1", number=1, nature=Nature(chunking=True, tls=Tls.GOOD),
           mails=200, lists=4, plain=True),
    Member(name="plain2", number=2, mails=200, lists=4, plain=True),
    Member(name="plain3", number=3, nature=Nature(dsn=True, size=10_000_000, tls=Tls.GOOD),
           mails=150, recipients=5, plain=True),
    Member(name="origin", number=4, nature=Nature(tls=Tls.GOOD)),
    Member(name="provider", number=5, nature=Nature(chunking=True, promise=_PROVIDER), mails=800,
           domains=tuple(f"d{n}.provided.test" for n in range(PROVIDER_DOMAINS)),
           told={"max_connections": 3}),
    # Old ones.
    Member(name="nopipe", number=10, nature=Nature(pipelining=False), mails=40, lists=1, recipients=3),
    Member(name="nopipe-chunks", number=11, nature=Nature(pipelining=False, chunking=True), mails=30),
    Member(name="helo", number=12, nature=Nature(esmtp=False), mails=40, recipients=3),
    # Those that want less.
    Member(name="rated", number=20, nature=Nature(promise=_TIGHT), mails=120, lists=2, told={
        "max_connections": 3, "max_rate": str(Rate(20, 1.0)), "max_recipients_per_transaction": 10,
        "max_messages_per_connection": 15}),
    Member(name="hurried", number=21, nature=Nature(rate=(8, 1.0)), mails=60),
    Member(name="impatient", number=22,
           nature=Nature(rate=(8, 1.0), over_rate="421 4.7.0 too much mail from you, try again later"),
           mails=60),
    Member(name="crowded", number=23, nature=Nature(most_connections=2, replies_after=0.05), mails=40),
    Member(name="few", number=24, nature=Nature(most_recipients=5, too_many="552 too many recipients"),
           mails=20, lists=2, recipients=20),
    Member(name="closing", number=25, nature=Nature(closes_after=5), mails=60),
    # Those that look at who it is.
    Member(name="grey", number=30, nature=Nature(greylist=3.0), mails=60, recipients=2),
    Member(name="blocks-greeting", number=31, nature=Nature(blocks=(BLOCKED_SOURCE,)), mails=40),
    Member(name="blocks-mail", number=32, nature=Nature(blocks=(BLOCKED_SOURCE,), blocks_at=Point.MAIL),
           mails=40),
    Member(name="blocks-dot", number=33, nature=Nature(blocks=(BLOCKED_SOURCE,), blocks_at=Point.DOT),
           mails=40),
    # Broken ones.
    Member(name="tls-garbage", number=40, nature=Nature(tls=Tls.GARBAGE), mails=30),
    Member(name="tls-closed", number=41, nature=Nature(tls=Tls.CLOSED), mails=30),
    Member(name="tls-absent", number=42, nature=Nature(tls=Tls.ABSENT), mails=30),
    Member(name="tls-refused", number=43, nature=Nature(tls=Tls.REFUSED), mails=30),
    Member(name="tls-expired", number=44, nature=Nature(tls=Tls.EXPIRED), mails=30),
    Member(name="required-expired", number=45, nature=Nature(tls=Tls.EXPIRED),
           mails=20, told={"tls": "required"}),
    Member(name="required-garbage", number=46, nature=Nature(tls=Tls.GARBAGE),
           mails=5, told={"tls": "required"},
           hopeless=True),
    Member(name="verify-expired", number=47, nature=Nature(tls=Tls.EXPIRED), mails=5, told={"tls": "verify"},
           hopeless=True),
    # Slow ones.
    Member(name="slow", number=50, nature=Nature(pipelining=False, replies_after=0.3, reads_slowly=True),
           mails=25),
    Member(name="tarpit", number=51, nature=Nature(greets_after=1.5, octets_apart=0.01), mails=15),
    Member(name="mute", number=52, nature=Nature(mute_at_first=True), mails=12),
    Member(name="mute-chunks", number=53, nature=Nature(mute_at_first=True, chunking=True), mails=12),
    # Moody ones.
    Member(name="first-data", number=60, nature=Nature(at_first_data="451 4.3.0 not now"), mails=30),
    Member(name="first-bdat", number=61, nature=Nature(at_first_data="451 4.3.0 not now", chunking=True),
           mails=30),
    Member(name="first-dot", number=62, nature=Nature(at_first_dot="451 4.3.0 try again"), mails=30),
    Member(name="moody", number=63, nature=Nature(says_421=0.05), mails=40),
    Member(name="resets", number=64, nature=Nature(resets=0.05), mails=40),
    Member(name="resets-chunks", number=65, nature=Nature(resets=0.05, chunking=True), mails=40),
    # Those that are hard to find, or not there.
    Member(name="half-dead", number=70, before=(DEAD,), mails=40),
    Member(name="half-silent", number=71, before=(SILENT,), mails=40),
    Member(name="silent", number=SILENT, nature=Nature(silent=True, promise=Promise(connections=8)),
           mails=5, hopeless=True),
    Member(name="dead", number=DEAD, mails=10, hopeless=True),
)  # fmt: skip

NULL_MX, NOWHERE = "nullmx.test", "nowhere.test"


def zones(cast: Sequence[Member]) -> dict[str, Records]:
    found: dict[str, Records] = {NULL_MX: {"MX": ["0 ."]}}
    for member in cast:
        found[member.host] = {"A": [member.address]}
        hosts = [f"20 {member.host}."]
        for number in member.before:
            found[f"mx{number}.test"] = {"A": [f"127.0.1.{number}"]}
            hosts.append(f"10 mx{number}.test.")
        for domain in member.all_domains:
            found[domain] = {"MX": hosts}
    return found


def destinations(cast: Sequence[Member]) -> list[Table]:
    tables: list[dict[str, Value]] = [{"mx": [each.host], **each.told} for each in cast if each.told]
    return list(tables)
