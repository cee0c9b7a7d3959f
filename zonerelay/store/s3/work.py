"""Changes on their way to one message, and how a settle is cut into what belongs together.

What a report is about is one group with the report: all or none. Outcomes of messages that have nothing to
do with each other land each by themselves: after a crash one of them may have to be found out again, as
after any settle whose end nobody heard of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import Change, Finish, StoreError, Submit

OpenDeliveries = Mapping[DeliveryKey, Delivery]
Decide = Callable[[OpenDeliveries], dict[DeliveryKey, Delivery | None]]
"""From the deliveries as they are to those that change, `None` for what leaves."""


@dataclass(slots=True, eq=False)
class MessageJob:
    """`keys` is what it may change. `settles`: it ends the claims on them. `reports` and `others` (changes of
    messages of this relay's) are decided together with it.
    """

    keys: Sequence[DeliveryKey]
    decide: Decide
    settles: bool = False
    reports: Sequence[Submit] = ()
    others: Mapping[DeliveryKey, Delivery | None] = field(default_factory=dict)
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, error: BaseException | None = None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
            return
        refusal = type(error)(str(error)) if isinstance(error, StoreError) else StoreError(repr(error))
        refusal.__cause__ = error
        self.done.set_exception(refusal)
        self.done.exception()  # nobody may be waiting any more: that is no news for the loop


@dataclass(slots=True)
class Group:
    """Changes that belong together, by message, the smallest id first: it leads."""

    changes: dict[DeliveryKey, Delivery | None] = field(default_factory=dict)
    reports: list[Submit] = field(default_factory=list)

    @property
    def ids(self) -> list[MessageId]:
        return sorted({key.message_id for key in self.changes})

    def of(self, message_id: MessageId) -> dict[DeliveryKey, Delivery | None]:
        return {key: new for key, new in self.changes.items() if key.message_id == message_id}

    def others(self, message_id: MessageId) -> dict[DeliveryKey, Delivery | None]:
        return {key: new for key, new in self.changes.items() if key.message_id != message_id}


def to_decide(wanted: Mapping[DeliveryKey, Delivery | None]) -> Decide:
    """What no longer exists is left alone."""
    return lambda state: {key: new for key, new in wanted.items() if key in state}


def groups_of(changes: Sequence[Change]) -> list[Group]:
    wanted: dict[DeliveryKey, Delivery | None] = {}
    for change in changes:
        if isinstance(change, Submit):
            continue
        key = change.delivery.key
        if isinstance(change, Finish):
            wanted[key] = None
        elif key not in wanted or wanted[key] is not None:  # it has left already
            wanted[key] = change.delivery
    found: dict[MessageId, Group] = {}
    for key, new in wanted.items():
        found.setdefault(key.message_id, Group()).changes[key] = new
    apart: list[Group] = []
    for change in changes:
        if isinstance(change, Submit):
            ids = {key.message_id for key in change.about} & found.keys() if change.about else found.keys()
            apart += _join(found, list(ids), change)
    return _distinct([*found.values(), *apart])


def _join(found: dict[MessageId, Group], ids: Iterable[MessageId], report: Submit) -> list[Group]:
    """Make one group of these; a report about nothing that is here is one by itself."""
    joined = Group(reports=[report])
    members = _distinct(found[each] for each in ids)
    if not members:
        return [joined]
    for group in members:
        joined.changes |= group.changes
        joined.reports += group.reports
    for each in joined.ids:
        found[each] = joined
    return []


def _distinct(groups: Iterable[Group]) -> list[Group]:
    return list({id(group): group for group in groups}.values())
