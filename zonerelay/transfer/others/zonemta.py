"""Reads the LevelDB queue of ZoneMTA (2016), whose key scheme is the model of the relay's own.

The source is the database's directory. A recipient that is not finished has a key `ref ID ZONE RECIPIENT`
with its deferral. `message ID *` has the envelope and the header, and the chunks of `message ID` have the
body. The zones of ZoneMTA are not imported: the routes of this relay choose zones.

Opening a LevelDB database writes to it, so a snapshot next to the source is opened: tables are hard links,
the other files are copies. The lock of the source is held, so the import is refused while ZoneMTA runs, and
ZoneMTA cannot start during the import. Its other engine, a fork of Basho's LevelDB, has tables in
subdirectories and is refused with an error.
"""

import contextlib
import fcntl
import os
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator
from itertools import groupby
from pathlib import Path

import msgspec

from zonerelay.model.envelope import Origin
from zonerelay.store.contract import StoreError
from zonerelay.store.leveldb.engine import plyvel
from zonerelay.store.leveldb.offline import take_snapshot
from zonerelay.transfer.files import Source, TransferError
from zonerelay.transfer.others.foreign import ForeignMessage, OpenRecipient, attempt_of, source_of

_FLOCK = "hhqqi0q"  # struct flock of fcntl(2), 64 bits


class _Deferral(msgspec.Struct, frozen=True):
    """A deferral recorded by ZoneMTA. Times are in milliseconds."""

    count: int = 0
    last: float = 0
    next: float = 0
    response: str = ""


class _Reference(msgspec.Struct, frozen=True):
    """The entry of a delivery in ZoneMTA's database, which refers to its message."""

    recipient: str
    deferral: _Deferral | None = msgspec.field(default=None, name="_deferred")


class _HeaderField(msgspec.Struct, frozen=True):
    """A header field in ZoneMTA's database, with its bytes as ISO 8859-1 characters."""

    line: str


class _StoredMail(msgspec.Struct, frozen=True):
    """The entry of a message in ZoneMTA's database. `time` is in milliseconds. `sender` is false for the null
    sender.
    """

    sender: str | bool = msgspec.field(default="", name="from")
    headers: tuple[_HeaderField, ...] = ()
    time: float = 0
    origin: str = ""
    transhost: str | bool = ""
    transtype: str = "ESMTP"
    user: str | bool = ""


class _DeliveryValue(msgspec.Struct, frozen=True):
    """The value of a delivery's entry in ZoneMTA's database."""

    created: float = 0


@contextlib.asynccontextmanager
async def reading_zonemta(place: str, now: float) -> AsyncIterator[Source]:
    """Open the queue of a stopped ZoneMTA. Raise TransferError if it runs, and OSError if the queue cannot be
    read.
    """
    path = Path(place)
    if any(path.glob("sst_*")):
        raise TransferError(
            f"{path} is a database of Basho's fork of LevelDB (leveldown-basho-andris), which only that "
            "fork can read; let ZoneMTA send the mail in it"
        )
    if not (path / "CURRENT").is_file():
        raise TransferError(f"{path} is not a LevelDB database; specify the directory of ZoneMTA's queue.db")
    with _locked(path), _snapshot(path) as copy:
        try:
            database = plyvel.DB(str(copy), create_if_missing=False, paranoid_checks=True)
        except plyvel.Error as error:
            raise TransferError(f"{path}: {error}") from error
        try:
            octets = sum(each.stat().st_size for each in copy.iterdir())

            async def read(identity: bytes) -> ForeignMessage:
                return _message(database, identity)

            yield source_of(_ids(database), read, name=bytes.decode, octets=octets, now=now)
        finally:
            database.close()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = path / "LOCK"
    if not lock.exists():
        yield
        return
    with lock.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            process = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))[4]
            raise TransferError(f"ZoneMTA is running as process {process}; stop it first") from None
        yield


@contextlib.contextmanager
def _snapshot(path: Path) -> Iterator[Path]:
    beside = path.resolve().parent
    with tempfile.TemporaryDirectory(
        prefix=".zonerelay-", dir=beside if os.access(beside, os.W_OK) else None
    ) as directory:
        copy = Path(directory) / "copy"
        try:
            take_snapshot(path, copy)
        except StoreError as error:
            raise TransferError(f"{path}: {error}") from error
        yield copy


def _rows(database: plyvel.DB, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
    with database.raw_iterator(verify_checksums=True, fill_cache=False) as rows:
        rows.seek(start)
        while rows.valid() and rows.key() < stop:
            yield rows.item()
            rows.next()


def _ids(database: plyvel.DB) -> list[bytes]:
    """Return the ids of the messages that have open deliveries."""
    keys = (key.split(b" ") for key, _ in _rows(database, b"ref ", b"ref!"))
    return [identity for identity, _ in groupby(parts[1] for parts in keys if len(parts) == 4)]


def _message(database: plyvel.DB, identity: bytes) -> ForeignMessage:
    """Read a message from ZoneMTA's database. Raise ValueError if it is not valid, or if the database
    fails.
    """
    name = b"message " + identity
    try:
        mark, meta = database.get(name + b" #"), database.get(name + b" *")
        if mark is None or meta is None:
            raise ValueError("its message is missing")
        mail = msgspec.json.decode(meta, type=_StoredMail, strict=False)
        created = msgspec.json.decode(mark, type=_DeliveryValue).created
        references = [
            msgspec.json.decode(raw, type=_Reference, strict=False)
            for _, raw in _rows(database, b"ref %b " % identity, b"ref %b!" % identity)
        ]
    except plyvel.Error as error:
        raise ValueError(str(error)) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"its records were not written by ZoneMTA: {error}") from error
    header = "".join(f"{each.line}\r\n" for each in mail.headers).encode("latin-1", "replace") + b"\r\n"

    async def body() -> AsyncIterator[bytes]:
        yield header
        for _, chunk in _rows(database, name + b" /", name + b" :"):
            yield chunk

    return ForeignMessage(
        key=f"zonemta {identity.decode()}",
        sender=_text(mail.sender),
        recipients=[_open(each) for each in references],
        created=(mail.time or created) / 1000,
        body=body,
        weight=len(header),
        origin=Origin(
            client_address=mail.origin,
            helo=_text(mail.transhost),
            protocol=mail.transtype,
            user=_text(mail.user),
        ),
    )


def _text(value: str | bool) -> str:
    """Return a string, or "" for false, which ZoneMTA stores in place of a missing string."""
    return value if isinstance(value, str) else ""


def _open(reference: _Reference) -> OpenRecipient:
    deferral = reference.deferral
    if deferral is None:
        return OpenRecipient(address=reference.recipient)
    return OpenRecipient(
        address=reference.recipient,
        attempts=deferral.count,
        due=deferral.next / 1000,
        last=attempt_of(deferral.response, deferral.last / 1000),
    )
