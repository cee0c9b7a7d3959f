"""Repairs a Redis spool whose relays are stopped: what the check finds is put right, message by message.

Each change is one script. What it takes away is in the salvage or in the file of old records by then,
durably; so a repair that is killed may be run again. Counts come last, from a second walk, which finds
nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import cast

from zonerelay.config.settings import RedisSettings
from zonerelay.model.message_id import is_message_id
from zonerelay.store.check import Fault, Repaired, Salvage, Tell
from zonerelay.store.common.repairs import Remains, SharedRepair, Troubled, recipient_in
from zonerelay.store.contract import StoreError
from zonerelay.store.redis.check import Look, RedisMessage, RedisWalk, looking
from zonerelay.store.redis.connection import as_list, pairs

_KINDS = frozenset({Fault.WRONG_COUNT, Fault.STRAY_FILE})
"""What a walk finds that no message has to be looked at for."""


async def repair(
    settings: RedisSettings,
    salvage: Salvage,
    tell: Tell,
    *,
    kept: Path,
    carry_out: bool,
    environment: Mapping[str, str],
) -> Repaired:
    """`kept` is the file of old records. Raises StoreError in words, or OSError."""
    mending = SharedRepair(salvage, kept, carry_out=carry_out)
    try:
        async with looking(settings, environment) as look:
            await _refuse_living(look)
            return await _Repair(look, mending, tell).run()
    finally:
        mending.close()


async def living(settings: RedisSettings, environment: Mapping[str, str]) -> int:
    """Returns how many relays have a lease. Raises StoreError."""
    async with looking(settings, environment) as look:
        return len((await _leases(look))[1])


async def _leases(look: Look) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Returns the time in milliseconds, and the leases of relays with their ends."""
    seconds, micros = as_list(await look.call("TIME"))
    now = int(cast("bytes", seconds)) * 1000 + int(cast("bytes", micros)) // 1000
    alive = pairs(
        as_list(await look.call("ZRANGEBYSCORE", look.prefix + b"leases", f"({now}", "+inf", "WITHSCORES"))
    )
    return now, alive


async def _refuse_living(look: Look) -> None:
    """Raises StoreError while a relay has a lease."""
    now, alive = await _leases(look)
    if alive:
        wait = max(float(ends) for _, ends in alive) / 1000 - now / 1000
        raise StoreError(
            f"{len(alive)} relays use the queue: stop them on every machine; one that was killed counts for"
            f" {wait:.0f} s more. Nothing was changed"
        )


class _Repair:
    def __init__(self, look: Look, mending: SharedRepair, tell: Tell) -> None:
        self._look = look
        self._mending = mending
        self._tell = tell
        self._strays: list[tuple[bytes, bytes]] = []
        self._absent: dict[str, list[str]] = {}

    async def run(self) -> Repaired:
        troubled = Troubled()
        contents = await RedisWalk(self._look, troubled.add, self._tell, self._note_stray).walk()
        for identity in troubled.ids:
            await self._mend(identity)
        if self._mending.carry_out:
            for name, member in self._strays:
                self._mending.keep({f"{_text(name)} {_text(member)}": b""})
                await self._look.call("ZREM", self._look.prefix + name, member)
            await self._count()
        return self._mending.repaired(contents.deliveries)

    def _note_stray(self, name: bytes, member: bytes) -> None:
        self._strays.append((name, member))
        identity, _, recipient = member.decode("ascii", "replace").rpartition(" ")
        if name.startswith(b"queue:"):
            if is_message_id(identity):
                self._absent.setdefault(identity, []).append(recipient_in(recipient.encode()))
            else:
                self._mending.lose(f"{_text(name)} {_text(member)} names no message")

    async def _mend(self, identity: str) -> None:
        (reply,) = await self._look.listed("look", identity)
        seen = RedisMessage(identity, as_list(reply))
        if not seen.has_hashes:
            await self._take_out(identity)
            return
        if seen.is_gone:
            self._mending.gone(identity, self._absent.get(identity, ()))
            return
        found = self._remains(seen)
        if await self._mending.judge(found):
            if self._mending.carry_out:
                await self._look.run("mend", identity, b"")
            return
        if self._mending.carry_out:
            assert seen.message is not None
            for field, record in seen.rewritten.items():
                await self._look.call("HSET", self._key("deliveries", identity), field, record)
            created = int(seen.message.envelope.created)
            await self._look.run("mend", identity, b"%d" % created, *(field for field, _ in seen.unreadable))

    def _remains(self, seen: RedisMessage) -> Remains:
        known = {*(each.recipient for each in seen.deliveries), *(who for _, who in seen.unreadable)}
        named = {each.address for each in seen.message.envelope.recipients} if seen.message else set()
        return Remains(
            seen.identity,
            seen.message,
            seen.why,
            tuple(seen.deliveries),
            tuple(who for _, who in seen.unreadable),
            tuple(who for who in self._absent.get(seen.identity, ()) if who in named - known),
            lambda: self._body(seen),
            seen.old,
        )

    async def _body(self, seen: RedisMessage) -> AsyncIterator[bytes]:
        for number in seen.numbers:
            chunk = await self._look.call("HGET", self._key("message", seen.identity), number)
            assert isinstance(chunk, bytes)
            yield chunk

    async def _take_out(self, identity: str) -> None:
        """Keys of another type than the spool's are kept as DUMP has them."""
        self._mending.lose(f"message {identity}: its keys are no hashes")
        for kind in ("message", "deliveries"):
            dump = await self._look.call("DUMP", self._key(kind, identity))
            if isinstance(dump, bytes):
                self._mending.keep({f"{kind}:{identity} (DUMP)": dump})
            if self._mending.carry_out:
                await self._look.call("DEL", self._key(kind, identity))

    def _key(self, kind: str, identity: str) -> bytes:
        return b"%b%b:%b" % (self._look.prefix, kind.encode(), identity.encode())

    async def _count(self) -> None:
        """Writes the counts anew. Raises StoreError when the repaired spool is not sound."""
        left = Troubled(_KINDS)
        walk = RedisWalk(self._look, left.add, self._tell)
        await walk.walk()
        if left.first:
            raise StoreError(f"the repaired spool is not sound: {left.first}; repair it again")
        key = self._look.prefix + b"counts"
        stored = dict(pairs(as_list(await self._look.call("HGETALL", key))))
        wanted = {field: b"%d" % number for field, number in walk.kinds.items()}
        if stored != wanted:
            self._mending.keep({f"counts {_text(field)}": number for field, number in stored.items()})
            for field, number in wanted.items():
                await self._look.call("HSET", key, field, number)
            for field in stored.keys() - wanted.keys():
                await self._look.call("HDEL", key, field)


def _text(raw: bytes) -> str:
    return raw.decode("ascii", "backslashreplace")
