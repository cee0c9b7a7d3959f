"""An outbox for tests: tables of its own on the shared PostgreSQL server, relays that serve it, rows."""

import base64
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.postgres import PostgresServer, shared_postgres
from tests.support.relay import Running, relay_with, settings
from tests.support.sink import Sink
from tests.support.smarthost import SMARTHOST_PASSWORD
from zonerelay.config.settings import OutboxSettings, TlsMode, ZoneSettings
from zonerelay.outbox.database.passwords import NONCE_SIZE, seal
from zonerelay.outbox.store import OutboxStore
from zonerelay.store.postgres.driver import DatabaseAccess, DatabaseConnection

LOOPBACK = "127.0.0.1"
KEY = b"k" * 32


def literal(value: object) -> str:
    """As SQL has it."""
    if value is None:
        return "NULL"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return f"ARRAY[{','.join(map(literal, value))}]::text[]"
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return "'" + text.replace("'", "''") + "'"


@dataclass
class OutboxBed:
    """`outbox` are the settings of every relay that is started here."""

    directory: Path
    server: PostgresServer = field(default_factory=shared_postgres)
    schema: str = field(default_factory=lambda: f"outbox_{uuid.uuid4().hex[:16]}")

    def __post_init__(self) -> None:
        self.server.psql(f"CREATE ROLE {self.role} LOGIN SUPERUSER")

    @property
    def role(self) -> str:
        """Who the relays of this bed are to the server."""
        return f"relay_{self.schema}"

    def outbox(self, **more: object) -> OutboxSettings:
        key = self.directory / "outbox.key"
        key.write_text(base64.b64encode(KEY).decode())
        return replace(
            OutboxSettings(
                url=self.server.url.replace("//mail@", f"//{self.role}@"),
                schema=self.schema,
                create_tables=True,
                keys=(str(key),),
                poll_interval=60.0,
            ),
            **more,  # type: ignore[arg-type]  # options by name
        )

    def psql(self, statement: str) -> str:
        return self.server.psql(f"SET search_path = {self.schema}; {statement}")

    def insert(self, **columns: object) -> int:
        """A row that would do, but for `columns`."""
        row = {
            "from_address": "app@example.org",
            "to_addresses": ["someone@example.com"],
            "subject": "hello",
            "text_body": "hello",
            **columns,
        }
        names, values = ", ".join(row), ", ".join(map(literal, row.values()))
        return int(self.psql(f"INSERT INTO outbound_messages ({names}) VALUES ({values}) RETURNING id"))

    def mailbox(self, port: int, *, password: str | None = SMARTHOST_PASSWORD, **columns: object) -> int:
        row: dict[str, object] = {"from_address": "box@example.org", "smtp_host": LOOPBACK, "smtp_port": port}
        if password is not None:
            row |= {"smtp_username": "relay", "smtp_password_encrypted": self.sealed(password, port)}
        row |= columns
        names, values = ", ".join(row), ", ".join(map(literal, row.values()))
        return int(self.psql(f"INSERT INTO mailboxes ({names}) VALUES ({values}) RETURNING id"))

    def sealed(self, password: str, port: int, *, key: bytes = KEY) -> str:
        return seal(password, key, os.urandom(NONCE_SIZE), host=LOOPBACK, port=port, user="relay")

    def row(self, row: int) -> Mapping[str, object]:
        """Every column, as JSON has it."""
        found = json.loads(self.psql(f"SELECT row_to_json(m) FROM outbound_messages m WHERE id = {row}"))
        assert isinstance(found, dict)
        return found

    def retry_in(self, row: int) -> float:
        """Seconds from now to next_retry_at."""
        return float(
            self.psql(
                f"SELECT extract(epoch FROM next_retry_at - clock_timestamp()) FROM outbound_messages"
                f" WHERE id = {row}"
            )
        )

    @asynccontextmanager
    async def relay(
        self,
        zone: ZoneSettings | None = None,
        *,
        name: str = "relay",
        faults: int = 0,
        outbox: Mapping[str, object] | None = None,
    ) -> AsyncIterator[Running]:
        """`faults`: how many trouble events there are to be."""
        directory = self.directory / name
        directory.mkdir(exist_ok=True)
        chosen = settings(directory, zone=zone or ZoneSettings(), outbox=self.outbox(**(outbox or {})))
        async with relay_with(chosen, trouble_expected=True) as running:
            yield running
        found = running.log.named("trouble")
        assert len(found) == faults, found

    async def until(
        self, running: Running, row: int, status: str, *, timeout: float = 10.0
    ) -> Mapping[str, object]:
        """Until the row has the status; every look is a query."""
        ends = time.monotonic() + timeout
        last: Mapping[str, object] = {}

        def there() -> bool:
            nonlocal last
            last = self.row(row)
            return last["status"] == status or time.monotonic() > ends

        await running.until(there, what=status, timeout=timeout + 5)
        assert last["status"] == status, last
        return last

    async def until_slow(self, running: Running, sink: Sink) -> int:
        """A row that takes a second is being sent."""
        row = self.insert(to_addresses=["slow-1s@example.com"])
        await running.until(lambda: any("slow-1s" in each for each in sink.commands), what="sending")
        return row

    async def link(self) -> DatabaseConnection:
        """A connection of an application, which names tables without their schema."""
        access = DatabaseAccess(self.server.url, str, self.schema, "test", 60.0)
        link = await DatabaseConnection.open(access)
        await link.fetch(f"SET search_path = {self.schema}")
        return link

    def drop(self) -> None:
        self.server.psql(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE; DROP ROLE IF EXISTS {self.role}")


def outbox_of(running: Running) -> OutboxStore:
    store = running.worker.queue.outbox
    assert store is not None
    return store


def to_sink(port: int, **more: object) -> ZoneSettings:
    zone = ZoneSettings(next_hop=f"{LOOPBACK}:{port}", tls=TlsMode.NONE)
    return replace(zone, **more)  # type: ignore[arg-type]  # options by name
