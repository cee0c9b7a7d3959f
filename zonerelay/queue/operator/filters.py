"""Selects the deliveries that match an operator's filter. Pure. Addresses are compared case-insensitively."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from zonerelay.model.address import Mailbox, domain_of
from zonerelay.model.delivery import Delivery, DeliveryState
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import Priority, QueueKind
from zonerelay.queue.orders.order import is_like
from zonerelay.store.contract import everybody


class QueueFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A filter that selects deliveries. Every given condition must hold; an empty filter matches everything.

    `*` in `sender`, `recipient` and `domain` stands for any text. The sender `""` or `<>` is the null sender.
    Ages are seconds since acceptance. `reply_text` is searched for in the last reply. Mail in the bin matches
    only with `in_bin`, or with its state.
    """

    sender: str | None = None
    recipient: str | None = None
    domain: str | None = None
    zone: str | None = None
    priority: Priority | None = None
    state: DeliveryState | None = None
    min_age: float | None = None
    max_age: float | None = None
    reply_text: str | None = None
    message_ids: frozenset[MessageId] | None = None
    in_bin: bool = False

    @property
    def reaches_bin(self) -> bool:
        return self.in_bin or self.state is DeliveryState.DROPPED


class FilterMatcher:
    """A compiled filter, for matching many deliveries."""

    def __init__(self, wanted: QueueFilter, now: float) -> None:
        self._wanted = wanted
        self._now = now
        sender = wanted.sender
        self._sender = None if sender is None else sender.removeprefix("<").removesuffix(">")
        self._reply_text = None if wanted.reply_text is None else wanted.reply_text.casefold()
        self.needs_message = sender is not None
        is_everybody = wanted.recipient is None and wanted.domain is None
        self.recipient: Callable[[str], bool] = everybody if is_everybody else self._matches_recipient
        """Returns whether deliveries to a recipient can match at all."""

    def matches(self, delivery: Delivery) -> bool:
        """Return whether a delivery matches, apart from its state and its sender, which only the message
        contains.
        """
        wanted = self._wanted
        return (
            (
                wanted.zone is None
                or (delivery.queue.kind is not QueueKind.WEBHOOK and delivery.zone == wanted.zone)
            )
            and (wanted.priority is None or delivery.priority is wanted.priority)
            and (wanted.message_ids is None or delivery.message_id in wanted.message_ids)
            and self._age_matches(self._now - delivery.created)
            and self.recipient(delivery.recipient)
            and (self._reply_text is None or self._reply_text in _last_reply(delivery))
        )

    def matches_state(self, state: DeliveryState) -> bool:
        """Return whether deliveries in this state match."""
        return self._wanted.state in (None, state)

    def _matches_recipient(self, recipient: str) -> bool:
        wanted = self._wanted
        return is_like(wanted.recipient, recipient) and is_like(wanted.domain, domain_of(Mailbox(recipient)))

    def matches_sender(self, message: Message | None) -> bool:
        if self._sender is None:
            return True
        return message is not None and is_like(self._sender, message.envelope.sender)

    def _age_matches(self, age: float) -> bool:
        wanted = self._wanted
        if wanted.min_age is not None and age < wanted.min_age:
            return False
        return wanted.max_age is None or age <= wanted.max_age


def _last_reply(delivery: Delivery) -> str:
    return "" if delivery.last is None else str(delivery.last.reply).casefold()
