"""Opening the S3 store: settings become a client; what the service can do is tried; the queue is joined."""

from __future__ import annotations

import os
from collections.abc import Mapping

from zonerelay.config.tables.models import Addressing, S3Settings
from zonerelay.store.common.queue_mark import QueueMark
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.s3 import probe as s3_probe
from zonerelay.store.s3.client import Bucket, BucketAccess
from zonerelay.store.s3.objects import Abilities, Objects
from zonerelay.store.s3.records import Keys
from zonerelay.store.s3.store import S3Store, S3Terms
from zonerelay.store.surroundings import Surroundings, secret_of


async def open_s3(
    settings: S3Settings,
    around: Surroundings,
    mark: QueueMark,
) -> S3Store:
    """Raises StoreOpenError."""
    bucket = Bucket(_access(settings, around.environment))
    keys = Keys(settings.prefix)
    try:
        await bucket.open()
        # A name that no other relay tries at the same moment.
        abilities = await s3_probe.find_out(
            bucket, keys, f"{around.clock.now():.6f}-{around.clock.monotonic():.6f}-{os.getpid()}"
        )
        objects = Objects(bucket, keys, _checked(settings, abilities))
        store = S3Store(
            objects,
            S3Terms(lease=settings.lease, alone=not settings.shared, alerts=bool(settings.queue_url)),
            around,
            mark,
        )
        await store.start()
    except BaseException as error:
        await bucket.close()
        if isinstance(error, StoreError) and not isinstance(error, StoreOpenError):
            raise StoreOpenError(f"[s3] bucket {settings.bucket}: {error}") from error
        raise
    return store


def _checked(settings: S3Settings, abilities: Abilities) -> Abilities:
    if not settings.shared:
        # One relay alone decides what is written; a condition could only stand in its way.
        return Abilities(conditional_put=False, conditional_delete=False)
    if not abilities.conditional_put:
        raise StoreOpenError(
            "[s3] the service has no conditional writes (If-Match, If-None-Match), so relays cannot "
            "share a queue on it: with shared = false one relay alone can use it"
        )
    return abilities


def _access(settings: S3Settings, environment: Mapping[str, str]) -> BucketAccess:
    virtual = settings.addressing is Addressing.VIRTUAL
    if settings.addressing is Addressing.AUTO:
        virtual = not settings.endpoint_url
    return BucketAccess(
        bucket=settings.bucket,
        endpoint_url=settings.endpoint_url,
        region=settings.region or ("us-east-1" if settings.endpoint_url else ""),
        virtual=virtual,
        access_key=settings.access_key,
        secret_key=secret_of("s3.secret_key", settings.secret_key, environment),
        ca_file=str(settings.ca_file) if settings.ca_file else "",
        timeout=settings.timeout,
        connections=settings.max_requests,
        queue_url=settings.queue_url,
        queue_endpoint_url=settings.queue_endpoint_url,
    )
