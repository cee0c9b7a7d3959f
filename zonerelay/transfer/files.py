"""The exchange format: a directory or an uncompressed tar with one `ID.eml` and one `ID.json` per message.

`ID.eml` is the body exactly as stored in the spool. `ID.json` is a `MessageDescription`: the message and its
open deliveries (docs/store/spool-format.md, "Exported mail").

Promises: nothing appears under the requested name before all of it is durable, and nothing existing is
replaced. A target that is abandoned removes what it has written. Input is checked as if a client had sent it,
because users edit files: addresses, ids and texts that other servers will read.

An export reads selected mail out of a store, message by message, without changing the store. Memory: ninety
bytes per message while the mail is selected, and eight afterwards; a hundred messages without their bodies,
and chunks of one body.
"""

from __future__ import annotations

import asyncio
import io
import re
import shutil
import tarfile
import tempfile
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, cast

import msgspec

from zonerelay import __version__, durable
from zonerelay.model.delivery import Delivery, QueueName, parse_queue, queue_of
from zonerelay.model.envelope import LENGTH, Message, MessageId
from zonerelay.queue.operator.filters import QueueFilter
from zonerelay.smtp.server.params import parse_envid, parse_orcpt
from zonerelay.smtp.server.paths import CommandError, forward_path, reverse_path
from zonerelay.store.contract import BodyFacts, MessageNotFoundError, QueueView, StoreError

FORMAT = 1
DESCRIPTION_SIZE = 4096
"""Bytes that the description or the records of a message take at most, as a rule."""
_PAGE = 500
_TOGETHER = 100
_NAME = re.compile(r"(?:.*/)?([0-9a-f]{16})\.(eml|json)")
_IN_MEMORY = 1024 * 1024
_PIECE = 256 * 1024
_QUEUE = re.compile(r"(?:webhook/)?[A-Za-z0-9._-]+(?:;[a-z]+)?")


# --- one message of a source with its open deliveries: the unit of every transfer

NO_QUEUE = queue_of("")
"""The queue of a delivery that the routes of this relay are to choose."""


class TransferError(Exception):
    """A source of messages or a target cannot be used; the text is for the operator."""


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message to be imported from a source, with its open deliveries. `key` identifies the message in its
    source permanently, so that a second import recognizes it.

    `body` starts from the first byte at each call. A message of another system (`is_ours` false) has no size,
    headers and properties yet: they are determined from the body, which may have any line ends.
    """

    key: str
    message: Message
    deliveries: tuple[Delivery, ...]
    body: Callable[[], AsyncIterator[bytes]]
    weight: int = 0
    """Octets that it has in memory."""
    is_ours: bool = True


class UnusableMessage(msgspec.Struct, frozen=True):
    """A message that cannot be imported and stays in its source."""

    name: str
    why: str


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Interface: a source from which messages are imported. Its two sizes are upper limits, for the check of
    free space and the progress bar.
    """

    messages: int
    octets: int
    read: Callable[[], AsyncIterator[StoredMessage | UnusableMessage]]


def facts_of(message: Message) -> BodyFacts:
    """Return the properties of a message's body, for storing the body elsewhere."""
    return cast("BodyFacts", {name: getattr(message, name) for name in BodyFacts.__annotations__})


# --- the format


class MessageDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON description of an exported message, in which queue names are strings. `format` is read first,
    so that a newer format is refused with a clear message. `zonerelay` is the release that wrote it.
    """

    format: int
    zonerelay: str = __version__
    message: Message
    deliveries: tuple[dict[str, object], ...]


class _ExchangeFormat(msgspec.Struct, frozen=True):
    """The first part of a message's description, which has the version of the exchange format."""

    format: int


def encode(message: Message, deliveries: Sequence[Delivery]) -> bytes:
    described = [msgspec.to_builtins(each) | {"queue": each.queue.text} for each in deliveries]
    description = MessageDescription(format=FORMAT, message=message, deliveries=tuple(described))
    return msgspec.json.format(msgspec.json.encode(description), indent=2) + b"\n"


def decode(name: str, raw: bytes) -> tuple[Message, tuple[Delivery, ...]]:
    """Decode the description of a message and its deliveries. Raise ValueError with a message if it is not
    valid.
    """
    try:
        version = msgspec.json.decode(raw, type=_ExchangeFormat).format
        if version != FORMAT:
            raise ValueError(
                f"has format {version}, but this release reads format {FORMAT}; use a newer release"
            )
        description = msgspec.json.decode(raw, type=MessageDescription)
        named = [each | {"queue": _queue(str(each.get("queue")))} for each in description.deliveries]
        deliveries = msgspec.convert(named, tuple[Delivery, ...])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"is not an exported zonerelay message: {error}") from error
    _check(name, description.message, deliveries)
    return description.message, deliveries


