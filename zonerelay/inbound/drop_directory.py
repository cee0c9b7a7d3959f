"""Takes the mail that sendmail(1) has dropped while the relay was down.

The directory has `tmp` and `new`; every user of the machine may write into both and list neither. A file in
`new` is handed over to a listener of this relay, as sendmail(1) would have done it, so that the same limits,
rules and promises hold; then it is removed. After a crash between the two it is handed over again, with the
same idempotency key, which is its name and its owner: where the store keeps keys it is stored once.

Its owner is who has sent it: a file is opened without following a link, and is taken only when it is a
regular file with one name. Of one owner `SHARE` files are taken in one pass, so that a flood delays its own
mail only. What the listener refuses for good, and what is no message of sendmail(1), stays in the directory
under another name, and `zonerelay status` names it. Temporary trouble costs time.
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import pwd
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from zonerelay.config.settings import ListenerSettings
from zonerelay.process.tasks import Tasks
from zonerelay.process.threads import DROP
from zonerelay.telemetry.events.events import Events

INTERVAL = 10.0
SHARE = 100
"""Files of one owner in one pass."""
REFUSED = ".refused"
_KEYED = re.compile(rb"(?im)^Idempotency-Key[ \t]*:")

Submit = Callable[[str, Sequence[str], bytes, dict[str, str]], str]
"""`submit(sender, recipients, message, wishes)` blocks; returns "" when the relay has the message, and else
why it never will. Raises OSError when it may have it later.
"""


class DropDirectory:
    """One per relay. `start` once the listeners accept, `stop` before they close. `max_size` is of a message,
    in octets.
    """

    def __init__(
        self,
        directory: Path,
        submit: Submit,
        *,
        max_size: int,
        keeps_keys: bool,
        hostname: str,
        events: Events,
    ) -> None:
        self._new = directory / "new"
        self._submit = submit
        self._max_size = max_size
        self._keeps_keys = keeps_keys
        self._hostname = hostname
        self._events = events
        self._refused = 0
        self._problem = ""
        self._tasks = Tasks()

    def start(self) -> None:
        self._tasks.start(self._watch())

    async def stop(self) -> None:
        await self._tasks.cancel()

    def problems(self) -> tuple[str, ...]:
        refused = f"{self._refused} messages of sendmail were refused: {self._new}/*{REFUSED}"
        return (*([self._problem] if self._problem else []), *([refused] if self._refused else []))

    async def _watch(self) -> None:
        seen = -1
        while True:
            try:
                changed = _changed(self._new)  # not in a thread: most machines have no such directory
                if changed != seen:
                    refused: list[tuple[str, int, str]] = []
                    whole = await DROP.run(self._pass, refused)
                    seen = changed if whole else -1
                    for each in refused:
                        self._events.drop_refused(*each)
            except Exception as error:  # noqa: BLE001 - what it has not taken is there in the next pass
                self._events.trouble("drop-directory", error)
            await asyncio.sleep(INTERVAL)

    def _pass(self, refused: list[tuple[str, int, str]]) -> bool:
        """Blocks. Adds name, owner and reason of each refusal; returns whether no file has to wait."""
        taken, count, whole = Counter[int](), 0, True
        self._problem = self._not_ours()
        if self._problem:
            return False
        for name in _names(self._new):
            if name.endswith(REFUSED):
                count += 1
                continue
            path = self._new / name
            try:
                if taken[path.lstat().st_uid] >= SHARE:
                    whole = False
                    continue
                owner, why = self._take(path)
                taken[owner] += 1
                if why:
                    refused.append((name, owner, why))
            except FileNotFoundError:
                continue
            except OSError as error:
                self._problem = f"{path}: {error.strerror or error}; it is tried again"
                whole = False
        self._refused = count + len(refused)
        return whole

    def _not_ours(self) -> str:
        """What the relay could not remove it would hand over again and again."""
        try:
            owner = self._new.stat().st_uid
        except FileNotFoundError:
            return ""
        if os.geteuid() in (0, owner):
            return ""
        return f"{self._new} belongs to user {owner}: it has to be the relay's, which removes what it takes"

    def _take(self, path: Path) -> tuple[int, str]:
        """Returns the owner, and the reason of a refusal."""
        from zonerelay.sendmail import MAX_ENVELOPE, parse_dropped  # noqa: PLC0415 - only with such mail

        facts, most = path.lstat(), self._max_size + MAX_ENVELOPE
        owner, content = _read(path, most) if stat.S_ISREG(facts.st_mode) else (facts.st_uid, None)
        if content is None:
            why = f"no regular file with one name, or more than {most} octets"
        else:
            try:
                sender, recipients, wishes, message = parse_dropped(content)
            except ValueError as error:
                why = str(error)
            else:
                own = self._received(owner) + self._key(path.name, owner, message)
                why = self._submit(sender, recipients, own + message, wishes)
        if why:
            path.rename(path.with_name(f"{path.name}{REFUSED}"))
        else:
            path.unlink()
        return owner, why

    def _key(self, name: str, owner: int, message: bytes) -> bytes:
        """The field that names the key (docs/idempotency.md), if the message has none of its own."""
        is_key = self._keeps_keys and name.isascii() and name.isprintable() and " " not in name
        if not is_key or _KEYED.search(message.partition(b"\n\n")[0]):
            return b""
        return f"Idempotency-Key: sendmail-{owner}-{name[:200]}\n".encode()

    def _received(self, owner: int) -> bytes:
        """The owner of the file is certain, whatever the message says (RFC 5321 4.4)."""
        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = "no name"
        text = f"Received: by {self._hostname} (sendmail, user {owner}, {name});"
        return f"{text} {email.utils.formatdate()}\n".encode("ascii", "replace")


def hand_over(
    listeners: Sequence[ListenerSettings],
    sender: str,
    recipients: Sequence[str],
    message: bytes,
    wishes: dict[str, str],
) -> str:
    """Satisfies `Submit`, with a session at the listener that sendmail(1) would have used."""
    from zonerelay.sendmail import CONFIG, TEMPFAIL, SendmailError, listener_of, submit  # noqa: PLC0415

    given = [
        {
            "address": each.address,
            "tls": each.tls.value,
            "require_tls": each.require_tls,
            "auth": each.auth.value,
            "proxy_networks": each.proxy_networks,
        }
        for each in listeners
    ]
    try:
        submit(listener_of({"listener": given}), sender, recipients, message, wishes)
    except SendmailError as error:
        if error.status in (TEMPFAIL, CONFIG):
            raise OSError(str(error)) from error
        return str(error)
    return ""


def _changed(directory: Path) -> int:
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return -1  # there is none: sendmail(1) does not drop anything


def _names(directory: Path) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                yield entry.name
    except FileNotFoundError:
        return


def _read(path: Path, most: int) -> tuple[int, bytes | None]:
    """The owner and the content; None when it is not taken. Raises OSError."""
    # Without O_NONBLOCK a FIFO would keep the thread for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        is_sound = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1 and facts.st_size <= most
        return facts.st_uid, file.read(most + 1) if is_sound else None
