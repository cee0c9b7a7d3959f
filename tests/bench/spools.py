"""Spools to be measured beside LevelDB: each brings its server, and the tables of the configuration."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.support.postgres import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.s3_server import BUCKET, KEY, SECRET, MotoServer
from tests.support.toml import Table

DIRECTORY = Path("/var/tmp")  # survives on disk where /tmp is memory


@dataclass(frozen=True, slots=True)
class SpoolServer:
    """`tables` of the configuration, and the server's process, if there is one."""

    tables: Mapping[str, Table]
    pid: int = 0


# What to put before the server's command line, so that it is measured with the relay.
SpoolStarter = Callable[[Sequence[str]], AbstractContextManager[SpoolServer]]


def in_the_relay(backend: str) -> SpoolStarter:
    @contextlib.contextmanager
    def start(launcher: Sequence[str] = ()) -> Iterator[SpoolServer]:
        del launcher  # there is no other process
        yield SpoolServer({"spool": {"backend": backend}})

    return start


@contextlib.contextmanager
def redis(launcher: Sequence[str] = ()) -> Iterator[SpoolServer]:
    with RedisServer(launcher=launcher) as server:
        yield SpoolServer({"spool": {"backend": "redis"}, "redis": {"url": server.url}}, server.pid)


@contextlib.contextmanager
def postgres(launcher: Sequence[str] = ()) -> Iterator[SpoolServer]:
    with PostgresServer({"shared_buffers": "128MB"}, parent=DIRECTORY, launcher=launcher) as server:
        spool: Table = {"backend": "postgres"}
        yield SpoolServer({"spool": spool, "postgres": {"url": server.socket_url}}, server.pid)


@contextlib.contextmanager
def s3(launcher: Sequence[str] = ()) -> Iterator[SpoolServer]:
    """moto's server, which is no storage: it shows what the relay costs, not what a service does."""
    del launcher
    with MotoServer() as server:
        keys: Table = {"access_key": KEY, "secret_key": "env:BENCH_S3_SECRET"}
        table: Table = {"bucket": BUCKET, "endpoint_url": server.url, "region": "us-east-1", **keys}
        os.environ["BENCH_S3_SECRET"] = SECRET
        yield SpoolServer({"spool": {"backend": "s3"}, "s3": table}, server.pid)


SPOOLS: dict[str, SpoolStarter] = {
    **{name: in_the_relay(name) for name in ("memory", "leveldb", "disk")},
    "redis": redis,
    "postgres": postgres,
    "s3": s3,
}
