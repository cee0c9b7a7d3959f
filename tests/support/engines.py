"""Engines that several relays share, on the servers that all tests of this process share."""

from collections.abc import Mapping

from tests.support.postgres import shared_postgres
from tests.support.redis_server import shared_server
from tests.support.s3_server import BUCKET, KEY, SECRET, shared_moto
from tests.support.toml import Table
from zonerelay.config.settings import Backend

ENVIRONMENT = {"S3_SECRET": SECRET}


def shared_tables(backend: Backend, name: str, node: int, *, lease: str) -> Mapping[str, Table]:
    """What the configuration of a node says; `name` is a part of the server that nobody else has."""
    place: Table
    if backend is Backend.POSTGRES:
        place = {"url": shared_postgres().url, "schema": name, "node": node}
    elif backend is Backend.REDIS:
        place = {"url": shared_server().url, "prefix": f"{name}:", "timeout": "5s"}
    else:
        place = {
            "bucket": BUCKET,
            "prefix": f"{name}/",
            "endpoint_url": shared_moto().url,
            "access_key": KEY,
            "secret_key": "env:S3_SECRET",
            "timeout": "5s",
        }
    return {backend.value: {**place, "lease": lease}}
