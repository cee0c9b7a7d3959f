"""Keeps the credentials file in memory: looks at it for every log-in, reads it again when it has changed.
The same for the guard rails beside it, at every log-in and MAIL of a user.

`users` is `None` while the file is missing, unreadable or malformed: then no user can log in, and no client
is told that a password is wrong. Each change is logged once, and the state ends when the file is right.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from zonerelay.config import rails
from zonerelay.config.credentials import file as credentials
from zonerelay.config.credentials import passwords
from zonerelay.config.credentials.file import CredentialsError, User
from zonerelay.config.rails import Rails, RailsFile
from zonerelay.process.threads import ACCESS
from zonerelay.telemetry.events.events import Events

# What stat says of a file, or the number of the error instead.
_Look = tuple[int, ...]


class FileWatch(ABC):
    """Use it on one event loop. `problem`: why the file cannot be used."""

    def __init__(self, path: Path, *, events: Events) -> None:
        self.path = path
        self.problem = ""
        self._events = events
        self._seen: _Look | None = None
        self._reading = asyncio.Lock()

    def is_current(self) -> bool:
        """Return whether the file is the one that was read; costs one stat."""
        return self._look() == self._seen

    async def refresh(self) -> None:
        """Bring what was read up to date."""
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
            await self._take_up()
        except CredentialsError as error:
            # An error of the system (no descriptor left) may be gone the next time, without a change.
            transient = isinstance(error.__cause__, OSError) and len(look) > 1
            self._seen = None if transient else look
            self._broken(str(error), again=not transient)
        else:
            self._seen = look

    @abstractmethod
    async def _take_up(self) -> None:
        """Read the file. Raises CredentialsError."""

    def _broken(self, problem: str, *, again: bool) -> None:
        """`again`: the file is another one since, so it is worth saying even in the same words."""
        if again or problem != self.problem:
            self.problem = problem
            self._events.credentials_broken(problem)


class CredentialsWatch(FileWatch):
    """The users of one file. What is remembered of their passwords is bound to the hash in the file: of a
    user who has changed or has gone it is of no use, and of the others it stays.
    """

    def __init__(self, path: Path, *, events: Events) -> None:
        super().__init__(path, events=events)
        self.users: Mapping[str, User] | None = None
        self.nobodys_hash = passwords.nobodys_hash(())
        """The hash to check for users that do not exist: as expensive as those of users that do."""

    async def _take_up(self) -> None:
        try:
            users = await ACCESS.run(credentials.read, self.path)
            self.users, self.problem = users, ""
            self.nobodys_hash = passwords.nobodys_hash(user.hash for user in users.values())
            self._events.credentials_read(len(users))
        except CredentialsError:
            self.users = None
            raise


class RailsWatch(FileWatch):
    """`of` is for when the file is current."""

    _file: RailsFile | None = None

    def of(self, user: str) -> Rails | None:
        """The guard rails of a user, `None` when they cannot be read."""
        return None if self._file is None else self._file.of(user)

    async def _take_up(self) -> None:
        self._file = None
        self._file = await ACCESS.run(rails.read, self.path)
        self.problem = next(iter(self._file.problems.values()), "")
        if self.problem:
            self._events.credentials_broken(self.problem)
