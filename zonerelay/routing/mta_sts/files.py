"""Keeps MTA-STS policies on disk, a JSON file for each domain, so that a restart forgets no policy.

A reader finds the old file or the new one. A malformed file (an editor) is skipped, reported, and overwritten
by the next policy of its domain. Expired policies are removed. Every method touches the disk: do not call it
on the event loop.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from zonerelay import durable
from zonerelay.config.settings import Settings
from zonerelay.routing.idna import ascii_domain
from zonerelay.routing.mta_sts.policy_text import MAX_LIFE, MAX_PATTERNS, HeldPolicy, StsMode, StsPolicy

MAX_FILE = 32 * 1024
"""Octets; `MAX_PATTERNS` names of 253 fit."""
DIRECTORY = "mta-sts"
_SUFFIX = ".json"
_NO_POLICY = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""The exceptions of reading a file with any content."""


def policy_directory(settings: Settings) -> Path:
    """Returns the directory beside the spool, which all workers of a relay share; made with the first
    policy.
    """
    return settings.spool.path.parent / DIRECTORY


@dataclass(frozen=True, slots=True)
class Loaded:
    policies: tuple[HeldPolicy, ...]
    problems: tuple[str, ...] = ()


class StsFiles:
    """The files of one directory. `writable` false: change nothing."""

    def __init__(self, directory: Path, *, writable: bool = True) -> None:
        self._directory = directory
        self._writable = writable

    def load(self, now: float, limit: int) -> Loaded:
        """Returns the policies in force, the latest first. Raises OSError when the directory cannot
        be read.
        """
        found: list[HeldPolicy] = []
        problems: list[str] = []
        for path in self._files():
            try:
                held = _read(path, now)
            except _NO_POLICY as error:
                problems.append(f"{path}: {error}")
                continue
            if held.expires > now:
                found.append(held)
            else:
                self._unlink(path)
        found.sort(key=lambda held: held.fetched, reverse=True)
        for held in found[limit:]:
            self.remove(held.domain)
        return Loaded(tuple(found[:limit]), tuple(problems))

    def save(self, held: HeldPolicy) -> None:
        """Raises OSError."""
        if not self._writable:
            return
        durable.make_directory(self._directory, mode=0o755)
        text = json.dumps(
            {"domain": held.domain, "id": held.id, "fetched": held.fetched, **asdict(held.policy)}
        )
        durable.write(self._path(held.domain), f"{text}\n".encode("ascii"))

    def remove(self, domain: str) -> None:
        self._unlink(self._path(domain))

    def _files(self) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    yield Path(entry.path)
                elif entry.name.endswith(durable.DRAFT):  # a power cut left it
                    self._unlink(Path(entry.path))

    def _unlink(self, path: Path) -> None:
        """Removes a file if that is possible: it is expired, or read again next time."""
        if self._writable:
            with contextlib.suppress(OSError):
                path.unlink()

    def _path(self, domain: str) -> Path:
        return self._directory / f"{domain}{_SUFFIX}"


def _read(path: Path, now: float) -> HeldPolicy:
    """Raises one of `_NO_POLICY`."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise ValueError("too large")
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise TypeError("not a policy")
    domain, patterns = str(fields["domain"]), [str(each) for each in fields["patterns"]]
    if path.name != f"{ascii_domain(domain)}{_SUFFIX}" or len(patterns) > MAX_PATTERNS:
        raise ValueError("not the policy of this domain")
    policy = StsPolicy(StsMode(fields["mode"]), tuple(patterns), min(int(fields["max_age"]), MAX_LIFE))
    # A clock that was ahead must not prolong a policy's life.
    return HeldPolicy(domain, str(fields["id"]), policy, min(float(fields["fetched"]), now))
