"""Manages all listeners of a worker, and what they share: users, access rules, sender DNS, memory.

`Listeners` builds them from the settings and applies changed settings. A listener whose address stays the
same keeps its connections, which continue with the settings they began with. A removed listener is drained; a
new one is started. If a change cannot be applied (such as a missing certificate, or a policy that cannot be
loaded), that listener keeps its settings, and the problem is reported.

On failure at start: ListenError or ValueError with a message for the operator, before the first greeting.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from zonerelay.config.endpoints import CAPTURE, parse_listen
from zonerelay.config.settings import ListenerAuth, ListenerProtocol, ListenerSettings, ListenerTls, Settings
from zonerelay.inbound.access.auth import Authenticator
from zonerelay.inbound.access.guard import Guard
from zonerelay.inbound.access.networks import AccessRules, SenderDomains
from zonerelay.inbound.cleanup.submit import Acceptance, Pieces, Principal, Rejection, SubmitCall
from zonerelay.inbound.drop_directory import LocalSubmit
from zonerelay.inbound.limits.clients import Bursts
from zonerelay.inbound.limits.memory import SessionMemory
from zonerelay.inbound.listen.http_listener import HttpListener, OpenHttp
from zonerelay.inbound.listen.listener import AnyListener, Listener
from zonerelay.inbound.listen.listening_socket import ListenError
from zonerelay.inbound.listen.submit_socket import SubmitSocket
from zonerelay.inbound.policy import Policy, PolicyContext
from zonerelay.inbound.policy.api import WholeMessage
from zonerelay.inbound.policy.runner import PolicyRunner, load_authenticator, load_policy
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.state import context as contexts
from zonerelay.inbound.state.transaction import RewriteRules
from zonerelay.limits.shared import RecordStore
from zonerelay.message.srs import Srs
from zonerelay.model.clock import Clock
from zonerelay.model.envelope import Mailbox, MessageIdSource
from zonerelay.model.reply import Reply
from zonerelay.process.sockets import NOTHING, InheritedSockets
from zonerelay.process.tasks import Tasks
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.routing.zones.zones import ChooseZone
from zonerelay.store.contract import QueueStore
from zonerelay.telemetry.events.events import Events

if TYPE_CHECKING:
    from zonerelay.inbound.tls.certificates import Certificates

_NO_LISTENER = Rejection(Reason.SHUTDOWN, Reply(421, "3.2", "No listener accepts mail now"))
LOOK_EVERY = 10.0  # seconds between checks whether a replaced policy is still in use


SomeListener = AnyListener[Any]  # Any: the kind of its connections


class ListenerRules(msgspec.Struct, frozen=True):
    """The access and rewrite rules that apply to all listeners, each None if not configured. They are built
    in advance, because many rules take a while.
    """

    access: AccessRules | None
    rewriting: RewriteRules | None


def build_rules(settings: Settings) -> ListenerRules:
    """Build the access and rewrite rules from the settings. Raise ValueError with a message if a rule is
    invalid.
    """
    return ListenerRules(
        AccessRules(settings.access) if settings.access else None,
        RewriteRules(settings.rewrite) if settings.rewrite else None,
    )


@dataclass(eq=False, repr=False)
class Listeners:
    """Manages all listeners of a worker. `secret` is the key of the cached passwords; `zones` returns the
    names of the zones that a policy may choose.

    `srs` returns the object for the current [srs] table, or None. `records` makes the store in which the
    usage of users is counted. `open_http` loads the HTTP server of a listener. `new_mail_rate`
    returns how many new deliveries of a zone start per second.
    """

    settings: InitVar[Settings]
    _: KW_ONLY
    hostname: str
    store: QueueStore
    ids: MessageIdSource
    choose_zone: ChooseZone
    zones: Callable[[], Collection[str]]
    resolver: Resolver
    events: Events
    clock: Clock
    secret: bytes
    records: Callable[[], RecordStore]
    open_http: OpenHttp
    srs: Callable[[], Srs | None] = lambda: None
    webhooks: Callable[[], contexts.AcceptanceReporter | None] = lambda: None
    new_mail_rate: Callable[[str], float] = lambda _: 0.0
    orders: contexts.SuspensionCheck | None = None
    inherited: InheritedSockets = NOTHING
    share_failure: Callable[[str], None] = lambda _: None

    def __post_init__(self, settings: Settings) -> None:
        events, clock = self.events, self.clock
        self._users: Authenticator | None = None
        self._credentials = settings.auth.credentials
        self.guard = Guard(self._credentials, self.records, events=events, clock=clock)
        """The object that enforces the limits of users for mail from every source."""
        self._shared = contexts.SharedContext(
            memory=SessionMemory(settings.max_session_memory),
            sender_domains=SenderDomains(self.resolver),
            bursts=Bursts(self.store.counts, self.new_mail_rate, clock),
            orders=self.orders,
            guard=self.guard,
        )
        self._kept: list[SomeListener] = []
        self._socket: SubmitSocket | None = None
        """The socket on which another process submits mail, by the rules of the first listener."""
        self._farewells = Tasks()
        self._retiring: dict[asyncio.Task[None], contexts.AskedPolicy] = {}
        events.metrics.refused.declare((reason,) for reason in Reason)
        events.metrics.read(
            lambda: {
                "zonerelay_inbound_memory_bytes": self._shared.memory.total,
                "zonerelay_certificate_expiry_timestamp_seconds": earliest(
                    each for certificates in self._in_use() for each in certificates.expiries()
                ),
            }
        )

    # The interface to other parts of the worker.

    @property
    def addresses(self) -> list[str]:
        """The addresses of all listeners, in the notation of the configuration. A port 0 is replaced by the
        real port.
        """
        return [address for kept in self._kept for address in kept.addresses]

    @property
    def connections(self) -> int:
        return sum(kept.connections for kept in self._kept)

    @property
    def rewriting(self) -> RewriteRules | None:
        """The current [[rewrite]] rules."""
        return self._shared.rewriting

    @property
    def refused_stranger(self) -> Callable[[Mailbox, Reply, float], None]:
        """The function to call when a next hop has rejected the mail of an unauthenticated client."""
        return self._shared.srs_recipients.refused

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems of the listeners that need an operator's attention, one sentence each."""
        found = [each for certificates in self._in_use() for each in certificates.problems]
        if self._users is not None and self._users.problem:
            found.append(self._users.problem)
        return tuple(dict.fromkeys((*found, *self.guard.problems())))

    def _in_use(self) -> Iterator[Certificates]:
        yield from (found for kept in self._kept if (found := kept.context.certificates) is not None)

    # Starting, reloading and stopping.

    async def start(
        self, settings: Settings, rules: ListenerRules, submissions: socket.socket | None = None
    ) -> None:
        """Start all listeners. Raise ListenError or ValueError; `stop_accepting` then closes those that were
        started. On the bound Unix socket `submissions`, another process submits mail as with `submit`.
        """
        self._first = settings.listener[0].address
        self._share(settings, rules)
        built = [self._build(each) for each in settings.listener]
        for kept in built:
            self._kept.append(kept)
            await kept.start()
        if submissions is not None:
            self._socket = SubmitSocket(self.submit)
            await self._socket.start(submissions)

    async def submit(self, call: SubmitCall, pieces: Pieces) -> Acceptance | Rejection:
        """Submit a message by the rules of the first listener (see `Submit`)."""
        if not self._kept:  # a reload has replaced them by others that could not start
            return _NO_LISTENER
        first = next((each for each in self._kept if each.settings.address == self._first), self._kept[0])
        return await first.submissions.submit(call, pieces)

    def local(self) -> LocalSubmit | None:
        """Return the function with which programs on this machine submit mail, or None if no listener accepts
        it.
        """
        for kept in self._kept:
            settings = kept.settings
            closed = settings.tls is ListenerTls.IMPLICIT or settings.require_tls or settings.proxy_networks
            if closed or settings.auth is ListenerAuth.REQUIRED:
                continue
            address = parse_listen(settings.address)
            here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
            principal = Principal(protocol="LOCAL", address=here, helo="localhost", may_relay=address.is_unix)
            submit = kept.submissions.submit
            return lambda envelope, pieces: submit(SubmitCall(principal, envelope), pieces)
        return None

    async def reload(self, settings: Settings, rules: ListenerRules) -> tuple[str, ...]:
        """Apply new settings and rules to the listeners. Return a message for each change that could not be
        applied.
        """
        problems: list[str] = []
        self._share(settings, rules)
        wanted = {each.address: each for each in settings.listener}
        for kept in list(self._kept):
            new = wanted.pop(kept.settings.address, None)
            if new is not None and new.protocol is not kept.settings.protocol:
                wanted[new.address], new = new, None  # another listener at the same address
            if new is None:
                self._kept.remove(kept)
                kept.stop_accepting()
                self._farewells.start(self._drained(kept, settings.shutdown_timeout))
                continue
            try:
                self._configure(kept, new)
            except ValueError as error:
                problems.append(f"the listener at {new.address} stays as it was: {error}")
        for each in wanted.values():
            try:
                kept = self._build(each)
            except ValueError as error:
                problems.append(str(error))
                continue
            try:
                await kept.start()
                self._kept.append(kept)
            except ListenError as error:
                problems.append(str(error))
                await _close(kept.context.policy)
        self._first = settings.listener[0].address
        for problem in problems:
            self.events.lifecycle("reload-incomplete", problem=problem)
        return tuple(problems)

    def stop_accepting(self) -> None:
        for kept in self._kept:
            kept.stop_accepting()
        if self._socket is not None:
            self._socket.close()

    async def drain(self, timeout: float) -> None:
        """Close all listeners (see `Listener.drain`), and return when no session is left."""
        await asyncio.gather(*(each.drain(timeout) for each in self._kept))
        await self._farewells.wait()
        if self._socket is not None:
            await self._socket.drain()
        retiring = dict(self._retiring)
        for task in retiring:
            task.cancel()
        for policy in (*retiring.values(), *(kept.context.policy for kept in self._kept)):
            await _close(policy)
        if self._users is not None:
            self._users.close()
        await self.guard.close()

    def failed_elsewhere(self, text: str) -> None:
        """Count a failed login that another worker has reported."""
        if self._users is not None:
            self._users.failed_elsewhere(text)

    # Building listeners.

    def _share(self, settings: Settings, rules: ListenerRules) -> None:
        self._shared.memory.change(settings.max_session_memory)
        if settings.auth.credentials != self._credentials:
            self._credentials = settings.auth.credentials
            self.guard.configure(self._credentials)
        needs_users = bool(settings.admin.address) or any(
            each.auth is not ListenerAuth.OFF for each in settings.listener
        )
        if self._users is not None:
            self._users.configure(settings.auth)
        elif needs_users:
            self._users = Authenticator(
                settings.auth,
                clock=self.clock,
                events=self.events,
                secret=self.secret,
                guard=self.guard,
                share=self.share_failure,
                cores=len(os.sched_getaffinity(0)),
            )
        self._shared = replace(
            self._shared,
            users=self._users,
            named=self._users,
            access=rules.access,
            rewriting=rules.rewriting,
            srs=self.srs(),
            webhooks=self.webhooks(),
            hash_bodies=bool(settings.dkim),
            capture_zone=next((zone.name for zone in settings.zone if zone.next_hop == CAPTURE), ""),
            zone_sizes={zone.name: zone.max_message_size for zone in settings.zone if zone.max_message_size},
            idempotency_window=settings.spool.idempotency_window,
        )

    def _build(self, settings: ListenerSettings) -> SomeListener:
        """Build a listener from its settings. Raise ValueError on failure."""
        policy = self._policy(settings)
        is_http = settings.protocol is ListenerProtocol.HTTP
        make = partial(HttpListener, open_http=self.open_http) if is_http else Listener
        context = contexts.ListenerContext(
            **self._shared.fields(),
            settings=_bounded(settings, policy),
            hostname=self.hostname,
            store=self.store,
            ids=self.ids,
            choose_zone=self.choose_zone,
            events=self.events,
            clock=self.clock,
            certificates=self._certificates(settings),
            policy=policy,
        )
        return make(context, self.inherited)

    def _configure(self, kept: SomeListener, new: ListenerSettings) -> None:
        """Apply new settings to a listener. Raise ValueError on failure; then nothing has changed."""
        old, former = kept.settings, kept.context.policy
        certificates, policy = kept.context.certificates, former
        if _files(old) != _files(new):
            certificates = self._certificates(new)
        elif certificates is not None:
            certificates.refresh()
        if _policy_of(old) != _policy_of(new):
            policy = self._policy(new)
        context = replace(
            kept.context,
            **self._shared.fields(),
            settings=_bounded(new, policy),
            certificates=certificates,
            policy=policy,
        )
        kept.configure(context)
        if former is not None and former is not policy:
            self._retire(former, kept)

    def _certificates(self, settings: ListenerSettings) -> Certificates | None:
        if settings.tls is ListenerTls.NONE:
            return None
        # The OpenSSL bindings use more memory than everything else here, so they are loaded only if TLS is
        # used.
        from zonerelay.inbound.tls.certificate_files import CertificateError  # noqa: PLC0415
        from zonerelay.inbound.tls.certificates import Certificates  # noqa: PLC0415

        try:
            return Certificates(settings, clock=self.clock, events=self.events)
        except CertificateError as error:
            raise ValueError(f"cannot offer TLS at {settings.address}: {error}") from error

    def _policy(self, settings: ListenerSettings) -> PolicyRunner | None:
        if not settings.policy and not settings.authenticator:
            return None
        context = PolicyContext(listener=settings.address, hostname=self.hostname, file=settings.policy_file)
        return PolicyRunner(
            load_policy(settings.policy, context) if settings.policy else Policy(context),
            timeout=settings.policy_timeout,
            events=self.events,
            zones=self.zones,
            authenticator=load_authenticator(settings.authenticator, context)
            if settings.authenticator
            else None,
        )

    def _retire(self, policy: contexts.AskedPolicy, listener: SomeListener) -> None:
        """Close a policy that has been replaced, when no session uses it any more. An application may keep a
        session open all day.
        """

        async def retire() -> None:
            while listener.asks(policy):  # noqa: ASYNC110  (asked at every farewell it would cost more)
                await asyncio.sleep(LOOK_EVERY)
            await _close(policy)

        task = asyncio.get_running_loop().create_task(retire())
        self._retiring[task] = policy
        task.add_done_callback(lambda done: self._retiring.pop(done, None))

    async def _drained(self, kept: SomeListener, timeout: float) -> None:
        await kept.drain(timeout)
        await _close(kept.context.policy)


async def _close(policy: contexts.AskedPolicy | None) -> None:
    if isinstance(policy, PolicyRunner):
        await policy.close()


# The settings that certificates and policies are built from.
_files = attrgetter("tls", "certificate", "key", "allow_certificates")
_policy_of = attrgetter("policy", "policy_file", "policy_timeout", "authenticator")


def _bounded(settings: ListenerSettings, policy: contexts.AskedPolicy | None) -> ListenerSettings:
    """Return the settings with `max_message_size` limited to the size that an aiosmtpd handler may
    receive.
    """
    if policy is None or WholeMessage not in policy.asked:
        return settings
    return replace(settings, max_message_size=min(settings.max_message_size, settings.policy_max_size))


def earliest(expiries: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the expiry time by certificate name, the earliest if several certificates have the same name."""
    return dict(sorted(expiries, key=lambda each: -each[1]))
