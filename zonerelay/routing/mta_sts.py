"""Looks up, fetches, stores and refreshes the MTA-STS policies of recipient domains (RFC 8461 3 and 5.1).

A stored policy applies until its `max_age` is over, whatever DNS and the policy's server say by then, so an
attacker gains nothing by suppressing an answer. It is fetched again if its TXT record has another id (routing
waits for that, up to `FIRST_WAIT`), and in the background if it is used and is a day old or has reached half
its life. A domain whose policy cannot be fetched is treated as one without a policy, for `RETRY_AFTER`.

Policies are stored in memory and on disk. The disk is read at the first look-up, so a relay whose zones do
not use MTA-STS has no cost. Equal look-ups are joined. `look_up` does not raise for any network error.
"""

import asyncio
import contextlib
import enum
import logging
import os
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from zonerelay import durable
from zonerelay.config.settings import Settings, ZoneSettings
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.clock import Clock
from zonerelay.process.tasks import cancel_all
from zonerelay.process.threads import FILES
from zonerelay.process.webclient import Resolve, Response, WebError, fetch
from zonerelay.routing.addresses import ascii_domain, is_private
from zonerelay.routing.dns.answers import TXT, DnsAnswer, DnsStatus
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.telemetry.events.events import Events

# MTA-STS (RFC 8461) as texts and values: the TXT record, the policy, and the hosts that it allows. Pure.
#
# A record or a policy with a syntax error counts as none. The ValueError contains a message for logs that
# quotes no more than a few characters. Unknown fields are skipped, as later versions need.

VERSION = "STSv1"
MAX_LIFE = 31_557_600
"""Seconds (RFC 8461 3.2). A longer `max_age` is reduced to this."""
MIN_LIFE = 60.0
"""Seconds for which any policy is used, so that one with `max_age` 0 is not fetched for every message."""
REFRESH_AGE = 86_400.0
MAX_PATTERNS = 50
MAX_POLICY = 64 * 1024
"""The maximum size in bytes, as suggested by RFC 8461 3.3."""

_RECORD = re.compile(r"v=STSv1[ \t]*;")
_RECORD_FIELD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}=[!-:<>-~]+", re.ASCII)
_ID = re.compile(r"[A-Za-z0-9]{1,32}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)
_SHOWN = 40


class StsMode(enum.StrEnum):
    """The mode of an MTA-STS policy."""

    ENFORCE = "enforce"
    TESTING = "testing"
    NONE = "none"


class StsPolicy(msgspec.Struct, frozen=True):
    """An MTA-STS policy. `patterns` are in lower-case ASCII: `mx.example.com`, `*.example.com`
    (one label).
    """

    mode: StsMode
    patterns: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_PATTERNS)]
    max_age: int

    def allows(self, host: str) -> bool:
        """Return whether an MX host, an ASCII name in lower case, is in the policy (RFC 8461 4.1)."""
        first, _, parent = host.partition(".")
        return host in self.patterns or (bool(first and parent) and f"*.{parent}" in self.patterns)


class CachedPolicy(StsPolicy, frozen=True, kw_only=True):
    """The MTA-STS policy of a domain with the Unix time at which it was fetched. `id` is that of the TXT
    record at that time. A policy's file has these members as JSON.
    """

    domain: str
    id: str
    fetched: float

    @classmethod
    def of(cls, domain: str, id: str, policy: StsPolicy, fetched: float) -> "CachedPolicy":
        return cls(policy.mode, policy.patterns, policy.max_age, domain=domain, id=id, fetched=fetched)

    @property
    def expires(self) -> float:
        return self.fetched + max(self.max_age, MIN_LIFE)

    @property
    def refresh_from(self) -> float:
        """The Unix time from which the policy is fetched again: after a day or half of its lifetime (RFC 8461
        10.2).
        """
        return self.fetched + min(REFRESH_AGE, (self.expires - self.fetched) / 2)


def record_id(texts: Iterable[str]) -> str:
    """Return the policy id in the TXT records of `_mta-sts.DOMAIN`, or `""` if there is no valid record."""
    records = [text for text in texts if _RECORD.match(text)]
    if len(records) != 1:
        return ""  # RFC 8461 3.1: more than one is none
    ids = []
    for part in records[0].split(";")[1:]:
        field = part.strip(" \t")
        if field.startswith("id="):
            ids.append(field.removeprefix("id="))
        elif field and not _RECORD_FIELD.fullmatch(field):
            return ""
    return ids[0] if len(ids) == 1 and _ID.fullmatch(ids[0]) else ""


