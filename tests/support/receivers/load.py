"""A mixed load for the cast, each message with a token of its own, and what has to become of it.

A message has the sender `b-TOKEN@origin.test`, so that receivers know the message by its sender, and reports
about it say in their recipient what they are about.
"""

import asyncio
import base64
import contextlib
import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.support.receivers.cast import NOWHERE, NULL_MX, Member
from tests.support.smtp_client import SmtpClient, connected

ORIGIN = "origin.test"
SESSIONS = 8
LIST = 100
SIZES, WEIGHTS = (1_000, 10_000, 60_000, 300_000), (80, 15, 4, 1)
_NOISE = base64.encodebytes(random.Random(1).randbytes(230_000)).replace(b"\n", b"\r\n")


@dataclass(frozen=True, kw_only=True)
class Mail:
    """`failing` are those of its recipients whose mail has to come back."""

    token: str
    to: str
    """The member it is for, or the domain of one that does not exist."""
    recipients: tuple[str, ...]
    failing: frozenset[str]
    size: int

    @property
    def message(self) -> bytes:
        body = b"%b\r\n%b\r\n" % (self.token.encode(), _NOISE[: self.size - self.size % 78])
        header = (
            f"From: News <news@{ORIGIN}>\r\nTo: readers@{ORIGIN}\r\nSubject: {self.token}\r\n"
            f"Date: Sat, 21 Nov 2026 10:00:00 +0000\r\nMessage-ID: <{self.token}@{ORIGIN}>\r\n"
            f"X-Digest: {hashlib.sha256(body).hexdigest()}\r\n\r\n"
        )
        return header.encode() + body


def plan(cast: Sequence[Member], *, seed: int, prefix: str = "m", part: float = 1.0) -> list[Mail]:
    """In the order to send them; `part` of what the cast has."""
    chance = random.Random(seed)
    mails: list[Mail] = []

    def add(to: str, domains: Sequence[str], count: int, *, mixed: bool, hopeless: bool) -> None:
        token = f"{prefix}{len(mails)}"
        kinds = [_kind(chance) if mixed else "r" for _ in range(count)]
        recipients = tuple(f"{kind}{n}-{token}@{chance.choice(domains)}" for n, kind in enumerate(kinds))
        failing = frozenset(each for each in recipients if hopeless or each.startswith("nobody"))
        size = chance.choices(SIZES, WEIGHTS)[0] if count < LIST else SIZES[0]
        mails.append(Mail(token=token, to=to, recipients=recipients, failing=failing, size=size))

    for member in cast:
        for number in range(round(member.mails * part)):
            domains = [member.all_domains[number % len(member.all_domains)]]
            count = chance.randint(1, member.recipients)
            add(member.name, domains, count, mixed=False, hopeless=member.hopeless)
        for _ in range(round(member.lists * part)):
            add(member.name, member.all_domains, LIST, mixed=True, hopeless=member.hopeless)
    for domain in (NULL_MX, NOWHERE):
        for _ in range(round(10 * part)):
            add(domain, [domain], 1, mixed=False, hopeless=True)
    chance.shuffle(mails)
    # Those that nobody takes first: they are what good ones must not wait for, and what takes longest.
    mails.sort(key=lambda mail: len(mail.failing) < len(mail.recipients))
    return mails


def _kind(chance: random.Random) -> str:
    """Of a recipient on a list: good, unknown there, or full for a moment."""
    return chance.choices(("r", "nobody", "full"), (90, 5, 5))[0]


@dataclass
class Sender:
    """`sent`: when each token was acknowledged, by the monotonic clock. `unclear`: no answer came."""

    port: int
    rate: float
    """Messages in a second, at most."""
    sent: dict[str, float] = field(default_factory=dict)
    unclear: set[str] = field(default_factory=set)
    refusals: list[str] = field(default_factory=list)

    async def run(self, mails: Sequence[Mail]) -> None:
        """Ends when all is sent, or the relay has gone."""
        left, began = iter(enumerate(mails)), time.monotonic()
        await asyncio.gather(*(self._session(left, began) for _ in range(SESSIONS)))

    async def _session(self, left: Iterator[tuple[int, Mail]], began: float) -> None:
        with contextlib.suppress(OSError, EOFError):
            async with connected(self.port, b"EHLO load.origin.test") as client:
                for number, mail in left:
                    await asyncio.sleep(began + number / self.rate - time.monotonic())
                    await self._send(client, mail)
                await client.say(b"QUIT")

    async def _send(self, client: SmtpClient, mail: Mail) -> None:
        recipients = [f"RCPT TO:<{each}>\r\n" for each in mail.recipients]
        commands = [f"MAIL FROM:<b-{mail.token}@{ORIGIN}>\r\n", *recipients, "DATA\r\n"]
        client.write("".join(commands).encode())
        refused = await client.refusals(len(commands))
        if not refused:
            self.unclear.add(mail.token)
            client.write(mail.message + b".\r\n")
            refused = await client.refusals(1)
            self.unclear.discard(mail.token)
        if not refused:
            self.sent[mail.token] = time.monotonic()
        self.refusals += [each.decode() for each in refused]
