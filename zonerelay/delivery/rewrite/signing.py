"""Where signatures are made: the slow ones in a thread, if there is a core for it; the others on the loop.

RSA with 2048 bits takes as long as everything else that a small message needs, and leaves Python's lock
alone meanwhile (from cryptography 49 on), so a thread lets the loop go on. It costs some CPU more; where the
loop has the only core that is a loss. Everything else is done before a thread would have begun
(tests/bench/dkim.py has the figures).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from zonerelay.message.dkim.signature import DkimKey, unsigned_fields


class Signing:
    """One per worker. `beside`: use a thread. It begins with the first slow signature."""

    def __init__(self, *, beside: bool) -> None:
        self._beside = beside
        self._thread: ThreadPoolExecutor | None = None

    async def sign(self, header: bytes, body_hash: str, keys: Sequence[DkimKey], *, now: float) -> bytes:
        """As `message.dkim.sign`."""
        fields = []
        for each in unsigned_fields(header, body_hash, keys, now=now):
            if self._beside and each.key.slow:
                signature = await self._in_thread(each.key, each.digest)
            else:
                signature = each.key.sign(each.digest)
            fields.append(each.signed(signature))
        return b"".join(fields)

    async def _in_thread(self, key: DkimKey, digest: bytes) -> bytes:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dkim")
        return await asyncio.get_running_loop().run_in_executor(self._thread, key.sign, digest)

    def close(self) -> None:
        """What is waiting there is not signed any more."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
