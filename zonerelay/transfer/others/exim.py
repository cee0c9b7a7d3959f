"""Reads the spool of Exim 4: the envelope and the header in `input/ID-H`, and the body in `ID-D`.

The source is the spool directory. Recipients in the tree of non-recipients and in the journal (`ID-J`, newer
than the -H file) are finished. Exim keeps due times in a database of hosts, not with a message, so mail that
is not frozen is due immediately; frozen mail is held. Attempts and the last reply are read from its log of
the message (`msglog/ID`), whose times are taken as local time. The import is refused while an Exim process
runs.
"""

import contextlib
import fcntl
import io
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import structs

from zonerelay.model.envelope import Notify, Origin, Ret
from zonerelay.model.reply import Attempt
from zonerelay.transfer.files import Source, TransferError
from zonerelay.transfer.others.foreign import ForeignMessage, OpenRecipient, attempt_of, source_of

_PIECE = 256 * 1024
_MAX_HEADER_FILE = 16 * 1024 * 1024
_RECIPIENT = re.compile(r"(?P<front>.*)#(?P<kind>\d+)")
_DEFERRED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S*(?: [+-]\d{4})? (\S+@\S+) .*?defer \(-?\d+\)(.*)")
_RET = {"1": Ret.FULL, "2": Ret.HDRS}
_PROGRAMS = (b"exim", b"exim4")


class HeaderFile(msgspec.Struct):
    """The content of a -H file of Exim. `header` has LF line ends and no empty line after it."""

    sender: str = ""
    created: float = 0.0
    options: dict[str, str] = msgspec.field(default_factory=dict)
    finished: set[str] = msgspec.field(default_factory=set)
    recipients: list[OpenRecipient] = msgspec.field(default_factory=list)
    header: bytes = b""


def parse_head(raw: bytes) -> HeaderFile:
    """Parse a -H file of Exim. Raise ValueError with a message if it is not valid."""
    file = io.BytesIO(raw)

    def next_line() -> str:
        line = file.readline()
        if not line.endswith(b"\n"):
            raise ValueError("it is truncated")
        return line[:-1].decode("utf-8", "surrogateescape")

    head = HeaderFile()
    next_line()  # the name of the file itself
    next_line()  # the user who submitted the message
    sender = next_line()
    if not (sender.startswith("<") and sender.endswith(">")):
        raise ValueError("its third line is not a sender")
    head.sender = sender[1:-1]
    head.created = float(next_line().split(" ")[0])
    line = next_line()
    while line.startswith("-"):
        name, _, value = line.lstrip("-").partition(" ")
        head.options[name] = value
        line = next_line()
    head.finished = set(_tree(line, next_line))
    for _ in range(int(next_line())):
        head.recipients.append(_recipient(next_line()))
    if next_line():
        raise ValueError("it has more recipients than its count")
    head.header = _header(file.read())
    return head


def _tree(line: str, next_line: Callable[[], str]) -> Iterator[str]:
    """Parse a binary tree of addresses, and yield them, the root first. Each line shows whether the node has
    a left and a right branch.
    """
    if line == "XX":
        return
    branches = 1
    while True:
        marks, _, address = line.partition(" ")
        if len(marks) != 2 or set(marks) - set("YN"):
            raise ValueError("its tree of finished recipients is invalid")
        branches += marks.count("Y") - 1
        yield _name(address)
        if not branches:
            return
        line = next_line()


def _recipient(line: str) -> OpenRecipient:
    """Parse a recipient line: `ADDRESS`, optionally followed by other values, which are parsed from the end
    because an address may contain blanks: `ADDRESS ORCPT LENGTH,FLAGS ERRORS-TO LENGTH,PARENT#3`, or `#1`
    without the DSN options.
    """
    match = _RECIPIENT.fullmatch(line)
    if match is None:
        return OpenRecipient(address=line)
    front, kind = match["front"], int(match["kind"])
    front = _without_text(front)[0]
    if not kind & 2:
        return OpenRecipient(address=front)
    address, orcpt, flags = _without_text(front)
    # Exim's flags begin with the second bit, in the order of ours.
    return OpenRecipient(address=address, notify=Notify(flags >> 1 & 15), orcpt=orcpt)


def _without_text(front: str) -> tuple[str, str, int]:
    """Split the text that ends with `TEXT LENGTH,NUMBER` into the part before it, the text and the number."""
    front, _, numbers = front.rpartition(" ")
    length, _, number = numbers.partition(",")
    size = int(length)
    return front[: len(front) - size - 1], front[len(front) - size :], int(number)


