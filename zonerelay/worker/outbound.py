"""Builds the sending side of a worker from the settings: the router and the courier, with the tables that
both use.

`worker` builds one instance and passes it new tables on a reload. `configure` updates everything here that
depends on them, and cannot fail: what may be unusable after all, such as a secret, is in the tables.

The webhooks of a worker are loaded only if there is a [[webhook]]. Stored events for a webhook that is no
longer configured are deleted at a start, which is logged.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from zonerelay.config.endpoints import CAPTURE, parse_listen
from zonerelay.config.settings import Settings
from zonerelay.delivery.auth.logins import Logins, token_directory
from zonerelay.delivery.batch.capturing import CaptureCourier
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.delivery.rewrite.rendering import CheckClaim, DkimSigner, ReadBody, Renderer
from zonerelay.delivery.source import SourceSelection
from zonerelay.history.writer import DIRECTORY
from zonerelay.limits.unix_socket import SocketAuthority
from zonerelay.limits.worker import LimitKeeper
from zonerelay.message.srs import Srs
from zonerelay.model.envelope import MessageIdSource
from zonerelay.model.reply import Outcome
from zonerelay.process.setup import hashing_redactor
from zonerelay.routing.addresses import OwnAddresses
from zonerelay.routing.destinations.mx import MxRouter
from zonerelay.routing.destinations.route import Batch
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.routing.mta_sts import StsFiles, StsPolicies, policy_directory
from zonerelay.store.contract import Store
from zonerelay.store.open import open_limits
from zonerelay.telemetry.events.events import Field
from zonerelay.worker.context import WorkerContext

if TYPE_CHECKING:
    from zonerelay.message.dkim.keys import DkimKeys
    from zonerelay.webhook.courier import Write
    from zonerelay.webhook.webhooks import Webhooks
    from zonerelay.worker.tables import Tables


def build_webhooks(
    settings: Settings, context: WorkerContext, store: Store, write: Write, ids: MessageIdSource
) -> Webhooks:
    """Create the object that makes and sends webhook events about accepted and delivered mail."""
    from zonerelay.webhook.webhooks import Webhooks  # noqa: PLC0415 - see above

    def records(since: float) -> Sequence[tuple[float, str, Mapping[str, Field]]]:
        from zonerelay.history.reader import Histories  # noqa: PLC0415 - loads SQLite

        worker = context.identity.index
        with Histories(settings.spool.path.parent / DIRECTORY, None, worker=worker) as histories:
            found = list(histories.since(since))
            begun = {each.text("id") for each in found if each.name == "accepted"}
            for message_id in {each.text("id") for each in found} - begun - {""}:
                found += (each for each in histories.records(message_id) if each.name == "accepted")
            return [(each.at, each.name, each.fields) for each in found]

    return Webhooks(
        hostname=context.hostname,
        store=store,
        write=write,
        ids=ids,
        hashed=lambda: hashing_redactor(settings, context.redactor),
        records=records,
        environment=context.environment,
        events=context.events,
        clock=context.clock,
        random=context.random,
    )


class OutboundSide:
    """The sending side of one worker. `resume(zone)` is called when the zone's mail may be tried again, and
    `granted(zone)` when limits shared with other workers allow more of it to start.
    """

    def __init__(
        self,
        tables: Tables,
        context: WorkerContext,
        *,
        read_body: ReadBody,
        check_claim: CheckClaim,
        resume: Callable[[str], None],
        granted: Callable[[str], None],
    ) -> None:
        settings, events, clock = tables.settings, context.events, context.clock
        self._events = events
        self.dkim_keys: DkimKeys | None = None
        self.srs: Srs | None = None
        self.resolver = Resolver(settings.dns, clock, observer=events)
        files = StsFiles(policy_directory(settings))
        self._sts = StsPolicies(self.resolver, events, clock, files=files, port=context.policy_port)
        self.router = MxRouter(
            self.resolver,
            hostname=context.hostname,
            clock=clock,
            random=context.random,
            own_addresses=OwnAddresses(parse_listen(each.address) for each in settings.listener),
            sts=self._sts,
        )
        self.limits = self._shared_limits(settings, context, granted)
        self.sources = SourceSelection(clock, events)
        self.logins = Logins(
            clock, events, context.environment, directory=token_directory(settings), resume=resume
        )
        events.metrics.smarthosts.attach(self.logins.login_states)
        self._signing = DkimSigner(threaded=len(os.sched_getaffinity(0)) > 1)
        self.renderer = Renderer(read_body=read_body, events=events, clock=clock, signing=self._signing)
        self.courier = SmtpCourier(
            settings.delivery,
            hostname=context.hostname,
            resolver=self.resolver,
            sources=self.sources,
            logins=self.logins,
            read_body=read_body,
            check_claim=check_claim,
            renderer=self.renderer,
            events=events,
            clock=clock,
            random=context.random,
            shared=None if self.limits is None else self.limits.zone,
        )
        self._capturing = CaptureCourier(
            settings, read_body=read_body, check_claim=check_claim, clock=clock, on_error=events.error
        )
        self.configure(tables)

    async def deliver(self, batch: Batch) -> Sequence[Outcome]:
        """Deliver a batch by SMTP, or store it as captured mail."""
        if batch.zone.next_hop == CAPTURE:
            return await self._capturing.deliver(batch)
        return await self.courier.deliver(batch)

    def configure(self, tables: Tables) -> None:
        """Apply new settings."""
        settings = tables.settings
        for note in tables.advice:
            self._events.lifecycle("advice", note=note)
        self.dkim_keys, self.srs = tables.dkim_keys, tables.srs
        largest = max((listener.max_header_size for listener in settings.listener), default=0)
        self.renderer.configure(keys=tables.dkim_keys, srs=tables.srs, max_header_size=largest)
        self.router.destinations = tables.destinations
        self.sources.configure(settings.source)
        self._events.metrics.source_refusals.declare((source.name,) for source in settings.source)
        self.logins.configure(settings.credential, tables.senders, settings.zone)
        self._captures = any(zone.next_hop == CAPTURE for zone in settings.zone)

    def _shared_limits(
        self, settings: Settings, context: WorkerContext, granted: Callable[[str], None]
    ) -> LimitKeeper | None:
        """Return the object that obtains the limits shared with other workers, or None if no limits are
        shared.

        If the store is Redis or PostgreSQL, the store is the authority, because relays on other machines may
        share it. Otherwise a worker that a supervisor started queries the supervisor over a socket. Raise
        StoreOpenError.
        """
        owner = secrets.token_hex(8)
        authority = open_limits(settings, owner, context.environment)
        if authority is None and context.identity.limits is not None:
            authority = SocketAuthority(context.identity.limits, owner)
        if authority is None:
            return None

        def start_more(zone: str) -> None:
            granted(zone)
            self.courier.pool.wake()

        return LimitKeeper(
            authority,
            context.clock,
            context.events,
            granted=start_more,
            relieve=lambda zone: self.courier.pool.relieve(zone),
        )

    def problems(self) -> tuple[str, ...]:
        """Return the problems that prevent mail from being sent, as sentences for operators."""
        limits = None if self.limits is None else self.limits.problem
        found = (self.resolver.watch.problem(), *self.sources.problems(), *self.logins.problems(), limits)
        return tuple(filter(None, found))

    async def start(self) -> None:
        """Start the background tasks."""
        if self.limits is not None:
            await self.limits.start()
        if self._captures:
            self._capturing.start()

    async def close(self) -> None:
        """Close the connections to peers with QUIT, and end the background tasks."""
        await self.courier.pool.close()
        await self._capturing.close()
        if self.limits is not None:
            await self.limits.close()
        self._signing.close()
        await self.logins.close()
        await self._sts.close()
        await self.resolver.close()
