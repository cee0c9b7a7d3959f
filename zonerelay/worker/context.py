"""Defines the objects that the parts of a worker share."""

from collections.abc import Mapping
from random import Random

import msgspec

from zonerelay.model.clock import Clock
from zonerelay.process.setup import Identity
from zonerelay.routing.mta_sts import HTTPS_PORT
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor


class WorkerContext(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that the parts of a worker share. `environment` may contain secrets
    (`config/credentials/secrets.py`). `policy_port` is the port of MTA-STS policy servers.
    """

    hostname: str
    identity: Identity
    environment: Mapping[str, str]
    redactor: Redactor
    events: Events
    clock: Clock
    random: Random
    policy_port: int = HTTPS_PORT