def parse_policy(body: bytes) -> StsPolicy:
    """Parse the bytes of an MTA-STS policy file. Raise ValueError if the policy is invalid."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("the policy is not UTF-8 text") from None
    found: defaultdict[str, list[str]] = defaultdict(list)
    for line in text.replace("\r\n", "\n").split("\n"):
        key, colon, value = line.partition(":")
        if colon:
            found[key.strip(" \t")].append(value.strip(" \t"))
        elif line.strip(" \t"):
            raise ValueError(f"invalid line in the policy: {_shown(line)}")
    # The first of repeated fields counts.
    version, mode, max_age = ("".join(found[name][:1]) for name in ("version", "mode", "max_age"))
    if version != VERSION:
        raise ValueError(f"the policy does not contain version: {VERSION}")
    if mode not in {*StsMode}:
        raise ValueError(f"the policy has no valid mode: {_shown(mode)}")
    if mode != StsMode.NONE and not found["mx"]:
        raise ValueError("the policy contains no mx")
    if len(found["mx"]) > MAX_PATTERNS:
        raise ValueError(f"the policy contains more than {MAX_PATTERNS} mx")
    if not _NUMBER.fullmatch(max_age):
        raise ValueError(f"the policy has no valid max_age: {_shown(max_age)}")
    patterns = dict.fromkeys(map(_pattern, found["mx"]))
    return StsPolicy(StsMode(mode), tuple(patterns), min(int(max_age), MAX_LIFE))


def _pattern(text: str) -> str:
    try:
        name = ascii_domain(text.removeprefix("*."))
    except ValueError:
        raise ValueError(f"the policy has an mx that is not a host name: {_shown(text)}") from None
    return f"*.{name}" if text.startswith("*.") else name


def _shown(text: str) -> str:
    return repr(text[:_SHOWN])


# Stores MTA-STS policies on disk, as a JSON file for each domain, so that they survive a restart.
#
# A reader finds the old file or the new one. A malformed file (edited by hand) is skipped, reported, and
# overwritten by the next policy of its domain. Expired policies are removed. Every method accesses the disk,
# so do not call it on the event loop.

MAX_FILE = 32 * 1024
"""Bytes, enough for `MAX_PATTERNS` names of 253 bytes."""
DIRECTORY = "mta-sts"
_SUFFIX = ".json"
_NO_POLICY = (OSError, ValueError, RecursionError)
"""The exceptions of reading a file with any content."""


def policy_directory(settings: Settings) -> Path:
    """Return the directory for MTA-STS policies next to the spool, which all workers of a relay share. It is
    created with the first policy.
    """
    return settings.spool.path.parent / DIRECTORY


class StsFiles:
    """Stores MTA-STS policies as files in a directory, so that they survive a restart. If `writable` is
    false, nothing is changed.
    """

    def __init__(self, directory: Path, *, writable: bool = True) -> None:
        self._directory = directory
        self._writable = writable

    def load(self, now: float, limit: int) -> tuple[list[CachedPolicy], list[str]]:
        """Return the unexpired policies, newest first, and error messages about unreadable files. Raise
        OSError if the directory cannot be read.
        """
        found: list[CachedPolicy] = []
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
        return found[:limit], problems

    def save(self, held: CachedPolicy) -> None:
        """Write a policy to its file. Raise OSError if that fails."""
        if not self._writable:
            return
        durable.make_directory(self._directory, mode=0o755)
        members = msgspec.structs.asdict(held)
        file = {name: members.pop(name) for name in ("domain", "id", "fetched")} | members
        durable.write(self._path(held.domain), msgspec.json.encode(file) + b"\n")

    def remove(self, domain: str) -> None:
        self._unlink(self._path(domain))

    def _files(self) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    yield Path(entry.path)
                elif entry.name.endswith(durable.DRAFT):  # left by a power failure
                    self._unlink(Path(entry.path))

    def _unlink(self, path: Path) -> None:
        """Remove the file of a policy if possible. If it stays, it has expired or is read again at the next
        start.
        """
        if self._writable:
            with contextlib.suppress(OSError):
                path.unlink()

    def _path(self, domain: str) -> Path:
        return self._directory / f"{domain}{_SUFFIX}"


def _read(path: Path, now: float) -> CachedPolicy:
    """Read the policy in a file. Raise one of `_NO_POLICY`."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise ValueError("too large")
    found = msgspec.json.decode(data, type=CachedPolicy)
    if path.name != f"{ascii_domain(found.domain)}{_SUFFIX}":
        raise ValueError("not the policy of this domain")
    # A clock that was ahead must not prolong a policy's life.
    life, fetched = min(found.max_age, MAX_LIFE), min(found.fetched, now)
    return msgspec.structs.replace(found, max_age=life, fetched=fetched)