def _queue(text: str) -> QueueName:
    if not _QUEUE.fullmatch(text):
        raise ValueError(f"has a delivery in {text!r}, which is not a valid zone name")
    return parse_queue(text)


def _check(name: str, message: Message, deliveries: Sequence[Delivery]) -> None:
    envelope = message.envelope
    if envelope.id != name or any(each.message_id != name for each in deliveries):
        raise ValueError("contains an id that differs from its file name")
    if not deliveries:
        raise ValueError("has no deliveries")
    recipients = {each.address for each in envelope.recipients}
    for delivery in deliveries:
        if delivery.recipient not in recipients:
            raise ValueError(f"has a delivery to {delivery.recipient!r}, which is not in its envelope")
    try:
        if reverse_path(f"<{envelope.sender}>")[1] or any(forward_path(f"<{one}>")[1] for one in recipients):
            raise ValueError("contains an invalid address")
        if envelope.envid:
            parse_envid(envelope.envid)
        wishes = {each.orcpt for each in envelope.recipients} | {each.orcpt for each in deliveries}
        for orcpt in wishes - {""}:
            parse_orcpt(orcpt)
    except CommandError as error:
        raise ValueError(f"contains an invalid address: {error.reply.text}") from error
    if any(set("\r\n\0") & {*field, *value} for field, value in message.headers):
        raise ValueError("contains a header field of several lines")


# --- writing


Target = Callable[[StoredMessage], Awaitable[None]]
"""Writes a message to an export, completely or not at all. Raises OSError if it cannot be written, ValueError
if it cannot be represented in JSON, and any error of reading the body.
"""


async def _to_directory(directory: Path, stored: StoredMessage) -> None:
    description = encode(stored.message, stored.deliveries)
    path = directory / f"{stored.message.id}.eml"
    try:
        with path.open("xb") as file:
            async for piece in stored.body():
                file.write(piece)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    path.with_suffix(".json").write_bytes(description)


async def _to_tar(tar: tarfile.TarFile, stored: StoredMessage) -> None:
    def add(suffix: str, file: IO[bytes]) -> None:
        entry = tarfile.TarInfo(f"{stored.message.id}.{suffix}")
        entry.size, entry.mode = file.seek(0, io.SEEK_END), 0o600
        entry.mtime = int(stored.message.envelope.created)
        file.seek(0)
        tar.addfile(entry, file)
        tar.members = []  # type: ignore[attr-defined]  # it keeps a list of all that it has written

    description = encode(stored.message, stored.deliveries)
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as body:
        async for piece in stored.body():
            body.write(piece)
        add("eml", body)
    add("json", io.BytesIO(description))


def refuse_target(path: Path) -> None:
    """Raise TransferError if an export must not be written to this path."""
    if not path.parent.is_dir():
        raise TransferError(f"the directory {path.parent} does not exist")
    if path.is_dir() and path.suffix != ".tar":
        if any(path.iterdir()):
            raise TransferError(f"{path} is not empty; specify a new directory")
    elif path.exists():
        raise TransferError(f"{path} exists; specify another file, or remove it")


