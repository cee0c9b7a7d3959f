"""Submits mail that sendmail(1) left in the drop directory while the relay was down.

The directory contains `tmp` and `new`. Every user of the machine may write into both and list neither. A file
in `new` is submitted by the rules of the listener that sendmail(1) would have used, so that the same limits
and guarantees apply, and then removed. After a crash between these two steps, the file is submitted again
with the same idempotency key, which consists of its name and its owner. A store that keeps such keys stores
it once.

The file's owner is the sender. A file is opened without following symbolic links, and is accepted only if it
is a regular file with a single link. In one pass, at most `SHARE` files of one owner are tried, for at most
`BUDGET` seconds, so that many files, or files that cannot be submitted, delay only the mail of their owner. A
file that the listener rejects permanently, or that is not a message of sendmail(1), stays in the directory
under another name. If a file cannot be submitted now, it is tried again after `FIRST_PAUSE` seconds, and each
further pause is twice as long. The log reports each such file once, and `zonerelay status` as long as it
exists.
"""

import asyncio
import email.utils
import os
import pwd
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from time import monotonic, thread_time

import msgspec

from zonerelay import durable
from zonerelay.inbound.cleanup.submit import Acceptance, Pieces, Rejection, SubmittedEnvelope
from zonerelay.inbound.refusal import Reason
from zonerelay.model.envelope import recipient_key
from zonerelay.process.tasks import Tasks
from zonerelay.process.threads import DROP
from zonerelay.smtp.server import params
from zonerelay.smtp.server.commands import parse_command
from zonerelay.smtp.server.paths import CommandError
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import printable

INTERVAL = 10.0
IDLE_FOR_CPU = 20.0
"""The pause after a pass, as a multiple of its CPU time: a million file names cost 5 % of a core."""
SHARE = 100
"""Files of one owner in one pass."""
BUDGET = 5.0
"""Seconds for one owner in one pass, after which no further file of that owner is tried in it."""
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 600.0
MAX_WAITING = 10_000
"""Files whose pauses are remembered. Others are tried in each pass, within the share of their owner."""
HAND_OVER_TIMEOUT = 60.0
"""Seconds in which a file must be stored or refused."""
REFUSED = ".refused"
LONGEST_NAME = 200
"""Bytes of a file's name that are kept when it is renamed."""
_KEYED = re.compile(rb"(?im)^Idempotency-Key[ \t]*:")


class NoListenerError(Exception):
    """No [[listener]] accepts mail from sendmail(1) now."""


class _WaitingFile(msgspec.Struct):
    """A file in the drop directory that could not be submitted, or could not be removed after submission
    (`is_done`).
    """

    again: float
    pause: float
    why: str
    is_done: bool = False


class _ScanResult(msgspec.Struct):
    """The results of one scan of the drop directory. `refused` and `delayed` hold name, owner and reason,
    each file once. `waiting` has the files that are still to be tried, by name.
    """

    waiting: dict[str, _WaitingFile] = msgspec.field(default_factory=dict)
    refused: list[tuple[str, int, str]] = msgspec.field(default_factory=list)
    delayed: list[tuple[str, int, str]] = msgspec.field(default_factory=list)
    set_aside: int = 0
    is_whole: bool = True
    taken: Counter[int] = msgspec.field(default_factory=Counter)
    spent: dict[int, float] = msgspec.field(default_factory=lambda: defaultdict(float))


LocalSubmit = Callable[[SubmittedEnvelope, Pieces], Awaitable[Acceptance | Rejection]]
"""Submits mail of a program on this machine."""

Take = Callable[[SubmittedEnvelope, bytes], str]
"""`take(envelope, message)` blocks. It returns "" if the relay has accepted the message, or the reason of a
permanent refusal. It raises OSError for a temporary refusal, and NoListenerError if no mail is accepted now.
"""


