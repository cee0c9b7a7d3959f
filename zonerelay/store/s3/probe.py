"""What the service can do, found out by trying: conditions on writing and on removing.

A service that does not know a condition may ignore it, so what counts is that a condition which does not
hold is refused, and that the object is still what it was.
"""

from __future__ import annotations

from zonerelay.store.contract import StoreOpenError
from zonerelay.store.s3.client import Bucket, ConflictError, MissingError, RefusedError, UnsureError
from zonerelay.store.s3.objects import Abilities
from zonerelay.store.s3.records import Keys

_WRONG = '"00000000000000000000000000000000"'


async def find_out(bucket: Bucket, keys: Keys, name: str) -> Abilities:
    """`name` is nobody else's. Raises StoreError when the bucket cannot even be written and read."""
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
    """Is the object still there, and was it a refusal that kept it?"""
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
