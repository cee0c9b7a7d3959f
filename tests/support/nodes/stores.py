"""The stores that nodes can share: a real server in the hub, and what a node's configuration says of it."""

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from tempfile import NamedTemporaryFile
from typing import Protocol, Self

from tests.support import redis_server
from tests.support.nodes.network import STORE_HOST
from tests.support.ports import free_port
from tests.support.postgres import PostgresPrograms, PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.s3_server import BUCKET, KEY, SECRET, MotoServer
from tests.support.toml import Table

LEASE = 4.0
"""Renewed after a third of it: on a busy machine less would run out without a fault."""


class SharedStore(Protocol):
    """`kill` and `start` are a crash of the server. `notices`: within so many seconds a node must have found
    out that the store is silent. `rate`: messages a second that it can take besides everything else here.
    `cut_one_way`: nodes are also cut off from its answers alone, for which a slow one leaves no time.
    `late_writes`: it may carry out a request after whoever made it has given it up, so what was refused may
    stay.
    """

    notices: float
    rate: float
    shares_limits: bool
    cut_one_way: bool
    late_writes: bool

    def tables(self, node: int) -> Mapping[str, Table]: ...

    def kill(self) -> None: ...

    def start(self) -> None: ...

    def pid(self) -> int: ...

    def queued(self) -> int: ...


class RedisStore(AbstractContextManager["RedisStore"]):
    """Redis with its append-only file."""

    notices = 1.5
    rate = 120.0
    shares_limits = True
    cut_one_way = True
    late_writes = False

    def __init__(self) -> None:
        self._server = RedisServer({"bind": "0.0.0.0", "protected-mode": "no"}, port=free_port())
        self.kill, self.start = self._server.kill, self._server.start

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__()

    def tables(self, node: int) -> Mapping[str, Table]:
        url = f"redis://{STORE_HOST}:{self._server.port}/0"
        return {
            "spool": {"backend": "redis"},
            "redis": {"url": url, "prefix": "nodes:", "lease": f"{LEASE:g}s", "timeout": "1s"},
        }

    def pid(self) -> int:
        return self._server.pid

    def queued(self) -> int:
        names = [
            word for word in self._server.query("KEYS", "nodes:keys:*").decode().split() if ":keys:" in word
        ]
        counts = [self._server.query("ZLEXCOUNT", name, "[delivery-", "(delivery.") for name in names]
        return sum(int(count.decode().splitlines()[0].removeprefix(":")) for count in counts)


class PostgresStore(AbstractContextManager["PostgresStore"]):
    """PostgreSQL as it comes."""

    notices = 1.5
    rate = 120.0
    shares_limits = True
    cut_one_way = True
    late_writes = False

    def __init__(self) -> None:
        self._server = PostgresServer({"listen_addresses": "*"})
        with (self._server.data / "pg_hba.conf").open("a") as file:
            file.write(f"host all all {STORE_HOST}/24 trust\n")
        self._server.psql("SELECT pg_reload_conf()")
        self.kill, self.start = self._server.kill, self._server.start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()

    def tables(self, node: int) -> Mapping[str, Table]:
        url = f"postgresql://mail@{STORE_HOST}:{self._server.port}/postgres"
        return {
            "spool": {"backend": "postgres"},
            "postgres": {"url": url, "schema": "nodes", "node": node, "lease": f"{LEASE:g}s"},
        }

    def pid(self) -> int:
        return self._server.pid

    def queued(self) -> int:
        return int(
            self._server.psql(
                "SELECT count(*) FROM nodes.entry WHERE key >= 'delivery-' AND key < 'delivery.'"
            )
        )


class S3Store(AbstractContextManager["S3Store"]):
    """moto. What it has is in its memory, so its crash is a standstill; and it is slow."""

    notices = 2.5
    rate = 24.0
    shares_limits = False
    cut_one_way = False
    late_writes = True

    def __init__(self) -> None:
        self._server = MotoServer(bind="0.0.0.0")
        self._secret = NamedTemporaryFile("w")  # noqa: SIM115  (as long as we live)
        self._secret.write(SECRET)
        self._secret.flush()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.start()
        self._server.__exit__()
        self._secret.close()

    def kill(self) -> None:
        os.kill(self.pid(), signal.SIGSTOP)

    def start(self) -> None:
        os.kill(self.pid(), signal.SIGCONT)

    def tables(self, node: int) -> Mapping[str, Table]:
        return {
            "spool": {"backend": "s3"},
            "s3": {
                "bucket": BUCKET,
                "endpoint_url": f"http://{STORE_HOST}:{self._server.port}",
                "access_key": KEY,
                "secret_key": self._secret.name,
                "lease": f"{LEASE:g}s",
                "timeout": "1s",
            },
        }

    def pid(self) -> int:
        return self._server.pid

    def queued(self) -> int:
        """Batches do not show it: all that was acknowledged has to come."""
        return 1


STORES: dict[str, Callable[[], AbstractContextManager[SharedStore]]] = {
    "redis": RedisStore,
    "postgres": PostgresStore,
    "s3": S3Store,
}


def prepare(name: str) -> None:
    """Fetch what the store needs, while there is still a network to fetch it from."""
    if name == "redis":
        redis_server.unpacked()
    elif name == "postgres":
        PostgresPrograms()
