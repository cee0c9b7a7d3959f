"""Enforces user limits (`config/user_limits`): decides from the user's name what the user may do.

SMTP sessions check them at login, at MAIL, at RCPT and before the commit. Other ways of submitting mail call
the same functions. A change of the file takes effect at the next MAIL, without a reload. A user without
limits costs one stat per message; mail without a login costs nothing.

On failure: if the limits cannot be read or the usage cannot be counted, mail is refused temporarily. A
failure never permits more.

The module also keeps files in memory. The credentials file is checked at every login and read again if it has
changed; the file with the users' limits is checked at every login and MAIL of a user. While the credentials
file is missing, unreadable or malformed, no user can log in, and no client is informed that its password is
wrong. Each change is logged once. Logins work again when the file is valid.
"""

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from zonerelay.config import user_limits
from zonerelay.config.credentials.file import CredentialsError
from zonerelay.config.units import format_size
from zonerelay.config.user_limits import NONE, UserLimits, UserMode, file_beside
from zonerelay.inbound.limits.quotas import NEAR, ExhaustedQuota, Quotas, Usage
from zonerelay.inbound.refusal import Reason, Refusal
from zonerelay.limits.authority import AuthorityError
from zonerelay.limits.shared import RecordStore
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Mailbox
from zonerelay.model.reply import Reply
from zonerelay.process.files import FileState, file_state
from zonerelay.process.threads import ACCESS
from zonerelay.routing.addresses import Networks
from zonerelay.routing.zones.address_patterns import AddressPatterns
from zonerelay.telemetry.events.events import Events

Content = TypeVar("Content")
Answer = TypeVar("Answer")


class WatchedFile(Generic[Content]):
    """A file that is read again when it has changed, for use on one event loop. `content` is what `read` has
    returned; it is None, and `problem` is the reason, if the file cannot be used. `was_read` is called with
    new content.
    """

    content: Content | None = None

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], Content],
        *,
        events: Events,
        was_read: Callable[[Content], object] = lambda _: None,
    ) -> None:
        self.path = path
        self.problem = ""
        self._read = read
        self._was_read = was_read
        self._events = events
        self._seen: FileState | None = None
        self._reading = asyncio.Lock()

    def is_current(self) -> bool:
        """Return whether the file has not changed since it was read. This costs one stat."""
        return file_state(self.path) == self._seen

    async def refresh(self) -> None:
        """Read the file again if it has changed."""
        if self.is_current():
            return
        async with self._reading:
            look = file_state(self.path)
            if look == self._seen:
                return
            try:
                self.content = content = await ACCESS.run(self._read, self.path)
                self.problem, self._seen = "", look
                self._was_read(content)
            except CredentialsError as error:
                # A system error (such as too many open files) may disappear without a change of the file.
                transient = isinstance(error.__cause__, OSError) and len(look) > 1
                self.content, self._seen = None, None if transient else look
                self.broken(str(error), again=not transient)

    def broken(self, problem: str, *, again: bool) -> None:
        """Log that the file cannot be used. With `again` the file has changed, so the same problem is logged
        again.
        """
        if again or problem != self.problem:
            self.problem = problem
            self._events.credentials_broken(problem)


UNREADABLE = Refusal(
    Reason.USER, Reply(451, "7.0", "The limits of this user cannot be read now, try again later")
)
UNCOUNTED = Refusal(
    Reason.USER, Reply(451, "7.0", "The quotas of this user cannot be checked now, try again later")
)


class Allowance(msgspec.Struct, frozen=True):
    """The limits of a user during one mail transaction. `usage` is set if the user has quotas."""

    user: str
    rails: UserLimits
    usage: Usage | None = None

    def mail_refusal(self, client_address: str, now: float, size: int) -> Refusal | None:
        refusal = bar(self.rails, client_address, now) or self.size_refusal(size)
        return refusal or self._no_room((1, 0, size))

    def rcpt_refusal(self, recipient: Mailbox, so_far: int) -> Refusal | None:
        """Return the refusal of a recipient according to the user's limits, or None. `so_far` is the number
        of recipients of the transaction.
        """
        rails = self.rails
        if (
            rails.mode is not UserMode.LISTED
            and rails.recipients
            and not patterns_of(rails.recipients).match(recipient)
        ):
            return _no("7.1", "This user may not send to this recipient")
        return self._no_room((0, so_far + 1, 0))

    def size_refusal(self, size: int) -> Refusal | None:
        most = self.rails.max_message_size
        if not most or size <= most:
            return None
        text = f"Message exceeds {format_size(most)}, the limit of this user"
        return Refusal(Reason.USER, Reply(552, "3.4", text))

    def zone_refusal(self, deliveries: Iterable[Delivery]) -> Refusal | None:
        allowed = self.rails.zones
        for each in deliveries if allowed else ():
            if each.zone not in allowed and not self.is_captured(each.recipient):
                return _no("7.1", f"This user may not send through the zone {each.zone}")
        return None

    def is_captured(self, recipient: Mailbox) -> bool:
        """Return whether mail for this recipient is captured instead of being sent."""
        if self.rails.mode is UserMode.LISTED:
            return not patterns_of(self.rails.recipients).match(recipient)
        return self.rails.mode is UserMode.CAPTURE

    def _no_room(self, more: tuple[int, int, int]) -> Refusal | None:
        full = None if self.usage is None else self.usage.full(self.rails, more)
        return None if full is None else full.refusal()


