"""Reads the queue of Postfix with its own tools, `postqueue -j` for the reasons of deferrals and `postcat`
for messages.

The source is the directory of main.cf. The import is refused while Postfix's master runs, and holds the lock
of the master, so that Postfix cannot start during the import. Postfix does not store the number of attempts:
a recipient with a reason is counted as attempted once. Mail in maildrop has not passed Postfix's cleanup; it
is reported and not imported.
"""

import asyncio
import calendar
import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
from msgspec import structs

from zonerelay.model.envelope import Notify, Origin, Ret
from zonerelay.transfer.files import Source, TransferError
from zonerelay.transfer.others import foreign

QUEUES = ("maildrop", "incoming", "active", "deferred", "hold")
_PIECE = 256 * 1024
_TOGETHER = 16
"""Processes of postcat at a time."""
_RET = {"1": Ret.FULL, "2": Ret.HDRS}


class _DeferredRecipient(msgspec.Struct, frozen=True):
    """A deferred recipient in the output of `postqueue -j`."""

    address: str
    delay_reason: str = ""


class _QueueListing(msgspec.Struct, frozen=True):
    """One message in the output of `postqueue -j`."""

    queue_id: str
    recipients: tuple[_DeferredRecipient, ...] = ()


class _QueueFile(msgspec.Struct, frozen=True):
    """A queue file of Postfix, which contains one message."""

    queue: str
    path: Path
    size: int
    due: float
    is_whole: bool
    """Cleanup makes a queue file executable when all of it is on disk."""


class Records(msgspec.Struct):
    """The parsed records of a Postfix queue file."""

    sender: str = ""
    created: float = 0.0
    attributes: dict[str, str] = msgspec.field(default_factory=dict)
    recipients: list[foreign.OpenRecipient] = msgspec.field(default_factory=list)


def parse_records(text: str) -> Records:
    """Parse the output of `postcat -e`, with times in UTC. Raise ValueError if there is no sender."""
    records = Records()
    wishes: dict[str, str] = {}
    known = False
    for line in text.splitlines():
        name, _, value = line.partition(": ")
        match name.rstrip(":"):
            case "message_arrival_time":
                records.created = float(calendar.timegm(time.strptime(value, "%a %b %d %H:%M:%S %Y")))
            case "sender":
                records.sender, known = value, True
            case "named_attribute":
                key, _, output = value.partition("=")
                (wishes if key in ("notify_flags", "dsn_orig_rcpt") else records.attributes)[key] = output
            case "recipient":
                records.recipients.append(
                    foreign.OpenRecipient(
                        address=value,
                        notify=Notify(int(wishes.get("notify_flags", 0)) & 15),
                        orcpt=foreign.orcpt_of(wishes.get("dsn_orig_rcpt", "")),
                    )
                )
                wishes = {}
            case "done_recipient":
                wishes = {}
    if not known:
        raise ValueError("its records contain no sender")
    return records


@contextlib.asynccontextmanager
async def reading_postfix(place: str, now: float) -> AsyncIterator[Source]:
    """Open the queue of a stopped Postfix. Raise TransferError if it runs, and OSError if the queue cannot be
    read.
    """
    tools = _Tools(Path(place))
    queue = Path((await tools.run("postconf", "-h", "queue_directory")).decode().strip())
    with _stopped(queue):
        files = list(_files(queue))
        reasons = _reasons(await tools.run("postqueue", "-j"))

        async def read(file: _QueueFile) -> foreign.ForeignMessage | None:
            return await _message(tools, file, reasons.get(file.path.name, {}))

        octets = sum(each.size for each in files)
        yield foreign.source_of(
            files, read, name=lambda file: file.path.name, octets=octets, now=now, together=_TOGETHER
        )


