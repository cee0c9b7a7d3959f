"""Stores keys in Redis or Valkey: a sorted set of the keys and a hash of the values for each node.

    mark     the name of this store
    nodes    the set of all nodes
    node:N   hash: epoch, writer, expires (server's milliseconds; 0: it was left), batch_epoch, batch
    keys:N   sorted set in lexical order
    values:N hash
    once:KEY a key stored by `reserve`; expires
    limits:ZONE  limits that relays share; expire when their content no longer affects any relay

Names begin with the prefix, by default `{zonerelay}:`. The braces keep all keys in one slot of a Cluster. A
batch is one script, which compares epoch and number before it writes. It is followed by WAITAOF if the server
supports that, and WAIT if replicas are configured. A batch that frees space is also executed beyond
`maxmemory`.

On failure: a broken connection is replaced at the next call. For each new one the relay checks whether the
server keeps acknowledged writes (`check_server`), and compares it with the last position that this process
has seen. Leases use the server's clock. A lease that ends later than LONGEST_LEASE from now counts as ended.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from zonerelay.config.settings import RedisSettings
from zonerelay.limits.shared import VersionedRecord
from zonerelay.store import records
from zonerelay.store.context import authority_errors
from zonerelay.store.contract import StoreError, StoreFullError, StoreOpenError, Unhealthy
from zonerelay.store.keys import port
from zonerelay.store.keys.server import KeptConnection, ServerKeys
from zonerelay.store.redis.connection import (
    RULE,
    Argument,
    Confirmation,
    RedisEndpoint,
    Reply,
    SharedConnection,
    as_list,
    open_wire,
    subscribed,
)

LONGEST_LEASE = 10 * 60 * 1000
"""In milliseconds. `[redis] lease` must not be longer."""
GET_KEYS = 500
SHOWN_RIGHTS = 5
"""The number of missing permissions that a message names."""
_log = logging.getLogger("zonerelay.store")

_NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"

# node keys values; epoch number deletes (key)… puts (key value)…
_WRITE = """
local node, keys, values = KEYS[1], KEYS[2], KEYS[3]
local at = 0
local function take() at = at + 1; return ARGV[at] end
local epoch, number = take(), take()
local is = redis.call('HMGET', node, 'epoch', 'batch')
if is[1] ~= epoch or tonumber(is[2]) ~= number - 1 then return {is[1] or '0', is[2] or '0'} end
-- A right that was taken away is found out before anything is changed: a script is not rolled back.
redis.call('HSET', node, 'tried', number)
redis.call('ZADD', keys, 'XX', 0, '\\0')
redis.call('ZREM', keys, '\\0')
redis.call('HDEL', values, '\\0')
local left = tonumber(take())
while left > 0 do
  local gone = {}
  for i = 1, math.min(left, 1000) do gone[i] = take() end
  redis.call('ZREM', keys, unpack(gone))
  redis.call('HDEL', values, unpack(gone))
  left = left - #gone
