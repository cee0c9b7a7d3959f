"""Opening a LevelDB spool: threads, database, what the last run left."""

from __future__ import annotations

from typing import NamedTuple

from zonerelay.config.settings import SpoolSettings
from zonerelay.config.tables.spool import space_guard
from zonerelay.model.message_id import MessageId
from zonerelay.store.common.keeper.ballast import Ballast
from zonerelay.store.contract import StoreError
from zonerelay.store.leveldb import scan
from zonerelay.store.leveldb.engine import LevelDb, NoRoomToOpenError, View
from zonerelay.store.leveldb.in_flight import InFlight
from zonerelay.store.leveldb.keeper import SpoolKeeper
from zonerelay.store.leveldb.reader import SpoolReader
from zonerelay.store.leveldb.store import LevelDbStore
from zonerelay.store.surroundings import Surroundings


class _Opened(NamedTuple):
    last_id: MessageId | None
    is_empty: bool
    view: View


async def open_leveldb(
    settings: SpoolSettings,
    around: Surroundings,
) -> LevelDbStore:
    """Raises StoreOpenError. Delivering can begin at once; counting and sweeping go on behind it."""
    reader = SpoolReader(LevelDb(settings.path, write_buffer=settings.write_buffer))
    guard = space_guard(settings)
    ballast = Ballast(settings.path, guard // 2)
    try:
        opened = await reader.read(_open, ballast)
    except BaseException:
        reader.db.close()
        reader.stop()
        raise
    keeper = SpoolKeeper(
        reader,
        ballast=ballast,
        min_free_space=guard,
        around=around,
    )
    store = LevelDbStore(keeper, InFlight(), last_id=opened.last_id, empty=opened.is_empty)
    keeper.start(opened.view, opened.last_id)
    return store


def _open(db: LevelDb, ballast: Ballast) -> _Opened:
    try:
        return _open_once(db)
    except NoRoomToOpenError:
        if not ballast.drop():
            raise
    return _open_once(db)


def _open_once(db: LevelDb) -> _Opened:
    db.open()
    try:
        scan.drop_hints(db)
        return _Opened(scan.last_message_id(db), not scan.zones(db), db.snapshot())
    except StoreError as error:
        db.close()
        raise db.open_error(error) from error
