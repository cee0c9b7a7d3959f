"""Selects the deliveries that match an operator's filter. Pure. Addresses are compared case-insensitively."""

from collections.abc import Callable

import msgspec

from zonerelay.model.delivery import Delivery, DeliveryState, QueueKind
from zonerelay.model.envelope import Mailbox, Message, MessageId, Priority, domain_of
from zonerelay.model.pattern import is_like
from zonerelay.store.contract import everybody


class QueueFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions with which an operator selects deliveries. Every given condition must hold; an empty
    filter matches everything.

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

    @property
    def needs_message(self) -> bool:
        """Whether the filter has a condition about the sender, which `matches_sender` checks."""
        return self.sender is not None

    @property
    def may_match(self) -> Callable[[str], bool]:
        """Return a function that tells whether deliveries to a recipient can match the filter."""
        return everybody if self.recipient is self.domain is None else self._matches_recipient

    def matches(self, delivery: Delivery, now: float) -> bool:
        """Return whether a delivery matches, apart from its state and its sender, which only the message
        contains.
        """
        age = now - delivery.created
        zone = None if delivery.queue.kind is QueueKind.WEBHOOK else delivery.zone
        return (
            self.zone in (None, zone)
            and self.priority in (None, delivery.priority)
            and (self.message_ids is None or delivery.message_id in self.message_ids)
            and (self.min_age is None or age >= self.min_age)
            and (self.max_age is None or age <= self.max_age)
            and self.may_match(delivery.recipient)
            and (self.reply_text is None or self.reply_text.casefold() in _last_reply(delivery))
        )

    def matches_state(self, state: DeliveryState) -> bool:
        """Return whether deliveries in this state match."""
        return self.state in (None, state)

    def matches_sender(self, message: Message | None) -> bool:
        if self.sender is None:
            return True
        sender = self.sender.removeprefix("<").removesuffix(">")
        return message is not None and is_like(sender, message.envelope.sender)

    def _matches_recipient(self, recipient: str) -> bool:
        return is_like(self.recipient, recipient) and is_like(self.domain, domain_of(Mailbox(recipient)))


ALL = QueueFilter()


def _last_reply(delivery: Delivery) -> str:
    return "" if delivery.last is None else str(delivery.last.reply).casefold()
