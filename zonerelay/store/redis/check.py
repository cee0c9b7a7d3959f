"""Checks a Redis spool, beside running relays: records, bodies, indexes and counts against each other.

One SCAN takes the names. Then a script looks at the messages page by page, each with its deliveries and the
places where they stand, and at the members of each index: a script sees one moment, and every change of the
queue is one, too, so relays that run make no finding. Sizes of chunks are asked for, their octets are not.

Memory: sixteen octets for each message, and one page.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from heapq import merge
from itertools import groupby, islice
from typing import cast

from zonerelay.config.settings import RedisSettings
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId, is_message_id
from zonerelay.store.check import Contents, Examination, Fault, Tell
from zonerelay.store.common import records
from zonerelay.store.common.repairs import Report, body_fault, recipient_in
from zonerelay.store.contract import CHUNK_SIZE, StoreCorruptError, StoreOpenError
from zonerelay.store.redis import records as rows
from zonerelay.store.redis.connection import Argument, Reply, Wire, as_list, load_scripts, open_wire, pairs
from zonerelay.store.redis.lease import FORMAT, RedisLease
from zonerelay.store.redis.open import server_of

PAGE = 50
DELIVERIES = 500
"""Messages and deliveries, about, that one script looks at: the server does nothing else meanwhile."""
MEMBERS = 500
_OWN = re.compile(
    rb"claims|leases|fence|numbers|counts|mark|last-id|format|probe|limits(:.*)?|once:[0-9a-f]+"
)
_INDEX = re.compile(rb"(?:queue|ready|retry):([^:]*)|parked:([^:]*):.*", re.DOTALL)
_PARKED = re.compile(rb"parked:[^:]*")
_GLOB = re.compile(rb"[*?\[\]\\^]")


class Look:
    """A connection that joins no queue: its lease is never taken, and it claims nothing."""

    def __init__(self, wire: Wire, settings: RedisSettings) -> None:
        self.prefix = settings.prefix.encode()
        self.lease = RedisLease(self.prefix, settings.lease, SystemClock())
        self.call = self.call_body = wire.call
        self._wire = wire

    def run(self, script: str, *arguments: Argument) -> asyncio.Future[Reply]:
        return self._wire.run(script, self.prefix, *arguments)

    async def listed(self, script: str, *arguments: Argument) -> list[Reply]:
        """Runs a script whose answer is a list."""
        return as_list(await self.run(script, *arguments))

    async def with_retry(self, ask: Callable[[], asyncio.Future[Reply]]) -> Reply:
        """A lost connection ends the command."""
        return await ask()

    def check_open(self) -> None:
        """It is open until the command ends."""


@contextlib.asynccontextmanager
async def looking(settings: RedisSettings, environment: Mapping[str, str]) -> AsyncIterator[Look]:
    """Raises StoreError; StoreOpenError when a newer zonerelay has written there."""
    wire = await open_wire(server_of(settings, environment), lambda _: None)
    try:
        await load_scripts(wire)
        look = Look(wire, settings)
        stored = await wire.call("GET", look.prefix + b"format")
        needed = int(stored.split()[-1]) if isinstance(stored, bytes) else 0
        if needed > FORMAT:
            raise StoreOpenError(f"[redis] {settings.url}: a newer zonerelay has been here; take that one")
        yield look
    finally:
        await wire.close()
        await asyncio.sleep(0)  # what is aborted is closed in the loop's next turn


async def check(settings: RedisSettings, examination: Examination) -> Contents:
    """Raises StoreError when the server cannot be asked."""
    async with looking(settings, examination.environment) as look:
        return await RedisWalk(look, examination.findings.add, examination.tell).walk()


class RedisMessage:
    """A message as `look.lua` shows it. `why` says what its record or its body lacks, "" when nothing."""

    def __init__(self, identity: str, reply: list[Reply]) -> None:
        self.identity = MessageId(identity)
        self.message: Message | None = None
        self.why = ""
        self.deliveries: list[Delivery] = []
        self.unreadable: list[tuple[bytes, str]] = []
        """Fields, and the recipients in them."""
        self.old: dict[str, bytes] = {}
        self.faults: list[tuple[Fault, str, str]] = []
        self.kinds: Counter[bytes] = Counter()
        """How many deliveries are counted under each field of `counts`."""
        self.octets = 0
        self.numbers: list[int] = []
        """Of the chunks."""
        self.rewritten: dict[bytes, bytes] = {}
        """Records by their fields, as they have to be."""
        self.has_hashes = bool(reply)
        self.is_gone = False
        if not reply:
            self._add(Fault.BAD_RECORD, f"message:{identity}", "its keys are no hashes")
            return
        exists, raw, expires, sizes, found = reply
        # A body that is arriving; the server forgets it when it does not go on.
        self.is_upload = exists is None and raw is None and isinstance(expires, int) and expires >= 0
        self.has_key = expires != -2
        self.has_mark = exists is not None
        self.is_gone = not self.has_key and not found
        if (not self.is_upload or found) and not self.is_gone:
            self._read_message(raw, cast("list[Reply]", sizes))
        rows_of = iter(cast("list[bytes]", found))
        for field, record, places in zip(rows_of, rows_of, rows_of, strict=True):
            self._read_delivery(field, record, places)
        if self.message is not None and not found:
            self._add(Fault.MESSAGE_ALONE, f"message:{identity}", "no delivery belongs to it")

    def _add(self, fault: Fault, where: str, what: str) -> None:
        self.faults.append((fault, where, what))

    def _read_message(self, raw: Reply, sizes: list[Reply]) -> None:
        where = f"message:{self.identity}"
        chunks = {int(number): int(cast("int", size)) for number, size in _twos(sizes)}
        self.numbers = sorted(chunks)
        if not self.has_key:
            self.why = "its record and its body are missing"
            return self._add(Fault.DELIVERY_ALONE, f"deliveries:{self.identity}", "its message has no record")
        if not isinstance(raw, bytes):
            self.why = "its record is missing"
            fault = Fault.BAD_RECORD if self.has_mark else Fault.CHUNKS_ALONE
            return self._add(fault, where, f"there is no *, and {len(chunks):,} chunks of a body")
        self.octets += len(raw)
        self.old[f"{where} *"] = raw
        try:
            self.message = records.decode_message(self.identity, raw)
        except StoreCorruptError as error:
            self.why = str(error)
            return self._add(Fault.BAD_RECORD, f"{where} *", str(error))
        if not self.has_mark:
            self._add(Fault.BAD_RECORD, where, "there is no #")
        last = max(chunks, default=0)
        uneven = any(size != CHUNK_SIZE for number, size in chunks.items() if number < last)
        trouble = body_fault(self.message, len(chunks), last, sum(chunks.values()), uneven=uneven)
        if trouble is not None:
            self.why = trouble[1]
            self._add(trouble[0], where, trouble[1])
        return None

    def _read_delivery(self, field: bytes, raw: bytes, places: bytes) -> None:
        self.octets += len(field) + len(raw)
        where = f"deliveries:{self.identity} {field.decode('ascii', 'replace').partition(' ')[0]} …"
        zone, _, recipient = field.partition(b" ")
        self.old[f"deliveries:{self.identity} {field.decode('ascii', 'backslashreplace')}"] = raw
        try:
            if not places:
                raise StoreCorruptError("its field is not a zone and a recipient")
            delivery = rows.decode(zone, self.identity.encode("ascii"), recipient, raw)
        except StoreCorruptError as error:
            self.unreadable.append((field, recipient_in(recipient)))
            return self._add(Fault.BAD_RECORD, where, str(error))
        self.deliveries.append(delivery)
        due, *rest = raw.split(b" ", 3)[:3]
        self.kinds[(b"h " if due == b"h" else b"r " if due == b"0" else b"d ") + zone] += 1
        if (due, *rest) != rows.front(delivery):
            self.rewritten[field] = rows.encode(delivery)
            self._add(Fault.BAD_RECORD, where, "what scripts read of it is not what it says")
        self._check_places(where, due, places.split())
        return None

    def _check_places(self, where: str, due: bytes, places: list[bytes]) -> None:
        in_queue, claimed, ready, retry, parked, is_known = places
        if in_queue == b"0":
            self._add(Fault.INDEX_MISSING, where, "it is not in the queue of its zone")
        if claimed == b"2":
            self._add(Fault.INDEX_STRAY, where, "it is claimed under a lease that is over and forgotten")
        waits = [ready == b"1", retry != b"-", parked == b"1"]
        if claimed != b"0" or due == b"h":
            if any(waits):
                self._add(Fault.INDEX_STRAY, where, "it is claimed or held, and handed out all the same")
            return
        if not any(waits):
            self._add(Fault.INDEX_MISSING, where, "nothing hands it out: it is in no index")
        elif waits.count(True) > 1 or (waits[0] and due != b"0") or (waits[1] and not _is_at(retry, due)):
            self._add(Fault.INDEX_STRAY, where, "it is in an index where it does not belong")
        elif waits[2] and is_known == b"0":
            self._add(Fault.INDEX_MISSING, where, "the domain that it waits for is not known as parked")


def _is_at(score: bytes, due: bytes) -> bool:
    try:
        return float(score) == float(due) > 0
    except ValueError:
        return False


def _twos(flat: list[Reply]) -> Iterator[tuple[bytes, Reply]]:
    return zip(cast("list[bytes]", flat[::2]), flat[1::2], strict=True)


class RedisWalk:
    """One walk over all keys. `stray` hears of each member of an index that has no delivery."""

    def __init__(
        self,
        look: Look,
        report: Report,
        tell: Tell,
        stray: Callable[[bytes, bytes], None] = lambda _key, _member: None,
    ) -> None:
        self.kinds: Counter[bytes] = Counter()
        self._look = look
        self._report = report
        self._tell = tell
        self._stray = stray
        self._messages: array[int] = array("Q")
        self._deliveries: array[int] = array("Q")
        self._indexes: dict[bytes, bytes] = {}
        self._indexes_differ = False

    async def walk(self) -> Contents:
        """Raises StoreError."""
        await self._scan()
        ids = (number for number, _ in groupby(merge(sorted(self._messages), sorted(self._deliveries))))
        count = max(len(self._messages), len(self._deliveries))
        messages = deliveries = octets = looked = 0
        size = 1
        while page := [f"{number:016x}" for number in islice(ids, size)]:
            before = deliveries
            for identity, reply in zip(page, await self._look.listed("look", *page), strict=True):
                seen = RedisMessage(identity, as_list(reply))
                messages += seen.message is not None
                deliveries += len(seen.deliveries) + len(seen.unreadable)
                octets += seen.octets
                self.kinds += seen.kinds
                for fault, where, what in seen.faults:
                    self._indexes_differ |= fault in (Fault.INDEX_MISSING, Fault.INDEX_STRAY)
                    self._report(fault, where, what, identity)
            looked += len(page)
            size = max(1, min(PAGE, DELIVERIES * len(page) // max(deliveries - before, 1)))
            self._tell(octets, octets * max(count, looked) // looked)
        for key, zone in self._indexes.items():
            await self._check_index(key, zone)
        await self._check_index(b"claims", b"")
        await self._check_sums()
        return Contents(messages, deliveries, octets)

    async def _scan(self) -> None:
        cursor: Reply = b"0"
        prefix = self._look.prefix
        pattern = _GLOB.sub(rb"\\\g<0>", prefix) + b"*"
        while True:
            reply = as_list(
                await self._look.call("SCAN", cast("bytes", cursor), "MATCH", pattern, "COUNT", 1000)
            )
            cursor = reply[0]
            for key in as_list(reply[1]):
                self._note(cast("bytes", key)[len(prefix) :])
            if cursor == b"0":
                return

    def _note(self, key: bytes) -> None:
        kind, _, rest = key.partition(b":")
        name = rest.decode("ascii", "replace")
        if kind in (b"message", b"deliveries") and is_message_id(name):
            (self._messages if kind == b"message" else self._deliveries).append(int(name, 16))
        elif (index := _INDEX.fullmatch(key)) is not None:
            self._indexes[key] = index[1] if index[1] is not None else index[2]
        elif not _OWN.fullmatch(key) and not _PARKED.fullmatch(key):
            where = key.decode("ascii", "replace")
            self._report(Fault.STRAY_FILE, where, "no record of a spool has such a key", "")

    async def _check_index(self, name: bytes, zone: bytes) -> None:
        key = self._look.prefix + name
        cursor: Reply = b"0"
        while True:
            reply = as_list(await self._look.call("ZSCAN", key, cast("bytes", cursor), "COUNT", MEMBERS))
            cursor = reply[0]
            members = [member for member, _ in pairs(as_list(reply[1]))]
            for member in await self._look.listed("strays", key, zone, *members) if members else ():
                assert isinstance(member, bytes)
                self._indexes_differ = True
                identity = member.split(b" ")[-2:][0].decode("ascii", "replace")
                identity = identity if is_message_id(identity) else ""
                where = f"{name.decode('ascii', 'replace')} {identity} …"
                self._report(Fault.INDEX_STRAY, where, "there is no such delivery", identity)
                self._stray(name, member)
            if cursor == b"0":
                return

    async def _check_sums(self) -> None:
        """Held and claimed deliveries are in no index but the queue: of them only the sums are known."""
        counts = pairs(as_list(await self._look.call("HGETALL", self._look.prefix + b"counts")))
        zones = sorted({field[2:] for field, _ in counts} | set(self._indexes.values()))
        *found, (claims,) = cast("list[list[Reply]]", await self._look.listed("sums", *zones))
        for zone, sums in zip(zones, found, strict=True):
            ready, deferred, held, *inside = (int(cast("int", number)) for number in sums)
            queue, in_ready, in_retry, parked = inside
            more = parked + int(cast("int", claims))
            fits = self._indexes_differ or (
                in_ready <= ready <= in_ready + more and in_retry <= deferred <= in_retry + more
            )
            if not fits or ready + deferred + held != queue:
                self._report(
                    Fault.WRONG_COUNT,
                    f"counts {zone.decode('ascii', 'replace')}",
                    f"{ready:,} ready, {deferred:,} deferred, {held:,} held; {queue:,} in the queue,"
                    f" {in_ready:,} in ready, {in_retry:,} in retry, {parked:,} passed over",
                    "",
                )