@dataclass(eq=False, repr=False)
class DropDirectory:
    """Submits the files that sendmail(1) has left in the drop directory. Call `start` when the listeners
    accept, and `stop` before they close. `max_size` is the maximum size of a message in bytes.
    """

    directory: InitVar[Path]
    take: Take
    _: KW_ONLY
    max_size: int
    hostname: str
    events: Events

    def __post_init__(self, directory: Path) -> None:
        self._new = directory / "new"
        self._refused = 0
        self._problem = ""
        self._waiting: dict[str, _WaitingFile] = {}
        self._tasks = Tasks()

    def start(self) -> None:
        self._tasks.start(self._watch())

    async def stop(self) -> None:
        await self._tasks.cancel()

    def problems(self) -> tuple[str, ...]:
        found = [self._problem] if self._problem else []
        if waiting := next(iter(self._waiting.items()), None):
            name, first = waiting
            found.append(
                f"{len(self._waiting)} messages of sendmail(1) cannot be accepted from {self._new}, "
                f"for example {_shown(name)}: {first.why}"
            )
        if self._refused:
            found.append(f"{self._refused} messages of sendmail(1) were rejected: {self._new}/*{REFUSED}")
        return tuple(found)

    async def _watch(self) -> None:
        seen = -1
        while True:
            pause = INTERVAL
            try:
                changed = _changed(self._new)  # not in a thread: most machines have no such directory
                if changed != seen:
                    found, cpu = await DROP.run(self._timed_pass)
                    pause = max(INTERVAL, IDLE_FOR_CPU * cpu)
                    seen = changed if found.is_whole else -1
                    for each in found.refused:
                        self.events.drop_refused(*each)
                    for each in found.delayed:
                        self.events.drop_delayed(*each)
            except Exception as error:  # noqa: BLE001 - the next pass tries the other files
                self.events.error("drop-directory", error)
            await asyncio.sleep(pause)

    def _timed_pass(self) -> tuple[_ScanResult, float]:
        began = thread_time()
        return self._pass(), thread_time() - began

    def _pass(self) -> _ScanResult:
        """Submit the files in the drop directory, new ones first. This function blocks."""
        found = _ScanResult()
        self._problem = self._not_ours()
        if self._problem:
            found.is_whole = False
            return found
        before = self._waiting
        due: list[str] = []
        try:
            for name in _names(self._new):
                if name.endswith(REFUSED):
                    found.set_aside += 1
                elif name not in before:
                    self._try(name, None, found)
                elif monotonic() < before[name].again:
                    found.waiting[name] = before[name]
                else:
                    due.append(name)
            for name in due:
                self._try(name, before[name], found)
        except NoListenerError as error:
            self._problem = f"{self._new}: {error}; retrying"
            found.waiting = before | found.waiting
            found.is_whole = False
        found.is_whole &= not found.waiting
        # Replaced at once: until then, `problems` shows what waited before this pass.
        self._waiting = found.waiting
        self._refused = found.set_aside + len(found.refused)
        return found

    def _try(self, name: str, before: _WaitingFile | None, found: _ScanResult) -> None:
        """Submit one file, unless its owner has exceeded its share of this scan. Raise NoListenerError if no
        listener accepts mail.
        """
        path = self._new / name
        try:
            facts = path.lstat()
        except FileNotFoundError:
            return
        owner, began = facts.st_uid, monotonic()
        if found.taken[owner] >= SHARE or found.spent[owner] >= BUDGET:
            found.is_whole = False
            if before is not None:
                found.waiting[name] = before
            return
        found.taken[owner] += 1
        waiting = before or _WaitingFile(0.0, FIRST_PAUSE / 2, "")
        try:
            if not waiting.is_done and (refusal := self._take(path, facts, waiting)):
                found.refused.append((_shown(name), owner, refusal))
            else:
                durable.unlink(path)  # or it would reappear after a power failure and be sent again
        except NoListenerError:
            raise
        except Exception as error:  # noqa: BLE001 - a bad file must not delay the others
            why = error.strerror or str(error) if isinstance(error, OSError) else ""
            waiting.why = why or f"unexpected {type(error).__name__}"
            waiting.pause = min(waiting.pause * 2, LONGEST_PAUSE)
            waiting.again = monotonic() + waiting.pause
            if before is None:
                found.delayed.append((_shown(name), owner, waiting.why))
            found.is_whole = False
            if len(found.waiting) < MAX_WAITING:
                found.waiting[name] = waiting
        finally:
            found.spent[owner] += monotonic() - began

    def _not_ours(self) -> str:
        """Return why the relay cannot remove files from the drop directory, or ""."""
        try:
            facts = self._new.stat()
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{self._new} cannot be read: {error.strerror}"
        if not stat.S_ISDIR(facts.st_mode):
            return f"{self._new} is not a directory; replace it by one that belongs to the relay's user"
        if os.geteuid() in (0, facts.st_uid):
            return ""
        return f"{self._new} belongs to user {facts.st_uid}; it must belong to the relay's user"

    def _take(self, path: Path, facts: os.stat_result, waiting: _WaitingFile) -> str:
        """Submit the file; if it is refused, rename it and return the reason. Raise an exception if it is
        temporary.
        """
        from zonerelay.sendmail import MAX_ENVELOPE  # noqa: PLC0415 - only with such mail

        most = self.max_size + MAX_ENVELOPE
        owner, content = _read(path, most) if stat.S_ISREG(facts.st_mode) else (facts.st_uid, None)
        if content is None:
            why = f"not a regular file with a single link, or larger than {most} bytes"
        else:
            try:
                envelope, message = _parsed(content)
            except (CommandError, ValueError) as error:
                why = str(error)
            else:
                own = self._received(owner) + self._key(path.name, owner, message)
                why = self.take(envelope, own + message)
                waiting.is_done = not why
        if why:
            _set_aside(path, facts)
        return why

    def _key(self, name: str, owner: int, message: bytes) -> bytes:
        """Return an Idempotency-Key field for the message (docs/send/idempotency.md), or nothing if it has a
        key of its own.
        """
        is_key = name.isascii() and name.isprintable() and " " not in name
        if not is_key or _KEYED.search(message.partition(b"\n\n")[0]):
            return b""
        return f"Idempotency-Key: sendmail-{owner}-{name[:200]}\n".encode()

    def _received(self, owner: int) -> bytes:
        """Return a Received field that names the owner of the file (RFC 5321 4.4)."""
        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = "no name"
        text = f"Received: by {self.hostname} (sendmail, user {owner}, {name});"
        return f"{text} {email.utils.formatdate()}\n".encode("ascii", "replace")


