"""Keeps the credentials file in memory: looks at it for every log-in, reads it again when it has changed.

`users` is `None` while the file is missing, unreadable or malformed: then no user can log in, and no client
is told that a password is wrong. Each change is logged once, and the state ends when the file is right.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from zonerelay.config.credentials import file as credentials
from zonerelay.config.credentials import passwords
from zonerelay.config.credentials.file import CredentialsError, User
from zonerelay.telemetry.events.events import Events

# What stat says of a file, or the number of the error instead.
_Look = tuple[int, ...]


class CredentialsWatch:
    """`changed` is called after each reading. Use it on one event loop."""

    def __init__(self, path: Path, *, events: Events, changed: Callable[[], None]) -> None:
        self.path = path
        self.users: Mapping[str, User] | None = None
        self.problem = ""
        self.nobodys_hash = passwords.nobodys_hash(())
        """The hash to check for users that do not exist: as expensive as those of users that do."""
        self._events = events
        self._changed = changed
        self._seen: _Look | None = None
        self._reading = asyncio.Lock()

    def is_current(self) -> bool:
        """Return whether the file is the one that was read; costs one stat."""
        return self._look() == self._seen

    async def refresh(self) -> None:
        """Bring `users` up to date."""
        if self.is_current():
            return
        async with self._reading:
            look = self._look()
            if look != self._seen:
                await self._read(look)

    def _look(self) -> _Look:
        """Read the file on the event loop: that takes microseconds, and a thread would take a hundred."""
        try:
            found = os.stat(self.path)  # noqa: PTH116  (half the time of Path.stat)
        except OSError as error:
            return (error.errno or 0,)
        # The change time sees a chmod, the inode a rename.
        return (found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev, found.st_size)

    async def _read(self, look: _Look) -> None:
        try:
            users = await asyncio.to_thread(credentials.read, self.path)
        except CredentialsError as error:
            # An error of the system (no descriptor left) may be gone the next time, without a change.
            transient = isinstance(error.__cause__, OSError) and len(look) > 1
            self._seen = None if transient else look
            self._broken(str(error), again=not transient)
        else:
            self._seen = look
            self.users, self.problem = users, ""
            self.nobodys_hash = passwords.nobodys_hash(user.hash for user in users.values())
            self._events.credentials_read(len(users))
        self._changed()

    def _broken(self, problem: str, *, again: bool) -> None:
        """`again`: the file is another one since, so it is worth saying even in the same words."""
        self.users = None
        if again or problem != self.problem:
            self.problem = problem
            self._events.credentials_broken(problem)
