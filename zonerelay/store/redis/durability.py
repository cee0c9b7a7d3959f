"""Checks whether the server keeps what it has acknowledged, which a 250 requires.

The requirements are the append-only file, synced before each reply and while it is being rewritten; no
eviction; and a primary. The version must be 7.0 or newer (Valkey: any), because of script flags that allow
outcomes to be stored when the server's memory is full. A server that forbids CONFIG counts as unsuitable. The
relay checks this at every connection and with every renewal of the lease, because settings may be changed
while it runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from zonerelay.config.settings import RedisSettings
from zonerelay.store.contract import StoreError, StoreOpenError, Unhealthy
from zonerelay.store.redis.connection import Confirmation, Reply, SharedConnection, as_list

_WANTED = {
    "appendonly": ("yes", "without the append-only file, a restart loses acknowledged mail"),
    "appendfsync": ("always", "otherwise a power cut loses mail acknowledged within the last second"),
    "no-appendfsync-on-rewrite": ("no", "otherwise nothing is synced while the file is being rewritten"),
    "maxmemory-policy": ("noeviction", "otherwise mail is evicted when the memory is full"),
}
OLDEST = (7, 0)
_WAITAOF_SINCE = (7, 2)


class ServerFacts(NamedTuple):
    """The properties that a server reports. `flaws` are the reasons why it is not durable, `version` is that
    of the protocol, and `primary` is the server that it replicates.
    """

    name: str
    version: tuple[int, ...]
    is_primary: bool
    primary: str
    is_sentinel: bool
    is_cluster: bool
    flaws: tuple[str, ...]
    syncs_log: bool
    used_memory: int
    max_memory: int

    @property
    def can_wait_for_log(self) -> bool:
        return self.version >= _WAITAOF_SINCE and self.syncs_log

    @property
    def free_memory(self) -> int | None:
        """The free bytes below `maxmemory`, or `None` if there is no limit."""
        return self.max_memory - self.used_memory if self.max_memory else None


def check(facts: ServerFacts, settings: RedisSettings) -> None:
    """Raise StoreOpenError if the server must not store the queue."""
    if facts.is_sentinel:
        raise StoreOpenError(
            "[redis] url: this is a Sentinel, which stores no data; use the primary that it monitors, or "
            "an address that follows it"
        )
    if facts.version < OLDEST:
        found = ".".join(map(str, facts.version))
        raise StoreOpenError(f"[redis] url: {facts.name} {found} is too old; 7.0 or newer is required")
    if not facts.is_primary:
        raise StoreOpenError(
            f"[redis] url: the server is a read-only replica of {facts.primary}; use the primary"
        )
    if facts.is_cluster and not re.search(r"\{[^}]+\}", settings.prefix):
        raise StoreOpenError(
            "[redis] prefix: the server is a Cluster node, which stores related keys in one slot only if "
            'the prefix contains a hash tag; set prefix = "{zonerelay}:"'
        )
    if facts.flaws and not settings.unsafe:
        raise StoreOpenError(f"[redis] url: {Unhealthy.SERVER_UNSAFE}: {'; '.join(facts.flaws)}")


def confirmations(facts: ServerFacts, settings: RedisSettings) -> tuple[Confirmation, ...]:
    """Return the commands that are sent after each batch."""
    seconds = settings.timeout / 2
    asked = []
    if facts.can_wait_for_log:
        failure = f"the server has not synced its append-only file within {seconds:g} s"
        asked.append(Confirmation(("WAITAOF", 1, 0, int(seconds * 1000)), (1, 0), failure))
    if replicas := settings.replicas:
        failure = f"[redis] replicas: fewer than {replicas} have confirmed a write within {seconds:g} s"
        asked.append(Confirmation(("WAIT", replicas, int(seconds * 1000)), (replicas,), failure))
    return tuple(asked)


async def ask(wire: SharedConnection) -> ServerFacts:
    """Query the properties of the server. Raises StoreError."""
    info = _lines(await wire.call("INFO"))
    settings: dict[str, str] = {}
    try:
        found = as_list(await wire.call("CONFIG GET", *_WANTED))
        texts = [each.decode() for each in found if isinstance(each, bytes)]
        settings = dict(zip(texts[::2], texts[1::2], strict=True))
        flaws = _flaws(settings)
    except StoreError as error:
        flaws = (f"its settings cannot be read with CONFIG GET ({error}); allow that command",)
    if info.get("aof_last_write_status", "ok") != "ok":
        flaws = (*flaws, "its last write to the append-only file failed")
    return ServerFacts(
        "Valkey" if "valkey_version" in info else "Redis",
        _version(info.get("redis_version", "0")),
        info.get("role") == "master",
        f"{info.get('master_host', '?')}:{info.get('master_port', '?')}",
        # Redis has the first name, Valkey 8 the second.
        "sentinel" in (info.get("redis_mode"), info.get("server_mode")),
        info.get("cluster_enabled") == "1",
        flaws,
        # With "no" Redis 8 never confirms WAITAOF, and the operator has accepted that in the configuration.
        info.get("aof_enabled") == "1" and settings.get("appendfsync") != "no",
        int(info.get("used_memory", "0")),
        int(info.get("maxmemory", "0")),
    )


def _flaws(settings: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        f"{name} is {settings.get(name, 'unknown')} but must be {wanted}: {reason}"
        for name, (wanted, reason) in _WANTED.items()
        if settings.get(name) != wanted
    )


def _lines(reply: Reply) -> dict[str, str]:
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value for name, _, value in pairs if value}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
