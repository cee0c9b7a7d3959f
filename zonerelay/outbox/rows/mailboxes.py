"""Manages the mailboxes through which outbox rows are sent: a zone and a login for each one in use. While a
mailbox has mail, it has its own zone and credential.

A mailbox is read together with the rows that name it, and again while it is in use, so a correction in the
table takes effect at the next read. A mailbox without mail for `IDLE` seconds is forgotten with its zone.
Mail of an unusable mailbox (an unknown TLS mode, or plain text to another machine) waits. A password is
decrypted for each login, is never kept, and appears in no text.
"""

import ipaddress
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from zonerelay.config.credentials.secrets import SecretError
from zonerelay.config.endpoints import is_address
from zonerelay.config.settings import CredentialSettings, TlsMode, ZoneSettings
from zonerelay.model.delivery import mailbox_zone
from zonerelay.outbox.database.passwords import PasswordError, unseal
from zonerelay.routing.addresses import ascii_domain
from zonerelay.store.postgres.driver import Columns

IDLE = 600.0
MAX_CONNECTIONS = 5
MAX_TEXT = 512
_MODES = ("starttls", "implicit", "none")


@dataclass(frozen=True, slots=True)
class Mailbox:
    """A mailbox through which outbox rows are sent, as stored in the mailbox table."""

    id: int
    from_address: str
    host: str
    port: int
    tls: str
    verify: bool
    user: str
    sealed: str = field(repr=False)

    @classmethod
    def read(cls, row: Columns) -> "Mailbox":
        texts = [str(row[at] or "").strip() for at in (1, 2, 4, 6)]
        sealed = str(row[7] or "").strip()
        return cls(row[0], texts[0], texts[1], int(row[3] or 0), texts[2], bool(row[5]), texts[3], sealed)

    @property
    def zone(self) -> str:
        return mailbox_zone(self.id)

    def problem(self) -> str:
        """Return why no mail can be sent through the mailbox, or "" if it is usable. The text has no value of
        the row.
        """
        in_clear = self.tls == "none"
        checks = (
            (
                max(map(len, (self.from_address, self.host, self.user))) > MAX_TEXT,
                f"a column has more than {MAX_TEXT} characters",
            ),
            (not self.host or _host(self.host) is None, "smtp_host is not a host name or an address"),
            (not 0 < self.port < 65536, "smtp_port is not a port"),
            (self.tls not in _MODES, f"smtp_tls must be one of {', '.join(_MODES)}"),
            (
                in_clear and bool(self.user or not _is_loopback(self.host)),
                "smtp_tls = none is allowed only for a server on loopback and without a user name",
            ),
            (bool(self.user and not self.sealed), "smtp_username is set, but smtp_password_encrypted is not"),
        )
        return next((f"mailbox {self.id}: {text}" for wrong, text in checks if wrong), "")

    def settings(self) -> ZoneSettings:
        tls = TlsMode.VERIFY if self.verify else TlsMode.REQUIRED
        return ZoneSettings(
            name=self.zone,
            next_hop=f"[{_host(self.host)}]:{self.port}",
            tls=TlsMode.NONE if self.tls == "none" else tls,
            tls_on_connect=self.tls == "implicit",
            credentials=(self.zone,) if self.user else (),
            max_connections=MAX_CONNECTIONS,
            max_connections_per_destination=MAX_CONNECTIONS,
        )

    def credential(self) -> CredentialSettings | None:
        if not self.user:
            return None
        return CredentialSettings(name=self.zone, user=self.user, password=self.zone)


class ZoneHost(Protocol):
    """The part of the scheduler that `Mailboxes` uses (a Protocol). `dismiss` returns false while mail of the
    zone is being processed.
    """

    def provide(self, zone: ZoneSettings) -> None: ...

    def dismiss(self, zone: str) -> bool: ...

    def resume(self, zone: str) -> None: ...


class LoginHost(Protocol):
    """The part of `delivery.auth.logins.Logins` that `Mailboxes` uses (a Protocol)."""

    def provide(self, credential: CredentialSettings) -> None: ...

    def withdraw(self, name: str) -> None: ...

    def passwords_of_mailboxes(self, read: Callable[[str], str]) -> None: ...


class Mailboxes:
    """The mailboxes through which outbox rows are sent, each with a zone and a login of its own. Call
    `attach` first. The first of `keys` encrypts, and all of them decrypt.
    """

    _zones: ZoneHost
    _logins: LoginHost

    def __init__(self, keys: Sequence[bytes], monotonic: Callable[[], float]) -> None:
        self._keys = keys
        self._monotonic = monotonic
        self._known: dict[str, Mailbox] = {}
        self._used: dict[str, float] = {}

    def attach(self, zones: ZoneHost, logins: LoginHost) -> None:
        self._zones, self._logins = zones, logins
        logins.passwords_of_mailboxes(self.password)

    @property
    def ids(self) -> list[int]:
        return [mailbox.id for mailbox in self._known.values()]

    def found(self, mailboxes: Iterable[Mailbox]) -> None:
        """Update the known mailboxes from rows that were read from the mailbox table."""
        for mailbox in mailboxes:
            old = self._known.get(mailbox.zone)
            if old == mailbox:
                continue
            self._known[mailbox.zone] = mailbox
            self._used.setdefault(mailbox.zone, self._monotonic())
            if mailbox.problem():
                continue
            if (credential := mailbox.credential()) is not None:
                self._logins.provide(credential)
            else:
                self._logins.withdraw(mailbox.zone)
            self._zones.provide(mailbox.settings())
            if old is not None:
                # An attempt that was rejected before may succeed now.
                self._zones.resume(mailbox.zone)

    def gone(self, ids: Collection[int]) -> None:
        """Remove the mailboxes that are no longer in the mailbox table. Rows that name them are invalid."""
        for mailbox in ids:
            self._known.pop(mailbox_zone(mailbox), None)

    def use(self, zone: str) -> Mailbox | None:
        """Return the mailbox of a zone, and record that it is in use."""
        mailbox = self._known.get(zone)
        if mailbox is not None:
            self._used[zone] = self._monotonic()
        return mailbox

    def forget_idle(self, busy: Collection[str]) -> None:
        """Remove the zones and logins of unused mailboxes. `busy` has the zones with rows that this relay has
        claimed.
        """
        limit = self._monotonic() - IDLE
        for zone, used in list(self._used.items()):
            if used > limit or zone in busy:
                continue
            if self._zones.dismiss(zone):
                self._logins.withdraw(zone)
                del self._used[zone]
                self._known.pop(zone, None)

    def password(self, zone: str) -> str:
        """Return the decrypted SMTP password of a mailbox. Raises SecretError."""
        box = self._known.get(zone)
        if box is None:
            raise SecretError("the mailbox is no longer in the table")
        try:
            return unseal(box.sealed, self._keys, host=box.host, port=box.port, user=box.user)
        except PasswordError as error:
            raise SecretError(f"smtp_password_encrypted of mailbox {box.id} {error}") from None

    def problems(self) -> Iterator[str]:
        for mailbox in self._known.values():
            if problem := mailbox.problem():
                yield problem


def _host(text: str) -> str | None:
    """Return the host of a mailbox in the form that connections need, or `None` if it is neither a name nor
    an address.
    """
    plain = text.removeprefix("[").removesuffix("]")
    try:
        return plain if is_address(plain) else ascii_domain(plain)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    plain = host.removeprefix("[").removesuffix("]")
    return plain == "localhost" or (is_address(plain) and ipaddress.ip_address(plain).is_loopback)