@contextmanager
def writing(path: Path) -> Iterator[Target]:
    """Create an export directory or tar, which gets its final name when the block ends without an exception.

    Raise TransferError if the target is refused, and OSError if it cannot be written.
    """
    refuse_target(path)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        if path.suffix == ".tar":
            made = draft / path.name
            with tarfile.open(made, mode="w", format=tarfile.PAX_FORMAT) as tar:
                yield partial(_to_tar, tar)
            durable.rename(made, path)
        else:
            yield partial(_to_directory, draft)
            durable.sync_tree(draft)
            durable.rename(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


# --- exporting a store


class ExportSelection(msgspec.Struct):
    """The messages that an export has selected, and their total size."""

    ids: array[int] = msgspec.field(default_factory=lambda: array("Q"))
    octets: int = 0


async def survey(store: QueueView, wanted: QueueFilter, now: float) -> ExportSelection:
    """Find the messages that match an export's filter, and their total size. Raise StoreError if the store
    cannot be read.
    """
    found = set[int]()
    for queue in (None, *(each for each in await store.queues() if not each.is_mail)):
        async for delivery in store.scan(queue, wanted=wanted.may_match):
            if wanted.matches(delivery, now) and wanted.matches_state(delivery.state(now)):
                found.add(int(delivery.message_id, 16))
    ids = sorted(found)
    meant = ExportSelection()
    for start in range(0, len(ids), _PAGE):
        page = ids[start : start + _PAGE]
        messages = await store.read_messages([_id(number) for number in page])
        for number in page:
            message = messages.get(_id(number))
            if not wanted.needs_message or wanted.matches_sender(message):
                meant.ids.append(number)
                meant.octets += DESCRIPTION_SIZE + (0 if message is None else message.size)
    return meant


def _id(number: int) -> MessageId:
    return MessageId(f"{number:0{LENGTH}x}")


async def export(
    store: QueueView,
    meant: ExportSelection,
    wanted: QueueFilter,
    now: float,
    target: Target,
    *,
    saw: Callable[[int, UnusableMessage | None], None],
    change: Callable[[Message, Delivery], Delivery] = lambda _, delivery: delivery,
) -> None:
    """Write the selected messages to a directory or tar. `saw` is called with the number of deliveries
    written of each message, or with the reason why it could not be written. `change` returns a delivery as it
    is to be written.

    Raise OSError if the target cannot be written.
    """
    for start in range(0, len(meant.ids), _TOGETHER):
        page = [_id(number) for number in meant.ids[start : start + _TOGETHER]]
        messages = await store.read_messages(page)
        asked = (store.deliveries_of(identity) for identity in page)
        for identity, found in zip(page, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            try:
                if isinstance(found, BaseException):
                    raise found
                deliveries = tuple(
                    each
                    for each in found
                    if wanted.matches(each, now) and wanted.matches_state(each.state(now))
                )
                if deliveries:
                    # The store omits unreadable messages from a list, and reports the reason when a single
                    # one is read.
                    message = messages.get(identity) or await store.read_message(identity)
                    await target(
                        StoredMessage(
                            key=message.id,
                            message=message,
                            deliveries=tuple(change(message, each) for each in deliveries),
                            body=partial(store.read_body, message.id),
                        )
                    )
                saw(len(deliveries), None)
            except MessageNotFoundError:
                saw(0, None)
            except (StoreError, ValueError) as error:
                saw(0, UnusableMessage(identity, str(error)))


# --- reading

_Open = Callable[[str], IO[bytes]]


@contextmanager
def reading(path: Path) -> Iterator[Source]:
    """Open an export directory or tar as a source of messages. Raise TransferError if it is not one, and
    OSError if it cannot be read.
    """
    if not path.exists():
        raise TransferError(f"{path} does not exist")
    if path.is_dir():
        sizes = {each.name: each.stat().st_size for each in path.iterdir() if each.is_file()}
        yield _source(sizes, lambda name: (path / name).open("rb"))
        return
    try:
        with tarfile.open(path, "r:") as tar:
            members = {each.name: each for each in tar.getmembers() if each.isreg()}

            def extract(name: str) -> IO[bytes]:
                file = tar.extractfile(members[name])
                assert file is not None, "a regular member"
                return file

            yield _source({name: each.size for name, each in members.items()}, extract)
    except tarfile.TarError as error:
        raise TransferError(f"{path} is not a tar file of exported mail: {error}") from error


def _source(sizes: dict[str, int], open_file: _Open) -> Source:
    found: dict[str, dict[str, str]] = {}
    for name in sizes:
        if (match := _NAME.fullmatch(name)) is not None:
            found.setdefault(match[1], {})[match[2]] = name
    bodies = [names["eml"] for names in found.values() if "eml" in names]

    async def read() -> AsyncIterator[StoredMessage | UnusableMessage]:
        for identity in sorted(found):
            yield _read(identity, found[identity], sizes, open_file)

    return Source(messages=len(found), octets=sum(sizes[name] for name in bodies), read=read)


def _read(
    identity: str, names: dict[str, str], sizes: dict[str, int], open_file: _Open
) -> StoredMessage | UnusableMessage:
    if "json" not in names or "eml" not in names:
        lacking = "json" if "eml" in names else "eml"
        return UnusableMessage(identity, f"{identity}.{lacking} does not exist")
    try:
        with open_file(names["json"]) as file:
            message, deliveries = decode(identity, file.read())
    except (ValueError, OSError) as error:
        return UnusableMessage(identity, f"{names['json']} {error}")
    if sizes[names["eml"]] != message.size:
        return UnusableMessage(
            identity,
            f"{names['eml']} has {sizes[names['eml']]} bytes, but its .json file records {message.size}",
        )

    async def body() -> AsyncIterator[bytes]:
        with open_file(names["eml"]) as file:
            while piece := file.read(_PIECE):
                yield piece

    key = f"zonerelay {identity} {message.envelope.created!r}"
    return StoredMessage(key=key, message=message, deliveries=deliveries, body=body)
