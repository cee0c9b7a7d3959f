"""A stored queue as a file of a fixture, as a spool to open, and as text to compare, for each engine.

What differs from one writing to the next (tokens, a server's times) is left out of the text.
"""

import asyncio
import contextlib
import gzip
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncpg
import redis

from tests.store.spools import Spool
from tests.support.postgres import PostgresPrograms
from tests.support.s3_server import BUCKET, shared_moto
from tests.upgrades import mail
from zonerelay.config.settings import Backend
from zonerelay.model.delivery import DeliveryKey, queue_of
from zonerelay.model.envelope import Mailbox, MessageId
from zonerelay.store import records
from zonerelay.store.keys.port import pages
from zonerelay.store.leveldb.engine import plyvel
from zonerelay.store.objects.disk import disk_engine

SCHEMA = "zonerelay_fixture"
PREFIX = "zonerelay-fixture/"
Records = dict[str, str]


def unpack_tar(raw: bytes, home: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later; from 3.14 on it is the default
            tar.extractall(home, filter="data")
        else:
            tar.extractall(home)


def pack_tar(home: Path) -> bytes:
    """Without owners, modes and times of this machine."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = 0
        info.mode = 0o700 if info.isdir() else 0o600
        return info

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(home.iterdir()):
            tar.add(path, path.name, filter=plain)
    return gzip.compress(buffer.getvalue(), mtime=0)


def _text(raw: bytes) -> str:
    """Octets as text, for people and for JSON, without a loss."""
    return raw.decode("latin-1")


# --- LevelDB, files


class Files:
    """Engines whose queue is a directory."""

    async def write(self, spool: Spool) -> mail.Expected:
        async with spool:
            return await mail.write_queue(spool.store)

    def pack(self, spool: Spool) -> bytes:
        return pack_tar(spool.settings.path.parent)


class LevelDb(Files):
    file = "leveldb.tar.gz"

    async def write(self, spool: Spool) -> mail.Expected:
        expected = await super().write(spool)
        key = DeliveryKey(queue_of("default"), MessageId(min(expected)), Mailbox("one@example.net"))
        with contextlib.closing(plyvel.DB(str(spool.settings.path))) as database:
            # Such a hint is written when memory is full.
            database.put(records.domain_key(key, "example.net"), b"")
        return expected

    def spool(self, home: Path) -> Spool:
        return Spool(home / "spool", backend=Backend.LEVELDB, clock=mail.clock())

    def unpack(self, raw: bytes, home: Path) -> Spool:
        unpack_tar(raw, home)
        return self.spool(home)

    def records(self, spool: Spool) -> Records:
        # The database is not opened as a spool is: nothing is put right in it.
        found: Records = {}
        with (
            contextlib.closing(plyvel.DB(str(spool.settings.path))) as database,
            database.raw_iterator() as rows,
        ):
            rows.seek(b"")
            while rows.valid():
                key, value = rows.item()
                found[_text(key)] = _text(value)
                rows.next()
        mark = spool.settings.path / "synced"
        return found | ({"the file synced": ""} if mark.exists() else {})


class Disk(Files):
    file = "disk-log.tar.gz"

    def spool(self, home: Path) -> Spool:
        return Spool(home / "spool", backend=Backend.DISK, clock=mail.clock())

    def unpack(self, raw: bytes, home: Path) -> Spool:
        unpack_tar(raw, home)
        return self.spool(home)

    def records(self, spool: Spool) -> Records:
        return asyncio.run(self._rows(spool))

    async def _rows(self, spool: Spool) -> Records:
        with tempfile.TemporaryDirectory() as index:
            engine = disk_engine(spool.settings, mail.clock(), index=Path(index))
            keeper = engine.keeper(0)
            found: Records = {}
            async for rows in pages(keeper, b"\x01", b"\xff"):
                found |= {_text(key): _text(value) for key, value in rows}
            await keeper.close()
            await engine.close()
            return found


class OldFiles(Files):
    """What 0.1.0 has written and this release refuses."""

    def __init__(self, file: str, backend: Backend) -> None:
        self.file = file
        self._backend = backend

    def unpack(self, raw: bytes, home: Path) -> Spool:
        unpack_tar(raw, home)
        path = home / "spool"
        places = {"shelve": path / "shelf"} if self._backend is Backend.MEMORY else {}
        return Spool(path, backend=self._backend, clock=mail.clock(), places=places)

    def records(self, spool: Spool) -> Records:
        return {
            str(path): _text(path.read_bytes())
            for path in spool.settings.path.rglob("*")
            if path.is_file() and path.name != "shelf.lock"
        }


# --- servers: queues of 0.1.0, which this release refuses


class Redis:
    file = "redis.json.gz"

    def unpack(self, raw: bytes, home: Path) -> Spool:
        spool = Spool(home / "spool", backend=Backend.REDIS, clock=mail.clock())
        with contextlib.closing(redis.Redis.from_url(spool.redis.url)) as server:
            for name, value in json.loads(gzip.decompress(raw)).items():
                key = spool.redis.prefix + name
                match value:
                    case str():
                        # What is not to last has an end, which the fixture does not tell.
                        server.set(key, _octets(value), ex=86400 if name.startswith("once:") else None)
                    case list():
                        server.sadd(key, *map(_octets, value))
                    case {"scores": scores}:
                        server.zadd(key, {_octets(member): score for member, score in scores.items()})
                    case {"fields": fields}:
                        mapping: Mapping[Any, Any] = {_octets(a): _octets(b) for a, b in fields.items()}
                        server.hset(key, mapping=mapping)
        return spool

    def records(self, spool: Spool) -> Records:
        with contextlib.closing(redis.Redis.from_url(spool.redis.url)) as server:
            keys: list[bytes] = list(server.scan_iter(match=f"{spool.redis.prefix}*"))
            return {_text(key): _text(server.dump(key) or b"") for key in keys}


def _octets(text: str) -> bytes:
    return text.encode("latin-1")


class Postgres:
    file = "postgres.sql.gz"

    def unpack(self, raw: bytes, home: Path) -> Spool:
        spool = Spool(home / "spool", backend=Backend.POSTGRES, clock=mail.clock())
        restore_schema(spool.postgres.url, gzip.decompress(raw), spool.postgres.schema)
        return spool

    def records(self, spool: Spool) -> Records:
        return read_schema(spool.postgres.url, spool.postgres.schema)


class S3:
    file = "s3.json.gz"

    def unpack(self, raw: bytes, home: Path) -> Spool:
        spool = Spool(home / "spool", backend=Backend.S3, clock=mail.clock())
        for name, value in json.loads(gzip.decompress(raw)).items():
            # A head names the object of its body by its whole key.
            body = _octets(value.replace(PREFIX, spool.s3.prefix))
            shared_moto().ask("PUT", f"/{BUCKET}/{spool.s3.prefix}{name}", body)
        return spool

    def records(self, spool: Spool) -> Records:
        server = shared_moto()
        return {key: _text(server.ask("GET", f"/{BUCKET}/{key}")[1]) for key in server.keys(spool.s3.prefix)}


Engine = LevelDb | Disk


ENGINES: dict[str, Engine] = {"leveldb": LevelDb(), "disk": Disk()}

REFUSED: dict[str, OldFiles | Redis | Postgres | S3] = {
    "shelf": OldFiles("shelf.tar.gz", Backend.MEMORY),
    "disk": OldFiles("disk.tar.gz", Backend.DISK),
    "redis": Redis(),
    "postgres": Postgres(),
    "s3": S3(),
}
"""Queues of 0.1.0 that this release refuses."""


# --- tables of PostgreSQL


def dump_schema(url: str, schema: str) -> bytes:
    programs = PostgresPrograms()
    done = subprocess.run(
        [
            str(programs.bin / "pg_dump"),
            *("--dbname", url, "--schema", schema),
            *("--no-owner", "--no-acl", "--inserts"),
        ],
        env=programs.environment,
        capture_output=True,
        check=True,
        timeout=60,
    )
    # psql's own commands, and the names and versions of programs.
    lines = [line for line in done.stdout.splitlines() if not line.startswith((b"\\", b"-- Dumped"))]
    return b"\n".join(lines).replace(schema.encode(), SCHEMA.encode()) + b"\n"


def restore_schema(url: str, dumped: bytes, schema: str) -> None:
    text = dumped.decode().replace(SCHEMA, schema)
    # Settings that another version of the server may not know.
    sql = "\n".join(line for line in text.split("\n") if not line.startswith("SET "))
    asyncio.run(_execute(url, f"SET standard_conforming_strings = on;\n{sql}"))


async def _execute(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


def read_schema(url: str, schema: str) -> Records:
    """The tables, their indexes and triggers, and their rows."""
    return asyncio.run(_read_schema(url, schema))


_CHANGING = {"applied", "session", "expires", "mark", "claimed_by", "claim_token", "created_at"}
_SHAPE = """
SELECT 'column ' || c.relname || '.' || a.attname, format_type(a.atttypid, a.atttypmod)
    || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END
    || ' ' || a.attstorage::text || ' ' || a.attidentity::text
    || coalesce(' default ' || pg_get_expr(d.adbin, d.adrelid), '')
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
  LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
  WHERE c.relnamespace = $1::text::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL SELECT 'index ' || indexname, indexdef FROM pg_indexes WHERE schemaname = $1::text::text
UNION ALL SELECT 'constraint ' || conname, pg_get_constraintdef(oid) FROM pg_constraint
  WHERE connamespace = $1::text::regnamespace
UNION ALL SELECT 'trigger ' || tgname, pg_get_triggerdef(t.oid) FROM pg_trigger t
  JOIN pg_class c ON c.oid = t.tgrelid WHERE c.relnamespace = $1::text::regnamespace AND NOT tgisinternal
UNION ALL SELECT 'function ' || proname, prosrc FROM pg_proc WHERE pronamespace = $1::text::regnamespace
UNION ALL SELECT 'options ' || relname, array_to_string(reloptions, ' ') FROM pg_class
  WHERE relnamespace = $1::text::regnamespace AND reloptions IS NOT NULL
"""


async def _read_schema(url: str, schema: str) -> Records:
    connection = await asyncpg.connect(url)
    try:
        shape = await connection.fetch(_SHAPE, schema)
        found = {str(row[0]): str(row[1]).replace(schema, SCHEMA) for row in shape}
        tables = await connection.fetch(
            "SELECT relname FROM pg_class WHERE relnamespace = $1::text::regnamespace AND relkind = 'r'",
            schema,
        )
        for table in [str(row[0]) for row in tables]:
            rows = await connection.fetch(f'SELECT to_jsonb(t)::text FROM "{schema}"."{table}" t')
            read = [json.loads(str(row[0])) for row in rows]
            texts = [json.dumps({k: v for k, v in each.items() if k not in _CHANGING}) for each in read]
            found |= {f"row {table} {number}": text for number, text in enumerate(sorted(texts), 1)}
        return found
    finally:
        await connection.close()
