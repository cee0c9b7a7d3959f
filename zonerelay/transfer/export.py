"""Reads what an operator means out of a store, message by message. Changes nothing in it.

Memory: eight octets per message.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from zonerelay.model.message_id import LENGTH, MessageId
from zonerelay.queue.operator.filters import Matcher
from zonerelay.store.contract import MessageNotFoundError, Store, StoreError
from zonerelay.transfer.files import Target
from zonerelay.transfer.stored import Stored, Unusable

SHEET_SIZE = 4096
"""Octets that a sheet takes at most, as a rule."""
_PAGE = 500


@dataclass(slots=True)
class Survey:
    """The messages that are meant, and their sizes."""

    ids: array[int] = field(default_factory=lambda: array("Q"))
    octets: int = 0


async def survey(store: Store, matcher: Matcher, now: float) -> Survey:
    """Raises StoreError."""
    found = set[int]()
    async for delivery in store.scan(wanted=matcher.recipient):
        if matcher.matches(delivery, delivery.state(now)):
            found.add(int(delivery.message_id, 16))
    ids = sorted(found)
    meant = Survey()
    for start in range(0, len(ids), _PAGE):
        page = ids[start : start + _PAGE]
        messages = await store.read_messages([_id(number) for number in page])
        for number in page:
            message = messages.get(_id(number))
            if not matcher.needs_message or matcher.matches_sender(message):
                meant.ids.append(number)
                meant.octets += SHEET_SIZE + (0 if message is None else message.size)
    return meant


def _id(number: int) -> MessageId:
    return MessageId(f"{number:0{LENGTH}x}")


async def export(
    store: Store,
    meant: Survey,
    matcher: Matcher,
    now: float,
    target: Target,
    *,
    saw: Callable[[int, Unusable | None], None],
) -> None:
    """`saw` hears how many deliveries of each message were written, or what is wrong with it.

    Raises OSError.
    """
    for number in meant.ids:
        identity = _id(number)
        try:
            open_ones = await store.deliveries_of(identity)
            deliveries = tuple(each for each in open_ones if matcher.matches(each, each.state(now)))
            message = await store.read_message(identity)
            if deliveries:
                stored = Stored(
                    key=identity,
                    message=message,
                    deliveries=deliveries,
                    body=lambda identity=identity: store.read_body(identity),  # type: ignore[misc]
                )
                await target.add(stored)
            saw(len(deliveries), None)
        except MessageNotFoundError:
            saw(0, None)
        except StoreError as error:
            saw(0, Unusable(identity, str(error)))