class Guard:
    """Enforces user limits in one worker, on its event loop. `records` creates the store of usage records."""

    def __init__(
        self, credentials: Path, records: Callable[[], RecordStore], *, events: Events, clock: Clock
    ) -> None:
        self._events = events
        self._clock = clock
        self._uncounted = ""  # the problem while usage cannot be counted
        self._quotas = Quotas(records, clock, lambda user, level: events.quota_near(user, *level))
        self.configure(credentials)
        events.metrics.read(lambda: {"zonerelay_user_quota_used_ratio": self._ratios()})

    def configure(self, credentials: Path) -> None:
        self._file = WatchedFile(file_beside(credentials), user_limits.read, events=self._events)

    @property
    def problem(self) -> str:
        """The problem with the user limits file, or an empty string."""
        return self._file.problem

    def problems(self) -> Iterator[str]:
        yield from filter(None, (self.problem, self._uncounted))

    async def rails_of(self, user: str) -> UserLimits | None:
        """Read the limits of a user, or return None if they cannot be read."""
        await self._file.refresh()
        return self._of(user)

    def _of(self, user: str) -> UserLimits | None:
        """Return the limits of a user from the file as it was last read, or None if they are invalid."""
        try:
            return None if self._file.content is None else self._file.content.of(user)
        except CredentialsError as error:
            if not self.problem:  # the first problem in this file; check-config shows all
                self._file.broken(str(error), again=True)
            return None

    def second_hash(self, user: str) -> str:
        """Return the hash of a user's second password, or "" if the user has none or the file has to be read
        again.
        """
        rails = self._of(user) if self._file.is_current() else None
        return "" if rails is None else rails.second_hash

    def known(self, user: str) -> Allowance | None:
        """Return the limits of a user if the file is unchanged and they include no quotas; otherwise None,
        and call `allowance`.
        """
        rails = self._of(user) if self._file.is_current() else None
        return Allowance(user, rails) if rails is not None and not rails.quotas else None

    async def allowance(self, user: str) -> Allowance | Refusal:
        """Read the current limits of a user, or return a Refusal if they cannot be determined."""
        rails = await self.rails_of(user)
        if rails is None:
            return UNREADABLE
        usage = await self._asked(self._quotas.usage(user)) if rails.quotas else None
        return usage if isinstance(usage, Refusal) else Allowance(user, rails, usage)

    async def log_in_refusal(self, user: str, client_address: str) -> Refusal | None:
        """Return the refusal of a user who has the right password but may not log in, or None."""
        rails = await self.rails_of(user)
        return UNREADABLE if rails is None else bar(rails, client_address, self._clock.now())

    async def take(self, allowance: Allowance, recipients: int, octets: int) -> Refusal | float | None:
        """Count a message against the user's quotas; return the time under which it is counted, or a refusal.
        Return None for a user without quotas.
        """
        if allowance.usage is None:
            return None
        sent = (1, recipients, octets)
        taken = await self._asked(self._quotas.take(allowance.user, allowance.rails, sent))
        return taken.refusal() if isinstance(taken, ExhaustedQuota) else taken

    async def give_back(
        self, allowance: Allowance, recipients: int, octets: int, counted: float | None
    ) -> None:
        """Remove a message that `take` has counted, because it was not accepted."""
        if counted is not None:
            sent = (-1, -recipients, -octets)
            await self._asked(self._quotas.take(allowance.user, allowance.rails, sent, counted=counted))

    async def _asked(self, question: Awaitable[Answer]) -> Answer | Refusal:
        try:
            answer = await question
        except AuthorityError as error:
            what = "usage cannot be counted, so users with quotas are rejected temporarily"
            self._uncounted = f"{what}: {error}"
            self._events.error("quotas", error)
            return UNCOUNTED
        self._uncounted = ""
        return answer

    def nearly_used(self) -> Iterator[tuple[str, str, int, int]]:
        for user, level in self._quotas.seen():
            if level.used >= NEAR * level.most:
                yield (user, *level)

    async def close(self) -> None:
        await self._quotas.close()

    def _ratios(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for user, level in self._quotas.seen():
            found[user] = max(found.get(user, 0.0), level.used / level.most)
        return {self._events.shown_user(user): ratio for user, ratio in found.items()}


def bar(rails: UserLimits, client_address: str, now: float) -> Refusal | None:
    """Return why the user may not do anything from this client, or None."""
    if rails is NONE:
        return None
    if rails.disabled:
        return _no("7.13", "This user is disabled")
    if rails.expires and now >= rails.expires:
        day = datetime.datetime.fromtimestamp(rails.expires, datetime.UTC)
        return _no("7.13", f"This user expired on {day:%Y-%m-%d}")
    if rails.networks and not _networks(rails.networks).match(client_address):
        return _no("7.1", f"This user may not send from {client_address or 'here'}")
    return None


def _no(detail: str, text: str) -> Refusal:
    return Refusal(Reason.USER, Reply(550, detail, text))


patterns_of = lru_cache(1024)(AddressPatterns)
_networks = lru_cache(1024)(Networks)
