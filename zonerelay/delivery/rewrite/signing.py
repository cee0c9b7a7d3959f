"""Makes DKIM signatures: slow ones in a thread if a core is free for it, others on the event loop.

RSA with 2048 bits takes as long as all other work for a small message, and releases Python's lock meanwhile
(from cryptography 49 on), so a thread lets the loop continue. The thread costs some CPU, which is a loss
where the loop has the only core. All work but the signature is done before the thread starts
(tests/bench/dkim.py has the figures).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from zonerelay.message.dkim.signature import DkimKey, unsigned_fields


class Signing:
    """One per worker. `beside`: use a thread, which starts with the first slow signature."""

    def __init__(self, *, beside: bool) -> None:
        self._beside = beside
        self._thread: ThreadPoolExecutor | None = None

    async def sign(self, header: bytes, body_hash: str, keys: Sequence[DkimKey], *, now: float) -> bytes:
        """Returns the DKIM-Signature fields, as `message.dkim.signature.sign` does."""
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
        """Ends the thread. Waiting signatures are cancelled."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