HTTPS_PORT = 443
FIRST_WAIT = 10.0
"""Seconds that mail waits for a policy that is not stored yet. The fetch continues afterwards."""
FETCH_TIMEOUT = 60.0
"""Seconds for one fetch (RFC 8461 3.3 suggests a minute)."""
RETRY_AFTER = 300.0
"""Seconds after a failure until the next attempt (RFC 8461 3.3 suggests five minutes)."""
PENDING_LIFE = 30.0
"""Seconds for which mail is sent without a policy that is still being fetched."""
MAX_FETCHES = 20  # at a time
MAX_POLICIES = 10_000
MAX_NAME = 244  # characters of a domain; with the prefix "_mta-sts." it must still be a valid name

_log = logging.getLogger(__name__)


class FetchPolicy(Protocol):
    """Interface: fetches a URL, like `webclient.fetch`."""

    async def __call__(self, url: str, *, timeout: float, max_size: int, resolve: Resolve) -> Response: ...


class PolicyLookup(msgspec.Struct, frozen=True):
    """The result of looking up the MTA-STS policy of a domain. `held` is the active policy. `expires` is the
    Unix time of the next look-up.

    Without a policy, `problem` is the reason if the domain may have one that could not be fetched.
    """

    held: CachedPolicy | None
    expires: float
    problem: str = ""


