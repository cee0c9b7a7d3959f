"""Takes in a reply when it comes, and fails a wait, also when the caller no longer waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from zonerelay.store.contract import StoreError

Asked = TypeVar("Asked")
Learned = TypeVar("Learned")


def _ignore(_: object) -> None:
    """The caller has no use for it."""


def then(
    asked: asyncio.Future[Asked],
    take: Callable[[Asked], Learned],
    failed: Callable[[StoreError], None] = _ignore,
    unwanted: Callable[[Learned], None] = _ignore,
) -> asyncio.Future[Learned]:
    """What `take` makes of the answer, in the turn of the loop in which it comes: answers keep their order.

    `failed` hears of a StoreError, `take`'s own included; `unwanted` of a result whose caller has left.
    """
    learned: asyncio.Future[Learned] = asked.get_loop().create_future()

    def answered(future: asyncio.Future[Asked]) -> None:
        try:
            result = take(future.result())
        except Exception as broken:  # noqa: BLE001 - the caller must hear of a bug, too
            error = broken if isinstance(broken, StoreError) else StoreError(f"unexpected answer: {broken!r}")
            failed(error)
            if not learned.done():
                learned.set_exception(error)
                learned.exception()  # retrieved here: the caller may have left
        else:
            if learned.done():
                unwanted(result)
            else:
                learned.set_result(result)

    asked.add_done_callback(answered)
    return learned


def refuse(waiting: asyncio.Future[Any], error: BaseException) -> None:  # Any: any result
    """Fails the future with a StoreError of its own: each caller that raises one adds its traceback. The
    caller may have left; every error that is no StoreError becomes one.
    """
    if not waiting.done():
        refusal = type(error)(*error.args) if isinstance(error, StoreError) else StoreError(repr(error))
        refusal.__cause__ = error
        waiting.set_exception(refusal)
        waiting.exception()  # without a caller the loop must not complain