end
left = tonumber(take())
while left > 0 do
  local names, rows = {}, {}
  for _ = 1, math.min(left, 1000) do
    local key = take()
    names[#names + 1] = 0; names[#names + 1] = key
    rows[#rows + 1] = key; rows[#rows + 1] = take()
    left = left - 1
  end
  redis.call('ZADD', keys, unpack(names))
  redis.call('HSET', values, unpack(rows))
end
redis.call('HSET', node, 'batch_epoch', epoch, 'batch', number)
return 1
"""

_SCRIPTS = {
    "write": "#!lua\n" + _WRITE,
    "make room": "#!lua flags=allow-oom\n" + _WRITE,
    # mark nodes node; node writer mark lease longest
    "enter": "#!lua flags=allow-oom\n"
    + _NOW
    + """
local node, writer, mark, lease, longest = unpack(ARGV)
local is = redis.call('HMGET', KEYS[3], 'writer', 'expires')
local expires = tonumber(is[2] or '0')
if is[1] and is[1] ~= writer and expires > now and expires <= now + longest then return 0 end
redis.call('SET', KEYS[1], mark, 'NX')
redis.call('SADD', KEYS[2], node)
local epoch = redis.call('HINCRBY', KEYS[3], 'epoch', 1)
redis.call('HSET', KEYS[3], 'writer', writer, 'expires', now + lease)
redis.call('HSETNX', KEYS[3], 'batch_epoch', 0)
redis.call('HSETNX', KEYS[3], 'batch', 0)
local last = redis.call('HMGET', KEYS[3], 'batch_epoch', 'batch')
return {redis.call('GET', KEYS[1]), epoch, tonumber(last[1]), tonumber(last[2])}
""",
    # node; epoch lease, or epoch alone to leave
    "renew": "#!lua flags=allow-oom\n"
    + _NOW
    + """
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch ~= ARGV[1] then return {epoch or '0', redis.call('HGET', KEYS[1], 'batch') or '0'} end
redis.call('HSET', KEYS[1], 'expires', ARGV[2] and now + ARGV[2] or 0)
return 1
""",
    # nodes; prefix longest
    "peers": "#!lua flags=no-writes\n"
    + _NOW
    + """
local found = {}
for _, node in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local is = redis.call('HMGET', ARGV[1] .. 'node:' .. node, 'epoch', 'expires', 'writer')
  local expires = tonumber(is[2] or '0')
  local is_over = expires <= now or expires > now + ARGV[2]
  local is_left = expires == 0 and 1 or 0
  found[#found + 1] = {tonumber(node), tonumber(is[1] or '0'), is[3] or '', is_left, is_over and 1 or 0}
end
return found
""",
    # keys values; low high rows octets values
    "page": """#!lua flags=no-writes
local low, high, rows, octets = '[' .. ARGV[1], '(' .. ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local found = {0}
for i, key in ipairs(redis.call('ZRANGEBYLEX', KEYS[1], low, high, 'LIMIT', 0, rows + 1)) do
  if i > rows or octets <= 0 then found[1] = 1; break end
  local value = ARGV[5] == '1' and redis.call('HGET', KEYS[2], key) or ''
  found[#found + 1] = key; found[#found + 1] = value
  octets = octets - #key - #value
end
return found
""",
    # ; mark, channel, a name of each kind (_KINDS). All test data is removed. If these were declared as keys,
    # they would be refused before the test.
    "rights": "#!lua flags=allow-oom\n"
    + """
local missing = {}
local function try(command, ...)
  local answer = redis.pcall(command, ...)
  if type(answer) == 'table' and answer.err then
    missing[#missing + 1] = command .. ' ' .. ((...) or '') .. ': ' .. answer.err
  end
end
local mark, channel, node, values, keys, nodes, once, limits = unpack(ARGV)
for _, key in ipairs({node, values}) do
  for _, command in ipairs({'HSET', 'HSETNX', 'HINCRBY'}) do try(command, key, 'field', 1) end
  for _, command in ipairs({'HGET', 'HMGET', 'HDEL'}) do try(command, key, 'field') end
end
try('ZADD', keys, 0, '')
try('ZRANGEBYLEX', keys, '-', '+')
try('ZREVRANGEBYLEX', keys, '+', '-')
try('ZREM', keys, '')
try('SADD', nodes, '')
try('SMEMBERS', nodes)
for _, key in ipairs({once, limits}) do
  try('SET', key, 0, 'PX', 1000)
  try('GET', key)
end
for _, key in ipairs({node, values, keys, nodes, once, limits}) do try('DEL', key) end
try('GET', mark)
try('PUBLISH', channel, '')
try('TIME')
return missing
""",
    # once; value. Removes the key if it has this value.
    "unreserve": """#!lua flags=allow-oom
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
""",
}
_KINDS = ("node", "values", "keys", "nodes", "once", "limits")


class RedisEngine:
    """The engine for Redis, which stores partitions under keys with a common prefix."""

    def __init__(self, server: RedisEndpoint) -> None:
        self.server = server
        self.lease = server.settings.lease
        self._control = _connection(server, is_writer=True)

    def keeper(self, node: int) -> "RedisKeys":
        return RedisKeys(self.server, node)

    async def peers(self) -> list[port.PeerPartition]:
        prefix = self.server.settings.prefix
        found = await self._ask("peers", f"{prefix}nodes", prefix, LONGEST_LEASE)
        return sorted((_peer(as_list(row)) for row in as_list(found)), key=lambda peer: peer.node)

    async def reserve(self, key: bytes, value: bytes, until: float) -> bytes | None:
        """Reserve a key of the whole store with this value until `until` (Unix time), unless it has a value.
        Return the existing value, or None. The reservation is durable.
        """
        wire = await self._control.get()
        name = self.server.settings.prefix.encode() + b"once:" + key
        return _bytes_or_none(await wire.call("SET", name, value, "NX", "GET", "PXAT", int(until * 1000)))

    async def unreserve(self, key: bytes, value: bytes) -> None:
        """Remove the reservation of a key if it has this value."""
        await self._ask("unreserve", self.server.settings.prefix.encode() + b"once:" + key, value)

    async def _ask(self, script: str, name: Argument, *values: Argument) -> Reply:
        return await (await self._control.get()).run(_SCRIPTS[script], [name], *values)

    async def close(self) -> None:
        await self._control.close()


def _connection(server: RedisEndpoint, *, is_writer: bool) -> KeptConnection[SharedConnection]:
    """Return a connection to a server that is suitable for a queue. For a writer its permissions are checked
    and writes are confirmed.
    """
    settings = server.settings

    async def opened() -> SharedConnection:
        wire = await open_wire(server)
        try:
            facts = await server_facts(wire)
            check_server(facts, settings)
            if is_writer:
                await _check_rights(server, wire)
                if await wire.call("GET", f"{settings.prefix}format") is not None:
                    raise port.first_release(f"[redis] prefix {settings.prefix}", "another prefix")
                wire.confirm = confirmations(facts, settings)
        except BaseException:
            await wire.close()
            raise
        return wire

    return KeptConnection(opened)


async def _check_rights(server: RedisEndpoint, wire: SharedConnection) -> None:
    """Raise StoreOpenError, with the names of the missing permissions, if the Redis user lacks any. Those for
    WAIT and WAITAOF are found at the first batch.
    """
    prefix = server.settings.prefix
    names = [f"{prefix}mark", f"{prefix}limits", *(f"{prefix}{kind}:rights" for kind in _KINDS)]
    found = await wire.run(_SCRIPTS["rights"], (), *names)
    missing = [each.decode("utf-8", "replace") for each in as_list(found) if isinstance(each, bytes)]
    if missing:
        more = f"; and {len(missing) - SHOWN_RIGHTS} more" if len(missing) > SHOWN_RIGHTS else ""
        raise StoreOpenError(
            f"[redis] user: {Unhealthy.SERVER_DENIES}: {'; '.join(missing[:SHOWN_RIGHTS])}{more} ({RULE})"
        )
    try:
        async with subscribed(server, f"{prefix}limits".encode(), lambda _: None):
            pass
    except StoreError as error:
        raise StoreOpenError(
            f"[redis] user: {Unhealthy.SERVER_DENIES}: SUBSCRIBE to limits: {error} ({RULE})"
        ) from error


class RedisKeys(ServerKeys[SharedConnection]):
    """A partition in Redis."""

    def __init__(self, server: RedisEndpoint, node: int) -> None:
        super().__init__(node, _connection(server, is_writer=True), _connection(server, is_writer=False))
        prefix = server.settings.prefix
        self._lease = int(server.settings.lease * 1000)
        self._mark, self._nodes = f"{prefix}mark", f"{prefix}nodes"
        self._here, self._keys, self._values = (
            f"{prefix}{kind}:{node}" for kind in ("node", "keys", "values")
        )
        self._settings = server.settings

    # --- reading

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        wire = await self._use(self._reader)
        parts = [
            wire.call("HMGET", self._values, *keys[first : first + GET_KEYS])
            for first in range(0, len(keys), GET_KEYS)
        ]
        return [_bytes_or_none(value) for part in await asyncio.gather(*parts) for value in as_list(part)]

    async def page(
        self, start: bytes, end: bytes, *, rows: int = port.PAGE_ROWS, values: bool = True
    ) -> port.KeyPage:
        wire = await self._use(self._reader)
        names = [self._keys, self._values]
        asked = wire.run(_SCRIPTS["page"], names, start, end, rows, port.PAGE_OCTETS, int(values))
        more, *found = as_list(await asked)
        flat = [each for each in found if isinstance(each, bytes)]
        taken: list[port.Row] = list(zip(flat[::2], flat[1::2], strict=True))
        return port.KeyPage(taken, port.after(taken[-1][0]) if more else None)

    async def last_key(self, start: bytes, end: bytes) -> bytes | None:
        wire = await self._use(self._reader)
        found = as_list(
            await wire.call("ZREVRANGEBYLEX", self._keys, b"(" + end, b"[" + start, "LIMIT", 0, 1)
        )
        return _bytes_or_none(found[0]) if found else None

    # --- entering

    async def _look(self, wire: SharedConnection) -> port.PartitionState | None:
        mark = _bytes_or_none(await wire.call("GET", self._mark))
        if mark is None:
            return None
        names = ("epoch", "writer", "batch_epoch", "batch")
        found = as_list(await wire.call("HMGET", self._here, *names))
        epoch, writer, batch_epoch, batch = (_bytes_or_none(each) or b"" for each in found)
        last = port.Position(int(batch_epoch or 0), int(batch or 0))
        return port.PartitionState(writer.decode(), mark.decode(), int(epoch or 0), last)

    async def enter(self, writer: str, *, mark: str) -> port.PartitionState:
        wire = await self._writer.get()
        names = [self._mark, self._nodes, self._here]
        values = (self._node, writer, mark, self._lease, LONGEST_LEASE)
        reply = await wire.run(_SCRIPTS["enter"], names, *values)
        if not isinstance(reply, list):
            raise port.NodeTakenError(
                f"another relay uses node number {self._node}, and its lease has not expired"
            )
        stored = _bytes_or_none(reply[0]) or b""
        epoch, batch_epoch, batch = _numbers(reply[1:])
        last = port.Position(batch_epoch, batch)
        return self._entered(port.PartitionState(writer, stored.decode(), epoch, last))

    # --- writing

    async def apply(self, batch: port.WriteBatch) -> None:
        write = batch.write
        gone = [key for key, value in write.changes.items() if value is None]
        made = [part for key, value in write.changes.items() if value is not None for part in (key, value)]
        wire = await self._use(self._writer)
        values: list[bytes | str | int] = [*batch.position, len(gone), *gone, len(made) // 2, *made]
        names = [self._here, self._keys, self._values]
        script = _SCRIPTS["make room" if write.makes_room else "write"]
        try:
            reply = await wire.run(script, names, *values)
        except StoreFullError:
            raise
        except StoreError:
            await self._writer.give_up()  # a new connection finds out which permission is missing
            raise
        if isinstance(reply, list):
            raise await self._refused(wire, batch.position.epoch)
        self._last = batch.position

    async def _check(self, connection: SharedConnection) -> None:
        check_server(await server_facts(connection), self._settings)

    async def _set_lease(self, connection: SharedConnection, *, renews: bool) -> None:
        values = (self._epoch, self._lease) if renews else (self._epoch,)
        if isinstance(await connection.run(_SCRIPTS["renew"], [self._here], *values), list):
            raise await self._refused(connection, self._epoch)

    async def room(self) -> int | None:
        return (await server_facts(await self._reader.get())).free_memory


def _bytes_or_none(reply: Reply) -> bytes | None:
    return reply if isinstance(reply, bytes) else None


def _peer(row: list[Reply]) -> port.PeerPartition:
    node, epoch, is_left, is_over = _numbers(row)
    return port.PeerPartition(
        node, epoch, (_bytes_or_none(row[2]) or b"").decode(), bool(is_left), bool(is_over)
    )


def _numbers(reply: Reply) -> list[int]:
    return [each for each in as_list(reply) if isinstance(each, int)]


# --- limits that relays share
#
# They have two connections of their own, one for reads and writes and one for notifications, so that no limit
# waits behind a body. All times use the server's clock.

_READ_LIMITS = """#!lua flags=no-writes
local t = redis.call('TIME') return {redis.call('GET', KEYS[1]), t[1], t[2]}"""
_REPLACE_LIMITS = """#!lua flags=allow-oom
local old, new = ARGV[1], ARGV[2]
if (redis.call('GET', KEYS[1]) or '') ~= old then return 0 end
if new == '' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], new, 'PX', ARGV[3]) end
for i = 5, #ARGV do redis.call('PUBLISH', ARGV[4], ARGV[i]) end
return 1
"""


class RedisRecordStore:
    """Stores shared limits in Redis (a `SharedRecordStore`)."""

    name = "the spool's Redis server"

    def __init__(self, server: RedisEndpoint) -> None:
        self._server = server
        self._prefix = server.settings.prefix.encode()
        self._notices = self._prefix + b"limits"
        self._connection = KeptConnection(partial(open_wire, server))  # the spool's own check the server

    @contextlib.asynccontextmanager
    async def listening(self, on_notice: Callable[[str], None]) -> AsyncIterator[asyncio.Event]:
        with authority_errors():
            await self._connection.get()
            async with subscribed(self._server, self._notices, on_notice) as ended:
                yield ended

    async def read(self, zone: str) -> VersionedRecord:
        reply = as_list(await self._ask(_READ_LIMITS, zone))
        data, seconds, microseconds = reply
        assert data is None or isinstance(data, bytes)
        assert isinstance(seconds, bytes)
        assert isinstance(microseconds, bytes)
        return VersionedRecord(data, 0, int(seconds) + int(microseconds) / 1e6)

    async def replace(
        self, zone: str, record: VersionedRecord, data: bytes | None, *, ttl: float, notices: Sequence[str]
    ) -> bool:
        old, new = record.data or b"", data or b""
        reply = await self._ask(_REPLACE_LIMITS, zone, old, new, int(ttl * 1000), self._notices, *notices)
        return reply == 1

    async def close(self) -> None:
        await self._connection.close()

    async def _ask(self, script: str, zone: str, *values: Argument) -> Reply:
        """Run a Lua script on the limits of a zone, using the current connection. A connection that the
        server has closed is replaced, without a report that limits are lost.
        """
        with authority_errors():
            key = self._prefix + b"limits:" + records.field(zone)
            return await (await self._connection.get()).run(script, [key], *values)


# --- does the server keep what it has acknowledged?
#
# The requirements are the append-only file, synced before each reply and while it is being rewritten; no
# eviction; and a primary. The version must be 7.0 or newer (Valkey: any), because of script flags that allow
# outcomes to be stored when the server's memory is full. A server that forbids CONFIG counts as unsuitable.
# The relay checks this at every connection and with every renewal of the lease, because settings may be
# changed while it runs.

_WANTED = {
    "appendonly": ("yes", "without the append-only file, a restart loses acknowledged mail"),
    "appendfsync": ("always", "otherwise a power cut loses mail acknowledged within the last second"),
    "no-appendfsync-on-rewrite": ("no", "otherwise nothing is synced while the file is being rewritten"),
    "maxmemory-policy": ("noeviction", "otherwise mail is evicted when the memory is full"),
}
OLDEST = (7, 0)
_WAITAOF_SINCE = (7, 2)


class ServerFacts(NamedTuple):
    """The properties of a Redis server: its INFO, why it does not store data durably (`flaws`), and whether
    it syncs its log before each reply.
    """

    info: Mapping[str, str]
    flaws: tuple[str, ...] = ()
    syncs_log: bool = True

    @property
    def version(self) -> tuple[int, ...]:
        """The version of Redis with which the server is compatible."""
        return tuple(int(part) for part in self.info.get("redis_version", "0").split(".") if part.isdigit())

    @property
    def can_wait_for_log(self) -> bool:
        return self.version >= _WAITAOF_SINCE and self.syncs_log

    @property
    def free_memory(self) -> int | None:
        """The free bytes below `maxmemory`, or `None` if there is no limit."""
        most = int(self.info.get("maxmemory", "0"))
        return most - int(self.info.get("used_memory", "0")) if most else None


def check_server(facts: ServerFacts, settings: RedisSettings) -> None:
    """Raise StoreOpenError if the server must not store the queue."""
    info = facts.info
    # Redis has the first name, Valkey 8 the second.
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):
        raise StoreOpenError(
            "[redis] url: this is a Sentinel, which stores no data; use the primary that it monitors, or "
            "an address that follows it"
        )
    if facts.version < OLDEST:
        name, found = "Valkey" if "valkey_version" in info else "Redis", ".".join(map(str, facts.version))
        raise StoreOpenError(f"[redis] url: {name} {found} is too old; 7.0 or newer is required")
    if info.get("role") != "master":
        primary = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        raise StoreOpenError(f"[redis] url: the server is a read-only replica of {primary}; use the primary")
    if info.get("cluster_enabled") == "1" and not re.search(r"\{[^}]+\}", settings.prefix):
        raise StoreOpenError(
            "[redis] prefix: the server is a Cluster node, which stores related keys in one slot only if "
            'the prefix contains a hash tag; set prefix = "{zonerelay}:"'
        )
    if facts.flaws and not settings.unsafe:
        raise StoreOpenError(f"[redis] url: {Unhealthy.SERVER_UNSAFE}: {'; '.join(facts.flaws)}")


def confirmations(facts: ServerFacts, settings: RedisSettings) -> tuple[Confirmation, ...]:
    """Return the commands that confirm the durability of each batch and are sent after it."""
    seconds = settings.timeout / 2
    asked = []
    if facts.can_wait_for_log:
        failure = f"the server has not synced its append-only file within {seconds:g} s"
        asked.append(Confirmation(("WAITAOF", 1, 0, int(seconds * 1000)), 1, failure))
    if replicas := settings.replicas:
        failure = f"[redis] replicas: fewer than {replicas} have confirmed a write within {seconds:g} s"
        asked.append(Confirmation(("WAIT", replicas, int(seconds * 1000)), replicas, failure))
    return tuple(asked)


async def server_facts(wire: SharedConnection) -> ServerFacts:
    """Query a server's properties with INFO and CONFIG GET. Raises StoreError."""
    info = _lines(await wire.call("INFO"))
    settings: dict[str, str] = {}
    try:
        found = as_list(await wire.call("CONFIG GET", *_WANTED))
        texts = [each.decode() for each in found if isinstance(each, bytes)]
        settings = dict(zip(texts[::2], texts[1::2], strict=True))
        flaws = tuple(
            f"{name} is {settings.get(name, 'unknown')} but must be {wanted}: {reason}"
            for name, (wanted, reason) in _WANTED.items()
            if settings.get(name) != wanted
        )
    except StoreError as error:
        flaws = (f"its settings cannot be read with CONFIG GET ({error}); allow that command",)
    if info.get("aof_last_write_status", "ok") != "ok":
        flaws = (*flaws, "its last write to the append-only file failed")
    # With "everysec" a batch would wait for the next sync, and with "no" for ever. The operator has accepted
    # the loss of these writes in the configuration.
    syncs_log = info.get("aof_enabled") == "1" and settings.get("appendfsync", "always") == "always"
    return ServerFacts(info, flaws, syncs_log)


def _lines(reply: Reply) -> dict[str, str]:
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value for name, _, value in pairs if value}


# --- mail of python-slimta, which the relay does not read

LOOKED_AT = 100_000
_SCANNED = 1000


async def tell_foreign_queue(server: RedisEndpoint) -> None:
    """Log a warning if the server contains a queue of python-slimta. Raises nothing, because the engine
    reports a failing server.
    """
    url, prefix = server.settings.url, server.settings.prefix
    with contextlib.suppress(StoreError):
        wire = await open_wire(server)
        try:
            if await _is_there(wire, prefix.encode()):
                _log.warning(
                    "[redis] prefix %s contains mail of python-slimta, which the relay does not send; import"
                    " it with zonerelay spool import --from slimta-redis '%s?prefix=%s'",
                    *(prefix, url, prefix),
                )
        finally:
            await wire.close()


async def _is_there(wire: SharedConnection, prefix: bytes) -> bool:
    message = re.compile(re.escape(prefix) + rb"[0-9a-f]{32}")
    cursor: Argument = "0"
    for _ in range(LOOKED_AT // _SCANNED):
        found = as_list(await wire.call("SCAN", cursor, "COUNT", _SCANNED))
        for key in as_list(found[1]):
            if not isinstance(key, bytes) or not message.fullmatch(key):
                continue
            is_hash = await wire.call("TYPE", key) == b"hash"
            if is_hash and await wire.call("HEXISTS", key, "envelope") == 1:
                return True
        if found[0] == b"0" or not isinstance(found[0], bytes):
            return False
        cursor = found[0]
    return False
