"""The wiring of the sending side: a router and a courier with the tables that both use, made from the
settings.

`worker` builds one and hands it new settings on reload; everything in here that depends on them is told by
`configure`, in one place. Raises ValueError when settings that were checked cannot be used after all (a key
that cannot be read): at start that ends the relay, on reload the old ones stay.
"""

from __future__ import annotations

import os
import random as random_module
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay.config.endpoints import CAPTURE, parse_listen
from zonerelay.config.settings import Settings, read_key_file, srs_secrets, upgraded_at
from zonerelay.delivery.auth.logins import Logins, senders_of, token_directory
from zonerelay.delivery.batch.capturing import Capturing
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.delivery.rewrite.rendering import Renderer
from zonerelay.delivery.rewrite.signing import Signing
from zonerelay.delivery.rewrite.stored_pieces import CheckClaim, ReadBody
from zonerelay.delivery.source.selection import SourceSelection
from zonerelay.limits.worker.keeper import LimitKeeper
from zonerelay.message.srs import Srs
from zonerelay.model.clock import Clock
from zonerelay.model.outcome import Outcome
from zonerelay.queue.scheduler import Scheduler
from zonerelay.routing.addresses import OwnAddresses
from zonerelay.routing.destinations.batch import Batch
from zonerelay.routing.destinations.destination_table import DestinationTable
from zonerelay.routing.destinations.mx import MxRouter
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.routing.idna import ascii_domain
from zonerelay.routing.mta_sts.files import StsFiles, policy_directory
from zonerelay.routing.mta_sts.policies import HTTPS_PORT, StsPolicies
from zonerelay.telemetry.events.events import Events
from zonerelay.worker.limits import build_shared_limits

if TYPE_CHECKING:
    from zonerelay.message.dkim.keys import DkimKeys


class Sending:
    """The sending side of one worker. `environment` may hold secrets (`config/credentials/secrets.py`);
    `policy_port` is the port of the servers of MTA-STS policies. `limits_socket` is the socket of limits that
    workers share; `holder` is a name that no other worker has had.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        hostname: str,
        read_body: ReadBody,
        check_claim: CheckClaim,
        events: Events,
        clock: Clock,
        random: random_module.Random,
        environment: Mapping[str, str],
        policy_port: int = HTTPS_PORT,
        limits_socket: Path | None = None,
        holder: str = "",
    ) -> None:
        self._events = events
        self._environment = environment
        self._clock = clock
        self.dkim_keys: DkimKeys | None = None
        self.srs: Srs | None = None
        self.resolver = Resolver(settings.dns, clock, observer=events.name_servers)
        files = StsFiles(policy_directory(settings))
        self._sts = StsPolicies(self.resolver, events.sts, clock, files=files, port=policy_port)
        self.router = MxRouter(
            self.resolver,
            hostname=hostname,
            clock=clock,
            random=random,
            own_addresses=OwnAddresses(parse_listen(each.address) for each in settings.listener),
            sts=self._sts,
        )
        self.shared = build_shared_limits(
            settings,
            socket=limits_socket,
            holder=holder,
            environment=environment,
            events=events.limits,
            clock=clock,
        )
        self.sources = SourceSelection(clock, events)
        self.logins = Logins(clock, events.smarthosts, environment, directory=token_directory(settings))
        events.metrics.smarthosts.attach(self.logins.login_states)
        self._signing = Signing(beside=len(os.sched_getaffinity(0)) > 1)
        self.renderer = Renderer(read_body=read_body, events=events, clock=clock, signing=self._signing)
        self.courier = SmtpCourier(
            settings.delivery,
            hostname=hostname,
            addresses=self.resolver,
            sources=self.sources,
            logins=self.logins,
            read_body=read_body,
            check_claim=check_claim,
            renderer=self.renderer,
            observe_tls=events.outbound_tls,
            skipped=events.reply_without_code,
            transcripts=events.transcripts,
            clock=clock,
            random=random,
            shared=None if self.limits is None else self.limits.zone,
        )
        self._capturing = Capturing(
            settings, read_body=read_body, check_claim=check_claim, clock=clock, trouble=events.trouble
        )
        self.configure(settings)

    async def deliver(self, batch: Batch) -> Sequence[Outcome]:
        """As `Courier` has it: by SMTP, or to captured mail."""
        if batch.zone.next_hop == CAPTURE:
            return await self._capturing.deliver(batch)
        return await self.courier.deliver(batch)

    def configure(self, settings: Settings) -> None:
        """Go by these settings from now on. Raises ValueError before anything has changed."""
        destinations = DestinationTable(settings.destination)
        dkim_keys = build_dkim_keys(settings)
        srs = build_srs(settings, self._environment)
        senders = senders_of(settings.credential)
        if dkim_keys is not None:
            for note in dkim_keys.advice(self._clock.now()):
                self._events.lifecycle("advice", note=note)
        self.dkim_keys, self.srs = dkim_keys, srs
        largest = max((listener.max_header_size for listener in settings.listener), default=0)
        self.renderer.configure(keys=dkim_keys, srs=srs, max_header_size=largest)
        self.router.configure(destinations)
        self.sources.configure(settings.source)
        self._events.metrics.source_refusals.declare((source.name,) for source in settings.source)
        self.logins.configure(settings.credential, senders, settings.zone)
        self._captures = any(zone.next_hop == CAPTURE for zone in settings.zone)

    @property
    def limits(self) -> LimitKeeper | None:
        """The keeper of the limits that this worker shares with others, `None` where it shares none."""
        return None if self.shared is None else self.shared.keeper

    def attach(self, scheduler: Scheduler) -> None:
        """The scheduler that hands out the mail."""
        self.logins.resume = scheduler.resume
        scheduler.resumed = self.logins.forgive
        if self.shared is not None:
            self.shared.attach(scheduler, self.courier)

    def problems(self) -> tuple[str, ...]:
        """Returns the problems that keep mail from going out, in sentences for operators."""
        limits = () if self.shared is None else self.shared.problems()
        outage = self.resolver.problem()
        return (*([outage] if outage else []), *self.sources.problems(), *self.logins.problems(), *limits)

    async def start(self) -> None:
        """Begin what runs in the background."""
        if self.shared is not None:
            await self.shared.keeper.start()
        if self._captures:
            self._capturing.start()

    async def close(self) -> None:
        """Say goodbye to peers, end what runs in the background."""
        await self.courier.close()
        await self._capturing.close()
        if self.shared is not None:
            await self.shared.keeper.close()
        self._signing.close()
        await self.logins.close()
        await self._sts.close()
        await self.resolver.close()


def build_dkim_keys(settings: Settings) -> DkimKeys | None:
    """`None` without any [[dkim]]: nothing of it is imported then."""
    if not settings.dkim:
        return None
    from zonerelay.message.dkim.keys import DkimKeys  # noqa: PLC0415

    return DkimKeys(settings.dkim, read=read_key_file, ascii_domain=ascii_domain)


def build_srs(settings: Settings, environment: Mapping[str, str]) -> Srs | None:
    """`None` without a domain in [srs]."""
    if not settings.srs.domain:
        return None
    secrets = srs_secrets(settings.srs, environment)
    return Srs(settings.srs, secrets, upgraded=upgraded_at(settings.spool.path))
