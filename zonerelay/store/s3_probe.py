"""What the service can do, found out by trying: conditions on writing and on removing, and listing at once.

A service that does not know a condition may ignore it, so it is tried that a condition which does not hold is
refused, and that nothing has changed.
"""

from __future__ import annotations

from zonerelay.store.base import StoreError, StoreOpenError
from zonerelay.store.s3_client import Bucket, ConflictError, MissingError, RefusedError, UnsureError
from zonerelay.store.s3_objects import Abilities
from zonerelay.store.s3_records import Keys

_WRONG = '"00000000000000000000000000000000"'


async def find_out(bucket: Bucket, keys: Keys, name: str) -> Abilities:
    """`name` is nobody else's. Raises StoreOpenError when the bucket cannot even be written and read."""
    key = keys.probes + name
    try:
        await bucket.put(key, b"1")
        if (await bucket.get(key)).data != b"1":
            raise StoreOpenError("[s3] the service does not give back what was written")
    except MissingError as error:
        raise StoreOpenError("[s3] an object that was just written is not there") from error
    conditional_put = await _is_refused(bucket, key, new=True) and await _is_refused(
        bucket, key, match=_WRONG
    )
    conditional_delete = conditional_put and await _is_kept(bucket, key)
    await bucket.delete(key)
    return Abilities(conditional_put, conditional_delete)


async def _is_refused(bucket: Bucket, key: str, *, match: str = "", new: bool = False) -> bool:
    try:
        await bucket.put(key, b"2", match=match, new=new)
    except ConflictError:
        return (await bucket.get(key)).data == b"1"
    except (RefusedError, UnsureError):
        return False  # it says that it does not know the condition (501, 400)
    return False


async def _is_kept(bucket: Bucket, key: str) -> bool:
    try:
        await bucket.delete(key, match=_WRONG)
    except ConflictError:
        pass
    except (MissingError, StoreError):
        return False
    try:
        return (await bucket.get(key)).data == b"1"
    except MissingError:
        return False