def take_by(local: Callable[[], LocalSubmit | None]) -> Take:
    """Return a function that submits a file through the listener that sendmail(1) would have used. Call this
    on the event loop.
    """
    loop = asyncio.get_running_loop()

    async def submit(envelope: SubmittedEnvelope, message: bytes) -> Acceptance | Rejection:
        if (submit_here := local()) is None:
            raise NoListenerError("no [[listener]] accepts mail without TLS and a login")
        return await submit_here(envelope, [message])

    def take(envelope: SubmittedEnvelope, message: bytes) -> str:
        submitted = submit(envelope, message.replace(b"\n", b"\r\n"))
        result = asyncio.run_coroutine_threadsafe(submitted, loop).result(HAND_OVER_TIMEOUT)
        if isinstance(result, Acceptance):
            return ""
        if result.reason in (Reason.SHUTDOWN, Reason.MEMORY):
            raise NoListenerError(str(result.reply))
        if result.reply.is_transient:
            raise OSError(str(result.reply))
        return str(result.reply)

    return take


def _parsed(content: bytes) -> tuple[SubmittedEnvelope, bytes]:
    """Parse a file that sendmail(1) has written, and return its envelope and its message. Raise ValueError,
    or CommandError if a command is invalid.
    """
    from zonerelay.sendmail import DROP_FORMAT, MAX_ENVELOPE  # noqa: PLC0415

    end = content.find(b"\n\n", 0, MAX_ENVELOPE)
    first, *lines = content[: max(end, 0)].split(b"\n")
    if first != DROP_FORMAT.encode() or end < 0:
        raise ValueError("not a file written by sendmail(1)")
    commands = [parse_command(line) for line in lines]
    if len(commands) < 2 or [verb for verb, _ in commands] != ["MAIL", *["RCPT"] * (len(commands) - 1)]:
        raise ValueError("a file of sendmail(1) must contain one MAIL and then at least one RCPT")
    (_, mail), *rcpts = commands
    sender = params.parse_mail(mail, offered=params.MAIL_PARAMETERS | params.DSN_MAIL_PARAMETERS)
    recipients = [
        params.parse_rcpt(rcpt, smtputf8=sender.smtputf8, offered=params.DSN_RCPT_PARAMETERS)
        for _, rcpt in rcpts
    ]
    people = {recipient_key(each.address): each for each in recipients}
    return SubmittedEnvelope(sender, tuple(people.values())), content[end + 2 :]


def _set_aside(path: Path, facts: os.stat_result) -> None:
    """Rename the file of a refused message to a name that no other file has. Raise OSError on failure."""
    target = path.with_name(f"{path.name}{REFUSED}")
    name = os.fsencode(path.name)
    if len(name) > LONGEST_NAME or os.path.lexists(target):
        target = path.with_name(f"{os.fsdecode(name[:LONGEST_NAME])}.{facts.st_ino}{REFUSED}")
    path.rename(target)


def _shown(name: str) -> str:
    """Return a printable form of a file name, which any user can choose and which may not be valid text."""
    return printable(os.fsencode(name).decode("utf-8", "replace"))


def _changed(directory: Path) -> int:
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return -1  # there is none: sendmail(1) drops nothing


def _names(directory: Path) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                yield entry.name
    except FileNotFoundError:
        return


def _read(path: Path, most: int) -> tuple[int, bytes | None]:
    """Return the owner and the content of a file, or None if the file is not acceptable. Raise OSError on
    failure.
    """
    # Without O_NONBLOCK, opening a FIFO would block the thread forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        is_sound = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1 and facts.st_size <= most
        return facts.st_uid, file.read(most + 1) if is_sound else None
