"""What a transcript asks for before its client comes: settings, certificates, users, a policy, access rules.

Everything is the real thing (a credentials file with argon2 hashes, a policy in its threads, OpenSSL, DNS);
only the answers to wrong passwords do not wait.
"""

import ssl
import threading
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.certificates import Made, context_files, make
from tests.support.credentials import file_of, user
from tests.support.dns import SERVFAIL, FakeDns, OnError
from tests.support.event_log import EventLog, events_into
from tests.support.inbound import HOSTNAME, House, listening
from tests.support.tls_client import trusting
from zonerelay.config import settings as tables
from zonerelay.config.load import settings_in
from zonerelay.config.options.options import options_of
from zonerelay.config.problems import Report
from zonerelay.config.settings import REPEATED, AuthSettings, ListenerSettings, Settings, SrsSettings
from zonerelay.inbound import policy
from zonerelay.inbound.access.auth import Authenticator
from zonerelay.inbound.access.networks import AccessRules, SenderDomains
from zonerelay.inbound.limits.memory import SessionMemory
from zonerelay.inbound.policy.runner import PolicyRunner
from zonerelay.inbound.state.context import SharedContext
from zonerelay.inbound.state.transaction import RewriteRules
from zonerelay.inbound.tls.certificates import Certificates
from zonerelay.message.srs import Srs
from zonerelay.model.clock import ManualClock
from zonerelay.routing.dns.resolver import Hosts, Resolver

ZONES = ("default", "bulk")


@dataclass(frozen=True)
class Step:
    number: int
    kind: str
    rest: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.kind}: {self.rest}"


def load(path: Path) -> list[Step]:
    steps = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            kind, _, rest = line.partition(" ")
            steps.append(Step(number, kind.rstrip(":"), rest))
    return steps


@asynccontextmanager
async def staged(
    steps: Sequence[Step], directory: Path, gate: threading.Event | None = None, *, hash_bodies: bool = False
) -> AsyncIterator[House]:
    """Open a house. A policy waits at the gate."""
    log, clock = EventLog(), ManualClock()
    events = events_into(log, clock)
    settings = listener_settings(steps)
    certificates = users = runner = None
    if settings.tls is not tables.ListenerTls.NONE:
        files, keys = context_files([server()], directory)
        settings = replace(settings, certificate=files, key=keys)
        certificates = Certificates(settings, clock=clock, events=events)
    if settings.auth is not tables.ListenerAuth.OFF:
        users = Authenticator(
            auth_settings(steps, directory), clock=clock, events=events, secret=bytes(32), sleep=_at_once
        )
    if methods := dict(_policy_methods(steps, gate or threading.Event())):
        scripted = type("Scripted", (policy.Policy,), methods)
        runner = PolicyRunner(
            scripted(policy.PolicyContext()),
            timeout=settings.policy_timeout,
            events=events,
            zones=lambda: ZONES,
        )
    async with AsyncExitStack() as stack:
        if users is not None:
            stack.callback(users.close)
        if runner is not None:
            stack.push_async_callback(runner.close)
        shared = SharedContext(
            memory=_memory(steps),
            access=access_rules(steps),
            users=users,
            sender_domains=await _sender_domains(steps, stack) if settings.check_sender_domain else None,
            rewriting=rewriting(steps),
            srs=srs(steps),
            hash_bodies=hash_bodies,
        )
        async with listening(
            settings, shared=shared, certificates=certificates, policy=runner, log=log, clock=clock
        ) as house:
            yield house
            assert shared.memory.used == sum(holder.held for holder in shared.memory.holders)
        assert (shared.memory.used, shared.memory.holders) == (0, set())


@asynccontextmanager
async def listening_with_tls(directory: Path, **options: Any) -> AsyncIterator[House]:
    # Any: options of the listener, by name.
    files, keys = context_files([server()], directory)
    settings = ListenerSettings(address="127.0.0.1:0", certificate=files, key=keys, **options)
    log, clock = EventLog(), ManualClock()
    certificates = Certificates(settings, clock=clock, events=events_into(log, clock))
    async with listening(settings, certificates=certificates, log=log, clock=clock) as house:
        yield house


def listener_settings(steps: Sequence[Step]) -> ListenerSettings:
    values = _values(steps, "set", ListenerSettings)
    if values.get("allow_certificates"):
        values["allow_certificates"] = [person("client").fingerprint]
    return replace(_read("listener", values).listener[0], address="127.0.0.1:0", **_numbers(values))


