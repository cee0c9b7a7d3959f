"""Moves the messages of one store to another, through the store interface.

A message goes through these steps. Each is durable before the next one begins:

1. The journal records the message (PLANNED).
2. All its deliveries are held in the source, with a mark before their `act` that tells whether they were held
   before. From then on no relay sends them from there, neither one that shares the source nor the old one if
   it is restarted between two runs.
3. The message is copied, held and under its own id. The journal gets the digest of the copy (COPIED).
4. The copy is read back by a store that was opened after it was written and so cannot have it cached. Then
   the message is removed from the source, and the journal records this (REMOVED).
5. The copy is held or not, as the message was before step 2; it is released if the hold rule that held it has
   ended since. The journal records this (AWAKE).

Wherever a run was killed, the next one repeats the step that the journal names. Holding, copying, removing
and releasing are idempotent. A message marked REMOVED, or one that has left the source while its copy
existed, is never copied again. So no message is ever in both queues without being held in one of them, and
none is in neither.

Copies are held because every engine and every release supports this state: no relay claims a held delivery,
and the format of records on disk is unchanged. The mark prevents the end of a suspension, on either side,
from releasing the copy. An operator who releases mail of either queue during a migration breaks the promise;
the documentation warns of this.

A message moves with all of its deliveries or not at all: one that another relay is attempting is left
unchanged for a later pass. An unreadable message also stays, and is reported. An error of a store ends the
run, and another run continues. If another message of the target already has the id (two relays may assign the
same one), a new id is derived from it.

The journal is a SQLite file next to the source, with a row for each message that was ever moved, and is
removed when the migration ends. So a message that was moved is never copied again, wherever the previous run
was killed, even if a source that has lost its last writes lists the message again. Only one process at a time
has the file open. Failures are TransferErrors with a message for the operator.

Memory: a page of at most `PAGE` messages, and the chunks of their bodies that are being copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import itertools
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from zonerelay import durable
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message, MessageId
from zonerelay.process.files import closed_on_failure
from zonerelay.process.tasks import gathered
from zonerelay.store.contract import MessageNotFoundError, QueueCounts, Store, StoreCorruptError, StoreError
from zonerelay.transfer.files import TransferError, UnusableMessage, facts_of

PAGE = 64
_LOOK_EVERY = 0.5
_IDS = 100
"""Ids that are tried for a message whose own is taken."""

_SLEEPS = "~"
_WAS_HELD = "~held "

T = TypeVar("T")


_TABLES = """
CREATE TABLE IF NOT EXISTS migration (source TEXT, target TEXT, spools TEXT);
CREATE TABLE IF NOT EXISTS message (
    spool INTEGER, id TEXT, copy TEXT, digest TEXT, phase INTEGER, PRIMARY KEY (spool, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS unfinished ON message (spool, phase) WHERE phase < 4;
"""


class MovePhase(enum.IntEnum):
    """How far the move of a message has progressed.

    PLANNED: the message may be held in the source, and may have been copied. COPIED: it may also have been
    removed from the source. REMOVED: it has been removed from the source, and its copy may have been
    released. AWAKE: the move is complete.
    """

    PLANNED = 1
    COPIED = 2
    REMOVED = 3
    AWAKE = 4


class Move(msgspec.Struct, frozen=True):
    """The move of one message: its id in the source, and the id of its copy. `digest` is the hash of the
    copied data, or "" if it is not known yet.
    """

    id: MessageId
    copy: MessageId
    digest: str = ""


class MigrationJournal:
    """The durable journal of one migration, with which an interrupted one is continued. Every method raises
    TransferError if the file cannot be used; `close` also raises OSError.
    """

    def __init__(self, path: Path, source: str, target: str) -> None:
        """Open or create the journal. `source` and `target` are the locations of the two queues: a journal of
        other queues is refused.
        """
        self.path = path
        self.is_over = False
        """The migration has ended: nothing is left to remember."""
        self.spools: tuple[int, ...] = ()
        """The spools of the target that copies go to; empty until `choose`."""
        with self._translated():
            self._database = sqlite3.connect(path, isolation_level=None, timeout=1.0)
            with closed_on_failure(self._database):
                self._open(source, target)

    def _open(self, source: str, target: str) -> None:
        run = self._database.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        self._database.executescript(_TABLES)
        run("BEGIN IMMEDIATE")
        if (found := run("SELECT source, target, spools FROM migration").fetchone()) is None:
            run("INSERT INTO migration VALUES (?, ?, '[]')", (source, target))
            run("COMMIT")
        elif found[:2] != (source, target):
            raise TransferError(
                f"a migration from {found[0]} to {found[1]} is not finished ({self.path}); finish it first"
            )
        else:
            run("COMMIT")
            self.spools = tuple(msgspec.json.decode(found[2], type=list[int]))
        run("BEGIN")

    def choose(self, spools: Sequence[int]) -> None:
        """Record which spools of the target receive the copies, because a later run searches for copies in
        them.
        """
        self.spools = tuple(spools)
        with self._translated():
            self._database.execute(
                "UPDATE migration SET spools = ?", (msgspec.json.encode(self.spools).decode(),)
            )
            self._commit()

    def is_finished(self, spool: int) -> bool:
        """Return whether all moves from this spool are complete."""
        found = "SELECT 1 FROM message WHERE spool = ? AND phase < ? LIMIT 1"
        with self._translated():
            return self._database.execute(found, (spool, MovePhase.AWAKE)).fetchone() is None

    def unfinished(self, spool: int, phase: MovePhase, limit: int) -> list[Move]:
        with self._translated():
            rows = self._database.execute(
                "SELECT id, copy, digest FROM message WHERE spool = ? AND phase = ? ORDER BY id LIMIT ?",
                (spool, phase, limit),
            )
            return [Move(*row) for row in rows]

    def phases(self, spool: int, ids: Sequence[MessageId]) -> dict[MessageId, MovePhase]:
        """Return the phase of each of these messages that the journal contains."""
        marks = ", ".join("?" * len(ids))
        with self._translated():
            rows = self._database.execute(
                f"SELECT id, phase FROM message WHERE spool = ? AND id IN ({marks})",  # noqa: S608
                (spool, *ids),
            )
            return {MessageId(identity): MovePhase(phase) for identity, phase in rows}

    def record(self, spool: int, moves: Iterable[Move], phase: MovePhase) -> None:
        """Record durably that moves have reached a phase. AWAKE becomes durable only with the next call,
        because releasing a message twice is harmless.
        """
        self._write(
            "INSERT INTO message VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (spool, id) DO UPDATE SET digest = excluded.digest, phase = excluded.phase",
            [(spool, each.id, each.copy, each.digest, phase) for each in moves],
            is_durable=phase is not MovePhase.AWAKE,
        )

    def forget(self, spool: int, moves: Iterable[Move]) -> None:
        """Remove the moves of messages that stay in the source and have no copy."""
        self._write("DELETE FROM message WHERE spool = ? AND id = ?", [(spool, each.id) for each in moves])

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]], *, is_durable: bool = True) -> None:
        with self._translated():
            self._database.executemany(statement, rows)
            if is_durable:
                self._commit()

    def _commit(self) -> None:
        self._database.execute("COMMIT")
        self._database.execute("BEGIN")

    def close(self) -> None:
        with self._translated():
            if self._database.in_transaction:
                self._database.execute("COMMIT")
            is_begun = self._database.execute("SELECT 1 FROM message LIMIT 1").fetchone() is not None
            self._database.close()
        if self.is_over or not is_begun:
            durable.unlink(self.path)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            other = "; it is used by another `spool migrate`"
            is_busy = error.sqlite_errorcode == sqlite3.SQLITE_BUSY
            raise TransferError(f"{self.path}: {error}{other if is_busy else ''}") from error
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise TransferError(
                f"{self.path}, the journal of moved mail, is damaged: {error}. Without it mail could be "
                "sent twice; see docs/store/changing-engines.md"
            ) from error


class MigrationResult(msgspec.Struct, kw_only=True):
    """The result of `spool migrate`, and its output with --json. `zones` counts deliveries by zone and state,
    as read back from the target. `already` counts messages that the source listed again after they had been
    moved. `left` messages stay in the source because a relay is attempting them, `unusable` ones because they
    cannot be moved. `spool` is the directory next to a running relay's own spools that contains the mail, or
    "". `keys` counts the idempotency keys given to the target. Of the files in the spool's directory,
    `copied` were copied to the target, `kept` already existed there, and `lost` are damaged and were not
    copied.
    """

    messages: int = 0
    deliveries: int = 0
    octets: int = 0
    keys: int = 0
    zones: dict[str, QueueCounts] = msgspec.field(default_factory=dict)
    already: int = 0
    left: int = 0
    unusable: int = 0
    seconds: float = 0.0
    spool: str = ""
    copied: list[str] = msgspec.field(default_factory=list)
    kept: list[str] = msgspec.field(default_factory=list)
    lost: list[str] = msgspec.field(default_factory=list)


@dataclass(eq=False, repr=False)
class Migration:
    """Moves the messages of one spool to a target. `patience` is the time in seconds to wait for messages of
    another relay: a killed relay keeps them until its lease expires. `orders_over` returns the ids of
    suspensions that have ended in the target. `saw` is called with the number of messages that are done (half
    a message when it is copied), or with the reason why one stays in the source.
    """

    source: Store
    targets: Sequence[Store]
    journal: MigrationJournal
    moved: MigrationResult
    _: KW_ONLY
    spool: int
    patience: float
    orders_over: Callable[[], Collection[str]]
    saw: Callable[[float, UnusableMessage | None], None]

    def _target(self, identity: MessageId) -> Store:
        """Return the store of the target that gets the copy of a message."""
        return self.targets[int(identity[:-2], 16) % len(self.targets)]

    # --- steps 1 to 3

    async def copy(self, ids: Sequence[MessageId]) -> None:
        """Copy messages to the target, including those whose copying was interrupted. Messages that are being
        attempted are left unchanged. Raise StoreError or TransferError if a store or the journal fails.
        """
        while moves := self.journal.unfinished(self.spool, MovePhase.PLANNED, PAGE):
            await gathered(self._discard_copy(each) for each in moves)
            messages = await self.source.read_messages([each.id for each in moves])
            await self._copy(moves, messages)
        for start in range(0, len(ids), PAGE):
            some = ids[start : start + PAGE]
            known = self.journal.phases(self.spool, some)
            await self._remove_again([each for each, phase in known.items() if phase >= MovePhase.REMOVED])
            fresh = [each for each in some if each not in known]
            messages = await self.source.read_messages(fresh)
            for identity in (each for each in fresh if each not in messages):
                await self._tell_unreadable(identity)
            await self._copy(await self._planned(list(messages.values())), messages)

    async def _remove_again(self, ids: Collection[MessageId]) -> None:
        for identity in ids:
            left = await self.source.deliveries_of(identity)
            await self.source.update([each.key for each in left], _none)
            self.moved.already += 1
            self.saw(1, None)

    async def _tell_unreadable(self, identity: MessageId) -> None:
        try:
            await self.source.read_message(identity)
        except MessageNotFoundError:
            self.saw(1, None)  # the message was sent in the meantime
        except StoreCorruptError as error:
            self._refuse(identity, str(error))

    def _refuse(self, identity: MessageId, why: str) -> None:
        self.saw(1, UnusableMessage(identity, why))

    async def _planned(self, page: Sequence[Message]) -> list[Move]:
        moves: list[Move] = []
        for identity, copy in (await self._free_ids(page)).items():
            if copy:
                moves.append(Move(identity, copy))
            else:
                self._refuse(identity, "the target already contains this message from another source")
        self.journal.record(self.spool, moves, MovePhase.PLANNED)
        return moves

    async def _free_ids(self, page: Sequence[Message]) -> dict[MessageId, MessageId | None]:
        """Return the ids for the copies of these messages, with `None` for messages that the target has
        already.
        """
        wanted: dict[MessageId, MessageId | None] = {}
        for target in self.targets:
            mine = {each.id: each for each in page if self._target(each.id) is target}
            known = await target.read_messages(list(mine))
            for identity, message in mine.items():
                wanted[identity] = await self._free_id(target, message, known.get(identity))
        return wanted

    async def _free_id(self, target: Store, message: Message, known: Message | None) -> MessageId | None:
        """Return the id for the copy of a message; `known` is the target's message with the same id, if there
        is one.
        """
        identity = message.id
        for number in range(_IDS):
            if known is None:
                return identity
            if structs.replace(known.envelope, id=message.id) == message.envelope:
                return None
            identifying = f"{message.id} {message.envelope.created!r} {number}"
            identity = MessageId(message.id[:11] + hashlib.sha256(identifying.encode()).hexdigest()[:5])
            known = (await target.read_messages([identity])).get(identity)
        raise StoreError(
            f"message {message.id}: the target already contains other messages under all {_IDS} ids that "
            "were tried"
        )

    async def _copy(self, moves: Sequence[Move], messages: Mapping[MessageId, Message]) -> None:
        states = await gathered(self.source.deliveries_of(each.id) for each in moves)
        await self.source.update([each.key for some in states for each in some], _asleep)
        states = await gathered(self.source.deliveries_of(each.id) for each in moves)
        copied = await gathered(
            self._copied(move, messages.get(move.id), some) for move, some in zip(moves, states, strict=True)
        )
        done = [move for move in copied if move is not None]
        self.journal.record(self.spool, done, MovePhase.COPIED)
        self.saw(len(done) / 2, None)

    async def _copied(
        self, move: Move, message: Message | None, deliveries: Sequence[Delivery]
    ) -> Move | None:
        """Copy a message to the target. Return `None` if it stays in the source or no longer exists."""
        if not deliveries or not all(map(_sleeps, deliveries)):
            await self._let_go(move)  # another relay has one of them
            return None
        try:
            message = message or await self.source.read_message(move.id)
            digest = _digest(message, deliveries, move.copy)
            async with self._target(move.id).begin(structs.replace(message.envelope, id=move.copy)) as writer:
                async for piece in self.source.read_body(move.id):
                    digest.update(piece)
                    await writer.write(piece)
                copies = [structs.replace(each, message_id=move.copy) for each in deliveries]
                await writer.commit(copies, **facts_of(message))
        except (StoreCorruptError, MessageNotFoundError) as error:
            await self._let_go(move)
            self._refuse(move.id, str(error))
            return None
        return structs.replace(move, digest=digest.hexdigest())

    async def _let_go(self, move: Move) -> None:
        """Release a message in the source and delete its copy, because it will not be moved."""
        await self._discard_copy(move)
        left = await self.source.deliveries_of(move.id)
        await self.source.update([each.key for each in left if _sleeps(each)], self._waking())
        self.journal.forget(self.spool, [move])

    async def _discard_copy(self, move: Move) -> None:
        """Delete the held copy of a message that is still in the source."""
        await self._change(self._target(move.id), [move.copy], lambda _: True, _none)

    # --- steps 4 and 5

    async def finish(self) -> None:
        """Complete the moves of all messages that were copied, in this run or an earlier one. Raise
        StoreError if a store fails or a copy differs from its original, and TransferError if the journal
        fails.
        """
        while moves := self.journal.unfinished(self.spool, MovePhase.REMOVED, PAGE):
            await self._wake(moves)
        while moves := self.journal.unfinished(self.spool, MovePhase.COPIED, PAGE):
            copies = await gathered(self._compared(each) for each in moves)
            await self._remove(moves, copies)
            self.journal.record(self.spool, moves, MovePhase.REMOVED)
            await self._wake(moves)
            for copy in copies:
                self._count(copy)

    async def _compared(self, move: Move) -> _CopiedMessage:
        """Read the copy of a message back, and compare it with the original. Raise StoreError if the copy
        differs.
        """
        target = self._target(move.id)
        try:
            message = await target.read_message(move.copy)
            deliveries = await target.deliveries_of(move.copy)
            digest = _digest(message, deliveries, move.copy)
            async for piece in target.read_body(move.copy):
                digest.update(piece)
            if digest.hexdigest() == move.digest:
                return _CopiedMessage(message.size, deliveries)
        except (StoreCorruptError, MessageNotFoundError):
            pass  # treated like any other difference
        raise await self._retracted(move)

    async def _retracted(self, move: Move) -> StoreError:
        """Delete an incorrect copy, so that the next run copies the message again, and return the error."""
        await self._discard_copy(move)
        self.journal.record(self.spool, [structs.replace(move, digest="")], MovePhase.PLANNED)
        return StoreError(
            f"message {move.id}: its copy in the target differs from the source and was removed; one of "
            "the queues was changed meanwhile, or the target loses data"
        )

    async def _remove(self, moves: Sequence[Move], copies: Sequence[_CopiedMessage]) -> None:
        """Remove messages that were copied from the source. Raise StoreError if one has changed since it was
        copied; it is not removed then.
        """
        wanted = {
            each.key: each
            for move, copy in zip(moves, copies, strict=True)
            for each in (structs.replace(delivery, message_id=move.id) for delivery in copy.deliveries)
        }
        found = await self.source.update(list(wanted), lambda delivery: delivery)
        other = {each.message_id for key, each in found.items() if each != wanted[key]}
        if changed := next((move for move in moves if move.id in other), None):
            raise await self._retracted(changed)
        await self._change(self.source, [each.id for each in moves], lambda _: True, _none)

    async def _wake(self, moves: Sequence[Move]) -> None:
        """Release the held copies, so that the target sends them."""
        for target in self.targets:
            mine = [move.copy for move in moves if self._target(move.id) is target]
            await self._change(target, mine, _sleeps, self._waking())
        self.journal.record(self.spool, moves, MovePhase.AWAKE)
        self.saw(len(moves) / 2, None)

    async def _change(
        self,
        store: Store,
        messages: Sequence[MessageId],
        concerns: Callable[[Delivery], bool],
        change: Callable[[Delivery], Delivery | None],
    ) -> None:
        """Change deliveries of these messages until `concerns` is true for none of them. Raise StoreError if
        a delivery remains unchanged.
        """
        deadline = asyncio.get_running_loop().time() + self.patience
        left = list(messages)
        for attempt in itertools.count():
            states = await gathered(map(store.deliveries_of, left))
            open_ones = [
                (each, [delivery.key for delivery in some if concerns(delivery)])
                for each, some in zip(left, states, strict=True)
            ]
            left = [each for each, keys in open_ones if keys]
            if not left:
                return
            if attempt > 1:
                if asyncio.get_running_loop().time() > deadline:
                    where = "source" if store is self.source else "target"
                    raise StoreError(
                        f"message {left[0]} is left in the {where}: it was changed manually, or a relay is "
                        "still using it; stop that relay"
                    )
                await asyncio.sleep(_LOOK_EVERY)
            await store.update([key for _, keys in open_ones for key in keys], change)

    def _waking(self) -> Callable[[Delivery], Delivery]:
        over = self.orders_over()

        def awake(delivery: Delivery) -> Delivery:
            if not _sleeps(delivery):
                return delivery
            if not delivery.act.startswith(_WAS_HELD):
                return structs.replace(delivery, held=False, act=delivery.act.removeprefix(_SLEEPS))
            act = delivery.act.removeprefix(_WAS_HELD)
            return structs.replace(delivery, held=act not in over, act="" if act in over else act)

        return awake

    def _count(self, copy: _CopiedMessage) -> None:
        self.moved.messages += 1
        self.moved.octets += copy.size
        for each in copy.deliveries:
            counts = self.moved.zones.setdefault(each.zone, QueueCounts())
            counts.count(each.next_attempt, held=each.act.startswith(_WAS_HELD))
            self.moved.deliveries += 1


class _CopiedMessage(msgspec.Struct, frozen=True):
    """A copied message as read back from the target: its size in bytes, and its held deliveries."""

    size: int
    deliveries: Sequence[Delivery]


def _asleep(delivery: Delivery) -> Delivery:
    if _sleeps(delivery):
        return delivery
    return structs.replace(
        delivery, held=True, act=f"{_WAS_HELD if delivery.held else _SLEEPS}{delivery.act}"
    )


def _sleeps(delivery: Delivery) -> bool:
    return delivery.held and delivery.act.startswith(_SLEEPS)


def _none(_: Delivery) -> None:
    """Return None, which removes the delivery when the store applies this function as a change."""


def _digest(
    message: Message, deliveries: Sequence[Delivery], copy: MessageId
) -> Any:  # Any: hashlib has no public type
    """Return a hash object of the message and its deliveries as the copy must have them, without the body."""
    known = structs.replace(message, envelope=structs.replace(message.envelope, id=copy))
    ordered = sorted(deliveries, key=lambda each: (each.queue, each.recipient))
    states = [(each.queue, structs.replace(each, message_id=copy)) for each in ordered]
    return hashlib.sha256(msgspec.json.encode((known, states)))
