"""Checks a disk queue: every message with its body, every state, and the files against each other.

It writes and locks nothing, so it works beside a running relay, and on a file system mounted read-only.
Files come and go meanwhile: what is missing is told only when its message is still there after the look, and
a state without a message only when it is older than a relay needs for a batch. Memory holds the names.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zonerelay.config.settings import SpoolSettings
from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageId
from zonerelay.store.check import Contents, Examination, Fault
from zonerelay.store.common.keeper.ballast import FILE_NAME as BALLAST_NAME
from zonerelay.store.contract import StoreCorruptError, StoreError
from zonerelay.store.disk import files
from zonerelay.store.disk import format as disk_format
from zonerelay.store.disk.batch import INTENT_SUFFIX, LAST_SUFFIX, ids_of_intent
from zonerelay.store.disk.directories import LOCK_NAME
from zonerelay.store.disk.format import StoredMessage
from zonerelay.store.spool_paths import disk_directories

BEING_WRITTEN = 60.0
"""Seconds: a state is written before its message, and goes after it."""
_OWN_NAMES = (LOCK_NAME, BALLAST_NAME)
_READ_CHUNKS = 16


class Places(NamedTuple):
    """The directories of messages, of states and of work in progress."""

    env: Path
    meta: Path
    scratch: Path


@dataclass(slots=True)
class Names:
    """What the directories hold. `pending` are messages of a batch that was begun, which a start ends;
    `bad_intents` says in words of each intent why it cannot be read.
    """

    messages: dict[MessageId, int]
    """With the size of the `.env` file."""
    states: set[MessageId]
    pending: set[str]
    bad_intents: dict[Path, str]
    foreign: list[Path]
    keys: list[str]


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """The files of one message. `deliveries` is None when there is no `.meta`, or one that cannot be read.
    The faults say in words what is wrong, "" for nothing. Without an `.env` there is no `stored`.
    """

    id: MessageId
    stored: StoredMessage | None
    env_fault: str
    deliveries: list[Delivery] | None
    meta_fault: str
    octets: int


def check(spool: SpoolSettings, examination: Examination) -> Contents:
    """Blocks. Raises OSError when a directory cannot be read."""
    places = Places(*disk_directories(spool))
    names = list_names(places)
    add = examination.findings.add
    for path in names.foreign:
        add(Fault.STRAY_FILE, str(path), "not a file of this queue")
    for path, why in names.bad_intents.items():
        add(Fault.UNREADABLE, str(path), why)
    _check_locks(places, examination)
    messages = deliveries = octets = done = 0
    total = sum(names.messages.values())
    for message_id in sorted(names.messages.keys() | names.states):
        found = read_found(places, message_id)
        if found is not None:
            counted = _judge(places, found, names, examination)
            messages += counted is not None
            deliveries += counted or 0
            octets += found.octets
        done += names.messages.get(message_id, 0)
        examination.tell(done, total)
    return Contents(messages, deliveries, octets)


def list_names(places: Places) -> Names:
    """Raises OSError."""
    found = Names({}, set(), set(), {}, [], [])
    for place in dict.fromkeys((places.env, places.meta)):
        with os.scandir(place) as entries:
            for entry in entries:
                parsed = disk_format.parse_name(entry.name)
                if parsed is not None and entry.is_file(follow_symlinks=False):
                    _note(found, entry, *parsed)
                elif entry.name.endswith(INTENT_SUFFIX):
                    _note_intent(found, place / entry.name)
                elif disk_format.parse_key_name(entry.name):
                    found.keys.append(entry.name)
                elif not entry.is_dir() and not entry.name.endswith((LAST_SUFFIX, *_OWN_NAMES)):
                    found.foreign.append(place / entry.name)
    return found


def _note(found: Names, entry: os.DirEntry[str], message_id: MessageId, kind: str) -> None:
    if kind == "meta":
        found.states.add(message_id)
        return
    try:
        found.messages[message_id] = entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return  # it was delivered meanwhile


def _note_intent(found: Names, path: Path) -> None:
    try:
        found.pending |= ids_of_intent(path)
    except FileNotFoundError:
        return
    except (StoreCorruptError, OSError) as error:
        found.bad_intents[path] = str(error)


def read_found(places: Places, message_id: MessageId) -> FoundMessage | None:
    """None when both files are gone."""
    stored, env_fault, octets = None, "", 0
    path = places.env / files.env_name(message_id)
    there = True
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        there = False
    except OSError as error:
        env_fault = f"{path.name} cannot be read: {error.strerror}"
    else:
        try:
            octets = os.fstat(descriptor).st_size
            stored = files.read_tail(descriptor, message_id)
            for first in range(0, stored.message.chunks, _READ_CHUNKS):
                files.read_chunks(descriptor, stored, first, _READ_CHUNKS)
        except (StoreError, OSError) as error:
            env_fault = str(error)
        finally:
            os.close(descriptor)
    deliveries, meta_fault = None, ""
    try:
        raw = (places.meta / files.meta_name(message_id)).read_bytes()
        octets += len(raw)
        deliveries = disk_format.decode_meta(message_id, raw)
    except FileNotFoundError:
        if not there or not path.exists():
            return None
    except (StoreCorruptError, OSError) as error:
        meta_fault = str(error)
    return FoundMessage(message_id, stored, env_fault, deliveries, meta_fault, octets)


def is_alone(places: Places, found: FoundMessage, names: Names) -> bool:
    """Is it the state of a message that is not there, and not about to be?"""
    if found.stored is not None or found.env_fault or found.id in names.pending:
        return False
    try:
        age = time.time() - (places.meta / files.meta_name(found.id)).stat().st_mtime
    except FileNotFoundError:
        return False
    return age > BEING_WRITTEN and not (places.env / files.env_name(found.id)).exists()


def _judge(places: Places, found: FoundMessage, names: Names, examination: Examination) -> int | None:
    """The deliveries of a message, None when there is no message."""
    add = examination.findings.add
    env, meta = (
        str(places.env / files.env_name(found.id)),
        str(places.meta / files.meta_name(found.id)),
    )
    if found.meta_fault:
        add(Fault.UNREADABLE, meta, found.meta_fault, found.id)
    if found.env_fault:
        add(Fault.UNREADABLE, env, found.env_fault, found.id)
    elif found.stored is None:
        if is_alone(places, found, names):
            text = "a state without a message, which was finished or never accepted; a start removes it"
            add(Fault.STRAY_FILE, meta, text, found.id)
        return None
    elif found.deliveries is None and not found.meta_fault and found.id not in names.pending:
        add(Fault.MESSAGE_ALONE, env, "it has no state; a start tries every recipient again", found.id)
    elif found.deliveries is not None and not found.deliveries:
        add(Fault.MESSAGE_ALONE, env, "no delivery belongs to it", found.id)
    if found.stored is not None and found.deliveries is not None:
        known = {each.address for each in found.stored.message.envelope.recipients}
        for each in found.deliveries:
            if each.recipient not in known:
                add(Fault.BAD_RECORD, meta, "a delivery to an address that the message has not", found.id)
    return len(found.deliveries or ())


def _check_locks(places: Places, examination: Examination) -> None:
    marks: dict[bytes, Path] = {}
    for place in dict.fromkeys(places):
        path = place / LOCK_NAME
        try:
            mark = path.read_bytes()
        except FileNotFoundError:
            continue
        if mark:
            marks.setdefault(mark, path)
    if len(marks) > 1:
        first, *others = marks.values()
        for path in others:
            text = f"it belongs to another queue than {first}; a start refuses both"
            examination.findings.add(Fault.BAD_RECORD, str(path), text)
