"""Where each engine keeps its keys in a test, and what a test does to them from outside."""

import abc
import copy
import functools
import importlib.util
import shutil
import uuid
from pathlib import Path
from types import ModuleType

from tests.support.postgres import shared_postgres
from tests.support.redis_server import shared_server
from tests.support.s3_server import BUCKET, KEY, SECRET, shared_moto
from zonerelay.config.settings import RedisSettings, S3Settings
from zonerelay.model.clock import SystemClock
from zonerelay.store.keys.port import Engine
from zonerelay.store.memory import MemoryEngine
from zonerelay.store.objects.disk import DirectoryPlace
from zonerelay.store.objects.engine import ObjectEngine
from zonerelay.store.objects.s3 import Bucket
from zonerelay.store.postgres.driver import DatabaseAccess
from zonerelay.store.postgres.engine import PostgresEngine
from zonerelay.store.redis.connection import RedisEndpoint
from zonerelay.store.redis.engine import RedisEngine

LEASE = 2.0
TABLES = ("mark", "partition", "entry")


class Place(abc.ABC):
    """One store. Each `engine` is another process's."""

    name = ""
    is_durable = True
    """A process of its own finds it by `words`."""
    reserve = 0
    """Bytes that are kept back for a full disk, where an engine can."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.directory = directory
        self.words = words or self.own_words()

    def own_words(self) -> tuple[str, ...]:
        """Return where a test of its own finds the store, for one on a server: a URL and a name there."""
        return ()

    @abc.abstractmethod
    def engine(self) -> Engine: ...

    @abc.abstractmethod
    def save(self) -> object:
        """A copy of everything, while no partition is open."""

    @abc.abstractmethod
    def restore(self, saved: object) -> None:
        """Bring the copy back; None empties the store."""

    def close(self) -> None:  # noqa: B027 - most have nothing to remove
        """Remove it."""


class MemoryPlace(Place):
    name = "memory"
    is_durable = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._engine = MemoryEngine(SystemClock(), lease=LEASE)

    def engine(self) -> Engine:
        return self._engine

    def save(self) -> object:
        return self._engine.mark, copy.deepcopy(self._engine.partitions)

    def restore(self, saved: object) -> None:
        self._engine.mark, self._engine.partitions = copy.deepcopy(saved) if saved else ("", {})  # type: ignore[misc]


def copy_of(directory: Path) -> Path:
    saved = directory.with_name("saved")
    shutil.rmtree(saved, ignore_errors=True)
    return shutil.copytree(directory, saved)


def bring_back(directory: Path, saved: object) -> None:
    shutil.rmtree(directory)
    if saved:
        assert isinstance(saved, Path)
        shutil.copytree(saved, directory)


class PostgresPlace(Place):
    """A schema in the server that all tests share."""

    name = "postgres"

    def own_words(self) -> tuple[str, ...]:
        return shared_postgres().url, f"keys_{uuid.uuid4().hex[:16]}"

    def access(self) -> DatabaseAccess:
        url, schema = self.words
        return DatabaseAccess(url, str, schema, "test", LEASE)

    def engine(self) -> Engine:
        return PostgresEngine(self.access())

    def save(self) -> object:
        schema = self.access().schema
        self._sql(f"DROP SCHEMA IF EXISTS {schema}_saved CASCADE; CREATE SCHEMA {schema}_saved")
        for table in TABLES:
            self._sql(f"CREATE TABLE {schema}_saved.{table} AS TABLE {schema}.{table}")
        return True

    def restore(self, saved: object) -> None:
        schema = self.access().schema
        for table in TABLES:
            self._sql(f"DELETE FROM {schema}.{table}")
            if saved:
                self._sql(f"INSERT INTO {schema}.{table} SELECT * FROM {schema}_saved.{table}")

    def _sql(self, statement: str) -> None:
        shared_postgres().psql(statement)

    def close(self) -> None:
        schema = self.access().schema
        self._sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE; DROP SCHEMA IF EXISTS {schema}_saved CASCADE")


class RedisPlace(Place):
    """A prefix in the server that all tests share."""

    name = "redis"

    def own_words(self) -> tuple[str, ...]:
        return shared_server().url, f"{{{uuid.uuid4().hex}}}:"

    def engine(self) -> Engine:
        url, prefix = self.words
        return RedisEngine(RedisEndpoint(RedisSettings(url=url, prefix=prefix, lease=LEASE)))

    def _names(self) -> list[str]:
        prefix = self.words[1]
        return [f"{prefix}{name}" for name in ("mark", "nodes", "node:0", "keys:0", "values:0")]

    def save(self) -> object:
        for name in self._names():
            shared_server().ask("COPY", name, f"{name}-saved", "REPLACE")
        return True

    def restore(self, saved: object) -> None:
        for name in self._names():
            shared_server().ask("DEL", name)
            if saved:
                shared_server().ask("COPY", f"{name}-saved", name)


class DirectoryOfObjects(Place):
    name = "directory"

    def engine(self) -> Engine:
        place = DirectoryPlace(self.directory / "queue", reserve=self.reserve)
        return ObjectEngine(place, index_in(self.directory), clock=SystemClock(), lease=LEASE)

    def save(self) -> object:
        return copy_of(self.directory / "queue")

    def restore(self, saved: object) -> None:
        bring_back(self.directory / "queue", saved)


class BucketOfObjects(Place):
    """A prefix in moto's bucket."""

    name = "s3"

    def own_words(self) -> tuple[str, ...]:
        return shared_moto().url, f"{uuid.uuid4().hex}/"

    def engine(self) -> Engine:
        url, prefix = self.words
        settings = S3Settings(bucket=BUCKET, prefix=prefix, endpoint_url=url, access_key=KEY)
        place = Bucket(settings, lambda: SECRET)
        return ObjectEngine(place, index_in(self.directory), clock=SystemClock(), lease=LEASE)

    def save(self) -> object:
        moto, prefix = shared_moto(), f"/{BUCKET}/"
        return {key: moto.ask("GET", prefix + key)[1] for key in moto.keys(self.words[1])}

    def restore(self, saved: object) -> None:
        moto = shared_moto()
        for key in moto.keys(self.words[1]):
            moto.ask("DELETE", f"/{BUCKET}/{key}")
        if saved:
            assert isinstance(saved, dict)
            for key, data in saved.items():
                moto.ask("PUT", f"/{BUCKET}/{key}", data)


class SqlitePlace(Place):
    """The worked example of the documentation."""

    name = "sqlite"

    def engine(self) -> Engine:
        engine: Engine = example().SqliteEngine(self.directory / "keys.db", SystemClock(), lease=LEASE)
        return engine

    def save(self) -> object:
        return {path.name: path.read_bytes() for path in self.directory.glob("keys.db*")}

    def restore(self, saved: object) -> None:
        for path in self.directory.glob("keys.db*"):
            path.unlink()
        if saved:
            assert isinstance(saved, dict)
            for name, content in saved.items():
                (self.directory / name).write_bytes(content)


@functools.cache
def example() -> ModuleType:
    path = Path(__file__).parents[3] / "docs" / "examples" / "sqlite_engine.py"
    spec = importlib.util.spec_from_file_location("sqlite_engine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def index_in(directory: Path) -> Path:
    """Each process has its own."""
    return directory / "index" / uuid.uuid4().hex


PLACES: dict[str, type[Place]] = {
    place.name: place
    for place in (
        *(MemoryPlace, PostgresPlace, RedisPlace),
        *(DirectoryOfObjects, BucketOfObjects, SqlitePlace),
    )
}
