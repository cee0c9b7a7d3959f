"""Opens the S3 store: makes the client, tries which conditions the service has, and joins the queue."""

from __future__ import annotations

import os

from zonerelay.config.settings import S3Settings
from zonerelay.store.common.queue_mark import QueueMark
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.s3.client import Bucket
from zonerelay.store.s3.objects import Objects, check_format, probe
from zonerelay.store.s3.records import Keys
from zonerelay.store.s3.store import S3Store
from zonerelay.store.surroundings import Surroundings, secret_of


async def open_s3(
    settings: S3Settings,
    around: Surroundings,
    mark: QueueMark,
) -> S3Store:
    """Raises StoreOpenError."""
    bucket = Bucket(settings, secret_of("s3.secret_key", settings.secret_key, around.environment))
    keys = Keys(settings.prefix)
    try:
        await bucket.open()
        await check_format(bucket, keys)  # before anything is written
        # A name that no other relay tries at the same moment.
        name = f"{around.clock.now():.6f}-{around.clock.monotonic():.6f}-{os.getpid()}"
        abilities = await probe(bucket, keys, name, shared=settings.shared)
        objects = Objects(bucket, keys, abilities)
        store = S3Store(objects, settings, around, mark)
        await store.start()
    except BaseException as error:
        await bucket.close()
        if isinstance(error, StoreError) and not isinstance(error, StoreOpenError):
            raise StoreOpenError(f"[s3] bucket {settings.bucket}: {error}") from error
        raise
    return store
