"""Asks whether the server keeps what it has acknowledged, which a 250 needs.

Required are the append-only file, synced before each answer and while it is being rewritten; no eviction;
and a primary. The version must be 7.0 or newer (Valkey: any), because of script flags that let mail leave
when the server's memory is full. A server that forbids CONFIG counts as one that does not promise. The
relay asks at every connection and with every beat, because settings may be changed while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zonerelay.store.contract import StoreError
from zonerelay.store.redis.connection import Reply, Wire, as_list, pairs

_WANTED = {
    "appendonly": ("yes", "without the append-only file a restart loses what was acknowledged"),
    "appendfsync": ("always", "otherwise a power cut loses what was acknowledged a second ago"),
    "no-appendfsync-on-rewrite": ("no", "otherwise nothing is synced while the file is being rewritten"),
    "maxmemory-policy": ("noeviction", "anything else throws mail away when the memory is full"),
}
OLDEST = (7, 0)
_WAITAOF_SINCE = (7, 2)


class ServerFacts(NamedTuple):
    """What a server says about itself. `flaws`: why it cannot keep the promise; `version` of the protocol."""

    name: str
    version: tuple[int, ...]
    is_primary: bool
    flaws: tuple[str, ...]
    syncs_log: bool
    used_memory: int
    max_memory: int

    @property
    def can_wait_for_log(self) -> bool:
        return self.version >= _WAITAOF_SINCE and self.syncs_log

    @property
    def free_memory(self) -> int | None:
        """Octets below `maxmemory`; `None` when there is no such limit."""
        return self.max_memory - self.used_memory if self.max_memory else None


async def ask(wire: Wire) -> ServerFacts:
    """Raises StoreError."""
    info = _lines(await wire.call("INFO"))
    settings: dict[str, str] = {}
    try:
        found = pairs(as_list(await wire.call("CONFIG GET", *_WANTED)))
        settings = {name.decode(): value.decode() for name, value in found}
        flaws = _flaws(settings)
    except StoreError as error:
        flaws = (f"its settings cannot be read with CONFIG GET ({error})",)
    if info.get("aof_last_write_status", "ok") != "ok":
        flaws = (*flaws, "its last write to the append-only file failed")
    return ServerFacts(
        "Valkey" if "valkey_version" in info else "Redis",
        _version(info.get("redis_version", "0")),
        info.get("role") == "master",
        flaws,
        # With "no" Redis 8 never confirms WAITAOF, and the operator has accepted that in words.
        info.get("aof_enabled") == "1" and settings.get("appendfsync") != "no",
        int(info.get("used_memory", "0")),
        int(info.get("maxmemory", "0")),
    )


def _flaws(settings: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        f"{name} is {settings.get(name, 'unknown')}, it must be {wanted}: {reason}"
        for name, (wanted, reason) in _WANTED.items()
        if settings.get(name) != wanted
    )


def _lines(reply: Reply) -> dict[str, str]:
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value for name, _, value in pairs if value}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
