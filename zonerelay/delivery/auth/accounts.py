"""Decides whether a credential may be tried at a zone's smarthost now, reads its secrets, and stores refresh
tokens.

`Account` does no I/O; `now` is a parameter.

    new ──accepted──▶ proven ──refused──▶ refused ──its pause is over──▶ one try ──accepted──▶ proven
                                            ▲  │                           │
                                            │  └─ other secrets, another   └─refused: twice as long─┐
                                            │     configuration, an operator's request: new         │
                                            └───────────────────────────────────────────────────────┘

Servers lock accounts after repeated wrong passwords, so a refusal prevents all tries for a pause. Logins run
one at a time, even after an accepted one, because the password may have changed on the server since. Logins
that were waiting when one was refused are not made.

`Secrets` reads a secret each time it is needed, so a new password needs no restart and no signal.

A server that rotates refresh tokens may refuse the old one, so a lost token would cost the operator another
login in a browser. `RefreshTokenFiles` stores a new token before the new access token is used: in the file
that held the old one, atomically and readable only by its owner. If that file cannot be written (an
environment variable, systemd's credentials, a read-only directory), the token is stored in a separate file.
That file is used until the operator changes the original that it replaces.

SecretError is raised with a message for the operator.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from zonerelay import durable
from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.model.delivery import QueueKind, queue_of
from zonerelay.process.threads import FILES

Pauses = tuple[float, float]
"""The first pause after a failure, which doubles with each further one, and the longest, in seconds."""
LOGIN_PAUSES = FIRST_PAUSE, LONGEST_PAUSE = 300.0, 3600.0
SHORT_PAUSES = 5.0, 300.0
"""After a failure that may be over soon: of a token server, or of a secret that cannot be read."""

TRY_TIME = 120.0
"""Seconds for which the one try after a pause blocks others if it never reports a result."""

PATIENCE = 15.0
"""Seconds that a login with a proven secret waits for another one. A host that hangs must not block logins at
other hosts, and servers reply to a wrong password within 10 seconds.
"""


class Account:
    """The login state of one credential in one zone. `problem` is the reason why it cannot log in, and is
    `""` while it can.

    `epoch` changes with each refusal. `stale` is the digest of a token that was refused because of its age.
    """

    def __init__(self, zone: str, credential: str) -> None:
        self.zone = zone
        self.credential = credential
        self.stale = ""
        self._lock = asyncio.Lock()
        self.problem = ""
        self.host = ""
        self.address = ""
        self.epoch = 0
        self._failures = 0
        self._until = 0.0
        self._material = ""
        self._proven = ""

    @contextlib.asynccontextmanager
    async def one_at_a_time(self, material: str) -> AsyncIterator[None]:
        """Hold the account's lock, so that only one login runs at a time."""
        try:
            async with asyncio.timeout(PATIENCE if self.is_proven(material) else None):
                await self._lock.acquire()
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            self._lock.release()

    def may_try(self, material: str, now: float) -> bool:
        """Return whether a login may start now. `material` is the digest of the current secrets. After a
        pause it returns true for one trial login.
        """
        if not self._failures:
            return True
        if material != self._material:
            self.forgive()
            return True
        if now < self._until:
            return False
        self._until = now + TRY_TIME
        return True

    def not_tried(self, epoch: int) -> None:
        """Allow another login attempt, because the last one ended without a refusal of the credential."""
        if epoch == self.epoch:
            self._until = 0.0

    def refuse(
        self,
        problem: str,
        *,
        material: str,
        now: float,
        host: str = "",
        address: str = "",
        pauses: Pauses = LOGIN_PAUSES,
    ) -> None:
        self.problem, self.host, self.address = problem, host, address
        self.doubt()
        self.epoch += 1
        self._material = material
        self._until = now + min(pauses[0] * 2.0 ** min(self._failures, 30), pauses[1])
        self._failures += 1

    def accept(self, material: str) -> bool:
        """Record an accepted login. Return true if the account had a problem before."""
        news = bool(self.problem)
        self.forgive()
        self._proven = material
        self.problem = ""
        return news

    def is_proven(self, material: str) -> bool:
        """Return whether a login with these secrets was accepted and nothing has invalidated them since."""
        return bool(self._proven) and self._proven == material

    @property
    def is_known(self) -> bool:
        """Whether a login has succeeded or failed, so that its result predicts that of the next one."""
        return bool(self._proven or self.problem)

    def doubt(self) -> None:
        self._proven = ""

    def forgive(self) -> None:
        """Clear the refusals, so that a login may be tried at once. The problem remains until a login
        succeeds.
        """
        self._failures = 0
        self._until = 0.0


def digest(*secrets: str) -> str:
    """Return a digest of secrets (the `material` of a login), which changes when they change but does not
    reveal them.
    """
    return hashlib.sha256("\0".join(secrets).encode()).hexdigest()


class Secrets:
    """The secrets of a worker, which are read when they are needed. References with `env:` and `credential:`
    point into `environment`.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.of_mailbox: Callable[[str], str] | None = None
        """Returns the password of a mailbox of the outbox, by its zone. Raises SecretError."""

    async def get(self, reference: str) -> str:
        """Return the secret to which a reference points. Raise SecretError."""
        if self.of_mailbox is not None and queue_of(reference).kind is QueueKind.MAILBOX:
            return self.of_mailbox(reference)
        return await FILES.run(read_secret, reference, self.environment)


class _KeptToken(msgspec.Struct):
    """A stored refresh token. `replaces` is the digest of the operator's token that it replaces."""

    replaces: str
    refresh_token: Annotated[str, msgspec.Meta(min_length=1)]


class RefreshTokenFiles:
    """Stores refresh tokens in `directory`, which must be private to the relay. Methods block, so run them in
    a thread.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def current(self, credential: str, original: str) -> str:
        """Return the stored refresh token that replaces the operator's token `original`, or else `original`.
        Raise SecretError.
        """
        path = self._path(credential)
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=_KeptToken)
        except (FileNotFoundError, NotADirectoryError):
            return original
        except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
            reason = error.strerror if isinstance(error, OSError) else "the file is damaged"
            raise SecretError(
                f"{path} cannot be read: {reason}; remove it to start with the configured token"
            ) from error
        return kept.refresh_token if kept.replaces == digest(original) else original

    def replace(self, credential: str, reference: str, original: str, token: str) -> None:
        """Store a refresh token in place of `original`, the current value of `reference`. Raise SecretError
        if it cannot be stored anywhere.
        """
        if reference.startswith("/"):
            with contextlib.suppress(OSError):
                durable.write(Path(reference), f"{token}\n".encode())
                return
        path = self._path(credential)
        try:
            durable.make_directory(self._directory)
            durable.write(path, msgspec.json.encode(_KeptToken(digest(original), token)))
        except OSError as error:
            raise SecretError(
                f"the new refresh token cannot be stored in {path}: {error.strerror}"
            ) from error

    def _path(self, credential: str) -> Path:
        return self._directory / f"{credential}.json"
