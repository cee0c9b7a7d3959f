"""Opens the S3 store: makes the client, tries which conditions the service has, and joins the queue.

A service that does not know a condition may ignore it. So `probe` counts a condition as known only when the
service refuses a write or a removal that the condition does not allow, and the object stays what it was.
"""

from __future__ import annotations

import os

from zonerelay.config.settings import S3Settings
from zonerelay.store.common.queue_mark import QueueMark
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.s3.client import Bucket, ConflictError, MissingError, RefusedError, UnsureError
from zonerelay.store.s3.objects import Abilities, Objects
from zonerelay.store.s3.records import Keys
from zonerelay.store.s3.store import S3Store
from zonerelay.store.surroundings import Surroundings, secret_of

_WRONG = '"00000000000000000000000000000000"'


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
        # A name that no other relay tries at the same moment.
        abilities = await probe(
            bucket, keys, f"{around.clock.now():.6f}-{around.clock.monotonic():.6f}-{os.getpid()}"
        )
        objects = Objects(bucket, keys, _checked(settings, abilities))
        store = S3Store(objects, settings, around, mark)
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


async def probe(bucket: Bucket, keys: Keys, name: str) -> Abilities:
    """`name` is unique to this relay. Raises StoreError when the bucket cannot even be written and read."""
    key = keys.probes + name
    await bucket.put(key, b"1")
    puts = await _is_refused(bucket, key, new=True) and await _is_refused(bucket, key, match=_WRONG)
    is_kept, deletes = await _try_delete(bucket, key) if puts else (False, False)
    if not is_kept:
        await bucket.put(key, b"1")
    if await _read(bucket, key) != b"1":
        raise StoreOpenError("[s3] the service does not give back what was written")
    await bucket.delete(key)
    return Abilities(conditional_put=puts, conditional_delete=deletes)


async def _is_refused(bucket: Bucket, key: str, *, match: str = "", new: bool = False) -> bool:
    """Whether an object is left alone that a condition does not fit."""
    try:
        await bucket.put(key, b"2", match=match, new=new)
    except ConflictError:
        return True
    except (RefusedError, UnsureError):
        return False  # it says that it does not know the condition (400, 501)
    return False


async def _try_delete(bucket: Bucket, key: str) -> tuple[bool, bool]:
    """Whether the object is still there, and whether a refusal kept it."""
    try:
        await bucket.delete(key, match=_WRONG)
    except ConflictError:
        return True, await _read(bucket, key) == b"1"
    except (RefusedError, UnsureError):
        return True, False
    except MissingError:
        return False, False
    return False, False


async def _read(bucket: Bucket, key: str) -> bytes:
    try:
        return (await bucket.get(key)).data
    except MissingError:
        return b""