def _header(raw: bytes) -> bytes:
    """Parse header fields, each of which is `LENGTH` in at least three digits, a flag, a blank and the text.
    Fields with the flag `*` were removed.
    """
    kept = []
    at = 0
    while at < len(raw):
        match = re.compile(rb"(\d{3,})(.) ").match(raw, at)
        if match is None:
            raise ValueError("its header is invalid")
        end = match.end() + int(match[1])
        if match[2] != b"*":
            kept.append(raw[match.end() : end])
        at = end
    if at != len(raw):
        raise ValueError("its header is truncated")
    return b"".join(kept)


def _name(address: str) -> str:
    """Return an address as Exim compares it: the domain in lower case, without a leading mark."""
    local, at, domain = address.lstrip(":\\").rpartition("@")
    return f"{local}{at}{domain.lower()}"


def parse_log(text: str) -> dict[str, list[tuple[float, str]]]:
    """Parse the log of a message, and return the deferrals of each recipient: Unix time and reason."""
    found: dict[str, list[tuple[float, str]]] = {}
    for line in text.splitlines():
        if (match := _DEFERRED.fullmatch(line)) is not None:
            when = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S"))
            found.setdefault(_name(match[2]), []).append((when, match[3].partition(": ")[2]))
    return found


@contextlib.asynccontextmanager
async def reading_exim(place: str, now: float) -> AsyncIterator[Source]:
    """Open the queue of a stopped Exim. Raise TransferError if it runs, and OSError if the queue cannot be
    read.
    """
    spool = Path(place)
    if not (spool / "input").is_dir():
        raise TransferError(
            f"{spool} has no subdirectory input; specify Exim's spool, such as /var/spool/exim4"
        )
    for process in _processes():
        raise TransferError(f"Exim is running as process {process}; stop it first")
    heads = sorted((spool / "input").rglob("*-H"), key=lambda path: path.name)
    octets = sum(each.stat().st_size for each in (spool / "input").rglob("*-[HD]"))

    async def read(path: Path) -> ForeignMessage:
        return _message(_identity(path), path, spool)

    yield source_of(heads, read, name=_identity, octets=octets, now=now)


def _identity(path: Path) -> str:
    return path.name.removesuffix("-H")


def _processes() -> Iterator[str]:
    """Yield the ids of running Exim processes, recognized by the program name followed by an option."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            for word, option in pairwise(words):
                if word.rpartition(b"/")[2] in _PROGRAMS and re.match(rb"-[A-Za-z]", option):
                    yield path.parts[2]


def _message(identity: str, path: Path, spool: Path) -> ForeignMessage:
    """Read a message from Exim's spool. Raise ValueError if it is not valid, and OSError if it cannot be
    read.
    """
    with path.open("rb") as file:
        head = parse_head(file.read(_MAX_HEADER_FILE))
    journal = path.with_name(f"{identity}-J")
    if journal.exists():
        content = journal.read_bytes().decode("utf-8", "surrogateescape")
        head.finished |= {_name(line) for line in content.splitlines()}
    logs = spool / "msglog" / path.parent.relative_to(spool / "input") / identity
    deferrals = parse_log(logs.read_text("utf-8", "surrogateescape")) if logs.exists() else {}
    data = path.with_name(f"{identity}-D")
    if not data.exists():
        raise ValueError("its -D file is missing")
    options = head.options

    async def body() -> AsyncIterator[bytes]:
        yield head.header + b"\n"
        with data.open("rb") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError("Exim is delivering it") from None
            if file.readline() != f"{identity}-D\n".encode("ascii"):
                raise ValueError("its -D file belongs to another message")
            while piece := file.read(_PIECE):
                yield piece

    return ForeignMessage(
        key=f"exim {identity}",
        sender=head.sender,
        recipients=[
            _deferred(each, deferrals.get(_name(each.address), []))
            for each in head.recipients
            if _name(each.address) not in head.finished
        ],
        created=head.created,
        body=body,
        weight=len(head.header),
        held="frozen" in options,
        ret=_RET.get(options.get("dsn_ret", ""), Ret.UNSET),
        envid=options.get("dsn_envid", ""),
        origin=Origin(
            client_address=options.get("host_address", "").partition("]")[0].lstrip("["),
            helo=options.get("helo_name", ""),
            protocol=options.get("received_protocol", "ESMTP").upper(),
            user=options.get("auth_id", ""),
        ),
    )


def _deferred(recipient: OpenRecipient, deferrals: list[tuple[float, str]]) -> OpenRecipient:
    if not deferrals:
        return recipient
    at, reason = deferrals[-1]
    last: Attempt | None = attempt_of(reason or "deferred", at)
    return structs.replace(recipient, attempts=len(deferrals), last=last)
