"""Opens the outbox, and connects it to the relay's scheduler, log-ins and key for pseudonyms."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.settings import CredentialSettings, OutboxSettings, Settings, ZoneSettings
from zonerelay.model.clock import Clock
from zonerelay.outbox.compose.composer import Composer
from zonerelay.outbox.database.passwords import PasswordError, read_key
from zonerelay.outbox.database.sql import Statements
from zonerelay.outbox.database.tables import Names
from zonerelay.outbox.joined import JoinedStore
from zonerelay.outbox.keeper import OutboxKeeper
from zonerelay.outbox.rows.claims import OutboxClaims
from zonerelay.outbox.rows.mailboxes import Mailboxes
from zonerelay.outbox.rows.reader import OutboxReader
from zonerelay.outbox.rows.row import Write
from zonerelay.outbox.rows.writer import OutboxWriter
from zonerelay.outbox.store import OutboxStore
from zonerelay.store.contract import Lost, Store, StoreOpenError
from zonerelay.store.postgres.driver import Access, load_driver
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.subsystems import OutboxFigures

NAME_FILE = "outbox-{:02d}.name"

_log = logging.getLogger("zonerelay.outbox")


class ZoneHost(Protocol):
    """The scheduler, as far as mailboxes need it."""

    def provide(self, zone: ZoneSettings) -> None: ...

    def dismiss(self, zone: str) -> bool: ...

    def resume(self, zone: str) -> None: ...


class LoginHost(Protocol):
    """`delivery.logins.Logins`, likewise."""

    def provide(self, credential: CredentialSettings) -> None: ...

    def withdraw(self, name: str) -> None: ...

    def passwords_of_mailboxes(self, read: Callable[[str], str]) -> None: ...


class Outbox:
    """One per worker, where [outbox] has a url. `join` makes one store of it and the spool."""

    def __init__(
        self,
        settings: Settings,
        index: int,
        *,
        environment: Mapping[str, str],
        redactor: Redactor,
        events: Events,
        clock: Clock,
        known_zones: Callable[[], Collection[str]],
        on_news: Callable[[str], None],
        on_lost: Lost,
    ) -> None:
        """For worker `index` of the relay. Raises StoreOpenError for secrets that cannot be read."""
        load_driver()
        outbox = settings.outbox
        redact = redactor.always()
        statements = Statements(names_of(outbox))
        self._name = _HeldName(settings.spool.path.parent / NAME_FILE.format(index))
        self._is_first = index == 0
        self.mailboxes = Mailboxes(read_keys(outbox, environment), clock.monotonic)
        self._keeper = OutboxKeeper(
            access_of(outbox, environment),
            statements,
            name=self._name.text,
            create=outbox.create_tables,
            clock=clock,
            told=_told,
            sick=lambda error: events.trouble("outbox.connect", error),
        )
        writer = OutboxWriter(
            statements,
            link=self._keeper.writing_link,
            written=self._written,
            trouble=self._keeper.trouble,
            sick=lambda error: events.trouble("outbox.write", error),
        )
        claims = OutboxClaims(
            self._keeper,
            statements,
            self.mailboxes,
            default_zone=outbox.zone,
            poll=outbox.poll_interval,
            known_zones=known_zones,
            put=writer.put,
            on_news=on_news,
            refused=events.row_refused,
            trouble=lambda error: events.trouble("outbox.claim", error),
            redact=redact,
            clock=clock,
        )
        reader = OutboxReader(
            self._keeper,
            statements,
            default_zone=outbox.zone,
            max_size=outbox.max_message_size,
            known_zones=known_zones,
        )
        self.store = OutboxStore(
            self._keeper,
            claims,
            writer,
            reader,
            Composer(outbox.max_message_size),
            redact=redact,
            clock=clock,
            on_news=on_news,
            on_lost=on_lost,
            finished=events.metrics.outbox.finished,
            refused=events.row_refused,
        )
        events.metrics.outbox.attach(self._figures)

    def _written(self, write: Write, kept: bool) -> None:
        self.store.written(write, kept)

    def join(self, spool: Store) -> Store:
        return JoinedStore(spool, self.store, counts=self._is_first)

    async def start(self, zones: ZoneHost, logins: LoginHost) -> None:
        """Once the scheduler runs. Raises StoreOpenError."""
        logins.passwords_of_mailboxes(self.mailboxes.password)
        self.mailboxes.host = _Host(zones, logins)
        await self.store.start()

    def problems(self) -> tuple[str, ...]:
        keeper = self._keeper
        trouble = [f"the outbox cannot be used: {keeper.problem}"] if keeper.problem else []
        return (*trouble, *self.mailboxes.problems())

    def _figures(self) -> OutboxFigures:
        figures = self.store.reader.figures
        return OutboxFigures(
            figures.rows,
            figures.lag,
            self.store.claims.claimed,
            self._keeper.reaped,
            self._keeper.usable,
        )


class _Host:
    """A mailbox becomes a zone and a log-in."""

    def __init__(self, zones: ZoneHost, logins: LoginHost) -> None:
        self._zones = zones
        self._logins = logins

    def provide(self, zone: ZoneSettings, credential: CredentialSettings | None, *, changed: bool) -> None:
        if credential is None:
            self._logins.withdraw(zone.name)
        else:
            self._logins.provide(credential)
        self._zones.provide(zone)
        if changed:
            # What was refused before may work now.
            self._zones.resume(zone.name)

    def withdraw(self, zone: str) -> bool:
        if not self._zones.dismiss(zone):
            return False
        self._logins.withdraw(zone)
        return True


class _HeldName:
    """A name for this relay that stays over restarts, and that no other relay has while it runs.

    It is in a file beside the spool, which is locked: a relay that finds it locked takes
    a name for this run only.
    """

    def __init__(self, path: Path) -> None:
        self.text = secrets.token_hex(16)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return  # then nothing of an earlier run is taken over before its lease has ended
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            return
        known = os.read(self._file, 64).decode("ascii", "replace").strip()
        if known:
            self.text = known
        else:
            os.write(self._file, f"{self.text}\n".encode())


def _told(problem: str) -> None:
    """`status` has it, too."""
    if problem:
        _log.error("the outbox cannot be used: %s", problem)
    else:
        _log.warning("the outbox can be used again")


def names_of(outbox: OutboxSettings) -> Names:
    return Names(outbox.schema, outbox.table, outbox.mailbox_table)


def access_of(outbox: OutboxSettings, environment: Mapping[str, str]) -> Access:
    """Raises StoreOpenError."""
    password = ""
    if outbox.password:
        try:
            password = read_secret(outbox.password, environment)
        except SecretError as error:
            raise StoreOpenError(f"outbox.password: {error}") from error
    return Access(outbox.url, password, outbox.schema, "zonerelay outbox", outbox.lease)


def read_keys(outbox: OutboxSettings, environment: Mapping[str, str]) -> list[bytes]:
    """Raises StoreOpenError."""
    keys = []
    for at, reference in enumerate(outbox.keys):
        try:
            keys.append(read_key(read_secret(reference, environment)))
        except (SecretError, PasswordError) as error:
            raise StoreOpenError(f"outbox.keys[{at}]: {error}") from error
    return keys