class _Tools:
    """Runs Postfix's programs with one configuration directory."""

    def __init__(self, config: Path) -> None:
        if not (config / "main.cf").is_file():
            raise TransferError(
                f"{config} has no main.cf; specify Postfix's configuration directory, such as /etc/postfix"
            )
        self._config = str(config)
        self._path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin"))
        self._environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}

    async def begin(self, program: str, *words: str) -> asyncio.subprocess.Process:
        found = shutil.which(program, path=self._path)
        if found is None:
            raise TransferError(f"{program} was not found; reading the queue requires Postfix's own tools")
        return await asyncio.create_subprocess_exec(
            found,
            "-c",
            self._config,
            *words,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
        )

    async def run(self, program: str, *words: str) -> bytes:
        """Run a Postfix program and return its output. Raise TransferError if it fails."""
        process = await self.begin(program, *words)
        output, complaint = await process.communicate()
        if process.returncode:
            raise TransferError(f"{program} failed: {complaint.decode('utf-8', 'replace').strip()}")
        return output


@contextlib.contextmanager
def _stopped(queue: Path) -> Iterator[None]:
    """Hold the lock of Postfix's master process, so that Postfix cannot be started."""
    path = queue / "pid" / "master.pid"
    if not queue.is_dir():
        raise TransferError(f"{queue} is not a Postfix queue")
    if not path.exists():
        yield  # Postfix has never run here
        return
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process = file.read(64).decode("ascii", "replace").strip()
            raise TransferError(f"Postfix is running as process {process}; stop it first") from None
        yield


def _files(queue: Path) -> Iterator[_QueueFile]:
    """Yield the queue files, oldest first if their times are known."""
    found = []
    for name in QUEUES:
        for path in (queue / name).rglob("*"):
            if path.is_file():
                status = path.stat()
                # The file's modification time is that of the next attempt.
                due = status.st_mtime if name == "deferred" else 0.0
                is_whole = bool(status.st_mode & 0o100)
                found.append((status.st_ctime, _QueueFile(name, path, status.st_size, due, is_whole)))
    return (file for _, file in sorted(found, key=lambda each: each[0]))


def _reasons(lines: bytes) -> dict[str, dict[str, str]]:
    """Return the reason for the deferral of each recipient, by message."""
    listed = [msgspec.json.decode(line, type=_QueueListing) for line in lines.splitlines()]
    return {
        each.queue_id: {one.address: one.delay_reason for one in each.recipients if one.delay_reason}
        for each in listed
    }


async def _message(tools: _Tools, file: _QueueFile, reasons: dict[str, str]) -> foreign.ForeignMessage | None:
    """Read a message from Postfix's queue. Raise ValueError if it is not valid."""
    if file.queue == "maildrop":
        raise ValueError("it is in maildrop and has not been through cleanup; start Postfix briefly")
    if not file.is_whole:
        return None  # its client was never notified that the message was accepted
    try:
        text = await tools.run("postcat", "-e", str(file.path))
    except TransferError as error:
        raise ValueError(str(error)) from error
    records = parse_records(text.decode("utf-8", "surrogateescape"))
    attributes = records.attributes

    async def body() -> AsyncIterator[bytes]:
        process = await tools.begin("postcat", "-bh", str(file.path))
        assert process.stdout is not None
        assert process.stderr is not None
        while piece := await process.stdout.read(_PIECE):
            yield piece
        complaint = await process.stderr.read(_PIECE)
        if await process.wait():
            raise ValueError(f"postcat: {complaint.decode('utf-8', 'replace').strip()}")

    return foreign.ForeignMessage(
        # Postfix reuses short ids, so the time is part of the name.
        key=f"postfix {file.path.name} {records.created:.0f}",
        sender=records.sender,
        recipients=[_deferred(each, file, reasons.get(each.address, "")) for each in records.recipients],
        created=records.created,
        body=body,
        held=file.queue == "hold",
        eight_bit=attributes.get("encoding") == "8bit",
        ret=_RET.get(attributes.get("ret_flags", ""), Ret.UNSET),
        envid=foreign.xtext(attributes.get("envelope_id", "")),
        origin=Origin(
            client_address=attributes.get("client_address", ""),
            helo=attributes.get("helo_name", ""),
            protocol=attributes.get("protocol_name", "ESMTP"),
            user=attributes.get("sasl_username", ""),
        ),
    )


def _deferred(recipient: foreign.OpenRecipient, file: _QueueFile, reason: str) -> foreign.OpenRecipient:
    if not reason:
        return recipient
    last = foreign.attempt_of(reason, file.path.stat().st_ctime)
    return structs.replace(recipient, attempts=1, due=file.due, last=last)