@dataclass(eq=False, repr=False)
class StsPolicies:
    """The MTA-STS policies of recipient domains, which are looked up, fetched and cached. `files` has those
    that survive a restart.
    """

    names: Resolver
    events: Events
    clock: Clock
    _: KW_ONLY
    files: StsFiles
    port: int = HTTPS_PORT
    fetch: FetchPolicy = fetch

    def __post_init__(self) -> None:
        self._held: OrderedDict[str, CachedPolicy] = OrderedDict()
        self._failures: BoundedDict[str, PolicyLookup] = BoundedDict(MAX_POLICIES)
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(MAX_FETCHES)
        self._loading: asyncio.Task[None] | None = None

    async def look_up(self, zone: ZoneSettings, domain: str) -> PolicyLookup:
        """Return the MTA-STS policy of a domain (an ASCII name). `zone` determines which addresses the
        policy's server may have.
        """
        await self._loaded()
        if len(domain) > MAX_NAME:
            return self._found(None, DnsAnswer(DnsStatus.NODATA, (), self.clock.monotonic() + RETRY_AFTER))
        answer = await self.names.lookup(f"_mta-sts.{domain}", TXT)
        announced = record_id(answer.records)
        held = self.held(domain)
        if announced and (held is None or held.id != announced):
            fetching = self._start_fetch(zone, domain, announced)
            if fetching is not None:
                await asyncio.wait((fetching,), timeout=FIRST_WAIT)
            held = self.held(domain)
        elif held is not None and held.refresh_from <= self.clock.now():
            self._start_fetch(zone, domain, announced or held.id)
        found = self._found(held, answer, domain if announced else "")
        self.events.sts_looked_up(_result(found, answer))
        return found

    def held(self, domain: str) -> CachedPolicy | None:
        """Return the cached policy of a domain without querying DNS, or None."""
        held = self._held.get(domain)
        if held is None or held.expires <= self.clock.now():
            return None
        self._held.move_to_end(domain)
        return held

    async def close(self) -> None:
        await cancel_all(*self._fetching.values(), self._loading)

    # ---- what to answer --------------------------------------------------------------------------

    def _found(self, held: CachedPolicy | None, answer: DnsAnswer[str], announced: str = "") -> PolicyLookup:
        now = self.clock.now()
        expires = now + max(answer.expires - self.clock.monotonic(), 0.0)
        if held is not None:
            return PolicyLookup(held, min(expires, held.expires))
        if not answer.status.is_definite:
            return PolicyLookup(None, expires, f"TXT of the domain: {answer.status}")
        if not announced:
            return PolicyLookup(None, expires)
        failure = self._failure(announced)
        if failure is not None:
            return PolicyLookup(None, min(expires, failure.expires), failure.problem)
        return PolicyLookup(None, min(expires, now + PENDING_LIFE), "its policy is still being fetched")

    # ---- fetching --------------------------------------------------------------------------------

    def _start_fetch(self, zone: ZoneSettings, domain: str, policy_id: str) -> asyncio.Task[None] | None:
        """Return the running task that fetches a policy, or a new one, or None shortly after a failure."""
        task = self._fetching.get(domain)
        if task is not None:
            return task
        if self._failure(domain) is not None:
            return None
        task = asyncio.get_running_loop().create_task(self._fetch(zone, domain, policy_id))
        self._fetching[domain] = task
        return task

    async def _fetch(self, zone: ZoneSettings, domain: str, policy_id: str) -> None:
        """Fetch a policy, and store it or the reason for the failure. This never raises an exception."""
        began = None
        try:
            async with asyncio.timeout(FETCH_TIMEOUT) as limit, self._slots:
                began = asyncio.get_running_loop().time()
                limit.reschedule(began + FETCH_TIMEOUT)
                held = await self._fetched(zone, domain, policy_id)
            await self._keep(held)
        except (WebError, ValueError) as error:
            self._failed(domain, str(error))
        except TimeoutError:
            # Without a slot, the next look-up tries again, because nothing is known of the policy.
            if began is not None:
                self._failed(domain, f"no response within {FETCH_TIMEOUT:g} s")
        except Exception as error:  # noqa: BLE001 - a bug here must not cost the domain its mail
            _log.exception("unexpected error while fetching a policy")
            self._failed(domain, f"internal error: {type(error).__name__}")
        finally:
            del self._fetching[domain]

    async def _fetched(self, zone: ZoneSettings, domain: str, policy_id: str) -> CachedPolicy:
        """Fetch a policy from the domain's web server. Raise WebError, and ValueError if the answer is not a
        policy.
        """
        host = f"mta-sts.{domain}"
        port = "" if self.port == HTTPS_PORT else f":{self.port}"

        response = await self.fetch(
            f"https://{host}{port}/.well-known/mta-sts.txt",
            timeout=FETCH_TIMEOUT,
            max_size=MAX_POLICY,
            resolve=partial(self._addresses, zone),
        )
        if response.status != 200:  # a redirect, too (RFC 8461 3.3)
            raise WebError(f"{host} returned status {response.status}")
        if response.content_type != "text/plain":
            raise WebError(f"{host} did not return text/plain")
        return CachedPolicy.of(domain, policy_id, parse_policy(response.body), self.clock.now())

    async def _addresses(self, zone: ZoneSettings, host: str) -> Sequence[str]:
        found = await self.names.addresses(host, ipv6=zone.ipv6)
        if found.failure is not None:
            raise WebError(found.failure.text)
        ips = [ip for ip in found.ips if zone.allow_private_addresses or not is_private(ip)]
        if not ips:
            raise WebError(f"{host} resolves to private addresses only, which the zone does not allow")
        return ips

    def _failure(self, domain: str) -> PolicyLookup | None:
        """Return the recent failure to fetch this domain's policy, or None."""
        failure, now = self._failures.get(domain), self.clock.now()
        return failure if failure is not None and now < failure.expires <= now + RETRY_AFTER else None

    def _failed(self, domain: str, problem: str) -> None:
        self._failures[domain] = PolicyLookup(None, self.clock.now() + RETRY_AFTER, problem)
        held = self.held(domain)
        self.events.sts_failed(domain, problem, kept_until=held.expires if held is not None else None)

    # ---- keeping ---------------------------------------------------------------------------------

    async def _keep(self, held: CachedPolicy) -> None:
        self._held[held.domain] = held
        self._held.move_to_end(held.domain)
        self._failures.pop(held.domain, None)
        oldest = self._held.popitem(last=False)[0] if len(self._held) > MAX_POLICIES else ""
        self.events.sts_fetched(held.domain, mode=held.mode.value, policy_id=held.id, expires=held.expires)
        try:
            await FILES.run(self.files.save, held)
            if oldest:
                await FILES.run(self.files.remove, oldest)
        except OSError as error:
            self.events.sts_files(f"the policy of {held.domain} cannot be stored: {error}")

    async def _loaded(self) -> None:
        """Wait until the stored policies have been read from disk."""
        if self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._load())
        if not self._loading.done():
            await asyncio.shield(self._loading)

    async def _load(self) -> None:
        try:
            policies, problems = await FILES.run(self.files.load, self.clock.now(), MAX_POLICIES)
        except OSError as error:
            policies, problems = [], [str(error)]
        for problem in problems:
            self.events.sts_files(problem)
        self._held.update((held.domain, held) for held in reversed(policies))


def _result(found: PolicyLookup, answer: DnsAnswer[str]) -> str:
    if found.held is not None:
        return found.held.mode.value
    return "failed" if found.problem or not answer.status.is_definite else "absent"