def auth_settings(steps: Sequence[Step], directory: Path) -> AuthSettings:
    """With no user there is no file, and nobody can log in."""
    file = directory / "credentials"
    users = [user(*step.rest.split()) for step in steps if step.kind == "user"]
    if users:
        file.write_text(file_of(*users))
        file.chmod(0o600)
    values = _values(steps, "auth", AuthSettings)
    return replace(_read("auth", values).auth, credentials=file, **_numbers(values))


def access_rules(steps: Sequence[Step]) -> AccessRules:
    rules = (tomllib.loads(f"rule = {step.rest}")["rule"] for step in steps if step.kind == "access")
    return AccessRules([rule for values in rules for rule in _read("access", values).access])


def rewriting(steps: Sequence[Step]) -> RewriteRules | None:
    rules = [tomllib.loads(f"rule = {step.rest}")["rule"] for step in steps if step.kind == "rewrite"]
    return (
        RewriteRules([rule for values in rules for rule in _read("rewrite", values).rewrite])
        if rules
        else None
    )


def srs(steps: Sequence[Step]) -> Srs | None:
    """With a secret that never changes."""
    for step in steps:
        if step.kind == "srs":
            domain, _, legacy = step.rest.partition(" ")
            return Srs(SrsSettings(domain=domain, accept_legacy=bool(legacy)), ("0123456789abcdef",))
    return None


async def _sender_domains(steps: Sequence[Step], stack: AsyncExitStack) -> SenderDomains:
    """With a name server that knows what the transcript says, and fails for names it says `{}` about."""
    names = [step.rest.partition(" = ") for step in steps if step.kind == "dns"]
    zones: dict[str, Any] = {name: tomllib.loads(f"x = {records}")["x"] for name, _, records in names}
    faults: dict[str | tuple[str, str], OnError] = {
        name: SERVFAIL for name, records in zones.items() if not records
    }
    server = await stack.enter_async_context(FakeDns(zones, faults))
    resolver = Resolver(
        tables.DnsSettings(servers=(server.address,), timeout=0.5), ManualClock(), hosts=Hosts({})
    )
    stack.push_async_callback(resolver.close)
    return SenderDomains(resolver)


def _memory(steps: Sequence[Step]) -> SessionMemory:
    limits = [int(step.rest) for step in steps if step.kind == "memory"]
    return SessionMemory(*limits) if limits else SharedContext().memory


def _values(steps: Sequence[Step], kind: str, table: type) -> dict[str, object]:
    text = "\n".join(step.rest for step in steps if step.kind == kind)
    values = tomllib.loads(text)
    unknown = values.keys() - options_of(table).keys()
    assert not unknown, f"{kind}: no such settings: {unknown}"
    return values


def _read(table: str, values: Mapping[str, object]) -> Settings:
    """As the configuration's loader does, but numbers may be as small as a transcript wants them."""
    report = Report()
    given = {name: value for name, value in values.items() if name not in _numbers(values)}
    report.document = {table: [given] if table in REPEATED else given}
    settings = settings_in(report)
    report.raise_problems()
    return settings


def _numbers(values: Mapping[str, object]) -> dict[str, Any]:  # Any: what `replace` takes
    return {name: value for name, value in values.items() if type(value) in (int, float)}


# The client's side, and what cannot change between transcripts.


@cache
def server() -> Made:
    return make(HOSTNAME)


@cache
def person(name: str) -> Made:
    return make(name)


def client_context(name: str, directory: Path) -> ssl.SSLContext:
    """For a client without a certificate, or with that of `name`."""
    context = trusting()
    if name:
        context.load_cert_chain(*person(name).write(directory, f"person-{name}"))
    return context


async def _at_once(delay: float) -> None:
    return


# `policy STEP = EXPRESSION`: what the policy says there, with `event` at hand.


def _policy_methods(
    steps: Sequence[Step], gate: threading.Event
) -> Iterator[tuple[str, Callable[..., object]]]:
    words = {"accept": policy.accept, "refuse": policy.refuse, "sleep": time.sleep, "wait": gate.wait}
    known = {event.step for event in policy.EVENTS}
    for step in steps:
        if step.kind == "policy":
            name, _, expression = step.rest.partition(" = ")
            assert name in known, step
            yield name, _method(expression, words)


def _method(expression: str, words: Mapping[str, object]) -> Callable[..., object]:
    code = compile(expression, "<transcript>", "eval")
    return lambda self, event: eval(code, {**words, "event": event})
