"""The file system's errors in the store's words."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from zonerelay.store.contract import StoreError, StoreFullError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """What the file system refuses becomes a StoreError that names the file."""
    try:
        yield
    except OSError as error:
        raise store_error(error) from error


def store_error(error: OSError) -> StoreError:
    kind = StoreFullError if error.errno in _FULL else StoreError
    return kind(f"the queue directory: {error}")
